"""A small closed-loop HTTP client: `python -m benchmarks.http_client PORT N WARMUP SECONDS PID`.

Used for the window under strace, where connections have to outlive the window, and for the load
when wrk isn't installed. N connections with one request in flight each; `--hold` as the last word
holds it after the warm-up (closed_loop.py). PID is the server's, for its CPU time.
"""

import re
import select
import socket
import sys

from benchmarks.closed_loop import ClosedLoop, run

REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


class Connection:
    """One connection and its request in flight."""

    def __init__(self, port: int) -> None:
        self.verify = False
        self.errors: dict[str, int] = {}
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._received = b""

    def fileno(self) -> int:
        """The descriptor of the connection."""
        return self._socket.fileno()

    def start(self) -> int:
        """Send the request; it is small enough that a blocking socket takes it whole."""
        self._socket.sendall(REQUEST)
        return select.EPOLLIN

    def proceed(self) -> int:
        """Receive what came; 0 when the reply is complete."""
        data = self._socket.recv(65536)
        if not data:
            sys.exit("http_client: the server closed a connection")
        self._received += data
        head, blank, body = self._received.partition(b"\r\n\r\n")
        if not blank:
            return select.EPOLLIN
        length = _LENGTH.search(head)
        if length is None:
            sys.exit("http_client: the reply has no Content-Length")
        if len(body) < int(length[1]):
            return select.EPOLLIN
        if len(body) > int(length[1]):
            sys.exit("http_client: the server sent more than one reply")
        self._received = b""
        if not 200 <= int(head.split(b" ", 2)[1]) < 300:
            self.errors["non-2xx"] = self.errors.get("non-2xx", 0) + 1
        return 0


def main(port: str, count: str, warmup: str, seconds: str, pid: str, hold: str = "") -> None:
    """Run the warm-up and the window."""
    loop = ClosedLoop([Connection(int(port)) for _ in range(int(count))])
    run(loop, float(warmup), float(seconds), int(pid), bool(hold))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except OSError as error:
        sys.exit(f"http_client: {error}")
