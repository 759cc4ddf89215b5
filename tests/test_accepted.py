"""What a server's connection tells of its socket, which is made when somebody asks for it."""

import asyncio
import os
import socket

import pytest

FAMILIES = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::1"}


class Server(asyncio.Protocol):
    def __init__(self, ended):
        self.ended = ended

    def connection_made(self, transport):
        self.transport = transport

    def connection_lost(self, exc):
        self.ended.set_result(self.transport)


async def accept_one(loop, family):
    """The server, its transport and the connected client's socket."""
    loop.set_debug(False)       # the log of debug mode names the socket object
    protocols = []

    def factory():
        protocols.append(Server(loop.create_future()))
        return protocols[-1]

    server = await loop.create_server(factory, FAMILIES[family], 0, family=family)
    client = socket.socket(family)
    client.setblocking(False)
    await loop.sock_connect(client, server.sockets[0].getsockname()[:2])
    while not protocols or not hasattr(protocols[0], "transport"):
        await asyncio.sleep(0.01)
    return server, protocols[0], client


@pytest.fixture(params=FAMILIES, ids=["IPv4", "IPv6"])
def family(request):
    if request.param == socket.AF_INET6:
        with socket.socket(socket.AF_INET6) as sock:
            try:
                sock.bind(("::1", 0))
            except OSError:
                pytest.skip("no IPv6 here")
    return request.param


def test_addresses_are_those_of_the_socket_while_it_is_open(loop, family):
    async def main():
        server, protocol, client = await accept_one(loop, family)
        with client:
            sock = protocol.transport.get_extra_info("socket")
            assert protocol.transport.get_extra_info("peername") == client.getsockname()
            assert protocol.transport.get_extra_info("peername") == sock.getpeername()
            assert protocol.transport.get_extra_info("sockname") == client.getpeername()
            assert (sock.family, sock.type) == (family, socket.SOCK_STREAM)
            assert protocol.transport.get_extra_info("socket") is sock
            assert protocol.transport.get_extra_info("nothing", 5) == 5
        await protocol.ended
        server.close()

    loop.run_until_complete(main())


def test_addresses_can_be_asked_for_after_the_end(loop, family):
    async def main():
        server, protocol, client = await accept_one(loop, family)
        local, remote = client.getsockname(), client.getpeername()
        client.close()
        transport = await protocol.ended
        await asyncio.sleep(0.01)
        assert transport.get_extra_info("peername") == local
        assert transport.get_extra_info("sockname") == remote
        server.close()

    loop.run_until_complete(main())


def test_the_socket_is_a_closed_one_after_the_end(loop, loop_kind):
    if loop_kind == "uvloop":
        pytest.skip("its socket objects are others")

    async def main():
        server, protocol, client = await accept_one(loop, socket.AF_INET)
        client.close()
        transport = await protocol.ended
        await asyncio.sleep(0.01)
        sock = transport.get_extra_info("socket")
        assert sock.fileno() == -1
        assert sock.family == socket.AF_INET
        server.close()

    loop.run_until_complete(main())


def test_a_number_taken_away_before_anybody_asked_is_not_closed_again(loop, loop_kind):
    if loop_kind in ("asyncio", "uvloop"):
        pytest.skip("these close what has the number then")

    async def main():
        server, protocol, client = await accept_one(loop, socket.AF_INET)
        number = protocol.transport._sock_fd
        os.close(number)
        mine, other = os.pipe()
        if mine != number:
            os.dup2(mine, number)
        with client:
            assert protocol.transport.get_extra_info("socket").fileno() == -1
            protocol.transport.abort()
            await protocol.ended
        await asyncio.sleep(0.01)
        assert os.fstat(number).st_ino == os.fstat(mine).st_ino
        for fd in {mine, other, number}:
            os.close(fd)
        server.close()

    loop.run_until_complete(main())
