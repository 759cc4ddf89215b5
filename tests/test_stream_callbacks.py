"""Stream transports: exceptions out of the protocol's callbacks, and the contexts they run in."""

import asyncio
import contextvars
import socket

import pytest
from helpers import (
    BufferedRecorder,
    Recorder,
    connected,
    has_ended,
    in_thread,
    serving,
    socket_pair,
    ticks,
    until,
)

# Exceptions out of the protocol


class Failing(Recorder):
    """Raises out of the one method that the test names."""

    method = None

    def fail(self, method):
        if self.method == method:
            raise ZeroDivisionError(method)

    def connection_made(self, transport):
        super().connection_made(transport)
        self.fail("connection_made")

    def data_received(self, data):
        super().data_received(data)
        self.fail("data_received")

    def eof_received(self):
        super().eof_received()
        self.fail("eof_received")

    def connection_lost(self, exc):
        super().connection_lost(exc)
        self.fail("connection_lost")


class BufferedFailing(BufferedRecorder):
    method = None

    def get_buffer(self, sizehint):
        if self.method == "get_buffer":
            raise ZeroDivisionError(self.method)
        if self.method == "empty buffer":
            return bytearray()
        return super().get_buffer(sizehint)

    def buffer_updated(self, nbytes):
        super().buffer_updated(nbytes)
        if self.method == "buffer_updated":
            raise ZeroDivisionError(self.method)


def failing(method, base=Failing):
    return type("Failing_" + method.replace(" ", "_"), (base,), {"method": method})


FATAL = [
    ("data_received", Failing),
    ("eof_received", Failing),
    ("get_buffer", BufferedFailing),
    ("buffer_updated", BufferedFailing),
]


@pytest.mark.uvloop_differs(
    "has one message for all of them",
    "https://github.com/MagicStack/uvloop/blob/v0.21.0/uvloop/handles/handle.pyx",
)
@pytest.mark.parametrize("method, base", FATAL, ids=[method for method, _ in FATAL])
async def test_an_exception_out_of_a_receiving_method_ends_the_connection(
    loop, errors, method, base
):
    async with connected(failing(method, base)) as (transport, protocol, peer):
        peer.sendall(b"x")
        if method == "eof_received":
            peer.shutdown(socket.SHUT_WR)
        exception = await protocol.lost()
        assert isinstance(exception, ZeroDivisionError)
        assert await in_thread(has_ended, peer)
        (context,) = errors
        assert context["message"] == f"Fatal error: protocol.{method}() call failed."
        assert context["exception"] is exception
        assert context["transport"] is transport
        assert context["protocol"] is protocol


@pytest.mark.uvloop_differs(
    "has one message for all of them",
    "https://github.com/MagicStack/uvloop/blob/v0.21.0/uvloop/handles/handle.pyx",
)
async def test_an_empty_buffer_ends_the_connection_with_a_runtime_error(loop, errors):
    async with connected(failing("empty buffer", BufferedFailing)) as (_, protocol, peer):
        peer.sendall(b"x")
        exception = await protocol.lost()
        assert isinstance(exception, RuntimeError)
        (context,) = errors
        assert context["message"] == "Fatal error: protocol.get_buffer() call failed."
        assert context["exception"] is exception


@pytest.mark.uvloop_differs(
    "does not start to read",
    "https://github.com/MagicStack/uvloop/blob/v0.21.0/uvloop/handles/basetransport.pyx",
    run=False,
)
async def test_an_exception_out_of_connection_made_leaves_the_connection_open(loop, errors):
    async with connected(failing("connection_made")) as (transport, protocol, peer):
        await ticks()
        (context,) = errors
        assert isinstance(context["exception"], ZeroDivisionError)
        assert "message" in context
        assert not transport.is_closing()
        peer.sendall(b"x")
        assert await protocol.received(1) == b"x"


async def test_an_exception_out_of_connection_lost_still_closes_the_socket(loop, errors):
    async with connected(failing("connection_lost")) as (transport, protocol, peer):
        transport.close()
        await protocol.lost()
        assert await in_thread(has_ended, peer)
        await until(lambda: errors)
        (context,) = errors
        assert isinstance(context["exception"], ZeroDivisionError)
        assert protocol.calls.count("connection_lost") == 1


@pytest.mark.uvloop_differs(
    "reports it as an error of the transport",
    "https://github.com/MagicStack/uvloop/issues/612",
    run=False,
)
@pytest.mark.parametrize("exception", [SystemExit, KeyboardInterrupt])
def test_system_exit_out_of_data_received_leaves_the_loop(loop, exception):
    class Exiting(Recorder):
        def data_received(self, data):
            super().data_received(data)
            raise exception("out")

    with socket_pair() as (ours, peer):
        connecting = loop.create_connection(Exiting, sock=ours)
        transport, protocol = loop.run_until_complete(connecting)
        peer.sendall(b"x")
        with pytest.raises(exception, match="out"):
            loop.run_until_complete(asyncio.sleep(20))
        assert protocol.data == b"x"
        transport.abort()
        loop.run_until_complete(protocol.lost())
        for task in asyncio.all_tasks(loop):
            task.cancel()


# Context variables

variable = contextvars.ContextVar("variable", default="default")


class ContextRecorder(Recorder):
    def __init__(self):
        super().__init__()
        self.seen = {}

    def connection_made(self, transport):
        super().connection_made(transport)
        self.seen["connection_made"] = variable.get()

    def data_received(self, data):
        super().data_received(data)
        self.seen.setdefault("data_received", []).append(variable.get())
        variable.set(data.decode())

    def eof_received(self):
        super().eof_received()
        self.seen["eof_received"] = variable.get()

    def connection_lost(self, exc):
        self.seen["connection_lost"] = variable.get()
        super().connection_lost(exc)


async def test_connection_made_and_data_received_run_in_the_creators_context(loop):
    variable.set("creator")
    async with connected(ContextRecorder) as (_, protocol, peer):
        variable.set("later")
        peer.sendall(b"x")
        await protocol.received(1)
        assert protocol.seen["connection_made"] == "creator"
        assert protocol.seen["data_received"] == ["creator"]
        assert variable.get() == "later"


async def test_what_data_received_sets_is_there_in_the_next_call(loop):
    variable.set("creator")
    async with connected(ContextRecorder) as (_, protocol, peer):
        for number, letter in enumerate(b"abc"):
            peer.sendall(bytes([letter]))
            await protocol.received(number + 1)
        assert protocol.seen["data_received"] == ["creator", "a", "b"]
        peer.close()
        await protocol.lost()
        assert protocol.seen["eof_received"] == "c"
        assert protocol.seen["connection_lost"] == "c"


@pytest.mark.uvloop_differs(
    "runs it in the context of the creator",
    "https://github.com/MagicStack/uvloop/blob/v0.21.0/uvloop/handles/basetransport.pyx",
)
async def test_connection_lost_runs_in_the_context_that_called_close(loop):
    variable.set("creator")
    async with connected(ContextRecorder) as (transport, protocol, _):
        variable.set("closer")
        transport.close()
        variable.set("later")
        await protocol.lost()
        assert protocol.seen["connection_lost"] == "closer"


async def test_server_protocols_run_in_the_context_of_create_server(loop):
    protocols = []

    def factory():
        protocols.append(ContextRecorder())
        return protocols[-1]

    variable.set("server")
    async with serving(factory) as (_, address):
        variable.set("later")
        transport, protocol = await loop.create_connection(Recorder, *address)
        transport.write(b"x")
        await until(lambda: protocols and protocols[0].data)
        assert protocols[0].seen["connection_made"] == "server"
        assert protocols[0].seen["data_received"] == ["server"]
        transport.close()
        await protocol.lost()
        await protocols[0].lost()
