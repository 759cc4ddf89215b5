"""Feeding asyncio.StreamReader directly must not be told from asyncio's own way."""

import asyncio
import contextlib
import functools
from unittest import mock

import pytest
from helpers import assert_same, make_pair, pattern, read_exactly, run_child, until


@contextlib.asynccontextmanager
async def open_streams(**options):
    ours, peer = make_pair()
    reader, writer = await asyncio.open_connection(sock=ours, **options)
    try:
        yield reader, writer, peer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        peer.close()


async def test_data_reaches_every_kind_of_read(loop):
    async with open_streams() as (reader, writer, peer):
        peer.sendall(b"line\nexactlyseparator|rest")
        assert await reader.readline() == b"line\n"
        assert await reader.readexactly(7) == b"exactly"
        assert await reader.readuntil(b"|") == b"separator|"
        assert await reader.read(100) == b"rest"
        peer.close()
        assert await reader.read() == b""
        assert reader.at_eof()


async def test_a_reader_over_its_limit_pauses_the_transport_and_loses_nothing(loop):
    async with open_streams(limit=1000) as (reader, writer, peer):
        data = pattern(300_000)
        writing = loop.run_in_executor(None, peer.sendall, data)
        await until(lambda: not writer.transport.is_reading())
        received = bytearray()
        while len(received) < len(data):
            received += await reader.read(777)
        await writing
        assert_same(received, data)


@pytest.mark.parametrize("limit", [500, 500.5, 2**62])
async def test_a_reader_pauses_the_transport_beyond_twice_its_limit_exactly(loop, limit):
    async with open_streams(limit=limit) as (reader, writer, peer):
        peer.sendall(b"x" * 1000)
        await until(lambda: len(reader._buffer) == 1000)
        assert writer.transport.is_reading()
        peer.sendall(b"y")
        await until(lambda: len(reader._buffer) == 1001)
        assert writer.transport.is_reading() == (limit != 500)
        assert await reader.readexactly(1001) == b"x" * 1000 + b"y"
        assert writer.transport.is_reading()


async def test_messages_of_all_sizes_in_both_directions(loop):
    async with open_streams() as (reader, writer, peer):
        for number, size in enumerate([1, 100, 4096, 8191, 8192, 16384, 20_000, 50_000, 1] * 5):
            data = pattern(size, number)
            peer.sendall(data)
            assert_same(await reader.readexactly(size), data)
            writer.write(data)
            await writer.drain()
            assert_same(await loop.run_in_executor(None, read_exactly, peer, size), data)


async def test_a_patched_class_is_respected(loop):
    seen = []
    plain = asyncio.StreamReader.feed_data

    def feed_data(self, data):
        seen.append(bytes(data))
        plain(self, data)

    async with open_streams() as (reader, writer, peer):
        peer.sendall(b"before")
        assert await reader.readexactly(6) == b"before"
        with mock.patch.object(asyncio.StreamReader, "feed_data", feed_data):
            peer.sendall(b"patched")
            assert await reader.readexactly(7) == b"patched"
        peer.sendall(b"after")
        assert await reader.readexactly(5) == b"after"
    assert seen == [b"patched"]


@pytest.mark.uvloop_differs(
    "looks data_received() up when the protocol is set",
    "https://github.com/MagicStack/uvloop/blob/v0.21.0/uvloop/handles/stream.pyx")
async def test_a_patched_instance_is_respected(loop):
    async with open_streams() as (reader, writer, peer):
        with mock.patch.object(reader, "feed_data", wraps=reader.feed_data) as feed:
            peer.sendall(b"x")
            await reader.readexactly(1)
        assert [bytes(call.args[0]) for call in feed.call_args_list] == [b"x"]
        protocol = writer.transport.get_protocol()
        with mock.patch.object(protocol, "data_received", wraps=protocol.data_received) as method:
            peer.sendall(b"y")
            await reader.readexactly(1)
        assert method.call_count == 1


@pytest.mark.parametrize("kind", ["a function", "a partial", "a builtin"])
async def test_a_patched_wake_up_is_respected(loop, kind):
    async with open_streams() as (reader, writer, peer):
        seen = []
        wake_up = {"a function": lambda: seen.append(len(reader._buffer)),
                   "a partial": functools.partial(seen.append, 5),
                   "a builtin": [5].__len__}[kind]
        reader._wakeup_waiter = wake_up
        reading = asyncio.ensure_future(reader.readexactly(5))
        await asyncio.sleep(0)
        peer.sendall(b"quiet")
        await until(lambda: len(reader._buffer) == 5)
        await asyncio.sleep(0)
        assert not reading.done()
        assert seen == ([] if kind == "a builtin" else [5])
        del reader._wakeup_waiter
        reader._wakeup_waiter()
        assert await reading == b"quiet"


@pytest.mark.parametrize("limit", [1e6, float("inf"), 2**64])
async def test_a_limit_of_any_kind_of_number(loop, limit):
    async with open_streams(limit=limit) as (reader, writer, peer):
        peer.sendall(b"hello\n")
        assert await reader.readline() == b"hello\n"


@pytest.mark.uvloop_differs(
    "looks data_received() up when the protocol is set",
    "https://github.com/MagicStack/uvloop/blob/v0.21.0/uvloop/handles/stream.pyx", run=False)
async def test_methods_of_another_reader_are_respected(loop):
    async with open_streams() as (reader, writer, peer), open_streams() as (other, _, _):
        reader.feed_data = other.feed_data
        peer.sendall(b"for the other")
        assert await other.readexactly(13) == b"for the other"
        del reader.feed_data
        peer.sendall(b"for me")
        assert await reader.readexactly(6) == b"for me"


@pytest.mark.parametrize("which", ["reader", "protocol"])
async def test_sub_classes_are_respected(loop, which):
    seen = []

    class Reader(asyncio.StreamReader):
        def feed_data(self, data):
            seen.append(bytes(data))
            super().feed_data(data)

    class Protocol(asyncio.StreamReaderProtocol):
        def data_received(self, data):
            seen.append(bytes(data))
            super().data_received(data)

    reader = (Reader if which == "reader" else asyncio.StreamReader)()
    kind = Protocol if which == "protocol" else asyncio.StreamReaderProtocol
    protocol = kind(reader)
    ours, peer = make_pair()
    transport, _ = await loop.create_connection(lambda: protocol, sock=ours)
    peer.sendall(b"x")
    assert await reader.readexactly(1) == b"x"
    assert seen == [b"x"]
    transport.close()
    peer.close()


async def test_a_cancelled_read_leaves_the_data(loop):
    async with open_streams() as (reader, writer, peer):
        for number in range(100):
            reading = asyncio.ensure_future(reader.readexactly(4))
            await asyncio.sleep(0)
            peer.sendall(b"%04d" % number)
            if number % 2:
                await asyncio.sleep(0)
            reading.cancel()
            try:
                data = await reading
            except asyncio.CancelledError:
                data = await reader.readexactly(4)
            assert data == b"%04d" % number


async def test_a_reader_that_was_dropped_drops_the_data(loop):
    async with open_streams() as (reader, writer, peer):
        protocol = writer.transport.get_protocol()
        protocol._stream_reader_wr = lambda: None   # what a dead weak reference answers
        peer.sendall(b"for nobody")
        await asyncio.sleep(0)
        assert not writer.transport.is_closing()


def test_the_direct_way_is_taken_on_this_python(loop_kind):
    """A Python whose asyncio uses other names than the known ones turns it off: then look at it."""
    if loop_kind not in ("io_uring", "epoll"):
        pytest.skip("about uringloop's own counters")
    child = run_child(loop_kind, """
import helpers
async def main():
    ours, peer = helpers.make_pair()
    reader, writer = await asyncio.open_connection(sock=ours)
    for _ in range(10):
        peer.sendall(b"x" * 100)
        await reader.readexactly(100)
    print(loop.stats().messages_copied)
    writer.close()
    await writer.wait_closed()
loop.run_until_complete(main())
loop.close()
""")
    assert (child.returncode, child.stdout) == (0, "0\n"), child.stderr
