"""One measurement of a micro benchmark: a fresh process, a case, a result."""

import json
import sys
from dataclasses import dataclass, field
from statistics import median

from benchmarks.loops import LoopSpec
from benchmarks.processes import ManagedProcess, Placement, ProcessFailed
from benchmarks.server_process import ServerFailed

_GRACE_SECONDS = 20.0
"""Starting, and calibrating where one repeat takes much longer than the window."""


class CaseFailed(ServerFailed):
    """A loop didn't run a case; `absent` says that it isn't installed."""


@dataclass(frozen=True)
class MicroResult:
    """The window of one process: `operations` in each slice, and the times of the slices."""

    operations: int
    seconds: list[float]
    cpu_seconds: list[float]
    info: dict = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """Operations per second in the median slice."""
        return self.operations / median(self.seconds)

    @property
    def cpu_us(self) -> float:
        """CPU time per operation in the median slice, in microseconds."""
        return median(self.cpu_seconds) / self.operations * 1e6


@dataclass(frozen=True)
class MicroBench:
    """What every measurement of a run shares; `seconds` is the window."""

    seconds: float
    placement: Placement
    python: str = sys.executable

    def measure(self, case: str, spec: LoopSpec) -> MicroResult:
        """Run a case on a loop in a fresh process. Raises CaseFailed."""
        config = json.dumps({"loop": spec.name, "case": case, "seconds": self.seconds})
        command = [self.python, "-m", "benchmarks.micro_process", config]
        with ManagedProcess(command, self.placement, spec.environment()) as process:
            try:
                line = process.read_line(self.seconds + _GRACE_SECONDS)
                result = json.loads(line)
            except (ProcessFailed, ValueError) as error:
                raise CaseFailed(str(error)) from error
        if "failed" in result:
            raise CaseFailed(result["failed"], result["absent"])
        return MicroResult(**result)
