"""What the kernel tells of a running process: /proc/PID/status."""

from dataclasses import dataclass
from pathlib import Path

from benchmarks.processes import ProcessFailed


@dataclass(frozen=True)
class Status:
    """Resident memory now and at most, in KiB, and the context switches of all threads.

    A voluntary switch is a thread that went to sleep: it had been awake. An involuntary one took
    the CPU from a thread that ran.
    """

    rss_kib: int
    peak_rss_kib: int
    voluntary_switches: int
    involuntary_switches: int


def read_status(pid: int) -> Status:
    """The status of `pid`. Raises ProcessFailed when there is no such process."""
    try:
        process = parse_status(Path(f"/proc/{pid}/status").read_text())
        threads = [
            parse_status(path.read_text()) for path in Path(f"/proc/{pid}/task").glob("*/status")
        ]
    except OSError as error:
        raise ProcessFailed(f"the server has ended: {error}") from None
    if "VmRSS" not in process:
        raise ProcessFailed("the server has ended: a zombie has no memory")
    return Status(
        rss_kib=process["VmRSS"],
        peak_rss_kib=process["VmHWM"],
        voluntary_switches=sum(thread["voluntary_ctxt_switches"] for thread in threads),
        involuntary_switches=sum(thread["nonvoluntary_ctxt_switches"] for thread in threads),
    )


def parse_status(text: str) -> dict[str, int]:
    """The lines that are one number, with or without a unit, by name."""
    numbers = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if words and words[0].isdecimal() and len(words) <= 2:
            numbers[name] = int(words[0])
    return numbers
