"""System calls of a running process, counted by strace over a window.

strace stops the traced process twice per call. A server under it is slower, so a loop that
batches finds more to batch: the count of such a loop is a lower limit. A loop with a fixed
number of calls per message isn't affected.
"""

import functools
import os
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.processes import ManagedProcess, ProcessFailed

_ATTACH_SECONDS = 10.0


@dataclass
class SyscallWindow:
    """The calls seen between entering and leaving `traced()`, by name; empty until then."""

    calls: Counter = field(default_factory=Counter)

    def per_message(self, messages: int) -> float:
        """System calls per message, all names together."""
        return self.calls.total() / messages

    def top(self, messages: int, count: int = 5) -> list[tuple[str, float]]:
        """The most frequent calls as (name, calls per message)."""
        return [(name, calls / messages) for name, calls in self.calls.most_common(count)]


@functools.cache
def missing_reason() -> str | None:
    """Why nothing can be counted here; None when strace is installed and may trace."""
    if not shutil.which("strace"):
        return "install strace"
    command = ["strace", "-f", "-o", os.devnull, "true"]
    try:
        tried = subprocess.run(command, capture_output=True, text=True, timeout=_ATTACH_SECONDS)
    except subprocess.TimeoutExpired:
        return "strace hangs here"
    return f"strace cannot trace here: {tried.stderr.strip()}" if tried.returncode else None


def parse_table(text: str) -> Counter:
    """Calls by name from the table that `strace -c` writes.

    Its columns are % time, seconds, usecs/call, calls, errors (often blank) and syscall; strace
    writes no table at all when it saw no call.
    """
    calls: Counter[str] = Counter()
    for line in text.splitlines():
        words = line.split()
        if len(words) in (5, 6) and words[3].isdecimal() and words[-1] != "total":
            calls[words[-1]] += int(words[3])
    return calls


@contextmanager
def traced(pid: int, timeout: float = _ATTACH_SECONDS) -> Iterator[SyscallWindow]:
    """Count the system calls of all threads of `pid` while inside.

    `timeout`, in seconds, is for attaching and again for detaching. Raises ProcessFailed when
    strace can't attach: some containers refuse ptrace(2) even for processes of the same user.
    """
    window = SyscallWindow()
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as folder:
        table = Path(folder, "table")
        command = ["strace", "-f", "-c", "-o", str(table), "-p", str(pid)]
        with ManagedProcess(command, stderr_to_stdout=True) as strace:
            line = strace.read_line(timeout)
            if "attached" not in line:
                raise ProcessFailed(line)
            yield window
            strace.interrupt(timeout)  # it detaches, then writes its table
        window.calls.update(parse_table(table.read_text()))
