"""A closed-loop echo client over TLS: `python -m benchmarks.tls_client CONFIG`, CONFIG being JSON.

Python's own ssl over non-blocking sockets and one epoll, no event loop: load.c would need the
headers of OpenSSL. Such a client can be slower than the server it loads; what it measures then is
the server's CPU time per message, not how many the server could serve.

The keys of CONFIG: address (as of serve.py), certificate (a file to trust), connections, size,
warmup, seconds, server_pid and hold.
"""

import json
import select
import socket
import ssl
import sys

from benchmarks.closed_loop import ClosedLoop, run

_RECEIVE_BYTES = 256 * 1024


class Connection:
    """One connection and its message in flight."""

    def __init__(self, tls: ssl.SSLSocket, message: bytes) -> None:
        self.verify = False
        self.errors: dict[str, int] = {}
        self._tls = tls
        self._message = memoryview(message)
        self._buffer = memoryview(bytearray(_RECEIVE_BYTES))
        self._sent = self._received = 0

    def fileno(self) -> int:
        """The descriptor of the connection."""
        return self._tls.fileno()

    def start(self) -> int:
        """Send a message, or its beginning."""
        self._sent = self._received = 0
        return self._send()

    def proceed(self) -> int:
        """Send what is left and receive what came; 0 when the echo is complete."""
        wanted = self._send() if self._sent < len(self._message) else select.EPOLLIN
        # To the end: what the ssl object has decrypted already, epoll doesn't tell of.
        while self._received < len(self._message):
            try:
                count = self._tls.recv_into(self._buffer)
            except ssl.SSLWantReadError:
                return wanted
            if not count:
                sys.exit("tls_client: the server closed a connection")
            if self._received + count > self._sent:
                sys.exit("tls_client: the server sent more bytes than it was sent")
            if self.verify:
                self._compare(count)
            self._received += count
        return 0

    def _send(self) -> int:
        try:
            while self._sent < len(self._message):
                self._sent += self._tls.send(self._message[self._sent :])
        except ssl.SSLWantWriteError:
            return select.EPOLLIN | select.EPOLLOUT
        return select.EPOLLIN

    def _compare(self, count: int) -> None:
        expected = self._message[self._received : self._received + count]
        if bytes(self._buffer[:count]) != bytes(expected):
            sys.exit("tls_client: the server sent other bytes than it was sent")


def connect(config: dict, context: ssl.SSLContext) -> ssl.SSLSocket:
    """A connection after its handshake, non-blocking."""
    if isinstance(config["address"], str):
        raw = socket.socket(socket.AF_UNIX)
        raw.connect(config["address"])
    else:
        raw = socket.create_connection(tuple(config["address"][:2]))
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    tls = context.wrap_socket(raw, server_hostname="localhost")
    tls.setblocking(False)
    return tls


def main(config: dict) -> None:
    """Run the warm-up and the window."""
    context = ssl.create_default_context(cafile=config["certificate"])
    size = config["size"]
    # Bytes that tell their place, so that a misplaced or stale block is noticed.
    message = bytes((i * 31 + (i >> 8) * 7 + (i >> 16)) & 255 for i in range(size))
    connections = [
        Connection(connect(config, context), message) for _ in range(config["connections"])
    ]
    loop = ClosedLoop(connections)
    run(loop, config["warmup"], config["seconds"], config["server_pid"], config["hold"])


if __name__ == "__main__":
    try:
        main(json.loads(sys.argv[1]))
    except OSError as error:
        sys.exit(f"tls_client: {error}")
