"""What a peer can make a loop hold, and what nobody gets to see: docs in SECURITY.md."""

import asyncio
import os
import pathlib
import socket
import ssl
import stat
import sys
import threading

import figures
import pytest
from helpers import (
    PY313,
    BufferedRecorder,
    Recorder,
    connected,
    in_thread,
    make_pair,
    only_ours,
    open_fds,
    run_child,
    serving,
    socket_pair,
    ticks,
    tls_connected,
    until,
)

import uringloop

READ_SIZE = 120 * 1024      # the largest recv(2), as in transports/receive.pxi
HOLD_LIMIT = 65536          # of sock_readahead


class Flood:
    """A thread that sends to a socket without end; `sent` counts."""

    def __init__(self, sock, size):
        self.sock, self.data = sock, bytes(size)
        self.sent = 0
        self.ended = False
        self.thread = threading.Thread(target=self.run)

    def run(self):
        self.sock.settimeout(0.01)
        while not self.ended:
            try:
                self.sent += self.sock.send(self.data)
            except TimeoutError:
                continue
            except OSError:
                return

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *exc):
        self.ended = True
        self.thread.join()

    async def stalled(self):
        """Until the kernel takes no more of it."""
        before = -1
        while before != self.sent:
            before = self.sent
            await asyncio.sleep(0.1)


def held(loop, protocol):
    """Bytes that the loop has received and the protocol was not given."""
    return loop.stats().bytes_received - len(protocol.data)


def pool_size(loop):
    return loop.stats().buffers * loop._options.recv_buffer_size


class PausesAt(Recorder):
    """Pauses reading in the third data_received()."""

    def data_received(self, data):
        super().data_received(data)
        if len(self.chunks) == 3:
            self.transport.pause_reading()


# What a peer that floods can make the loop hold


@pytest.mark.parametrize("size", [10, 1000, 20_000, 300_000])
async def test_a_paused_connection_holds_at_most_what_the_blocks_have(loop, loop_kind, size):
    only_ours(loop_kind, "the loop's own counters")
    async with connected(PausesAt) as (transport, protocol, peer):
        with Flood(peer, size) as flood:
            await until(lambda: len(protocol.chunks) >= 3)
            await flood.stalled()
            most = held(loop, protocol)
            figures.note_most("most bytes held for a paused connection", most)
            assert most <= pool_size(loop)
            if loop_kind == "epoll":
                assert most == 0
            await ticks(50)
            assert held(loop, protocol) == most
            assert len(protocol.chunks) == 3
        transport.resume_reading()
        await until(lambda: len(protocol.data) == flood.sent)
        assert held(loop, protocol) == 0


async def test_nothing_is_received_for_a_connection_that_stays_paused(loop, loop_kind):
    only_ours(loop_kind, "the loop's own counters")
    async with connected() as (transport, protocol, peer):
        peer.send(b"hello")
        await protocol.received(5)
        transport.pause_reading()
        await ticks()
        for _ in range(100):
            peer.send(b"more")
            await ticks(2)
        assert held(loop, protocol) == 0
        transport.resume_reading()
        await protocol.received(405)


async def test_blocks_are_lent_to_nobody_while_connections_are_idle_or_paused(loop, loop_kind):
    only_ours(loop_kind, "the loop's own counters")
    pairs = [make_pair("unix") for _ in range(200)]
    transports = []
    for number, (ours, peer) in enumerate(pairs):
        transport, protocol = await loop.create_connection(Recorder, sock=ours)
        transports.append(transport)
        peer.send(b"hello")
        await protocol.received(5)
        if number % 2:
            transport.pause_reading()
            peer.send(b"more")
    await ticks(10)
    stats = loop.stats()
    assert stats.buffers_lent == 0
    assert stats.buffers <= 64          # as many as at the beginning: nothing is pinned by waiting
    for transport, (_, peer) in zip(transports, pairs):
        transport.abort()
        peer.close()
    await ticks()


async def test_the_pool_of_blocks_never_outgrows_its_option(loop, loop_kind, ledger):
    only_ours(loop_kind, "the pool is the loop's own")
    pairs = [make_pair("unix") for _ in range(300)]
    options = uringloop.LoopOptions(backend=loop_kind, recv_buffers=128, recv_buffer_size=1024)

    async def flooded(small):
        protocols = []
        for ours, _ in pairs:
            _, protocol = await small.create_connection(Recorder, sock=ours)
            protocols.append(protocol)
        for round_number in range(1, 6):
            for _, peer in pairs:
                peer.send(bytes(900))
            await until(lambda n=round_number: all(len(p.data) == 900 * n for p in protocols))
        assert small.stats().buffers <= 128
        for protocol in protocols:
            protocol.transport.abort()
        await ticks()

    def run():
        with asyncio.Runner(loop_factory=lambda: uringloop.new_event_loop(options)) as runner:
            runner.run(flooded(runner.get_loop()))

    await in_thread(run)
    for _, peer in pairs:
        peer.close()


@pytest.mark.parametrize("size", [1000, 300_000])
async def test_a_stream_reader_that_nobody_reads_holds_a_bounded_amount(loop, loop_kind, size):
    limit = 10_000
    with socket_pair() as (ours, peer):
        reader, writer = await asyncio.open_connection(sock=ours, limit=limit)
        with Flood(peer, size) as flood:
            await until(lambda: len(reader._buffer) > 2 * limit)
            await flood.stalled()
            in_reader = len(reader._buffer)
            # asyncio reads 256 KiB at once.
            assert in_reader <= 2 * limit + 256 * 1024
            if loop_kind in ("io_uring", "epoll"):
                assert in_reader <= 2 * limit + READ_SIZE
                assert loop.stats().bytes_received - in_reader <= pool_size(loop)
        writer.transport.abort()
        await ticks()


@pytest.mark.parametrize("make", [Recorder, BufferedRecorder])
async def test_a_tls_connection_that_is_paused_holds_a_bounded_amount(
        loop, loop_kind, contexts, make):
    only_ours(loop_kind, "the loop's own counters")
    async with tls_connected(contexts, make, server_side=True, small=False) as (
            transport, protocol, peer):
        transport.pause_reading()
        await ticks()
        peer.settimeout(0.2)

        def flood():
            sent = 0
            try:
                while True:
                    sent += peer.send(bytes(16384))
            except (TimeoutError, OSError):
                return sent

        await in_thread(flood)
        await ticks(20)
        before = loop.stats().bytes_received
        # asyncio's SSLProtocol pauses the transport above 256 KiB, and offers a buffer of as much.
        assert before <= 2 * 256 * 1024 + pool_size(loop) + 16384
        await ticks(50)
        assert loop.stats().bytes_received == before


async def test_reading_ahead_holds_its_limit_and_what_was_under_way(loop, loop_kind):
    if loop_kind != "io_uring":
        pytest.skip("reading ahead is on io_uring only")
    options = uringloop.LoopOptions(backend="io_uring", sock_readahead=True)

    async def flooded(ahead):
        with socket_pair() as (ours, peer), Flood(peer, 5000) as flood:
            assert await ahead.sock_recv(ours, 1)
            await flood.stalled()
            assert ahead.stats().bytes_received - 1 <= HOLD_LIMIT + pool_size(ahead)
            before = ahead.stats().bytes_received
            await ticks(50)
            assert ahead.stats().bytes_received == before

    def run():
        with asyncio.Runner(loop_factory=lambda: uringloop.new_event_loop(options)) as runner:
            runner.run(flooded(runner.get_loop()))

    await in_thread(run)


async def test_a_cancelled_call_stashes_no_more_than_it_asked_for(loop, loop_kind):
    only_ours(loop_kind, "the others lose it")
    with socket_pair("unix") as (ours, peer):
        for _ in range(20):
            receiving = loop.create_task(loop.sock_recv(ours, 10))
            await ticks(2)
            peer.send(bytes(1000))
            receiving.cancel()
            await asyncio.wait([receiving])
        unread = 0
        ours.setblocking(False)
        while True:
            try:
                unread += len(ours.recv(100_000))
            except BlockingIOError:
                break
        assert 20 * 1000 - unread <= 20 * 10


async def test_a_peer_that_never_reads_is_told_by_pause_writing(loop):
    """The write buffer is the program's: it is told at the mark, and nothing else is kept."""
    async with connected(small=True) as (transport, protocol, _):
        transport.set_write_buffer_limits(high=100_000)
        written = 0
        while "pause_writing" not in protocol.calls:
            transport.write(bytes(10_000))
            written += 10_000
            assert written < 10_000_000
        assert 100_000 < transport.get_write_buffer_size() <= 110_000
        transport.abort()
        await protocol.lost()
        assert transport.get_write_buffer_size() == 0


async def test_connections_that_never_speak_cost_one_request_each(loop, loop_kind):
    only_ours(loop_kind, "the loop's own counters")
    made = []

    def factory():
        made.append(Recorder())
        return made[-1]

    async with serving(factory) as (_, address):
        before = loop.stats()
        clients = [await in_thread(socket.create_connection, address) for _ in range(100)]
        await until(lambda: len(made) == 100 and all(protocol.transport for protocol in made))
        await ticks()
        stats = loop.stats()
        assert stats.operations - before.operations == 100
        assert stats.buffers_lent == 0
        for client in clients:
            client.close()
        await until(lambda: all(protocol.lost_with for protocol in made))
        await ticks()
        assert loop.stats().operations == before.operations


# What a block held before is nobody's


SECRET = b"SECRETsecret!" * 5000


async def spread_secrets(loop):
    """Fill the receive blocks, and the memory that was freed, with the secret."""
    pairs = [make_pair("unix") for _ in range(100)]
    protocols = []
    for ours, _ in pairs:
        _, protocol = await loop.create_connection(Recorder, sock=ours)
        protocols.append(protocol)
    for _, peer in pairs:
        await in_thread(peer.sendall, SECRET[:16384])
    await until(lambda: all(len(protocol.data) == 16384 for protocol in protocols))
    for protocol, (_, peer) in zip(protocols, pairs):
        protocol.transport.abort()
        peer.close()
    await ticks()


class FilledRecorder(BufferedRecorder):
    """Its buffers are filled, to see what was written beyond the message."""

    def get_buffer(self, sizehint):
        buffer = super().get_buffer(sizehint)
        buffer[:] = b"\xee" * len(buffer)
        return buffer

    def buffer_updated(self, nbytes):
        assert set(self.buffer[nbytes:]) <= {0xEE}
        super().buffer_updated(nbytes)


@pytest.mark.parametrize("size", [1, 100, 8191, 8192, 12_345, 16383, 16384, 50_000])
async def test_a_message_is_what_the_peer_sent_and_no_byte_more(loop, size):
    await spread_secrets(loop)
    message = b"." * size
    for make in (Recorder, FilledRecorder):
        async with connected(make, "unix") as (_, protocol, peer):
            await in_thread(peer.sendall, message)
            assert await protocol.received(size) == message
            for chunk in getattr(protocol, "chunks", ()):
                assert sys.getsizeof(chunk) == len(chunk) + sys.getsizeof(b"")
                assert set(memoryview(chunk)) == {ord(".")}
    with socket_pair("unix") as (ours, peer):
        reader, writer = await asyncio.open_connection(sock=ours)
        await in_thread(peer.sendall, message)
        assert await reader.readexactly(size) == message
        assert not reader._buffer
        writer.transport.abort()
        await ticks()


@pytest.mark.parametrize("size", [1, 100, 8192, 16384, 50_000])
async def test_a_sock_call_gets_what_the_peer_sent_and_no_byte_more(loop, size):
    await spread_secrets(loop)
    with socket_pair("unix") as (ours, peer):
        for _ in range(3):
            sending = asyncio.ensure_future(in_thread(peer.sendall, b"." * size))
            got = 0
            while got < size:
                data = await loop.sock_recv(ours, 100_000)
                assert set(data) == {ord(".")}
                got += len(data)
            await sending
            sending = asyncio.ensure_future(in_thread(peer.sendall, b"." * size))
            got = 0
            while got < size:
                buffer = bytearray(b"\xee" * 100_000)
                count = await loop.sock_recv_into(ours, buffer)
                assert set(buffer[:count]) == {ord(".")}
                assert set(buffer[count:]) == {0xEE}
                got += count
            await sending


# Descriptors


async def test_a_child_process_inherits_no_descriptor_of_the_loop(loop):
    before = set(open_fds())
    loop.add_signal_handler(12, print)
    listing = "import os; print(*sorted(os.listdir('/proc/self/fd')))"
    async with serving(Recorder) as (server, address), connected() as (_, _, peer):
        peer.send(b"x")
        client = await in_thread(socket.create_connection, address)
        await loop.run_in_executor(None, client.send, b"x")
        path = f"\0uringloop-{os.getpid()}"
        unix = await loop.create_unix_server(Recorder, path)
        udp, _ = await loop.create_datagram_endpoint(
            asyncio.DatagramProtocol, local_addr=("127.0.0.1", 0))
        await ticks()
        ours = set(open_fds()) - before
        assert ours
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", listing, stdout=asyncio.subprocess.PIPE, close_fds=False)
        output, _ = await process.communicate()
        inherited = {int(name) for name in output.split()}
        assert not inherited & ours
        assert all(not os.get_inheritable(fd) for fd in ours)
        udp.close()
        unix.close()
        client.close()
    loop.remove_signal_handler(12)


# Unix sockets


def mode_of(path):
    return stat.filemode(path.stat().st_mode)


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o000])
async def test_a_unix_socket_has_the_mode_that_asyncio_gives_it(loop, tmp_path, umask):
    path = tmp_path / "socket"
    old = os.umask(umask)
    try:
        server = await loop.create_unix_server(Recorder, path)
        assert path.stat().st_mode == stat.S_IFSOCK | (0o777 & ~umask)
        server.close()
        await ticks()
        # Python 3.13 removes what it made.
        assert path.exists() == (not PY313)
    finally:
        os.umask(old)


@pytest.mark.skipif(not PY313, reason="cleanup_socket is new in Python 3.13")
@pytest.mark.parametrize("cleanup", [True, False])
async def test_cleanup_socket_decides_whether_the_path_stays(loop, loop_kind, tmp_path, cleanup):
    if loop_kind == "uvloop":
        pytest.skip("uvloop has no cleanup_socket")
    path = tmp_path / "socket"
    server = await loop.create_unix_server(Recorder, path, cleanup_socket=cleanup)
    server.close()
    assert path.exists() != cleanup


async def test_a_stale_socket_is_replaced_and_another_file_is_not(loop, tmp_path):
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(os.fspath(path))
    server = await loop.create_unix_server(Recorder, path)
    server.close()
    await ticks()
    path.unlink(missing_ok=True)
    path.write_text("precious")
    with pytest.raises(OSError):
        await loop.create_unix_server(Recorder, path)
    assert path.read_text() == "precious"


async def test_an_abstract_unix_socket_leaves_no_file(loop, loop_kind):
    if loop_kind == "uvloop":
        pytest.skip("uvloop 0.23 does not connect to an abstract name")
    name = f"\0uringloop-{os.getpid()}-{id(loop)}"
    before = set(pathlib.Path.cwd().iterdir())
    accepted = Recorder()
    server = await loop.create_unix_server(lambda: accepted, name)
    transport, _ = await loop.create_unix_connection(Recorder, name)
    transport.abort()
    await until(lambda: accepted.transport)
    await accepted.lost()
    server.close()
    await ticks()
    assert set(pathlib.Path.cwd().iterdir()) == before


# TLS


async def test_tls_checks_the_name_and_the_issuer_as_the_context_says(loop, errors, contexts):
    strangers = ssl.create_default_context()        # does not know the issuer
    async with serving(Recorder, ssl=contexts[0]) as (_, address):
        for context, name in ((contexts[1], "elsewhere"), (strangers, "localhost")):
            with pytest.raises(ssl.SSLCertVerificationError):
                await loop.create_connection(
                    Recorder, *address, ssl=context, server_hostname=name)
        transport, protocol = await loop.create_connection(
            Recorder, *address, ssl=contexts[1], server_hostname="localhost")
        for name in ("peercert", "cipher", "compression", "ssl_object", "sslcontext", "socket",
                     "peername", "sockname"):
            assert transport.get_extra_info(name, "missing") != "missing"
        assert transport.get_extra_info("sslcontext") is contexts[1]
        assert transport.get_extra_info("ssl_object").version() == "TLSv1.3"
        transport.abort()
        await protocol.lost()


async def test_tls_versions_are_those_of_the_context(loop, errors, contexts):
    contexts[0].minimum_version = ssl.TLSVersion.TLSv1_3
    contexts[1].maximum_version = ssl.TLSVersion.TLSv1_2
    async with serving(Recorder, ssl=contexts[0]) as (_, address):
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await loop.create_connection(
                Recorder, *address, ssl=contexts[1], server_hostname="localhost")


# Privileges that were given up after the loop had run


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")

DROPPED = """
import os, socket, struct, sys
from helpers import *
path = sys.argv[1]

async def main():
    left, left_protocol, right = None, None, None
    ours, peer = make_pair("unix")
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    transport, protocol = await loop.create_connection(Recorder, sock=ours)
    def sender():
        _, ancillary, _, _ = peer.recvmsg(100, 100)
        return [struct.unpack("iII", data)[1] for _, kind, data in ancillary
                if kind == socket.SCM_CREDENTIALS]
    transport.write(b"as root")
    await ticks()
    assert sender() == [0]
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
    transport.write(b"as nobody")
    await ticks()
    assert sender() == [65534], "sent with the credentials of before"
    for attempt in (lambda: loop.create_unix_connection(Recorder, path),
                    lambda: loop.sock_connect(raw, path)):
        raw = socket.socket(socket.AF_UNIX)
        raw.setblocking(False)
        try:
            await attempt()
        except PermissionError:
            pass
        else:
            raise AssertionError("connected with the credentials of before")
        raw.close()
    transport.abort()
    await ticks()
    peer.close()

loop.run_until_complete(main())
loop.close()
"""


@needs_root
def test_a_loop_that_ran_as_root_acts_as_nobody_once_the_process_does(loop_kind, tmp_path):
    path = tmp_path / "roots"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.fspath(path))
        listener.listen(1)
        path.chmod(0o600)
        done = run_child(loop_kind, DROPPED.replace("sys.argv[1]", repr(os.fspath(path))))
    assert done.returncode == 0, done.stderr
