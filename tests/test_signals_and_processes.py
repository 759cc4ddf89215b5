"""Executors, names, TLS, files, the sock_ calls."""

import asyncio
import contextlib
import socket
import ssl
import threading

import pytest
from helpers import (
    Echo,
    Recorder,
    assert_same,
    in_thread,
    pattern,
    read_exactly,
    read_to_end,
    socket_pair,
    ticks,
)

UVLOOP_LOOP = "https://github.com/MagicStack/uvloop/blob/v0.21.0/uvloop/loop.pyx"

# Executors and names


async def test_run_in_executor_runs_in_another_thread(loop):
    thread = await loop.run_in_executor(None, threading.get_ident)
    assert thread != threading.get_ident()


async def test_run_in_executor_raises_what_the_function_raised(loop):
    with pytest.raises(ZeroDivisionError):
        await loop.run_in_executor(None, divmod, 1, 0)


async def test_shutdown_default_executor_waits_for_the_threads(loop):
    seen = []
    future = loop.run_in_executor(None, seen.append, "x")
    await loop.shutdown_default_executor()
    assert seen == ["x"]
    await future
    with pytest.raises(RuntimeError):
        loop.run_in_executor(None, print)


async def test_getaddrinfo_and_getnameinfo_look_names_up(loop):
    found = await loop.getaddrinfo("127.0.0.1", 80, type=socket.SOCK_STREAM)
    assert found[0][4] == ("127.0.0.1", 80)
    assert found == socket.getaddrinfo("127.0.0.1", 80, type=socket.SOCK_STREAM)
    host, port = await loop.getnameinfo(
        ("127.0.0.1", 80), socket.NI_NUMERICHOST | socket.NI_NUMERICSERV
    )
    assert (host, port) == ("127.0.0.1", "80")


async def test_connecting_by_host_name_works(loop):
    server = await loop.create_server(Echo, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    transport, protocol = await loop.create_connection(Recorder, "localhost", port)
    transport.write(b"x")
    assert await protocol.received(1) == b"x"
    transport.close()
    await protocol.lost()
    server.close()


# TLS


async def test_tls_echoes_large_data(loop, contexts):
    data = pattern(1 << 20)
    server = await loop.create_server(Echo, "127.0.0.1", 0, ssl=contexts[0])
    address = server.sockets[0].getsockname()
    transport, protocol = await loop.create_connection(
        Recorder, *address, ssl=contexts[1], server_hostname="localhost"
    )
    assert transport.get_extra_info("ssl_object").version().startswith("TLS")
    transport.write(data)
    assert_same(await protocol.received(len(data)), data)
    transport.close()
    await protocol.lost()
    server.close()
    await ticks(20)


async def test_tls_refuses_a_wrong_name(loop, contexts, errors):
    server = await loop.create_server(Echo, "127.0.0.1", 0, ssl=contexts[0])
    address = server.sockets[0].getsockname()
    with pytest.raises(ssl.SSLCertVerificationError):
        await loop.create_connection(
            Recorder, *address, ssl=contexts[1], server_hostname="wrong.example"
        )
    server.close()
    await ticks(20)


async def test_start_tls_upgrades_a_connection_on_both_ends(loop, contexts):
    data = pattern(300_000)
    done = loop.create_future()

    async def serve(reader, writer):
        assert await reader.readline() == b"STARTTLS\n"
        writer.write(b"GO\n")
        await writer.drain()
        await writer.start_tls(contexts[0])
        writer.write(await reader.readexactly(len(data)))
        await writer.drain()
        writer.close()
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            await writer.wait_closed()
        done.set_result(None)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    writer.write(b"STARTTLS\n")
    assert await reader.readline() == b"GO\n"
    await writer.start_tls(contexts[1], server_hostname="localhost")
    writer.write(data)
    assert_same(await reader.readexactly(len(data)), data)
    assert await reader.read() == b""
    writer.close()
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        await writer.wait_closed()
    await done
    server.close()


# Files


@pytest.mark.uvloop_differs("has no sendfile()", UVLOOP_LOOP)
async def test_sendfile_sends_a_part_of_a_file_through_a_transport(loop, tmp_path):
    data = pattern(500_000)
    path = tmp_path / "file"
    path.write_bytes(data)
    with socket_pair(small=True) as (ours, peer):
        transport, protocol = await loop.create_connection(Recorder, sock=ours)
        reading = asyncio.ensure_future(in_thread(read_to_end, peer))
        transport.write(b"head")
        with path.open("rb") as file:
            assert await loop.sendfile(transport, file, 1000, 400_000) == 400_000
        transport.write(b"tail")
        transport.close()
        assert_same(await reading, b"head" + data[1000:401_000] + b"tail")
        await protocol.lost()


@pytest.mark.uvloop_differs("has no sock_sendfile()", UVLOOP_LOOP)
async def test_sock_sendfile_sends_a_whole_file(loop, tmp_path):
    data = pattern(500_000)
    path = tmp_path / "file"
    path.write_bytes(data)
    with socket_pair(small=True) as (ours, peer), path.open("rb") as file:
        reading = asyncio.ensure_future(in_thread(read_exactly, peer, len(data)))
        assert await loop.sock_sendfile(ours, file) == len(data)
        assert_same(await reading, data)


# sock_ calls


async def test_sock_recv_waits_for_data_and_gives_at_most_n_bytes(loop):
    with socket_pair() as (ours, peer):
        receiving = asyncio.ensure_future(loop.sock_recv(ours, 4))
        await ticks()
        assert not receiving.done()
        peer.sendall(b"abcdef")
        assert await receiving == b"abcd"
        assert await loop.sock_recv(ours, 100) == b"ef"
        peer.close()
        assert await loop.sock_recv(ours, 100) == b""


async def test_sock_recv_leaves_the_rest_to_a_plain_recv(loop):
    with socket_pair() as (ours, peer):
        receiving = asyncio.ensure_future(loop.sock_recv(ours, 2))
        await ticks()
        peer.sendall(b"abcd")
        assert await receiving == b"ab"
        assert ours.recv(10) == b"cd"


async def test_sock_recv_into_fills_the_buffer(loop):
    with socket_pair() as (ours, peer):
        buffer = bytearray(10)
        peer.sendall(b"abc")
        assert await loop.sock_recv_into(ours, buffer) == 3
        assert buffer[:3] == b"abc"


async def test_sock_sendall_sends_more_than_the_socket_takes(loop):
    data = pattern(1 << 20)
    with socket_pair(small=True) as (ours, peer):
        reading = asyncio.ensure_future(in_thread(read_exactly, peer, len(data)))
        assert await loop.sock_sendall(ours, data) is None
        assert_same(await reading, data)


async def test_sock_connect_and_sock_accept_meet(loop):
    with socket.socket() as listener, socket.socket() as client:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.setblocking(False)
        client.setblocking(False)
        accepting = asyncio.ensure_future(loop.sock_accept(listener))
        await ticks()
        await loop.sock_connect(client, listener.getsockname())
        accepted, address = await accepting
        with accepted:
            assert address == client.getsockname()
            assert accepted.gettimeout() == 0
            await loop.sock_sendall(client, b"hello")
            assert await loop.sock_recv(accepted, 10) == b"hello"


async def test_sock_connect_to_nobody_is_refused(loop):
    with socket.socket() as placeholder, socket.socket() as client:
        placeholder.bind(("127.0.0.1", 0))
        client.setblocking(False)
        with pytest.raises(ConnectionRefusedError):
            await loop.sock_connect(client, placeholder.getsockname())


async def test_a_cancelled_sock_recv_loses_nothing(loop):
    with socket_pair() as (ours, peer):
        for number in range(20):
            receiving = asyncio.ensure_future(loop.sock_recv(ours, 10))
            await ticks(number % 4)
            receiving.cancel()
            await asyncio.wait([receiving])
            peer.sendall(b"x")
            assert await loop.sock_recv(ours, 10) == b"x"


async def test_a_blocking_socket_is_a_value_error_in_debug_mode(loop):
    loop.set_debug(True)
    with socket_pair() as (_, peer):
        with pytest.raises(ValueError, match="non-blocking"):
            await loop.sock_recv(peer, 10)
    loop.set_debug(False)


async def test_sock_recv_on_the_socket_of_a_transport_is_a_runtime_error(loop):
    with socket_pair() as (ours, _):
        transport, protocol = await loop.create_connection(Recorder, sock=ours)
        with pytest.raises(RuntimeError, match="is used by transport"):
            await loop.sock_recv(ours, 10)
        transport.close()
        await protocol.lost()


async def test_sock_recvfrom_and_sock_sendto_carry_datagrams(loop):
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as left,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as right,
    ):
        for sock in (left, right):
            sock.bind(("127.0.0.1", 0))
            sock.setblocking(False)
        try:
            assert await loop.sock_sendto(left, b"hello", right.getsockname()) == 5
        except NotImplementedError:
            pytest.skip("this loop has no sock_sendto")
        assert await loop.sock_recvfrom(right, 100) == (b"hello", left.getsockname())
