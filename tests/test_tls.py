"""TLS: handshakes, data, the end of connections; start_tls() on connections in use."""

import array
import asyncio
import contextlib
import gc
import os
import socket
import ssl
import threading

import pytest
from helpers import (
    LIMIT,
    BufferedRecorder,
    Echo,
    Recorder,
    assert_same,
    connected,
    in_thread,
    open_fds,
    pattern,
    read_exactly,
    read_to_end,
    reset,
    serving,
    socket_pair,
    ticks,
    tls_connected,
    until,
)

UVLOOP_SSL = "https://github.com/MagicStack/uvloop/blob/v0.21.0/uvloop/sslproto.pyx"
UVLOOP_LOOP = "https://github.com/MagicStack/uvloop/blob/v0.21.0/uvloop/loop.pyx"
BUFFERED_START_TLS = "https://github.com/python/cpython/issues/142352"
BYTEARRAY = "https://github.com/python/cpython/issues/156275"
ASSERTION = "https://github.com/python/cpython/issues/109051"
RETURNS_NONE = "https://github.com/python/cpython/issues/105993"

FLOOD = 8 << 20         # more than the socket buffers of a pair hold
SIZES = (1, 1023, 16383, 16384, 16385, 32769, 300_000)


def plain(tls_socket):
    """The TCP socket under a blocking TLS socket, which is left without one."""
    return socket.socket(fileno=tls_socket.detach())


@contextlib.asynccontextmanager
async def tls_client(address, contexts, factory=Recorder):
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.create_connection(
        factory, *address, ssl=contexts[1], server_hostname="localhost")
    try:
        yield transport, protocol
    finally:
        if not protocol.lost_with:
            transport.abort()
        await until(lambda: protocol.lost_with)


# Data


@pytest.mark.parametrize("factory", [
    Recorder,
    pytest.param(
        BufferedRecorder, marks=pytest.mark.asyncio_differs("reads into copies", BYTEARRAY)),
])
async def test_protocols_echo_every_size_around_a_record(loop, contexts, factory):
    async with serving(Echo, ssl=contexts[0]) as (_, address):
        async with tls_client(address, contexts, factory) as (transport, protocol):
            for size in SIZES:
                transport.write(pattern(size, size))
            expected = b"".join(pattern(size, size) for size in SIZES)
            assert_same(await protocol.received(len(expected)), expected)


async def test_streams_echo_lines_and_end(loop, contexts):
    served = []

    async def serve(reader, writer):
        while line := await reader.readline():
            writer.write(line.upper())
            await writer.drain()
        writer.close()
        await writer.wait_closed()
        served.append(True)

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=contexts[0])
    reader, writer = await asyncio.open_connection(
        *server.sockets[0].getsockname(), ssl=contexts[1], server_hostname="localhost")
    for number in range(100):
        writer.write(b"line %d\n" % number)
    for number in range(100):
        assert await reader.readline() == b"LINE %d\n" % number
    writer.close()
    await writer.wait_closed()
    await until(lambda: served)
    server.close()


async def test_several_records_in_one_segment_arrive_in_order(loop, contexts):
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = contexts[1].wrap_bio(incoming, outgoing, server_hostname="localhost")
    with socket_pair() as (ours, peer):
        protocol = Recorder()
        connecting = asyncio.ensure_future(
            loop.connect_accepted_socket(lambda: protocol, ours, ssl=contexts[0]))
        await in_thread(handshake, client, incoming, outgoing, peer)
        for number in range(50):
            client.write(pattern(1000, number))
        peer.sendall(outgoing.read())
        expected = b"".join(pattern(1000, number) for number in range(50))
        assert_same(await protocol.received(50_000), expected)
        assert len(protocol.chunks) < 50
        transport, _ = await connecting
        transport.abort()
        await protocol.lost()


def handshake(tls, incoming, outgoing, sock):
    """A blocking handshake of an SSLObject; for threads."""
    while True:
        try:
            tls.do_handshake()
            return sock.sendall(outgoing.read())
        except ssl.SSLWantReadError:
            sock.sendall(outgoing.read())
            received = sock.recv(65536)
            if not received:
                raise ConnectionError("closed during the handshake") from None
            incoming.write(received)


async def test_data_in_one_segment_with_the_end_of_the_handshake(loop, contexts):
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = contexts[1].wrap_bio(incoming, outgoing, server_hostname="localhost")

    class Peer:                 # holds the last flight back, for the data to go with it
        def __init__(self, sock):
            self.recv, self.sock, self.held = sock.recv, sock, []

        def sendall(self, data):
            self.held.append(data)
            if len(self.held) == 1:
                self.sock.sendall(data)

    with socket_pair() as (ours, sock):
        protocol = Recorder()
        connecting = asyncio.ensure_future(
            loop.connect_accepted_socket(lambda: protocol, ours, ssl=contexts[0]))
        peer = Peer(sock)
        await in_thread(handshake, client, incoming, outgoing, peer)
        client.write(b"data")
        sock.sendall(b"".join(peer.held[1:]) + outgoing.read())
        assert await protocol.received(4) == b"data"
        assert protocol.calls == ["connection_made", "data_received"]
        transport, _ = await connecting
        transport.abort()
        await protocol.lost()


@pytest.mark.parametrize("server_side", [False, True])
async def test_10_mib_and_close_reach_a_slow_reader_whole(loop, contexts, server_side):
    data = pattern(10 << 20)
    async with tls_connected(contexts, server_side=server_side) as (transport, protocol, peer):
        transport.write(data[:1])
        transport.writelines([data[1:1000], data[1000:]])
        transport.close()
        # Without close_notify this is SSLEOFError.
        assert_same(await in_thread(read_to_end, peer), data)
        await in_thread(peer.close)
        await protocol.lost()


async def test_writes_that_are_refused_and_writes_that_do_nothing(loop, contexts):
    async with tls_connected(contexts) as (transport, protocol, peer):
        for wrong in ("text", 1, None):
            with pytest.raises(TypeError):
                transport.write(wrong)
        transport.write(b"")
        transport.writelines([])
        transport.write(bytearray(b"a"))
        transport.write(memoryview(b"b"))
        transport.writelines([b"c", bytearray(b"d")])
        assert await in_thread(read_exactly, peer, 4) == b"abcd"
        transport.close()
        transport.write(b"late")
        transport.writelines([b"late"])
        assert await in_thread(read_to_end, peer) == b""
        await in_thread(peer.close)
        await protocol.lost()
        transport.write(b"late")


async def test_write_eof_is_not_there(loop, contexts):
    async with tls_connected(contexts) as (transport, _, _):
        assert transport.can_write_eof() is False
        with pytest.raises(NotImplementedError):
            transport.write_eof()


# Buffered protocols


class Views(BufferedRecorder):
    """Offers a buffer made by a function, and looks at it as bytes."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def get_buffer(self, sizehint):
        self.buffer = self.make()
        return self.buffer

    def buffer_updated(self, nbytes):
        self.data += memoryview(self.buffer).cast("B")[:nbytes]


@pytest.mark.asyncio_differs("reads into copies", BYTEARRAY)
@pytest.mark.parametrize("make", [
    lambda: bytearray(50_000), lambda: bytearray(1), lambda: bytearray(16_385),
    lambda: array.array("I", bytes(40_000)),
    lambda: memoryview(array.array("I", bytes(40_000))),
], ids=["50000", "1", "16385", "array", "view of array"])
async def test_get_buffer_may_return_any_buffer(loop, contexts, make):
    data = pattern(100_000)
    async with tls_connected(contexts, lambda: Views(make), small=False) as (_, protocol, peer):
        await in_thread(peer.sendall, data)
        assert_same(await protocol.received(len(data)), data)


async def test_get_buffer_may_return_a_memoryview(loop, contexts):
    data = pattern(300_000)
    factory = lambda: Views(lambda: memoryview(bytearray(50_000)))      # noqa: E731
    async with tls_connected(contexts, factory) as (_, protocol, peer):
        await in_thread(peer.sendall, data)
        assert_same(await protocol.received(len(data)), data)


async def test_buffer_updated_may_resize_its_bytearray(loop, contexts):
    class Resizing(BufferedRecorder):
        def buffer_updated(self, nbytes):
            super().buffer_updated(nbytes)
            self.buffer.clear()

    async with tls_connected(contexts, Resizing) as (_, protocol, peer):
        for size in (1, 100, 16_000):
            protocol.data.clear()
            await in_thread(peer.sendall, pattern(size))
            assert_same(await protocol.received(size), pattern(size))
        (await in_thread(peer.unwrap)).close()
        await protocol.lost()
        protocol.buffer.extend(b"nobody has a view of what the last get_buffer() returned")


@pytest.mark.parametrize("other", ["buffered", "streaming"])
async def test_set_protocol_in_mid_stream(loop, contexts, other):
    async with tls_connected(contexts) as (transport, first, peer):
        await in_thread(peer.sendall, b"first")
        assert await first.received(5) == b"first"
        second = Views(lambda: memoryview(bytearray(50_000))) if other == "buffered" else Recorder()
        second.calls.append("set_protocol")
        transport.set_protocol(second)
        assert transport.get_protocol() is second
        await in_thread(peer.sendall, pattern(100_000))
        assert_same(await second.received(100_000), pattern(100_000))
        assert first.data == b"first"
        transport.abort()
        await second.lost()
        first.lost_with.append(None)


# Flow control


async def test_a_slow_reader_pauses_and_resumes_the_writer(loop, contexts):
    async with tls_connected(contexts) as (transport, protocol, peer):
        transport.set_write_buffer_limits(high=100_000, low=20_000)
        assert transport.get_write_buffer_limits() == (20_000, 100_000)
        written = 0
        while "pause_writing" not in protocol.calls:
            transport.write(pattern(65_536))
            written += 1
            assert written < 1000
            await asyncio.sleep(0)
        assert transport.get_write_buffer_size() >= 100_000
        assert_same(await in_thread(read_exactly, peer, written * 65_536),
                    pattern(65_536) * written)
        await until(lambda: "resume_writing" in protocol.calls)
        assert protocol.calls == ["connection_made", "pause_writing", "resume_writing"]
        assert transport.get_write_buffer_size() <= 20_000


@pytest.mark.parametrize("low, high", [(-1, None), (10, 5), (None, -1)])
async def test_impossible_limits_are_a_value_error(loop, contexts, low, high):
    async with tls_connected(contexts) as (transport, _, _):
        with pytest.raises(ValueError, match="high"):
            transport.set_write_buffer_limits(high=high, low=low)


async def test_drain_waits_for_a_slow_reader(loop, contexts):
    async def serve(reader, writer):
        for _ in range(20):
            writer.write(pattern(200_000))
            await writer.drain()
        writer.close()
        served.append(True)

    served = []
    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=contexts[0])
    reader, writer = await asyncio.open_connection(
        *server.sockets[0].getsockname(), ssl=contexts[1], server_hostname="localhost",
        limit=4096)
    for _ in range(20):
        assert_same(await reader.readexactly(200_000), pattern(200_000))
    assert await reader.read() == b""
    writer.close()
    await writer.wait_closed()
    await until(lambda: served)
    server.close()


async def test_a_paused_transport_delivers_later_and_in_order(loop, contexts):
    data = pattern(3 << 20)
    async with tls_connected(contexts) as (transport, protocol, peer):
        transport.pause_reading()
        assert not transport.is_reading()
        sending = asyncio.ensure_future(in_thread(peer.sendall, data))
        await ticks(50)
        assert protocol.data == b""
        transport.resume_reading()
        assert transport.is_reading()
        assert_same(await protocol.received(len(data)), data)
        await sending


@pytest.mark.parametrize("orderly", [
    True,
    pytest.param(False, marks=pytest.mark.uvloop_differs(
        "drops what it holds at the end of the stream", UVLOOP_SSL))])
async def test_data_and_end_that_arrive_while_paused(loop, contexts, orderly):
    async with tls_connected(contexts) as (transport, protocol, peer):
        transport.pause_reading()
        await in_thread(peer.sendall, b"last")
        if orderly:
            closing = asyncio.ensure_future(in_thread(lambda: peer.unwrap().close()))
        else:
            closing = asyncio.ensure_future(in_thread(plain(peer).close))
            await closing
        await ticks(50)
        assert protocol.calls == ["connection_made"]
        transport.resume_reading()
        assert await protocol.lost() is None
        assert protocol.data == b"last"
        assert protocol.calls == [
            "connection_made", "data_received", "eof_received", "connection_lost"]
        await closing


# What is known about a connection


async def test_both_ends_tell_about_the_connection(loop, contexts):
    protocols = []

    def factory():
        protocols.append(Recorder())
        return protocols[-1]

    async with serving(factory, ssl=contexts[0]) as (_, address):
        async with tls_client(address, contexts) as (client, _):
            await until(lambda: protocols and protocols[0].transport)
            server = protocols[0].transport
            for transport, context in ((server, contexts[0]), (client, contexts[1])):
                assert transport.get_extra_info("sslcontext") is context
                assert transport.get_extra_info("ssl_object").version().startswith("TLS")
                name, version, bits = transport.get_extra_info("cipher")
                assert isinstance(name, str) and version.startswith("TLS") and bits >= 128
                assert transport.get_extra_info("compression") is None
                assert transport.get_extra_info("socket").family == socket.AF_INET
                assert transport.get_extra_info("nothing", "default") == "default"
            certificate = client.get_extra_info("peercert")
            assert ("DNS", "localhost") in certificate["subjectAltName"]
            assert server.get_extra_info("peercert") is None
            assert client.get_extra_info("peername") == address
            assert server.get_extra_info("peername") == client.get_extra_info("sockname")
        assert client.get_extra_info("cipher")[0] == name
        assert client.get_extra_info("ssl_object") is not None
        await protocols[0].lost()


async def test_a_client_certificate_is_known_to_the_server(loop, contexts, certificate):
    contexts[0].verify_mode = ssl.CERT_REQUIRED
    contexts[0].load_verify_locations(certificate[0])
    contexts[1].load_cert_chain(*certificate)
    async with tls_connected(contexts, server_side=True) as (transport, _, _):
        assert transport.get_extra_info("peercert")["subject"]


# Handshakes that fail


async def failing_client(loop, contexts, act, **options):
    """create_connection() to a peer that does `act(socket)` in a thread; the error."""
    with socket_pair() as (ours, peer):
        acting = asyncio.ensure_future(in_thread(act, peer))
        with pytest.raises(OSError) as caught:
            await loop.create_connection(
                Recorder, sock=ours, ssl=contexts[1], server_hostname="localhost", **options)
        await acting
    return caught.value


async def test_the_end_of_the_stream_in_the_handshake(loop, contexts):
    def act(peer):
        peer.recv(4)
        read_hello(peer)
        peer.close()

    assert isinstance(await failing_client(loop, contexts, act), ConnectionResetError)


def read_hello(peer):
    """Reads what has come, so that closing sends a FIN and not a RST."""
    peer.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        peer.recv(65536)


async def test_a_reset_in_the_handshake(loop, contexts):
    def act(peer):
        peer.recv(4)
        reset(peer)

    assert isinstance(await failing_client(loop, contexts, act), ConnectionResetError)


async def test_nonsense_in_the_handshake(loop, contexts):
    def act(peer):
        peer.recv(65536)
        peer.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\n" * 20)
        with contextlib.suppress(ConnectionError):
            read_to_end(peer)

    assert isinstance(await failing_client(loop, contexts, act), ssl.SSLError)


async def test_a_peer_that_never_answers(loop, contexts):
    error = await failing_client(loop, contexts, read_to_end, ssl_handshake_timeout=0.05)
    assert isinstance(error, ConnectionAbortedError)
    assert "SSL handshake is taking longer than 0.05 seconds" in str(error)


@pytest.mark.parametrize("name, context", [("wrong.example", 1), ("localhost", None)])
async def test_a_certificate_that_does_not_fit_is_refused(loop, contexts, name, context):
    context = contexts[1] if context else ssl.create_default_context()
    made, before = [], None
    loop.set_debug(False)       # it reports failed handshakes of servers

    def factory():
        made.append(Recorder())
        return made[-1]

    async with serving(Recorder, ssl=contexts[0]) as (_, address):
        for _ in range(10):
            with pytest.raises(ssl.SSLCertVerificationError):
                await loop.create_connection(
                    factory, *address, ssl=context, server_hostname=name)
            await ticks(20)
            before = before or open_fds()
        assert all(protocol.calls == [] for protocol in made)
        await until(lambda: len(open_fds()) <= len(before))


async def test_a_server_survives_bad_clients(loop, contexts):
    made = []
    loop.set_debug(False)       # it reports failed handshakes of servers

    class Good(Echo):
        def connection_made(self, transport):
            super().connection_made(transport)
            made.append(self)

    async with serving(Good, ssl=contexts[0], ssl_handshake_timeout=0.1) as (_, address):
        for bad in (b"", b"\x16\x03\x01", b"GET / HTTP/1.0\r\n\r\n", pattern(5000)):
            with socket.create_connection(address) as client:
                client.sendall(bad)
        client = socket.create_connection(address)
        reset(client)
        silent = socket.create_connection(address)
        silent.settimeout(LIMIT)
        async with tls_client(address, contexts) as (transport, protocol):
            transport.write(b"x")
            assert await protocol.received(1) == b"x"
        await in_thread(read_to_end, silent)    # the handshake timeout closed it
        silent.close()
        assert len(made) == 1
        await made[0].lost()


async def test_a_cancelled_handshake_leaves_nothing(loop, contexts):
    with socket_pair() as (ours, peer):
        connecting = asyncio.ensure_future(loop.create_connection(
            Recorder, sock=ours, ssl=contexts[1], server_hostname="localhost"))
        await in_thread(peer.recv, 10)
        connecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await connecting
        await in_thread(read_to_end, peer)
        assert ours.fileno() == -1


def test_a_loop_closed_in_the_handshake_leaves_nothing(loop, contexts, errors):
    with socket_pair() as (ours, peer):
        connecting = loop.create_task(loop.create_connection(
            Recorder, sock=ours, ssl=contexts[1], server_hostname="localhost"))
        loop.run_until_complete(in_thread(peer.recv, 10))
        connecting.cancel()
        loop.run_until_complete(asyncio.wait([connecting]))
        loop.close()


BAD_TIMEOUTS = [("ssl_handshake_timeout", 0), ("ssl_handshake_timeout", -1),
                ("ssl_shutdown_timeout", 0), ("ssl_shutdown_timeout", -0.1)]


@pytest.mark.parametrize("name, value", BAD_TIMEOUTS)
async def test_timeouts_must_be_positive(loop, contexts, name, value):
    with socket_pair() as (ours, peer):
        with pytest.raises(ValueError, match=f"{name} should be a positive number"):
            await loop.create_connection(
                Recorder, sock=ours, ssl=contexts[1], server_hostname="localhost",
                **{name: value})
    async with connected() as (transport, protocol, peer):
        with pytest.raises(ValueError, match=f"{name} should be a positive number"):
            await loop.start_tls(transport, protocol, contexts[1], **{name: value})
        peer.sendall(b"still plain")
        assert await protocol.received(11) == b"still plain"
        assert transport.get_protocol() is protocol


@pytest.mark.parametrize("name", ["ssl_handshake_timeout", "ssl_shutdown_timeout"])
async def test_timeouts_without_ssl_are_a_value_error(loop, name):
    with pytest.raises(ValueError, match=f"{name} is only meaningful with ssl"):
        await loop.create_connection(Recorder, "127.0.0.1", 1, **{name: 1})
    with pytest.raises(ValueError, match=f"{name} is only meaningful with ssl"):
        await loop.create_server(Recorder, "127.0.0.1", 0, **{name: 1})


async def test_server_hostname_and_ssl_belong_together(loop, contexts):
    with socket_pair() as (ours, _):
        with pytest.raises(ValueError, match="server_hostname"):
            await loop.create_connection(Recorder, sock=ours, ssl=contexts[1])
        with pytest.raises(ValueError, match="server_hostname"):
            await loop.create_connection(Recorder, sock=ours, server_hostname="localhost")


# The end of a connection


ORDERLY = ["connection_made", "data_received", "eof_received", "connection_lost"]


@pytest.mark.parametrize("server_side", [False, True])
async def test_a_close_notify_is_answered(loop, contexts, server_side):
    async with tls_connected(contexts, server_side=server_side) as (_, protocol, peer):
        await in_thread(peer.sendall, b"last")
        (await in_thread(peer.unwrap)).close()
        assert await protocol.lost() is None
        assert (protocol.calls, protocol.data) == (ORDERLY, b"last")


@pytest.mark.uvloop_differs("does not call eof_received()", UVLOOP_SSL)
async def test_a_stream_that_ends_without_close_notify(loop, contexts):
    async with tls_connected(contexts) as (_, protocol, peer):
        await in_thread(peer.sendall, b"last")
        plain(peer).close()
        assert await protocol.lost() is None
        assert (protocol.calls, protocol.data) == (ORDERLY, b"last")


async def test_a_reset_is_a_connection_reset_error(loop, contexts):
    async with tls_connected(contexts) as (_, protocol, peer):
        reset(plain(peer))
        assert isinstance(await protocol.lost(), ConnectionResetError)
        assert protocol.calls == ["connection_made", "connection_lost"]


async def test_nonsense_instead_of_a_record_is_an_ssl_error(loop, contexts):
    async with tls_connected(contexts) as (_, protocol, peer):
        with plain(peer) as sock:
            sock.sendall(b"nonsense" * 10)
            assert isinstance(await protocol.lost(), ssl.SSLError)


@pytest.mark.parametrize("server_side", [False, True])
async def test_close_says_so_and_waits_for_the_answer(loop, contexts, server_side):
    async with tls_connected(contexts, server_side=server_side) as (transport, protocol, peer):
        transport.write(b"last")
        transport.close()
        assert transport.is_closing()
        assert await in_thread(read_to_end, peer) == b"last"
        assert protocol.lost_with == []
        (await in_thread(peer.unwrap)).close()
        assert await protocol.lost() is None
        transport.close()
        transport.close()


async def test_close_without_an_answer_times_out(loop, contexts):
    async with tls_connected(contexts, ssl_shutdown_timeout=0.05) as (transport, protocol, _):
        transport.close()
        error = await protocol.lost()
        assert isinstance(error, TimeoutError) and "SSL shutdown timed out" in str(error)


async def test_close_while_flooded_times_out_when_nobody_reads(loop, contexts):
    async with tls_connected(contexts, ssl_shutdown_timeout=0.05) as (transport, protocol, _):
        transport.write(pattern(FLOOD))
        transport.close()
        assert isinstance(await protocol.lost(), TimeoutError)


async def test_abort_while_flooded_drops_what_is_not_sent(loop, contexts):
    async with tls_connected(contexts) as (transport, protocol, peer):
        transport.write(pattern(FLOOD))
        transport.abort()
        assert transport.is_closing()
        assert await protocol.lost() is None
        with pytest.raises((ssl.SSLEOFError, ConnectionResetError)):
            await in_thread(read_to_end, peer)
        transport.abort()


async def test_the_connection_breaks_while_flooded(loop, contexts):
    async with tls_connected(contexts) as (transport, protocol, peer):
        transport.write(pattern(FLOOD))
        await ticks()
        reset(plain(peer))
        assert isinstance(await protocol.lost(), ConnectionError)
        assert transport.is_closing()


async def test_an_exception_out_of_data_received_ends_the_connection(loop, contexts, errors):
    class Broken(Recorder):
        def data_received(self, data):
            raise ZeroDivisionError("data_received")

    async with tls_connected(contexts, Broken) as (_, protocol, peer):
        await in_thread(peer.sendall, b"x")
        assert isinstance(await protocol.lost(), ZeroDivisionError)
        assert [(context["message"], str(context["exception"])) for context in errors] == [
            ("Fatal error on SSL protocol", "data_received")]


# start_tls


def wrapped(context, sock, **options):
    return context.wrap_socket(sock, suppress_ragged_eofs=False, **options)


@pytest.mark.parametrize("same", [True, False])
async def test_start_tls_of_a_client(loop, contexts, same):
    async with connected() as (transport, protocol, peer):
        transport.write(b"STARTTLS\n")
        assert await in_thread(read_exactly, peer, 9) == b"STARTTLS\n"
        wrapping = asyncio.ensure_future(in_thread(
            lambda: wrapped(contexts[0], peer, server_side=True)))
        secret = protocol if same else Recorder()
        secret.calls.append("start_tls")
        tls = await loop.start_tls(transport, secret, contexts[1], server_hostname="localhost")
        with await wrapping as tls_peer:
            assert tls is not transport and tls.get_protocol() is secret
            assert tls.get_extra_info("sslcontext") is contexts[1]
            tls.write(b"secret")
            assert await in_thread(read_exactly, tls_peer, 6) == b"secret"
            await in_thread(tls_peer.sendall, pattern(100_000))
            assert_same(await secret.received(100_000), pattern(100_000))
            assert secret.calls[-1] == "data_received"
            assert secret.calls.count("connection_made") == same
            tls.close()
            assert await in_thread(read_to_end, tls_peer) == b""
            await in_thread(tls_peer.close)
            assert await secret.lost() is None


async def test_start_tls_of_a_server(loop, contexts):
    async with connected() as (transport, protocol, peer):
        wrapping = asyncio.ensure_future(in_thread(
            lambda: wrapped(contexts[1], peer, server_hostname="localhost")))
        transport.pause_reading()       # as start_tls() finds it; it reads on afterwards
        tls = await loop.start_tls(transport, protocol, contexts[0], server_side=True)
        with await wrapping as tls_peer:
            await in_thread(tls_peer.sendall, b"secret")
            assert await protocol.received(6) == b"secret"
            tls.write(b"answer")
            assert await in_thread(read_exactly, tls_peer, 6) == b"answer"
            tls.abort()
            await protocol.lost()


async def start_tls_with_a_full_reader(loop, contexts, header, upgrade):
    """A client sends a header and its ClientHello at once; `upgrade(reader, writer)` serves."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = contexts[1].wrap_bio(incoming, outgoing, server_hostname="localhost")
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    hello = outgoing.read()
    done = loop.create_future()

    async def serve(reader, writer):
        try:
            assert await reader.readexactly(len(header)) == header
            await until(lambda: len(reader._buffer) == len(hello))
            await upgrade(reader, writer)
            writer.write(b"secret")
            await writer.drain()
            assert await reader.readexactly(6) == b"answer"
            writer.close()
        finally:
            done.set_result(None)

    def talk(address):
        with socket.create_connection(address, LIMIT) as sock:
            sock.sendall(header + hello)
            handshake(client, incoming, outgoing, sock)
            client.write(b"answer")
            sock.sendall(outgoing.read())
            while True:
                try:
                    return client.read(100)
                except ssl.SSLWantReadError:
                    incoming.write(sock.recv(65536))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    assert await in_thread(talk, server.sockets[0].getsockname()) == b"secret"
    await done
    server.close()
    await ticks(20)


@pytest.mark.asyncio_differs("leaves the bytes in the reader", BUFFERED_START_TLS, run=False)
@pytest.mark.uvloop_differs(
    "leaves the bytes in the reader", "https://github.com/MagicStack/uvloop/issues/707", run=False)
@pytest.mark.parametrize("paused", [False, True])
async def test_a_handshake_that_is_in_the_reader_already(loop, contexts, paused):
    async def upgrade(reader, writer):
        if paused:      # as the reader does when it holds too much
            reader._paused = True
            writer.transport.pause_reading()
        await writer.start_tls(contexts[0])
        assert not reader._paused

    header = b"PROXY TCP4 127.0.0.1 127.0.0.1 1 2\r\n"
    await start_tls_with_a_full_reader(loop, contexts, header, upgrade)


async def test_plain_bytes_in_a_clients_reader_stay_there(loop, contexts):
    async def serve(reader, writer):
        assert await reader.readline() == b"STARTTLS\n"
        writer.write(b"GO\nplain\n")
        await writer.start_tls(contexts[0])
        writer.write(b"secret\n")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    writer.write(b"STARTTLS\n")
    assert await reader.readline() == b"GO\n"
    await writer.start_tls(contexts[1], server_hostname="localhost")
    assert await reader.readline() == b"plain\n"
    assert await reader.readline() == b"secret\n"
    assert await reader.read() == b""
    writer.close()
    await writer.wait_closed()
    server.close()


@pytest.mark.asyncio_differs("an assertion fails", ASSERTION, run=False)
@pytest.mark.uvloop_differs("an assertion fails", ASSERTION, run=False)
@pytest.mark.parametrize("same", [True, False])
async def test_start_tls_while_writing_is_paused(loop, contexts, same):
    data = pattern(FLOOD)
    async with connected(small=True) as (transport, protocol, peer):
        transport.write(data)
        assert protocol.calls == ["connection_made", "pause_writing"]
        secret = protocol if same else Recorder()
        upgrading = asyncio.ensure_future(
            loop.start_tls(transport, secret, contexts[1], server_hostname="localhost"))
        await ticks()
        assert_same(await in_thread(read_exactly, peer, FLOOD), data)
        wrapping = asyncio.ensure_future(in_thread(
            lambda: wrapped(contexts[0], peer, server_side=True)))
        tls = await upgrading
        with await wrapping as tls_peer:
            await until(lambda: not same or "resume_writing" in protocol.calls)
            assert secret.calls.count("resume_writing") == same
            while "pause_writing" not in secret.calls[2 * same:]:
                tls.write(data)
            transport_limit = tls.get_write_buffer_limits()[0]
            reading = asyncio.ensure_future(in_thread(read_to_end, tls_peer))
            await until(lambda: secret.calls[-1] == "resume_writing")
            assert tls.get_write_buffer_size() <= transport_limit
            tls.close()
            await reading
            await in_thread(tls_peer.close)
            assert await secret.lost() is None


async def test_start_tls_checks_what_it_is_given(loop, contexts):
    async with connected() as (transport, protocol, peer):
        for wrong in (None, True, "context"):
            with pytest.raises(TypeError, match="SSLContext"):
                await loop.start_tls(transport, protocol, wrong)
        peer.sendall(b"still plain")
        assert await protocol.received(11) == b"still plain"
    read_end, write_end = os.pipe()
    transport, _ = await loop.connect_write_pipe(
        asyncio.BaseProtocol, os.fdopen(write_end, "wb", 0))
    with pytest.raises(TypeError, match="not supported by start_tls"):
        await loop.start_tls(transport, Recorder(), contexts[1])
    transport.close()
    os.close(read_end)
    await ticks()


async def test_start_tls_with_the_wrong_name_closes_the_connection(loop, contexts):
    async with connected() as (transport, protocol, peer):
        def wrap():
            with pytest.raises(ssl.SSLError):
                wrapped(contexts[0], peer, server_side=True)

        wrapping = asyncio.ensure_future(in_thread(wrap))
        with pytest.raises(ssl.SSLCertVerificationError):
            await loop.start_tls(
                transport, protocol, contexts[1], server_hostname="wrong.example")
        await wrapping
        assert transport.is_closing()


async def test_a_cancelled_start_tls_closes_the_connection(loop, contexts):
    async with connected() as (transport, protocol, peer):
        upgrading = asyncio.ensure_future(
            loop.start_tls(transport, protocol, contexts[1], server_hostname="localhost"))
        await in_thread(peer.recv, 10)
        upgrading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await upgrading
        assert transport.is_closing()
        await in_thread(read_to_end, peer)


@pytest.mark.asyncio_differs("waits for ever", RETURNS_NONE, run=False)
@pytest.mark.uvloop_differs("waits for ever", RETURNS_NONE, run=False)
@pytest.mark.parametrize("method", ["close", "abort"])
@pytest.mark.parametrize("lost", [True, False])
async def test_start_tls_after_the_end_returns_none(loop, contexts, method, lost):
    async with connected() as (transport, protocol, _):
        getattr(transport, method)()
        if lost:
            await protocol.lost()
        assert await loop.start_tls(transport, Recorder(), contexts[1]) is None
        await protocol.lost() if lost else await ticks()


@pytest.mark.uvloop_differs("returns a closed transport", UVLOOP_LOOP)
@pytest.mark.parametrize("method", ["close", "abort"])
async def test_start_tls_ended_by_the_application_returns_none(loop, contexts, method):
    async with connected() as (transport, _, peer):
        upgrading = asyncio.ensure_future(loop.start_tls(
            transport, Recorder(), contexts[1], server_hostname="localhost"))
        await in_thread(peer.recv, 10)
        getattr(transport, method)()
        assert await upgrading is None


@pytest.mark.uvloop_differs("has no TLS in TLS", UVLOOP_LOOP, run=False)
async def test_tls_in_tls(loop, contexts):
    data = pattern(300_000)

    async def serve(reader, writer):
        await writer.start_tls(contexts[0])
        writer.write(await reader.readexactly(len(data)))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=contexts[0])
    reader, writer = await asyncio.open_connection(
        *server.sockets[0].getsockname(), ssl=contexts[1], server_hostname="localhost")
    await writer.start_tls(contexts[1], server_hostname="localhost")
    writer.write(data)
    assert_same(await reader.readexactly(len(data)), data)
    assert await reader.read() == b""
    writer.close()
    server.close()
    await ticks(50)


# Many connections, several loops


def living():
    """The number of objects that TLS connections are made of."""
    gc.collect()
    names = ("SSLProtocol", "_SSLProtocolTransport", "StreamTransport", "SSLObject",
             "_SelectorSocketTransport", "TCPTransport", "Recorder", "Echo")
    return sum(type(thing).__name__ in names for thing in gc.get_objects())


async def test_300_connections_leave_neither_objects_nor_descriptors(loop, contexts):
    async def churn(address, count):
        for number in range(count):
            transport, protocol = await loop.create_connection(
                Recorder, *address, ssl=contexts[1], server_hostname="localhost")
            transport.write(b"x")
            await protocol.received(1)
            if number % 3:
                transport.close()
            else:
                transport.abort()
            await protocol.lost()

    async with serving(Echo, ssl=contexts[0]) as (_, address):
        await churn(address, 5)
        objects = living()
        before = open_fds()
        for _ in range(3):
            await churn(address, 100)
        await until(lambda: living() <= objects and len(open_fds()) <= len(before))


async def test_many_connections_at_once(loop, contexts):
    async def talk(address, number):
        async with tls_client(address, contexts) as (transport, protocol):
            transport.write(pattern(50_000, number))
            assert_same(await protocol.received(50_000), pattern(50_000, number))

    async with serving(Echo, ssl=contexts[0], backlog=100) as (_, address):
        await asyncio.gather(*(talk(address, number) for number in range(50)))


def test_loops_in_two_threads_talk_to_each_other(loop, new_loop, contexts):
    other, ready, addresses = new_loop(), threading.Event(), []

    async def serve():
        stop = asyncio.Event()
        async with serving(Echo, ssl=contexts[0]) as (_, address):
            addresses.extend((address, stop))
            ready.set()
            await stop.wait()
            await ticks(20)

    async def talk():
        for number in range(20):
            async with tls_client(addresses[0], contexts) as (transport, protocol):
                transport.write(pattern(100_000, number))
                assert_same(await protocol.received(100_000), pattern(100_000, number))

    thread = threading.Thread(target=other.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(LIMIT)
    loop.run_until_complete(talk())
    other.call_soon_threadsafe(addresses[1].set)
    thread.join(LIMIT)
    assert not thread.is_alive()
