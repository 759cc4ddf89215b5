"""`python -m benchmarks micro`: what a loop costs without network, one operation at a time."""

import argparse
import fnmatch
import json
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks import loops, machine, options, pairing, summary, table
from benchmarks.micro_cases import CASES
from benchmarks.micro_measure import MicroBench, MicroResult
from benchmarks.processes import Placement, default_cpus
from benchmarks.progress import progress
from benchmarks.rounds import Outcome, exit_status, run_rounds

HEADERS = ["loop", "ops/s", "CPU ns/op", "ops/s ratio", "CPU ratio", "spread"]


@dataclass
class Case:
    """What was found for one case."""

    name: str
    outcome: Outcome

    def values(self, loop: str, of: str) -> dict[int, float]:
        """A figure of a loop by round."""
        own = [sample for sample in self.outcome.samples if sample.loop == loop]
        return {sample.round: getattr(sample.result, of) for sample in own}

    def ratios(self, loop: str) -> tuple[float | None, float | None]:
        """Of the rate and of the CPU time per operation, to the baseline; above 1 is better."""
        found = (
            pairing.paired(self.values(loop, "rate"), self.values(loops.BASELINE, "rate")),
            pairing.paired(self.values(loops.BASELINE, "cpu_us"), self.values(loop, "cpu_us")),
        )
        return tuple(pair and pair.ratio for pair in found)

    def line(self, loop: str) -> list[str]:
        """The row of a loop in the table of the case."""
        if loop in self.outcome.failures:
            return [loop, self.outcome.failures[loop]]
        rates = list(self.values(loop, "rate").values())
        return [
            loop,
            f"{median(rates):,.0f}",
            f"{median(self.values(loop, 'cpu_us').values()) * 1e3:,.0f}",
            *map(summary.ratio_text, self.ratios(loop)),
            f"{pairing.spread(rates):.1%}",
        ]

    def as_json(self) -> dict:
        """For the JSON report: every slice of every process."""
        return {"case": self.name, **self.outcome.as_json()}


def measure_case(bench: MicroBench, case: str, specs: list[loops.LoopSpec], rounds: int) -> Case:
    """All rounds of one case."""
    by_name = {spec.name: spec for spec in specs}

    def text(result: MicroResult) -> str:
        return f"{result.rate:,.0f} ops/s  {result.cpu_us * 1e3:,.0f} ns CPU"

    def measure(name: str) -> MicroResult:
        return bench.measure(case, by_name[name])

    return Case(case, run_rounds(list(by_name), rounds, measure, text))


def parse_cases(text: str) -> list[str]:
    """An argparse type: names of cases or patterns, separated by commas."""
    names: dict[str, None] = {}
    for word in text.split(","):
        found = fnmatch.filter(CASES, word.strip())
        if not found:
            raise argparse.ArgumentTypeError(f"{word!r} is none of {', '.join(CASES)}")
        names |= dict.fromkeys(found)
    return list(names)


def parse_cpu(text: str) -> int:
    """An argparse type: a CPU that this process may use."""
    allowed = sorted(os.sched_getaffinity(0))
    if not text.isdecimal() or int(text) not in allowed:
        listed = ",".join(map(str, allowed))
        raise argparse.ArgumentTypeError(f"{text!r}: expected one of {listed}")
    return int(text)


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks micro",
        description="Operations of event loops without network, paired in one run. Cases:\n"
        + "\n".join(f"  {case.name:20} {case.what}" for case in CASES.values()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = ",".join([*loops.DEFAULT_NAMES, *loops.installed_peers()])
    add = parser.add_argument
    add("--cases", type=parse_cases, default="*", help="names or patterns (default: all)")
    add(
        "--loops", type=options.comma_list(loops.parse_name), default=names,
        help=f"names, or module:factory for any other loop (default: {names})",
    )  # fmt: skip
    add(
        "--rounds", type=options.parse_rounds, default="3",
        help="paired rounds; 3 or more for a result (default: 3)",
    )  # fmt: skip
    add(
        "--seconds", type=options.seconds_from(0.01), default="0.5",
        help="measured window of each loop in each round (default: 0.5)",
    )  # fmt: skip
    cpu = str(default_cpus()[0])
    add("--cpu", type=parse_cpu, default=cpu, help=f"where all runs (default: {cpu})")
    add("--rt", action="store_true", help="SCHED_FIFO (as root)")
    add("--python", default=sys.executable, help="interpreter of the measured processes")
    add("--json", type=Path, metavar="FILE", help="write results and samples there as well")
    return parser


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """Parse and check; an impossible request ends the program with status 2 and its reason."""
    parser = build_parser()
    given = parser.parse_args(arguments)
    if given.rt and os.geteuid() != 0:
        parser.error("--rt needs root: SCHED_FIFO takes CAP_SYS_NICE")
    if shutil.which(given.python) is None:
        parser.error(f"--python: no interpreter {given.python!r}")
    given.python = os.path.abspath(shutil.which(given.python))
    options.check_json(parser, given.json)
    return given


def overview(cases: list[Case], names: list[str]) -> str:
    """CPU ratios of all cases in one table."""
    lines = []
    for case in cases:
        cells = [case.ratios(name)[1] for name in names]
        lines.append([case.name, *map(summary.ratio_text, cells)])
    return f"CPU ratio\n{table.render(['case', *names], lines)}"


def main(arguments: list[str]) -> int:
    """The `micro` command; returns the exit status: 1 when a loop failed that is installed."""
    given = parse_arguments(arguments)
    host = machine.describe()
    machine.warn_when_busy(host)
    print(machine.headline(host))
    print(
        f"all on CPU {given.cpu}, {given.seconds:g} s measured in a fresh process each, "
        f"{given.rounds} paired rounds, ratios to {loops.BASELINE} (above 1 is better)\n"
    )
    bench = MicroBench(given.seconds, Placement(given.cpu, given.rt), given.python)
    names = [spec.name for spec in given.loops]
    cases: list[Case] = []
    for number, name in enumerate(given.cases):
        progress(f"case {number + 1}/{len(given.cases)}: {name}")
        case = measure_case(bench, name, given.loops, given.rounds)
        cases.append(case)
        lines = [case.line(loop) for loop in names]
        print(f"{name}: {CASES[name].what}\n{table.render(HEADERS, lines)}\n", flush=True)
        if given.json is not None:  # after each case: an interrupted run keeps what it has
            report = {"machine": host, "cases": [each.as_json() for each in cases]}
            given.json.write_text(json.dumps(report, indent=2) + "\n")
    print(overview(cases, names))
    return exit_status([case.as_json() for case in cases])
