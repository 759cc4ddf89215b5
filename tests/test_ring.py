"""The ring floor under a loop: batching, tiny rings, dry buffer pools, full completion queues."""

import asyncio
import random

import pytest
from helpers import Recorder, assert_same, make_pair, pattern, read_exactly, until, why_not

import uringloop

pytestmark = pytest.mark.skipif(why_not("io_uring") is not None, reason=str(why_not("io_uring")))

TINY = uringloop.LoopOptions(backend="io_uring", ring_entries=2, recv_buffers=4,
                             recv_buffer_size=64)


class Echo(asyncio.Protocol):
    def connection_made(self, transport):
        self.transport = transport

    def data_received(self, data):
        self.transport.write(data)


def run(main, options=None):
    options = options or uringloop.LoopOptions(backend="io_uring")
    loop = uringloop.new_event_loop(options)
    try:
        return loop.run_until_complete(asyncio.wait_for(main(loop), 40))
    finally:
        loop.close()


async def make_pairs(loop, count, factory, kind="tcp"):
    peers, transports = [], []
    for _ in range(count):
        ours, peer = make_pair(kind)
        transport, _ = await loop.create_connection(factory, sock=ours)
        transports.append(transport)
        peers.append(peer)
    return transports, peers


async def end_all(transports, peers):
    for peer in peers:
        peer.close()
    await until(lambda: all(transport._sock is None for transport in transports))


def test_one_enter_serves_many_messages():
    """64 connections with a message each: their answers leave in few system calls."""
    async def main(loop):
        transports, peers = await make_pairs(loop, 64, Echo)
        await asyncio.sleep(0)
        before = loop.stats()
        for _ in range(20):
            for peer in peers:
                peer.sendall(b"x" * 1000)
            wanted = loop.stats().bytes_sent + 64 * 1000
            await until(lambda: loop.stats().bytes_sent >= wanted)
            for peer in peers:
                assert len(read_exactly(peer, 1000)) == 1000
        after = loop.stats()
        messages = 20 * 64
        assert after.bytes_received - before.bytes_received == messages * 1000
        assert after.enters - before.enters <= messages / 10
        await end_all(transports, peers)
        assert loop.stats().in_flight == 0
        assert loop.stats().buffers_lent == 0

    run(main)


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_a_send_that_is_alone_needs_no_request_and_two_leave_together(kind):
    async def main(loop):
        transports, peers = await make_pairs(loop, 2, Recorder, kind)
        await until(lambda: loop.stats().in_flight == len(transports))
        for writers, submissions in ((1, 0), (2, 2), (1, 0)):
            before = loop.stats()
            for transport in transports[:writers]:
                transport.write(b"hello")
                transport.write(b"world")
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            after = loop.stats()
            assert after.submissions - before.submissions == submissions
            assert after.enters - before.enters == bool(submissions)
            for peer in peers[:writers]:
                assert read_exactly(peer, 10) == b"helloworld"
        await end_all(transports, peers)

    run(main)


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_a_tiny_ring_loses_nothing(kind):
    """A queue of two, four blocks of 64 bytes: every limit is met all the time."""
    async def main(loop):
        chooser = random.Random(5)
        transports, peers = await make_pairs(loop, 20, Recorder, kind)
        protocols = [transport.get_protocol() for transport in transports]
        sent = [bytearray() for _ in peers]
        for round_number in range(30):
            for index, peer in enumerate(peers):
                data = pattern(chooser.choice((1, 63, 64, 65, 300, 2000)), index + round_number)
                peer.sendall(data)
                sent[index] += data
                transports[index].write(data)
            await asyncio.sleep(0)
        for index, protocol in enumerate(protocols):
            await until(lambda: len(protocol.data) == len(sent[index]))
            assert_same(protocol.data, sent[index])
            assert_same(read_exactly(peers[index], len(sent[index])), sent[index])
        await end_all(transports, peers)
        assert loop.stats().buffers_ran_dry > 0
        assert loop.stats().in_flight == 0

    run(main, TINY)


def test_who_finds_no_block_in_a_full_pool_does_not_go_back_and_forth():
    async def main(loop):
        transports, peers = await make_pairs(loop, 100, Recorder)
        for number in range(64):
            for peer in peers:
                peer.sendall(pattern(100, number))
            await until(lambda: all(len(transport.get_protocol().data) == 100 * (number + 1)
                                    for transport in transports))
        for transport in transports:
            assert_same(transport.get_protocol().data,
                        b"".join(pattern(100, number) for number in range(64)))
        assert loop.stats().buffers_ran_dry > 0
        assert loop.stats().mode_switches <= len(transports)
        await end_all(transports, peers)

    run(main, uringloop.LoopOptions(backend="io_uring", recv_buffers=32))


def test_the_pool_grows_with_the_connections_readable_at_once():
    async def main(loop):
        transports, peers = await make_pairs(loop, 300, Recorder)
        await asyncio.sleep(0)
        for number, peer in enumerate(peers):
            peer.sendall(pattern(3000, number))
        for number, transport in enumerate(transports):
            protocol = transport.get_protocol()
            await until(lambda: len(protocol.data) == 3000)
            assert_same(protocol.data, pattern(3000, number))
        stats = loop.stats()
        assert stats.buffers > 64
        assert stats.buffers_lent == 0
        for transport, peer in zip(transports, peers):
            transport.abort()
            peer.close()
        await until(lambda: loop.stats().in_flight == 0)

    run(main)


def test_a_full_completion_queue_loses_nothing():
    """More completions than the queue has room for, posted while the loop is busy elsewhere."""
    async def main(loop):
        transports, peers = await make_pairs(loop, 64, Recorder, "unix")
        await asyncio.sleep(0)
        for _ in range(3):      # the loop does not look at its ring meanwhile
            for number, peer in enumerate(peers):
                peer.sendall(pattern(40, number))
        for number, transport in enumerate(transports):
            protocol = transport.get_protocol()
            await until(lambda: len(protocol.data) == 120)
            assert_same(protocol.data, pattern(40, number) * 3)
        for transport, peer in zip(transports, peers):
            transport.abort()
            peer.close()
        await until(lambda: loop.stats().in_flight == 0)

    run(main, TINY)


def test_a_large_message_is_handed_over_without_a_copy():
    async def main(loop):
        transports, peers = await make_pairs(loop, 1, Recorder)
        await asyncio.sleep(0)
        protocol = transports[0].get_protocol()
        peers[0].sendall(pattern(12000))
        await until(lambda: len(protocol.data) == 12000)
        assert_same(protocol.data, pattern(12000))
        assert loop.stats().messages_handed_over >= 1
        transports[0].abort()
        peers[0].close()

    run(main)


def test_full_blocks_switch_the_mode_and_small_messages_switch_it_back():
    async def main(loop):
        transports, peers = await make_pairs(loop, 1, Recorder)
        protocol = transports[0].get_protocol()
        await asyncio.sleep(0)
        size = 200_000
        for _ in range(10):
            peers[0].sendall(pattern(size))
            await until(lambda: len(protocol.data) == size)
            assert_same(protocol.data, pattern(size))
            protocol.data.clear()
        large = loop.stats().mode_switches
        assert large % 2 == 1
        for number in range(40):
            peers[0].sendall(pattern(100, number))
            await until(lambda: len(protocol.data) == 100 * (number + 1))
        assert loop.stats().mode_switches == large + 1
        assert_same(protocol.data, b"".join(pattern(100, number) for number in range(40)))
        transports[0].abort()
        peers[0].close()

    run(main)


def test_cancelled_receives_lose_no_byte():
    """Pausing cancels a receive that may have won: a thousand times, in both modes."""
    async def main(loop):
        transports, peers = await make_pairs(loop, 1, Recorder)
        transport, peer = transports[0], peers[0]
        protocol = transport.get_protocol()
        expected = bytearray()
        for number in range(1000):
            data = pattern(40_000 if number % 50 == 49 else 100, number)
            peer.sendall(data)
            expected += data
            transport.pause_reading()
            await asyncio.sleep(0)
            transport.resume_reading()
            if number % 3:
                await asyncio.sleep(0)
        await until(lambda: len(protocol.data) == len(expected))
        assert_same(protocol.data, expected)
        transport.abort()
        peer.close()

    run(main)


def test_stats_before_the_ring_exists():
    loop = uringloop.new_event_loop(uringloop.LoopOptions(backend="io_uring"))
    assert loop.stats().enters == 0
    loop.close()
    assert loop.stats().in_flight == 0
