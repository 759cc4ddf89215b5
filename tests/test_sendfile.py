"""loop.sendfile() and loop.sock_sendfile(): files through transports and sockets."""

import asyncio
import hashlib
import io
import os
import select
import socket

import pytest
from helpers import (
    LIMIT,
    PY312,
    Recorder,
    assert_same,
    connected,
    in_thread,
    make_pair,
    pattern,
    read_exactly,
    read_to_end,
    reset,
    socket_pair,
    ticks,
    tls_connected,
    until,
)

UVLOOP_LOOP = "https://github.com/MagicStack/uvloop/blob/v0.21.0/uvloop/loop.pyx"
SELECTOR = "https://github.com/python/cpython/blob/v3.12.1/Lib/asyncio/selector_events.py"
CANCELLED = "https://github.com/python/cpython/issues/157025"

pytestmark = pytest.mark.uvloop_differs("has no sendfile()", UVLOOP_LOOP, run=False)

SIZE = 500_000
BIG = 16 << 20          # more than the socket buffers of a pair hold


def file_of(path, size):
    path.write_bytes(pattern(size))
    return path.open("rb")


@pytest.fixture
def file(tmp_path):
    with file_of(tmp_path / "file", SIZE) as file:
        yield file


@pytest.fixture
def big_file(tmp_path):
    with file_of(tmp_path / "big", BIG) as file:
        yield file


class Collector:
    """Reads one socket to its end in a thread; result() gives the bytes."""

    def __init__(self, sock, read=read_to_end):
        self.task = asyncio.ensure_future(in_thread(read, sock))

    async def result(self):
        return await self.task


async def started(task, peer):
    """Waits until bytes have arrived; what is sent does not fit into the buffers of a pair."""
    await ticks()
    await until(lambda: select.select([peer], [], [], 0)[0])
    await ticks(20)
    assert not task.done(), task


async def assert_usable(transport, protocol, peer, before=b""):
    """The transport reads and writes, and closes; `before` is what the peer still has to read."""
    received = len(protocol.data)
    reading = Collector(peer)
    await in_thread(peer.sendall, b"ping")
    await until(lambda: bytes(protocol.data[received:]) == b"ping")
    transport.write(b"pong")
    transport.close()
    got = await reading.result()
    assert got.endswith(b"pong")
    assert_same(got[:len(before)], before)
    assert await protocol.lost() is None
    return got[len(before):-4]


# Through transports


@pytest.mark.parametrize("offset, count", [
    (0, None), (1000, None), (0, 70_000), (1000, 70_000), (SIZE - 10, 100), (0, 10 * SIZE),
    (SIZE, None), (SIZE + 1000, None), (SIZE + 1000, 10), (7, 1),
])
@pytest.mark.parametrize("family", ["tcp", "unix"])
async def test_sendfile_sends_that_part_and_sets_the_position(loop, file, offset, count, family):
    expected = pattern(SIZE)[offset:][:count]
    file.seek(333)
    async with connected(family=family, small=True) as (transport, protocol, peer):
        reading = Collector(peer)
        transport.write(b"head")
        assert await loop.sendfile(transport, file, offset, count) == len(expected)
        transport.write(b"tail")
        transport.close()
        assert_same(await reading.result(), b"head" + expected + b"tail")
        assert file.tell() == (offset + len(expected) if expected else 333)
        await protocol.lost()


async def test_an_empty_file_sends_nothing(loop, tmp_path):
    (tmp_path / "empty").touch()
    async with connected() as (transport, protocol, peer):
        with (tmp_path / "empty").open("rb") as empty:
            assert await loop.sendfile(transport, empty) == 0
        assert await assert_usable(transport, protocol, peer) == b""


async def test_two_files_one_after_the_other(loop, file):
    async with connected(small=True) as (transport, protocol, peer):
        reading = Collector(peer)
        for _ in range(2):
            assert await loop.sendfile(transport, file) == SIZE
        transport.close()
        assert_same(await reading.result(), 2 * pattern(SIZE))


@pytest.mark.parametrize("offset, count, error", [
    (0, 0, ValueError), (0, -1, ValueError), (-1, None, ValueError), (0, 1.5, TypeError),
    ("0", None, TypeError), (0, "1", TypeError),
])
async def test_bad_arguments_leave_the_transport_usable(loop, file, offset, count, error):
    async with connected() as (transport, protocol, peer):
        with pytest.raises(error):
            await loop.sendfile(transport, file, offset, count)
        assert transport.is_reading()
        assert await assert_usable(transport, protocol, peer) == b""


async def test_a_text_file_is_a_value_error(loop, tmp_path):
    (tmp_path / "text").write_text("text")
    async with connected() as (transport, protocol, peer):
        with (tmp_path / "text").open() as text, pytest.raises(ValueError, match="binary mode"):
            await loop.sendfile(transport, text)
        assert await assert_usable(transport, protocol, peer) == b""


@pytest.mark.asyncio_differs(
    "sends what its own buffer holds later", "https://github.com/python/cpython/issues/135862",
    when=PY312)
@pytest.mark.parametrize("offset, count", [(0, None), (1000, None), (1000, 70_000)])
async def test_what_has_no_descriptor_is_read_and_written(loop, offset, count):
    expected = pattern(SIZE)[offset:][:count]
    content = io.BytesIO(pattern(SIZE))
    async with connected(small=True) as (transport, protocol, peer):
        reading = Collector(peer)
        transport.write(b"head")
        assert await loop.sendfile(transport, content, offset, count) == len(expected)
        assert content.tell() == offset + len(expected)
        transport.write(b"tail")
        transport.close()
        assert_same(await reading.result(), b"head" + expected + b"tail")
        assert await protocol.lost() is None


async def test_without_fallback_what_has_no_descriptor_is_refused(loop):
    async with connected() as (transport, protocol, peer):
        with pytest.raises(asyncio.SendfileNotAvailableError):
            await loop.sendfile(transport, io.BytesIO(b"data"), fallback=False)
        assert await assert_usable(transport, protocol, peer) == b""


@pytest.mark.parametrize("method", ["close", "abort"])
async def test_sendfile_on_a_closing_transport_is_a_runtime_error(loop, file, method):
    async with connected() as (transport, protocol, _):
        getattr(transport, method)()
        with pytest.raises(RuntimeError, match="closing"):
            await loop.sendfile(transport, file)
        await protocol.lost()
        with pytest.raises(RuntimeError, match="closing"):
            await loop.sendfile(transport, file)


async def test_a_pipe_cannot_send_files(loop, file):
    read_end, write_end = os.pipe()
    transport, protocol = await loop.connect_write_pipe(
        asyncio.BaseProtocol, os.fdopen(write_end, "wb", 0))
    with pytest.raises(RuntimeError, match="not supported"):
        await loop.sendfile(transport, file)
    transport.close()
    os.close(read_end)
    await ticks()


async def test_what_was_written_before_goes_first(loop, big_file):
    async with connected(small=True) as (transport, protocol, peer):
        head = pattern(2 << 20, seed=1)
        transport.write(head)
        sending = asyncio.ensure_future(loop.sendfile(transport, big_file))
        await started(sending, peer)
        reading = Collector(peer)
        assert await sending == BIG
        transport.close()
        assert_same(await reading.result(), head + pattern(BIG))
        assert protocol.calls.count("pause_writing") == protocol.calls.count("resume_writing") == 1


async def test_reading_waits_until_the_file_is_sent(loop, big_file):
    async with connected(small=True) as (transport, protocol, peer):
        sending = asyncio.ensure_future(loop.sendfile(transport, big_file))
        await started(sending, peer)
        peer.sendall(b"request")
        await ticks(20)
        assert not transport.is_reading()
        assert protocol.data == b""
        assert_same(await in_thread(read_exactly, peer, BIG), pattern(BIG))
        assert await sending == BIG
        assert await protocol.received(7) == b"request"


async def test_a_transport_paused_by_the_user_stays_paused(loop, file):
    async with connected() as (transport, protocol, peer):
        transport.pause_reading()
        peer.sendall(b"request")
        reading = Collector(peer, lambda sock: read_exactly(sock, SIZE))
        assert await loop.sendfile(transport, file) == SIZE
        await ticks(20)
        assert not transport.is_reading()
        assert protocol.data == b""
        assert_same(await reading.result(), pattern(SIZE))
        transport.resume_reading()
        assert await protocol.received(7) == b"request"


async def test_writing_meanwhile_is_a_runtime_error(loop, big_file):
    async with connected(small=True) as (transport, _, peer):
        sending = asyncio.ensure_future(loop.sendfile(transport, big_file))
        await started(sending, peer)
        with pytest.raises(RuntimeError, match="sendfile is in progress"):
            transport.write(b"x")
        with pytest.raises(RuntimeError, match="sendfile is in progress"):
            transport.writelines([b"x"])
        with pytest.raises((KeyError, RuntimeError)):
            await loop.sendfile(transport, big_file)
        assert_same(await in_thread(read_exactly, peer, BIG), pattern(BIG))
        assert await sending == BIG
        transport.write(b"x")
        assert await in_thread(peer.recv, 10) == b"x"


@pytest.mark.parametrize("end", [socket.socket.close, reset])
async def test_a_peer_that_goes_away_is_a_connection_error(loop, big_file, end):
    async with connected(small=True) as (transport, protocol, peer):
        sending = asyncio.ensure_future(loop.sendfile(transport, big_file))
        await started(sending, peer)
        end(peer)
        with pytest.raises(ConnectionError):
            await sending
        assert 0 < big_file.tell() < BIG
        await protocol.lost()


@pytest.mark.asyncio_differs("reports an InvalidStateError", f"{SELECTOR}#L1108")
@pytest.mark.parametrize("end", [socket.socket.close, reset])
async def test_a_peer_that_goes_away_before_the_file_is_a_connection_error(loop, file, end):
    async with connected(small=True) as (transport, protocol, peer):
        transport.write(pattern(BIG))
        sending = asyncio.ensure_future(loop.sendfile(transport, file))
        await started(sending, peer)
        end(peer)
        with pytest.raises(ConnectionError) as caught:
            await sending
        assert caught.value is await protocol.lost()
        assert file.tell() == 0


@pytest.mark.asyncio_differs("waits for ever", f"{SELECTOR}#L1188", run=False)
@pytest.mark.parametrize("method", ["close", "abort"])
async def test_closing_the_transport_meanwhile_is_a_connection_error(loop, big_file, method):
    async with connected(small=True) as (transport, protocol, peer):
        sending = asyncio.ensure_future(loop.sendfile(transport, big_file))
        await started(sending, peer)
        getattr(transport, method)()
        with pytest.raises(ConnectionError):
            await sending
        assert await protocol.lost() is None
        sent = await in_thread(read_to_end, peer)
        assert_same(sent, pattern(BIG)[:big_file.tell()])
        # The descriptor was closed, and nothing watches its number any more.
        assert transport.get_extra_info("socket").fileno() == -1
        async with connected(small=True) as (transport, protocol, peer):
            assert await assert_usable(transport, protocol, peer) == b""


@pytest.mark.asyncio_differs("fails with AttributeError", f"{SELECTOR}#L738", run=False)
async def test_closing_before_the_file_sends_what_was_written(loop, file):
    async with connected(small=True) as (transport, protocol, peer):
        transport.write(pattern(BIG))
        sending = asyncio.ensure_future(loop.sendfile(transport, file))
        await started(sending, peer)
        transport.close()
        assert_same(await in_thread(read_to_end, peer), pattern(BIG))
        with pytest.raises(ConnectionError):
            await sending
        assert await protocol.lost() is None


@pytest.mark.asyncio_differs("adds a reader for a closed socket", CANCELLED, run=False)
async def test_aborting_before_the_file_is_a_connection_error(loop, file):
    async with connected(small=True) as (transport, protocol, peer):
        transport.write(pattern(BIG))
        sending = asyncio.ensure_future(loop.sendfile(transport, file))
        await started(sending, peer)
        transport.abort()
        with pytest.raises(ConnectionError):
            await sending
        assert await protocol.lost() is None


async def test_cancelled_in_the_middle_the_transport_goes_on(loop, big_file):
    async with connected(small=True) as (transport, protocol, peer):
        sending = asyncio.ensure_future(loop.sendfile(transport, big_file))
        await started(sending, peer)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        sent = await assert_usable(transport, protocol, peer)
        assert_same(sent, pattern(BIG)[:len(sent)])


@pytest.mark.asyncio_differs("leaves the transport paused", CANCELLED, run=False)
@pytest.mark.parametrize("iterations", [0, 1, 20])
async def test_cancelled_before_the_file_the_transport_goes_on(loop, file, iterations):
    async with connected(small=True) as (transport, protocol, peer):
        transport.write(pattern(BIG))
        sending = asyncio.ensure_future(loop.sendfile(transport, file))
        await ticks(iterations)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        sent = await assert_usable(transport, protocol, peer, before=pattern(BIG))
        assert sent == b""
        assert protocol.calls.count("pause_writing") == protocol.calls.count("resume_writing") == 1


@pytest.mark.asyncio_differs("leaves the transport paused", CANCELLED, run=False)
async def test_after_a_cancelled_sendfile_comes_another(loop, big_file):
    async with connected(small=True) as (transport, _, peer):
        transport.write(b"head")
        sending = asyncio.ensure_future(loop.sendfile(transport, big_file))
        await started(sending, peer)
        sending.cancel()
        await asyncio.wait([sending])
        reading = Collector(peer)
        assert await loop.sendfile(transport, big_file, BIG - 1000) == 1000
        transport.close()
        got = await reading.result()
        assert got.startswith(b"head") and got.endswith(pattern(BIG)[-1000:])
        assert_same(got[4:-1000], pattern(BIG)[:len(got) - 1004])


def test_a_loop_closed_in_the_middle_leaves_nothing(loop, big_file, errors):
    async def main():
        with socket_pair(small=True) as (ours, peer):
            transport, _ = await loop.create_connection(Recorder, sock=ours)
            sending = asyncio.ensure_future(loop.sendfile(transport, big_file))
            await started(sending, peer)
            sending.cancel()
            await asyncio.wait([sending])
            transport.abort()

    loop.run_until_complete(main())
    loop.close()


def digest_of_slow_reader(sock):
    digest = hashlib.sha256()
    while chunk := sock.recv(37_000):
        digest.update(chunk)
    return digest.hexdigest()


async def test_64_mib_arrive_intact(loop, tmp_path):
    data = pattern(64 << 20)
    (tmp_path / "huge").write_bytes(data)
    async with connected(small=True) as (transport, protocol, peer):
        reading = Collector(peer, digest_of_slow_reader)
        with (tmp_path / "huge").open("rb") as huge:
            assert await loop.sendfile(transport, huge) == len(data)
        transport.close()
        assert await reading.result() == hashlib.sha256(data).hexdigest()
        assert await protocol.lost() is None


# Over TLS: the file is read and written


@pytest.mark.asyncio_differs("InvalidStateError out of its connection_lost", SELECTOR, run=False)
async def test_a_socket_detached_under_a_sendfile_is_not_shut_down(loop, big_file):
    ours, peer = make_pair(small=True)
    transport, _ = await loop.create_connection(Recorder, sock=ours)
    sending = loop.create_task(loop.sendfile(transport, big_file))
    await until(lambda: select.select([peer], [], [], 0)[0])
    await ticks()
    assert not sending.done()
    with socket.socket(fileno=ours.detach()) as other, peer:
        transport.abort()
        await ticks()
        peer.sendall(b"open")
        assert await in_thread(other.recv, 10) == b"open"
        await in_thread(drain, peer)
        other.send(b"open, too")
        assert await in_thread(peer.recv, 10) == b"open, too"
        with pytest.raises(OSError):
            await sending


def drain(sock):
    sock.setblocking(False)
    try:
        while sock.recv(1 << 20):
            pass
    except BlockingIOError:
        sock.settimeout(LIMIT)


@pytest.mark.parametrize("offset, count", [(0, None), (1000, None), (1000, 70_000), (SIZE, 1)])
async def test_sendfile_over_tls(loop, contexts, file, offset, count):
    expected = pattern(SIZE)[offset:][:count]
    async with tls_connected(contexts) as (transport, _, peer):
        reading = Collector(peer, lambda sock: read_exactly(sock, len(expected) + 8))
        transport.write(b"head")
        assert await loop.sendfile(transport, file, offset, count) == len(expected)
        assert file.tell() == offset + len(expected)
        transport.write(b"tail")
        assert_same(await reading.result(), b"head" + expected + b"tail")


async def test_tls_without_fallback_is_a_runtime_error(loop, contexts, file):
    async with tls_connected(contexts) as (transport, _, peer):
        with pytest.raises(RuntimeError, match="fallback is disabled"):
            await loop.sendfile(transport, file, fallback=False)
        transport.write(b"x")
        assert await in_thread(peer.recv, 1) == b"x"


async def test_sendfile_over_tls_cancelled_in_the_middle(loop, contexts, big_file):
    async with tls_connected(contexts) as (transport, protocol, peer):
        sending = asyncio.ensure_future(loop.sendfile(transport, big_file))
        await started(sending, peer)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        assert transport.is_reading()
        transport.write(b"pong")
        sent = await in_thread(read_exactly, peer, big_file.tell() + 4)
        assert_same(sent, pattern(BIG)[:big_file.tell()] + b"pong")
        await in_thread(peer.sendall, b"ping")
        assert await protocol.received(4) == b"ping"


# Through sockets


@pytest.mark.parametrize("offset, count", [
    (0, None), (1000, None), (0, 70_000), (1000, 70_000), (SIZE - 10, 100), (SIZE + 1000, None),
])
async def test_sock_sendfile_sends_that_part(loop, file, offset, count):
    expected = pattern(SIZE)[offset:][:count]
    file.seek(333)
    with socket_pair(small=True) as (ours, peer):
        reading = Collector(peer)
        assert await loop.sock_sendfile(ours, file, offset, count) == len(expected)
        assert file.tell() == (offset + len(expected) if expected else 333)
        await loop.sock_sendall(ours, b"tail")
        ours.close()
        assert_same(await reading.result(), expected + b"tail")


async def test_sock_sendfile_of_an_empty_file(loop, tmp_path):
    (tmp_path / "empty").touch()
    with socket_pair() as (ours, _), (tmp_path / "empty").open("rb") as empty:
        assert await loop.sock_sendfile(ours, empty) == 0


async def test_sock_sendfile_of_what_has_no_descriptor(loop):
    content = io.BytesIO(pattern(SIZE))
    with socket_pair(small=True) as (ours, peer):
        with pytest.raises(asyncio.SendfileNotAvailableError):
            await loop.sock_sendfile(ours, content, fallback=False)
        reading = Collector(peer)
        assert await loop.sock_sendfile(ours, content, 1000, 70_000) == 70_000
        assert content.tell() == 71_000
        ours.close()
        assert_same(await reading.result(), pattern(SIZE)[1000:71_000])


@pytest.mark.parametrize("offset, count, error", [
    (0, 0, ValueError), (0, -1, ValueError), (-1, None, ValueError), (0, 1.5, TypeError),
    ("0", None, TypeError), (0, "1", TypeError),
])
async def test_sock_sendfile_checks_its_arguments(loop, file, offset, count, error):
    with socket_pair() as (ours, _), pytest.raises(error):
        await loop.sock_sendfile(ours, file, offset, count)


async def test_sock_sendfile_refuses_datagrams_text_and_tls(loop, file, contexts, tmp_path):
    with socket.socket(type=socket.SOCK_DGRAM) as datagrams:
        datagrams.setblocking(False)
        with pytest.raises(ValueError, match="SOCK_STREAM"):
            await loop.sock_sendfile(datagrams, file)
    (tmp_path / "text").write_text("text")
    with socket_pair() as (ours, _), (tmp_path / "text").open() as text:
        with pytest.raises(ValueError, match="binary mode"):
            await loop.sock_sendfile(ours, text)
    with socket.socket() as sock:
        sock.setblocking(False)
        with contexts[1].wrap_socket(sock, server_hostname="localhost") as tls:
            with pytest.raises(TypeError, match="SSLSocket"):
                await loop.sock_sendfile(tls, file)


async def test_sock_sendfile_cancelled_in_the_middle(loop, big_file):
    with socket_pair(small=True) as (ours, peer):
        sending = asyncio.ensure_future(loop.sock_sendfile(ours, big_file))
        await started(sending, peer)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        reading = Collector(peer)
        await loop.sock_sendall(ours, b"tail")
        ours.close()
        got = await reading.result()
        assert got.endswith(b"tail")
        assert_same(got[:-4], pattern(BIG)[:len(got) - 4])


@pytest.mark.parametrize("end", [socket.socket.close, reset])
async def test_sock_sendfile_to_a_peer_that_goes_away(loop, big_file, end):
    with socket_pair(small=True) as (ours, peer):
        sending = asyncio.ensure_future(loop.sock_sendfile(ours, big_file))
        await started(sending, peer)
        end(peer)
        with pytest.raises(ConnectionError):
            await sending
        assert 0 < big_file.tell() < BIG


async def test_sock_sendfile_of_64_mib(loop, tmp_path):
    data = pattern(64 << 20)
    (tmp_path / "huge").write_bytes(data)
    with socket_pair(small=True) as (ours, peer):
        reading = Collector(peer, digest_of_slow_reader)
        with (tmp_path / "huge").open("rb") as huge:
            assert await loop.sock_sendfile(ours, huge) == len(data)
        ours.close()
        assert await reading.result() == hashlib.sha256(data).hexdigest()
