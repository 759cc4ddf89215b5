"""One measurement of an echo server: a fresh server, a load client, a result."""

import functools
import itertools
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks import syscalls
from benchmarks.certificate import make_certificate
from benchmarks.echo_options import Cell
from benchmarks.echo_servers import EchoConfig
from benchmarks.load_process import HeldLoad, LoadConfig, LoadResult, load_command, run_load
from benchmarks.loops import LoopSpec
from benchmarks.options import RunOptions
from benchmarks.proc_status import read_status
from benchmarks.processes import Placement
from benchmarks.programs import CompileFailed, compile_program
from benchmarks.server_process import ServerConfig, start_server


@dataclass(frozen=True)
class Bench:
    """What every measurement of a run shares: options, the compiled client, a scratch folder."""

    options: RunOptions
    binary: Path
    folder: Path
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def server(self, cell: Cell, spec: LoopSpec, traced: bool = False) -> ServerConfig:
        """The server of one cell on one loop."""
        # A path of its own for each: bind(2) refuses one that an earlier server has left.
        path = self.folder / f"{next(self.numbers)}.socket"
        echo = EchoConfig(
            cell.mode, cell.transport, cell.size, str(path), self.certificate(cell.mode)
        )
        options = self.options
        placement = Placement(options.cpus[0], options.realtime)
        return ServerConfig(spec, echo, placement, options.python, traced=traced)

    def load(self, cell: Cell) -> LoadConfig:
        """The load of one cell."""
        options = self.options
        return LoadConfig(
            cell.connections, cell.size, options.warmup, options.seconds, cell.mode,
            self.certificate(cell.mode),
        )  # fmt: skip

    def certificate(self, mode: str) -> str:
        """The certificate of a mode that speaks TLS, made once per run. Raises ProcessFailed."""
        return str(self._certificate) if mode == "tls" else ""

    @functools.cached_property
    def _certificate(self) -> Path:
        return make_certificate(self.folder)

    @property
    def client_placement(self) -> Placement:
        """Where the load client runs."""
        return Placement(self.options.cpus[1], self.options.realtime)

    def measure(self, cell: Cell, spec: LoopSpec) -> LoadResult:
        """One measurement on a fresh server. Raises ServerFailed or ProcessFailed."""
        load = self.load(cell)
        with start_server(self.server(cell, spec)) as server:
            command = load_command(self.binary, server.address, load, server.pid)
            result = run_load(command, self.client_placement, load.timeout)
            return replace(result, server_peak_rss_kib=read_status(server.pid).peak_rss_kib)

    def count(self, cell: Cell, spec: LoopSpec) -> tuple[syscalls.SyscallWindow, int]:
        """System calls over one window, and its messages. Raises like `measure`."""
        load = self.load(cell)
        with start_server(self.server(cell, spec, traced=True)) as server:
            command = load_command(self.binary, server.address, load, server.pid, hold=True)
            with HeldLoad(command, self.client_placement, load.timeout) as client:
                client.wait_ready()
                with syscalls.traced(server.pid) as window:
                    messages = client.run_window().messages
                return window, messages


def run_with_bench(options: RunOptions, run: Callable[[Bench], int]) -> int:
    """Call `run` with a bench whose client is compiled; its exit status, 1 without a client."""
    try:
        binary = compile_program("load")
    except CompileFailed as error:
        print(f"cannot build the load client: {error}", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as folder:
        return run(Bench(options, binary, Path(folder)))
