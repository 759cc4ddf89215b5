"""Receiving: every size, pausing at any moment, many connections, bytes that stay as they are."""

import asyncio
import ctypes
import hashlib
import random
import socket

import pytest
from helpers import (
    BufferedRecorder,
    Echo,
    Recorder,
    assert_same,
    connected,
    in_thread,
    make_pair,
    pattern,
    reset,
    ticks,
    two_transports,
    until,
)

SIZES = [
    *(1, 100, 4095, 4096, 4097, 8191, 8192, 8193, 16383, 16384, 16385),
    *(65536, 1 << 20),
]
both_protocols = pytest.mark.parametrize("make", [Recorder, BufferedRecorder])


def shuffled(seed, repeats):
    sizes = SIZES * repeats
    random.Random(seed).shuffle(sizes)
    return sizes


class Digest(Recorder):
    """Keeps a checksum and a count instead of the data."""

    def __init__(self):
        super().__init__()
        self.sum = hashlib.sha256()
        self.size = 0

    def data_received(self, data):
        self.sum.update(data)
        self.size += len(data)


# Sizes


@both_protocols
@pytest.mark.parametrize("size", SIZES)
async def test_one_message_arrives_whole(loop, size, make):
    data = pattern(size)
    async with connected(make) as (_, protocol, peer):
        sending = asyncio.ensure_future(in_thread(peer.sendall, data))
        assert_same(await protocol.received(size), data)
        await sending


@pytest.mark.parametrize("family", ["tcp", "unix"])
@pytest.mark.parametrize("seed", [1, 2])
async def test_mixed_sizes_go_both_ways_at_once_with_the_right_checksum(loop, seed, family):
    async with two_transports(Digest, Digest, family) as (left, at_left, right, at_right):
        sums = []
        total = 0
        for transport, start in ((left, 1000 * seed), (right, 5000 * seed)):
            expected = hashlib.sha256()
            total = 0
            for number, size in enumerate(shuffled(start, 2)):
                data = pattern(size, start + number)
                expected.update(data)
                transport.write(data)
                total += size
                if number % 5 == 0:
                    await asyncio.sleep(0)
            sums.append(expected.hexdigest())
        await until(lambda: at_left.size >= total and at_right.size >= total)
        assert [at_right.sum.hexdigest(), at_left.sum.hexdigest()] == sums


async def test_mixed_sizes_are_echoed_one_after_the_other(loop):
    async with two_transports(Recorder, Echo) as (left, at_left, _, _):
        for number, size in enumerate(shuffled(3, 1)):
            at_left.data.clear()
            left.write(pattern(size, number))
            assert_same(await at_left.received(size), pattern(size, number))


async def test_a_change_between_small_and_large_messages_loses_nothing(loop):
    parts = []
    for number in range(12):
        parts += [pattern(100, number)] * 40 + [pattern(200_000, number)] * 2
    data = b"".join(parts)
    async with connected() as (_, protocol, peer):
        for part in parts:
            sending = asyncio.ensure_future(in_thread(peer.sendall, part))
            await protocol.received(len(protocol.data) + 1)
            await sending
        assert_same(await protocol.received(len(data)), data)


async def test_data_received_is_given_bytes_that_are_not_empty(loop):
    async with connected() as (_, protocol, peer):
        for size in (1, 5000, 20_000):
            await in_thread(peer.sendall, pattern(size))
        await protocol.received(25_001)
        assert {type(chunk) for chunk in protocol.chunks} == {bytes}
        assert all(protocol.chunks)


# Bytes that stay


async def test_received_bytes_never_change_afterwards(loop):
    kept = []

    class Keeping(Recorder):
        def data_received(self, data):
            kept.append((data, hashlib.sha256(data).digest()))
            self.data += data

    sizes = shuffled(4, 3)
    async with connected(Keeping) as (_, protocol, peer):
        for number, size in enumerate(sizes):
            sending = asyncio.ensure_future(in_thread(peer.sendall, pattern(size, number)))
            await until(lambda: len(protocol.data) >= sum(sizes[: number + 1]))
            await sending
        await ticks()
        assert all(hashlib.sha256(data).digest() == digest for data, digest in kept)


def test_received_bytes_outlive_the_loop(loop, new_loop):
    async def receive(size):
        async with connected() as (_, protocol, peer):
            sending = asyncio.ensure_future(in_thread(peer.sendall, pattern(size)))
            await protocol.received(size)
            await sending
            return protocol.chunks

    chunks = [loop.run_until_complete(receive(size)) for size in (10, 10_000, 16384, 100_000)]
    loop.close()
    other = new_loop()
    other.run_until_complete(receive(300_000))
    other.close()
    for size, kept in zip((10, 10_000, 16384, 100_000), chunks, strict=True):
        assert_same(b"".join(kept), pattern(size))


# Pausing


@both_protocols
async def test_nothing_arrives_while_paused_and_all_of_it_afterwards(loop, make):
    data = pattern(300_000)
    async with connected(make) as (transport, protocol, peer):
        transport.pause_reading()
        sending = asyncio.ensure_future(in_thread(peer.sendall, data))
        for _ in range(30):
            await asyncio.sleep(0.001)
        assert protocol.data == b""
        transport.resume_reading()
        assert_same(await protocol.received(len(data)), data)
        await sending


@pytest.mark.uvloop_differs(
    "starts to read when connection_made has returned, paused or not",
    "https://github.com/MagicStack/uvloop/blob/v0.21.0/uvloop/handles/stream.pyx",
)
@both_protocols
async def test_pausing_in_connection_made_holds_early_data_back(loop, make):
    class Paused(make):
        def connection_made(self, transport):
            super().connection_made(transport)
            transport.pause_reading()

    ours, peer = make_pair()
    with ours, peer:
        peer.sendall(b"early")
        transport, protocol = await loop.create_connection(Paused, sock=ours)
        await ticks(20)
        assert protocol.data == b""
        assert not transport.is_reading()
        transport.resume_reading()
        assert await protocol.received(5) == b"early"
        transport.close()
        await protocol.lost()


async def test_pausing_right_after_data_was_sent_keeps_the_rest_back(loop):
    async with connected() as (transport, protocol, peer):
        for number in range(50):
            peer.sendall(b"%4d" % number)
            if number % 3 == 0:
                await ticks(1)
            transport.pause_reading()
            held = len(protocol.data)
            await ticks(3)
            assert len(protocol.data) == held
            transport.resume_reading()
        assert await protocol.received(200) == b"".join(b"%4d" % n for n in range(50))


class RandomPauser(Recorder):
    """Pauses inside data_received at random, and resumes a few ticks later."""

    def __init__(self, seed):
        super().__init__()
        self.random = random.Random(seed)
        self.broken = 0  # data_received while paused
        self.paused = False

    def data_received(self, data):
        super().data_received(data)
        self.broken += self.paused
        if self.random.random() < 0.3:
            self.paused = True
            self.transport.pause_reading()
            self.resume_later(self.random.randrange(5))

    def resume_later(self, ticks_left):
        loop = asyncio.get_running_loop()
        if ticks_left:
            loop.call_soon(self.resume_later, ticks_left - 1)
        else:
            self.paused = False
            self.transport.resume_reading()


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_pausing_at_random_inside_data_received_loses_nothing(loop, seed):
    sizes = shuffled(seed, 3)
    data = b"".join(pattern(size, number) for number, size in enumerate(sizes))
    async with connected(lambda: RandomPauser(seed)) as (_, protocol, peer):

        def send():
            for number, size in enumerate(sizes):
                peer.sendall(pattern(size, number))

        sending = asyncio.ensure_future(in_thread(send))
        assert_same(await protocol.received(len(data)), data)
        await sending
        assert protocol.broken == 0


async def test_pause_and_resume_may_be_repeated(loop):
    async with connected() as (transport, protocol, peer):
        transport.resume_reading()
        transport.pause_reading()
        transport.pause_reading()
        peer.sendall(b"x")
        await ticks()
        assert protocol.data == b""
        transport.resume_reading()
        transport.resume_reading()
        assert await protocol.received(1) == b"x"
        assert protocol.chunks == [b"x"]


async def test_pause_and_resume_in_one_tick_change_nothing(loop):
    async with connected() as (transport, protocol, peer):
        for number in range(200):
            transport.pause_reading()
            transport.resume_reading()
            peer.sendall(b"%3d" % number)
        assert await protocol.received(600) == b"".join(b"%3d" % n for n in range(200))


async def test_pause_and_resume_after_close_are_ignored(loop):
    async with connected() as (transport, protocol, _):
        transport.close()
        transport.pause_reading()
        transport.resume_reading()
        await protocol.lost()
        transport.resume_reading()
        assert not transport.is_reading()


async def test_resuming_inside_data_received_keeps_the_order(loop):
    class Flipping(Recorder):
        def data_received(self, data):
            self.transport.pause_reading()
            super().data_received(data)
            self.transport.resume_reading()

    data = pattern(1 << 20)
    async with connected(Flipping) as (_, protocol, peer):
        sending = asyncio.ensure_future(in_thread(peer.sendall, data))
        assert_same(await protocol.received(len(data)), data)
        await sending


async def test_closing_while_paused_ends_the_connection(loop):
    async with connected() as (transport, protocol, peer):
        transport.pause_reading()
        peer.sendall(b"never read")
        transport.close()
        assert await protocol.lost() is None
        assert protocol.data == b""


# The end while paused


@both_protocols
async def test_eof_while_paused_comes_after_resume_and_after_the_data(loop, make):
    async with connected(make) as (transport, protocol, peer):
        transport.pause_reading()
        peer.sendall(b"last words")
        peer.close()
        await asyncio.sleep(0.01)
        assert protocol.calls == ["connection_made"]
        transport.resume_reading()
        assert await protocol.lost() is None
        assert protocol.data == b"last words"
        assert protocol.calls[-2:] == ["eof_received", "connection_lost"]


async def test_a_reset_while_paused_shows_after_resume(loop):
    async with connected() as (transport, protocol, peer):
        transport.pause_reading()
        reset(peer)
        await asyncio.sleep(0.01)
        transport.resume_reading()
        assert isinstance(await protocol.lost(), ConnectionResetError)


async def test_data_in_flight_before_a_fin_all_arrives(loop):
    data = pattern(1 << 20)
    async with connected() as (_, protocol, peer):

        def send():
            peer.sendall(data)
            peer.close()

        await in_thread(send)
        assert await protocol.lost() is None
        assert_same(bytes(protocol.data), data)
        assert protocol.calls.count("eof_received") == 1


# Many connections


async def test_300_connections_receive_at_once(loop):
    count, size = 300, 50_000
    pairs = [socket.socketpair() for _ in range(count)]
    protocols = []
    for ours, peer in pairs:
        peer.setblocking(False)
        ours.setblocking(False)
        protocols.append((await loop.create_connection(Recorder, sock=ours))[1])
    waiting = {number: memoryview(pattern(size, number)) for number in range(count)}
    while waiting:  # all the peers write what they can before the loop sees any of it
        for number, rest in list(waiting.items()):
            try:
                rest = rest[pairs[number][1].send(rest) :]
            except BlockingIOError:
                pass
            waiting[number] = rest
            if not rest:
                del waiting[number]
        await asyncio.sleep(0)
    for number, protocol in enumerate(protocols):
        assert_same(await protocol.received(size), pattern(size, number))
    for _, peer in pairs:
        peer.close()
    for protocol in protocols:
        assert await protocol.lost() is None


async def test_a_flood_on_one_connection_does_not_starve_another(loop):
    flood = pattern(1 << 16)
    async with connected() as (_, flooded, flooder), connected() as (_, quiet, peer):
        flooder.setblocking(False)
        running = True

        def pump():
            try:
                flooder.send(flood)
            except BlockingIOError:
                pass
            if running:
                loop.call_soon(pump)

        pump()
        for number in range(50):
            peer.sendall(b"x")
            await quiet.received(number + 1)
        running = False
        await ticks()
        assert flooded.data


@pytest.mark.uvloop_differs(
    "reports it to the exception handler and goes on",
    "https://github.com/MagicStack/uvloop/blob/v0.21.0/uvloop/handles/stream.pyx", run=False)
def test_an_interrupt_out_of_buffer_updated_loses_no_byte(loop):
    """KeyboardInterrupt leaves run_forever(); the rest of the message comes in the next run."""
    class Interrupts(BufferedRecorder):
        def buffer_updated(self, size):
            super().buffer_updated(size)
            if len(self.data) == 4:
                raise KeyboardInterrupt

    async def start():
        ours, peer = make_pair()
        transport, protocol = await loop.create_connection(lambda: Interrupts((4,)), sock=ours)
        await ticks()
        return transport, protocol, peer

    transport, protocol, peer = loop.run_until_complete(start())
    peer.sendall(b"0123456789abcdef")
    with pytest.raises(KeyboardInterrupt):
        loop.run_forever()
    loop.run_until_complete(until(lambda: len(protocol.data) == 16))
    assert protocol.data == b"0123456789abcdef"
    transport.abort()
    loop.run_until_complete(protocol.lost())
    peer.close()


@pytest.mark.uvloop_differs(
    "reports it to the exception handler and goes on",
    "https://github.com/MagicStack/uvloop/blob/v0.21.0/uvloop/handles/stream.pyx", run=False)
@pytest.mark.parametrize("where", ["data_received", "eof_received", "get_buffer"])
def test_an_interrupt_out_of_a_callback_ends_only_the_run(loop, where):
    base = BufferedRecorder if where == "get_buffer" else Recorder

    def interrupt_once(self, *arguments):
        result = getattr(base, where)(self, *arguments)
        if not self.interrupted:
            self.interrupted = True
            raise KeyboardInterrupt
        return result

    kind = type("Interrupts", (base,), {"interrupted": False, where: interrupt_once})

    async def start():
        ours, peer = make_pair()
        transport, protocol = await loop.create_connection(kind, sock=ours)
        await ticks()
        transport.pause_reading()
        peer.sendall(b"held ")
        await ticks()
        return transport, protocol, peer

    transport, protocol, peer = loop.run_until_complete(start())
    transport.resume_reading()
    peer.sendall(b"and more")
    peer.close()
    with pytest.raises(KeyboardInterrupt):
        loop.run_forever()
    loop.run_until_complete(protocol.lost())
    assert protocol.data == b"held and more"


async def test_a_buffer_of_items_without_size_is_no_endless_loop(loop, errors):
    class Empty(BufferedRecorder):
        def get_buffer(self, sizehint):
            return (ctypes.Structure * 5)()

    async with connected(Empty) as (transport, protocol, peer):
        peer.sendall(b"x")
        await protocol.lost()
