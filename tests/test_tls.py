"""TLS: handshakes, data, the end of connections; start_tls() on connections in use."""

import array
import asyncio
import gc
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
    in_thread,
    open_fds,
    pattern,
    read_exactly,
    read_to_end,
    serving,
    socket_pair,
    ticks,
    tls_connected,
    until,
)
from tls_parts import SIZES, handshake, plain, tls_client

UVLOOP_SSL = "https://github.com/MagicStack/uvloop/blob/v0.21.0/uvloop/sslproto.pyx"
BYTEARRAY = "https://github.com/python/cpython/issues/156275"


# Data


async def test_the_class_of_the_transport_says_what_it_is(loop, contexts):
    async with tls_connected(contexts) as (transport, *_):
        assert "ssl" in transport.__class__.__name__.lower()


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


# Many connections, several loops


def living():
    """The number of objects that TLS connections are made of."""
    gc.collect()
    names = ("SSLProtocol", "_SSLProtocolTransport", "TlsProtocol", "TlsTransport",
             "StreamTransport", "SSLObject", "_SelectorSocketTransport", "TCPTransport",
             "Recorder", "Echo")
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
