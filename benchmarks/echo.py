"""`python -m benchmarks echo`: echo servers on several loops, speed or system calls."""

import itertools
from dataclasses import asdict

from benchmarks import machine
from benchmarks.echo_options import Cell, EchoOptions, parse_arguments
from benchmarks.loops import LoopSpec
from benchmarks.measure import Bench, run_with_bench
from benchmarks.processes import ProcessFailed
from benchmarks.progress import progress
from benchmarks.report import SPEED_HEADERS, loop_table, method, print_heading, speed_line
from benchmarks.rounds import exit_status, run_rounds
from benchmarks.server_process import ServerFailed, failure_text, probe


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


def run(options: EchoOptions, bench: Bench) -> int:
    """Measure all cells, print and save them; returns the exit status."""
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
    print_heading(host, found.info, method(options, options.syscalls))
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
        reasons = {**notes, **outcome["failures"]}
        left = (0, 3) if options.syscalls else (0,)
        text = loop_table(str(cell), names, headers, outcome["table"], reasons, left)
        print(text, flush=True)
        outcomes.append({key: value for key, value in outcome.items() if key != "table"})
        # After each cell, so that an interrupted matrix keeps what it has measured.
        report = {"machine": host, "unavailable": notes, "loops": found.info}
        options.save({**report, "cells": outcomes})
    return exit_status(outcomes)


def main(arguments: list[str]) -> int:
    """The `echo` command; returns the exit status: 1 when a loop failed to start or to serve."""
    options = parse_arguments(arguments)
    return run_with_bench(options, lambda bench: run(options, bench))
