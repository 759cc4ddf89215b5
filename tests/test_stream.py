"""Stream transports: what a program sees from connection_made to connection_lost."""

import asyncio
import contextvars
import gc
import socket
import warnings

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
    make_pair,
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


# Half close


async def test_write_after_write_eof_is_a_runtime_error(loop):
    async with connected() as (transport, _, _):
        assert transport.can_write_eof()
        transport.write_eof()
        with pytest.raises(RuntimeError):
            transport.write(b"more")


async def test_writelines_after_write_eof_is_a_runtime_error(loop):
    async with connected() as (transport, _, _):
        transport.write_eof()
        with pytest.raises(RuntimeError):
            transport.writelines([b"more"])


@both_families
async def test_write_eof_ends_our_stream_and_leaves_the_other_open(loop, family):
    async with connected(family=family) as (transport, protocol, peer):
        transport.write(b"question")
        transport.write_eof()
        assert await in_thread(read_to_end, peer) == b"question"
        assert not transport.is_closing()
        peer.sendall(b"answer")
        assert await protocol.received(6) == b"answer"


async def test_write_eof_waits_for_what_was_written(loop):
    data = pattern(1 << 20)
    async with connected(small=True) as (transport, protocol, peer):
        transport.write(data)
        transport.write_eof()
        assert_same(await in_thread(read_to_end, peer), data)
        peer.sendall(b"answer")
        assert await protocol.received(6) == b"answer"


@both_families
async def test_eof_received_returning_true_keeps_the_writing_side_open(loop, family):
    class HalfOpen(Recorder):
        keep_open_after_eof = True

    async with connected(HalfOpen, family) as (transport, protocol, peer):
        peer.shutdown(socket.SHUT_WR)
        await until(lambda: "eof_received" in protocol.calls)
        await ticks()
        assert not transport.is_closing()
        transport.write(b"still here")
        assert await in_thread(read_exactly, peer, 10) == b"still here"
        transport.close()
        assert await in_thread(read_to_end, peer) == b""
        assert await protocol.lost() is None
        assert protocol.calls == ["connection_made", "eof_received", "connection_lost"]


@pytest.mark.parametrize("answer", [None, False, 0])
async def test_eof_received_returning_false_closes_the_transport(loop, answer):
    class Closing(Recorder):
        keep_open_after_eof = answer

    async with connected(Closing) as (transport, protocol, peer):
        peer.shutdown(socket.SHUT_WR)
        assert await protocol.lost() is None
        assert transport.is_closing()
        assert await in_thread(read_to_end, peer) == b""
        assert protocol.calls == ["connection_made", "eof_received", "connection_lost"]


async def test_eof_flushes_what_was_written_before_closing(loop):
    data = pattern(1 << 20)
    async with connected(small=True) as (transport, protocol, peer):
        transport.write(data)
        peer.shutdown(socket.SHUT_WR)
        await until(lambda: "eof_received" in protocol.calls)
        assert_same(await in_thread(read_to_end, peer), data)
        assert await protocol.lost() is None


# Close and abort


@both_families
async def test_close_flushes_8_mib_to_a_slow_reader_and_then_ends(loop, family):
    data = pattern(8 << 20)
    async with connected(family=family, small=True) as (transport, protocol, peer):
        transport.write(data)
        transport.close()
        assert transport.is_closing()
        await ticks(20)
        assert protocol.lost_with == []
        assert_same(await in_thread(read_to_end, peer), data)
        assert await protocol.lost() is None
        assert protocol.lost_with == [None]


async def test_close_delivers_no_more_data(loop):
    async with connected() as (transport, protocol, peer):
        transport.close()
        peer.sendall(b"late")
        await protocol.lost()
        await ticks()
        assert protocol.calls == ["connection_made", "connection_lost"]


async def test_close_does_not_call_connection_lost_at_once(loop):
    async with connected() as (transport, protocol, _):
        transport.close()
        assert protocol.lost_with == []
        await protocol.lost()


async def test_abort_drops_what_was_written_and_loses_the_connection_once(loop):
    data = pattern(4 << 20)
    async with connected(small=True) as (transport, protocol, peer):
        transport.write(data)
        transport.abort()
        assert transport.is_closing()
        assert protocol.lost_with == []
        assert await protocol.lost() is None
        await ticks()
        assert protocol.lost_with == [None]
        received = await in_thread(_read_what_comes, peer)
        assert len(received) < len(data)
        assert_same(received, data[: len(received)])


def _read_what_comes(sock):
    received = bytearray()
    try:
        while chunk := sock.recv(65536):
            received += chunk
    except ConnectionResetError:
        pass
    return received


async def test_abort_in_data_received_stops_delivery(loop):
    class Aborting(Recorder):
        def data_received(self, data):
            super().data_received(data)
            self.transport.abort()

    async with connected(Aborting) as (_, protocol, peer):
        peer.sendall(pattern(3))
        assert await protocol.lost() is None
        assert protocol.calls == ["connection_made", "data_received", "connection_lost"]


async def test_a_reset_becomes_connection_reset_error(loop):
    async with connected() as (transport, protocol, peer):
        reset(peer)
        assert isinstance(await protocol.lost(), ConnectionResetError)
        assert transport.is_closing()
        assert protocol.calls == ["connection_made", "connection_lost"]


@pytest.mark.parametrize("paused", [False, True])
async def test_a_reset_while_writing_loses_the_connection_with_that_error(loop, paused):
    async with connected(small=True) as (transport, protocol, peer):
        if paused:
            transport.pause_reading()
        transport.write(pattern(4 << 20))
        await ticks()
        reset(peer)
        assert isinstance(await protocol.lost(), ConnectionResetError)
        assert protocol.calls.count("connection_lost") == 1
        assert transport.get_write_buffer_size() == 0


async def test_writing_to_a_closed_unix_peer_loses_the_connection_quietly(loop):
    class HalfOpen(Recorder):
        keep_open_after_eof = True

    async with connected(HalfOpen, "unix") as (transport, protocol, peer):
        peer.close()
        await until(lambda: "eof_received" in protocol.calls)
        transport.write(b"nobody reads this")
        assert isinstance(await protocol.lost(), (BrokenPipeError, ConnectionResetError))


# set_protocol


async def test_get_protocol_follows_set_protocol(loop):
    async with connected() as (transport, protocol, _):
        assert transport.get_protocol() is protocol
        other = Recorder()
        transport.set_protocol(other)
        assert transport.get_protocol() is other


async def test_the_new_protocol_gets_connection_lost(loop):
    async with connected() as (transport, protocol, _):
        other = Recorder()
        transport.set_protocol(other)
        transport.close()
        assert await other.lost() is None
        assert protocol.calls == ["connection_made"]


def _plain():
    protocol = Recorder()
    protocol.calls.append("set")
    return protocol


def _buffered():
    protocol = BufferedRecorder([7, 4096, 1, 100_000])
    protocol.calls.append("set")
    return protocol


@pytest.mark.parametrize("order", ["plain-plain", "plain-buffered", "buffered-plain"])
async def test_set_protocol_in_mid_stream_loses_nothing(loop, order):
    data = pattern(2 << 20)
    makers = {"plain": _plain, "buffered": _buffered}
    first, second = (makers[name] for name in order.split("-"))
    used = [first()]
    async with connected(lambda: used[0]) as (transport, _, peer):
        sending = asyncio.ensure_future(in_thread(peer.sendall, data))
        while sum(len(protocol.data) for protocol in used) < len(data):
            before = len(used[-1].data)
            await until(lambda: len(used[-1].data) > before)
            used.append((second if len(used) % 2 else first)())
            transport.set_protocol(used[-1])
            if sum(len(protocol.data) for protocol in used) == len(data):
                break
        await sending
        assert_same(b"".join(bytes(protocol.data) for protocol in used), data)


async def test_set_protocol_inside_data_received_takes_effect_for_the_next_data(loop):
    data = pattern(1 << 20)
    heir = _buffered()

    class First(Recorder):
        def data_received(self, data):
            super().data_received(data)
            self.transport.set_protocol(heir)

    async with connected(First) as (_, first, peer):
        sending = asyncio.ensure_future(in_thread(peer.sendall, data))
        await until(lambda: len(first.data) + len(heir.data) >= len(data))
        await sending
        assert len(first.chunks) == 1
        assert_same(bytes(first.data + heir.data), data)


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


# Exceptions out of the protocol


class Failing(Recorder):
    """Raises out of the one method that the test names."""

    method = None

    def fail(self, method):
        if self.method == method:
            raise ZeroDivisionError(method)

    def connection_made(self, transport):
        super().connection_made(transport)
        self.fail("connection_made")

    def data_received(self, data):
        super().data_received(data)
        self.fail("data_received")

    def eof_received(self):
        super().eof_received()
        self.fail("eof_received")

    def connection_lost(self, exc):
        super().connection_lost(exc)
        self.fail("connection_lost")


class BufferedFailing(BufferedRecorder):
    method = None

    def get_buffer(self, sizehint):
        if self.method == "get_buffer":
            raise ZeroDivisionError(self.method)
        if self.method == "empty buffer":
            return bytearray()
        return super().get_buffer(sizehint)

    def buffer_updated(self, nbytes):
        super().buffer_updated(nbytes)
        if self.method == "buffer_updated":
            raise ZeroDivisionError(self.method)


def failing(method, base=Failing):
    return type("Failing_" + method.replace(" ", "_"), (base,), {"method": method})


FATAL = [
    ("data_received", Failing),
    ("eof_received", Failing),
    ("get_buffer", BufferedFailing),
    ("buffer_updated", BufferedFailing),
]


@pytest.mark.uvloop_differs(
    "has one message for all of them",
    "https://github.com/MagicStack/uvloop/blob/v0.21.0/uvloop/handles/handle.pyx",
)
@pytest.mark.parametrize("method, base", FATAL, ids=[method for method, _ in FATAL])
async def test_an_exception_out_of_a_receiving_method_ends_the_connection(
    loop, errors, method, base
):
    async with connected(failing(method, base)) as (transport, protocol, peer):
        peer.sendall(b"x")
        if method == "eof_received":
            peer.shutdown(socket.SHUT_WR)
        exception = await protocol.lost()
        assert isinstance(exception, ZeroDivisionError)
        assert await in_thread(has_ended, peer)
        (context,) = errors
        assert context["message"] == f"Fatal error: protocol.{method}() call failed."
        assert context["exception"] is exception
        assert context["transport"] is transport
        assert context["protocol"] is protocol


@pytest.mark.uvloop_differs(
    "has one message for all of them",
    "https://github.com/MagicStack/uvloop/blob/v0.21.0/uvloop/handles/handle.pyx",
)
async def test_an_empty_buffer_ends_the_connection_with_a_runtime_error(loop, errors):
    async with connected(failing("empty buffer", BufferedFailing)) as (_, protocol, peer):
        peer.sendall(b"x")
        exception = await protocol.lost()
        assert isinstance(exception, RuntimeError)
        (context,) = errors
        assert context["message"] == "Fatal error: protocol.get_buffer() call failed."
        assert context["exception"] is exception


@pytest.mark.uvloop_differs(
    "does not start to read",
    "https://github.com/MagicStack/uvloop/blob/v0.21.0/uvloop/handles/basetransport.pyx",
    run=False,
)
async def test_an_exception_out_of_connection_made_leaves_the_connection_open(loop, errors):
    async with connected(failing("connection_made")) as (transport, protocol, peer):
        await ticks()
        (context,) = errors
        assert isinstance(context["exception"], ZeroDivisionError)
        assert "message" in context
        assert not transport.is_closing()
        peer.sendall(b"x")
        assert await protocol.received(1) == b"x"


async def test_an_exception_out_of_connection_lost_still_closes_the_socket(loop, errors):
    async with connected(failing("connection_lost")) as (transport, protocol, peer):
        transport.close()
        await protocol.lost()
        assert await in_thread(has_ended, peer)
        await until(lambda: errors)
        (context,) = errors
        assert isinstance(context["exception"], ZeroDivisionError)
        assert protocol.calls.count("connection_lost") == 1


@pytest.mark.uvloop_differs(
    "reports it as an error of the transport",
    "https://github.com/MagicStack/uvloop/issues/612",
    run=False,
)
@pytest.mark.parametrize("exception", [SystemExit, KeyboardInterrupt])
def test_system_exit_out_of_data_received_leaves_the_loop(loop, exception):
    class Exiting(Recorder):
        def data_received(self, data):
            super().data_received(data)
            raise exception("out")

    with socket_pair() as (ours, peer):
        connecting = loop.create_connection(Exiting, sock=ours)
        transport, protocol = loop.run_until_complete(connecting)
        peer.sendall(b"x")
        with pytest.raises(exception, match="out"):
            loop.run_until_complete(asyncio.sleep(20))
        assert protocol.data == b"x"
        transport.abort()
        loop.run_until_complete(protocol.lost())
        for task in asyncio.all_tasks(loop):
            task.cancel()


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


# Context variables

variable = contextvars.ContextVar("variable", default="default")


class ContextRecorder(Recorder):
    def __init__(self):
        super().__init__()
        self.seen = {}

    def connection_made(self, transport):
        super().connection_made(transport)
        self.seen["connection_made"] = variable.get()

    def data_received(self, data):
        super().data_received(data)
        self.seen.setdefault("data_received", []).append(variable.get())
        variable.set(data.decode())

    def eof_received(self):
        super().eof_received()
        self.seen["eof_received"] = variable.get()

    def connection_lost(self, exc):
        self.seen["connection_lost"] = variable.get()
        super().connection_lost(exc)


async def test_connection_made_and_data_received_run_in_the_creators_context(loop):
    variable.set("creator")
    async with connected(ContextRecorder) as (_, protocol, peer):
        variable.set("later")
        peer.sendall(b"x")
        await protocol.received(1)
        assert protocol.seen["connection_made"] == "creator"
        assert protocol.seen["data_received"] == ["creator"]
        assert variable.get() == "later"


async def test_what_data_received_sets_is_there_in_the_next_call(loop):
    variable.set("creator")
    async with connected(ContextRecorder) as (_, protocol, peer):
        for number, letter in enumerate(b"abc"):
            peer.sendall(bytes([letter]))
            await protocol.received(number + 1)
        assert protocol.seen["data_received"] == ["creator", "a", "b"]
        peer.close()
        await protocol.lost()
        assert protocol.seen["eof_received"] == "c"
        assert protocol.seen["connection_lost"] == "c"


@pytest.mark.uvloop_differs(
    "runs it in the context of the creator",
    "https://github.com/MagicStack/uvloop/blob/v0.21.0/uvloop/handles/basetransport.pyx",
)
async def test_connection_lost_runs_in_the_context_that_called_close(loop):
    variable.set("creator")
    async with connected(ContextRecorder) as (transport, protocol, _):
        variable.set("closer")
        transport.close()
        variable.set("later")
        await protocol.lost()
        assert protocol.seen["connection_lost"] == "closer"


async def test_server_protocols_run_in_the_context_of_create_server(loop):
    protocols = []

    def factory():
        protocols.append(ContextRecorder())
        return protocols[-1]

    variable.set("server")
    async with serving(factory) as (_, address):
        variable.set("later")
        transport, protocol = await loop.create_connection(Recorder, *address)
        transport.write(b"x")
        await until(lambda: protocols and protocols[0].data)
        assert protocols[0].seen["connection_made"] == "server"
        assert protocols[0].seen["data_received"] == ["server"]
        transport.close()
        await protocol.lost()
        await protocols[0].lost()


# Left open


def test_an_unclosed_transport_warns_and_does_not_crash(new_loop):
    loop = new_loop()
    with socket_pair() as (ours, peer), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        transport, protocol = loop.run_until_complete(loop.create_connection(Recorder, sock=ours))
        peer.sendall(b"unread")
        loop.close()
        del transport, protocol, ours
        gc.collect()
    texts = [str(w.message) for w in caught if w.category is ResourceWarning]
    assert any("transport" in text.lower() for text in texts), texts


async def test_an_exception_out_of_connection_lost_after_a_flushed_close(loop, errors):
    """The last bytes leave in an I/O callback, and connection_lost() is called out of it."""
    class Raises(Recorder):
        def connection_lost(self, exc):
            super().connection_lost(exc)
            raise ZeroDivisionError

    async with connected(Raises, small=True) as (transport, protocol, peer):
        transport.write(b"x" * 300_000)
        transport.close()
        received = await in_thread(read_to_end, peer)
        await protocol.lost()
        await ticks()
    assert len(received) == 300_000
    assert [type(context["exception"]) for context in errors] == [ZeroDivisionError]


def test_reading_resumed_while_the_loop_does_not_run(loop):
    class Stops(Recorder):
        def data_received(self, data):
            super().data_received(data)
            loop.stop()

    async def start():
        ours, peer = make_pair()
        transport, protocol = await loop.create_connection(Stops, sock=ours)
        transport.pause_reading()
        await ticks()
        return transport, protocol, peer

    transport, protocol, peer = loop.run_until_complete(start())
    transport.resume_reading()
    peer.sendall(b"x")

    async def finish():
        transport.abort()
        await protocol.lost()

    loop.run_forever()      # nothing but the reading can end it
    assert protocol.data == b"x"
    loop.run_until_complete(finish())
    peer.close()


@pytest.mark.parametrize("family", ["tcp", "unix"])
@pytest.mark.parametrize("end", ["abort", "close"])
async def test_the_peer_sees_the_end_after_one_iteration(loop, end, family):
    """A loop that blocks then, as on a thread that waits for the end, would never get there."""
    async with connected(family=family) as (transport, _, peer):
        await asyncio.sleep(0.01)
        getattr(transport, end)()
        await asyncio.sleep(0)
        assert has_ended(peer)


@pytest.mark.parametrize("family", ["tcp", "unix"])
async def test_the_peer_sees_an_abort_with_unsent_data_after_one_iteration(loop, family):
    async with connected(family=family, small=True) as (transport, _, peer):
        transport.write(pattern(1 << 20))
        await asyncio.sleep(0.01)
        transport.abort()
        await asyncio.sleep(0)
        while peer.recv(1 << 20):
            pass
