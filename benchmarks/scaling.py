"""`python -m benchmarks scaling`: CPU per message and memory per connection, from 1 to 10,000."""

from argparse import Namespace
from dataclasses import asdict, replace

from benchmarks import idle, machine
from benchmarks.echo_options import Cell
from benchmarks.measure import Bench, run_with_bench
from benchmarks.options import (
    RunOptions,
    add_run_options,
    check_descriptors,
    comma_list,
    make_parser,
    parse_count,
    parse_size,
    run_options,
)
from benchmarks.processes import ProcessFailed
from benchmarks.progress import progress
from benchmarks.report import SPEED_HEADERS, loop_table, method, print_heading, speed_line
from benchmarks.rounds import exit_status, run_rounds
from benchmarks.server_process import ServerFailed, failure_text, probe

MEMORY_CONNECTIONS = 256
"""Fewest connections whose memory is measured: with fewer, a page more or less decides."""


def measure_speed(bench: Bench, size: int, connections: int) -> dict:
    """All rounds with so many connections, printed, and as they go into the JSON report."""
    cell = Cell("protocol", "tcp", size, connections)
    progress(f"{cell}:")
    by_name = {spec.name: spec for spec in bench.options.loops}
    names = list(by_name)
    outcome = run_rounds(
        names, bench.options.rounds, lambda name: bench.measure(cell, by_name[name])
    )
    rows = outcome.rows(names)
    lines = {row.loop: speed_line(row) for row in rows}
    print(loop_table(str(cell), names, SPEED_HEADERS, lines, outcome.failures), flush=True)
    return {"cell": asdict(cell), "rows": [asdict(row) for row in rows], **outcome.as_json()}


def measure_memory(bench: Bench, mode: str, counts: list[int]) -> dict:
    """KiB per idle connection in each mode, printed, and as they go into the JSON report."""
    quiet = replace(bench, options=replace(bench.options, seconds=0.1))
    lines, failures, results = {}, {}, []
    progress(f"memory of idle connections, {mode}:")
    for spec in bench.options.loops:
        cells = []
        try:
            for count in counts:
                result = idle.measure(quiet, mode, count, spec)
                results.append({"loop": spec.name, "mode": mode, **asdict(result)})
                cells.append(f"{result.kib_per_connection:.2f}")
        except (ServerFailed, ProcessFailed) as error:
            failures[spec.name] = failure_text(error)
            progress(f"  {spec.name}  {failures[spec.name]}")
            continue
        progress(f"  {spec.name}  {', '.join(cells)} KiB per connection")
        lines[spec.name] = [spec.name, *cells]
    names = [spec.name for spec in bench.options.loops]
    headers = ["loop", *(f"{count:,}" for count in counts)]
    title = f"KiB of memory per idle connection, {mode}, by number of connections"
    print(loop_table(title, names, headers, lines, failures), flush=True)
    return {"mode": mode, "results": results, "failures": failures}


def cpu_table(speeds: list[dict], names: list[str]) -> str:
    """CPU time per message by number of connections."""
    lines: dict[str, list[str]] = {}
    for name in names:
        by_count = [{row["loop"]: row for row in speed["rows"]} for speed in speeds]
        cells = [f"{rows[name]['server_cpu_us']:.2f}" if name in rows else "-" for rows in by_count]
        lines[name] = [name, *cells]
    headers = ["loop", *(f"{speed['cell']['connections']:,}" for speed in speeds)]
    return loop_table("CPU us/msg by number of connections", names, headers, lines, {})


def parse(arguments: list[str]) -> tuple[Namespace, RunOptions]:
    """Parse and check the command line."""
    parser = make_parser("scaling", "Echo servers from one connection to ten thousand.")
    add = parser.add_argument
    add(
        "--connections", type=comma_list(parse_count), default="1,16,64,256,1000,10000",
        help="clients at once",
    )  # fmt: skip
    add("--size", type=comma_list(parse_size), default="1k", help="bytes per message; k = KiB")
    add_run_options(parser)
    given = parser.parse_args(arguments)
    check_descriptors(parser, given.connections)
    return given, RunOptions(**run_options(parser, given))


def run(given: Namespace, bench: Bench) -> int:
    """Measure, print and save; returns the exit status."""
    options = bench.options
    host = machine.describe()
    machine.warn_when_busy(host)
    first = Cell("protocol", "tcp", given.size[0], given.connections[0])
    found = probe([bench.server(first, spec) for spec in options.loops])
    print_heading(host, found.info, method(options))
    names = [spec.name for spec in options.loops]
    report: dict = {"machine": host, "loops": found.info, "speed": [], "memory": []}
    for size in given.size:
        speeds = []
        for count in given.connections:
            speeds.append(measure_speed(bench, size, count))
            report["speed"].append(speeds[-1])
            options.save(report)
        print(cpu_table(speeds, names), flush=True)
    counts = [count for count in given.connections if count >= MEMORY_CONNECTIONS]
    for mode in idle.MODES if counts else ():
        report["memory"].append(measure_memory(bench, mode, counts))
        options.save(report)
    return exit_status(report["speed"] + report["memory"])


def main(arguments: list[str]) -> int:
    """The `scaling` command; returns the exit status: 1 when a loop failed."""
    given, options = parse(arguments)
    return run_with_bench(options, lambda bench: run(given, bench))
