"""The measurements of the HTTP demo: each loop in each round, then its system calls.

Every wait is cut at one deadline, so that no server can hold the demo up.
"""

import http.client
import sys
import time
from dataclasses import dataclass, field

from benchmarks import loops, summary, syscalls, wrk
from benchmarks.http_app import TEXT
from benchmarks.load_process import HeldLoad, LoadResult, run_load
from benchmarks.processes import Placement, ProcessFailed, default_cpus
from benchmarks.progress import progress
from benchmarks.server_process import Server, ServerConfig, ServerFailed, start_server

CONNECTIONS = 64
WARMUP_SECONDS = 1
TRACED_SECONDS = 1.0
BUDGET_SECONDS = 105.0
"""Two minutes, less what the last steps may take beyond the deadline to stop their processes."""

_START_SECONDS = 8.0
_GRACE_SECONDS = 5.0


class Deadline:
    """The end of the demo."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds left, never below zero."""
        return max(0.0, self._end - time.monotonic())

    def cut(self, seconds: float) -> float:
        """A timeout of `seconds`, or what is left."""
        return min(seconds, self.left())


@dataclass
class Demo:
    """One run of one application: what was asked for, and what was found so far, by loop name."""

    rounds: int
    seconds: int
    app: str = "aiohttp"
    deadline: Deadline = field(default_factory=lambda: Deadline(BUDGET_SECONDS))
    cpus: tuple[int, int] = field(default_factory=default_cpus)
    samples: list[summary.Sample] = field(default_factory=list)
    info: dict[str, dict] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    broken: bool = False
    syscalls_per_request: dict[str, str] = field(default_factory=dict)

    def fail(self, name: str, error: ServerFailed | ProcessFailed) -> None:
        """Note that a loop is out; a peer that isn't installed doesn't break the demo."""
        absent = isinstance(error, ServerFailed) and error.absent
        self.failures[name] = f"{'absent' if absent else 'failed'}: {error}"
        self.broken |= not absent or name.startswith("uringloop")
        progress(f"  {name}  {self.failures[name]}")

    def good(self, names: list[str]) -> bool:
        """Whether every loop that is installed was measured, without errors."""
        measured = {sample.loop for sample in self.samples}
        left_out = set(names) - measured - set(self.failures)
        errors = any(sample.result.errors for sample in self.samples)
        return not (self.broken or left_out or errors)

    def start(self, name: str, traced: bool = False) -> Server:
        """Start the application on a loop and see that it answers. Raises ServerFailed."""
        placement = Placement(self.cpus[0])
        config = ServerConfig(
            loops.parse_name(name), None, placement, traced=traced, app=self.app
        )
        server = start_server(config, self.deadline.cut(_START_SECONDS))
        try:
            check_reply(server.port, self.deadline.cut(_GRACE_SECONDS))
        except BaseException:
            server.process.stop()
            raise
        self.info[name] = server.info
        return server


def check_reply(port: int, timeout: float) -> None:
    """Raise ServerFailed unless GET / answers 200 and the text."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=max(timeout, 0.1))
    try:
        connection.request("GET", "/")
        reply = connection.getresponse()
        body = reply.read().decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        raise ServerFailed(f"GET / failed: {error}") from error
    finally:
        connection.close()
    if (reply.status, body) != (200, TEXT):
        raise ServerFailed(f"GET / answered {reply.status} {body[:60]!r}")


def client_command(server: Server, warmup: float, seconds: float) -> list[str]:
    """The command line of the Python client."""
    numbers = [server.port, CONNECTIONS, warmup, seconds, server.pid]
    return [sys.executable, "-m", "benchmarks.http_client", *map(str, numbers)]


def measure(demo: Demo, name: str) -> LoadResult:
    """Warm a fresh server up, then measure it. Raises ServerFailed or ProcessFailed."""
    placement = Placement(demo.cpus[1])
    with demo.start(name) as server:
        if not wrk.available():
            command = client_command(server, WARMUP_SECONDS, demo.seconds)
            timeout = demo.deadline.cut(WARMUP_SECONDS + demo.seconds + _GRACE_SECONDS)
            return run_load(command, placement, timeout)
        url = f"http://127.0.0.1:{server.port}/"
        for seconds in (WARMUP_SECONDS, demo.seconds):
            timeout = demo.deadline.cut(seconds + _GRACE_SECONDS)
            result = wrk.run_wrk(url, CONNECTIONS, seconds, server.pid, placement, timeout)
        # wrk reports whatever it got, and counts a server that hangs as no error at all.
        check_reply(server.port, demo.deadline.cut(_GRACE_SECONDS))
        return result


def run_rounds(demo: Demo, names: list[str]) -> None:
    """All loops in each round, in changing order; fewer rounds when the time runs out."""
    for number in range(demo.rounds):
        for name in summary.round_order(names, number):
            if name in demo.failures:
                continue
            if demo.deadline.left() < WARMUP_SECONDS + demo.seconds + _GRACE_SECONDS:
                progress("time is up: the remaining measurements are left out")
                return
            try:
                result = measure(demo, name)
            except (ServerFailed, ProcessFailed) as error:
                demo.fail(name, error)
                continue
            demo.samples.append(summary.Sample(name, number, result))
            progress(
                f"  round {number + 1}/{demo.rounds}  {name}  {result.rate:,.0f} req/s, "
                f"errors: {summary.error_text(result.errors)}"
            )


def count_syscalls(demo: Demo, name: str) -> str:
    """System calls per request on a loop, as a table cell."""
    if reason := syscalls.missing_reason():
        return f"n/a ({reason})"
    if demo.deadline.left() < TRACED_SECONDS + 2 * _GRACE_SECONDS:
        return "n/a (time is up)"
    try:
        with demo.start(name, traced=True) as server:
            command = [*client_command(server, 0.2, TRACED_SECONDS), "--hold"]
            timeout = demo.deadline.cut(TRACED_SECONDS + _GRACE_SECONDS)
            with HeldLoad(command, Placement(demo.cpus[1]), timeout) as client:
                client.wait_ready()
                with syscalls.traced(server.pid, demo.deadline.cut(_GRACE_SECONDS)) as window:
                    requests = client.run_window().messages
                return f"{window.per_message(requests):.2f}"
    except (ServerFailed, ProcessFailed) as error:
        progress(f"  {name}  no system calls counted: {error}")
        return "n/a"
