"""The options of `python -m benchmarks echo`: parsed, checked, explained."""

import argparse
import os
import resource
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import certificate, loops, syscalls
from benchmarks.echo_servers import MODES, TRANSPORTS
from benchmarks.processes import default_cpus

_SPARE_DESCRIPTORS = 64
"""What a server needs beside its connections: the interpreter, the loop, a ring."""


@dataclass(frozen=True)
class Cell:
    """One cell of the matrix: `size` is bytes per message."""

    mode: str
    transport: str
    size: int
    connections: int

    def __str__(self) -> str:
        size = f"{self.size // 1024} KiB" if self.size % 1024 == 0 else f"{self.size} bytes"
        noun = "socket" if self.mode == "udp" else "connection"
        noun = noun if self.connections == 1 else f"{noun}s"
        transport = "" if self.mode == "udp" else f" {self.transport},"
        return f"echo {self.mode},{transport} {size}, {self.connections} {noun}"


@dataclass(frozen=True)
class EchoOptions:
    """Everything the command line says; `cpus` is (server, client), times are in seconds."""

    modes: list[str]
    transports: list[str]
    sizes: list[int]
    connections: list[int]
    loops: list[loops.LoopSpec]
    rounds: int
    seconds: float
    warmup: float
    cpus: tuple[int, int]
    realtime: bool
    syscalls: bool
    python: str
    json: Path | None

    def as_json(self) -> dict:
        """The options for the JSON report."""
        return {**asdict(self), "json": None if self.json is None else str(self.json)}


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


def build_parser() -> argparse.ArgumentParser:
    """The command line; a list with commas in the first four options makes a matrix."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks echo",
        description="Echo servers on several event loops, paired in one run.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--mode", type=comma_list(one_of(MODES)), default="protocol", help=f"of {','.join(MODES)}")
    add("--transport", type=comma_list(one_of(TRANSPORTS)), default="tcp", help="of tcp,unix")
    add("--size", type=comma_list(parse_size), default="1k", help="bytes per message; k = KiB")
    add("--connections", type=comma_list(parse_count), default="64", help="clients at once")
    add(
        "--loops", type=comma_list(loops.parse_name), default=",".join(loops.DEFAULT_NAMES),
        help="names, or module:factory for any other loop",
    )  # fmt: skip
    add("--rounds", type=parse_rounds, default="3", help="paired rounds; 3 or more for a result")
    add("--seconds", type=seconds_from(0.1), default="2", help="measured window")
    add("--warmup", type=seconds_from(0), default="0.5", help="before each window")
    add(
        "--cpus", type=parse_cpus, default="{},{}".format(*default_cpus()),
        help="CPU of the server, CPU of the client",
    )  # fmt: skip
    add("--rt", action="store_true", help="SCHED_FIFO for server and client (as root)")
    add("--syscalls", action="store_true", help="count system calls with strace, not speed")
    add("--python", default=sys.executable, help="interpreter of the servers")
    add("--json", type=Path, metavar="FILE", help="write the results there as well")
    return parser


def parse_rounds(text: str) -> int:
    """An argparse type: the number of rounds."""
    try:
        return parse_count(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def parse_arguments(arguments: list[str]) -> EchoOptions:
    """Parse and check; an impossible request ends the program with status 2 and its reason."""
    parser = build_parser()
    given = parser.parse_args(arguments)
    check(parser, given)
    return EchoOptions(
        modes=given.mode,
        transports=given.transport,
        sizes=given.size,
        connections=given.connections,
        loops=given.loops,
        rounds=given.rounds,
        seconds=given.seconds,
        warmup=given.warmup,
        cpus=given.cpus,
        realtime=given.rt,
        syscalls=given.syscalls,
        python=os.path.abspath(shutil.which(given.python)),
        json=given.json,
    )


def check(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """Refuse what can't work, before anything has been measured."""
    if given.rt and os.geteuid() != 0:
        parser.error("--rt needs root: SCHED_FIFO takes CAP_SYS_NICE")
    if given.syscalls and (reason := syscalls.missing_reason()):
        parser.error(f"--syscalls needs strace, which was not found: {reason}")
    if "tls" in given.mode and (reason := certificate.missing_reason()):
        parser.error(f"--mode tls needs a certificate, which was not made: {reason}")
    if "udp" in given.mode and given.transport != ["tcp"]:
        parser.error("--mode udp has no --transport")
    if "udp" in given.mode and not 8 <= min(given.size) <= max(given.size) <= 65507:
        parser.error("--mode udp: a datagram has --size 8 to 65507, its number included")
    if shutil.which(given.python) is None:
        parser.error(f"--python: no interpreter {given.python!r}")
    if given.json is not None and not given.json.resolve().parent.is_dir():
        parser.error(f"--json: no folder {given.json.resolve().parent}")
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    most = max(given.connections) + _SPARE_DESCRIPTORS
    if limit != resource.RLIM_INFINITY and most > limit:
        parser.error(f"--connections: {most} descriptors needed, the limit is {limit} (ulimit -n)")
