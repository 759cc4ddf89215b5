"""The machine a result belongs to: a figure without it can't be compared with anything."""

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.processes import ROOT

_BUSY_LOAD = 0.5
"""One-minute load average above which other work is likely to show in the results."""


def describe() -> dict:
    """Date, CPU, kernel, load average of the last minute, and the commit of this checkout."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": _cpu_model(),
        "cpus": os.cpu_count(),
        "kernel": f"{platform.system()} {platform.release()}",
        "load_average": os.getloadavg()[0],
        "commit": _commit(),
    }


def headline(machine: dict) -> str:
    """One line for the top of a report."""
    commit = f", commit {machine['commit']}" if machine["commit"] else ""
    return (
        f"{machine['cpu']} x{machine['cpus']}, {machine['kernel']}, "
        f"load {machine['load_average']:.2f}{commit}, {machine['date']}"
    )


def warn_when_busy(machine: dict) -> None:
    """Say on stderr that something else runs: results from a busy machine mislead."""
    if machine["load_average"] > _BUSY_LOAD:
        print(
            f"warning: load average {machine['load_average']:.2f} before the start: "
            "whatever else runs disturbs the measurement",
            file=sys.stderr,
        )


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def _commit() -> str | None:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    try:
        outcome = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return outcome.stdout.strip() or None
