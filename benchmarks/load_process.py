"""The load client: load.c run, and its result read."""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.processes import ManagedProcess, Placement, ProcessFailed

_GRACE_SECONDS = 30.0
"""Connecting and draining; the client itself gives up after 10 s without a reply."""


@dataclass(frozen=True)
class LoadResult:
    """One measured window, as a load client reports it.

    Latencies are in microseconds, CPU times in seconds; `errors` counts by kind what went wrong
    without ending the client: of load.c's only datagrams sent again. `server_peak_rss_kib` is the
    most memory the server had resident up to the end of the window, 0 where it wasn't read.
    """

    messages: int
    seconds: float
    p50_us: float
    p99_us: float
    client_cpu_seconds: float
    server_cpu_seconds: float
    errors: dict[str, int] = field(default_factory=dict)
    server_peak_rss_kib: int = 0

    @classmethod
    def from_json(cls, text: str) -> "LoadResult":
        """Parse a client's result line. Raises ProcessFailed for anything else."""
        try:
            result = cls(**json.loads(text))
        except (ValueError, TypeError):
            raise ProcessFailed(f"the load client said {text[:80]!r}") from None
        if result.messages == 0:
            raise ProcessFailed("the load client got no reply")
        return result

    @property
    def rate(self) -> float:
        """Messages per second."""
        return self.messages / self.seconds

    @property
    def server_cpu_us(self) -> float:
        """CPU time of the server per message, in microseconds."""
        return self.server_cpu_seconds / self.messages * 1e6

    @property
    def server_busy(self) -> float:
        """CPU time of the server by wall time: 1 is one CPU in full.

        Well below 1 beside an idle client, something else took the server's CPU.
        """
        return self.server_cpu_seconds / self.seconds

    @property
    def client_busy(self) -> float:
        """CPU time of the client by wall time: near 1 the client is the limit, not the server."""
        return self.client_cpu_seconds / self.seconds


@dataclass(frozen=True)
class LoadConfig:
    """Size of the load: bytes per message, and seconds of warm-up and of the measured window.

    `mode` is one of echo_servers.MODES, `certificate` the file to trust where it is `tls`.
    """

    connections: int
    size: int
    warmup: float
    seconds: float
    mode: str = "protocol"
    certificate: str = ""

    @property
    def timeout(self) -> float:
        """Seconds after which a client that is still running counts as hung."""
        return self.warmup + self.seconds + _GRACE_SECONDS


def load_command(
    binary: Path, address: list | str, config: LoadConfig, server_pid: int, hold: bool = False
) -> list[str]:
    """The command line of the client for a server at `address`."""
    if config.mode == "tls":
        return tls_command(address, config, server_pid, hold)
    inet = "--udp" if config.mode == "udp" else "--tcp"
    target = ["--unix", address] if isinstance(address, str) else [inet, str(address[1])]
    options = {
        "--connections": config.connections,
        "--size": config.size,
        "--warmup": config.warmup,
        "--seconds": config.seconds,
        "--server-pid": server_pid,
    }
    words = [str(word) for pair in options.items() for word in pair]
    flags = ["--churn"] * config.mode.startswith("churn") + ["--hold"] * hold
    return [str(binary), *target, *words, *flags]


def tls_command(
    address: list | str, config: LoadConfig, server_pid: int, hold: bool = False
) -> list[str]:
    """The command line of the client that speaks TLS."""
    settings = {
        "address": address,
        "certificate": config.certificate,
        "connections": config.connections,
        "size": config.size,
        "warmup": config.warmup,
        "seconds": config.seconds,
        "server_pid": server_pid,
        "hold": hold,
    }
    return [sys.executable, "-m", "benchmarks.tls_client", json.dumps(settings)]


class HeldLoad:
    """A load client started with --hold: warmed up, waiting for the word, connections kept.

    Serves load.c and the clients of closed_loop.py, which speak the same way. `timeout`, in
    seconds, is for the warm-up and again for the window.
    """

    def __init__(self, command: list[str], placement: Placement, timeout: float) -> None:
        self._process = ManagedProcess(command, placement)
        self._timeout = timeout

    def __enter__(self) -> "HeldLoad":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._process.stop()

    def wait_ready(self) -> None:
        """Wait for the end of the warm-up. Raises ProcessFailed."""
        line = self._process.read_line(self._timeout)
        if line != "ready":
            raise ProcessFailed(f"the load client said {line[:80]!r}")

    def run_window(self) -> LoadResult:
        """Start the measured window and wait for its result. Raises ProcessFailed."""
        self._process.send_line("go")
        return LoadResult.from_json(self._process.read_line(self._timeout))


def run_load(command: list[str], placement: Placement, timeout: float) -> LoadResult:
    """Run a load client from start to end. Raises ProcessFailed after `timeout` seconds."""
    with ManagedProcess(command, placement) as process:
        return LoadResult.from_json(process.read_all(timeout))
