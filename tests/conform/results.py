"""Columns: the results of a suite on one loop and Python; and in what two columns differ.

Tests are named SUITE/FILE::CLASS::TEST here, as pytest does below the suite's folder.
"""

import dataclasses
import json
import re

from .process import Result

STEADY = 4      # runs that a test must pass after a failure to be called unsteady


@dataclasses.dataclass
class Column:
    suite: str
    python: str
    loop: str
    key: str = ""           # of what it depends on, but for uringloop itself
    tests: dict[str, Result] = dataclasses.field(default_factory=dict)
    unsteady: dict[str, str] = dataclasses.field(default_factory=dict)
    loops: int = 0          # loops under test that were made
    seconds: float = 0.0
    kept: bool = False      # from an earlier run

    @property
    def title(self):
        return f"{self.suite}-{self.python}-{self.loop}"

    def counts(self):
        """(passed, failed, skipped), hangs and crashes among the failed."""
        outcomes = [result.outcome for result in self.tests.values()]
        passed, skipped = outcomes.count("passed"), outcomes.count("skipped")
        return passed, len(outcomes) - passed - skipped, skipped

    def save(self, folder):
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(dataclasses.asdict(self), indent=1)
        (folder / f"{self.title}.json").write_text(text + "\n")

    @classmethod
    def load(cls, folder, title):
        """The column kept under this title, or None."""
        try:
            fields = json.loads((folder / f"{title}.json").read_text())
        except FileNotFoundError:
            return None
        fields["tests"] = {test: Result(**result) for test, result in fields["tests"].items()}
        return cls(**{**fields, "kept": True})


@dataclasses.dataclass(frozen=True)
class Difference:
    """A test that asyncio passes and uringloop does not; expected: the reason given, or ""."""

    python: str
    loop: str
    test: str
    outcome: str
    message: str
    expected: str = ""


def differences(reference, ours, expectations):
    """What `ours` does worse than the reference column, in the order of the names."""
    found = []
    for test in sorted({*reference.tests, *ours.tests}):
        if test in ours.unsteady:
            continue
        verdict = _worse(reference.tests.get(test), ours.tests.get(test))
        if verdict:
            # Nothing excuses a hang or a crash.
            excused = verdict.outcome not in ("hang", "crash")
            reason = expectations.reason(test, ours.python, ours.loop) if excused else ""
            found.append(Difference(ours.python, ours.loop, test, verdict.outcome,
                                    verdict.message, reason))
    if ours.tests and not ours.loops:
        found.append(Difference(ours.python, ours.loop, f"{ours.suite}/<loops>", "failed",
                                "no loop was made: the suite did not run on uringloop"))
    return found


def _worse(theirs, mine):
    """The Result that makes the difference, or None."""
    if mine is None:
        return Result("not run") if theirs.outcome == "passed" else None
    if mine.outcome in ("hang", "crash"):
        return None if theirs and theirs.outcome in ("hang", "crash") else mine
    if mine.outcome == "failed":
        return None if theirs and theirs.bad else mine
    if mine.outcome == "skipped" and theirs and theirs.outcome == "passed":
        return mine
    return None


class Expectations:
    """The lists of expected differences: lines of `PATTERN [CONDITION...] # REASON`.

    In a pattern, * stands for anything. Conditions are Pythons (3.12) or backends (epoll); without
    one of a kind the line is for all of that kind.
    """

    def __init__(self, text):
        self.lines = []
        self.used = set()
        for line in text.splitlines():
            rule, _, reason = line.partition("#")
            if not rule.strip():
                continue
            if not reason.strip():
                raise ValueError(f"an expected difference without a reason: {line}")
            pattern, *conditions = rule.split()
            expression = ".*".join(re.escape(part) for part in pattern.split("*"))
            pythons = {word for word in conditions if word[0].isdigit()}
            self.lines.append((pattern, re.compile(expression), pythons,
                               set(conditions) - pythons, reason.strip()))

    def reason(self, test, python, loop):
        """Why this test differs, or "" when the lists do not have it."""
        for pattern, expression, pythons, loops, reason in self.lines:
            if (expression.fullmatch(test) and python in (pythons or {python})
                    and loop in (loops or {loop})):
                self.used.add(pattern)
                return reason
        return ""

    def unused(self):
        return [pattern for pattern, *_ in self.lines if pattern not in self.used]
