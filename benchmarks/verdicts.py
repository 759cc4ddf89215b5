"""From the file of a run to what is said of each row: ratios, their spread, met or missed.

A loop's ratio in a row is the median of its ratios to uvloop within each round. A target is met for
certain when every round is on its side, and so is a miss: whatever lies between is marked.
"""

from dataclasses import dataclass
from statistics import median

from benchmarks import loops, rows
from benchmarks.loops import BASELINE
from benchmarks.pairing import Paired, paired

OURS, OURS_EPOLL = loops.OURS
FLOOR_PREFIX = "floor-"
_VALUES = {"rate": "rate", "cpu": "cpu_us", "p50": "p50_us", "syscalls": "syscalls"}


@dataclass(frozen=True)
class Verdict:
    """Whether a loop meets its target, whether the rounds agree on it, and which loop is ahead.

    The epoll backend is measured against the baseline alone: io_uring is there to be first.
    """

    target: float
    met: bool
    certain: bool
    behind: str | None

    def __str__(self) -> str:
        word = ("met" if self.met else "missed") + ("" if self.certain else "?")
        return f"{word}, behind {self.behind}" if self.behind else word

    @property
    def lost(self) -> bool:
        """Whether there is something to explain."""
        return not self.met or self.behind is not None


class RowReport:
    """One row of a run; `error` says why there is nothing else."""

    def __init__(self, row: rows.Row, outcome: dict | None) -> None:
        self.row = row
        self.measured = outcome is not None
        outcome = outcome or {"error": "not measured", "failures": {}, "samples": []}
        self.error: str | None = outcome["error"]
        self.failures: dict[str, str] = outcome["failures"]
        self._values: dict[str, dict[int, float]] = {}
        for sample in outcome["samples"]:
            by_round = self._values.setdefault(sample["loop"], {})
            by_round[sample["round"]] = sample[_VALUES[row.metric]]

    @property
    def loops(self) -> list[str]:
        """The loops that were measured."""
        return list(self._values)

    def value(self, loop: str) -> float | None:
        """The median of the metric itself, in its own unit."""
        values = self._values.get(loop)
        return median(values.values()) if values else None

    def ratio(self, loop: str) -> Paired | None:
        """To the baseline; above 1 is better. None without either, and for system calls."""
        if self.row.metric == "syscalls":
            return None
        return paired(self._goodness(loop), self._goodness(BASELINE))

    def best(self, names: list[str]) -> str | None:
        """The one of `names` with the highest ratio."""
        measured = [name for name in names if self.ratio(name)]
        return max(measured, key=lambda name: self.ratio(name).ratio, default=None)

    @property
    def peer(self) -> str | None:
        """The best of the loops of other projects, beside asyncio's and the baseline."""
        own = ("asyncio", BASELINE, OURS, OURS_EPOLL)
        return self.best([n for n in self.loops if n not in own and not n.startswith(FLOOR_PREFIX)])

    @property
    def floor(self) -> str | None:
        """The better of the two C servers."""
        return self.best([name for name in self.loops if name.startswith(FLOOR_PREFIX)])

    def target(self, loop: str) -> float:
        """What `loop` has to reach; a share of the floor where the row says so."""
        if loop == OURS_EPOLL:
            return self.row.epoll_target
        if self.row.floor_share and self.floor:
            return self.row.floor_share * self.ratio(self.floor).ratio
        return self.row.target

    def verdict(self, loop: str) -> Verdict | None:
        """What is said of one of our loops; None when it wasn't measured."""
        target = self.target(loop)
        if self.row.metric == "syscalls":
            calls = self.value(loop)
            return None if calls is None else Verdict(target, calls <= target, True, None)
        own = self.ratio(loop)
        if own is None:
            return None
        met = own.ratio >= target
        rivals = [BASELINE] if loop == OURS_EPOLL else ["asyncio", BASELINE, self.peer]
        behind = self._behind(loop, self.best([name for name in rivals if name]))
        return Verdict(target, met, own.low >= target or own.high < target, behind)

    def _behind(self, loop: str, rival: str | None) -> str | None:
        """The rival's name when it is ahead, with a ? when the rounds don't agree on it."""
        pair = paired(self._goodness(loop), self._goodness(rival)) if rival else None
        if pair is None or pair.ratio >= 1:
            return None
        return f"{rival}?" if pair.high >= 1 else rival

    def _goodness(self, loop: str) -> dict[int, float]:
        values = self._values.get(loop, {})
        if self.row.metric == "rate":
            return values
        return {number: 1 / value for number, value in values.items()}


def report_rows(run: dict) -> list[RowReport]:
    """The rows of a run's file in the order of the registry, with those it has not come to."""
    outcomes = {outcome["name"]: outcome for outcome in run["outcomes"]}
    wanted = set(run["settings"]["rows"])
    return [RowReport(row, outcomes.get(row.name)) for row in rows.ROWS if row.name in wanted]
