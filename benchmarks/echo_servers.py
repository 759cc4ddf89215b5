"""The echo servers under test, one per mode: the code a user of asyncio would write."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from benchmarks.certificate import server_context

BACKLOG = 1024
"""Length of the accept queue: no connection of a benchmark is turned away."""

MAX_READ_BYTES = 256 * 1024
"""Most bytes taken by one read where the server chooses: what asyncio's own transports use."""


@dataclass(frozen=True)
class EchoConfig:
    """Which server to run: `size` is the message size in bytes, `path` of a Unix socket.

    `certificate` is the file of a server that speaks TLS (certificate.py).
    """

    mode: str
    transport: str
    size: int
    path: str = ""
    certificate: str = ""


class EchoProtocol(asyncio.Protocol):
    """Writes back each chunk it is given."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)


class BufferedEchoProtocol(asyncio.BufferedProtocol):
    """Receives into a buffer of its own and writes that back."""

    def __init__(self) -> None:
        self._view = memoryview(bytearray(64 * 1024))

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._view

    def buffer_updated(self, nbytes: int) -> None:
        # A copy: since Python 3.12 asyncio keeps what it can't send at once by reference, so a
        # view of the buffer would go out with the bytes of the next receive in it.
        self._transport.write(bytes(self._view[:nbytes]))


class DatagramEchoProtocol(asyncio.DatagramProtocol):
    """Sends back each datagram it is given."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, addr: tuple) -> None:
        self._transport.sendto(data, addr)


def stream_handler(size: int) -> Callable[..., Awaitable[None]]:
    """A start_server() callback that echoes messages of `size` bytes."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                writer.write(await reader.readexactly(size))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client is gone: the end of every benchmark
        finally:
            writer.close()

    return handle


async def serve_sockets(loop: asyncio.AbstractEventLoop, listener: socket.socket) -> None:
    """Echo with sock_accept, sock_recv and sock_sendall: no transport at all."""

    async def echo(connection: socket.socket) -> None:
        with connection:
            if connection.family == socket.AF_INET:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                while data := await loop.sock_recv(connection, MAX_READ_BYTES):
                    await loop.sock_sendall(connection, data)
            except ConnectionError:
                pass

    tasks = set()
    while True:
        connection, _ = await loop.sock_accept(listener)
        connection.setblocking(False)
        task = loop.create_task(echo(connection))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


def bound_socket(config: EchoConfig) -> socket.socket:
    """A non-blocking socket, listening if it can; the operating system chooses a port."""
    if config.mode == "udp":
        receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        receiver.bind(("127.0.0.1", 0))
        receiver.setblocking(False)
        return receiver
    if config.transport == "unix":
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(config.path)
    else:
        # With its protocol named, as getaddrinfo(3) does: asyncio sets TCP_NODELAY on no other.
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.bind(("127.0.0.1", 0))
    listener.listen(BACKLOG)
    listener.setblocking(False)
    return listener


async def start_echo(config: EchoConfig) -> tuple[object, object]:
    """Start the server; returns (address, what has to be kept alive).

    The address is [host, port] for TCP and UDP and the path for Unix.
    """
    loop = asyncio.get_running_loop()
    server: object
    listener = bound_socket(config)
    address = listener.getsockname()  # now: a loop may take the descriptor over
    if config.mode == "udp":
        server = await loop.create_datagram_endpoint(DatagramEchoProtocol, sock=listener)
    elif config.mode == "sock":
        server = loop.create_task(serve_sockets(loop, listener))
    elif config.mode in ("streams", "churn-streams"):
        start = asyncio.start_unix_server if config.transport == "unix" else asyncio.start_server
        server = await start(stream_handler(config.size), sock=listener, backlog=BACKLOG)
    else:
        create = loop.create_unix_server if config.transport == "unix" else loop.create_server
        protocol = BufferedEchoProtocol if config.mode == "buffered" else EchoProtocol
        tls = server_context(config.certificate) if config.mode == "tls" else None
        server = await create(protocol, sock=listener, backlog=BACKLOG, ssl=tls)
    return address, (server, listener)


MODES = ("protocol", "buffered", "streams", "sock", "tls", "udp", "churn", "churn-streams")
TRANSPORTS = ("tcp", "unix")
