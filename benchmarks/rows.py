"""All rows of the table: what each measures, by which figure loops are compared, and the target.

Targets are ratios to uvloop of the same run, from what the best of other loops and of C programs
reached when this project began (docs/performance.md). Two CPUs limit the figure to be trusted:
from 16 connections on the client is at its own limit, so CPU time per message is compared there.
"""

import fnmatch
from dataclasses import dataclass
from typing import Literal

from benchmarks.echo_options import Cell

KIB = 1024
Metric = Literal["rate", "cpu", "p50", "syscalls"]

METRIC_NAMES = {
    "rate": "req/s",
    "cpu": "CPU",
    "p50": "p50",
    "syscalls": "calls/msg",
}

EPOLL_TARGET = 1.05
"""What the epoll backend has to reach in every row with a network."""


_TITLES = {
    "protocol": "protocol",
    "buffered": "BufferedProtocol",
    "streams": "streams",
    "sock": "sock_recv, sock_sendall",
    "tls": "TLS",
    "udp": "UDP",
    "churn": "connect, protocol,",
    "churn-streams": "connect, streams,",
}


@dataclass(frozen=True)
class Http:
    """`python -m benchmarks http --app`: a server under wrk."""

    app: str


@dataclass(frozen=True)
class Micro:
    """`python -m benchmarks micro --cases`: one case of micro_cases.py."""

    case: str


@dataclass(frozen=True)
class Row:
    """One row: `name` is what --rows takes, `title` what people read.

    `target` is the least ratio to uvloop, for `epoll_target` that of the epoll backend; for the
    metric `syscalls` the most calls per message. With `floor_share` the target is that share of
    what the C server reaches in the same run. `options` are LoopOptions in the form of
    URINGLOOP_OPTIONS; `loops` are measured in this row beside those of the run.
    """

    name: str
    group: str
    title: str
    run: Cell | Http | Micro
    metric: Metric
    target: float
    epoll_target: float
    floor_share: float | None = None
    options: str = ""
    loops: tuple[str, ...] = ()

    @property
    def floors(self) -> bool:
        """Whether floor.c is measured as well: it knows no modes, only what a protocol does."""
        return isinstance(self.run, Cell) and self.run.mode == "protocol"


def _echo(
    mode: str, transport: str, size: int, connections: int, target: float, **more: object
) -> Row:
    """A row of echo servers of one kind."""
    in_kib = size % KIB == 0
    short, long = (f"{size // KIB}k", f"{size // KIB} KiB") if in_kib else (size, f"{size} B")
    named = mode in ("protocol", "buffered", "streams")
    family = {"tcp": " TCP", "unix": " Unix"}[transport] if named else ""
    settings: dict = {
        "name": f"{mode}-{transport}-{short}-c{connections}",
        "group": "echo",
        "title": f"{_TITLES[mode]}{family} {long} c{connections}",
        "metric": "cpu" if connections >= 16 else "rate",
        "epoll_target": EPOLL_TARGET,
        **more,
    }
    cell = Cell(mode, transport, size, connections)
    return Row(run=cell, target=target, **settings)


def _http(app: str, target: float) -> Row:
    title = f"{app} hello c64"
    return Row(f"http-{app}", "http", title, Http(app), "cpu", target, EPOLL_TARGET)


def _micro(case: str, group: str, title: str, target: float) -> Row:
    """A row without network, where both backends run the same code towards the same target."""
    return Row(f"micro-{case}", group, title, Micro(case), "cpu", target, target)


_CHURN_CONNECTIONS = 16
_SHARE = 0.95

ROWS = (
    _echo("protocol", "tcp", KIB, 1, 1.05),
    _echo(
        "protocol",
        "tcp",
        KIB,
        1,
        1.6,
        name="protocol-tcp-1k-c1-busy",
        metric="p50",
        title="protocol TCP 1 KiB c1, busy_poll",
        options="busy_poll=0.0002",
    ),
    _echo("protocol", "tcp", KIB, 16, 1.15, floor_share=_SHARE),
    _echo("protocol", "tcp", KIB, 64, 1.24, floor_share=_SHARE),
    _echo("protocol", "tcp", KIB, 256, 1.06, floor_share=_SHARE),
    _echo("protocol", "tcp", 10 * KIB, 64, 1.18),
    _echo("protocol", "tcp", 100 * KIB, 64, 1.25),
    _echo("protocol", "tcp", 100 * KIB, 256, 1.39),
    _echo("protocol", "unix", KIB, 64, 1.35),
    _echo("protocol", "unix", 100 * KIB, 64, 1.30),
    _echo("buffered", "tcp", KIB, 64, 1.30),
    _echo("streams", "tcp", KIB, 64, 1.40),
    _echo("streams", "tcp", 100 * KIB, 64, 1.30),
    _echo("sock", "tcp", KIB, 64, 3.0),
    _echo("tls", "tcp", KIB, 16, 5.2, group="tls", loops=("uvloop-mmap",)),
    _echo("tls", "tcp", 64 * KIB, 16, 3.1, group="tls", loops=("uvloop-mmap",)),
    _echo("udp", "tcp", KIB, 16, 1.6, group="udp", name="udp-1k-c16"),
    _echo("churn", "tcp", 64, _CHURN_CONNECTIONS, 1.2, group="churn"),
    _echo("churn-streams", "tcp", 64, _CHURN_CONNECTIONS, 1.8, group="churn"),
    _http("aiohttp", 1.45),
    _http("uvicorn", 1.60),
    _micro("call_soon-chain", "callbacks", "call_soon, a chain", 3.0),
    _micro("call_soon-batch", "callbacks", "call_soon, 1,000 at once", 1.4),
    _micro("call_later-cancel", "callbacks", "call_later and cancel", 2.6),
    _micro("call_soon_threadsafe", "callbacks", "call_soon_threadsafe", 1.2),
    _micro("pipe-events", "callbacks", "add_reader on 100 pipes", 1.2),
    _micro("task-step", "tasks", "task step, sleep(0)", 1.8),
    _micro("future-wakeup", "tasks", "wake-up by a future", 1.8),
    _micro("create_task", "tasks", "create_task and await", 1.4),
    _micro("gather", "tasks", "gather of 100", 1.05),
    _micro("wait_for", "tasks", "wait_for", 1.7),
    _micro("queue", "tasks", "Queue between two tasks", 1.1),
    _micro("executor", "others", "run_in_executor", 1.35),
    _micro("subprocess", "others", "subprocess, spawn and wait", 2.8),
    Row(
        "syscalls",
        "system calls",
        "protocol TCP 1 KiB c64",
        Cell("protocol", "tcp", 1024, 64),
        "syscalls",
        0.1,
        2.1,
    ),
)

GROUPS = {
    "echo": "Echo",
    "tls": "TLS",
    "udp": "UDP",
    "churn": "Connections: connect, echo once, close",
    "http": "HTTP",
    "callbacks": "Callbacks",
    "tasks": "Tasks",
    "others": "Threads and processes",
    "system calls": "System calls per message",
}
"""Groups in the order of the chart, with their headings."""


def by_name() -> dict[str, Row]:
    """The rows by name."""
    return {row.name: row for row in ROWS}


def select(patterns: str) -> list[Row]:
    """The rows that names or patterns, separated by commas, choose. Raises ValueError."""
    chosen = set()
    for pattern in patterns.split(","):
        found = {row.name for row in ROWS if fnmatch.fnmatchcase(row.name, pattern.strip())}
        if not found:
            names = ", ".join(row.name for row in ROWS)
            raise ValueError(f"{pattern!r} is no row and no pattern of one: {names}")
        chosen |= found
    return [row for row in ROWS if row.name in chosen]
