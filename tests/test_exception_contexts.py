"""What the exception handler is given and the default handler logs: word by word as asyncio."""

import asyncio
import contextlib
import contextvars
import functools
import gc
import os
import signal
import socket
import warnings

import pytest
from helpers import PY312, make_pair, ticks, until
from transcripts import assert_as_asyncio

UVLOOP_LOOP = "https://github.com/MagicStack/uvloop/blob/v0.21.0/uvloop/loop.pyx"
UVLOOP_HANDLES = "https://github.com/MagicStack/uvloop/blob/v0.21.0/uvloop/cbhandles.pyx"
variable = contextvars.ContextVar("variable", default="default")


class Failure(Exception):
    pass


def fail(*args, **kwargs):
    raise Failure(*map(str, args))


class Failing:
    def method(self, *args):
        raise Failure("method")

    def __call__(self):
        raise Failure("called")

    def __repr__(self):
        return "<Failing>"


def run_briefly(loop, count=3):
    loop.run_until_complete(ticks(count))


# Callbacks

CALLBACKS = {
    "a function": lambda loop: loop.call_soon(fail, 1, "two"),
    "a method": lambda loop: loop.call_soon(Failing().method, 1),
    "a callable object": lambda loop: loop.call_soon(Failing()),
    "a partial function": lambda loop: loop.call_soon(functools.partial(fail, "text", key="value")),
    "a partial of a partial": lambda loop: loop.call_soon(
        functools.partial(functools.partial(fail, 1), 2)),
    "a function of C": lambda loop: loop.call_soon(int, "not a number"),
    "a method of C": lambda loop: loop.call_soon([].remove, "nothing"),
    "wrong arguments": lambda loop: loop.call_soon(run_briefly),
    "threadsafe": lambda loop: loop.call_soon_threadsafe(fail, None),
    "a timer": lambda loop: loop.call_later(0, fail, 1),
    "a timer in the past": lambda loop: loop.call_at(0, fail, 1),
    "nothing that can be called": lambda loop: loop.call_soon(None),
}


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("name", CALLBACKS)
@pytest.mark.uvloop_differs("names callbacks in its own way", UVLOOP_HANDLES)
def test_an_exception_out_of(loop_kind, ledger, name, debug):
    def scenario(loop, say):
        loop.set_debug(debug and "be called" not in name)
        loop.set_exception_handler(say.context)
        CALLBACKS[name](loop)
        loop.run_until_complete(until(lambda: say))

    assert_as_asyncio(scenario, loop_kind)


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.uvloop_differs("names callbacks in its own way", UVLOOP_HANDLES)
def test_the_default_handler_logs_an_exception_out_of_a_callback(loop_kind, ledger, debug):
    def scenario(loop, say):
        loop.set_debug(debug)
        loop.call_soon(fail, 1)
        loop.call_later(0, fail, 2)
        loop.run_until_complete(until(lambda: len(say) == 2))

    assert_as_asyncio(scenario, loop_kind)


@pytest.mark.uvloop_differs("names callbacks in its own way", UVLOOP_HANDLES)
def test_an_exception_out_of_a_watching_callback(loop_kind, ledger):
    def scenario(loop, say):
        loop.set_exception_handler(say.context)
        ours, peer = make_pair("unix")
        with ours, peer:
            for add, remove in ((loop.add_writer, loop.remove_writer),
                                (loop.add_reader, loop.remove_reader)):
                peer.send(b"x")
                add(ours, lambda end=remove: (end(ours), fail("watched")))
                count = len(say)
                loop.run_until_complete(until(lambda: len(say) > count))  # noqa: B023

    assert_as_asyncio(scenario, loop_kind)


@pytest.mark.uvloop_differs("names callbacks in its own way", UVLOOP_HANDLES, run=False)
def test_an_exception_out_of_a_signal_handler(loop_kind, ledger):
    def scenario(loop, say):
        loop.set_exception_handler(say.context)
        loop.add_signal_handler(signal.SIGUSR1, fail, "signal")
        os.kill(os.getpid(), signal.SIGUSR1)
        loop.run_until_complete(until(lambda: say))
        loop.remove_signal_handler(signal.SIGUSR1)

    assert_as_asyncio(scenario, loop_kind)


# Protocols


class Protocol(asyncio.Protocol):
    """Fails in one of its methods."""

    def __init__(self, method, error):
        self.error = error
        self.lost = False
        setattr(self, method, self.fail)

    def fail(self, *args):
        self.lost = True
        raise self.error("protocol")

    def connection_made(self, transport):
        pass

    def connection_lost(self, exc):
        self.lost = True


class Buffered(Protocol, asyncio.BufferedProtocol):
    def get_buffer(self, sizehint):
        return bytearray(100)

    def buffer_updated(self, size):
        pass


def read_what_is_there(sock):
    with contextlib.suppress(BlockingIOError):
        sock.recv(1_000_000)
    return True


METHODS = [(Protocol, "connection_made"), (Protocol, "data_received"), (Protocol, "eof_received"),
           (Protocol, "connection_lost"), (Protocol, "pause_writing"),
           (Protocol, "resume_writing"), (Buffered, "get_buffer"), (Buffered, "buffer_updated")]


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("error", [Failure, OSError])
@pytest.mark.parametrize("factory, method", METHODS, ids=[method for _, method in METHODS])
@pytest.mark.uvloop_differs("has messages of its own", UVLOOP_LOOP, run=False)
def test_an_exception_out_of_a_protocols(loop_kind, ledger, factory, method, error, debug):
    async def connect(loop, say):
        ours, peer = make_pair(small=True)
        with ours, peer:
            protocol = factory(method, error)
            transport, _ = await loop.create_connection(lambda: protocol, sock=ours)
            peer.sendall(b"data")
            transport.write(b"x" * 1_000_000)
            if method == "resume_writing":
                peer.setblocking(False)
                await ticks()
                transport.set_write_buffer_limits(2_000_000)
                await until(lambda: read_what_is_there(peer) and protocol.lost)
            if method == "connection_lost":
                transport.abort()
            await ticks()
            with contextlib.suppress(OSError):  # the connection may be gone
                peer.shutdown(socket.SHUT_WR)
            await until(lambda: protocol.lost)
            await ticks()
            say("closing" if transport.is_closing() else "open")
            transport.abort()
            await ticks()

    def scenario(loop, say):
        loop.set_debug(debug)
        loop.slow_callback_duration = 100
        loop.set_exception_handler(say.context)
        loop.run_until_complete(connect(loop, say))

    assert_as_asyncio(scenario, loop_kind)


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.uvloop_differs("has messages of its own", UVLOOP_LOOP)
def test_an_exception_out_of_a_protocol_factory(loop_kind, ledger, debug):
    async def serve(loop, say):
        server = await loop.create_server(fail, "127.0.0.1", 0)
        with socket.create_connection(server.sockets[0].getsockname()) as client:
            client.setblocking(False)
            await ticks(10)
            server.close()
            await ticks()

    def scenario(loop, say):
        loop.set_debug(debug)
        loop.slow_callback_duration = 100
        loop.set_exception_handler(say.context)
        # asyncio leaves the socket to the collector, which warns.
        warnings.simplefilter("ignore", ResourceWarning)
        loop.run_until_complete(serve(loop, say))
        gc.collect()
        say("served")

    assert_as_asyncio(scenario, loop_kind)


# Tasks, futures, generators


@pytest.mark.parametrize("debug", [False, True])
def test_an_exception_of_a_task_that_nobody_retrieves(loop_kind, ledger, debug):
    async def failing():
        raise Failure("task")

    def scenario(loop, say):
        loop.set_debug(debug)
        loop.set_exception_handler(say.context)
        loop.create_task(failing(), name="named")
        run_briefly(loop)
        gc.collect()
        loop.set_exception_handler(None)
        loop.create_task(failing(), name="named")
        run_briefly(loop)
        gc.collect()

    assert_as_asyncio(scenario, loop_kind)


@pytest.mark.parametrize("debug", [False, True])
def test_an_exception_of_a_future_that_nobody_retrieves(loop_kind, ledger, debug):
    def scenario(loop, say):
        loop.set_debug(debug)
        for handler in (say.context, None):
            loop.set_exception_handler(handler)
            future = loop.create_future()
            future.set_exception(Failure("future"))
            del future
            gc.collect()

    assert_as_asyncio(scenario, loop_kind)


@pytest.mark.parametrize("debug", [False, True])
def test_a_task_that_is_destroyed_while_pending(loop_kind, ledger, debug):
    async def waiting(future):
        await future

    def scenario(loop, say):
        loop.set_debug(debug)
        loop.set_exception_handler(say.context)
        loop.create_task(waiting(loop.create_future()), name="named")
        run_briefly(loop)
        gc.collect()

    assert_as_asyncio(scenario, loop_kind)


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.uvloop_differs("names callbacks in its own way", UVLOOP_HANDLES)
def test_an_exception_out_of_a_done_callback(loop_kind, ledger, debug):
    def scenario(loop, say):
        loop.set_debug(debug)
        loop.set_exception_handler(say.context)
        future = loop.create_future()
        future.add_done_callback(fail)
        future.set_result(5)
        run_briefly(loop)

    assert_as_asyncio(scenario, loop_kind)


def test_an_exception_while_a_generator_is_closed(loop_kind, ledger):
    async def generator():
        try:
            yield 1
        finally:
            raise Failure("generator")

    def scenario(loop, say):
        loop.set_exception_handler(say.context)
        async def first():
            return await anext(made)

        made = generator()
        loop.run_until_complete(first())
        loop.run_until_complete(loop.shutdown_asyncgens())
        del made

    assert_as_asyncio(scenario, loop_kind)


# The handler itself


@pytest.mark.parametrize("error", [Failure, asyncio.CancelledError, GeneratorExit])
@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.uvloop_differs("names callbacks in its own way", UVLOOP_HANDLES)
def test_an_exception_out_of_the_handler_is_logged(loop_kind, ledger, error, debug):
    def scenario(loop, say):
        def handler(loop, context):
            raise error("handler")

        loop.set_debug(debug)
        loop.set_exception_handler(handler)
        loop.call_soon(fail)
        loop.call_soon(say, "the next callback")
        run_briefly(loop)
        loop.call_exception_handler({"message": "by hand"})

    assert_as_asyncio(scenario, loop_kind)


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_system_exit_leaves_the_handler_and_the_loop(loop_kind, ledger, error):
    def scenario(loop, say):
        def handler(loop, context):
            raise error("handler")

        loop.set_exception_handler(handler)
        loop.call_soon(fail)
        say.error(loop.run_forever)
        say(loop.is_running())

    assert_as_asyncio(scenario, loop_kind)


@pytest.mark.uvloop_differs("names callbacks in its own way", UVLOOP_HANDLES)
def test_an_exception_out_of_an_overridden_default_handler(loop_kind, ledger):
    def scenario(loop, say):
        loop.default_exception_handler = fail
        loop.call_soon(len, 5)
        run_briefly(loop)

    if loop_kind == "uvloop":
        pytest.xfail("uvloop's attributes cannot be set: " + UVLOOP_LOOP)
    assert_as_asyncio(scenario, loop_kind)


@pytest.mark.uvloop_differs("prints a handle's traceback as a list", UVLOOP_LOOP)
def test_contexts_by_hand(loop_kind, ledger):
    contexts = [
        {}, {"message": "text"}, {"message": ""}, {"message": None}, {"exception": None},
        {"message": "with", "exception": Failure("x"), "more": 1, "a": [2]},
        {"message": "stacks", "source_traceback": [], "handle_traceback": []},
    ]

    def scenario(loop, say):
        for handler in (None, say.context):
            loop.set_exception_handler(handler)
            for context in contexts:
                say.error(loop.call_exception_handler, context)
        say.error(loop.default_exception_handler, {"message": "direct"})

    assert_as_asyncio(scenario, loop_kind)


def test_exception_handlers_of_every_kind(loop_kind, ledger):
    def scenario(loop, say):
        for wrong in (5, "text", [], object):
            say.error(lambda value: loop.set_exception_handler(value), wrong)
        handler = Failing()
        loop.set_exception_handler(handler)
        say(loop.get_exception_handler() is handler)
        loop.set_exception_handler(None)
        say(loop.get_exception_handler())

    assert_as_asyncio(scenario, loop_kind)


@pytest.mark.skipif(not PY312, reason="older versions run it in the loop's context: gh-103486")
@pytest.mark.uvloop_differs("runs it in the loop's context", UVLOOP_LOOP)
def test_the_handler_runs_in_the_context_of_what_failed(loop_kind, ledger):
    def scenario(loop, say):
        def handler(loop, context):
            say(variable.get(), context["message"].split("(")[0])

        async def failing():
            variable.set("task")
            raise Failure("task")

        loop.set_exception_handler(handler)
        for name in ("soon", "timer"):
            context = contextvars.copy_context()
            context.run(variable.set, name)
            if name == "soon":
                loop.call_soon(fail, context=context)
            else:
                loop.call_later(0, fail, context=context)
            loop.run_until_complete(asyncio.sleep(0.01))
        loop.create_task(failing())
        run_briefly(loop)
        gc.collect()

    assert_as_asyncio(scenario, loop_kind)
