"""set_read_timeout() and set_write_timeout(): connections on which nothing moves, per direction."""

import asyncio
import contextlib
import contextvars
import gc
import math
import ssl
import tempfile
import time
import weakref

import pytest
from helpers import (
    BufferedRecorder,
    Lifetime,
    Recorder,
    connected,
    has_ended,
    in_thread,
    make_pair,
    read_exactly,
    read_to_end,
    run_once,
    serving,
    ticks,
    until,
)

import uringloop

KINDS = ("io_uring", "epoll")
SHORT = 0.03  # seconds: a timeout that is to run out
LONG = 3600
STEP = 0.003  # seconds between the steps of what keeps a connection alive
RESOLUTION = 2 * time.get_clock_info("monotonic").resolution  # 2: floats are rounded
NO_DATA = f"no data received for {SHORT} s"
NOT_SENT = f"no data could be sent for {SHORT} s"
PLENTY = bytes(8 << 20)  # more than any pair of socket buffers holds


class Clocked(Lifetime):
    """Notes when it was told what, by its loop's clock."""

    def __init__(self):
        super().__init__()
        self.received_at = self.lost_at = None

    def now(self):
        return asyncio.get_running_loop().time()

    def connection_lost(self, exc):
        self.lost_at = self.now()
        super().connection_lost(exc)


class Receiving(Clocked, Recorder):
    def data_received(self, data):
        super().data_received(data)
        self.received_at = self.now()


class Buffering(Clocked, BufferedRecorder):
    def buffer_updated(self, nbytes):
        super().buffer_updated(nbytes)
        self.received_at = self.now()


class Asked(Receiving):
    """Answers read_timed_out() and write_timed_out() as a function says."""

    def __init__(self, answer):
        super().__init__()
        self.answer = answer
        self.asked_at = []

    def read_timed_out(self):
        self.asked_at.append(self.now())
        self.calls.append("read_timed_out")
        return self.answer(self)

    def write_timed_out(self):
        self.asked_at.append(self.now())
        self.calls.append("write_timed_out")
        return self.answer(self)


def asked(answer):
    return lambda: Asked(answer)


def assert_timed_out(protocol, text, since):
    """It ended with that error, and not earlier than SHORT after that time."""
    assert [type(exc) for exc in protocol.lost_with] == [TimeoutError]
    assert str(protocol.lost_with[0]) == text
    assert protocol.lost_at - since + RESOLUTION >= SHORT


def timers(loop):
    """The handles of timeouts in the loop's heap."""
    return [found for found in gc.get_objects()
            if type(found) is uringloop._core.TimerHandle and found._scheduled
            and found._loop is loop and found._callback.__name__ == "_ran_out"]


@contextlib.contextmanager
def stepping(loop, function, *args):
    """Calls the function every few milliseconds, in the loop, so that both stall together."""
    handle = None

    def step():
        nonlocal handle
        handle = loop.call_later(STEP, step)
        function(*args)

    step()
    yield
    handle.cancel()


async def a_while(loop, periods=3):
    """Longer than SHORT, by the loop's clock."""
    await asyncio.sleep(periods * SHORT)


# Read


@pytest.mark.parametrize("family", ["tcp", "unix"])
@pytest.mark.parametrize("factory", [Receiving, Buffering])
async def test_silence_ends_the_connection(loop, factory, family):
    async with connected(factory, family) as (transport, protocol, peer):
        await ticks()
        since = loop.time()
        transport.set_read_timeout(SHORT)
        await protocol.lost()
        assert_timed_out(protocol, NO_DATA, since)
        assert await in_thread(has_ended, peer)
        assert transport.is_closing()


async def test_unsent_output_is_dropped(loop):
    async with connected(Receiving) as (transport, protocol, _):
        transport.write(PLENTY)
        transport.set_read_timeout(SHORT)
        assert isinstance(await protocol.lost(), TimeoutError)
        assert transport.get_write_buffer_size() == 0


async def test_servers_set_it_in_connection_made(loop):
    made = []

    class Serving(Receiving):
        def connection_made(self, transport):
            super().connection_made(transport)
            made.append(self)
            self.since = loop.time()
            transport.set_read_timeout(SHORT)

    async with serving(Serving) as (_, address):
        reader, writer = await asyncio.open_connection(*address)
        await reader.read()
        await until(lambda: made and made[0].lost_with)
        assert_timed_out(made[0], NO_DATA, made[0].since)
        writer.close()


@pytest.mark.parametrize("size", [1, 100_000])
@pytest.mark.parametrize("factory", [Receiving, Buffering])
@pytest.mark.parametrize("family", ["tcp", "unix"])
async def test_each_arrival_begins_a_new_period(loop, factory, size, family):
    async with connected(factory, family) as (transport, protocol, peer):
        peer.setblocking(False)
        sent_at = 0

        def send():
            nonlocal sent_at
            sent_at = loop.time()
            with contextlib.suppress(BlockingIOError):
                peer.send(bytes(size))

        transport.set_read_timeout(SHORT)
        with stepping(loop, send):
            await a_while(loop, 6)
            assert protocol.data and not protocol.lost_with
        await protocol.lost()
        assert_timed_out(protocol, NO_DATA, sent_at)
        assert_timed_out(protocol, NO_DATA, protocol.received_at)


@pytest.mark.parametrize("size", [1, 100_000])
async def test_the_period_begins_after_the_protocol_has_handled_the_data(loop, size):
    class Slow(Receiving):
        def data_received(self, data):
            time.sleep(2 * SHORT)
            super().data_received(data)

    async with connected(Slow) as (transport, protocol, peer):
        transport.set_read_timeout(SHORT)
        peer.sendall(bytes(size))
        await protocol.lost()
        assert len(protocol.data) == size
        assert_timed_out(protocol, NO_DATA, protocol.received_at)


@pytest.mark.parametrize("size", [1, 100_000])
async def test_what_came_while_the_loop_was_busy_counts(loop, size):
    class Busy(Receiving):
        def data_received(self, data):
            if not self.data:
                time.sleep(2 * SHORT)
                peer.send(b"x")
            super().data_received(data)

    async with connected(Busy) as (transport, protocol, peer):
        transport.set_read_timeout(SHORT)
        await ticks()
        # In large mode, and while that is changed, the receive has to be asked for again.
        for number in range(6):
            time.sleep(2 * SHORT)
            peer.sendall(bytes(size))
            await protocol.received(size * (number + 1))
            assert not protocol.lost_with
        await protocol.lost()
        assert len(protocol.data) == 6 * size + 1


async def test_the_deadline_is_a_period_after_the_last_data(loop):
    class Noting(Receiving):
        def data_received(self, data):
            super().data_received(data)
            loop.call_soon(lambda: noted.append(loop.time()))

    noted, deadlines = [], []
    async with connected(Noting) as (transport, protocol, peer):
        transport.set_read_timeout(SHORT)
        peer.sendall(b"x")
        # After the timer's own turn, which is the one made first.
        first, = timers(loop)
        loop.call_at(first.when(), lambda: deadlines.append(timers(loop)[0].when()))
        await until(lambda: noted and deadlines)
        assert deadlines[0] + RESOLUTION >= protocol.received_at + SHORT
        assert deadlines[0] - RESOLUTION <= noted[0] + SHORT


async def test_what_came_while_another_callback_ran_counts(loop):
    async with connected(Receiving) as (transport, protocol, peer):
        transport.set_read_timeout(SHORT)
        await ticks()
        for number in range(3):
            loop.call_soon(time.sleep, 2 * SHORT)
            loop.call_soon(peer.sendall, b"x")
            await protocol.received(number + 1)
        assert not protocol.lost_with


def test_what_waited_for_a_receive_block_counts(loop_kind, ledger):
    """The pool has 4 blocks: most connections have to ask again while their timers run out."""
    options = uringloop.LoopOptions(backend=loop_kind, recv_buffers=4)
    loop = uringloop.new_event_loop(options)
    loop.set_exception_handler(ledger.handler)
    pairs = [make_pair("unix") for _ in range(16)]

    def wait_and_send():
        time.sleep(2 * SHORT)
        for _, peer in pairs:
            peer.sendall(b"x")

    async def main():
        protocols = []
        for ours, _ in pairs:
            transport, protocol = await loop.create_connection(Receiving, sock=ours)
            protocols.append(protocol)
            transport.set_read_timeout(SHORT)
        await ticks()
        loop.call_soon(wait_and_send)
        await until(lambda: all(protocol.data or protocol.lost_with for protocol in protocols))
        assert [protocol.lost_with for protocol in protocols] == [[]] * 16
        for protocol in protocols:
            await protocol.lost()
            assert_timed_out(protocol, NO_DATA, protocol.received_at)

    loop.run_until_complete(main())
    if loop_kind == "io_uring":
        assert loop.stats().buffers_ran_dry > 0
    loop.close()
    for _, peer in pairs:
        peer.close()


def test_what_an_interrupt_left_in_the_queue_counts(loop):
    """The next run has the timer's turn before that of the data."""
    def interrupt():
        raise KeyboardInterrupt

    def wait_and_send():
        time.sleep(2 * SHORT)
        peer.sendall(b"x")
        loop.call_soon(interrupt)

    async def begin():
        ours, peer = make_pair()
        transport, protocol = await loop.create_connection(Receiving, sock=ours)
        await ticks()
        transport.set_read_timeout(SHORT)
        return protocol, peer

    protocol, peer = loop.run_until_complete(begin())
    loop.call_soon(wait_and_send)
    with pytest.raises(KeyboardInterrupt):
        loop.run_forever()
    loop.run_until_complete(until(lambda: protocol.data or protocol.lost_with))
    assert bytes(protocol.data) == b"x" and not protocol.lost_with
    loop.run_until_complete(protocol.lost())
    assert_timed_out(protocol, NO_DATA, protocol.received_at)
    peer.close()


async def test_it_stands_still_until_reading_begins(loop):
    class Late(Receiving):
        def connection_made(self, transport):
            super().connection_made(transport)
            transport.pause_reading()
            transport.set_read_timeout(SHORT)

    async with connected(Late) as (transport, protocol, _):
        await a_while(loop)
        assert not protocol.lost_with and timers(loop) == []
        since = loop.time()
        transport.resume_reading()
        await protocol.lost()
        assert_timed_out(protocol, NO_DATA, since)


async def test_it_stands_still_while_reading_is_paused(loop):
    async with connected(Receiving) as (transport, protocol, _):
        transport.set_read_timeout(SHORT)
        for _ in range(2):
            await ticks()
            transport.pause_reading()
            await a_while(loop)
            assert not protocol.lost_with and timers(loop) == []
            since = loop.time()
            transport.resume_reading()
        await protocol.lost()
        assert_timed_out(protocol, NO_DATA, since)


async def test_pausing_and_resuming_begins_a_new_period(loop):
    async with connected(Receiving) as (transport, protocol, _):
        since = 0

        def turn():
            nonlocal since
            since = loop.time()
            transport.pause_reading()
            transport.resume_reading()

        transport.set_read_timeout(SHORT)
        with stepping(loop, turn):
            await a_while(loop)
            assert not protocol.lost_with
        await protocol.lost()
        assert_timed_out(protocol, NO_DATA, since)


async def test_it_may_be_set_while_paused(loop):
    async with connected(Receiving) as (transport, protocol, _):
        transport.pause_reading()
        transport.set_read_timeout(SHORT)
        await a_while(loop)
        assert not protocol.lost_with
        transport.resume_reading()
        assert isinstance(await protocol.lost(), TimeoutError)


async def test_held_data_counts_when_it_is_delivered(loop):
    class Slow(Receiving):
        def data_received(self, data):
            if self.data:
                time.sleep(2 * SHORT)
            super().data_received(data)

    async with connected(Slow) as (transport, protocol, peer):
        transport.set_read_timeout(SHORT)
        peer.sendall(b"first")
        await protocol.received(5)
        peer.sendall(b"second")
        transport.pause_reading()
        await a_while(loop)
        assert bytes(protocol.data) == b"first" and not protocol.lost_with
        if loop.backend == "io_uring":
            assert loop.stats().bytes_received == 11        # else it waits in the socket
        transport.resume_reading()
        await protocol.lost()
        assert bytes(protocol.data) == b"firstsecond"
        assert_timed_out(protocol, NO_DATA, protocol.received_at)


async def test_after_the_end_of_file_there_is_nothing_to_wait_for(loop):
    class HalfOpen(Receiving):
        keep_open_after_eof = True

    async with connected(HalfOpen) as (transport, protocol, peer):
        transport.set_read_timeout(SHORT)
        peer.shutdown(1)
        await until(lambda: "eof_received" in protocol.calls)
        await a_while(loop)
        transport.set_read_timeout(SHORT)
        await a_while(loop)
        assert not protocol.lost_with
        transport.write(b"still open")
        assert await in_thread(read_exactly, peer, 10) == b"still open"


async def test_it_may_be_changed_at_any_time(loop):
    async with connected(Receiving) as (transport, protocol, _):
        transport.set_read_timeout(SHORT)
        transport.set_read_timeout(LONG)
        await a_while(loop)
        transport.set_read_timeout(SHORT)
        transport.set_read_timeout(None)
        await a_while(loop)
        assert not protocol.lost_with and timers(loop) == []
        transport.set_read_timeout(None)
        transport.set_read_timeout(LONG)
        await ticks()
        since = loop.time()
        transport.set_read_timeout(SHORT)
        await protocol.lost()
        assert_timed_out(protocol, NO_DATA, since)


async def test_changing_it_again_and_again_keeps_the_connection(loop):
    async with connected(Receiving) as (transport, protocol, _):
        transport.set_read_timeout(SHORT)
        with stepping(loop, transport.set_read_timeout, SHORT):
            await a_while(loop)
            assert not protocol.lost_with
            assert len(timers(loop)) == 1


# Write


@pytest.mark.parametrize("family", ["tcp", "unix"])
async def test_a_peer_that_does_not_read_ends_the_connection(loop, family):
    async with connected(Receiving, family) as (transport, protocol, _):
        transport.set_write_timeout(SHORT)
        await a_while(loop)
        since = loop.time()
        transport.write(PLENTY)
        assert timers(loop)
        await protocol.lost()
        assert_timed_out(protocol, NOT_SENT, since)


async def test_without_output_that_waits_there_is_no_timer(loop):
    async with connected(Receiving) as (transport, protocol, peer):
        transport.set_write_timeout(SHORT)
        for _ in range(3):
            transport.write(b"hello")
            await a_while(loop)
        assert not protocol.lost_with and timers(loop) == []
        assert await in_thread(read_exactly, peer, 15) == 3 * b"hello"


async def test_waiting_begins_anew_with_each_write_into_an_empty_buffer(loop):
    async with connected(Receiving) as (transport, protocol, peer):
        transport.set_write_timeout(SHORT)
        with stepping(loop, transport.write, b"x"):
            await a_while(loop)
        await until(lambda: transport.get_write_buffer_size() == 0)
        since = loop.time()
        transport.write(PLENTY)
        await protocol.lost()
        assert_timed_out(protocol, NOT_SENT, since)


def read_some(peer, size, seen):
    with contextlib.suppress(BlockingIOError):
        seen.append(len(peer.recv(size)))


@pytest.mark.parametrize("family", ["tcp", "unix"])
@pytest.mark.parametrize("set_first", [True, False])
async def test_a_slow_reader_keeps_the_connection(loop, set_first, family):
    async with connected(Receiving, family, small=True) as (transport, protocol, peer):
        peer.setblocking(False)
        seen = []
        if set_first:
            transport.set_write_timeout(4 * SHORT)
        transport.write(bytes(2 << 20))
        await ticks()
        with stepping(loop, read_some, peer, 8192, seen):
            # A request that is in flight already must show its progress, too.
            transport.set_write_timeout(2 * SHORT)
            await a_while(loop, 12)
            assert not protocol.lost_with
            assert sum(seen) < 2 << 20
        transport.set_write_timeout(SHORT)
        await protocol.lost()
        assert str(protocol.lost_with[0]) == NOT_SENT


@pytest.mark.parametrize("small", [True, False])
async def test_no_byte_is_lost_or_doubled_by_setting_it(loop, small):
    pattern = bytes(range(251)) * 20_000
    async with connected(Receiving, small=small) as (transport, protocol, peer):
        received = asyncio.ensure_future(in_thread(read_to_end, peer))
        for number in range(0, len(pattern), 500_000):
            transport.write(pattern[number:number + 500_000])
            await ticks(2)
            transport.set_write_timeout(LONG if number % 1_000_000 else None)
        transport.close()
        assert await received == pattern
        assert await protocol.lost() is None
    assert timers(loop) == []


async def test_writing_more_is_no_progress(loop):
    async with connected(Receiving) as (transport, protocol, _):
        transport.set_write_timeout(SHORT)
        since = loop.time()
        transport.write(PLENTY)
        with stepping(loop, transport.write, b"more"):
            await protocol.lost()
        assert_timed_out(protocol, NOT_SENT, since)


@pytest.mark.parametrize("ending", ["close", "write_eof"])
async def test_it_holds_while_the_end_waits_for_output(loop, ending):
    async with connected(Receiving) as (transport, protocol, _):
        transport.set_write_timeout(SHORT)
        since = loop.time()
        transport.write(PLENTY)
        getattr(transport, ending)()
        await protocol.lost()
        assert_timed_out(protocol, NOT_SENT, since)


async def test_it_may_be_set_after_close_while_output_waits(loop):
    async with connected(Receiving) as (transport, protocol, _):
        transport.write(PLENTY)
        transport.close()
        await ticks()
        assert not protocol.lost_with
        since = loop.time()
        transport.set_write_timeout(SHORT)
        await protocol.lost()
        assert_timed_out(protocol, NOT_SENT, since)


async def test_both_directions_have_their_own_timer(loop):
    async with connected(Receiving) as (transport, protocol, peer):
        transport.set_read_timeout(SHORT)
        transport.set_write_timeout(LONG)
        transport.write(PLENTY)
        with stepping(loop, peer.send, b"x"):
            await a_while(loop)
            assert not protocol.lost_with
            assert len(timers(loop)) == 2
            transport.set_write_timeout(SHORT)
            await protocol.lost()
        assert str(protocol.lost_with[0]) == NOT_SENT
    assert timers(loop) == []


async def test_sendfile_is_not_timed(loop):
    async with connected(Receiving) as (transport, protocol, peer):
        transport.set_write_timeout(SHORT)
        transport.set_read_timeout(SHORT)
        with tempfile.TemporaryFile() as file:
            file.write(PLENTY)
            file.seek(0)
            sending = asyncio.ensure_future(loop.sendfile(transport, file))
            await a_while(loop)
            assert not protocol.lost_with
            assert await in_thread(read_exactly, peer, len(PLENTY)) == PLENTY
            assert await sending == len(PLENTY)


def test_a_write_between_two_runs_waits_from_the_second_on(loop):
    async def begin():
        ours, peer = make_pair()
        return (*await loop.create_connection(Receiving, sock=ours), peer)

    transport, protocol, peer = loop.run_until_complete(begin())
    transport.set_write_timeout(SHORT)
    since = loop.time()
    transport.write(PLENTY)
    loop.run_until_complete(protocol.lost())
    assert_timed_out(protocol, NOT_SENT, since)
    peer.close()


# The protocol's own answer


@pytest.mark.parametrize("direction", ["read", "write"])
async def test_the_protocol_may_keep_the_connection(loop, direction):
    async with connected(asked(lambda self: len(self.asked_at) < 4)) as (transport, protocol, _):
        started_at = loop.time()
        if direction == "write":
            transport.set_write_timeout(SHORT)
            transport.write(PLENTY)
        else:
            transport.set_read_timeout(SHORT)
        await protocol.lost()
        assert protocol.calls.count(f"{direction}_timed_out") == 4
        assert_timed_out(protocol, NO_DATA if direction == "read" else NOT_SENT, started_at)
        times = [started_at, *protocol.asked_at]
        assert all(later - earlier + RESOLUTION >= SHORT
                   for earlier, later in zip(times, times[1:]))


@pytest.mark.parametrize("direction", ["read", "write"])
@pytest.mark.parametrize("answer", [None, False, 0, ""], ids=repr)
async def test_anything_false_ends_it(loop, direction, answer):
    async with connected(asked(lambda self: answer)) as (transport, protocol, _):
        getattr(transport, f"set_{direction}_timeout")(SHORT)
        transport.write(PLENTY)
        assert isinstance(await protocol.lost(), TimeoutError)
        assert protocol.calls.count(f"{direction}_timed_out") == 1


def boom(self):
    raise ZeroDivisionError(self.calls[-1])


@pytest.mark.parametrize("direction", ["read", "write"])
async def test_an_exception_in_it_is_fatal(loop, errors, direction):
    async with connected(asked(boom)) as (transport, protocol, _):
        getattr(transport, f"set_{direction}_timeout")(SHORT)
        transport.write(PLENTY)
        assert isinstance(await protocol.lost(), ZeroDivisionError)
    name = f"{direction}_timed_out"
    assert [context["message"] for context in errors] == [
        f"Fatal error: protocol.{name}() call failed."]
    assert errors[0]["exception"] is protocol.lost_with[0]
    assert errors[0]["transport"] is transport and errors[0]["protocol"] is protocol


async def test_an_answer_without_a_truth_value_is_fatal(loop, errors):
    class Undecided:
        def __bool__(self):
            raise ZeroDivisionError

    async with connected(asked(lambda self: Undecided())) as (transport, protocol, _):
        transport.set_read_timeout(SHORT)
        assert isinstance(await protocol.lost(), ZeroDivisionError)
    assert len(errors) == 1


@pytest.mark.parametrize("exception", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("direction", ["read", "write"])
def test_an_interrupt_leaves_the_loop_and_it_is_asked_again(loop, direction, exception):
    def interrupt(self):
        if len(self.asked_at) < 3:
            raise exception
        return False

    async def begin():
        ours, peer = make_pair()
        transport, protocol = await loop.create_connection(asked(interrupt), sock=ours)
        getattr(transport, f"set_{direction}_timeout")(SHORT)
        transport.write(PLENTY)
        return transport, protocol, peer

    async def main():
        await protocol.lost()

    transport, protocol, peer = loop.run_until_complete(begin())
    task = loop.create_task(main())
    for _ in range(2):
        with pytest.raises(exception):
            loop.run_until_complete(task)
        assert not transport.is_closing()
    loop.run_until_complete(task)
    assert isinstance(protocol.lost_with[0], TimeoutError)
    assert len(protocol.asked_at) == 3
    peer.close()


@pytest.mark.parametrize("exception", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_after_a_new_period_began_leaves_one_timer(loop, exception):
    def interrupt(self):
        self.transport.pause_reading()
        self.transport.resume_reading()
        raise exception

    async def begin():
        ours, peer = make_pair()
        transport, protocol = await loop.create_connection(asked(interrupt), sock=ours)
        transport.set_read_timeout(SHORT)
        return transport, protocol, peer

    transport, protocol, peer = loop.run_until_complete(begin())
    with pytest.raises(exception):
        loop.run_forever()
    assert len(timers(loop)) == 1
    transport.close()
    assert timers(loop) == []
    loop.run_until_complete(protocol.lost())
    peer.close()


@pytest.mark.parametrize("before", [b"", PLENTY], ids=["empty buffer", "full buffer"])
async def test_last_words_are_sent_when_it_closes(loop, before):
    def goodbye(self):
        self.transport.write(b"408 Request Timeout")
        self.transport.close()

    async with connected(asked(goodbye)) as (transport, protocol, peer):
        transport.set_read_timeout(SHORT)
        transport.write(before)
        await until(lambda: protocol.asked_at)
        assert await in_thread(read_to_end, peer) == before + b"408 Request Timeout"
        assert await protocol.lost() is None
        assert timers(loop) == []


@pytest.mark.parametrize("answer", [True, False])
@pytest.mark.parametrize("ending", ["close", "abort"])
@pytest.mark.parametrize("direction", ["read", "write"])
async def test_it_may_end_the_connection(loop, direction, ending, answer):
    def end(self):
        getattr(self.transport, ending)()
        return answer

    async with connected(asked(end)) as (transport, protocol, peer):
        getattr(transport, f"set_{direction}_timeout")(SHORT)
        if direction == "write":
            transport.write(PLENTY)
        await until(lambda: protocol.asked_at)
        if direction == "write" and ending == "close" and answer:
            # Kept: the output has another period to leave.
            assert not protocol.lost_with
            transport.set_write_timeout(None)
            await in_thread(read_exactly, peer, len(PLENTY))
        stuck = direction == "write" and ending == "close" and not answer
        assert isinstance(await protocol.lost(), TimeoutError if stuck else type(None))
        await ticks()
        assert len(protocol.lost_with) == len(protocol.asked_at) == 1
        assert timers(loop) == []


async def test_it_may_pause_reading(loop):
    def pause(self):
        self.transport.pause_reading()
        return True

    async with connected(asked(pause)) as (transport, protocol, _):
        transport.set_read_timeout(SHORT)
        await until(lambda: protocol.asked_at)
        await a_while(loop)
        assert len(protocol.asked_at) == 1
        transport.resume_reading()
        await until(lambda: len(protocol.asked_at) == 2)
        assert not protocol.lost_with


@pytest.mark.parametrize("direction", ["read", "write"])
async def test_it_may_set_another_timeout(loop, direction):
    values = [2 * SHORT, LONG]

    def change(self):
        getattr(self.transport, f"set_{direction}_timeout")(values.pop(0))
        return True

    async with connected(asked(change)) as (transport, protocol, _):
        getattr(transport, f"set_{direction}_timeout")(SHORT)
        transport.write(PLENTY)
        await until(lambda: not values)
        assert protocol.asked_at[1] - protocol.asked_at[0] + RESOLUTION >= 2 * SHORT
        await a_while(loop)
        assert not protocol.lost_with
        assert len(timers(loop)) == 1


@pytest.mark.parametrize("direction", ["read", "write"])
async def test_it_may_switch_the_timeout_off(loop, direction):
    def off(self):
        getattr(self.transport, f"set_{direction}_timeout")(None)
        return True

    async with connected(asked(off)) as (transport, protocol, _):
        getattr(transport, f"set_{direction}_timeout")(SHORT)
        transport.write(PLENTY)
        await until(lambda: protocol.asked_at)
        await a_while(loop)
        assert len(protocol.asked_at) == 1 and not protocol.lost_with
        assert timers(loop) == []


async def test_the_current_protocol_is_asked(loop):
    second = Asked(lambda self: False)

    def replace(self):
        self.transport.set_protocol(second)
        return True

    async with connected(asked(replace)) as (transport, first, _):
        transport.set_read_timeout(SHORT)
        assert isinstance(await second.lost(), TimeoutError)
        assert len(first.asked_at) == len(second.asked_at) == 1
        assert first.lost_with == []


async def test_the_timer_outlives_another_protocol(loop):
    async with connected(Receiving) as (transport, first, peer):
        transport.set_read_timeout(SHORT)
        for factory in (Buffering, Receiving, Buffering):
            protocol = factory()
            protocol.connection_made(transport)
            transport.set_protocol(protocol)
            peer.sendall(b"x")
            await protocol.received(1)
        await protocol.lost()
        assert_timed_out(protocol, NO_DATA, protocol.received_at)


@pytest.mark.parametrize("direction", ["read", "write"])
async def test_callbacks_run_in_the_context_of_reading(loop, direction):
    variable = contextvars.ContextVar("variable", default="default")
    seen = {}

    class Looking(Asked):
        def data_received(self, data):
            seen["data_received"] = variable.get()

        def connection_lost(self, exc):
            seen["connection_lost"] = variable.get()
            super().connection_lost(exc)

    def look(self):
        seen["timed_out"] = variable.get()
        return False

    variable.set("at connect")
    async with connected(lambda: Looking(look)) as (transport, protocol, peer):
        peer.sendall(b"x")
        await until(lambda: seen)
        variable.set("later")
        getattr(transport, f"set_{direction}_timeout")(SHORT)
        transport.write(PLENTY)
        await protocol.lost()
    assert seen == dict.fromkeys(("data_received", "timed_out", "connection_lost"), "at connect")


async def test_write_timed_out_before_reading_runs_in_the_context_of_who_set_it(loop):
    variable = contextvars.ContextVar("variable", default="default")
    seen = []

    class Paused(Asked):
        def connection_made(self, transport):
            super().connection_made(transport)
            transport.pause_reading()
            variable.set("connection_made")
            transport.set_write_timeout(SHORT)
            transport.write(PLENTY)

    async with connected(lambda: Paused(lambda self: seen.append(variable.get()))) as (
            _, protocol, _):
        assert isinstance(await protocol.lost(), TimeoutError)
    assert seen == ["connection_made"]


# Nested loops


def run_nested(loop, predicate):
    """Iterates a loop that is running, as nest_asyncio does."""
    task = asyncio.current_task(loop)
    if task is not None:
        asyncio.tasks._leave_task(loop, task)
    limit = time.monotonic() + 20
    while not predicate():
        assert time.monotonic() < limit
        loop._run_once()
    if task is not None:
        asyncio.tasks._enter_task(loop, task)


async def test_it_runs_out_in_a_loop_nested_in_data_received(loop):
    class Nesting(Receiving):
        def data_received(self, data):
            super().data_received(data)
            run_nested(loop, lambda: self.lost_with)

    async with connected(Nesting) as (transport, protocol, peer):
        transport.set_read_timeout(SHORT)
        peer.sendall(b"x")
        await protocol.lost()
        assert_timed_out(protocol, NO_DATA, protocol.received_at)


async def test_data_that_waits_behind_a_nested_loop_counts(loop):
    """The data was collected and the timer is due, but the nested loop begins with the timer."""
    async with connected(Receiving) as (transport, protocol, peer):
        await ticks()
        transport.set_read_timeout(SHORT)

        def wait_and_send():
            time.sleep(2 * SHORT)
            peer.sendall(b"x")
            loop.call_soon(run_nested, loop, lambda: protocol.data or protocol.lost_with)

        loop.call_soon(wait_and_send)
        await until(lambda: protocol.data or protocol.lost_with)
        assert bytes(protocol.data) == b"x" and not protocol.lost_with
        await protocol.lost()
        assert_timed_out(protocol, NO_DATA, protocol.received_at)


async def test_read_timed_out_may_nest_a_loop(loop):
    def nest(self):
        if len(self.asked_at) == 1:
            peer.sendall(b"x")
            run_nested(loop, lambda: self.data)
            # The period that began in the nested loop may end there, too.
            self.transport.pause_reading()
            self.transport.resume_reading()
            run_nested(loop, lambda: len(self.asked_at) == 2)
        return True

    async with connected(asked(nest)) as (transport, protocol, peer):
        transport.set_read_timeout(SHORT)
        await until(lambda: len(protocol.asked_at) == 4)
        assert not protocol.lost_with
        assert bytes(protocol.data) == b"x"


# Streams and TLS


async def test_a_stream_reader_raises_timeout_error(loop):
    async def silent(reader, writer):
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    writer.transport.set_read_timeout(SHORT)
    with pytest.raises(TimeoutError, match=NO_DATA):
        await reader.readline()
    writer.close()
    server.close()


async def test_a_stream_writer_raises_timeout_error(loop):
    release = asyncio.Event()

    async def deaf(reader, writer):
        await release.wait()
        writer.close()

    server = await asyncio.start_server(deaf, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    writer.transport.set_write_timeout(SHORT)
    writer.write(2 * PLENTY)
    with pytest.raises(TimeoutError, match=NOT_SENT):
        await writer.drain()
    writer.close()
    release.set()
    server.close()
    await ticks()


async def test_a_stream_that_is_fed_is_kept(loop):
    """The short way into a StreamReader counts as well."""
    ours, peer = make_pair()
    reader, writer = await asyncio.open_connection(sock=ours)
    writer.transport.set_read_timeout(SHORT)
    with stepping(loop, peer.sendall, b"line\n"):
        begin = loop.time()
        while loop.time() - begin < 4 * SHORT:
            assert await reader.readline() == b"line\n"
    assert loop.stats().messages_fed > 0
    writer.close()
    peer.close()


async def test_under_tls_it_is_set_on_the_transport_below(loop, certificate):
    server_context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server_context.load_cert_chain(*certificate)
    client_context = ssl.create_default_context(cafile=certificate[0])

    async def silent(reader, writer):
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0, ssl=server_context)
    protocol = Receiving()
    below, _ = await loop.create_connection(
        Recorder, *server.sockets[0].getsockname())
    below.set_read_timeout(LONG)
    above = await loop.start_tls(below, protocol, client_context, server_hostname="localhost")
    assert len(timers(loop)) == 1
    since = loop.time()
    below.set_read_timeout(SHORT)
    above.write(b"hello")
    await protocol.lost()
    assert_timed_out(protocol, NO_DATA, since)
    server.close()


# Wrong values, and the end


@pytest.mark.parametrize("method", ["set_read_timeout", "set_write_timeout"])
async def test_wrong_values(loop, method):
    async with connected(Receiving) as (transport, protocol, _):
        set_timeout = getattr(transport, method)
        for closed in (False, True):
            for wrong in ("1", b"1", [], True, False, 1j, object()):
                with pytest.raises(TypeError, match="seconds must be a number or None"):
                    set_timeout(wrong)
            for wrong in (0, 0.0, -1, -0.5, math.nan, math.inf, -math.inf, -10**400):
                with pytest.raises(ValueError, match="positive and finite.*None switches"):
                    set_timeout(wrong)
            with pytest.raises(TypeError):
                set_timeout()
            if not closed:
                transport.close()
                await protocol.lost()


@pytest.mark.parametrize("method", ["set_read_timeout", "set_write_timeout"])
async def test_huge_values_never_run_out(loop, method):
    async with connected(Receiving) as (transport, protocol, _):
        for seconds in (1e6, 1e12, 1e300, 2**63, 10**400):
            getattr(transport, method)(seconds)
            transport.write(b"x")
            await ticks()
        transport.write(PLENTY)
        await a_while(loop)
        assert not protocol.lost_with
        assert len(timers(loop)) == 1


async def test_tiny_values_run_out_at_once(loop):
    async with connected(Receiving) as (transport, protocol, _):
        transport.set_read_timeout(5e-324)
        assert isinstance(await protocol.lost(), TimeoutError)


@pytest.mark.parametrize("ending", ["close", "abort"])
async def test_on_a_closed_transport_it_has_no_effect(loop, ending):
    async with connected(Receiving) as (transport, protocol, _):
        getattr(transport, ending)()
        for _ in range(2):
            transport.set_read_timeout(SHORT)
            transport.set_write_timeout(SHORT)
            await protocol.lost()
            transport.set_read_timeout(None)
            transport.set_write_timeout(None)
        await a_while(loop)
        assert protocol.lost_with == [None]
        assert timers(loop) == []


async def test_a_timer_is_one_handle_however_much_moves(loop):
    async with connected(Receiving) as (transport, protocol, peer):
        transport.set_read_timeout(LONG)
        transport.set_write_timeout(LONG)
        transport.write(b"x")
        before = timers(loop)
        assert len(before) == 2
        for number in range(200):
            peer.sendall(b"y")
            transport.write(b"x")
            await protocol.received(number + 1)
        assert set(map(id, timers(loop))) == set(map(id, before))


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("ending", ["close", "abort", "peer"])
async def test_no_timer_outlives_its_connection(loop, ending, debug):
    loop.set_debug(debug)
    for _ in range(8):
        ours = [make_pair() for _ in range(125)]
        made = [await loop.create_connection(Receiving, sock=sock) for sock, _ in ours]
        for transport, _ in made:
            transport.set_read_timeout(LONG)
            transport.set_write_timeout(LONG)
            transport.write(b"x")
        assert len(timers(loop)) == 250
        for transport, _ in made:
            if ending != "peer":
                getattr(transport, ending)()
        for _, peer in ours:
            peer.close()
        await until(lambda: all(protocol.lost_with for _, protocol in made))
        assert timers(loop) == []


@pytest.mark.parametrize("in_a_cycle", [False, True])
async def test_a_timer_keeps_no_transport(loop, in_a_cycle):
    ours, peer = make_pair()
    transport, protocol = await loop.create_connection(Receiving, sock=ours)
    await ticks()
    variable = contextvars.ContextVar("variable")

    def begin():
        variable.set(transport)
        transport.set_read_timeout(LONG)
        transport.set_write_timeout(LONG)
        transport.write(b"x")

    contextvars.copy_context().run(begin)
    await until(lambda: transport.get_write_buffer_size() == 0)
    transport.pause_reading()
    await ticks()
    assert len(timers(loop)) == 2
    if in_a_cycle:
        transport.me = transport
    gone = weakref.ref(transport)
    protocol.transport = None
    with pytest.warns(ResourceWarning, match="unclosed transport"):
        del transport
        gc.collect()
    assert gone() is None
    assert timers(loop) == []
    peer.close()


@pytest.mark.filterwarnings("ignore:unclosed transport:ResourceWarning")
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_closing_the_loop_with_timers_pending(new_loop):
    loop = new_loop()

    async def begin():
        ours, peer = make_pair()
        transport, _ = await loop.create_connection(Receiving, sock=ours)
        transport.set_read_timeout(LONG)
        transport.set_write_timeout(LONG)
        await ticks()
        transport.write(PLENTY)
        return transport, peer

    transport, peer = loop.run_until_complete(begin())
    transport.set_read_timeout(SHORT)
    loop.close()
    assert timers(loop) == []
    transport.set_read_timeout(None)
    transport.set_write_timeout(None)
    peer.close()
    del transport
    gc.collect()


async def test_a_debugged_loop_runs_them(loop, caplog):
    loop.set_debug(True)
    async with connected(asked(lambda self: len(self.asked_at) < 3)) as (transport, protocol, _):
        transport.set_read_timeout(SHORT)
        assert isinstance(await protocol.lost(), TimeoutError)


async def test_each_direction_of_many_connections(loop):
    """A thousand timeouts that run out together."""
    protocols, peers = [], []
    for _ in range(4):
        for _ in range(125):
            ours, peer = make_pair("unix")
            transport, protocol = await loop.create_connection(Receiving, sock=ours)
            peers.append(peer)
            protocols.append((protocol, loop.time()))
            transport.set_read_timeout(SHORT)
            transport.set_write_timeout(SHORT)
            transport.write(PLENTY[:1 << 20])
        await until(lambda: all(protocol.lost_with for protocol, _ in protocols))
        for peer in peers:
            peer.close()
    for protocol, since in protocols:
        assert isinstance(protocol.lost_with[0], TimeoutError)
        assert protocol.lost_at - since + RESOLUTION >= SHORT
    run_soon = []
    loop.call_soon(run_soon.append, 1)
    await until(lambda: run_soon)
    assert timers(loop) == []


def test_a_loop_that_stands_still_times_nothing(loop):
    async def begin():
        ours, peer = make_pair()
        transport, protocol = await loop.create_connection(Receiving, sock=ours)
        await ticks()
        transport.set_read_timeout(SHORT)
        return protocol, peer

    protocol, peer = loop.run_until_complete(begin())
    time.sleep(2 * SHORT)
    peer.sendall(b"x")
    for _ in range(5):
        run_once(loop)
    assert bytes(protocol.data) == b"x" and not protocol.lost_with
    loop.run_until_complete(protocol.lost())
    assert_timed_out(protocol, NO_DATA, protocol.received_at)
    peer.close()


async def test_tools_find_the_methods(loop):
    async with connected(Receiving) as (transport, _, _):
        assert {"set_read_timeout", "set_write_timeout", "write"} <= set(dir(transport))
        assert isinstance(transport, uringloop.StreamTransport)
