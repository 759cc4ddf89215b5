"""Callbacks: order, stop, exceptions, threads, contexts, debug mode, the life of the loop."""

import asyncio
import contextvars
import logging
import threading
import time

import pytest
from helpers import LIMIT, in_thread, run_once, until

UVLOOP_LOOP = "https://github.com/MagicStack/uvloop/blob/v0.21.0/uvloop/loop.pyx"
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
