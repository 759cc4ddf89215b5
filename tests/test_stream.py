"""Stream transports: what a program sees from connection_made to connection_lost."""

import asyncio
import socket

import pytest
from helpers import (
    PY312,
    BufferedRecorder,
    Echo,
    Recorder,
    assert_same,
    connected,
    has_ended,
    in_thread,
    pattern,
    read_exactly,
    read_to_end,
    reset,
    serving,
    socket_pair,
    ticks,
    two_transports,
    until,
)

both_families = pytest.mark.parametrize("family", ["tcp", "unix"])


# Connecting and echoing


async def test_tcp_echo(loop):
    data = pattern(100_000)
    async with serving(Echo) as (_, address):
        transport, protocol = await loop.create_connection(Recorder, *address)
        transport.write(data)
        assert_same(await protocol.received(len(data)), data)
        transport.close()
        assert await protocol.lost() is None


async def test_unix_echo(loop, tmp_path):
    data = pattern(100_000)
    path = str(tmp_path / "socket")
    server = await loop.create_unix_server(Echo, path)
    transport, protocol = await loop.create_unix_connection(Recorder, path)
    transport.write(data)
    assert_same(await protocol.received(len(data)), data)
    transport.close()
    assert await protocol.lost() is None
    server.close()


async def test_ipv6_echo(loop):
    try:
        server = await loop.create_server(Echo, "::1", 0)
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    port = server.sockets[0].getsockname()[1]
    transport, protocol = await loop.create_connection(Recorder, "::1", port)
    transport.write(b"hello")
    assert await protocol.received(5) == b"hello"
    assert transport.get_extra_info("peername")[:2] == ("::1", port)
    transport.close()
    await protocol.lost()
    server.close()


async def test_streams_api_echoes_lines(loop):
    async def serve(reader, writer):
        while line := await reader.readline():
            writer.write(line)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    for number in range(100):
        writer.write(b"line %d\n" % number)
        await writer.drain()
        assert await reader.readline() == b"line %d\n" % number
    writer.write_eof()
    assert await reader.read() == b""
    writer.close()
    await writer.wait_closed()
    server.close()


async def test_a_refused_connection_raises_connection_refused(loop):
    with socket.socket() as placeholder:
        placeholder.bind(("127.0.0.1", 0))
        with pytest.raises(ConnectionRefusedError):
            await loop.create_connection(Recorder, *placeholder.getsockname())


async def test_connection_made_comes_before_create_connection_returns(loop):
    async with connected() as (transport, protocol, _):
        assert protocol.calls == ["connection_made"]
        assert protocol.transport is transport


async def test_connection_made_comes_before_data_that_is_already_there(loop):
    with socket_pair() as (ours, peer):
        peer.sendall(b"early")
        transport, protocol = await loop.create_connection(Recorder, sock=ours)
        assert await protocol.received(5) == b"early"
        assert protocol.calls == ["connection_made", "data_received"]
        transport.close()
        await protocol.lost()


async def test_data_and_eof_before_the_transport_arrive_in_order(loop):
    with socket_pair() as (ours, peer):
        peer.sendall(b"early")
        peer.close()
        _, protocol = await loop.create_connection(Recorder, sock=ours)
        assert await protocol.lost() is None
        assert protocol.data == b"early"
        expected = ["connection_made", "data_received", "eof_received", "connection_lost"]
        assert protocol.calls == expected


# What write accepts


@pytest.mark.parametrize("make", [bytes, bytearray, memoryview], ids=lambda t: t.__name__)
@pytest.mark.parametrize("size", [0, 1, 5000, 300_000])
async def test_write_takes_bytes_like_objects(loop, make, size):
    data = pattern(size)
    async with connected() as (transport, _, peer):
        transport.write(make(data))
        transport.write(b"end")
        assert_same(await in_thread(read_exactly, peer, size + 3), data + b"end")


@pytest.mark.parametrize("shape", [[64], [8, 8], [4, 4, 4]], ids=str)
async def test_write_takes_views_of_wide_items_and_many_dimensions(loop, shape):
    data = pattern(256)
    view = memoryview(data).cast("I") if len(shape) == 1 else memoryview(data)
    if len(shape) > 1:
        data = data[:64]
        view = memoryview(data).cast("B", shape)
    async with connected() as (transport, _, peer):
        transport.write(view)
        transport.write(b"end")
        assert_same(await in_thread(read_exactly, peer, len(data) + 3), data + b"end")


@pytest.mark.asyncio_differs(
    "a partly sent view of wide items loses bytes: the rest is cut in items, not bytes",
    "https://github.com/python/cpython/issues/135862",
)
async def test_a_long_view_of_wide_items_is_sent_whole(loop):
    data = pattern(400_000)
    async with connected(small=True) as (transport, _, peer):
        transport.write(memoryview(data).cast("I"))
        transport.close()
        assert_same(await in_thread(read_to_end, peer), data)


async def test_a_non_contiguous_view_never_sends_wrong_bytes(loop, errors):
    data = pattern(1000)
    view = memoryview(data)[::2]
    async with connected() as (transport, _, peer):
        try:
            transport.write(view)
        except (BufferError, TypeError, ValueError):
            allowed = (b"",)
        else:  # asyncio treats it as a fatal error of the transport
            allowed = (b"", view.tobytes())
        transport.close()
        assert await in_thread(read_to_end, peer) in allowed


@pytest.mark.uvloop_differs(
    "ignores None",
    "https://github.com/MagicStack/uvloop/blob/v0.21.0/uvloop/handles/stream.pyx",
)
@pytest.mark.parametrize("wrong", ["text", 5, None, ["list"], 1.5], ids=repr)
async def test_write_of_anything_else_is_a_type_error(loop, wrong):
    async with connected() as (transport, _, peer):
        with pytest.raises(TypeError):
            transport.write(wrong)
        transport.write(b"still alive")
        assert await in_thread(read_exactly, peer, 11) == b"still alive"


ZERO_COPY = "https://github.com/python/cpython/pull/31871"  # and python/asyncio pull 339
UVLOOP_WRITEV = "https://github.com/python/asyncio/issues/389"


@pytest.mark.asyncio_differs("keeps a view of the bytearray", ZERO_COPY, when=PY312)
@pytest.mark.uvloop_differs("keeps a view of the bytearray", UVLOOP_WRITEV)
@pytest.mark.parametrize("size", [100, 400_000])
async def test_a_bytearray_may_be_changed_when_write_has_returned(loop, size):
    data = pattern(size)
    mutable = bytearray(data)
    async with connected(small=True) as (transport, _, peer):
        transport.write(mutable)
        mutable[:] = bytes(size)
        transport.close()
        assert_same(await in_thread(read_to_end, peer), data)


@pytest.mark.asyncio_differs("exports the bytearray's buffer", ZERO_COPY, when=PY312)
@pytest.mark.uvloop_differs("exports the bytearray's buffer", UVLOOP_WRITEV)
async def test_a_bytearray_may_be_resized_when_write_has_returned(loop):
    data = pattern(400_000)
    mutable = bytearray(data)
    async with connected(small=True) as (transport, _, peer):
        transport.write(mutable)
        mutable.clear()
        transport.close()
        assert_same(await in_thread(read_to_end, peer), data)


# writelines


async def test_writelines_sends_5000_parts_in_order(loop):
    parts = [pattern(1 + number % 50, number) for number in range(5000)]
    async with connected() as (transport, _, peer):
        transport.writelines(parts)
        transport.close()
        assert_same(await in_thread(read_to_end, peer), b"".join(parts))


async def test_writelines_sends_5000_parts_to_a_slow_reader(loop):
    parts = [pattern(1 + number % 400, number) for number in range(5000)]
    async with connected(small=True) as (transport, _, peer):
        transport.writelines(parts)
        transport.write(b"end")
        transport.close()
        assert_same(await in_thread(read_to_end, peer), b"".join(parts) + b"end")


async def test_writelines_takes_a_generator(loop):
    async with connected() as (transport, _, peer):
        transport.writelines(b"%d," % number for number in range(10))
        assert await in_thread(read_exactly, peer, 20) == b"0,1,2,3,4,5,6,7,8,9,"


async def test_writelines_takes_mixed_types(loop):
    async with connected() as (transport, _, peer):
        transport.writelines([b"a", bytearray(b"b"), memoryview(b"c")])
        assert await in_thread(read_exactly, peer, 3) == b"abc"


async def test_writelines_skips_empty_parts(loop):
    async with connected() as (transport, _, peer):
        transport.writelines([b"", b"a", b"", b"", b"b", b""])
        transport.write(b"c")
        transport.close()
        assert await in_thread(read_to_end, peer) == b"abc"


async def test_writelines_of_nothing_does_nothing(loop):
    async with connected() as (transport, _, peer):
        transport.writelines([])
        transport.write(b"x")
        assert await in_thread(read_exactly, peer, 1) == b"x"


async def test_writelines_of_empty_parts_only_leaves_the_transport_usable(loop):
    async with connected() as (transport, protocol, peer):
        transport.writelines([b"", b""])
        await ticks()
        transport.write(b"x")
        transport.close()
        assert await in_thread(read_to_end, peer) == b"x"
        assert await protocol.lost() is None


@pytest.mark.asyncio_differs(
    "an empty part is never drained",
    "https://github.com/python/cpython/issues/155888",
    when=PY312,
    run=False,
)
async def test_writelines_of_empty_parts_only_does_not_keep_close_waiting(loop):
    async with connected() as (transport, protocol, peer):
        transport.writelines([b"", b""])
        transport.close()
        assert await in_thread(read_to_end, peer) == b""
        assert await protocol.lost() is None


@pytest.mark.parametrize("wrong", [["text"], [b"ok", 5], 7], ids=repr)
async def test_writelines_of_wrong_parts_is_a_type_error(loop, wrong):
    async with connected() as (transport, _, _):
        with pytest.raises(TypeError):
            transport.writelines(wrong)


# After the end


@pytest.mark.asyncio_differs(
    "writelines() fails on a lost connection",
    "https://github.com/python/cpython/issues/136234",
    when=PY312,
)
@pytest.mark.uvloop_differs(
    "raises RuntimeError",
    "https://github.com/MagicStack/uvloop/issues/506",
)
@pytest.mark.parametrize("method", ["write", "writelines"])
@pytest.mark.parametrize("end", ["close", "abort"])
async def test_writing_after_the_end_is_ignored(loop, end, method):
    async with connected() as (transport, protocol, peer):
        getattr(transport, end)()
        for _ in range(10):
            getattr(transport, method)(b"late" if method == "write" else [b"late"])
        assert await protocol.lost() is None
        for _ in range(10):
            getattr(transport, method)(b"late" if method == "write" else [b"late"])
        assert await in_thread(has_ended, peer)


@pytest.mark.uvloop_differs(
    "raises RuntimeError",
    "https://github.com/MagicStack/uvloop/issues/506",
)
async def test_writing_after_a_reset_is_ignored(loop):
    async with connected() as (transport, protocol, peer):
        reset(peer)
        assert isinstance(await protocol.lost(), ConnectionResetError)
        for _ in range(10):
            transport.write(b"late")
        assert len(protocol.lost_with) == 1


async def test_close_abort_and_write_eof_may_be_repeated(loop):
    async with connected() as (transport, protocol, _):
        transport.write_eof()
        transport.write_eof()
        transport.close()
        transport.close()
        transport.abort()
        transport.abort()
        assert await protocol.lost() is None
        transport.close()
        transport.abort()
        await ticks()
        assert protocol.calls.count("connection_lost") == 1


@pytest.mark.asyncio_differs(
    "abort() after a close() that had to flush raises AttributeError",
    "https://github.com/agronholm/anyio/issues/1250",
)
async def test_abort_after_a_close_that_flushed_does_nothing(loop):
    data = pattern(1 << 20)
    async with connected(small=True) as (transport, protocol, peer):
        transport.write(data)
        transport.close()
        assert_same(await in_thread(read_to_end, peer), data)
        assert await protocol.lost() is None
        await ticks()
        transport.abort()
        transport.close()
        await ticks()
        assert protocol.lost_with == [None]


# BufferedProtocol


@pytest.mark.parametrize("sizes", [[1], [3, 1, 17], [4095, 1, 16385], [1 << 20]], ids=str)
async def test_a_buffered_protocol_may_offer_buffers_of_any_size(loop, sizes):
    data = pattern(20_000 if sizes == [1] else 500_000)
    async with connected(lambda: BufferedRecorder(sizes)) as (_, protocol, peer):
        sending = asyncio.ensure_future(in_thread(peer.sendall, data))
        assert_same(await protocol.received(len(data)), data)
        await sending
        peer.close()
        assert await protocol.lost() is None
        expected = ["connection_made", "buffer_updated", "eof_received", "connection_lost"]
        assert protocol.calls == expected


async def test_get_buffer_is_given_a_size_hint(loop):
    hints = []

    class Hinted(BufferedRecorder):
        def get_buffer(self, sizehint):
            hints.append(sizehint)
            return super().get_buffer(sizehint)

    async with connected(Hinted) as (_, protocol, peer):
        peer.sendall(b"x")
        await protocol.received(1)
        assert hints and all(type(hint) is int for hint in hints)


async def test_a_buffered_protocol_may_return_a_memoryview(loop):
    room = bytearray(100)

    class Viewed(BufferedRecorder):
        def get_buffer(self, sizehint):
            self.buffer = memoryview(room)[10:20]
            return self.buffer

    async with connected(Viewed) as (_, protocol, peer):
        peer.sendall(b"0123456789abcdef")
        assert await protocol.received(16) == b"0123456789abcdef"
        assert room[:10] == bytes(10) and room[20:] == bytes(80)


async def test_buffer_updated_may_pause_reading(loop):
    class Pausing(BufferedRecorder):
        def buffer_updated(self, nbytes):
            super().buffer_updated(nbytes)
            self.transport.pause_reading()

    async with connected(lambda: Pausing([5])) as (transport, protocol, peer):
        peer.sendall(b"0123456789")
        await protocol.received(5)
        await ticks()
        assert protocol.data == b"01234"
        transport.resume_reading()
        assert await protocol.received(10) == b"0123456789"


# Information


async def test_get_extra_info_gives_the_socket_and_both_names(loop):
    async with connected() as (transport, _, peer):
        sock = transport.get_extra_info("socket")
        assert sock.fileno() >= 0
        assert sock.family == socket.AF_INET
        assert sock.getsockname() == transport.get_extra_info("sockname")
        assert transport.get_extra_info("sockname") == peer.getpeername()
        assert transport.get_extra_info("peername") == peer.getsockname()


@pytest.mark.uvloop_differs(
    "has a look-alike class of its own",
    "https://github.com/MagicStack/uvloop/blob/v0.21.0/uvloop/pseudosock.pyx",
)
async def test_the_socket_of_get_extra_info_is_a_transport_socket(loop):
    async with connected() as (transport, _, _):
        assert isinstance(transport.get_extra_info("socket"), asyncio.trsock.TransportSocket)


async def test_get_extra_info_of_unknown_keys_gives_the_default(loop):
    async with connected() as (transport, _, _):
        assert transport.get_extra_info("unknown") is None
        assert transport.get_extra_info("unknown", 42) == 42
        assert transport.get_extra_info("sslcontext") is None
        assert transport.get_extra_info("sockname", 42) != 42


async def test_get_extra_info_works_after_close(loop):
    async with connected() as (transport, protocol, _):
        before = {
            key: transport.get_extra_info(key) for key in ("sockname", "peername", "socket")
        }
        transport.close()
        await protocol.lost()
        await ticks()
        assert transport.get_extra_info("sockname") == before["sockname"]
        assert transport.get_extra_info("peername") == before["peername"]
        assert transport.get_extra_info("socket") is not None
        assert transport.get_extra_info("unknown", 1) == 1


async def test_the_socket_of_a_closed_transport_has_no_descriptor(loop):
    async with connected() as (transport, protocol, _):
        sock = transport.get_extra_info("socket")
        transport.close()
        await protocol.lost()
        await until(lambda: sock.fileno() == -1)


async def test_peername_of_a_unix_client_is_the_path(loop, tmp_path):
    path = str(tmp_path / "socket")
    server = await loop.create_unix_server(Recorder, path)
    transport, protocol = await loop.create_unix_connection(Recorder, path)
    assert transport.get_extra_info("peername") == path
    assert transport.get_extra_info("sockname") == ""
    transport.close()
    await protocol.lost()
    server.close()


@pytest.mark.uvloop_differs(
    "its transports have no asyncio base",
    "https://github.com/MagicStack/uvloop/issues/131",
)
async def test_a_transport_is_an_asyncio_transport(loop):
    async with connected() as (transport, _, _):
        assert isinstance(transport, asyncio.Transport)
        assert isinstance(transport, asyncio.BaseTransport)


@both_families
async def test_repr_works_in_every_state(loop, family):
    async with connected(family=family, small=True) as (transport, protocol, peer):
        seen = [repr(transport)]
        transport.pause_reading()
        seen.append(repr(transport))
        transport.resume_reading()
        transport.write(pattern(1 << 20))
        seen.append(repr(transport))
        transport.write_eof()
        seen.append(repr(transport))
        transport.close()
        seen.append(repr(transport))
        transport.abort()
        seen.append(repr(transport))
        await protocol.lost()
        await ticks()
        seen.append(repr(transport))
        assert all(type(text) is str and text for text in seen)


async def test_is_closing_turns_true_and_stays(loop):
    async with connected() as (transport, protocol, _):
        assert transport.is_closing() is False
        transport.close()
        assert transport.is_closing() is True
        await protocol.lost()
        assert transport.is_closing() is True


async def test_is_reading_follows_pause_resume_and_close(loop):
    async with connected() as (transport, _, _):
        assert transport.is_reading() is True
        transport.pause_reading()
        assert transport.is_reading() is False
        transport.resume_reading()
        assert transport.is_reading() is True
        transport.close()
        assert transport.is_reading() is False


async def test_tcp_nodelay_is_set_on_both_ends(loop):
    accepted = []

    class Accepted(Recorder):
        def connection_made(self, transport):
            super().connection_made(transport)
            accepted.append(transport)

    async with serving(Accepted) as (_, address):
        transport, _ = await loop.create_connection(Recorder, *address)
        await until(lambda: accepted)
        for end in (transport, accepted[0]):
            sock = end.get_extra_info("socket")
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0
            end.abort()
        await ticks()


async def test_both_ends_of_a_pair_may_be_transports(loop):
    data = pattern(300_000)
    async with two_transports(family="unix") as (left, left_protocol, right, right_protocol):
        left.write(data)
        right.write(data[::-1])
        assert_same(await right_protocol.received(len(data)), data)
        assert_same(await left_protocol.received(len(data)), data[::-1])
