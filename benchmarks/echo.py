"""`python -m benchmarks echo`: echo servers on several loops, speed or system calls."""

import itertools
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from benchmarks import machine, summary, table
from benchmarks.echo_options import Cell, EchoOptions, parse_arguments
from benchmarks.loops import LoopSpec
from benchmarks.measure import Bench
from benchmarks.processes import ProcessFailed
from benchmarks.programs import CompileFailed, compile_program
from benchmarks.progress import progress
from benchmarks.rounds import run_rounds
from benchmarks.server_process import Availability, ServerFailed, failure_text, probe

SPEED_HEADERS = [
    "loop", "req/s", "p50 us", "p99 us", "CPU us/msg", "req/s ratio", "CPU ratio", "spread",
    "busy server/client",
]  # fmt: skip


def speed_line(row: summary.Row) -> list[str]:
    """A row of the speed table."""
    return [
        row.loop,
        f"{row.rate:,.0f}",
        f"{row.p50_us:,.1f}",
        f"{row.p99_us:,.1f}",
        f"{row.server_cpu_us:.2f}",
        summary.ratio_text(row.rate_ratio),
        summary.ratio_text(row.cpu_ratio),
        f"{row.spread:.1%}",
        f"{row.server_busy:.0%} / {row.client_busy:.0%}",
    ]


def measure_cell(bench: Bench, cell: Cell, specs: list[LoopSpec]) -> dict:
    """All rounds of one cell, as it goes into the JSON report."""
    by_name = {spec.name: spec for spec in specs}
    outcome = run_rounds(
        list(by_name), bench.options.rounds, lambda name: bench.measure(cell, by_name[name])
    )
    rows = outcome.rows(list(by_name))
    return {
        "cell": asdict(cell),
        "rows": [asdict(row) for row in rows],
        **outcome.as_json(),
        "table": {row.loop: speed_line(row) for row in rows},
    }


SYSCALL_HEADERS = ["loop", "calls/msg", "messages", "most frequent (calls/msg)"]


def count_cell(bench: Bench, cell: Cell, specs: list[LoopSpec]) -> dict:
    """The system calls of one cell, as they go into the JSON report."""
    rows, failures, lines = [], {}, {}
    for spec in specs:
        try:
            window, messages = bench.count(cell, spec)
        except (ServerFailed, ProcessFailed) as error:
            failures[spec.name] = failure_text(error)
            progress(f"  {spec.name}  {failures[spec.name]}")
            continue
        per_message = window.per_message(messages)
        progress(f"  {spec.name}  {per_message:.3f} system calls per message")
        top = ", ".join(f"{name} {calls:.3f}" for name, calls in window.top(messages))
        lines[spec.name] = [spec.name, f"{per_message:.3f}", f"{messages:,}", top or "none"]
        rows.append({"loop": spec.name, "messages": messages, "calls": dict(window.calls)})
    return {"cell": asdict(cell), "rows": rows, "failures": failures, "table": lines}


def cell_table(
    cell: Cell, names: list[str], headers: list[str], outcome: dict, notes: dict[str, str]
) -> str:
    """The printed table of one cell: every loop asked for has its row, absent ones too."""
    notes = {**notes, **outcome["failures"]}
    lines = [outcome["table"].get(name) or [name, notes[name]] for name in names]
    left = (0, 3) if headers is SYSCALL_HEADERS else (0,)
    return f"{cell}\n{table.render(headers, lines, left)}\n"


def print_heading(options: EchoOptions, host: dict, found: Availability) -> None:
    """Machine, versions and method, above the tables."""
    print(machine.headline(host))
    for name, info in found.info.items():
        version = f" {info['versions'][name]}" if info["versions"].get(name) else ""
        backend = f", backend {info['backend']}" if info["backend"] else ""
        print(f"{name}: {info['loop_class']}{version}{backend}, {info['python']}")
    method = "SCHED_FIFO" if options.realtime else "normal scheduling"
    print(
        f"server on CPU {options.cpus[0]}, client on CPU {options.cpus[1]}, {method}, "
        f"{options.warmup:g} s warm-up, {options.seconds:g} s measured"
        + (", under strace\n" if options.syscalls else f", {options.rounds} paired rounds\n")
    )


def run(options: EchoOptions, binary: Path, folder: Path) -> int:
    """Measure all cells, print and save them; returns the exit status."""
    bench = Bench(options, binary, folder)
    host = machine.describe()
    machine.warn_when_busy(host)
    cells = [
        Cell(*values)
        for values in itertools.product(
            options.modes, options.transports, options.sizes, options.connections
        )
    ]
    found = probe([bench.server(cells[0], spec) for spec in options.loops])
    notes = {name: failure_text(error) for name, error in found.failures.items()}
    for name, note in notes.items():
        progress(f"{name}  {note}")
    print_heading(options, host, found)
    if not found.info:
        print("\n".join(["no loop to measure:", *(f"  {n}  {note}" for n, note in notes.items())]))
        return 1
    measure, headers = (
        (count_cell, SYSCALL_HEADERS) if options.syscalls else (measure_cell, SPEED_HEADERS)
    )
    names = [spec.name for spec in options.loops]
    outcomes = []
    for number, cell in enumerate(cells):
        progress(f"cell {number + 1}/{len(cells)}: {cell}")
        # All of them: a loop without TLS may well echo in another cell.
        outcome = measure(bench, cell, options.loops)
        print(cell_table(cell, names, headers, outcome, notes), flush=True)
        outcomes.append({key: value for key, value in outcome.items() if key != "table"})
        # After each cell, so that an interrupted matrix keeps what it has measured.
        report = {"machine": host, "unavailable": notes, "loops": found.info}
        options.save({**report, "cells": outcomes})
    failures = [text for outcome in outcomes for text in outcome["failures"].values()]
    return int(any(text.startswith("failed") for text in failures))


def main(arguments: list[str]) -> int:
    """The `echo` command; returns the exit status: 1 when a loop failed to start or to serve."""
    options = parse_arguments(arguments)
    try:
        binary = compile_program("load")
    except CompileFailed as error:
        print(f"cannot build the load client: {error}", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as folder:
        return run(options, binary, Path(folder))
