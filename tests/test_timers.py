"""Timers: order, never early, cancelling, the TimerHandle."""

import asyncio
import gc
import math
import random
import time
import weakref

import pytest
from helpers import run_once, ticks, until
from references import UVLOOP_CLOCK

UVLOOP_TIMERS = "https://github.com/MagicStack/uvloop/issues/482"
UVLOOP_ORDER = "https://docs.libuv.org/en/v1.x/design.html#the-i-o-loop"


def nothing():
    pass


def run_until(loop, predicate):
    loop.run_until_complete(until(predicate))


# Order


def test_timers_fire_in_the_order_of_their_deadlines(loop):
    fired = []
    for delay in (0.03, 0.01, 0.02, 0.0, 0.015):
        loop.call_later(delay, fired.append, delay)
    run_until(loop, lambda: len(fired) == 5)
    assert fired == sorted(fired)


@pytest.mark.asyncio_differs(
    "its heap does not keep the order of equals",
    "https://docs.python.org/3/library/asyncio-eventloop.html#asyncio.loop.call_later",
)
@pytest.mark.uvloop_differs("runs timers of one millisecond together", UVLOOP_CLOCK)
def test_timers_with_one_deadline_fire_in_the_order_they_were_made(loop):
    fired = []
    when = loop.time() + 0.01
    for number in range(100):
        loop.call_at(when, fired.append, number)
    run_until(loop, lambda: len(fired) == 100)
    assert fired == list(range(100))


@pytest.mark.uvloop_differs("runs timers first", UVLOOP_ORDER)
def test_a_due_timer_runs_after_what_is_ready_already(loop):
    fired = []
    loop.call_later(0, fired.append, "timer")
    loop.call_soon(fired.append, "soon")
    run_until(loop, lambda: len(fired) == 2)
    assert fired == ["soon", "timer"]


@pytest.mark.uvloop_differs("runs timers first", UVLOOP_ORDER)
def test_a_timer_made_by_a_timer_does_not_run_in_the_same_iteration(loop):
    fired = []

    def first():
        fired.append("first")
        loop.call_later(0, fired.append, "second")
        loop.call_soon(fired.append, "soon")

    loop.call_later(0, first)
    run_until(loop, lambda: len(fired) == 3)
    assert fired == ["first", "soon", "second"]


# Never early


@pytest.mark.uvloop_differs("its clock ticks in milliseconds", UVLOOP_CLOCK)
def test_a_timer_never_fires_early_on_either_clock(loop):
    early = []
    fired = []
    resolution = 2 * time.get_clock_info("monotonic").resolution  # 2: floats are rounded

    def check(when, monotonic_when):
        fired.append(when)
        if loop.time() + resolution < when:
            early.append(("loop.time", when - loop.time()))
        if time.monotonic() + resolution < monotonic_when:
            early.append(("time.monotonic", monotonic_when - time.monotonic()))

    choose = random.Random(1)
    for _ in range(300):
        delay = choose.uniform(0, 0.05)
        monotonic_now, now = time.monotonic(), loop.time()
        loop.call_later(delay, check, now + delay, monotonic_now + delay)
        loop.call_at(now + delay, check, now + delay, monotonic_now + delay)
    run_until(loop, lambda: len(fired) == 600)
    assert early == []


@pytest.mark.parametrize("delay", [0.0003, 0.001, 0.0049])
@pytest.mark.uvloop_differs("its clock ticks in milliseconds", UVLOOP_CLOCK)
async def test_a_sleep_is_never_shorter_than_asked(loop, delay):
    resolution = time.get_clock_info("monotonic").resolution
    for _ in range(20):
        before = time.monotonic()
        await asyncio.sleep(delay)
        assert time.monotonic() - before + resolution >= delay


# Delays at the edge


@pytest.mark.parametrize("delay", [0, 0.0, -1, -math.inf, -1e9], ids=repr)
def test_a_delay_that_is_over_fires_at_once(loop, delay):
    fired = []
    loop.call_later(delay, fired.append, "x")
    run_until(loop, lambda: fired)


def test_call_at_in_the_past_fires_at_once(loop):
    fired = []
    loop.call_at(loop.time() - 100, fired.append, "x")
    loop.call_at(0, fired.append, "y")
    run_until(loop, lambda: len(fired) == 2)


@pytest.mark.parametrize("delay", [1e6, 1e12, 1e300, 2**63, math.inf], ids=repr)
def test_a_huge_delay_never_fires_and_disturbs_nothing(loop, delay):
    fired = []
    handle = loop.call_later(delay, fired.append, "never")
    loop.call_later(0.001, fired.append, "soon")
    run_until(loop, lambda: fired)
    run_once(loop)
    assert fired == ["soon"]
    assert handle.when() > loop.time()
    handle.cancel()


@pytest.mark.parametrize("wrong", [None, "1", [], object()], ids=lambda w: type(w).__name__)
def test_a_delay_that_is_no_number_is_a_type_error(loop, wrong):
    with pytest.raises(TypeError):
        loop.call_later(wrong, nothing)


def test_call_at_none_is_a_type_error(loop):
    with pytest.raises(TypeError):
        loop.call_at(None, nothing)


# Cancelling


def test_a_cancelled_timer_does_not_fire(loop):
    fired = []
    loop.call_later(0.001, fired.append, "cancelled").cancel()
    loop.call_later(0.002, fired.append, "kept")
    run_until(loop, lambda: fired)
    assert fired == ["kept"]


@pytest.mark.uvloop_differs("runs timers first", UVLOOP_ORDER)
def test_a_timer_cancelled_when_it_is_due_does_not_fire(loop):
    fired = []
    handle = loop.call_later(0.001, fired.append, "cancelled")
    while time.monotonic() < handle.when():
        time.sleep(0.001)
    loop.call_soon(handle.cancel)
    loop.call_later(0.001, fired.append, "kept")
    run_until(loop, lambda: "kept" in fired)
    assert fired == ["kept"]


def test_a_timer_cancelled_by_another_of_the_same_deadline_does_not_fire(loop):
    fired = []
    handles = []

    def fire(number):
        fired.append(number)
        for handle in handles:
            handle.cancel()

    when = loop.time() + 0.001
    handles += [loop.call_at(when, fire, number) for number in range(5)]
    run_until(loop, lambda: fired)
    run_once(loop)
    assert len(fired) == 1


def test_a_timer_may_cancel_itself(loop):
    fired = []

    def fire():
        handle.cancel()
        fired.append("x")

    handle = loop.call_later(0, fire)
    run_until(loop, lambda: fired)
    run_once(loop)
    assert fired == ["x"]


def test_cancelling_again_or_after_firing_does_nothing(loop):
    fired = []
    handle = loop.call_later(0, fired.append, "x")
    run_until(loop, lambda: fired)
    handle.cancel()
    handle.cancel()
    other = loop.call_later(10, nothing)
    other.cancel()
    other.cancel()
    run_once(loop)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.uvloop_differs("its clock ticks in milliseconds", UVLOOP_CLOCK)
def test_of_10000_timers_exactly_the_survivors_fire_in_order(loop, seed):
    choose = random.Random(seed)
    fired = []
    start = loop.time()
    whens = [start + 0.05 + choose.randrange(1000) / 10_000 for _ in range(10_000)]
    handles = [loop.call_at(when, fired.append, n) for n, when in enumerate(whens)]
    cancelled = set(choose.sample(range(10_000), 7000))
    early = list(cancelled)[:5000]
    for number in early:
        handles[number].cancel()
    run_once(loop)
    late = cancelled.difference(early, fired)  # a slow machine may have fired some already
    for number in late:
        handles[number].cancel()
    survivors = set(range(10_000)).difference(early, late)
    run_until(loop, lambda: len(fired) >= len(survivors))
    run_once(loop)
    assert sorted(fired) == sorted(survivors)
    assert [whens[n] for n in fired] == sorted(whens[n] for n in fired)


def test_timers_made_and_cancelled_by_the_thousand_leave_the_rest_alone(loop):
    fired = []
    for number in range(50):
        loop.call_later(0.01 + number / 10_000, fired.append, number)
    for _ in range(20_000):
        loop.call_later(60, nothing).cancel()
    run_until(loop, lambda: len(fired) == 50)
    assert fired == list(range(50))


class Thing:
    pass


def test_a_cancelled_timer_lets_go_of_its_arguments(loop):
    thing = Thing()
    seen = weakref.ref(thing)
    handle = loop.call_later(1000, nothing, thing)
    del thing
    assert seen() is not None
    handle.cancel()
    gc.collect()
    assert seen() is None


def test_a_fired_timer_lets_go_of_its_arguments(loop):
    thing = Thing()
    seen = weakref.ref(thing)
    fired = []
    handle = loop.call_later(0, lambda _: fired.append(1), thing)
    del thing
    run_until(loop, lambda: fired)
    del handle
    run_once(loop)
    gc.collect()
    assert seen() is None


def test_cancelled_timers_are_dropped_while_the_loop_runs(loop):
    handles = [loop.call_later(1000, nothing) for _ in range(1000)]
    try:
        seen = [weakref.ref(handle) for handle in handles]
    except TypeError:
        pytest.skip("the handles of this loop cannot be referenced weakly")
    for handle in handles:
        handle.cancel()
    del handles, handle
    for _ in range(3):
        run_once(loop)
    gc.collect()
    assert sum(reference() is not None for reference in seen) <= 500


# TimerHandle


@pytest.mark.uvloop_differs("its handles have no asyncio base", UVLOOP_TIMERS)
@pytest.mark.parametrize("delay", [0, -1, 10])
def test_call_later_gives_an_asyncio_timer_handle(loop, delay):
    handle = loop.call_later(delay, nothing)
    assert isinstance(handle, asyncio.TimerHandle)
    assert isinstance(handle, asyncio.Handle)
    handle.cancel()


@pytest.mark.uvloop_differs("its handles have no asyncio base", UVLOOP_TIMERS)
def test_call_soon_gives_an_asyncio_handle_that_is_no_timer_handle(loop):
    handle = loop.call_soon(nothing)
    assert isinstance(handle, asyncio.Handle)
    assert not isinstance(handle, asyncio.TimerHandle)
    run_once(loop)


@pytest.mark.uvloop_differs("counts in milliseconds", UVLOOP_CLOCK)
def test_when_is_the_deadline_that_was_asked_for(loop):
    when = loop.time() + 12.34567
    handle = loop.call_at(when, nothing)
    assert handle.when() == when
    before = loop.time()
    other = loop.call_later(5, nothing)
    assert before + 5 <= other.when() <= loop.time() + 5
    handle.cancel()
    other.cancel()


def test_cancelled_tells_whether_it_was(loop):
    handle = loop.call_later(10, nothing)
    assert handle.cancelled() is False
    handle.cancel()
    assert handle.cancelled() is True


@pytest.mark.uvloop_differs("its handles do not compare", UVLOOP_TIMERS)
def test_timer_handles_are_ordered_by_their_deadlines(loop):
    early, late = loop.call_at(1e9, nothing), loop.call_at(2e9, nothing)
    assert early < late and early <= late and late > early and late >= early
    assert not (late < early) and not (late <= early)
    assert early != late and early == early
    assert sorted([late, early]) == [early, late]


@pytest.mark.uvloop_differs("its handles do not compare", UVLOOP_TIMERS)
def test_timer_handles_of_one_deadline_and_callback_are_equal(loop):
    first, second = loop.call_at(1e9, nothing), loop.call_at(1e9, nothing)
    other = loop.call_at(1e9, print)
    assert first == second and hash(first) == hash(second)
    assert first <= second and first >= second
    assert first != other
    assert first != 5


def test_timer_handles_may_be_kept_in_sets(loop):
    handles = [loop.call_later(10 + number, nothing) for number in range(10)]
    assert len(set(handles)) == 10
    assert handles[3] in set(handles)
    for handle in handles:
        handle.cancel()


@pytest.mark.parametrize("debug", [False, True])
def test_repr_of_a_timer_handle_names_the_callback_and_the_state(loop, debug):
    loop.set_debug(debug)
    handle = loop.call_later(10, nothing)
    assert "nothing" in repr(handle)
    handle.cancel()
    assert "cancelled" in repr(handle)


async def test_a_timer_wakes_an_idle_loop(loop):
    future = loop.create_future()
    loop.call_later(0.02, future.set_result, "woken")
    assert await future == "woken"


async def test_a_new_earlier_timer_does_not_wait_for_an_older_later_one(loop):
    late = loop.call_later(3600, nothing)
    await ticks()
    future = loop.create_future()
    loop.call_later(0.001, future.set_result, "early")
    assert await future == "early"
    late.cancel()


def test_the_loop_closes_with_timers_pending(loop):
    fired = []
    loop.call_later(0.001, fired.append, "x")
    handle = loop.call_later(1000, fired.append, "y")
    loop.close()
    assert fired == []
    handle.cancel()
