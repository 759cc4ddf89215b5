"""Pipe transports: both ends of pipes, fifos, sockets and terminals; back pressure, the ends of
either side, closing from callbacks, what is refused."""

import asyncio
import contextlib
import errno
import fcntl
import os
import pty
import socket
import tty

import pytest
from helpers import Recorder, assert_same, in_thread, pattern, ticks, until

UVLOOP_PIPE = "https://github.com/MagicStack/uvloop/blob/v0.21.0/uvloop/handles/pipe.pyx"
UVLOOP_STREAM = "https://github.com/MagicStack/uvloop/blob/v0.21.0/uvloop/handles/stream.pyx"
TWICE = "https://github.com/python/cpython/issues/156512"
WIDE = "https://github.com/python/cpython/issues/135862"


@contextlib.asynccontextmanager
async def read_pipe(loop, factory=Recorder):
    """A read transport on a pipe: (transport, protocol, descriptor to write to)."""
    reading, writing = os.pipe()
    try:
        transport, protocol = await loop.connect_read_pipe(factory, os.fdopen(reading, "rb", 0))
        yield transport, protocol, writing
    finally:
        with contextlib.suppress(OSError):      # the test may have closed it
            os.close(writing)
    transport.close()
    await protocol.lost()


@contextlib.asynccontextmanager
async def write_pipe(loop, factory=Recorder):
    """A write transport on a pipe: (transport, protocol, blocking file to read from)."""
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb", 0) as incoming:
        transport, protocol = await loop.connect_write_pipe(factory, os.fdopen(writing, "wb", 0))
        yield transport, protocol, incoming
    transport.close()
    await protocol.lost()


def read_all(file):
    """Reads up to the end; blocks, for threads."""
    chunks = []
    while chunk := file.read(1 << 16):
        chunks.append(chunk)
    return b"".join(chunks)


def read_count(file, count):
    chunks = []
    while count and (chunk := file.read(min(count, 1 << 16))):
        chunks.append(chunk)
        count -= len(chunk)
    return b"".join(chunks)


def write_all(fd, data):
    with os.fdopen(fd, "wb") as out:
        out.write(data)


# Reading


async def test_a_read_pipe_reads_to_the_end(loop):
    data = pattern(3 << 20)
    async with read_pipe(loop) as (transport, protocol, writing):
        await in_thread(write_all, os.dup(writing), data)
        os.close(writing)
        assert await protocol.lost() is None
        assert_same(bytes(protocol.data), data)
        assert protocol.calls[-2:] == ["eof_received", "connection_lost"]
        assert transport.is_closing()


async def test_a_read_pipe_stays_open_while_somebody_may_write(loop):
    async with read_pipe(loop) as (_, protocol, writing):
        copy = os.dup(writing)
        os.write(writing, b"one")
        os.close(writing)
        await until(lambda: protocol.data == b"one")
        await ticks(20)
        os.write(copy, b"two")
        assert await protocol.received(6) == b"onetwo"
        os.close(copy)
        assert await protocol.lost() is None


async def test_a_paused_read_pipe_holds_data_and_end_back(loop):
    async with read_pipe(loop) as (transport, protocol, writing):
        os.write(writing, b"one")
        await protocol.received(3)
        transport.pause_reading()
        assert not transport.is_reading()
        os.write(writing, b"two")
        os.close(writing)
        await ticks(20)
        assert protocol.calls == ["connection_made", "data_received"]
        assert protocol.data == b"one"
        transport.resume_reading()
        assert await protocol.lost() is None
        assert protocol.data == b"onetwo"


@pytest.mark.uvloop_differs("starts to read afterwards", UVLOOP_PIPE)
async def test_a_read_pipe_may_be_paused_in_connection_made(loop):
    class Pausing(Recorder):
        def connection_made(self, transport):
            super().connection_made(transport)
            transport.pause_reading()

    async with read_pipe(loop, Pausing) as (transport, protocol, writing):
        os.write(writing, b"data")
        await ticks(20)
        assert not protocol.data
        transport.resume_reading()
        assert await protocol.received(4) == b"data"


async def test_a_paused_read_pipe_lets_its_writer_wait(loop):
    async with read_pipe(loop) as (transport, protocol, writing):
        transport.pause_reading()
        data = pattern(1 << 20)
        sending = asyncio.ensure_future(in_thread(write_all, os.dup(writing), data))
        await ticks(50)
        assert not sending.done() and not protocol.data
        transport.resume_reading()
        assert_same(await protocol.received(len(data)), data)
        await sending


@pytest.mark.parametrize("late", [False, True], ids=["at once", "with data waiting"])
async def test_a_closed_read_pipe_closes_its_file(loop, late):
    async with read_pipe(loop) as (transport, protocol, writing):
        pipe = transport.get_extra_info("pipe")
        if late:
            os.write(writing, b"for nobody")
        transport.close()
        transport.close()
        assert transport.is_closing()
        assert await protocol.lost() is None
        await ticks(20)
        assert protocol.lost_with == [None] and not protocol.data
        await until(lambda: pipe.closed)
        with pytest.raises(BrokenPipeError):
            os.write(writing, b"x")


async def test_a_read_pipe_may_be_closed_by_its_protocol(loop):
    class Closing(Recorder):
        def data_received(self, data):
            super().data_received(data)
            self.transport.close()

    async with read_pipe(loop, Closing) as (_, protocol, writing):
        os.write(writing, b"one")
        assert await protocol.lost() is None
        assert protocol.calls == ["connection_made", "data_received", "connection_lost"]


@pytest.mark.uvloop_differs("closes the transport", UVLOOP_STREAM)
async def test_an_exception_out_of_data_received_is_reported(loop, errors):
    class Failing(Recorder):
        def data_received(self, data):
            super().data_received(data)
            raise ZeroDivisionError(data.decode())

    async with read_pipe(loop, Failing) as (_, protocol, writing):
        for number, text in enumerate((b"1", b"2"), 1):
            os.write(writing, text)
            await until(lambda number=number: len(errors) == number)
        assert [str(context["exception"]) for context in errors] == ["1", "2"]
        assert protocol.data == b"12"


# Writing


async def test_a_write_pipe_writes_everything_and_closes(loop):
    data = pattern(3 << 20)
    async with write_pipe(loop) as (transport, protocol, incoming):
        transport.write(data[:100])
        transport.write(bytearray(data[100:1000]))
        transport.write(memoryview(data)[1000:])
        transport.close()
        assert_same(await in_thread(read_all, incoming), data)
        assert await protocol.lost() is None
        await ticks(20)
        assert protocol.lost_with == [None]


@pytest.mark.parametrize("method", ["close", "write_eof"])
@pytest.mark.uvloop_differs("calls shutdown(2) on a pipe", UVLOOP_STREAM)
async def test_an_idle_write_pipe_ends(loop, method):
    async with write_pipe(loop) as (transport, protocol, incoming):
        assert transport.can_write_eof()
        transport.write(b"data")
        getattr(transport, method)()
        assert await in_thread(read_all, incoming) == b"data"
        assert await protocol.lost() is None


@pytest.mark.uvloop_differs("calls shutdown(2) on a pipe", UVLOOP_STREAM)
async def test_writes_after_the_end_do_nothing(loop):
    async with write_pipe(loop) as (transport, protocol, incoming):
        transport.write(b"data")
        transport.write_eof()
        try:
            for _ in range(10):
                transport.write(b"late")
        except RuntimeError:
            pass    # uvloop says that the end was written
        assert await in_thread(read_all, incoming) == b"data"
        assert await protocol.lost() is None


async def test_a_full_pipe_pauses_the_protocol(loop):
    async with write_pipe(loop) as (transport, protocol, incoming):
        for _ in range(3):
            protocol.calls.clear()
            data = pattern(1 << 20)
            transport.write(data)
            assert protocol.calls == ["pause_writing"]
            assert 0 < transport.get_write_buffer_size() < len(data)
            await ticks(20)
            assert_same(await in_thread(read_count, incoming, len(data)), data)
            await until(lambda: protocol.calls[1:])
            assert protocol.calls == ["pause_writing", "resume_writing"]
            assert transport.get_write_buffer_size() == 0


async def test_the_limits_of_a_write_pipe_can_be_set(loop):
    async with write_pipe(loop) as (transport, protocol, incoming):
        transport.set_write_buffer_limits(high=0)
        transport.write(bytes(65536))
        assert protocol.calls == ["connection_made"]
        transport.write(b"x")
        assert protocol.calls == ["connection_made", "pause_writing"]
        await in_thread(read_count, incoming, 65537)
        await until(lambda: protocol.calls[-1] == "resume_writing")


@pytest.mark.asyncio_differs("takes items for bytes", WIDE)
@pytest.mark.parametrize("size", [400, 1 << 20])
async def test_a_memoryview_of_wide_items_is_written_whole(loop, size):
    data = pattern(size)
    async with write_pipe(loop) as (transport, protocol, incoming):
        transport.write(memoryview(data).cast("I"))
        transport.close()
        assert_same(await in_thread(read_all, incoming), data)
        assert await protocol.lost() is None


@pytest.mark.uvloop_differs("keeps a reference", UVLOOP_STREAM)
async def test_a_changed_bytearray_does_not_change_what_was_written(loop):
    async with write_pipe(loop) as (transport, protocol, incoming):
        transport.write(bytes(100_000))
        data = bytearray(b"before")
        transport.write(data)
        data[:] = b"after!"
        transport.close()
        assert (await in_thread(read_all, incoming))[-6:] == b"before"


@pytest.mark.uvloop_differs("calls eof_received() too", UVLOOP_PIPE)
async def test_an_idle_write_pipe_notices_that_its_reader_left(loop):
    async with write_pipe(loop) as (transport, protocol, incoming):
        incoming.close()
        await protocol.lost()
        assert protocol.calls == ["connection_made", "connection_lost"]
        await ticks(20)
        assert len(protocol.lost_with) == 1
        assert transport.is_closing()


async def test_a_write_pipe_with_unsent_data_ends_with_broken_pipe(loop):
    async with write_pipe(loop) as (transport, protocol, incoming):
        transport.write(bytes(1 << 20))
        assert transport.get_write_buffer_size()
        incoming.close()
        assert isinstance(await protocol.lost(), BrokenPipeError)
        await ticks(20)
        assert len(protocol.lost_with) == 1
        for _ in range(3):
            with contextlib.suppress(RuntimeError):     # uvloop's
                transport.write(b"late")


async def test_abort_drops_what_is_buffered(loop):
    async with write_pipe(loop) as (transport, protocol, incoming):
        data = pattern(1 << 20)
        transport.write(data)
        transport.abort()
        assert await protocol.lost() is None
        received = await in_thread(read_all, incoming)
        assert len(received) < len(data) and data.startswith(received)


@pytest.mark.asyncio_differs("calls connection_lost() for each", TWICE)
@pytest.mark.parametrize("calls", [("abort", "abort"), ("close", "abort"), ("abort", "close"),
                                   ("write_eof", "close"), ("close", "close")])
@pytest.mark.parametrize("full", [False, True], ids=["empty", "full"])
async def test_connection_lost_comes_once(loop, calls, full):
    async with write_pipe(loop) as (transport, protocol, incoming):
        if full:
            transport.write(bytes(1 << 20))
        for method in calls:
            getattr(transport, method)()
        await in_thread(read_all, incoming)
        assert await protocol.lost() is None
        for method in calls:
            with contextlib.suppress(RuntimeError):     # uvloop's, of write_eof()
                getattr(transport, method)()
        await ticks(20)
        assert protocol.lost_with == [None]


@pytest.mark.asyncio_differs("calls connection_lost() twice", TWICE)
@pytest.mark.parametrize("method", ["close", "write_eof", "abort"])
@pytest.mark.uvloop_differs("calls shutdown(2) on a pipe", UVLOOP_STREAM)
async def test_a_write_pipe_may_be_closed_when_writing_resumes(loop, method):
    class Closing(Recorder):
        def resume_writing(self):
            super().resume_writing()
            getattr(self.transport, method)()

    async with write_pipe(loop, Closing) as (transport, protocol, incoming):
        data = pattern(1 << 20)
        transport.write(data)
        assert_same(await in_thread(read_all, incoming), data)
        assert await protocol.lost() is None
        await ticks(20)
        assert protocol.lost_with == [None]


@pytest.mark.uvloop_differs("closes its descriptor twice", UVLOOP_PIPE, run=False)
@pytest.mark.asyncio_differs("watches a pipe that is closed already", TWICE)
@pytest.mark.parametrize("method", ["close", "abort"])
async def test_a_write_pipe_may_be_closed_in_connection_made(loop, method):
    class Closing(Recorder):
        def connection_made(self, transport):
            super().connection_made(transport)
            getattr(transport, method)()

    loop.set_debug(False)       # asyncio's debug output asks the closed pipe for its number
    reading, writing = os.pipe()
    copy = os.dup(writing)      # keeps a forgotten registration alive
    _, protocol = await loop.connect_write_pipe(Closing, os.fdopen(writing, "wb", 0))
    assert await protocol.lost() is None
    os.close(reading)
    await ticks(20)
    assert protocol.calls == ["connection_made", "connection_lost"]
    os.close(copy)


@pytest.mark.asyncio_differs("drops the last write", TWICE)
async def test_what_is_written_when_writing_resumes_is_sent_before_the_end(loop):
    last = pattern(500_000, 1)

    class Closing(Recorder):
        def resume_writing(self):
            super().resume_writing()
            if self.calls.count("resume_writing") == 1:
                self.transport.write(last)
                self.transport.close()

    async with write_pipe(loop, Closing) as (transport, protocol, incoming):
        data = pattern(1 << 20)
        transport.write(data)
        assert_same(await in_thread(read_all, incoming), data + last)
        assert await protocol.lost() is None


@pytest.mark.uvloop_differs("raises TypeError", UVLOOP_STREAM)
@pytest.mark.parametrize("wrong", ["text", None, 5], ids=lambda w: type(w).__name__)
async def test_what_is_not_bytes_like_is_an_assertion_error(loop, wrong):
    async with write_pipe(loop) as (transport, _, incoming):
        with pytest.raises(AssertionError):
            transport.write(wrong)
        transport.write(b"")
        transport.write(b"fine")
        assert await in_thread(incoming.read, 10) == b"fine"


# Both ends, and other files than pipes


@pytest.mark.uvloop_differs("calls shutdown(2) on a pipe", UVLOOP_STREAM)
async def test_both_ends_of_a_pipe_in_one_loop(loop):
    data = pattern(3 << 20)
    reading, writing = os.pipe()
    right, right_protocol = await loop.connect_read_pipe(Recorder, os.fdopen(reading, "rb", 0))
    left, left_protocol = await loop.connect_write_pipe(Recorder, os.fdopen(writing, "wb", 0))
    left.write(data)
    left.write_eof()
    assert await right_protocol.lost() is None
    assert await left_protocol.lost() is None
    assert_same(bytes(right_protocol.data), data)


async def test_both_ends_of_a_fifo(loop, tmp_path):
    path = tmp_path / "fifo"
    os.mkfifo(path)
    reading = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    writing = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    right, right_protocol = await loop.connect_read_pipe(Recorder, os.fdopen(reading, "rb", 0))
    left, left_protocol = await loop.connect_write_pipe(Recorder, os.fdopen(writing, "wb", 0))
    data = pattern(300_000)
    left.write(data)
    assert_same(await right_protocol.received(len(data)), data)
    right.close()
    await right_protocol.lost()
    await left_protocol.lost()


async def test_both_ends_of_a_socketpair(loop):
    ours, peer = socket.socketpair()
    left, left_protocol = await loop.connect_write_pipe(Recorder, ours)
    right, right_protocol = await loop.connect_read_pipe(Recorder, peer)
    data = pattern(1 << 20)
    left.write(data)
    assert_same(await right_protocol.received(len(data)), data)
    left.close()
    assert await right_protocol.lost() is None
    assert await left_protocol.lost() is None


@contextlib.contextmanager
def terminal():
    """(master, slave) descriptors of a raw pseudo terminal; the caller closes both."""
    try:
        master, slave = pty.openpty()
    except OSError as exc:
        pytest.skip(f"no pseudo terminals here: {exc}")
    tty.setraw(slave)
    yield master, slave


@pytest.mark.parametrize("reader", ["master", "slave"])
async def test_a_terminal_is_read(loop, reader):
    with terminal() as (master, slave):
        ours, peer = (master, slave) if reader == "master" else (slave, master)
        transport, protocol = await loop.connect_read_pipe(Recorder, os.fdopen(ours, "rb", 0))
        data = pattern(50_000)
        sending = asyncio.ensure_future(in_thread(write_all, os.dup(peer), data))
        assert_same(await protocol.received(len(data)), data)
        await sending
        transport.pause_reading()
        os.write(peer, b"more")
        await ticks(20)
        assert len(protocol.data) == len(data)
        transport.resume_reading()
        await protocol.received(len(data) + 4)
        os.close(peer)
        await protocol.lost()


async def test_the_end_of_a_terminal_is_an_eio(loop):
    with terminal() as (master, slave):
        transport, protocol = await loop.connect_read_pipe(Recorder, os.fdopen(master, "rb", 0))
        os.write(slave, b"last words")
        await protocol.received(10)
        os.close(slave)
        error = await protocol.lost()
        assert error is None or error.errno == errno.EIO


@pytest.mark.parametrize("writer", ["master", "slave"])
async def test_a_terminal_is_written(loop, writer):
    with terminal() as (master, slave):
        ours, peer = (master, slave) if writer == "master" else (slave, master)
        transport, protocol = await loop.connect_write_pipe(Recorder, os.fdopen(ours, "wb", 0))
        data = pattern(50_000)
        transport.write(data)
        with os.fdopen(peer, "rb", 0) as incoming:
            assert_same(await in_thread(read_count, incoming, len(data)), data)
            transport.close()
            assert await protocol.lost() is None


@pytest.mark.uvloop_differs("aborts the process", UVLOOP_PIPE, run=False)
async def test_dev_null_cannot_be_watched_for_reading(loop, errors):
    """epoll refuses it; asyncio reports that after connection_made."""
    file = open("/dev/null", "rb", 0)       # noqa: SIM115
    transport, protocol = await loop.connect_read_pipe(Recorder, file)
    await until(lambda: errors)
    assert isinstance(errors[0]["exception"], PermissionError)
    assert protocol.calls == ["connection_made"]
    transport.close()
    assert await protocol.lost() is None


@pytest.mark.uvloop_differs("aborts the process", UVLOOP_PIPE, run=False)
async def test_dev_null_may_be_written(loop):
    file = open("/dev/null", "wb", 0)       # noqa: SIM115
    transport, protocol = await loop.connect_write_pipe(Recorder, file)
    transport.write(bytes(1 << 20))
    assert transport.get_write_buffer_size() == 0
    transport.close()
    assert await protocol.lost() is None


@pytest.mark.uvloop_differs("aborts the process", UVLOOP_PIPE, run=False)
@pytest.mark.parametrize("method", ["connect_read_pipe", "connect_write_pipe"])
async def test_a_regular_file_is_a_value_error(loop, tmp_path, method):
    with (tmp_path / "file").open("wb+") as file:
        with pytest.raises(ValueError, match="for pipes"):
            await getattr(loop, method)(Recorder, file)
        assert not file.closed
        file.write(b"still mine")


@pytest.mark.parametrize("method", ["connect_read_pipe", "connect_write_pipe"])
# The half-made transport cannot say what it is when it is finalized.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_a_closed_file_is_a_value_error(loop, method):
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb", 0) as incoming, os.fdopen(writing, "wb", 0) as outgoing:
        pass
    file = incoming if method == "connect_read_pipe" else outgoing
    with pytest.raises(ValueError):
        await getattr(loop, method)(Recorder, file)


# Descriptors


async def test_the_pipe_is_not_blocking_and_stays_private(loop):
    async with write_pipe(loop) as (transport, _, incoming):
        fd = transport.get_extra_info("pipe").fileno()
        assert not os.get_blocking(fd)
        assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        assert os.get_blocking(incoming.fileno())


async def test_pipes_that_come_and_go_are_not_mixed_up(loop):
    """Each round gets the descriptor numbers of the one before."""
    for number in range(30):
        async with read_pipe(loop) as (transport, protocol, writing):
            os.write(writing, b"%d" % number)
            if number % 3:
                await until(lambda protocol=protocol: protocol.data)
                assert bytes(protocol.data) == b"%d" % number
            else:
                transport.close()
                await protocol.lost()


# Streams


async def test_a_stream_reader_reads_a_pipe(loop):
    reading, writing = os.pipe()
    reader = asyncio.StreamReader(limit=1000)
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(reading, "rb", 0))
    data = b"".join(b"%05d\n" % number for number in range(50_000))
    sending = asyncio.ensure_future(in_thread(write_all, writing, data))
    lines = [line async for line in reader]
    await sending
    assert b"".join(lines) == data
    assert len(lines) == 50_000
    assert reader.at_eof()
    transport.close()
    await ticks()


async def test_a_stream_writer_drains_into_a_pipe(loop):
    reading, writing = os.pipe()
    transport, protocol = await loop.connect_write_pipe(
        asyncio.streams.FlowControlMixin, os.fdopen(writing, "wb", 0))
    writer = asyncio.StreamWriter(transport, protocol, None, loop)
    data = pattern(1 << 20)
    with os.fdopen(reading, "rb", 0) as incoming:
        receiving = asyncio.ensure_future(in_thread(read_all, incoming))
        for start in range(0, len(data), 50_000):
            writer.write(data[start:start + 50_000])
            await writer.drain()
            assert transport.get_write_buffer_size() <= 65536
        writer.close()
        assert_same(await receiving, data)
    await ticks(20)
