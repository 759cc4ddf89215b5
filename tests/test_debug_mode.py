"""Debug mode: slow callbacks, where handles were made, checks, and the ways to switch it on."""

import asyncio
import functools
import threading
import time

import pytest
from helpers import PY312, end, in_thread, make_pair, read_to_end, ticks, until
from transcripts import assert_as_asyncio, assert_child_as_asyncio

UVLOOP_LOOP = "https://github.com/MagicStack/uvloop/blob/v0.21.0/uvloop/loop.pyx"
UVLOOP_HANDLES = "https://github.com/MagicStack/uvloop/blob/v0.21.0/uvloop/cbhandles.pyx"


def nothing(*args):
    pass


def slow(*args):
    time.sleep(0.1)


def debugging(loop):
    loop.set_debug(True)
    loop.slow_callback_duration = 0.05


def run_until_logged(loop, say):
    loop.run_until_complete(until(lambda: say))
    # A busy machine holds up the task that waits here, too.
    say[:] = [line for line in say if "coro=<until()" not in line]


async def slow_task():
    slow()


def slowly_done(loop):
    future = loop.create_future()
    future.add_done_callback(slow)
    future.set_result(None)


SLOW = {
    "a function": lambda loop: loop.call_soon(slow, 1, "two"),
    "a partial function": lambda loop: loop.call_soon(functools.partial(slow, 3)),
    "a timer": lambda loop: loop.call_later(0, slow),
    "threadsafe": lambda loop: loop.call_soon_threadsafe(slow),
    "a task": lambda loop: loop.create_task(slow_task(), name="named"),
    "a done callback": slowly_done,
}


@pytest.mark.parametrize("name", SLOW)
@pytest.mark.uvloop_differs("names callbacks in its own way", UVLOOP_HANDLES)
def test_a_slow_callback_is_logged(loop_kind, ledger, name):
    def scenario(loop, say):
        debugging(loop)
        SLOW[name](loop)
        run_until_logged(loop, say)

    assert_as_asyncio(scenario, loop_kind)


@pytest.mark.parametrize("name", ["a function", "a timer"])
@pytest.mark.uvloop_differs("names callbacks in its own way", UVLOOP_HANDLES)
def test_a_slow_callback_that_cancels_itself_is_named(loop_kind, ledger, name):
    def scenario(loop, say):
        def slow():
            handle.cancel()
            time.sleep(0.1)

        debugging(loop)
        handle = loop.call_soon(slow) if name == "a function" else loop.call_later(0, slow)
        run_until_logged(loop, say)

    assert_as_asyncio(scenario, loop_kind)


@pytest.mark.parametrize("method", ["data_received", "eof_received", "connection_lost",
                                    "connection_lost after a flush"])
@pytest.mark.uvloop_differs("does not measure them", UVLOOP_LOOP, run=False)
def test_a_slow_protocol_is_logged(loop, caplog, method):
    """The engine calls it out of an operation, asyncio out of a handle: the words differ."""
    class Protocol(asyncio.Protocol):
        pass

    async def connect():
        ours, peer = make_pair()
        transport, _ = await loop.create_connection(Protocol, sock=ours)
        await ticks()
        debugging(loop)
        setattr(Protocol, method.split()[0], slow)
        if "flush" in method:
            transport.write(b"x" * 5_000_000)
            transport.close()
            await in_thread(read_to_end, peer)
        else:
            peer.sendall(b"x")
        peer.close()
        await until(lambda: any(" took " in record.getMessage() for record in caplog.records))
        end(transport)

    caplog.set_level("WARNING", logger="asyncio")
    loop.run_until_complete(connect())
    messages = [record.getMessage() for record in caplog.records]
    assert all(message.startswith("Executing <") for message in messages), messages


@pytest.mark.uvloop_differs("does not measure them", UVLOOP_LOOP, run=False)
def test_a_slow_watching_callback_is_logged(loop_kind, ledger):
    def scenario(loop, say):
        debugging(loop)
        ours, peer = make_pair("unix")
        with ours, peer:
            peer.send(b"x")
            loop.add_reader(ours, lambda: (loop.remove_reader(ours), slow()))
            loop.run_until_complete(until(lambda: say))

    assert_as_asyncio(scenario, loop_kind)


@pytest.mark.uvloop_differs("names callbacks in its own way", UVLOOP_HANDLES)
def test_debug_mode_switched_while_running(loop_kind, ledger):
    def scenario(loop, say):
        async def main():
            loop.slow_callback_duration = 0.01
            loop.call_soon(slow)
            await ticks()
            say("off", loop.get_debug())
            loop.set_debug(True)
            loop.call_soon(slow)
            await ticks()
            say("on", loop.get_debug())
            say.error(loop.call_soon, 5)
            loop.set_debug(False)
            loop.call_soon(slow)
            await ticks()
            say("off", loop.get_debug())

        loop.run_until_complete(main())

    assert_as_asyncio(scenario, loop_kind)


def test_set_debug_tracks_where_coroutines_come_from(loop_kind, ledger):
    import sys

    def scenario(loop, say):
        async def main():
            say(sys.get_coroutine_origin_tracking_depth())
            loop.set_debug(True)
            await ticks()
            say(sys.get_coroutine_origin_tracking_depth())
            loop.set_debug(False)
            await ticks()
            say(sys.get_coroutine_origin_tracking_depth())

        for debug in (False, True):
            loop.set_debug(debug)
            say(sys.get_coroutine_origin_tracking_depth())
            loop.run_until_complete(main())
            say(sys.get_coroutine_origin_tracking_depth())

    assert_as_asyncio(scenario, loop_kind)


# Handles


def frames(handle):
    trace = handle._source_traceback
    return trace and [frame.name for frame in trace][-2:]


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.uvloop_differs("makes other reprs", UVLOOP_HANDLES)
def test_reprs_and_source_tracebacks_of_handles(loop_kind, ledger, debug):
    def scenario(loop, say):
        loop.set_debug(debug)
        for handle in (
                loop.call_soon(nothing, 1, "two"), loop.call_soon_threadsafe(nothing),
                loop.call_later(1000, nothing, [3]), loop.call_at(0, nothing),
                loop.call_soon(functools.partial(nothing, 1, key=2), 3),
                loop.call_soon(print), loop.call_soon([].append, 1)):
            say(handle, frames(handle))
            handle.cancel()
            say(handle, handle.cancelled(), handle._callback, handle._args)

    assert_as_asyncio(scenario, loop_kind)


@pytest.mark.uvloop_differs("has no current handle", UVLOOP_LOOP)
def test_the_current_handle(loop_kind, ledger):
    def scenario(loop, say):
        def current(label):
            say(label, loop._current_handle)

        for debug in (False, True):
            loop.set_debug(debug)
            loop.call_soon(current, "soon")
            loop.call_later(0, current, "timer")
            loop.run_until_complete(asyncio.sleep(0.01))
            say(loop._current_handle)

    assert_as_asyncio(scenario, loop_kind)


# Checks


async def coroutine():
    pass


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.uvloop_differs("does not check", UVLOOP_LOOP)
def test_callbacks_and_times_that_are_none(loop_kind, ledger, debug):
    def scenario(loop, say):
        loop.set_debug(debug)
        made = coroutine()
        for wrong in (coroutine, made, 5, None, "text") if debug else ():
            say.error(loop.call_soon, wrong)
            say.error(loop.call_soon_threadsafe, wrong)
            say.error(loop.call_later, 1, wrong)
            say.error(loop.call_at, 1, wrong)
            say.error(loop.run_in_executor, None, wrong)
        made.close()
        for wrong in (None, "text", b"", [], object):
            try:
                loop.call_later(wrong, nothing)
            except TypeError as exc:
                say(type(exc).__name__, exc if wrong is None else "")
        say.error(loop.call_at, None, nothing)
        for number in (-1, True, 1e300, float("inf"), float("-inf")):
            say(type(loop.call_later(number, nothing)).__mro__[-1], number)
            loop.call_at(number, nothing)

    assert_as_asyncio(scenario, loop_kind)


@pytest.mark.uvloop_differs("does not check timers", UVLOOP_LOOP, run=False)
def test_calls_from_a_foreign_thread(loop_kind, ledger):
    def scenario(loop, say):
        def foreign():
            say.error(loop.call_soon, nothing)
            say.error(loop.call_later, 1, nothing)
            say.error(loop.call_at, 1, nothing)
            say("threadsafe", loop.call_soon_threadsafe(nothing).cancelled())

        async def main():
            thread = threading.Thread(target=foreign)
            thread.start()
            await until(lambda: not thread.is_alive())
            thread.join()

        loop.set_debug(True)
        loop.run_until_complete(main())
        thread = threading.Thread(target=foreign_before_the_run, args=(loop, say))
        thread.start()
        thread.join()

    def foreign_before_the_run(loop, say):
        loop.call_soon(nothing)
        say("a loop that does not run belongs to nobody")

    assert_as_asyncio(scenario, loop_kind)


# Ways to switch it on

SWITCHES = {
    "-X dev": {"flags": ("-X", "dev")},
    "PYTHONASYNCIODEBUG=1": {"environment": (("PYTHONASYNCIODEBUG", "1"),)},
    "PYTHONASYNCIODEBUG=": {"environment": (("PYTHONASYNCIODEBUG", ""),)},
    "nothing": {},
}
CHILD = """
import logging, time
logging.basicConfig(format="%(name)s %(levelname)s %(message)s", level=logging.WARNING)
print(loop.get_debug(), loop.slow_callback_duration)
async def forgotten():
    pass
async def main():
    forgotten()
    loop.call_soon(time.sleep, 0.15)
    await asyncio.sleep(0.001)
    1 / 0
try:
    loop.run_until_complete(main())
except ZeroDivisionError:
    print("raised")
loop.call_later(0, lambda: 1 / 0)
loop.run_until_complete(asyncio.sleep(0.01))
loop.close()
"""


@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.uvloop_differs("names callbacks in its own way", UVLOOP_HANDLES)
def test_a_child_with(loop_kind, name):
    assert_child_as_asyncio(loop_kind, CHILD, **SWITCHES[name])


@pytest.mark.skipif(not PY312, reason="asyncio.run(loop_factory=...) is of 3.12")
@pytest.mark.parametrize("debug", [None, False, True])
@pytest.mark.uvloop_differs("names callbacks in its own way", UVLOOP_HANDLES)
def test_asyncio_run_sets_debug_mode(loop_kind, debug):
    assert_child_as_asyncio(loop_kind, f"""
loop.close()
async def main():
    loop = asyncio.get_running_loop()
    print(loop.get_debug(), loop.call_soon(int))
    await asyncio.sleep(0)
asyncio.run(main(), debug={debug}, loop_factory=lambda: helpers.make_loop(kind))
""")
