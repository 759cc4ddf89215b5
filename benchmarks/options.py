"""What the commands share on the command line: loops, rounds, windows, CPUs, the report."""

import argparse
import json
import os
import resource
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import loops
from benchmarks.processes import default_cpus

_SPARE_DESCRIPTORS = 64
"""What a server needs beside its connections: the interpreter, the loop, a ring."""


@dataclass(frozen=True)
class RunOptions:
    """What every command is told; `cpus` is (server, client), times are in seconds."""

    loops: list[loops.LoopSpec]
    rounds: int
    seconds: float
    warmup: float
    cpus: tuple[int, int]
    realtime: bool
    python: str
    json: Path | None

    def as_json(self) -> dict:
        """The options for the JSON report."""
        return {**asdict(self), "json": None if self.json is None else str(self.json)}

    def save(self, report: dict) -> None:
        """Write the JSON report, when one was asked for."""
        if self.json is not None:
            text = json.dumps({**report, "options": self.as_json()}, indent=2)
            self.json.write_text(text + "\n")


def comma_list(parse: Callable) -> Callable:
    """An argparse type: values separated by commas, each parsed by `parse`, none twice."""

    def parse_list(text: str) -> list:
        try:
            values = [parse(word.strip()) for word in text.split(",")]
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return list(dict.fromkeys(values))

    return parse_list


def one_of(names: tuple[str, ...]) -> Callable[[str], str]:
    """A parser that takes only `names`."""

    def parse(word: str) -> str:
        if word not in names:
            raise ValueError(f"{word!r} is none of {', '.join(names)}")
        return word

    return parse


def parse_size(word: str) -> int:
    """A message size in bytes, from 1 to 64 MiB; `k` stands for KiB, `m` for MiB."""
    unit = {"k": 1024, "m": 1024**2}.get(word[-1:].lower(), 1)
    digits = word[:-1] if unit > 1 else word
    if not digits.isdecimal() or not 1 <= int(digits) * unit <= 64 * 1024**2:
        raise ValueError(f"{word!r} is no message size: expected 1 to 64m, such as 1024 or 10k")
    return int(digits) * unit


def parse_count(word: str) -> int:
    """A whole number from 1 to 100,000."""
    if not word.isdecimal() or not 1 <= int(word) <= 100_000:
        raise ValueError(f"{word!r} is no number from 1 to 100000")
    return int(word)


def seconds_from(least: float) -> Callable[[str], float]:
    """An argparse type: seconds from `least` to 3600."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not least <= value <= 3600:
            raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds, {least:g} to 3600")
        return value

    return parse


def parse_cpus(text: str) -> tuple[int, int]:
    """`SERVER,CLIENT`, two CPUs that this process may use."""
    words = text.split(",")
    allowed = os.sched_getaffinity(0)
    if len(words) != 2 or not all(w.isdecimal() and int(w) in allowed for w in words):
        listed = ",".join(map(str, sorted(allowed)))
        raise argparse.ArgumentTypeError(f"{text!r}: expected SERVER,CLIENT out of {listed}")
    return int(words[0]), int(words[1])


def parse_rounds(text: str) -> int:
    """An argparse type: the number of rounds."""
    try:
        return parse_count(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def make_parser(command: str, description: str) -> argparse.ArgumentParser:
    """A parser that shows its defaults."""
    return argparse.ArgumentParser(
        prog=f"python -m benchmarks {command}",
        description=description,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )


def add_run_options(
    parser: argparse.ArgumentParser, seconds: str = "2", window: bool = True, rounds: bool = True
) -> None:
    """The options that fill RunOptions; without a window where something else ends a round.

    And without rounds where one tells all.
    """
    add = parser.add_argument
    add(
        "--loops", type=comma_list(loops.parse_name), default=",".join(loops.DEFAULT_NAMES),
        help="names, or module:factory for any other loop",
    )  # fmt: skip
    if rounds:
        add("--rounds", type=parse_rounds, default="3", help="paired; 3 or more for a result")
    if window:
        add("--seconds", type=seconds_from(0.1), default=seconds, help="measured window")
    if window and rounds:
        add("--warmup", type=seconds_from(0), default="0.5", help="before each window")
    add(
        "--cpus", type=parse_cpus, default="{},{}".format(*default_cpus()),
        help="CPU of the server, CPU of the client",
    )  # fmt: skip
    add("--rt", action="store_true", help="SCHED_FIFO for server and client (as root)")
    add("--python", default=sys.executable, help="interpreter of the servers")
    add("--json", type=Path, metavar="FILE", help="write the results there as well")


def run_options(parser: argparse.ArgumentParser, given: argparse.Namespace) -> dict:
    """The arguments of RunOptions; what can't work ends the program with status 2."""
    if given.rt and os.geteuid() != 0:
        parser.error("--rt needs root: SCHED_FIFO takes CAP_SYS_NICE")
    python = shutil.which(given.python)
    if python is None:
        parser.error(f"--python: no interpreter {given.python!r}")
    check_json(parser, given.json)
    return {
        "loops": given.loops,
        "rounds": getattr(given, "rounds", 1),
        "seconds": getattr(given, "seconds", 0.0),
        "warmup": getattr(given, "warmup", 0.0),
        "cpus": given.cpus,
        "realtime": given.rt,
        "python": os.path.abspath(python),
        "json": given.json,
    }


def check_json(parser: argparse.ArgumentParser, path: Path | None) -> None:
    """Refuse a report in a folder that doesn't exist, before anything has been measured."""
    if path is not None and not path.resolve().parent.is_dir():
        parser.error(f"--json: no folder {path.resolve().parent}")


def check_descriptors(parser: argparse.ArgumentParser, connections: list[int]) -> None:
    """Refuse more connections than a process may have descriptors."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    most = max(connections) + _SPARE_DESCRIPTORS
    if limit != resource.RLIM_INFINITY and most > limit:
        parser.error(f"--connections: {most} descriptors needed, the limit is {limit} (ulimit -n)")
