"""Running a loop: run_forever(), run_until_complete(), asynchronous generators, closing."""

import asyncio
import gc
import sys
import time
import warnings

import pytest
from helpers import PY312, PY313, run_child, run_once, ticks, until

UVLOOP_LOOP = "https://github.com/MagicStack/uvloop/blob/v0.21.0/uvloop/loop.pyx"


def nothing():
    pass


# Running


def test_run_until_complete_gives_the_result(loop):
    async def main():
        return 42

    assert loop.run_until_complete(main()) == 42


def test_run_until_complete_raises_the_exception(loop):
    async def main():
        raise ZeroDivisionError("main")

    with pytest.raises(ZeroDivisionError, match="main"):
        loop.run_until_complete(main())


def test_run_until_complete_takes_futures_and_tasks(loop):
    future = loop.create_future()
    loop.call_soon(future.set_result, 1)
    assert loop.run_until_complete(future) == 1
    assert loop.run_until_complete(future) == 1
    task = loop.create_task(asyncio.sleep(0, 2))
    assert loop.run_until_complete(task) == 2


def test_stop_before_the_future_is_done_is_a_runtime_error(loop):
    future = loop.create_future()
    loop.call_soon(loop.stop)
    with pytest.raises(RuntimeError, match="Event loop stopped before Future completed"):
        loop.run_until_complete(future)


def test_a_future_of_another_loop_is_a_value_error(loop, new_loop):
    future = new_loop().create_future()
    with pytest.raises(ValueError):
        loop.run_until_complete(future)


@pytest.mark.parametrize("wrong", [None, 5, "text"])
def test_run_until_complete_of_anything_else_is_a_type_error(loop, wrong):
    with pytest.raises(TypeError):
        loop.run_until_complete(wrong)


def test_a_loop_runs_many_times(loop):
    for number in range(20):
        assert loop.run_until_complete(asyncio.sleep(0, number)) == number
    loop.call_soon(loop.stop)
    loop.run_forever()
    assert loop.run_until_complete(asyncio.sleep(0.001, "again")) == "again"


def test_run_until_complete_on_a_running_loop_is_a_runtime_error(loop):
    async def main():
        with pytest.raises(RuntimeError, match="already running"):
            loop.run_until_complete(loop.create_future())
        assert loop.is_running()
        assert asyncio.get_running_loop() is loop

    loop.run_until_complete(main())


@pytest.mark.asyncio_differs(
    "the refused run_forever() resets the state of the outer one",
    "https://github.com/python/cpython/issues/130145",
    when=PY313,
    run=False,
)
def test_run_forever_on_a_running_loop_is_a_runtime_error(loop):
    async def main():
        with pytest.raises(RuntimeError, match="already running"):
            loop.run_forever()
        assert loop.is_running()
        assert asyncio.get_running_loop() is loop

    loop.run_until_complete(main())


def test_running_another_loop_inside_a_loop_is_a_runtime_error(loop, new_loop):
    other = new_loop()

    async def main():
        with pytest.raises(RuntimeError, match="while another loop is running"):
            other.run_forever()

    loop.run_until_complete(main())


def test_is_running_and_get_running_loop_tell_the_same(loop):
    async def main():
        assert asyncio.get_running_loop() is loop
        assert asyncio.get_event_loop() is loop
        return loop.is_running()

    assert loop.is_running() is False
    assert loop.run_until_complete(main()) is True
    assert loop.is_running() is False
    with pytest.raises(RuntimeError):
        asyncio.get_running_loop()


def test_get_running_loop_works_in_callbacks_and_current_task_is_none_there(loop):
    seen = []
    loop.call_soon(lambda: seen.append((asyncio.get_running_loop(), asyncio.current_task())))
    run_once(loop)
    assert seen == [(loop, None)]


async def test_current_task_is_the_task(loop):
    task = asyncio.current_task()
    assert task in asyncio.all_tasks()
    assert isinstance(task, asyncio.Task)
    assert task.get_loop() is loop


def test_a_task_factory_is_used(loop):
    made = []

    def factory(loop, coro, **options):
        made.append(coro)
        return asyncio.Task(coro, loop=loop, **options)

    loop.set_task_factory(factory)
    assert loop.get_task_factory() is factory
    assert loop.run_until_complete(asyncio.sleep(0, 5)) == 5
    assert len(made) == 1
    loop.set_task_factory(None)
    with pytest.raises(TypeError):
        loop.set_task_factory(5)


def test_time_goes_on_during_a_callback(loop):
    seen = []

    def callback():
        before, monotonic_before = loop.time(), time.monotonic()
        while time.monotonic() < monotonic_before + 0.005:
            pass
        seen.append(loop.time() - before)

    loop.call_soon(callback)
    run_once(loop)
    assert seen[0] > 0


def test_time_is_the_monotonic_clock(loop, loop_kind):
    before = time.monotonic()
    now = loop.time()
    tolerance = 0.002 if loop_kind == "uvloop" else 0  # it counts whole milliseconds
    assert before - tolerance <= now <= time.monotonic() + tolerance


# Async generators


def test_shutdown_asyncgens_closes_generators(loop):
    closed = []

    async def generator():
        try:
            yield 1
            yield 2
        finally:
            closed.append("closed")

    made = generator()

    async def main():
        assert await anext(made) == 1

    loop.run_until_complete(main())
    loop.run_until_complete(loop.shutdown_asyncgens())
    assert closed == ["closed"]


def test_a_forgotten_async_generator_is_closed_on_the_loop(loop):
    closed = []

    async def generator():
        try:
            yield 1
        finally:
            await asyncio.sleep(0)
            closed.append(asyncio.get_running_loop())

    async def main():
        async for _ in generator():
            break
        gc.collect()
        await until(lambda: closed)

    loop.run_until_complete(main())
    assert closed == [loop]


def test_the_async_generator_hooks_are_restored_after_a_run(loop):
    before = sys.get_asyncgen_hooks()

    async def main():
        return sys.get_asyncgen_hooks()

    inside = loop.run_until_complete(main())
    assert inside != before
    assert sys.get_asyncgen_hooks() == before


# Closing


def test_closing_a_running_loop_is_a_runtime_error(loop):
    async def main():
        with pytest.raises(RuntimeError):
            loop.close()

    loop.run_until_complete(main())
    assert not loop.is_closed()


def test_close_may_be_repeated(loop):
    loop.close()
    assert loop.is_closed()
    loop.close()
    assert loop.is_closed()


CLOSED = {
    "call_soon": lambda loop: loop.call_soon(nothing),
    "call_soon_threadsafe": lambda loop: loop.call_soon_threadsafe(nothing),
    "call_later": lambda loop: loop.call_later(1, nothing),
    "call_at": lambda loop: loop.call_at(1, nothing),
    "run_forever": lambda loop: loop.run_forever(),
    "run_until_complete": lambda loop: loop.run_until_complete(loop.create_future()),
    "run_in_executor": lambda loop: loop.run_in_executor(None, nothing),
    "add_reader": lambda loop: loop.add_reader(0, nothing),
    "add_writer": lambda loop: loop.add_writer(1, nothing),
}


@pytest.mark.parametrize("method", CLOSED)
def test_using_a_closed_loop_is_a_runtime_error(loop, method):
    loop.close()
    with pytest.raises(RuntimeError, match="Event loop is closed"):
        CLOSED[method](loop)


def test_create_task_on_a_closed_loop_is_a_runtime_error(loop):
    loop.close()
    coroutine = asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="Event loop is closed"):
        loop.create_task(coroutine)
    coroutine.close()


def test_callbacks_left_at_close_never_run(loop):
    seen = []
    loop.call_soon(seen.append, "x")
    loop.close()
    assert seen == []


@pytest.mark.uvloop_differs("does not warn", UVLOOP_LOOP)
def test_an_unclosed_loop_warns(loop_kind):
    from helpers import make_loop

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loop = make_loop(loop_kind)
        run_once(loop)
        del loop
        gc.collect()
    messages = [str(w.message) for w in caught if w.category is ResourceWarning]
    assert any("unclosed event loop" in message for message in messages), messages


def test_repr_of_a_loop_works_in_every_state(loop):
    seen = [repr(loop)]
    loop.call_soon(lambda: seen.append(repr(loop)))
    run_once(loop)
    loop.close()
    seen.append(repr(loop))
    assert len(seen) == 3 and all(type(text) is str and text for text in seen)


def test_100_loops_may_live_at_once(new_loop):
    loops = [new_loop() for _ in range(100)]
    for number, loop in enumerate(loops):
        assert loop.run_until_complete(asyncio.sleep(0, number)) == number


async def test_gather_of_1000_tasks_gives_the_results_in_order(loop):
    async def work(number):
        await ticks(number % 5)
        return number

    assert await asyncio.gather(*map(work, range(1000))) == list(range(1000))


def test_a_cancelled_handle_may_be_run_by_hand(loop):
    handle = loop.call_soon(print)
    handle.cancel()
    if hasattr(handle, "_run"):
        loop.set_exception_handler(lambda loop, context: None)
        handle._run()
    timer = loop.call_later(0, print)
    timer.cancel()
    timer.cancel()


def test_a_callback_may_cancel_its_own_handle(loop):
    seen = []

    def callback(argument):
        handle.cancel()
        seen.append(argument)

    handle = loop.call_soon(callback, ["a new list"])
    timer = loop.call_later(0, lambda: (timer.cancel(), seen.append("timer")))
    loop.call_later(0.01, loop.stop)
    loop.run_forever()
    assert seen == [["a new list"], "timer"]


def test_handles_cannot_be_made_by_hand(loop_kind):
    if loop_kind not in ("io_uring", "epoll"):
        pytest.skip("asyncio's can")
    from uringloop import _core

    for kind in (_core.Handle, _core.TimerHandle, _core.StreamTransport, _core.Listener):
        with pytest.raises(TypeError, match="made by"):
            kind()


def test_an_argument_outlives_a_callback_that_cancels_its_own_handle(loop):
    """list.extend() goes on using its argument after the argument's code has run."""
    result = []

    class Iterable:
        def __iter__(self):
            handle.cancel()
            return iter([1, 2, 3])

    handle = loop.call_soon(result.extend, Iterable())
    loop.call_soon(loop.stop)
    loop.run_forever()
    assert result == [1, 2, 3]


@pytest.mark.skipif(PY312, reason="the collector runs inside allocations before 3.12 only")
def test_finalizers_may_call_the_loop_while_its_queues_grow(loop_kind):
    child = run_child(loop_kind, """
import gc, os, socket
class Cycle:
    def __init__(self):
        self.me = self
    def __del__(self):
        for _ in range(50):
            loop.call_soon(int)
gc.set_threshold(1)
for _ in range(300):
    Cycle()
    loop.call_soon(int)
pairs = [socket.socketpair() for _ in range(200)]
for left, right in pairs:
    Cycle()
    loop.add_reader(left, print)
for left, right in pairs:
    loop.remove_reader(left)
loop.call_soon(loop.stop)
loop.run_forever()
loop.close()
print("over")
""")
    assert (child.returncode, child.stdout) == (0, "over\n"), child.stderr


@pytest.mark.skipif(PY312, reason="the collector runs inside allocations before 3.12 only")
@pytest.mark.parametrize("call", ["call_soon(int)", "call_later(3600, int)"])
def test_a_finalizer_may_fill_a_queue_that_grows(loop_kind, call):
    """The collector is set to run in one allocation after the other."""
    child = run_child(loop_kind, """
import gc, itertools
class Cycle:
    def __init__(self, count):
        self.me = self
        self.count = count
    def __del__(self):
        timer.cancel()
        for _ in range(self.count):
            loop.CALL
loop.close()
gc.disable()
for more, count, threshold in itertools.product((0, 2), (0, 64, 65, 192, 193), range(1, 20)):
    loop = helpers.make_loop(kind)
    timer = loop.call_later(0, int)
    for _ in range(63):
        loop.CALL
    gc.collect()
    Cycle(count)
    gc.set_threshold(threshold)
    gc.enable()
    for _ in range(more):
        loop.CALL
    helpers.run_once(loop)
    gc.disable()
    for _ in range(10):
        loop.CALL
    loop.call_later(0, loop.stop)
    loop.run_forever()
    loop.close()
print("over")
""".replace("CALL", call))
    assert (child.returncode, child.stdout) == (0, "over\n"), child.stderr


@pytest.mark.parametrize("action", ["stop", "call_later", "write"])
def test_what_a_plain_signal_handler_does_before_the_loop_waits(loop_kind, action):
    """The signal comes while C code runs: no bytecode follows before the loop blocks."""
    child = run_child(loop_kind, """
import ctypes, signal
ours, peer = helpers.make_pair()
transport, _ = loop.run_until_complete(loop.create_connection(asyncio.Protocol, sock=ours))
actions = {
    "stop": loop.stop,
    "call_later": lambda: loop.call_later(0.001, loop.stop),
    "write": lambda: transport.write(b"x"),
}
signal.signal(signal.SIGUSR1, lambda *_: actions["ACTION"]())
loop.add_reader(peer, loop.stop)
helpers.run_once(loop)
loop.call_soon(getattr(ctypes.CDLL(None), "raise"), signal.SIGUSR1)
loop.call_later(3600, print)
loop.run_forever()
loop.remove_reader(peer)
transport.abort()
helpers.run_once(loop)
loop.close()
peer.close()
print("over")
""".replace("ACTION", action))
    assert (child.returncode, child.stdout) == (0, "over\n"), child.stderr
