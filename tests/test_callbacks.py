"""Callbacks: order, stop, exceptions, threads, contexts, debug mode, the life of the loop."""

import asyncio
import contextvars
import gc
import logging
import sys
import threading
import time
import warnings

import pytest
from helpers import LIMIT, PY312, PY313, in_thread, run_child, run_once, ticks, until

UVLOOP_LOOP = "https://github.com/MagicStack/uvloop/blob/v0.21.0/uvloop/loop.pyx"
UVLOOP_HANDLES = "https://github.com/MagicStack/uvloop/blob/v0.21.0/uvloop/cbhandles.pyx"
variable = contextvars.ContextVar("variable", default="default")


def nothing():
    pass


# Order


def test_call_soon_runs_in_the_order_of_the_calls(loop):
    seen = []
    for number in range(1000):
        loop.call_soon(seen.append, number)
    run_once(loop)
    assert seen == list(range(1000))


@pytest.mark.uvloop_differs("goes on while there is something ready", UVLOOP_LOOP)
def test_what_a_callback_adds_runs_in_the_next_iteration(loop):
    seen = []

    def first():
        seen.append("first")
        loop.call_soon(seen.append, "next")

    loop.call_soon(first)
    loop.call_soon(seen.append, "second")
    run_once(loop)
    assert seen == ["first", "second"]
    run_once(loop)
    assert seen == ["first", "second", "next"]


def test_stop_before_run_forever_runs_one_iteration(loop):
    seen = []
    loop.call_soon(seen.append, "x")
    loop.stop()
    loop.run_forever()
    assert seen == ["x"]


@pytest.mark.uvloop_differs("goes on while there is something ready", UVLOOP_LOOP)
def test_callbacks_added_while_stopping_run_in_the_next_run(loop):
    seen = []

    def stopping():
        loop.stop()
        loop.call_soon(seen.append, "next run")
        seen.append("stopping")

    loop.call_soon(stopping)
    loop.call_soon(seen.append, "same iteration")
    loop.run_forever()
    assert seen == ["stopping", "same iteration"]
    run_once(loop)
    assert seen == ["stopping", "same iteration", "next run"]


def test_a_cancelled_handle_does_not_run(loop):
    seen = []
    handle = loop.call_soon(seen.append, "cancelled")
    loop.call_soon(seen.append, "kept")
    handle.cancel()
    assert handle.cancelled()
    run_once(loop)
    assert seen == ["kept"]


def test_a_handle_cancelled_in_its_own_iteration_does_not_run(loop):
    seen = []
    loop.call_soon(lambda: handle.cancel())
    handle = loop.call_soon(seen.append, "cancelled")
    run_once(loop)
    assert seen == []


def test_repr_of_a_handle_names_the_callback_and_the_state(loop):
    handle = loop.call_soon(nothing)
    assert "nothing" in repr(handle)
    handle.cancel()
    assert "cancelled" in repr(handle)


async def test_sleep_zero_takes_one_iteration(loop):
    seen = []
    loop.call_soon(seen.append, 1)
    await asyncio.sleep(0)
    assert seen == [1]
    loop.call_soon(lambda: loop.call_soon(seen.append, 2))
    await asyncio.sleep(0)
    assert seen == [1]
    await asyncio.sleep(0)
    assert seen == [1, 2]


# Exceptions


def test_an_exception_goes_to_the_handler_and_the_next_callback_runs(loop, errors):
    seen = []

    def fail():
        raise ZeroDivisionError("callback")

    handle = loop.call_soon(fail)
    loop.call_soon(seen.append, "next")
    run_once(loop)
    assert seen == ["next"]
    (context,) = errors
    assert context["message"].startswith("Exception in callback ")
    assert "fail" in context["message"]
    assert str(context["exception"]) == "callback"
    assert context["handle"] is handle


def test_an_exception_out_of_a_timer_has_its_handle(loop, errors):
    handle = loop.call_later(0, lambda: 1 // 0)
    loop.run_until_complete(until(lambda: errors))
    (context,) = errors
    assert isinstance(context["exception"], ZeroDivisionError)
    assert context["handle"] is handle


def test_the_source_traceback_is_in_the_context_in_debug_mode(loop, errors):
    loop.set_debug(True)
    loop.call_soon(lambda: 1 // 0)
    run_once(loop)
    (context,) = errors
    assert context["source_traceback"]


def test_the_default_handler_logs_the_exception(loop, caplog):
    loop.set_exception_handler(None)
    loop.call_soon(lambda: 1 // 0)
    with caplog.at_level(logging.ERROR, logger="asyncio"):
        run_once(loop)
    (record,) = caplog.records
    assert "Exception in callback" in record.getMessage()
    assert record.exc_info[0] is ZeroDivisionError


def test_an_exception_out_of_the_exception_handler_is_logged(loop, caplog):
    def broken(loop, context):
        raise LookupError("in the handler")

    loop.set_exception_handler(broken)
    loop.call_soon(lambda: 1 // 0)
    with caplog.at_level(logging.ERROR, logger="asyncio"):
        run_once(loop)
    assert any("Unhandled error in exception handler" in r.getMessage() for r in caplog.records)


def test_set_exception_handler_refuses_what_cannot_be_called(loop):
    before = loop.get_exception_handler()
    with pytest.raises(TypeError):
        loop.set_exception_handler(5)
    assert loop.get_exception_handler() == before


@pytest.mark.parametrize("exception", [SystemExit, KeyboardInterrupt])
@pytest.mark.uvloop_differs("drops what is left of the iteration", UVLOOP_LOOP)
def test_system_exit_propagates_and_the_rest_runs_next_time(loop, exception):
    seen = []

    def leave():
        raise exception("out")

    loop.call_soon(seen.append, "before")
    loop.call_soon(leave)
    loop.call_soon(seen.append, "after")
    with pytest.raises(exception, match="out"):
        loop.run_forever()
    assert not loop.is_running()
    assert seen == ["before"]
    run_once(loop)
    assert seen == ["before", "after"]


@pytest.mark.parametrize("exception", [SystemExit, KeyboardInterrupt])
def test_system_exit_out_of_a_task_propagates_and_the_loop_can_be_used_again(loop, exception):
    async def leave():
        raise exception("out")

    async def answer():
        return 42

    with pytest.raises(exception, match="out"):
        loop.run_until_complete(leave())
    assert loop.run_until_complete(answer()) == 42


def test_system_exit_out_of_a_timer_propagates(loop):
    def leave():
        raise SystemExit("out")

    loop.call_later(0.001, leave)
    with pytest.raises(SystemExit, match="out"):
        loop.run_forever()


# Threads


async def test_call_soon_threadsafe_from_4_threads_loses_and_swaps_nothing(loop):
    seen = []
    count = 2000

    def call(thread):
        for number in range(count):
            loop.call_soon_threadsafe(seen.append, (thread, number))

    threads = [threading.Thread(target=call, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    await until(lambda: len(seen) == 4 * count)
    for thread in threads:
        thread.join()
    for thread in range(4):
        assert [number for t, number in seen if t == thread] == list(range(count))


async def test_call_soon_threadsafe_works_while_the_loop_is_busy(loop):
    seen = []
    spins = 0
    running = True

    def spin():
        nonlocal spins
        spins += 1
        if running:
            loop.call_soon(spin)

    def call():
        for number in range(1000):
            loop.call_soon_threadsafe(seen.append, number)

    spin()
    thread = threading.Thread(target=call)
    thread.start()
    await until(lambda: len(seen) == 1000)
    running = False
    thread.join()
    assert seen == list(range(1000))
    assert spins > 1


async def test_a_thread_wakes_an_idle_loop_again_and_again(loop):
    asked, answered = threading.Event(), threading.Event()
    rounds = 100

    def wake():
        for _ in range(rounds):
            assert asked.wait(LIMIT)
            asked.clear()
            loop.call_soon_threadsafe(woken.set)

    woken = asyncio.Event()
    thread = threading.Thread(target=wake)
    thread.start()
    for _ in range(rounds):
        asked.set()
        await woken.wait()
        woken.clear()
    thread.join()
    answered.set()


def test_call_soon_threadsafe_before_the_loop_runs_is_kept(loop):
    seen = []
    thread = threading.Thread(target=loop.call_soon_threadsafe, args=(seen.append, "x"))
    thread.start()
    thread.join()
    run_once(loop)
    assert seen == ["x"]


def test_stop_from_another_thread_stops_an_idle_loop(loop):
    loop.call_soon(lambda: threading.Thread(target=stop).start())

    def stop():
        loop.call_soon_threadsafe(loop.stop)

    loop.run_forever()
    assert not loop.is_running()


def test_a_loop_runs_in_a_thread_that_is_not_the_main_one(new_loop):
    seen = []

    def run():
        loop = new_loop()
        seen.append(loop.run_until_complete(asyncio.sleep(0.001, "slept")))
        loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(LIMIT)
    assert seen == ["slept"]


async def test_run_coroutine_threadsafe_gives_the_result_to_the_thread(loop):
    async def add(a, b):
        await asyncio.sleep(0)
        return a + b

    def ask():
        return asyncio.run_coroutine_threadsafe(add(1, 2), loop).result(LIMIT)

    assert await in_thread(ask) == 3


# Contexts


def test_a_callback_runs_in_a_copy_of_the_callers_context(loop):
    seen = []
    variable.set("caller")
    loop.call_soon(lambda: (seen.append(variable.get()), variable.set("callback")))
    loop.call_soon(lambda: seen.append(variable.get()))
    variable.set("later")
    run_once(loop)
    assert seen == ["caller", "caller"]
    assert variable.get() == "later"
    variable.set("default")


@pytest.mark.parametrize("method", ["call_soon", "call_soon_threadsafe", "call_later", "call_at"])
def test_a_callback_runs_in_the_context_it_is_given(loop, method):
    seen = []
    context = contextvars.copy_context()
    context.run(variable.set, "given")

    def callback(argument):
        seen.append((argument, variable.get()))
        variable.set("changed")

    arguments = {"call_later": [0], "call_at": [loop.time()]}.get(method, [])
    getattr(loop, method)(*arguments, callback, "x", context=context)
    loop.run_until_complete(until(lambda: seen))
    assert seen == [("x", "given")]
    assert context[variable] == "changed"


def test_create_task_runs_in_the_context_it_is_given(loop):
    context = contextvars.copy_context()
    context.run(variable.set, "given")

    async def main():
        value = variable.get()
        await asyncio.sleep(0)
        return value, variable.get()

    task = loop.create_task(main(), context=context)
    assert loop.run_until_complete(task) == ("given", "given")


# Debug mode


def test_debug_mode_logs_slow_callbacks(loop, caplog):
    loop.set_debug(True)
    loop.slow_callback_duration = 0.001
    loop.call_soon(time.sleep, 0.01)
    with caplog.at_level(logging.WARNING, logger="asyncio"):
        run_once(loop)
    messages = [record.getMessage() for record in caplog.records]
    assert any(m.startswith("Executing <Handle") and " took " in m for m in messages), messages


def test_debug_mode_refuses_call_soon_from_a_foreign_thread(loop):
    loop.set_debug(True)
    caught = []

    def call():
        try:
            loop.call_soon(nothing)
        except RuntimeError as error:
            caught.append(str(error))

    async def main():
        await in_thread(call)

    loop.run_until_complete(main())
    assert len(caught) == 1
    assert "Non-thread-safe operation" in caught[0]


@pytest.mark.uvloop_differs("does not check", UVLOOP_LOOP)
def test_debug_mode_refuses_what_cannot_be_called(loop):
    loop.set_debug(True)
    with pytest.raises(TypeError):
        loop.call_soon(5)
    with pytest.raises(TypeError):
        loop.call_later(0, "text")
    with pytest.raises(TypeError):
        loop.call_at(0, None)
    with pytest.raises(TypeError):
        loop.call_soon_threadsafe(5)


@pytest.mark.uvloop_differs("does not check", UVLOOP_LOOP)
def test_debug_mode_refuses_coroutine_functions(loop):
    async def coroutine():
        pass

    loop.set_debug(True)
    with pytest.raises(TypeError, match="coroutine"):
        loop.call_soon(coroutine)
    made = coroutine()
    with pytest.raises(TypeError, match="coroutine"):
        loop.call_soon(made)
    made.close()


def test_get_debug_follows_set_debug(loop):
    loop.set_debug(True)
    assert loop.get_debug() is True
    loop.set_debug(False)
    assert loop.get_debug() is False


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
