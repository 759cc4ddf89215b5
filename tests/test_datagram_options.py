"""Datagram endpoints: addresses, families and options, and what is refused."""

import asyncio
import contextlib
import errno
import os
import pathlib
import socket
import struct

import pytest
from datagrams import (
    ANY_PORT,
    Datagrams,
    endpoint,
    udp_socket,
)
from helpers import LIMIT, PY312, in_thread, until

UVLOOP_UDP = "https://github.com/MagicStack/uvloop/blob/v0.21.0/uvloop/handles/udp.pyx"
UVLOOP_LOOP = "https://github.com/MagicStack/uvloop/blob/v0.21.0/uvloop/loop.pyx"
UVLOOP_UNIX = "https://github.com/MagicStack/uvloop/issues/403"


# Addresses, families and options


async def test_the_extra_info_names_the_socket_and_its_addresses(loop):
    with udp_socket() as peer:
        address = peer.getsockname()
        async with endpoint(loop, remote_addr=address) as (transport, protocol):
            sock = transport.get_extra_info("socket")
            assert sock.type == socket.SOCK_DGRAM
            assert transport.get_extra_info("sockname") == sock.getsockname()
            assert transport.get_extra_info("peername") == address
            assert transport.get_extra_info("nothing") is None
            assert transport.get_extra_info("nothing", 5) == 5
            assert transport.get_protocol() is protocol
    async with endpoint(loop, local_addr=ANY_PORT) as (transport, _):
        assert transport.get_extra_info("peername") is None


@pytest.mark.asyncio_differs(
    "its class inherits DatagramTransport since 3.12",
    "https://docs.python.org/3/library/asyncio-protocol.html#asyncio.DatagramTransport",
    when=not PY312)
@pytest.mark.uvloop_differs("has a class of its own", UVLOOP_UDP)
async def test_the_transport_is_a_datagram_transport(loop):
    async with endpoint(loop, local_addr=ANY_PORT) as (transport, _):
        assert isinstance(transport, asyncio.DatagramTransport)


async def test_a_new_protocol_gets_what_comes_next(loop):
    async with endpoint(loop, local_addr=ANY_PORT) as (transport, protocol):
        second = Datagrams()
        with udp_socket() as peer:
            peer.sendto(b"1", transport.get_extra_info("sockname"))
            await until(lambda: protocol.received)
            transport.set_protocol(second)
            peer.sendto(b"2", transport.get_extra_info("sockname"))
            await until(lambda: second.received)
        transport.set_protocol(protocol)
        assert (protocol.messages(), second.messages()) == ([b"1"], [b"2"])


async def test_a_local_and_a_remote_address_may_be_given_together(loop):
    with udp_socket() as peer:
        options = {"local_addr": ANY_PORT, "remote_addr": peer.getsockname()}
        async with endpoint(loop, **options) as (transport, _):
            transport.sendto(b"x")
            data, source = await in_thread(peer.recvfrom, 100)
            assert (data, source) == (b"x", transport.get_extra_info("sockname"))


async def test_host_names_are_looked_up(loop):
    with udp_socket() as peer:
        options = {"remote_addr": ("localhost", peer.getsockname()[1]),
                   "family": socket.AF_INET}
        async with endpoint(loop, **options) as (transport, _):
            transport.sendto(b"x")
            assert await in_thread(peer.recv, 100) == b"x"


@pytest.mark.parametrize("connected", [True, False], ids=["connected", "unconnected"])
async def test_a_socket_of_the_users_own(loop, connected):
    with udp_socket() as peer:
        ours = udp_socket()
        ours.setblocking(False)
        if connected:
            ours.connect(peer.getsockname())
        async with endpoint(loop, sock=ours) as (transport, protocol):
            transport.sendto(b"x", None if connected else peer.getsockname())
            data, source = await in_thread(peer.recvfrom, 100)
            assert data == b"x"
            peer.sendto(b"y", source)
            await until(lambda: protocol.received)
            assert protocol.received == [(b"y", peer.getsockname())]
        assert ours.fileno() == -1


def ipv6_works():
    try:
        with udp_socket(("::1", 0), socket.AF_INET6):
            return True
    except OSError:
        return False


needs_ipv6 = pytest.mark.skipif(not ipv6_works(), reason="no IPv6 loopback here")


@needs_ipv6
async def test_ipv6_addresses_have_four_parts(loop):
    async with endpoint(loop, local_addr=("::1", 0)) as (transport, protocol):
        address = transport.get_extra_info("sockname")
        assert address[0] == "::1" and address[2:] == (0, 0)
        with udp_socket(("::1", 0), socket.AF_INET6) as peer:
            peer.sendto(b"x", address)
            await until(lambda: protocol.received)
            assert protocol.received == [(b"x", peer.getsockname())]
            for target in (peer.getsockname(), peer.getsockname()[:2],
                           (*peer.getsockname()[:3], socket.if_nametoindex("lo"))):
                transport.sendto(b"y", target)
                assert await in_thread(peer.recv, 100) == b"y"


def link_local():
    """(address, name) of a network interface, or None."""
    try:
        lines = pathlib.Path("/proc/net/if_inet6").read_text().splitlines()
    except FileNotFoundError:
        return None
    for line in lines:
        digits, _, _, scope, _, name = line.split()
        if scope == "20":
            return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)), name
    return None


@pytest.mark.skipif(not link_local(), reason="no interface has a link-local address here")
async def test_a_link_local_address_keeps_its_scope(loop):
    host, name = link_local()
    async with endpoint(loop, local_addr=(f"{host}%{name}", 0)) as (transport, protocol):
        address = transport.get_extra_info("sockname")
        assert (address[0], address[3]) == (host, socket.if_nametoindex(name))
        async with endpoint(loop, remote_addr=(f"{host}%{name}", address[1])) as (other, _):
            assert other.get_extra_info("peername") == address
            other.sendto(b"connected", address)
            other.sendto(b"connected")
        async with endpoint(loop, local_addr=("::", 0)) as (other, _):
            other.sendto(b"unconnected", address)
            await until(lambda: len(protocol.received) == 3)
        assert protocol.messages() == [b"connected", b"connected", b"unconnected"]
        assert {source[3] for _, source in protocol.received} == {address[3]}


def names(tmp_path, abstract):
    """Two names of Unix sockets that nobody else has."""
    stem = f"\0{os.getpid()}-{tmp_path.name}-" if abstract else os.fspath(tmp_path) + "/"
    return stem + "left", stem + "right"


@pytest.mark.uvloop_differs("wants IP addresses", UVLOOP_UNIX)
@pytest.mark.parametrize("abstract", [False, True], ids=["path", "abstract"])
async def test_unix_endpoints_answer_each_other(loop, tmp_path, abstract):
    left_name, right_name = names(tmp_path, abstract)
    options = {"family": socket.AF_UNIX}
    async with (
        endpoint(loop, local_addr=left_name, **options) as (left, left_protocol),
        endpoint(loop, lambda: Datagrams(True), local_addr=right_name, **options),
        endpoint(loop, local_addr=None, remote_addr=right_name, **options) as (anonymous, _),
    ):
        left.sendto(b"question", right_name)
        await until(lambda: left_protocol.received)
        shown = right_name.encode() if abstract else right_name
        assert left_protocol.received == [(b"question", shown)]
        assert anonymous.get_extra_info("peername") == shown


@pytest.mark.uvloop_differs("wants IP addresses", UVLOOP_UNIX)
async def test_a_unix_sender_without_a_name_has_no_address(loop, tmp_path):
    name = os.fspath(tmp_path / "server")
    options = {"local_addr": name, "family": socket.AF_UNIX}
    async with endpoint(loop, **options) as (_, protocol):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as peer:
            peer.sendto(b"x", name)
        await until(lambda: protocol.received)
        assert [(data, bool(address)) for data, address in protocol.received] == [(b"x", False)]


@pytest.mark.uvloop_differs("wants IP addresses", UVLOOP_UNIX)
async def test_a_unix_path_that_exists_but_is_no_socket_is_in_use(loop, tmp_path):
    path = tmp_path / "file"
    path.touch()
    with pytest.raises(OSError) as info:
        await loop.create_datagram_endpoint(
            Datagrams, local_addr=os.fspath(path), family=socket.AF_UNIX)
    assert info.value.errno == errno.EADDRINUSE
    assert path.exists()


async def test_broadcasts_must_be_allowed(loop):
    with udp_socket(("0.0.0.0", 0)) as peer:
        address = ("127.255.255.255", peer.getsockname()[1])
        async with endpoint(loop, local_addr=ANY_PORT) as (transport, protocol):
            transport.sendto(b"x", address)
            await until(lambda: protocol.errors)
            assert isinstance(protocol.errors[0], PermissionError)
        options = {"local_addr": ANY_PORT, "allow_broadcast": True}
        async with endpoint(loop, **options) as (transport, protocol):
            sock = transport.get_extra_info("socket")
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST)
            transport.sendto(b"everybody", address)
            assert await in_thread(peer.recv, 100) == b"everybody"


@pytest.mark.uvloop_differs("its OSError has no errno", UVLOOP_LOOP)
async def test_a_port_is_shared_only_with_reuse_port(loop):
    async with endpoint(loop, local_addr=ANY_PORT, reuse_port=True) as (first, protocol):
        address = first.get_extra_info("sockname")
        with pytest.raises(OSError) as info:
            await loop.create_datagram_endpoint(Datagrams, local_addr=address)
        assert info.value.errno == errno.EADDRINUSE
        async with endpoint(loop, local_addr=address, reuse_port=True) as (_, other):
            # The kernel chooses by the sender's address; many senders reach both.
            peers = [udp_socket() for _ in range(64)]
            for number, peer in enumerate(peers):
                peer.sendto(b"%d" % number, address)
            await until(lambda: len(protocol.received) + len(other.received) == 64)
            for peer in peers:
                peer.close()
            numbers = sorted(map(int, protocol.messages() + other.messages()))
            assert numbers == list(range(64))


async def test_multicast_over_the_loopback_interface(loop):
    group = "239.255.77.1"
    receiver = udp_socket(("0.0.0.0", 0))
    receiver.setblocking(False)
    membership = struct.pack("4s4s", socket.inet_aton(group), socket.inet_aton("127.0.0.1"))
    try:
        receiver.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, membership)
    except OSError as exc:
        receiver.close()
        pytest.skip(f"no multicast on the loopback interface here: {exc}")
    async with endpoint(loop, sock=receiver) as (server, protocol):
        async with endpoint(loop, local_addr=ANY_PORT) as (client, _):
            sock = client.get_extra_info("socket")
            sock.setsockopt(
                socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton("127.0.0.1"))
            client.sendto(b"members", (group, server.get_extra_info("sockname")[1]))
            await until(lambda: protocol.received)
            source = client.get_extra_info("sockname")
            assert protocol.received == [(b"members", source)]


# What is refused


@pytest.mark.uvloop_differs("lets connect(2) find the second family", UVLOOP_LOOP)
@pytest.mark.parametrize("options", [
    {}, {"sock": "stream"}, {"sock": "datagram", "local_addr": ANY_PORT},
    {"sock": "datagram", "family": socket.AF_INET}, {"sock": "datagram", "reuse_port": True},
    {"local_addr": ("127.0.0.1", 0), "remote_addr": ("::1", 9)},
], ids=["nothing", "stream", "sock and address", "sock and family", "sock and option",
        "two families"])
async def test_arguments_that_do_not_fit_are_a_value_error(loop, options):
    with contextlib.ExitStack() as stack:
        if "sock" in options:
            kind = {"stream": socket.SOCK_STREAM, "datagram": socket.SOCK_DGRAM}[options["sock"]]
            sock = stack.enter_context(socket.socket(socket.AF_INET, kind))
            sock.setblocking(False)
            options = {**options, "sock": sock}
        with pytest.raises(ValueError):
            await loop.create_datagram_endpoint(Datagrams, **options)


@pytest.mark.uvloop_differs("takes a tuple for the path", UVLOOP_UNIX)
@pytest.mark.parametrize("options", [
    {"local_addr": "127.0.0.1"}, {"local_addr": ("127.0.0.1",)},
    {"local_addr": ("127.0.0.1", 0, 0)}, {"local_addr": 9},
    {"local_addr": ("a", 1), "family": socket.AF_UNIX},
], ids=["text", "one part", "three parts", "number", "unix"])
async def test_what_is_no_address_is_a_type_error(loop, options):
    with pytest.raises(TypeError):
        await loop.create_datagram_endpoint(Datagrams, **options)


@pytest.mark.uvloop_differs("its OSError has no errno", UVLOOP_LOOP)
async def test_an_address_in_use_is_an_os_error(loop):
    with udp_socket() as other, pytest.raises(OSError) as info:
        await loop.create_datagram_endpoint(Datagrams, local_addr=other.getsockname())
    assert info.value.errno == errno.EADDRINUSE


async def test_the_descriptor_of_an_endpoint_is_refused_to_others(loop):
    async with endpoint(loop, local_addr=ANY_PORT) as (transport, _):
        fd = transport.get_extra_info("socket").fileno()
        for method in (loop.add_reader, loop.add_writer):
            with pytest.raises(RuntimeError, match="is used by transport"):
                method(fd, print)


async def test_an_endpoint_shows_what_it_is(loop):
    async with endpoint(loop, local_addr=ANY_PORT) as (transport, _):
        assert repr(transport).startswith("<")
        fd = transport.get_extra_info("socket").fileno()
        text = repr(transport)
    assert str(fd) in text or "UDP" in text
    assert "clos" in repr(transport)


async def test_a_remote_address_with_broadcast(loop):
    """Such an endpoint is not connected: the address goes with each datagram."""
    with socket.socket(type=socket.SOCK_DGRAM) as peer:
        peer.bind(("127.0.0.1", 0))
        peer.settimeout(LIMIT)
        options = {"remote_addr": peer.getsockname(), "allow_broadcast": True}
        async with endpoint(loop, **options) as (transport, protocol):
            transport.sendto(b"without an address")
            assert await in_thread(peer.recv, 100) == b"without an address"
            transport.sendto(b"with it", peer.getsockname())
            assert await in_thread(peer.recv, 100) == b"with it"
            assert not protocol.errors
