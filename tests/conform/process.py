"""One test file in processes of its own: what passed, failed, hung and crashed.

A test without progress for `limit` seconds has hung: the process is told to print its stacks
(SIGABRT, by faulthandler), then killed with all its children. When a process dies, the test that
ran is charged with the crash. Either way a new process goes on with the rest of the file.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import tempfile
import threading
import time

BETWEEN = 120.0         # seconds for imports, collecting, fixtures of modules
AT_EXIT = 20.0          # seconds from the last test to the end of the process
stopping = threading.Event()    # set: every process is killed and no other is started


@dataclasses.dataclass
class Result:
    outcome: str        # passed, failed, skipped, hang, crash
    message: str = ""

    @property
    def bad(self):
        return self.outcome in ("failed", "hang", "crash")


class TestFile:
    """Runs `command` until it has told of the end of the file; the results are in `results`."""

    __test__ = False    # for pytest: not a test itself

    def __init__(self, name, command, *, folder, environ, log, limit, deaths, only=None):
        self.name, self.command, self.folder = name, command, folder
        self.environ, self.log, self.limit = environ, pathlib.Path(log), limit
        self.deaths, self.only = deaths, only
        self.results = {}
        self.loops = 0          # loops under test that were made

    def run(self):
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.log.write_bytes(b"")
        for _ in range(self.deaths):
            with tempfile.TemporaryDirectory(prefix="conform-") as scratch:
                if self._run_process(pathlib.Path(scratch)) or stopping.is_set():
                    return self
        self._charge("<rest>", "crash", f"given up after {self.deaths} processes died")
        return self

    def _charge(self, test, outcome, message):
        if test.startswith("<"):
            test = f"{self.name}::{test}"
        self.results[test] = Result(outcome, f"{message}; see {self.log}")

    def _run_process(self, scratch):
        """True when the file needs no other process."""
        events = scratch / "events"
        events.touch()
        (scratch / "done").write_text(json.dumps(sorted(self.results)))
        environ = {**self.environ, "CONFORM_EVENTS": str(events), "TMPDIR": str(scratch),
                   "CONFORM_DONE": str(scratch / "done")}
        if self.only is not None:
            (scratch / "only").write_text(json.dumps(sorted(self.only)))
            environ["CONFORM_ONLY"] = str(scratch / "only")
        with self.log.open("ab") as output, subprocess.Popen(
                self.command, cwd=self.folder, env=environ, stdin=subprocess.DEVNULL,
                stdout=output, stderr=subprocess.STDOUT, start_new_session=True) as process:
            watch = _Watch(self, process)
            try:
                with events.open() as stream:
                    watch.follow(stream)
            finally:
                _signal_group(process, signal.SIGKILL)      # children that were left behind
        return watch.verdict()


class _Watch:
    """The events of one process, and the time since the last of them."""

    def __init__(self, file, process):
        self.file, self.process = file, process
        self.running = None         # the test that has started and not finished
        self.seen = self.loops = 0
        self.ended = self.hung = False

    def follow(self, stream):
        rest, last = "", time.monotonic()
        while True:
            exited = self.process.poll() is not None    # asked before the last events are read
            text = stream.read()
            if text:
                last = time.monotonic()
                *lines, rest = (rest + text).split("\n")
                for line in lines:
                    self.take(json.loads(line))
            elif exited:
                return
            elif stopping.is_set() or time.monotonic() - last > self.patience():
                self.hung = True
                self.kill()
                return
            else:
                time.sleep(0.02)

    def take(self, event):
        self.file.loops += event["loops"] - self.loops
        self.loops = event["loops"]
        if event["event"] == "start":
            self.running = event["test"]
        elif event["event"] == "result":
            self.file.results[event["test"]] = Result(event["outcome"], event["message"])
            self.running = None
            self.seen += 1
        elif event["event"] == "end":
            self.ended = True

    def patience(self):
        if self.ended:
            return AT_EXIT
        return self.file.limit if self.running else max(self.file.limit, BETWEEN)

    def kill(self):
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGABRT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        _signal_group(self.process, signal.SIGKILL)

    def verdict(self):
        """Charges a death to the test that ran; True when the file needs no other process."""
        status = self.process.returncode
        if self.hung:
            outcome, message = "hang", f"no progress for {self.patience():.0f} s"
        else:
            outcome = "crash"
            message = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        if self.ended:
            if self.hung or status < 0:
                self.file._charge("<exit>", outcome, message)
            return True
        self.file._charge(self.running or "<file>", outcome, message)
        # Without a test that ran or had run another process would do the same again.
        return self.running is None and not self.seen


def _signal_group(process, number):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
