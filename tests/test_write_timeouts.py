"""set_write_timeout(): output that waits for a peer."""

import asyncio
import contextlib
import tempfile

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
    NOT_SENT,
    PLENTY,
    SHORT,
    Receiving,
    a_while,
    assert_timed_out,
    stepping,
    timers,
)

KINDS = ("io_uring", "epoll")


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
