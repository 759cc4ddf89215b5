"""read_timed_out() and write_timed_out(): the protocol's own answer to a timeout, nested loops."""

import asyncio
import contextvars
import time

import pytest
from helpers import (
    connected,
    in_thread,
    make_pair,
    read_exactly,
    read_to_end,
    ticks,
    until,
)
from timed import (
    LONG,
    NO_DATA,
    NOT_SENT,
    PLENTY,
    RESOLUTION,
    SHORT,
    Asked,
    Buffering,
    Receiving,
    a_while,
    asked,
    assert_timed_out,
    timers,
)

KINDS = ("io_uring", "epoll")


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
