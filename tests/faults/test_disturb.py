"""The tool itself: what is put into the ring comes out of it, as a completion of the kernel's."""

import asyncio
import errno

import pytest
from helpers import assert_same, make_pair, pattern, read_exactly, until

import uringloop
from uringloop import _core

pytestmark = pytest.mark.skipif(
    not hasattr(_core, "disturb_answer") or bool(uringloop.unavailable_reason()),
    reason="needs the proving build (make faults) and io_uring")


class Ended(asyncio.Protocol):
    error = "not yet"

    def connection_lost(self, exc):
        self.error = exc


def run(main):
    loop = uringloop.new_event_loop(uringloop.LoopOptions(backend="io_uring"))
    try:
        return loop.run_until_complete(asyncio.wait_for(main(loop), 40))
    finally:
        _core.disturb_nothing()
        loop.close()


def test_a_request_gets_the_answer_that_was_chosen():
    async def main(loop):
        ours, peer = make_pair("tcp")
        with peer:
            _core.disturb_answer("RECV", -errno.EHOSTUNREACH)
            _, protocol = await loop.create_connection(Ended, sock=ours)
            await until(lambda: protocol.error != "not yet")
            assert protocol.error.errno == errno.EHOSTUNREACH
            assert _core.disturbed() == [1]

    run(main)


def test_sends_are_made_shorter_and_submits_are_refused():
    async def main(loop):
        # Two connections, as a single small send is a system call of its own.
        pairs = [make_pair("tcp") for _ in range(2)]
        transports = [(await loop.create_connection(asyncio.Protocol, sock=ours))[0]
                      for ours, _ in pairs]
        with pairs[0][1], pairs[1][1]:
            _core.disturb_shorten("SEND", 10, times=5)
            _core.disturb_refuse(-errno.EAGAIN, times=5)
            for transport in transports:
                transport.write(pattern(1000))
            await until(lambda: loop.stats().bytes_sent == 2000)
            for _, peer in pairs:
                assert_same(read_exactly(peer, 1000), pattern(1000))
            assert _core.disturbed() == [5, 5]
            for transport in transports:
                transport.abort()

    run(main)
