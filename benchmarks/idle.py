"""`python -m benchmarks idle`: servers whose connections are silent: how often they wake up."""

import time
from argparse import Namespace
from dataclasses import asdict, dataclass, replace

from benchmarks import machine
from benchmarks.cpu_clock import process_cpu_seconds
from benchmarks.echo_options import Cell
from benchmarks.load_process import HeldLoad, load_command
from benchmarks.loops import LoopSpec
from benchmarks.measure import Bench, run_with_bench
from benchmarks.options import (
    RunOptions,
    add_run_options,
    check_descriptors,
    comma_list,
    make_parser,
    one_of,
    parse_count,
    run_options,
)
from benchmarks.proc_status import read_status
from benchmarks.processes import ProcessFailed
from benchmarks.progress import progress
from benchmarks.report import loop_table, print_heading
from benchmarks.rounds import exit_status
from benchmarks.server_process import ServerFailed, failure_text, probe, start_server

MODES = ("protocol", "streams")
_MESSAGE_BYTES = 1024
SETTLE_SECONDS = 1.0
"""After the last message: what a loop puts off, such as giving memory back, may still happen."""

HEADERS = [
    "loop", "wake-ups", "preempted", "CPU us", "RSS KiB", "KiB/connection",
]  # fmt: skip


@dataclass(frozen=True)
class IdleResult:
    """A server with open connections over a quiet window.

    `wakeups` is how often one of its threads went back to sleep, `preempted` how often one lost
    the CPU; both are zero when it slept throughout. `rss_kib` is the memory resident at the end,
    `kib_per_connection` what the connections added to it, sockets in the kernel not counted.
    """

    connections: int
    seconds: float
    wakeups: int
    preempted: int
    cpu_seconds: float
    rss_kib: int
    kib_per_connection: float


def measure(bench: Bench, mode: str, connections: int, spec: LoopSpec) -> IdleResult:
    """One round of one loop: each connection echoes one message, then all are silent.

    The window lasts `bench.options.seconds`. Raises ServerFailed or ProcessFailed.
    """
    cell = Cell(mode, "tcp", _MESSAGE_BYTES, connections)
    load = replace(bench.load(cell), warmup=0.0)
    with start_server(bench.server(cell, spec)) as server:
        empty_kib = read_status(server.pid).rss_kib
        command = load_command(bench.binary, server.address, load, server.pid, hold=True)
        with HeldLoad(command, bench.client_placement, load.timeout) as client:
            client.wait_ready()
            time.sleep(SETTLE_SECONDS)
            before, cpu = read_status(server.pid), process_cpu_seconds(server.pid)
            start = time.perf_counter()
            time.sleep(bench.options.seconds)
            after = read_status(server.pid)
            return IdleResult(
                connections=connections,
                seconds=time.perf_counter() - start,
                wakeups=after.voluntary_switches - before.voluntary_switches,
                preempted=after.involuntary_switches - before.involuntary_switches,
                cpu_seconds=process_cpu_seconds(server.pid) - cpu,
                rss_kib=after.rss_kib,
                kib_per_connection=(after.rss_kib - empty_kib) / connections,
            )


def line(name: str, result: IdleResult) -> list[str]:
    """A row of the table."""
    return [
        name,
        f"{result.wakeups}",
        f"{result.preempted}",
        f"{result.cpu_seconds * 1e6:.0f}",
        f"{result.rss_kib:,}",
        f"{result.kib_per_connection:.2f}",
    ]


def run_mode(bench: Bench, mode: str, connections: int, notes: dict[str, str]) -> dict:
    """Each loop once, printed, and as they go into the JSON report."""
    title = f"idle {mode}, {connections} connections, {bench.options.seconds:g} s"
    progress(f"{title}:")
    lines, results, failures = {}, {}, {}
    for spec in bench.options.loops:
        try:
            result = measure(bench, mode, connections, spec)
        except (ServerFailed, ProcessFailed) as error:
            failures[spec.name] = failure_text(error)
            progress(f"  {spec.name}  {failures[spec.name]}")
            continue
        progress(f"  {spec.name}  {result.wakeups} wake-ups")
        lines[spec.name], results[spec.name] = line(spec.name, result), asdict(result)
    names = [spec.name for spec in bench.options.loops]
    print(loop_table(title, names, HEADERS, lines, {**notes, **failures}), flush=True)
    return {"mode": mode, "results": results, "failures": failures}


def parse(arguments: list[str]) -> tuple[Namespace, RunOptions]:
    """Parse and check the command line."""
    parser = make_parser("idle", "Wake-ups and memory of servers whose connections are silent.")
    add = parser.add_argument
    add("--mode", type=comma_list(one_of(MODES)), default="protocol", help=f"of {','.join(MODES)}")
    add("--connections", type=comma_list(parse_count), default="100", help="open at once")
    add_run_options(parser, seconds="10", rounds=False)
    given = parser.parse_args(arguments)
    check_descriptors(parser, given.connections)
    return given, RunOptions(**run_options(parser, given))


def run(given: Namespace, bench: Bench) -> int:
    """Measure, print and save; returns the exit status."""
    options = bench.options
    host = machine.describe()
    machine.warn_when_busy(host)
    cell = Cell(given.mode[0], "tcp", _MESSAGE_BYTES, given.connections[0])
    found = probe([bench.server(cell, spec) for spec in options.loops])
    notes = {name: failure_text(error) for name, error in found.failures.items()}
    print_heading(host, found.info, f"server on CPU {options.cpus[0]}")
    done = []
    for mode in given.mode:
        for connections in given.connections:
            done.append(run_mode(bench, mode, connections, notes))
            options.save({"machine": host, "loops": found.info, "idle": done})
    return exit_status(done)


def main(arguments: list[str]) -> int:
    """The `idle` command; returns the exit status: 1 when a loop failed."""
    given, options = parse(arguments)
    return run_with_bench(options, lambda bench: run(given, bench))
