"""redis-benchmark, the load generator that comes with Redis: run it and read its report."""

import csv
import shutil
import socket
from dataclasses import dataclass

from benchmarks.generator import run_generator
from benchmarks.load_process import LoadResult
from benchmarks.processes import Placement, ProcessFailed

COMMANDS = {"ping": "ping_mbulk", "set": "set", "get": "get"}
"""What can be measured, by redis-benchmark's own names."""

_KEY, _VALUE = b"key:000000000000", b"VXK"
"""What redis-benchmark gets and sets."""

_TIMEOUT = 10.0


@dataclass(frozen=True)
class RedisLoad:
    """One load: `pipeline` requests are in flight on each connection, `requests` in all."""

    command: str
    pipeline: int
    connections: int
    requests: int

    def __str__(self) -> str:
        return (
            f"redis {self.command.upper()}, {self.connections} connections, "
            f"pipeline of {self.pipeline}, {self.requests:,} requests"
        )


def missing_reason() -> str | None:
    """Why there can be no load; None when redis-benchmark is installed."""
    found = shutil.which("redis-benchmark")
    return None if found else "install redis-benchmark (Debian: redis-tools)"


def check_replies(port: int) -> None:
    """Set what is going to be asked for and compare every byte. Raises ProcessFailed.

    redis-benchmark itself only counts replies.
    """
    length = len(_VALUE)
    requests = b"PING\r\n*3\r\n$3\r\nSET\r\n$16\r\n%b\r\n$%d\r\n%b\r\n" % (_KEY, length, _VALUE)
    requests += b"*2\r\n$3\r\nGET\r\n$16\r\n%b\r\n" % _KEY
    expected = b"+PONG\r\n+OK\r\n$%d\r\n%b\r\n" % (length, _VALUE)
    replies = b""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=_TIMEOUT) as connection:
            # In two pieces that end inside a request.
            connection.sendall(requests[:20])
            connection.sendall(requests[20:])
            while len(replies) < len(expected):
                if not (data := connection.recv(4096)):
                    break
                replies += data
    except OSError as error:
        raise ProcessFailed(f"PING, SET and GET failed: {error}") from error
    if replies != expected:
        raise ProcessFailed(f"PING, SET and GET were answered {replies[:60]!r}")


def run_benchmark(
    port: int, load: RedisLoad, server_pid: int, placement: Placement, timeout: float
) -> LoadResult:
    """Run redis-benchmark once. Raises ProcessFailed.

    The CPU times are those of the whole run, connecting included.
    """
    command = ["redis-benchmark", "-h", "127.0.0.1", "-p", str(port), "--csv"]
    command += ["-t", COMMANDS[load.command], "-P", str(load.pipeline)]
    command += ["-c", str(load.connections), "-n", str(load.requests)]
    report, client_cpu, server_cpu = run_generator(command, placement, server_pid, timeout)
    return parse_report(report, load.requests, client_cpu, server_cpu)


def parse_report(
    text: str, requests: int, client_cpu_seconds: float, server_cpu_seconds: float
) -> LoadResult:
    """The result in redis-benchmark's CSV. Raises ProcessFailed when it isn't one."""
    rows = list(csv.DictReader(line for line in text.splitlines() if line.startswith('"')))
    try:
        (row,) = rows
        rate, p50, p99 = (
            float(row[name]) for name in ("rps", "p50_latency_ms", "p99_latency_ms")
        )
    except (ValueError, KeyError, TypeError):
        raise ProcessFailed(f"redis-benchmark said {text[-200:]!r}") from None
    if rate <= 0:
        raise ProcessFailed("redis-benchmark got no reply")
    return LoadResult(
        messages=requests,
        seconds=requests / rate,
        p50_us=p50 * 1e3,
        p99_us=p99 * 1e3,
        client_cpu_seconds=client_cpu_seconds,
        server_cpu_seconds=server_cpu_seconds,
    )
