"""Closed-loop clients in Python: for what load.c doesn't speak.

They behave like load.c: connections with one message in flight each, phases that end when the last
reply is in, the result as one line of JSON; held, they print "ready" after the warm-up, wait for a
line, and keep the connections until stdin ends.
"""

import json
import select
import sys
import time
from typing import Protocol

from benchmarks.cpu_clock import process_cpu_seconds

_STALL_SECONDS = 10.0


class Connection(Protocol):
    """One connection and its message in flight.

    `start` and `proceed` return the events to wait for (select.EPOLLIN, with select.EPOLLOUT when
    the rest of a message waits to be sent), or 0 once the reply is complete. `verify` says that
    the bytes of replies have to be compared, `errors` counts by kind the replies that failed.
    """

    verify: bool
    errors: dict[str, int]

    def fileno(self) -> int:
        """The descriptor to wait for."""

    def start(self) -> int:
        """Begin a message."""

    def proceed(self) -> int:
        """Go on after an event."""


class ClosedLoop:
    """All connections, and the phases run over them."""

    def __init__(self, connections: list[Connection]) -> None:
        self._poll = select.epoll()
        self._connections = {connection.fileno(): connection for connection in connections}
        self._interest = dict.fromkeys(self._connections, select.EPOLLIN)
        for descriptor in self._connections:
            self._poll.register(descriptor, select.EPOLLIN)

    def run_phase(self, seconds: float, verify: bool = False) -> list[float]:
        """Send for `seconds`, then drain: the latencies in seconds."""
        clock, latencies, started = time.perf_counter, [], {}
        active = len(self._connections)
        deadline = clock() + seconds
        for descriptor, connection in self._connections.items():
            connection.verify = verify
            started[descriptor] = clock()
            self._wait(descriptor, connection.start())
        while active:
            events = self._poll.poll(_STALL_SECONDS)
            if not events:
                sys.exit(f"no reply within {_STALL_SECONDS:.0f} s: {active} connections wait")
            done = []
            for descriptor, _ in events:
                wanted = self._connections[descriptor].proceed()
                if wanted:
                    self._wait(descriptor, wanted)
                else:
                    latencies.append(clock() - started[descriptor])
                    done.append(descriptor)
            # Together, after all replies: a client that is the limit would otherwise hand the
            # server one message at a time and put it to sleep in between, and the wake-ups would
            # be measured in place of the loop.
            if clock() >= deadline:
                active -= len(done)
                continue
            for descriptor in done:
                started[descriptor] = clock()
                self._wait(descriptor, self._connections[descriptor].start())
        return latencies

    def errors(self) -> dict[str, int]:
        """The errors of all connections by kind."""
        total: dict[str, int] = {}
        for connection in self._connections.values():
            for kind, count in connection.errors.items():
                total[kind] = total.get(kind, 0) + count
        return total

    def _wait(self, descriptor: int, wanted: int) -> None:
        if wanted != self._interest[descriptor]:
            self._interest[descriptor] = wanted
            self._poll.modify(descriptor, wanted)


def measure(loop: ClosedLoop, seconds: float, server_pid: int) -> dict:
    """The measured window, as load_process.LoadResult takes it."""
    server_before, client_before = process_cpu_seconds(server_pid), time.process_time()
    start = time.perf_counter()
    latencies = loop.run_phase(seconds)
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
        "errors": loop.errors(),
    }


def run(loop: ClosedLoop, warmup: float, seconds: float, server_pid: int, hold: bool) -> None:
    """The warm-up and the window."""
    loop.run_phase(warmup, verify=True)
    if hold:
        print("ready", flush=True)
        if not sys.stdin.readline():
            return
    print(json.dumps(measure(loop, seconds, server_pid)), flush=True)
    if hold:
        sys.stdin.read()
