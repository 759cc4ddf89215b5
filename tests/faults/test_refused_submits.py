"""io_uring_enter refused while the loop runs: for a moment, for long, or for good."""

import asyncio
import errno
import gc
import socket
import time

import figures
import pytest
from helpers import assert_same, in_thread, make_pair, open_fds, pattern, read_exactly, until
from workload import Workload

import uringloop
from uringloop import _core

pytestmark = pytest.mark.skipif(
    not hasattr(_core, "disturb_refuse") or bool(uringloop.unavailable_reason()),
    reason="needs the proving build (make faults) and io_uring")

FOR_A_WHILE = ("EAGAIN", "EBUSY", "EINTR")
FOR_GOOD = ("ENOMEM", "EPERM", "EBADF", "EFAULT", "EINVAL", "ENXIO", "EOPNOTSUPP", "ENOSYS")
TINY = {"ring_entries": 2, "recv_buffers": 4, "recv_buffer_size": 256}


@pytest.fixture(autouse=True)
def undisturbed():
    yield
    _core.disturb_nothing()


def new_loop(**options):
    return uringloop.new_event_loop(uringloop.LoopOptions(backend="io_uring", **options))


def work(refusals, contexts, **options):
    """The workload while submits are refused; the number of faults."""
    loop = new_loop(**options)
    contexts_of_errors = []
    loop.set_exception_handler(lambda loop, context: contexts_of_errors.append(context))
    for number, chances in refusals:
        _core.disturb_refuse(-number, **chances)
    try:
        outcome = loop.run_until_complete(
            asyncio.wait_for(Workload(loop, contexts=contexts).run(), 60))
    finally:
        faults = _core.disturb_nothing()
        loop.close()
    assert not outcome.failed
    assert not outcome.errors
    assert not contexts_of_errors
    figures.count("io_uring", cases=1, faults=faults, connections=outcome.connections,
                  bytes=outcome.bytes)
    return faults


@pytest.mark.parametrize("tiny", [False, True], ids=["usual", "tiny"])
@pytest.mark.parametrize("times", [1, 2, 19, 99, 100, 101, 250])
@pytest.mark.parametrize("error", FOR_A_WHILE)
def test_refusals_in_a_row_lose_nothing(error, times, tiny, contexts):
    for skip in range(figures.repeats(2)):
        refusal = (getattr(errno, error), {"times": times, "skip": 3 * (skip % 6)})
        assert work([refusal], contexts, **(TINY if tiny else {})) == times


@pytest.mark.parametrize("tiny", [False, True], ids=["usual", "tiny"])
@pytest.mark.parametrize("one_in", [2, 10])
@pytest.mark.parametrize("error", FOR_A_WHILE)
def test_storms_of_refusals_lose_nothing(error, one_in, tiny, contexts):
    for seed in range(figures.repeats(2)):
        _core.disturb_seed(seed)
        work([(getattr(errno, error), {"times": 100_000, "one_in": one_in})], contexts,
             **(TINY if tiny else {}))


@pytest.mark.parametrize("error", FOR_A_WHILE)
def test_the_loop_goes_on_while_nothing_can_be_submitted(error):
    """Timers, callbacks and tasks run; when memory is back, so do the connections."""
    async def main(loop):
        # Two connections, as a single small send is a system call of its own.
        pairs = [make_pair() for _ in range(2)]
        transports = [(await loop.create_connection(asyncio.Protocol, sock=ours))[0]
                      for ours, _ in pairs]
        with pairs[0][1], pairs[1][1]:
            reading, writing = socket.socketpair()
            reading.setblocking(False)
            with reading, writing:
                _core.disturb_refuse(-getattr(errno, error), times=10 ** 9)
                for transport in transports:
                    transport.write(pattern(1000))
                receiving = loop.create_task(loop.sock_recv(reading, 100))
                writing.send(b"late")
                await asyncio.sleep(0.05)
                sent = loop.stats().bytes_sent
                _core.disturb_nothing()
                for _, peer in pairs:
                    assert_same(await in_thread(read_exactly, peer, 1000), pattern(1000))
                assert await receiving == b"late"
                for transport in transports:
                    transport.abort()
        return sent

    loop = new_loop()
    try:
        assert loop.run_until_complete(asyncio.wait_for(main(loop), 30)) == 0
    finally:
        loop.close()


@pytest.mark.parametrize("error", FOR_A_WHILE)
def test_what_was_refused_never_reaches_the_next_owner_of_a_descriptor(error):
    """A request that is left in the queue would name the socket that has the number by then."""
    async def main(loop):
        first, first_peer = make_pair("unix")
        call = loop.create_task(loop.sock_recv(first, 100))
        _core.disturb_refuse(-getattr(errno, error), times=100)
        await asyncio.sleep(0)
        number = first.fileno()
        await asyncio.sleep(0)
        first.close()
        second, second_peer = socket.socketpair()
        assert number in (second.fileno(), second_peer.fileno())
        other = second if second.fileno() == number else second_peer
        sender = second_peer if other is second else second
        sender.send(b"not for the first call")
        with pytest.raises(OSError) as failure:
            await call
        assert failure.value.errno == errno.EBADF
        assert other.recv(100, socket.MSG_DONTWAIT) == b"not for the first call"
        for sock in (first_peer, second, second_peer):
            sock.close()

    loop = new_loop()
    try:
        loop.run_until_complete(asyncio.wait_for(main(loop), 30))
        assert _core.disturbed() == [100]
    finally:
        loop.close()


def refused_for_good(number, skip, contexts):
    """Run the workload into the refusal and close the loop; the number of faults."""
    loop = new_loop()
    loop.set_exception_handler(lambda loop, context: None)
    _core.disturb_refuse(-number, times=10 ** 9, skip=skip)
    try:
        loop.run_until_complete(Workload(loop, contexts=contexts).run())
    except OSError as exc:
        assert type(exc).__name__ == "RingError"        # noqa: PT017
        assert "io_uring_enter failed" in str(exc)      # noqa: PT017
        assert exc.errno == number                      # noqa: PT017
        exc.__traceback__ = None
    else:
        pytest.fail("run_until_complete() returned")
    loop.close()
    assert loop.stats().in_flight == loop.stats().operations == 0
    return sum(_core.disturbed())


@pytest.mark.filterwarnings("ignore")       # tasks and transports that are left behind
@pytest.mark.parametrize("skip", range(6))
@pytest.mark.parametrize("error", FOR_GOOD)
def test_a_refusal_for_good_leaves_run_forever_and_the_loop_can_be_closed(error, skip, contexts):
    before = open_fds()
    faults = refused_for_good(getattr(errno, error), 3 * skip, contexts)
    deadline = time.monotonic() + 5
    while (left := open_fds().items() - before.items()) and time.monotonic() < deadline:
        gc.collect()
    assert not left
    figures.count("io_uring", cases=1, faults=faults)


@pytest.mark.parametrize("tiny", [False, True], ids=["usual", "tiny"])
@pytest.mark.parametrize("error", FOR_GOOD)
def test_a_loop_that_is_run_again_after_an_error_loses_nothing(error, tiny, contexts):
    """ENOMEM may pass; then the requests that were taken back are made again."""
    number = getattr(errno, error)
    for turn in range(figures.repeats(10)):
        skip = turn % 10        # the work makes some more submits than that
        loop = new_loop(**(TINY if tiny else {}))
        _core.disturb_refuse(-number, times=1 + skip % 3, skip=skip)
        task = loop.create_task(asyncio.wait_for(Workload(loop, contexts=contexts).run(), 60))
        while not task.done():
            try:
                outcome = loop.run_until_complete(task)
            except OSError as exc:
                assert exc.errno == number      # noqa: PT017
        faults = _core.disturb_nothing()
        loop.close()
        assert not outcome.failed
        assert not outcome.errors
        assert faults == 1 + skip % 3
        figures.count("io_uring", cases=1, faults=faults, connections=outcome.connections,
                      bytes=outcome.bytes)


def test_a_full_queue_of_requests_that_nobody_takes_is_made_again(contexts):
    """The queue overflows within a tick: connections by the dozen on a ring of two entries."""
    async def main(loop):
        pairs = [make_pair("unix") for _ in range(50)]
        transports = []
        for ours, _ in pairs:
            transports.append((await loop.create_connection(asyncio.Protocol, sock=ours))[0])
        _core.disturb_refuse(-errno.EAGAIN, times=1234)
        for seed, transport in enumerate(transports):
            transport.write(pattern(100, seed))
            transport.pause_reading()
        await until(lambda: loop.stats().bytes_sent == 50 * 100)
        for seed, (_, peer) in enumerate(pairs):
            assert_same(read_exactly(peer, 100), pattern(100, seed))
            peer.close()
            transports[seed].abort()

    loop = new_loop(**TINY)
    try:
        loop.run_until_complete(asyncio.wait_for(main(loop), 30))
    finally:
        assert _core.disturb_nothing() == 1234
        loop.close()
