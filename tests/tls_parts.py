"""What the tests of TLS share."""

import asyncio
import contextlib
import socket
import ssl

from helpers import (
    Recorder,
    until,
)

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
