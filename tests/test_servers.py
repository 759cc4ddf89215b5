"""Servers and connections to them: addresses, options, several addresses, errors, the end."""

import asyncio
import contextlib
import errno
import os
import pathlib
import select
import socket
import struct

import pytest
from helpers import (
    LIMIT,
    PY312,
    PY313,
    Echo,
    Recorder,
    connected,
    in_thread,
    open_fds,
    read_exactly,
    read_to_end,
    serving,
    socket_pair,
    ticks,
    until,
)

UVLOOP_LOOP = "https://github.com/MagicStack/uvloop/blob/v0.21.0/uvloop/loop.pyx"
UVLOOP_SERVER = "https://github.com/MagicStack/uvloop/blob/v0.21.0/uvloop/server.pyx"
SELECTOR = "https://github.com/python/cpython/blob/v3.12.1/Lib/asyncio/selector_events.py#L72"
NOT_OURS = "192.0.2.1"      # TEST-NET-1 of RFC 5737: no machine has it

needs_ipv6 = pytest.mark.skipif(
    not pathlib.Path("/proc/net/if_inet6").exists()
    or "0" * 31 + "1 " not in pathlib.Path("/proc/net/if_inet6").read_text(),
    reason="no IPv6 loopback address")
resolves_itself = pytest.mark.uvloop_differs("resolves names itself", UVLOOP_LOOP, run=False)


async def assert_serves(address, family=socket.AF_INET):
    """A client in a thread gets its byte back from an Echo at the address."""
    def talk():
        with socket.socket(family) as client:
            client.settimeout(LIMIT)
            client.connect(address)
            client.sendall(b"x")
            return read_exactly(client, 1)

    assert await in_thread(talk) == b"x"


@contextlib.contextmanager
def refused_address(host="127.0.0.1"):
    """The address of a port where nobody listens, and that nobody else gets meanwhile."""
    with socket.socket() as sock:
        sock.bind((host, 0))
        yield sock.getsockname()


@contextlib.contextmanager
def reserved_port():
    """A port that a server may take although it is bound, and that nobody else gets."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, True)
        sock.bind(("", 0))
        yield sock.getsockname()[1]


@contextlib.contextmanager
def stuck_address():
    """The address of a listener that accepts nobody: connections to it are never made."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        while True:
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(listener.getsockname())
            if not select.select([], [client], [], 0.1)[1]:
                break
        yield listener.getsockname()


def resolve_to(loop, monkeypatch, *addresses, family=socket.AF_INET):
    """Makes loop.getaddrinfo() answer with these addresses for the host "several"."""
    real = loop.getaddrinfo

    async def getaddrinfo(host, port, **options):
        if host != "several":
            return await real(host, port, **options)
        return [(family, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", address)
                for address in addresses]

    monkeypatch.setattr(loop, "getaddrinfo", getaddrinfo)


# Where a server listens


@pytest.mark.parametrize("host", [None, "", "0.0.0.0"])
async def test_a_server_on_every_address_of_a_family(loop, host):
    server = await loop.create_server(Echo, host, 0, family=socket.AF_INET)
    (sock,) = server.sockets
    assert sock.getsockname()[0] == "0.0.0.0"
    for address in ("127.0.0.1", "127.0.0.2"):
        await assert_serves((address, sock.getsockname()[1]))
    server.close()
    await ticks(20)


@needs_ipv6
async def test_a_server_without_a_host_listens_on_both_families(loop):
    with reserved_port() as port:
        server = await loop.create_server(Echo, None, port)
    families = sorted(sock.family for sock in server.sockets)
    assert families == [socket.AF_INET, socket.AF_INET6]
    for sock in server.sockets:
        if sock.family == socket.AF_INET6:
            assert sock.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY) == 1
    await assert_serves(("127.0.0.1", port))
    await assert_serves(("::1", port), socket.AF_INET6)
    server.close()
    await ticks(20)


@pytest.mark.uvloop_differs("lists a socket that is not there", UVLOOP_SERVER)
async def test_a_host_given_twice_is_one_socket(loop):
    with reserved_port() as port:
        server = await loop.create_server(Echo, ["127.0.0.1", "127.0.0.1"], port)
    assert len(server.sockets) == 1
    server.close()


@resolves_itself
async def test_a_name_with_several_addresses_is_several_sockets(loop, monkeypatch):
    resolve_to(loop, monkeypatch, ("127.0.0.1", 0), ("127.0.0.2", 0), ("127.0.0.3", 0))
    server = await loop.create_server(Echo, "several", 0)
    hosts = [sock.getsockname()[0] for sock in server.sockets]
    assert sorted(hosts) == ["127.0.0.1", "127.0.0.2", "127.0.0.3"]
    for sock in server.sockets:
        await assert_serves(sock.getsockname())
    server.close()
    await ticks(20)


@resolves_itself
async def test_a_name_without_addresses_is_an_os_error(loop, monkeypatch):
    resolve_to(loop, monkeypatch)
    with pytest.raises(OSError, match="returned empty list"):
        await loop.create_server(Echo, "several", 0)
    with pytest.raises(OSError, match="returned empty list"):
        await loop.create_connection(Recorder, "several", 1)


async def test_an_address_of_another_machine_is_an_os_error(loop):
    with pytest.raises(OSError, match="bind on a"):
        await loop.create_server(Echo, NOT_OURS, 0)


@pytest.mark.uvloop_differs("refuses", UVLOOP_LOOP, when=PY313)
async def test_an_address_of_another_machine_among_others(loop):
    if PY313:
        # Such an address counts as one of a family that is not enabled.
        server = await loop.create_server(Echo, ["127.0.0.1", NOT_OURS], 0)
        assert [sock.getsockname()[0] for sock in server.sockets] == ["127.0.0.1"]
        server.close()
    else:
        with pytest.raises(OSError) as caught:
            await loop.create_server(Echo, ["127.0.0.1", NOT_OURS], 0)
        assert caught.value.errno == errno.EADDRNOTAVAIL


@pytest.mark.parametrize("arguments, error", [
    ({}, ValueError),
    ({"host": "127.0.0.1", "port": 0, "sock": True}, ValueError),
    ({"sock": socket.SOCK_DGRAM}, ValueError),
    ({"host": "127.0.0.1", "port": 0, "ssl": True}, TypeError),
])
async def test_create_server_checks_its_arguments(loop, arguments, error):
    with socket.socket(type=arguments.get("sock") or socket.SOCK_STREAM) as sock:
        if "sock" in arguments:
            arguments = {**arguments, "sock": sock}
        with pytest.raises(error):
            await loop.create_server(Echo, **arguments)


# Options of the listening sockets


def option(server, name):
    return server.sockets[0].getsockopt(socket.SOL_SOCKET, name)


@pytest.mark.parametrize("given, expected", [({}, 1), ({"reuse_address": True}, 1),
                                             ({"reuse_address": False}, 0)])
async def test_reuse_address(loop, given, expected):
    async with serving(Echo, **given) as (server, _):
        assert option(server, socket.SO_REUSEADDR) == expected


@pytest.mark.parametrize("given, expected", [({}, 0), ({"reuse_port": True}, 1)])
async def test_reuse_port(loop, given, expected):
    async with serving(Echo, **given) as (server, address):
        assert option(server, socket.SO_REUSEPORT) == expected
        with pytest.raises(OSError) as caught:
            await loop.create_server(Echo, *address)
        assert caught.value.errno == errno.EADDRINUSE
        assert str(address) in str(caught.value)


@pytest.mark.skipif(not PY313, reason="new in 3.13")
@pytest.mark.parametrize("given, expected", [
    ({}, 0),
    pytest.param({"keep_alive": True}, 1, marks=pytest.mark.uvloop_differs(
        "has no keep_alive", UVLOOP_LOOP)),
])
async def test_keep_alive(loop, given, expected):
    async with serving(Recorder, **given) as (server, address):
        assert option(server, socket.SO_KEEPALIVE) == expected


@pytest.mark.parametrize("backlog", [1, 7, 100])
async def test_the_backlog_is_what_was_asked_for(loop, backlog):
    async with serving(Echo, backlog=backlog) as (server, _):
        await ticks()
        info = server.sockets[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
        # tcp_info.tcpi_sacked: of a listening socket, the limit of its queue.
        assert struct.unpack_from("I", info, 28)[0] == backlog


# The server object


async def test_what_a_server_says_from_start_to_end(loop):
    server = await loop.create_server(Echo, "127.0.0.1", 0, start_serving=False)
    assert (server.get_loop(), server.is_serving(), len(server.sockets)) == (loop, False, 1)
    await server.start_serving()
    assert server.is_serving()
    with pytest.raises(AttributeError):
        server.sockets = ()
    server.close()
    assert (server.get_loop(), server.is_serving(), list(server.sockets)) == (loop, False, [])


@pytest.mark.uvloop_differs("goes on", UVLOOP_SERVER, run=False)
async def test_close_ends_serve_forever(loop):
    server = await loop.create_server(Echo, "127.0.0.1", 0, start_serving=False)
    serving_forever = asyncio.ensure_future(server.serve_forever())
    await until(server.is_serving)
    server.close()
    with pytest.raises(asyncio.CancelledError):
        await serving_forever


async def test_serve_forever_takes_connections_until_it_is_cancelled(loop):
    server = await loop.create_server(Echo, "127.0.0.1", 0, start_serving=False)
    address = server.sockets[0].getsockname()
    serving_forever = asyncio.ensure_future(server.serve_forever())
    await until(server.is_serving)
    for _ in range(3):
        await assert_serves(address)
    serving_forever.cancel()
    await asyncio.wait([serving_forever])
    assert serving_forever.cancelled()
    with pytest.raises(ConnectionRefusedError):
        await loop.create_connection(Recorder, *address)
    await ticks(20)


@pytest.mark.skipif(not PY312, reason="older versions return at once: gh-79033")
async def test_wait_closed_waits_for_close_too(loop):
    server = await loop.create_server(Recorder, "127.0.0.1", 0)
    waiting = [asyncio.ensure_future(server.wait_closed()) for _ in range(3)]
    await ticks(20)
    assert not any(task.done() for task in waiting)
    waiting.pop().cancel()
    server.close()
    await asyncio.gather(*waiting)
    await server.wait_closed()


@pytest.mark.skipif(not PY312, reason="older versions do not wait: gh-79033")
@pytest.mark.uvloop_differs("does not wait for them", UVLOOP_SERVER, run=False)
async def test_wait_closed_waits_for_connections_over_tls(loop, contexts):
    async with serving(Echo, ssl=contexts[0]) as (server, address):
        transport, protocol = await loop.create_connection(
            Recorder, *address, ssl=contexts[1], server_hostname="localhost")
        server.close()
        waiting = asyncio.ensure_future(server.wait_closed())
        transport.write(b"x")
        assert await protocol.received(1) == b"x"
        assert not waiting.done()
        transport.close()
        await protocol.lost()
        await waiting


@pytest.mark.skipif(not PY313, reason="new in 3.13")
@pytest.mark.uvloop_differs("does not have it", UVLOOP_SERVER)
@pytest.mark.parametrize("method", ["close_clients", "abort_clients"])
async def test_the_clients_of_a_server_over_tls_are_closed(loop, contexts, method):
    made = []
    async with serving(lambda: made.append(Echo()) or made[-1], ssl=contexts[0]) as (
            server, address):
        transport, protocol = await loop.create_connection(
            Recorder, *address, ssl=contexts[1], server_hostname="localhost")
        transport.write(b"x")
        assert await protocol.received(1) == b"x"
        server.close()
        getattr(server, method)()
        await server.wait_closed()
        await protocol.lost()
        await made[0].lost()


@pytest.mark.skipif(not PY313, reason="new in 3.13")
@pytest.mark.uvloop_differs("does not have it", UVLOOP_SERVER)
async def test_close_clients_flushes_and_abort_clients_does_not(loop):
    class Flood(Recorder):
        def connection_made(self, transport):
            super().connection_made(transport)
            made.append(self)
            transport.write(bytes(16 << 20))

    for method, whole in (("close_clients", True), ("abort_clients", False)):
        made = []
        async with serving(Flood) as (server, address):
            with socket.create_connection(address, LIMIT) as client:
                await until(lambda: made)   # noqa: B023
                server.close()
                getattr(server, method)()
                try:
                    received = len(await in_thread(read_to_end, client))
                except ConnectionResetError:
                    received = -1
                assert (received == 16 << 20) == whole
                await made[0].lost()
                await server.wait_closed()


# Unix servers


async def test_a_unix_server_takes_paths_of_any_kind(loop, tmp_path):
    for number, kind in enumerate((str, os.fsencode, pathlib.Path)):
        path = kind(str(tmp_path / f"socket{number}"))
        server = await loop.create_unix_server(Echo, path)
        await assert_serves(os.fspath(path), socket.AF_UNIX)
        transport, protocol = await loop.create_unix_connection(Recorder, path)
        transport.write(b"y")
        assert await protocol.received(1) == b"y"
        transport.close()
        await protocol.lost()
        server.close()
        await ticks(20)


@pytest.mark.skipif(PY313, reason="newer versions remove the path")
async def test_the_path_of_a_closed_unix_server_stays(loop, tmp_path):
    server = await loop.create_unix_server(Echo, str(tmp_path / "socket"))
    server.close()
    await server.wait_closed()
    await ticks(20)
    assert (tmp_path / "socket").is_socket()


@pytest.mark.skipif(not PY313, reason="new in 3.13")
async def test_cleanup_socket_may_be_switched_off(loop, tmp_path):
    server = await loop.create_unix_server(
        Echo, str(tmp_path / "socket"), cleanup_socket=False)
    server.close()
    await ticks(20)
    assert (tmp_path / "socket").is_socket()


@pytest.mark.skipif(not PY313, reason="new in 3.13")
@pytest.mark.parametrize("how", ["removed", "replaced"])
async def test_a_path_that_is_no_longer_the_servers_is_left_alone(loop, tmp_path, how):
    path = tmp_path / "socket"
    server = await loop.create_unix_server(Echo, str(path))
    path.unlink()
    if how == "replaced":
        path.write_text("another file")
    server.close()
    await ticks(20)
    assert path.exists() == (how == "replaced")


@pytest.mark.parametrize("path, error", [
    ("missing/socket", errno.ENOENT), ("x" * 200, None),
])
async def test_a_path_that_cannot_be_bound_is_an_os_error(loop, tmp_path, path, error):
    before = open_fds()
    with pytest.raises(OSError) as caught:
        await loop.create_unix_server(Echo, str(tmp_path / path))
    assert caught.value.errno == error
    assert open_fds() == before


async def test_create_unix_server_checks_its_arguments(loop, tmp_path, contexts):
    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX) as unix, socket.socket() as tcp:
        for arguments, error in (
                ({}, ValueError), ({"path": path, "sock": unix}, ValueError),
                ({"sock": tcp}, ValueError), ({"path": path, "ssl": True}, TypeError),
                ({"path": path, "ssl_handshake_timeout": 1}, ValueError),
                ({"path": path, "ssl_shutdown_timeout": 1}, ValueError)):
            with pytest.raises(error):
                await loop.create_unix_server(Echo, **arguments)
    assert not os.path.exists(path)


async def test_create_unix_connection_checks_its_arguments(loop, contexts):
    with socket.socket(socket.AF_UNIX) as unix, socket.socket() as tcp:
        for arguments in (
                {}, {"path": "x", "sock": unix}, {"sock": tcp},
                {"path": "x", "server_hostname": "localhost"},
                {"path": "x", "ssl": contexts[1]},
                {"path": "x", "ssl_handshake_timeout": 1},
                {"path": "x", "ssl_shutdown_timeout": 1}):
            with pytest.raises(ValueError):
                await loop.create_unix_connection(Recorder, **arguments)


async def test_unix_paths_where_nobody_listens(loop, tmp_path):
    (tmp_path / "file").touch()
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(tmp_path / "stale"))
    for name, error in (("missing", FileNotFoundError), ("file", ConnectionRefusedError),
                        ("stale", ConnectionRefusedError)):
        with pytest.raises(error):
            await loop.create_unix_connection(Recorder, str(tmp_path / name))


async def test_tls_over_unix_sockets(loop, tmp_path, contexts):
    path = str(tmp_path / "socket")
    server = await loop.create_unix_server(Echo, path, ssl=contexts[0])
    transport, protocol = await loop.create_unix_connection(
        Recorder, path, ssl=contexts[1], server_hostname="localhost")
    transport.write(b"x")
    assert await protocol.received(1) == b"x"
    transport.close()
    await protocol.lost()
    server.close()
    await ticks(20)


# Connecting


@pytest.mark.uvloop_differs("does not name it", UVLOOP_LOOP)
async def test_the_error_of_a_refused_connection_names_the_address(loop):
    with refused_address() as address:
        with pytest.raises(ConnectionRefusedError) as caught:
            await loop.create_connection(Recorder, *address)
    assert caught.value.errno == errno.ECONNREFUSED
    assert str(caught.value) == f"[Errno 111] Connect call failed {address}"


@resolves_itself
@pytest.mark.parametrize("options", [
    {}, {"happy_eyeballs_delay": 0.01}, {"happy_eyeballs_delay": None, "interleave": 1},
    {"happy_eyeballs_delay": 30}])
async def test_the_next_address_is_tried(loop, monkeypatch, options):
    async with serving(Echo) as (_, address):
        with refused_address() as first, refused_address("127.0.0.2") as second:
            resolve_to(loop, monkeypatch, first, second, address)
            transport, protocol = await loop.create_connection(
                Recorder, "several", 1, **options)
        assert transport.get_extra_info("peername") == address
        transport.write(b"x")
        assert await protocol.received(1) == b"x"
        transport.close()
        await protocol.lost()
        await ticks(20)


@resolves_itself
@pytest.mark.parametrize("options", [{}, {"happy_eyeballs_delay": 0.01}])
async def test_when_all_addresses_fail_the_error_tells_all(loop, monkeypatch, options):
    with refused_address() as first, refused_address("127.0.0.2") as second:
        resolve_to(loop, monkeypatch, first, second)
        with pytest.raises(OSError) as caught:
            await loop.create_connection(Recorder, "several", 1, **options)
    parts = [f"[Errno 111] Connect call failed {address}" for address in (first, second)]
    assert str(caught.value) == f"Multiple exceptions: {parts[0]}, {parts[1]}"


@resolves_itself
async def test_equal_errors_are_one(loop, monkeypatch):
    with refused_address() as address:
        resolve_to(loop, monkeypatch, address, address)
        with pytest.raises(ConnectionRefusedError) as caught:
            await loop.create_connection(Recorder, "several", 1)
    assert str(caught.value) == f"[Errno 111] Connect call failed {address}"


@pytest.mark.skipif(not PY312, reason="new in 3.12")
@resolves_itself
@pytest.mark.parametrize("options", [{}, {"happy_eyeballs_delay": 0.01}])
async def test_all_errors_is_a_group(loop, monkeypatch, options):
    with refused_address() as first, refused_address("127.0.0.2") as second:
        resolve_to(loop, monkeypatch, first, second)
        with pytest.raises(ExceptionGroup, match="create_connection failed") as caught:
            await loop.create_connection(Recorder, "several", 1, all_errors=True, **options)
    assert [type(error) for error in caught.value.exceptions] == [ConnectionRefusedError] * 2
    assert [str(first) in str(caught.value.exceptions[0]),
            str(second) in str(caught.value.exceptions[1])] == [True, True]


@resolves_itself
async def test_an_address_that_does_not_answer_is_overtaken(loop, monkeypatch):
    async with serving(Echo) as (_, address):
        before = open_fds()
        with stuck_address() as stuck:
            resolve_to(loop, monkeypatch, stuck, address)
            transport, protocol = await loop.create_connection(
                Recorder, "several", 1, happy_eyeballs_delay=0.02)
            assert transport.get_extra_info("peername") == address
            transport.write(b"x")
            assert await protocol.received(1) == b"x"
            transport.close()
            await protocol.lost()
        await until(lambda: open_fds().keys() <= before.keys())


@pytest.mark.uvloop_differs("goes on connecting", UVLOOP_LOOP, run=False)
async def test_cancelled_while_it_connects_it_leaves_nothing(loop):
    with stuck_address() as stuck:
        before = open_fds()
        connecting = asyncio.ensure_future(loop.create_connection(Recorder, *stuck))
        await ticks(20)
        assert not connecting.done()
        connecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await connecting
        await until(lambda: open_fds().keys() <= before.keys())


async def test_local_addr_is_where_the_connection_comes_from(loop):
    async with serving(Echo) as (_, address):
        transport, protocol = await loop.create_connection(
            Recorder, *address, local_addr=("127.0.0.3", 0))
        assert transport.get_extra_info("sockname")[0] == "127.0.0.3"
        transport.write(b"x")
        assert await protocol.received(1) == b"x"
        transport.close()
        await protocol.lost()


@pytest.mark.uvloop_differs("does not say what failed", UVLOOP_LOOP)
async def test_a_local_addr_of_another_machine_is_an_os_error(loop):
    async with serving(Echo) as (_, address):
        before = open_fds()
        with pytest.raises(OSError, match="while attempting to bind on address") as caught:
            await loop.create_connection(Recorder, *address, local_addr=(NOT_OURS, 0))
        assert caught.value.errno == errno.EADDRNOTAVAIL
        assert "cannot assign requested address" in str(caught.value)
        assert open_fds() == before


async def test_create_connection_checks_its_arguments(loop):
    with socket.socket() as tcp, socket.socket(type=socket.SOCK_DGRAM) as datagrams:
        for arguments in ({}, {"host": "127.0.0.1", "port": 1, "sock": tcp},
                          {"sock": datagrams}):
            with pytest.raises(ValueError):
                await loop.create_connection(Recorder, **arguments)


@pytest.mark.uvloop_differs("takes it", UVLOOP_LOOP)
async def test_a_socket_of_the_ssl_module_is_a_type_error(loop, contexts):
    with socket.socket() as tcp:
        with contextlib.closing(contexts[1].wrap_socket(tcp, server_hostname="localhost")) as tls:
            with pytest.raises(TypeError, match="SSLSocket"):
                await loop.create_connection(Recorder, sock=tls)


# asyncio leaves the socket to the collector, which says so.
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("arguments", [{}, {"ssl": True}])
async def test_an_exception_out_of_the_clients_factory_is_raised(loop, contexts, arguments):
    def factory():
        raise ZeroDivisionError("factory")

    if arguments:
        arguments = {"ssl": contexts[1], "server_hostname": "localhost"}
    async with serving(Recorder) as (_, address):
        with pytest.raises(ZeroDivisionError):
            await loop.create_connection(factory, *address, **arguments)
        await ticks(20)


# Connections that somebody else accepted


async def test_connect_accepted_socket(loop):
    with socket_pair() as (ours, peer):
        ours.setblocking(True)
        transport, protocol = await loop.connect_accepted_socket(Echo, ours)
        assert protocol.calls == ["connection_made"]
        assert transport.get_extra_info("peername") == peer.getsockname()
        peer.sendall(b"x")
        assert await in_thread(read_exactly, peer, 1) == b"x"
        transport.close()
        await protocol.lost()


async def test_connect_accepted_socket_checks_its_arguments(loop):
    with socket.socket(type=socket.SOCK_DGRAM) as datagrams:
        with pytest.raises(ValueError):
            await loop.connect_accepted_socket(Echo, datagrams)
    with socket_pair() as (ours, _):
        for name in ("ssl_handshake_timeout", "ssl_shutdown_timeout"):
            with pytest.raises(ValueError, match=name):
                await loop.connect_accepted_socket(Echo, ours, **{name: 1})


@pytest.mark.asyncio_differs("takes it", SELECTOR, when=not PY312, run=False)
@pytest.mark.uvloop_differs("fails with FileExistsError", UVLOOP_LOOP)
async def test_a_socket_of_a_transport_cannot_be_given_to_another(loop):
    async with connected() as (transport, protocol, peer):
        sock = socket.socket(fileno=transport.get_extra_info("socket").fileno())
        try:
            with pytest.raises(RuntimeError, match="is used by transport"):
                await loop.connect_accepted_socket(Echo, sock)
        finally:
            sock.detach()
        peer.sendall(b"x")
        assert await protocol.received(1) == b"x"
