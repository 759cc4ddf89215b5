"""A small closed-loop HTTP client: `python -m benchmarks.http_client PORT N WARMUP SECONDS PID`.

Used for the window under strace, where connections have to outlive the window, and for the load
when wrk isn't installed. It speaks like load.c: N connections with one request in flight each,
phases that end when the last reply is in, a result as one line of JSON; `--hold` as the last word
makes it print "ready" after the warm-up and wait for a line. PID is the server's, for its CPU time.
"""

import json
import re
import select
import socket
import sys
import time

from benchmarks.cpu_clock import process_cpu_seconds

REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_STALL_SECONDS = 5.0


class Connection:
    """One connection and its request in flight."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._received = b""

    def ask(self) -> None:
        """Send the request; it is small enough that a blocking socket takes it whole."""
        self.started = time.perf_counter()
        self.socket.sendall(REQUEST)

    def take(self) -> int | None:
        """Receive what came; the status of the reply when it is complete, None before that."""
        data = self.socket.recv(65536)
        if not data:
            sys.exit("http_client: the server closed a connection")
        self._received += data
        head, blank, body = self._received.partition(b"\r\n\r\n")
        if not blank:
            return None
        length = _LENGTH.search(head)
        if length is None:
            sys.exit("http_client: the reply has no Content-Length")
        if len(body) < int(length[1]):
            return None
        if len(body) > int(length[1]):
            sys.exit("http_client: the server sent more than one reply")
        self._received = b""
        return int(head.split(b" ", 2)[1])


class Client:
    """All connections, and the phases run over them."""

    def __init__(self, port: int, count: int) -> None:
        self._poll = select.epoll()
        self._connections = {}
        for _ in range(count):
            connection = Connection(port)
            self._connections[connection.socket.fileno()] = connection
            self._poll.register(connection.socket, select.EPOLLIN)

    def run_phase(self, seconds: float) -> tuple[list[float], int]:
        """Request for `seconds`, then drain: the latencies in seconds, and the errors."""
        latencies, errors, active = [], 0, len(self._connections)
        deadline = time.perf_counter() + seconds
        for connection in self._connections.values():
            connection.ask()
        while active:
            events = self._poll.poll(_STALL_SECONDS)
            if not events:
                sys.exit(f"http_client: no reply within {_STALL_SECONDS:.0f} s")
            for descriptor, _ in events:
                connection = self._connections[descriptor]
                status = connection.take()
                if status is None:
                    continue
                now = time.perf_counter()
                latencies.append(now - connection.started)
                errors += not 200 <= status < 300
                if now < deadline:
                    connection.ask()
                else:
                    active -= 1
        return latencies, errors


def measure(client: Client, seconds: float, server_pid: int) -> dict:
    """The measured window, as load_process.LoadResult takes it."""
    server_before, client_before = process_cpu_seconds(server_pid), time.process_time()
    start = time.perf_counter()
    latencies, errors = client.run_phase(seconds)
    elapsed = time.perf_counter() - start
    client_cpu_seconds = time.process_time() - client_before
    server_cpu_seconds = process_cpu_seconds(server_pid) - server_before
    latencies.sort()
    return {
        "messages": len(latencies),
        "seconds": elapsed,
        "p50_us": latencies[len(latencies) // 2] * 1e6,
        "p99_us": latencies[len(latencies) * 99 // 100] * 1e6,
        "client_cpu_seconds": client_cpu_seconds,
        "server_cpu_seconds": server_cpu_seconds,
        "errors": {"non-2xx": errors} if errors else {},
    }


def main(port: str, count: str, warmup: str, seconds: str, pid: str, hold: str = "") -> None:
    """Run the warm-up and the window."""
    client = Client(int(port), int(count))
    client.run_phase(float(warmup))
    if hold:
        print("ready", flush=True)
        sys.stdin.readline()
    print(json.dumps(measure(client, float(seconds), int(pid))), flush=True)
    if hold:
        sys.stdin.read()


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except OSError as error:
        sys.exit(f"http_client: {error}")
