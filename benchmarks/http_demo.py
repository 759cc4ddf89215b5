"""`python -m benchmarks http`: one aiohttp application on each loop, under load, in a table.

Ends by itself within two minutes, whatever a server does.
"""

import argparse
import importlib.util
import json
from pathlib import Path

from benchmarks import machine
from benchmarks.http_measure import Demo, count_syscalls, run_rounds
from benchmarks.http_report import as_json, print_report
from benchmarks.options import comma_list, one_of, parse_count
from benchmarks.progress import progress

NAMES = ("uringloop", "uringloop-epoll", "uvloop", "asyncio")


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks http",
        description="A small aiohttp server on each event loop, under load, within two minutes.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--loops", type=comma_list(one_of(NAMES)), default=",".join(NAMES), help="loops to run")
    add("--rounds", type=parse_count, default="3", help="paired rounds")
    add("--seconds", type=parse_count, default="3", help="measured window, whole seconds")
    add("--json", type=Path, metavar="FILE", help="write the results there as well")
    return parser


def main(arguments: list[str]) -> int:
    """The `http` command; returns the exit status: 1 when a server failed or errors were seen."""
    parser = build_parser()
    given = parser.parse_args(arguments)
    if importlib.util.find_spec("aiohttp") is None:
        parser.error("the demo serves an aiohttp application: pip install aiohttp")
    if given.json is not None and not given.json.resolve().parent.is_dir():
        parser.error(f"--json: no folder {given.json.resolve().parent}")
    demo = Demo(given.rounds, given.seconds)
    host = machine.describe()
    machine.warn_when_busy(host)
    run_rounds(demo, given.loops)
    for name in given.loops:
        if name not in demo.failures:
            demo.syscalls_per_request[name] = count_syscalls(demo, name)
            progress(f"  {name}  system calls per request: {demo.syscalls_per_request[name]}")
    print_report(demo, given.loops, host)
    if given.json is not None:
        given.json.write_text(json.dumps(as_json(demo, given.loops, host), indent=2) + "\n")
    return int(not demo.good(given.loops))
