"""How the loop waits: with busy_poll nothing is missed, and it is given up where it doesn't pay."""

import asyncio
import os
import signal
import threading
import time

import pytest
from helpers import LIMIT, connected, make_loop, read_exactly, until
from references import UVLOOP_CLOCK

LONGEST = 0.01      # of busy_poll


@pytest.fixture
def spinning(loop_kind):
    """A loop that looks for 10 ms before it blocks; asyncio's and uvloop's loops don't."""
    loop = make_loop(loop_kind, busy_poll=LONGEST)
    yield loop
    loop.close()


def paid(loop):
    """How often looking was worth it; of loops that don't look, always more."""
    return loop.stats().spins_paid if hasattr(loop, "stats") else time.monotonic_ns()


def looked(loop):
    """Waits that began with looking."""
    return loop.stats().spins if hasattr(loop, "stats") else time.monotonic_ns()


def run_until_it_pays(loop, exchange, count=paid):
    """Repeats what makes the loop wait until it has found the answer without being put to sleep."""

    async def main():
        before = count(loop)
        deadline = loop.time() + LIMIT
        while count(loop) == before:
            assert loop.time() < deadline, "was always put to sleep"
            await exchange()

    loop.run_until_complete(main())


def soon(function, *args):
    """Calls it in a thread, a little later, so that the loop waits meanwhile."""
    timer = threading.Timer(0.002, function, args)
    timer.start()
    return timer


def test_calls_of_threads_are_seen_while_looking(spinning):
    async def exchange():
        future = spinning.create_future()
        thread = soon(spinning.call_soon_threadsafe, future.set_result, None)
        await future
        thread.join()

    run_until_it_pays(spinning, exchange)


def test_descriptors_are_seen_while_looking(spinning):
    reading, writing = os.pipe()

    async def exchange():
        readable = asyncio.Event()
        spinning.add_reader(reading, readable.set)
        thread = soon(os.write, writing, b"x")
        await readable.wait()
        assert os.read(reading, 2) == b"x"
        spinning.remove_reader(reading)
        thread.join()

    run_until_it_pays(spinning, exchange)
    os.close(reading)
    os.close(writing)


def test_data_is_seen_while_looking(spinning):
    async def exchange():
        async with connected() as (transport, protocol, peer):
            thread = soon(peer.sendall, b"data")
            await until(lambda: protocol.data == b"data")
            transport.write(b"answer")
            assert await spinning.run_in_executor(None, read_exactly, peer, 6) == b"answer"
            thread.join()

    run_until_it_pays(spinning, exchange)
    spinning.run_until_complete(spinning.shutdown_default_executor())


@pytest.mark.uvloop_differs("its clock ticks in milliseconds", UVLOOP_CLOCK)
def test_timers_are_never_early_and_in_order(spinning):
    async def main():
        def ring(number, deadline):
            rung.append(number)
            early.append(spinning.time() < deadline)

        rung, early = [], []
        now = spinning.time()
        delays = [0.003 * number for number in range(12)]       # some within 10 ms, some beyond
        for number, delay in reversed(list(enumerate(delays))):
            spinning.call_at(now + delay, ring, number, now + delay)
        await until(lambda: len(rung) == len(delays))
        assert rung == sorted(rung)
        assert not any(early)

    spinning.run_until_complete(main())


@pytest.mark.parametrize("how", ["signal.signal", "add_signal_handler"])
def test_a_signal_that_comes_while_the_loop_looks(spinning, how):
    """Nothing else happens: a loop that went to sleep after it would sleep for ever."""
    future = spinning.create_future()
    if how == "signal.signal":
        old = signal.signal(signal.SIGALRM, lambda *_: spinning.call_soon_threadsafe(
            future.set_result, "handled"))
    else:
        spinning.add_signal_handler(signal.SIGALRM, future.set_result, "handled")
    late = spinning.call_later(LIMIT, spinning.stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, LONGEST / 5)
        assert spinning.run_until_complete(future) == "handled"
    finally:
        late.cancel()
        if how == "signal.signal":
            signal.signal(signal.SIGALRM, old)
        else:
            spinning.remove_signal_handler(signal.SIGALRM)


def test_a_thread_forks_while_the_loop_looks(spinning):
    def fork():
        child = os.fork()
        if child == 0:
            os._exit(7)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    async def exchange():
        assert await spinning.run_in_executor(None, fork) == 7

    # To fork a process with much memory takes longer than the loop may look.
    run_until_it_pays(spinning, exchange, looked)
    spinning.run_until_complete(spinning.shutdown_default_executor())


def test_looking_is_given_up_where_it_does_not_pay(loop_kind):
    """Every wait is a thousand times longer than it may look."""
    loop = make_loop(loop_kind, busy_poll=0.000001)

    async def main():
        for _ in range(WAITS):
            await asyncio.sleep(0.001)

    WAITS = 130
    loop.run_until_complete(main())
    if hasattr(loop, "stats"):
        # At the beginning, and then in each 64th wait.
        assert 1 <= loop.stats().spins <= 2 + WAITS // 64 * 2
        assert loop.stats().spins_paid == 0
    loop.close()


def test_without_the_option_the_loop_never_looks(loop_kind):
    loop = make_loop(loop_kind)
    loop.run_until_complete(asyncio.sleep(0.001))
    assert not hasattr(loop, "stats") or loop.stats().spins == 0
    loop.close()


def test_threads_run_beside_a_loop_whose_descriptors_are_always_ready(loop_kind):
    """Looking at once keeps the GIL: it must be given up all the same."""
    loop = make_loop(loop_kind)
    reading, writing = os.pipe()
    os.write(writing, b"x")     # and nobody reads it

    def work():
        for _ in range(20):
            time.sleep(0.0001)
        loop.call_soon_threadsafe(loop.stop)

    thread = threading.Thread(target=work)
    loop.add_reader(reading, int)
    late = loop.call_later(LIMIT, os._exit, 1)
    loop.call_soon(thread.start)
    loop.run_forever()
    late.cancel()
    thread.join()
    loop.remove_reader(reading)
    os.close(reading)
    os.close(writing)
    loop.close()
