"""`python -m benchmarks redis`: a small Redis server on each loop under redis-benchmark."""

from argparse import Namespace
from collections import Counter
from dataclasses import asdict, replace

from benchmarks import machine, syscalls
from benchmarks.load_process import LoadResult
from benchmarks.loops import LoopSpec
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
from benchmarks.processes import Placement, ProcessFailed
from benchmarks.progress import progress
from benchmarks.redis_client import (
    COMMANDS,
    RedisLoad,
    check_replies,
    missing_reason,
    run_benchmark,
)
from benchmarks.report import SPEED_HEADERS, loop_table, print_heading, speed_line
from benchmarks.rounds import exit_status, run_rounds
from benchmarks.server_process import (
    ServerConfig,
    ServerFailed,
    failure_text,
    probe,
    start_server,
)

_TIMEOUT = 120.0
TRACED_REQUESTS = 16_000
"""Under strace a request takes some tens of microseconds more."""


def server(options: RunOptions, spec: LoopSpec, traced: bool = False) -> ServerConfig:
    """The server on one loop."""
    placement = Placement(options.cpus[0], options.realtime)
    return ServerConfig(spec, None, placement, options.python, traced, app="redis")


def measure(options: RunOptions, load: RedisLoad, spec: LoopSpec) -> LoadResult:
    """One round of one loop on a fresh server. Raises ServerFailed or ProcessFailed."""
    placement = Placement(options.cpus[1], options.realtime)
    warmup = replace(load, requests=max(load.requests // 10, load.connections))
    with start_server(server(options, spec)) as running:
        check_replies(running.port)
        for part in (warmup, load):
            result = run_benchmark(running.port, part, running.pid, placement, _TIMEOUT)
        check_replies(running.port)
        return replace(result, server_peak_rss_kib=read_status(running.pid).peak_rss_kib)


def count(options: RunOptions, load: RedisLoad, spec: LoopSpec) -> Counter:
    """System calls by name, connecting included. Raises like `measure`."""
    placement = Placement(options.cpus[1], options.realtime)
    with start_server(server(options, spec, traced=True)) as running:
        check_replies(running.port)
        with syscalls.traced(running.pid) as window:
            run_benchmark(running.port, load, running.pid, placement, _TIMEOUT)
        return window.calls


def run_load(options: RunOptions, load: RedisLoad) -> dict:
    """All rounds of one load, printed, and as they go into the JSON report."""
    by_name = {spec.name: spec for spec in options.loops}
    names = list(by_name)
    outcome = run_rounds(
        names, options.rounds, lambda name: measure(options, load, by_name[name])
    )
    rows = outcome.rows(names)
    lines = {row.loop: speed_line(row) for row in rows}
    print(loop_table(str(load), names, SPEED_HEADERS, lines, outcome.failures), flush=True)
    return {"load": asdict(load), "rows": [asdict(row) for row in rows], **outcome.as_json()}


def count_load(options: RunOptions, load: RedisLoad) -> dict:
    """The system calls of one load, printed, and as they go into the JSON report."""
    load = replace(load, requests=TRACED_REQUESTS)
    lines, rows, failures = {}, [], {}
    for spec in options.loops:
        try:
            calls = count(options, load, spec)
        except (ServerFailed, ProcessFailed) as error:
            failures[spec.name] = failure_text(error)
            progress(f"  {spec.name}  {failures[spec.name]}")
            continue
        progress(f"  {spec.name}  {calls.total() / load.requests:.3f} system calls per request")
        listed = ", ".join(f"{name} {number}" for name, number in calls.most_common())
        total = f"{calls.total() / load.requests:.3f}"
        lines[spec.name] = [spec.name, total, listed or "none"]
        rows.append({"loop": spec.name, "requests": load.requests, "calls": dict(calls)})
    names = [spec.name for spec in options.loops]
    headers = ["loop", "calls/req", "calls by name"]
    print(loop_table(f"{load}, system calls", names, headers, lines, failures, (0, 2)), flush=True)
    return {"load": asdict(load), "syscalls": rows, "failures": failures}


def parse(arguments: list[str]) -> tuple[Namespace, RunOptions]:
    """Parse and check the command line."""
    parser = make_parser("redis", "A small Redis server on each loop under redis-benchmark.")
    add = parser.add_argument
    names = tuple(COMMANDS)
    add("--command", type=comma_list(one_of(names)), default="set,get", help="of ping,set,get")
    add("--pipeline", type=comma_list(parse_count), default="1,16", help="requests in flight")
    add("--connections", type=parse_count, default="50", help="clients at once")
    add("--requests", type=parse_requests, default="100000", help="of a round")
    add_run_options(parser, window=False)
    given = parser.parse_args(arguments)
    if reason := missing_reason():
        parser.error(reason)
    check_descriptors(parser, [given.connections])
    return given, RunOptions(**run_options(parser, given))


def parse_requests(word: str) -> int:
    """An argparse type: from 1,000 to 100 million requests."""
    if not word.isdecimal() or not 1000 <= int(word) <= 100_000_000:
        raise ValueError(f"{word!r} is no number from 1000 to 100000000")
    return int(word)


def main(arguments: list[str]) -> int:
    """The `redis` command; returns the exit status: 1 when a loop failed."""
    given, options = parse(arguments)
    host = machine.describe()
    machine.warn_when_busy(host)
    found = probe([server(options, spec) for spec in options.loops])
    print_heading(
        host, found.info,
        f"server on CPU {options.cpus[0]}, redis-benchmark on CPU {options.cpus[1]}, "
        f"{options.rounds} paired rounds",
    )  # fmt: skip
    done = []
    steps = [run_load] if (reason := syscalls.missing_reason()) else [run_load, count_load]
    if reason:
        progress(f"no system calls are counted: {reason}")
    for command in given.command:
        for pipeline in given.pipeline:
            load = RedisLoad(command, pipeline, given.connections, given.requests)
            progress(f"{load}:")
            done += [step(options, load) for step in steps]
            options.save({"machine": host, "loops": found.info, "loads": done})
    return exit_status(done)
