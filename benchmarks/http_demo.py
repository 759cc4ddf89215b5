"""`python -m benchmarks http`: an HTTP application on each loop, under load, in a table.

Ends by itself within two minutes for each application, whatever a server does.
"""

import argparse
import json
from pathlib import Path

from benchmarks import http_app, loops, machine
from benchmarks.http_measure import Demo, count_syscalls, run_rounds
from benchmarks.http_report import as_json, print_report
from benchmarks.options import check_json, comma_list, one_of, parse_count
from benchmarks.progress import progress

NAMES = ("uringloop", "uringloop-epoll", "uvloop", "asyncio")


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks http",
        description="A small HTTP server on each event loop, under load, within two minutes.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    apps = tuple(http_app.PACKAGES)
    add("--app", type=comma_list(one_of(apps)), default=apps[0], help=f"of {','.join(apps)}")
    add("--loops", type=comma_list(parse_loop), default=",".join(NAMES), help="loops to run")
    add("--rounds", type=parse_count, default="3", help="paired rounds")
    add("--seconds", type=parse_count, default="3", help="measured window, whole seconds")
    add("--json", type=Path, metavar="FILE", help="write the results there as well")
    return parser


def parse_loop(word: str) -> str:
    """The name of a loop that can run Python. Raises ValueError."""
    spec = loops.parse_name(word)
    if not spec.factory:
        raise ValueError(f"{word} is no loop: it runs no Python")
    return spec.name


def main(arguments: list[str]) -> int:
    """The `http` command; returns the exit status: 1 when a server failed or errors were seen."""
    parser = build_parser()
    given = parser.parse_args(arguments)
    for app in given.app:
        if reason := http_app.missing_reason(app):
            parser.error(f"--app {app}: {reason}")
    check_json(parser, given.json)
    host = machine.describe()
    machine.warn_when_busy(host)
    reports, good = [], True
    for app in given.app:
        demo = Demo(given.rounds, given.seconds, app)
        run_demo(demo, given.loops)
        print_report(demo, given.loops, host)
        good &= demo.good(given.loops)
        reports.append(as_json(demo, given.loops, host))
        if given.json is not None:
            given.json.write_text(json.dumps(reports, indent=2) + "\n")
    return int(not good)


def run_demo(demo: Demo, names: list[str]) -> None:
    """Speed, then system calls."""
    progress(f"{demo.app}:")
    run_rounds(demo, names)
    for name in names:
        if name not in demo.failures:
            demo.syscalls_per_request[name] = count_syscalls(demo, name)
            progress(f"  {name}  system calls per request: {demo.syscalls_per_request[name]}")
