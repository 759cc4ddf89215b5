"""`python -m benchmarks table`: all rows of rows.py, measured one after the other.

The JSON file is written after each row, so a run that ends early can be resumed.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import sys
import traceback
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from benchmarks import http_app, loops, machine, options, summary
from benchmarks.measure import Bench, run_with_bench
from benchmarks.processes import ROOT, ProcessFailed, default_cpus
from benchmarks.progress import ProgressBar, progress
from benchmarks.row_runs import RowBench
from benchmarks.rows import ROWS, Row, by_name, select
from benchmarks.server_process import ServerFailed, failure_text
from benchmarks.suite_report import markdown

FLOORS = ("floor-epoll", "floor-io_uring")
QUICK = {"rounds": 3, "seconds": 0.3, "warmup": 0.1, "micro_seconds": 0.1}
FULL = {"rounds": 3, "seconds": 3.0, "warmup": 0.5, "micro_seconds": 0.5}


@dataclass(frozen=True)
class Settings:
    """What a run measures and how; kept in its file, so that --resume goes on alike."""

    rows: list[str]
    loops: list[str]
    rounds: int
    seconds: float
    warmup: float
    micro_seconds: float
    cpus: list[int]
    realtime: bool

    def loops_of(self, row: Row) -> list[str]:
        """The loops of a row; the floors are not among those that the user named."""
        extra = [name for name in row.loops if loops.BASELINE in self.loops]
        return [*self.loops, *extra, *(FLOORS if row.floors else ())]

    def rounds_of(self, row: Row) -> int:
        """A count of system calls is the same in each round."""
        return 1 if row.metric == "syscalls" else self.rounds

    def run_options(self) -> options.RunOptions:
        """The same as the commands of single rows are told it."""
        return options.RunOptions(
            loops=[], rounds=self.rounds, seconds=self.seconds, warmup=self.warmup,
            cpus=tuple(self.cpus), realtime=self.realtime, python=sys.executable, json=None,
        )  # fmt: skip

    def measurements(self, row: Row) -> int:
        """How many a row takes."""
        return len(self.loops_of(row)) * self.rounds_of(row)


@dataclass
class Run:
    """A run as its file has it."""

    settings: Settings
    machine: dict
    python: str = sys.version.split()[0]
    packages: dict[str, str] = field(default_factory=dict)
    loops: dict[str, dict] = field(default_factory=dict)
    unavailable: dict[str, str] = field(default_factory=dict)
    outcomes: list[dict] = field(default_factory=list)

    @classmethod
    def load(cls, path: Path) -> "Run":
        """Read a file that a run has written. Raises ValueError for any other."""
        try:
            report = json.loads(path.read_text())
            report["settings"] = Settings(**report["settings"])
            return cls(**report)
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is no file of `table`: {error!r}") from None

    def save(self, path: Path) -> None:
        """Write the file; a reader never sees half of it."""
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(asdict(self), indent=1) + "\n")
        partial.replace(path)

    def again(self, names: list[str]) -> None:
        """Let these rows be measured, whether they have been or not."""
        wanted = {*self.settings.rows, *names}
        ordered = [row.name for row in ROWS if row.name in wanted]
        self.settings = replace(self.settings, rows=ordered)
        self.outcomes = [outcome for outcome in self.outcomes if outcome["name"] not in names]

    def missing(self) -> list[Row]:
        """The rows that are still to be measured: those that ended in an error are again."""
        known = by_name()
        done = {row["name"] for row in self.outcomes if row["error"] is None}
        return [known[name] for name in self.settings.rows if name in known and name not in done]


def measure_row(bench: RowBench, run: Run, row: Row, bar: ProgressBar) -> dict:
    """All rounds of one row, as they go into the file."""
    samples: list[dict] = []
    failures = {}
    names = [name for name in run.settings.loops_of(row) if name not in run.unavailable]
    rounds = run.settings.rounds_of(row)
    bar.advance(row.name, by=run.settings.measurements(row) - len(names) * rounds)
    for number in range(rounds):
        for name in summary.round_order(names, number):
            bar.show(row.name, f"{name}, round {number + 1}/{rounds}")
            if name not in failures:
                try:
                    values = bench.measure(row, name)
                    samples.append({"loop": name, "round": number, **asdict(values)})
                except (ServerFailed, ProcessFailed) as error:
                    failures[name] = failure_text(error)
            bar.advance(row.name, f"{name}, round {number + 1}/{rounds}")
    kept = [sample for sample in samples if sample["loop"] not in failures]
    return {"name": row.name, "error": None, "samples": kept, "failures": failures}


def measure_rows(bench: RowBench, run: Run, path: Path) -> None:
    """All rows that are missing; one that fails as a whole names its error."""
    missing = run.missing()
    bar = ProgressBar(sum(run.settings.measurements(row) for row in missing))
    for row in missing:
        try:
            outcome = measure_row(bench, run, row, bar)
        except Exception as error:
            # Whatever it is: the rows after it are worth having, and the exit status tells.
            bar.clear()
            traceback.print_exc()
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            outcome = {"name": row.name, "error": reason, "samples": [], "failures": {}}
        bar.clear()
        for name, text in outcome["failures"].items():
            if not text.startswith("absent"):
                progress(f"{row.name}  {name}  {text}")
        run.outcomes = [done for done in run.outcomes if done["name"] != row.name] + [outcome]
        run.save(path)
    bar.clear()


def probe(bench: RowBench, run: Run) -> None:
    """Ask each loop what it is; one that doesn't start is left out of all rows."""
    extra = {name for row in run.missing() for name in run.settings.loops_of(row)}
    for name in dict.fromkeys([*run.settings.loops, *sorted(extra - set(FLOORS))]):
        run.unavailable.pop(name, None)
        try:
            run.loops[name] = bench.describe(name)
        except ServerFailed as error:
            run.unavailable[name] = failure_text(error)
            progress(f"{name}  {run.unavailable[name]}")


def parse_rows(text: str) -> list[Row]:
    """An argparse type: rows by names or patterns."""
    try:
        return select(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks table",
        description="All rows of benchmarks/rows.py on all loops, as JSON and Markdown.",
    )
    names = ",".join([*loops.DEFAULT_NAMES, *loops.installed_peers()])
    folder = (ROOT / "build" / "benchmarks").relative_to(ROOT)
    add = parser.add_argument
    add(
        "--rows", type=parse_rows,
        help="names or patterns (default: all); with --resume, what to measure again",
    )  # fmt: skip
    add("--list", action="store_true", help="print the names of the rows, and measure nothing")
    add(
        "--loops", type=options.comma_list(loops.parse_name), default=names,
        help=f"beside the floors, where they apply (default: {names})",
    )  # fmt: skip
    add("--rounds", type=options.parse_rounds, help="paired rounds (default: 3)")
    add("--seconds", type=options.seconds_from(0.1), help="measured window (default: 3)")
    add("--quick", action="store_true", help="short windows: six to eight minutes")
    add(
        "--cpus", type=options.parse_cpus, default="{},{}".format(*default_cpus()),
        help="CPU of the server, CPU of the client",
    )  # fmt: skip
    add("--rt", action="store_true", help="SCHED_FIFO for servers and clients (as root)")
    add(
        "--json", type=Path, metavar="FILE", default=folder / "table.json",
        help="where the results go; the Markdown goes beside it (default: %(default)s)",
    )  # fmt: skip
    add("--resume", type=Path, metavar="FILE", help="go on with a run that ended early")
    return parser


def settings_of(given: argparse.Namespace) -> Settings:
    """The settings that the command line asks for."""
    lengths = QUICK if given.quick else FULL
    return Settings(
        rows=[row.name for row in given.rows or ROWS],
        loops=[spec.name for spec in given.loops],
        rounds=given.rounds or lengths["rounds"],
        seconds=given.seconds or lengths["seconds"],
        warmup=lengths["warmup"],
        micro_seconds=min(given.seconds or lengths["micro_seconds"], lengths["micro_seconds"]),
        cpus=list(given.cpus),
        realtime=given.rt,
    )


def packages() -> dict[str, str]:
    """Versions of the packages that applications are made of."""
    names = {name for needed in http_app.PACKAGES.values() for name in needed}
    installed = sorted(name for name in names if importlib.util.find_spec(name))
    return {name: importlib.metadata.version(name) for name in installed}


def start(parser: argparse.ArgumentParser, given: argparse.Namespace) -> tuple[Run, Path]:
    """The run that the command line asks for, new or resumed, and its file."""
    if given.rt and os.geteuid() != 0:
        parser.error("--rt needs root: SCHED_FIFO takes CAP_SYS_NICE")
    if given.resume is None:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        return Run(settings_of(given), machine.describe(), packages=packages()), given.json
    try:
        run = Run.load(given.resume)
    except (OSError, ValueError) as error:
        parser.error(f"--resume: {error}")
    run.again([row.name for row in given.rows or ()])
    return run, given.resume


def failed(outcome: dict) -> bool:
    """Whether a row went wrong, on a loop that has no excuse: peers lack what they lack."""
    texts = [outcome["failures"].get(name, "absent") for name in loops.DEFAULT_NAMES]
    return bool(outcome["error"]) or any(text.startswith("failed") for text in texts)


def main(arguments: list[str]) -> int:
    """The `table` command; returns the exit status: 1 when a row failed."""
    parser = build_parser()
    given = parser.parse_args(arguments)
    if given.list:
        print("\n".join(f"{row.name:28} {row.title}" for row in given.rows or ROWS))
        return 0
    run, path = start(parser, given)
    return run_with_bench(run.settings.run_options(), lambda bench: measure_all(bench, run, path))


def measure_all(bench: Bench, run: Run, path: Path) -> int:
    """Measure what is missing and print the report; returns the exit status."""
    machine.warn_when_busy(run.machine)
    rows = RowBench(bench, run.settings.micro_seconds)
    probe(rows, run)
    measure_rows(rows, run, path)
    text = markdown(asdict(run))
    path.with_suffix(".md").write_text(text + "\n")
    print(text)
    return int(any(failed(outcome) for outcome in run.outcomes))
