"""Sending: order, large writes against full sockets, flow control."""

import asyncio
import random

import pytest
from helpers import (
    PY312,
    Recorder,
    assert_same,
    connected,
    has_ended,
    in_thread,
    pattern,
    read_exactly,
    read_to_end,
    run_once,
    serving,
    socket_pair,
    ticks,
    until,
)

WRITELINES_PAUSE = "https://github.com/python/cpython/issues/127655"




# Order


async def test_many_writes_in_one_tick_arrive_in_order(loop):
    async with connected() as (transport, _, peer):
        for number in range(3000):
            transport.write(b"%6d" % number)
        transport.close()
        expected = b"".join(b"%6d" % number for number in range(3000))
        assert_same(await in_thread(read_to_end, peer), expected)


async def test_write_and_writelines_keep_their_order(loop):
    async with connected() as (transport, _, peer):
        transport.write(b"1")
        transport.writelines([b"2", b"3"])
        transport.write(b"4")
        transport.writelines([b"5"])
        assert await in_thread(read_exactly, peer, 5) == b"12345"


@pytest.mark.parametrize("family", ["tcp", "unix"])
@pytest.mark.parametrize("size", [100 << 10, 1 << 20])
async def test_a_large_write_goes_through_tiny_socket_buffers(loop, size, family):
    data = pattern(size)
    async with connected(family=family, small=True) as (transport, _, peer):
        transport.write(data)
        assert_same(await in_thread(read_exactly, peer, size), data)
        await until(lambda: transport.get_write_buffer_size() == 0)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("family", ["tcp", "unix"])
async def test_small_and_large_writes_interleave_in_order(loop, seed, family):
    choose = random.Random(seed)
    parts = [
        pattern(choose.choice([1, 10, 1000, 20_000, 300_000]), number) for number in range(60)
    ]
    async with connected(family=family, small=True) as (transport, _, peer):
        reading = asyncio.ensure_future(in_thread(read_to_end, peer))
        for part in parts:
            if choose.random() < 0.2:
                transport.writelines([part[:7], part[7:]])
            else:
                transport.write(part)
            if choose.random() < 0.5:
                await asyncio.sleep(0)
        transport.close()
        assert_same(await reading, b"".join(parts))


async def test_writing_inside_data_received_and_outside_keeps_the_order(loop):
    class Replying(Recorder):
        def data_received(self, data):
            super().data_received(data)
            for _ in data:
                self.transport.write(b"reply;")

    async with connected(Replying) as (transport, protocol, peer):
        peer.sendall(b"12")
        await protocol.received(2)
        transport.write(b"own;")
        assert await in_thread(read_exactly, peer, 16) == b"reply;reply;own;"


async def test_writing_in_connection_made_is_sent(loop):
    class Greeting(Recorder):
        def connection_made(self, transport):
            super().connection_made(transport)
            transport.write(b"welcome")

    async with connected(Greeting) as (_, _, peer):
        assert await in_thread(read_exactly, peer, 7) == b"welcome"


def test_a_write_while_the_loop_does_not_run_is_sent_when_it_runs(loop):
    with socket_pair() as (ours, peer):
        connecting = loop.create_connection(Recorder, sock=ours)
        transport, protocol = loop.run_until_complete(connecting)
        transport.write(b"outside")
        run_once(loop)
        run_once(loop)
        assert read_exactly(peer, 7) == b"outside"
        transport.close()
        loop.run_until_complete(protocol.lost())


def test_a_write_before_the_loop_is_stopped_is_sent(loop):
    with socket_pair() as (ours, peer):
        connecting = loop.create_connection(Recorder, sock=ours)
        transport, protocol = loop.run_until_complete(connecting)

        async def main():
            transport.write(b"last")

        loop.run_until_complete(main())
        assert read_exactly(peer, 4) == b"last"
        transport.close()
        loop.run_until_complete(protocol.lost())


async def test_a_write_is_not_delayed_until_the_loop_is_idle(loop):
    async with connected() as (transport, _, peer):
        running = True

        def spin():
            if running:
                loop.call_soon(spin)

        spin()
        transport.write(b"x")
        assert await in_thread(read_exactly, peer, 1) == b"x"
        running = False


async def test_close_right_after_write_sends_and_ends(loop):
    async with connected() as (transport, protocol, peer):
        transport.write(b"bye")
        transport.close()
        assert await in_thread(read_to_end, peer) == b"bye"
        assert await protocol.lost() is None


async def test_100_connections_write_in_one_tick(loop):
    transports = []

    class Accepted(Recorder):
        def connection_made(self, transport):
            super().connection_made(transport)
            transports.append(transport)

    async with serving(Accepted) as (_, address):
        clients = []
        for _ in range(100):
            clients.append((await loop.create_connection(Recorder, *address))[1])
        await until(lambda: len(transports) == 100)
        for number, transport in enumerate(transports):
            transport.write(pattern(5000, number))
            transport.write(b"end")
        received = {await client.received(5003) for client in clients}
        assert received == {pattern(5000, number) + b"end" for number in range(100)}
        for client in clients:
            client.transport.close()
            await client.lost()


# Flow control


def flow_calls(protocol):
    return [call for call in protocol.calls if call.endswith("_writing")]


@pytest.mark.parametrize("method", ["write", "writelines"])
@pytest.mark.parametrize("family", ["tcp", "unix"])
async def test_pause_writing_and_resume_writing_are_called_once_each(
    loop, family, method
):
    async with connected(family=family, small=True) as (transport, protocol, peer):
        data = pattern(1 << 20)
        transport.write(data[:500_000])
        if method == "write":
            transport.write(data[500_000:])
        else:
            transport.writelines([data[500_000:900_000], data[900_000:]])
        await ticks()
        assert flow_calls(protocol) == ["pause_writing"]
        assert_same(await in_thread(read_exactly, peer, len(data)), data)
        await until(lambda: transport.get_write_buffer_size() == 0)
        await ticks()
        assert flow_calls(protocol) == ["pause_writing", "resume_writing"]


@pytest.mark.asyncio_differs("writelines() does not pause", WRITELINES_PAUSE, when=PY312)
async def test_writelines_alone_pauses_writing(loop):
    data = pattern(1 << 20)
    async with connected(small=True) as (transport, protocol, peer):
        transport.writelines([data[:500_000], data[500_000:]])
        await ticks()
        assert flow_calls(protocol) == ["pause_writing"]
        assert_same(await in_thread(read_exactly, peer, len(data)), data)
        await until(lambda: flow_calls(protocol) == ["pause_writing", "resume_writing"])


async def test_a_small_write_does_not_pause(loop):
    async with connected() as (transport, protocol, peer):
        transport.write(b"x" * 1000)
        assert await in_thread(read_exactly, peer, 1000) == b"x" * 1000
        assert flow_calls(protocol) == []


async def test_writing_may_pause_and_resume_many_times(loop):
    class Steady(Recorder):
        def __init__(self):
            super().__init__()
            self.may_write = asyncio.Event()
            self.may_write.set()

        def pause_writing(self):
            super().pause_writing()
            self.may_write.clear()

        def resume_writing(self):
            super().resume_writing()
            self.may_write.set()

    parts = [pattern(50_000, number) for number in range(40)]
    async with connected(Steady, small=True) as (transport, protocol, peer):
        reading = asyncio.ensure_future(in_thread(read_to_end, peer))
        for part in parts:
            await protocol.may_write.wait()
            transport.write(part)
        transport.close()
        assert_same(await reading, b"".join(parts))
        calls = flow_calls(protocol)
        assert len(calls) > 2
        assert calls[::2] == ["pause_writing"] * len(calls[::2])
        assert calls[1::2] == ["resume_writing"] * len(calls[1::2])


async def test_stream_writer_drain_waits_for_a_slow_reader(loop):
    data = pattern(2 << 20)
    with socket_pair(small=True) as (ours, peer):
        _, writer = await asyncio.open_connection(sock=ours)
        writer.write(data)
        draining = asyncio.ensure_future(writer.drain())
        await ticks(20)
        assert not draining.done()
        assert_same(await in_thread(read_exactly, peer, len(data)), data)
        await draining
        writer.close()
        await writer.wait_closed()


async def test_the_write_buffer_size_returns_to_zero(loop):
    data = pattern(1 << 20)
    async with connected(small=True) as (transport, _, peer):
        assert transport.get_write_buffer_size() == 0
        transport.write(data)
        await ticks()
        assert 0 < transport.get_write_buffer_size() <= len(data)
        await in_thread(read_exactly, peer, len(data))
        await until(lambda: transport.get_write_buffer_size() == 0)


@pytest.mark.uvloop_differs(
    "its first low limit is 16 bytes",
    "https://github.com/MagicStack/uvloop/blob/v0.21.0/uvloop/handles/basetransport.pyx",
)
async def test_the_default_limits_are_64_kib_and_16_kib(loop):
    async with connected() as (transport, _, _):
        assert transport.get_write_buffer_limits() == (16 << 10, 64 << 10)


LIMITS = [
    ({"high": 1000}, (250, 1000)),
    ({"low": 1000}, (1000, 4000)),
    ({"high": 1000, "low": 1000}, (1000, 1000)),
    ({"high": 0}, (0, 0)),
    ({}, (16 << 10, 64 << 10)),
]


@pytest.mark.parametrize("given, expected", LIMITS, ids=str)
async def test_set_write_buffer_limits_fills_in_what_is_missing(loop, given, expected):
    async with connected() as (transport, _, _):
        transport.set_write_buffer_limits(high=5, low=5)
        transport.set_write_buffer_limits(**given)
        assert transport.get_write_buffer_limits() == expected


@pytest.mark.parametrize("low, high", [(2, 1), (-1, 10), (-2, -1)])
async def test_impossible_limits_are_a_value_error(loop, low, high):
    async with connected() as (transport, _, _):
        before = transport.get_write_buffer_limits()
        with pytest.raises(ValueError):
            transport.set_write_buffer_limits(high=high, low=low)
        assert transport.get_write_buffer_limits() == before


async def test_a_high_limit_of_zero_pauses_as_soon_as_something_waits(loop):
    data = pattern(1 << 20)
    async with connected(small=True) as (transport, protocol, peer):
        transport.set_write_buffer_limits(high=0)
        transport.write(data)
        await ticks()
        assert flow_calls(protocol) == ["pause_writing"]
        await in_thread(read_exactly, peer, len(data))
        await until(lambda: flow_calls(protocol) == ["pause_writing", "resume_writing"])


@pytest.mark.parametrize("high", [0, 99])
async def test_a_lower_limit_does_not_pause_for_what_the_socket_takes(loop, high):
    async with connected() as (transport, protocol, peer):
        transport.write(b"x" * 100)
        transport.set_write_buffer_limits(high=high)
        assert await in_thread(read_exactly, peer, 100) == b"x" * 100
        assert flow_calls(protocol) == []


@pytest.mark.parametrize("method", ["pause_writing", "resume_writing"])
async def test_an_exception_out_of_flow_control_is_reported_and_writing_goes_on(
    loop, errors, method
):
    class Failing(Recorder):
        def pause_writing(self):
            super().pause_writing()
            if method == "pause_writing":
                raise ZeroDivisionError(method)

        def resume_writing(self):
            super().resume_writing()
            if method == "resume_writing":
                raise ZeroDivisionError(method)

    data = pattern(1 << 20)
    async with connected(Failing, small=True) as (transport, protocol, peer):
        transport.write(data)
        assert_same(await in_thread(read_exactly, peer, len(data)), data)
        await until(lambda: len(flow_calls(protocol)) == 2)
        await until(lambda: errors)
        (context,) = errors
        assert context["message"] == f"protocol.{method}() failed"
        assert isinstance(context["exception"], ZeroDivisionError)
        assert context["transport"] is transport
        assert context["protocol"] is protocol
        assert not transport.is_closing()


async def test_a_paused_writer_whose_peer_goes_away_is_told(loop):
    async with connected(small=True) as (transport, protocol, peer):
        transport.write(pattern(1 << 20))
        await until(lambda: flow_calls(protocol) == ["pause_writing"])
        peer.close()
        assert isinstance(await protocol.lost(), (ConnectionResetError, BrokenPipeError))


async def test_aborting_inside_pause_writing_ends_the_connection(loop):
    class Aborting(Recorder):
        def pause_writing(self):
            super().pause_writing()
            self.transport.abort()

    async with connected(Aborting, small=True) as (transport, protocol, peer):
        transport.write(pattern(1 << 20))
        assert await protocol.lost() is None
        assert protocol.lost_with == [None]
        await in_thread(_drain_to_end, peer)


@pytest.mark.parametrize("running", [True, False])
def test_a_protocol_that_was_told_to_pause_is_not_told_to_resume_by_an_abort(loop, running):
    def end(transport):
        transport.write(pattern(1 << 20))
        assert flow_calls(transport.get_protocol()) == ["pause_writing"]
        transport.abort()

    with socket_pair(small=True) as (ours, _):
        transport, protocol = loop.run_until_complete(
            loop.create_connection(Recorder, sock=ours))
        if running:
            loop.call_soon(end, transport)
        else:
            end(transport)
        for _ in range(5):
            run_once(loop)
        assert protocol.calls == ["connection_made", "pause_writing", "connection_lost"]


def _drain_to_end(sock):
    while not has_ended(sock):
        pass


async def test_a_write_that_empties_the_buffer_resumes_the_protocol(loop):
    """The socket has room again, and the next write takes all that waited with it."""
    async with connected(Recorder, small=True) as (transport, protocol, peer):
        transport.write(pattern(300_000))
        assert "pause_writing" in protocol.calls
        reading = loop.run_in_executor(None, read_exactly, peer, 320_000)
        transport.write(pattern(20_000))
        await until(lambda: protocol.calls.count("resume_writing") == 1)
        assert_same(await reading, pattern(300_000) + pattern(20_000))


@pytest.mark.parametrize("end", ["close", "write_eof"])
@pytest.mark.parametrize("size", [0, 20_000])
async def test_looking_at_the_buffer_after_the_end_was_asked_for(loop, end, size):
    async with connected() as (transport, protocol, peer):
        transport.write(b"hello")
        getattr(transport, end)()
        transport.get_write_buffer_size()
        if size and end == "close":
            transport.write(bytes(size))
        assert (await in_thread(read_to_end, peer)).startswith(b"hello")
        if end == "close":
            await protocol.lost()


@pytest.mark.uvloop_differs(
    "sends what was queued before the abort",
    "https://github.com/MagicStack/uvloop/blob/v0.21.0/uvloop/handles/stream.pyx")
async def test_an_iterable_that_aborts_sends_nothing(loop):
    async with connected() as (transport, protocol, peer):
        def parts():
            yield b"x" * 5
            transport.abort()
            yield b"y" * 5

        transport.writelines(parts())
        await protocol.lost()
        assert await in_thread(read_to_end, peer) == b""


async def test_sub_classes_of_bytes_are_sent_as_they_are(loop):
    class Lies(bytes):
        def __bytes__(self):
            return b"lies!"

    async with connected() as (transport, protocol, peer):
        transport.write(Lies(b"truth"))
        assert await in_thread(read_exactly, peer, 5) == b"truth"
