"""`python -m benchmarks pingpong`: both ends of many socket pairs on one loop, in MiB/s."""

import json
import tempfile
from argparse import Namespace
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks import certificate, machine, summary
from benchmarks.load_process import LoadResult
from benchmarks.loops import LoopSpec
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
from benchmarks.proc_status import read_status
from benchmarks.processes import ManagedProcess, Placement, ProcessFailed
from benchmarks.progress import progress
from benchmarks.report import loop_table, print_heading
from benchmarks.rounds import exit_status, run_rounds
from benchmarks.server_process import ServerFailed, failure_text

_GRACE_SECONDS = 30.0

HEADERS = ["loop", "MiB/s", "p50 us", "p99 us", "CPU us/trip", "ratio", "CPU ratio", "spread"]


@dataclass(frozen=True)
class Game:
    """How many pairs play with messages of how many bytes, over TLS or not."""

    pairs: int
    size: int
    certificate: str = ""

    def __str__(self) -> str:
        tls = ", TLS" if self.certificate else ""
        return f"ping-pong, {self.pairs} pairs, {self.size} bytes{tls}"

    def mib_per_second(self, rate: float) -> float:
        """What `rate` round trips per second carry: a message there and a message back."""
        return 2 * self.size * rate / 1024**2


def measure(options: RunOptions, game: Game, spec: LoopSpec) -> tuple[LoadResult, dict]:
    """One round of one loop in a fresh process, and what that says of itself.

    A message of the result is a round trip, its server the whole process. Raises ServerFailed or
    ProcessFailed.
    """
    if not spec.factory:
        raise ServerFailed("floor.c plays no ping-pong", absent=True)
    config = {
        "loop": spec.name,
        "pairs": game.pairs,
        "size": game.size,
        "certificate": game.certificate,
        "warmup": options.warmup,
        "seconds": options.seconds,
    }
    command = [options.python, "-m", "benchmarks.pingpong_worker", json.dumps(config)]
    placement = Placement(options.cpus[0], options.realtime)
    with ManagedProcess(command, placement, spec.environment()) as process:
        line = process.read_line(options.warmup + options.seconds + _GRACE_SECONDS)
        info = json.loads(line)
        if "failed" in info:
            raise ServerFailed(info["failed"], info["absent"])
        result = LoadResult.from_json(json.dumps(info.pop("result")))
        return replace(result, server_peak_rss_kib=read_status(process.pid).peak_rss_kib), info


def probe(options: RunOptions, game: Game) -> dict[str, dict]:
    """What the loops that can play say of themselves, by name, before the first round."""
    short = replace(options, warmup=0.0, seconds=0.01)
    info = {}
    for spec in options.loops:
        try:
            _, info[spec.name] = measure(short, game, spec)
        except (ServerFailed, ProcessFailed) as error:
            progress(f"{spec.name}  {failure_text(error)}")
    return info


def run_game(options: RunOptions, game: Game) -> dict:
    """All rounds of one game, printed, and as they go into the JSON report."""
    by_name = {spec.name: spec for spec in options.loops}

    def one(name: str) -> LoadResult:
        return measure(options, game, by_name[name])[0]

    def text(result: LoadResult) -> str:
        return f"{game.mib_per_second(result.rate):,.0f} MiB/s"

    outcome = run_rounds(list(by_name), options.rounds, one, text)
    lines = {}
    for row in outcome.rows(list(by_name)):
        lines[row.loop] = [
            row.loop,
            f"{game.mib_per_second(row.rate):,.0f}",
            f"{row.p50_us:,.1f}",
            f"{row.p99_us:,.1f}",
            f"{row.server_cpu_us:.2f}",
            summary.ratio_text(row.rate_ratio),
            summary.ratio_text(row.cpu_ratio),
            f"{row.spread:.1%}",
        ]
    print(loop_table(str(game), list(by_name), HEADERS, lines, outcome.failures), flush=True)
    rows = [asdict(row) for row in outcome.rows(list(by_name))]
    return {"game": asdict(game), "rows": rows, **outcome.as_json()}


def parse(arguments: list[str]) -> tuple[Namespace, RunOptions]:
    """Parse and check the command line."""
    parser = make_parser("pingpong", "Socket pairs that play ping-pong inside one process.")
    add = parser.add_argument
    add("--bytes", type=comma_list(parse_size), default="64k", help="of a message; k = KiB")
    add("--pairs", type=comma_list(parse_count), default="64", help="socket pairs at once")
    add("--tls", action="store_true", help="encrypted")
    add_run_options(parser)
    given = parser.parse_args(arguments)
    if given.tls and (reason := certificate.missing_reason()):
        parser.error(f"--tls needs a certificate, which was not made: {reason}")
    check_descriptors(parser, [2 * pairs for pairs in given.pairs])
    return given, RunOptions(**run_options(parser, given))


def main(arguments: list[str]) -> int:
    """The `pingpong` command; returns the exit status: 1 when a loop failed."""
    given, options = parse(arguments)
    host = machine.describe()
    machine.warn_when_busy(host)
    done = []
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as folder:
        file = str(certificate.make_certificate(Path(folder))) if given.tls else ""
        games = [Game(pairs, size, file) for pairs in given.pairs for size in given.bytes]
        info = probe(options, games[0])
        print_heading(host, info, f"one process on CPU {options.cpus[0]}, {options.rounds} rounds")
        for game in games:
            progress(f"{game}:")
            done.append(run_game(options, game))
            options.save({"machine": host, "loops": info, "games": done})
    return exit_status(done)
