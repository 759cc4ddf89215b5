"""TLS: handshakes that fail, and the end of connections."""

import asyncio
import contextlib
import os
import socket
import ssl

import pytest
from helpers import (
    LIMIT,
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
    two_transports,
    until,
)
from tls_parts import FLOOD, handshake, plain, tls_client

UVLOOP_SSL = "https://github.com/MagicStack/uvloop/blob/v0.21.0/uvloop/sslproto.pyx"
UVLOOP_LOOP = "https://github.com/MagicStack/uvloop/blob/v0.21.0/uvloop/loop.pyx"
BUFFERED_START_TLS = "https://github.com/python/cpython/issues/142352"
ASSERTION = "https://github.com/python/cpython/issues/109051"
RETURNS_NONE = "https://github.com/python/cpython/issues/105993"


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


UNDER = {
    "close": lambda transport: transport.close(),
    "write_eof": lambda transport: transport.write_eof(),
    "write": lambda transport: transport.write(b"no record"),
    "writelines": lambda transport: transport.writelines([b"no", b"record"]),
}


@pytest.mark.parametrize("what", UNDER)
async def test_what_tls_was_given_comes_before_what_the_transport_below_is_told(
        loop, contexts, what):
    async with connected() as (transport, protocol, peer):
        wrapping = asyncio.ensure_future(in_thread(
            lambda: wrapped(contexts[0], peer, server_side=True)))
        tls = await loop.start_tls(transport, protocol, contexts[1], server_hostname="localhost")
        with await wrapping as tls_peer:
            tls.write(b"the last ")
            tls.write(b"words")
            UNDER[what](transport)
            assert await in_thread(read_exactly, tls_peer, 14) == b"the last words"
            tls.abort()
            await protocol.lost()


async def test_the_same_for_tls_in_tls(loop, contexts):
    async with two_transports() as (left, left_protocol, right, right_protocol):
        async def upgraded(left, right, protocols):
            return await asyncio.gather(
                loop.start_tls(left, protocols[0], contexts[1], server_hostname="localhost"),
                loop.start_tls(right, protocols[1], contexts[0], server_side=True))

        outer = await upgraded(left, right, (Recorder(), Recorder()))
        inner = await upgraded(*outer, (left_protocol, right_protocol))
        inner[0].write(b"the last ")
        inner[0].write(b"words")
        outer[0].close()
        assert await right_protocol.received(14) == b"the last words"
        left.abort()
        right.abort()
        await left_protocol.lost()
        await right_protocol.lost()


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
