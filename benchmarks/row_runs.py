"""One row measured once on one loop, by the code of the command that the row is about."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks import http_app, http_measure, loops, syscalls
from benchmarks.echo_options import Cell
from benchmarks.load_process import LoadResult
from benchmarks.measure import Bench
from benchmarks.micro_measure import MicroBench, MicroResult
from benchmarks.processes import Placement
from benchmarks.rows import Http, Micro, Row
from benchmarks.server_process import ServerFailed

_HTTP_BUDGET_SECONDS = 60.0
_PROBE_CASE = "task-step"
_PROBE_SECONDS = 0.01


@dataclass(frozen=True)
class Values:
    """What one measurement found; figures that a kind of row doesn't have are None.

    `rate` is per second, `cpu_us` of the server per operation, and so are the `syscalls`.
    """

    rate: float | None = None
    cpu_us: float | None = None
    p50_us: float | None = None
    syscalls: float | None = None

    @classmethod
    def of_load(cls, result: LoadResult) -> "Values":
        """Of a client's window."""
        return cls(result.rate, result.server_cpu_us, result.p50_us)


@dataclass(frozen=True)
class RowBench:
    """What every measurement of a run shares: a bench of servers, and the window without network.

    One for all rows, since the bench keeps a certificate and counts its sockets.
    """

    bench: Bench
    micro_seconds: float

    def measure(self, row: Row, name: str) -> Values:
        """One measurement in a fresh process. Raises ServerFailed or ProcessFailed."""
        with environment(self.environment(row, name)):
            if isinstance(row.run, Micro):
                result = self._micro(row.run, name, self.micro_seconds)
                return Values(result.rate, result.cpu_us)
            if isinstance(row.run, Http):
                return Values.of_load(self._http(row.run, name))
            if row.metric == "syscalls":
                return Values(syscalls=self._syscalls(row.run, name))
            return Values.of_load(self.bench.measure(row.run, loops.parse_name(name)))

    def environment(self, row: Row, name: str) -> dict[str, str]:
        """What a measurement has in its environment beside what the loop's name asks for.

        asyncio and others that receive as it does allocate 256 KiB each time, which glibc maps and
        unmaps until the program has once freed such a block. Larger programs have, so these loops
        are measured as in one; uvloop and our own have to do without.
        """
        variables = {"URINGLOOP_OPTIONS": row.options} if row.options else {}
        as_they_are = (loops.BASELINE, *loops.OURS)
        return variables if name in as_they_are else {**variables, **loops.KEEP_MEMORY}

    def describe(self, name: str) -> dict:
        """What a loop says of itself: class, backend, versions. Raises CaseFailed."""
        return self._micro(Micro(_PROBE_CASE), name, _PROBE_SECONDS).info

    def _micro(self, run: Micro, name: str, seconds: float) -> MicroResult:
        options = self.bench.options
        placement = Placement(options.cpus[0], options.realtime)
        return MicroBench(seconds, placement, options.python).measure(
            run.case, loops.parse_name(name)
        )

    def _http(self, run: Http, name: str) -> LoadResult:
        if reason := http_app.missing_reason(run.app):
            raise ServerFailed(reason, absent=True)
        demo = http_measure.Demo(
            rounds=1,
            seconds=max(1, round(self.bench.options.seconds)),  # wrk takes whole ones
            deadline=http_measure.Deadline(_HTTP_BUDGET_SECONDS),
            app=run.app,
            cpus=self.bench.options.cpus,
        )
        return http_measure.measure(demo, name)

    def _syscalls(self, cell: Cell, name: str) -> float:
        if reason := syscalls.missing_reason():
            raise ServerFailed(reason, absent=True)
        window, messages = self.bench.count(cell, loops.parse_name(name))
        return window.per_message(messages)


@contextlib.contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    """Our own environment, which child processes get, with some variables for a while."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
