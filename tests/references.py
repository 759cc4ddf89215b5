"""Where it is written what other loops do: with time, with a descriptor that changes hands."""

import pytest

UVLOOP_CLOCK = "https://github.com/MagicStack/uvloop/issues/359"
STALE = "https://github.com/python/cpython/issues/88968"
UVLOOP_POLL = "https://github.com/MagicStack/uvloop/blob/v0.21.0/uvloop/handles/poll.pyx"
# "It is not okay to close a file descriptor while it is being polled by an active poll handle."
LIBUV_POLL = "https://docs.libuv.org/en/v1.x/poll.html"
SOCK_DOC = ("https://docs.python.org/3/library/asyncio-eventloop.html"
            "#working-with-socket-objects-directly")
BY_OUR_HANDS = "https://docs.python.org/3/library/asyncio-protocol.html#transports"

aborts = pytest.mark.uvloop_differs("libuv aborts the process", LIBUV_POLL, run=False)
