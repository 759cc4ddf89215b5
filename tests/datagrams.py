"""What the tests of datagram endpoints share."""

import asyncio
import contextlib
import socket

from helpers import Calls, until

ANY_PORT = ("127.0.0.1", 0)


class Datagrams(Calls, asyncio.DatagramProtocol):
    def __init__(self, echo=False):
        super().__init__()
        self.echo = echo
        self.received = []
        self.errors = []

    def datagram_received(self, data, address):
        self.received.append((data, address))
        if self.echo:
            self.transport.sendto(data, address)

    def error_received(self, exc):
        self.errors.append(exc)

    def messages(self):
        return [data for data, _ in self.received]


@contextlib.asynccontextmanager
async def endpoint(loop, factory=Datagrams, **options):
    made = await loop.create_datagram_endpoint(factory, **options)
    try:
        yield made
    finally:
        made[0].close()
        await until(lambda: made[1].lost_with)


def udp_socket(address=ANY_PORT, family=socket.AF_INET):
    """A bound blocking socket for the other end."""
    sock = socket.socket(family, socket.SOCK_DGRAM)
    sock.settimeout(20)
    sock.bind(address)
    return sock


def free_address():
    with udp_socket() as placeholder:
        return placeholder.getsockname()


async def fill(transport, size=1000):
    """Sends numbered datagrams until the transport has to keep one back. Returns them."""
    sent = []
    while not transport.get_write_buffer_size():
        sent.append(b"%04d" % len(sent) + bytes(size - 4))
        transport.sendto(sent[-1])
        await asyncio.sleep(0)
        assert len(sent) < 5000
    return sent


def drain(peer, count):
    return [peer.recv(1 << 20) for _ in range(count)]


def drain_to_last(peer):
    received = [peer.recv(1 << 20)]
    while received[-1] != b"last":
        received.append(peer.recv(1 << 20))
    return received
