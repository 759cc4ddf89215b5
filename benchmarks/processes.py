"""Child processes that are always cleaned up: started pinned, stopped and reaped on every way out.

Used by all measurements; knows nothing about loops.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
"""The checkout: child processes import `benchmarks` and an in-place build from here."""

_LAUNCH = str(Path(__file__).with_name("launch.py"))
_STOP_SECONDS = 5.0


class ProcessFailed(Exception):
    """A child process ended early, was too slow, or said something unexpected."""


@dataclass(frozen=True)
class Placement:
    """Where a process runs: a CPU number or None for any, and SCHED_FIFO or not."""

    cpu: int | None = None
    realtime: bool = False


class ManagedProcess:
    """A child process as a context manager, with lines on stdin and stdout.

    It gets a process group of its own, so that Ctrl-C reaches only the benchmark, which then
    stops its children in order; `launch.py` ties its life to ours.
    """

    def __init__(
        self,
        command: list[str],
        placement: Placement = Placement(),
        environment: dict[str, str] | None = None,
        stderr_to_stdout: bool = False,
    ) -> None:
        self._name = Path(command[0]).name
        self._received = b""
        self._errors = None if stderr_to_stdout else tempfile.TemporaryFile()
        cpu = "any" if placement.cpu is None else str(placement.cpu)
        policy = "rt" if placement.realtime else "normal"
        # -I -S: the launcher needs no site packages, and starts in half the time without them.
        launcher = [sys.executable, "-I", "-S", _LAUNCH, str(os.getpid()), cpu, policy]
        self._popen = subprocess.Popen(
            [*launcher, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if stderr_to_stdout else self._errors,
            cwd=ROOT,
            env=child_environment(environment or {}),
            process_group=0,
        )
        assert self._popen.stdin is not None and self._popen.stdout is not None
        self._stdin, self._stdout = self._popen.stdin, self._popen.stdout

    @property
    def pid(self) -> int:
        """The process id; the launcher's exec keeps it."""
        return self._popen.pid

    def __enter__(self) -> "ManagedProcess":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End the process and reap it; SIGKILL when it ignores SIGTERM. May be called twice."""
        try:
            if self._popen.poll() is None:
                self._popen.terminate()
                self._popen.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            pass
        finally:
            # Reached on Ctrl-C during the wait as well: a killed process needs no more patience.
            if self._popen.returncode is None:
                self._popen.kill()
                self._popen.wait()
            self._stdout.close()
            self.close_stdin()
            if self._errors is not None:
                self._errors.close()

    def interrupt(self, timeout: float) -> None:
        """Send SIGINT and wait for the end. Raises ProcessFailed after `timeout` seconds."""
        self._popen.send_signal(signal.SIGINT)
        try:
            self._popen.wait(timeout)
        except subprocess.TimeoutExpired:
            raise ProcessFailed(f"{self._name} did not end within {timeout:.0f} s") from None

    def send_line(self, line: str) -> None:
        """Write a line to stdin; a process that has gone is noticed at the next read."""
        try:
            self._stdin.write(line.encode() + b"\n")
            self._stdin.flush()
        except BrokenPipeError:
            pass

    def close_stdin(self) -> None:
        """End the process's input."""
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()

    def read_line(self, timeout: float) -> str:
        """The next line of stdout. Raises ProcessFailed at the end or after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while b"\n" not in self._received:
            if not self._read_some(deadline):
                raise ProcessFailed(self.ending())
        line, _, self._received = self._received.partition(b"\n")
        return line.decode(errors="replace")

    def read_all(self, timeout: float) -> str:
        """All of stdout up to its end. Raises ProcessFailed on a non-zero exit status."""
        deadline = time.monotonic() + timeout
        while self._read_some(deadline):
            pass
        if self._popen.wait(_STOP_SECONDS) != 0:
            raise ProcessFailed(self.ending())
        return self._received.decode(errors="replace")

    def has_ended(self, within: float) -> bool:
        """Whether the process has ended by itself, or does so within some seconds."""
        try:
            self._popen.wait(within)
        except subprocess.TimeoutExpired:
            return False
        return True

    def ending(self) -> str:
        """Why the process ended: its last line on stderr, or its exit status."""
        try:
            status = self._popen.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            return f"{self._name} closed its output"
        text = self._received
        if self._errors is not None:
            self._errors.seek(0)
            text = self._errors.read()
        lines = text.decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"{self._name} ended with status {status}"

    def _read_some(self, deadline: float) -> bool:
        """Take what stdout has; False at its end."""
        left = deadline - time.monotonic()
        stdout = self._stdout.fileno()
        if left <= 0 or not select.select([stdout], [], [], left)[0]:
            raise ProcessFailed(f"no answer from {self._name} in time")
        data = os.read(stdout, 65536)
        self._received += data
        return bool(data)


def child_environment(extra: dict[str, str]) -> dict[str, str]:
    """Our environment with the checkout first on Python's path, and `extra`."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, **extra}


def default_cpus() -> tuple[int, int]:
    """CPUs of the server and of the client: the first two we may use; the same if only one."""
    allowed = sorted(os.sched_getaffinity(0))
    return allowed[0], allowed[min(1, len(allowed) - 1)]
