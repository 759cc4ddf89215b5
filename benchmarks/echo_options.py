"""The options of `python -m benchmarks echo`: parsed, checked, explained."""

import argparse
from dataclasses import dataclass

from benchmarks import certificate, syscalls
from benchmarks.echo_servers import MODES, TRANSPORTS
from benchmarks.options import (
    RunOptions,
    add_run_options,
    check_descriptors,
    comma_list,
    make_parser,
    one_of,
    parse_count,
    parse_size,
    run_options,
)


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
class EchoOptions(RunOptions):
    """What the echo command is told beside what all are."""

    modes: list[str]
    transports: list[str]
    sizes: list[int]
    connections: list[int]
    syscalls: bool


def build_parser() -> argparse.ArgumentParser:
    """The command line; a list with commas in the first four options makes a matrix."""
    parser = make_parser("echo", "Echo servers on several event loops, paired in one run.")
    add = parser.add_argument
    add("--mode", type=comma_list(one_of(MODES)), default="protocol", help=f"of {','.join(MODES)}")
    add("--transport", type=comma_list(one_of(TRANSPORTS)), default="tcp", help="of tcp,unix")
    add("--size", type=comma_list(parse_size), default="1k", help="bytes per message; k = KiB")
    add("--connections", type=comma_list(parse_count), default="64", help="clients at once")
    add("--syscalls", action="store_true", help="count system calls with strace, not speed")
    add_run_options(parser)
    return parser


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
        syscalls=given.syscalls,
        **run_options(parser, given),
    )


def check(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """Refuse what can't work, before anything has been measured."""
    if given.syscalls and (reason := syscalls.missing_reason()):
        parser.error(f"--syscalls needs strace: {reason}")
    if "tls" in given.mode and (reason := certificate.missing_reason()):
        parser.error(f"--mode tls needs a certificate, which was not made: {reason}")
    if "udp" in given.mode and given.transport != ["tcp"]:
        parser.error("--mode udp has no --transport")
    if "udp" in given.mode and not 8 <= min(given.size) <= max(given.size) <= 65507:
        parser.error("--mode udp: a datagram has --size 8 to 65507, its number included")
    check_descriptors(parser, given.connections)
