"""What a run did, in numbers: counted by tests of faults and models, printed when pytest ends."""

import collections
import os

COUNTED = ("cases", "faults", "connections", "bytes")
LOST = "bytes lost, repeated or misplaced"
UNTOUCHED = "cases that chance spared of a fault"
LEAKED = "descriptors and engine objects leaked"
_figures = collections.defaultdict(collections.Counter)
_notes = collections.Counter()
ours = True         # whether the loop under test is uringloop's: what others lose isn't counted


def count(kind, **numbers):
    """Add to the figures of a loop kind: cases=1, faults=12, bytes=4096, ..."""
    unknown = set(numbers) - set(COUNTED)
    if unknown:
        raise ValueError(f"not a figure: {sorted(unknown)}")
    _figures[kind].update(numbers)
    if numbers.get("faults") == 0:
        _notes[UNTOUCHED] += numbers.get("cases", 0)


def note(what, number):
    """Add to a figure that has a line of its own."""
    _notes[what] += number


def note_most(what, number):
    """Keep the largest of what is noted."""
    _notes[what] = max(_notes[what], number)


def lines():
    """The figures as lines of text; no line if nothing was counted."""
    if _figures:
        _notes.update({LOST: 0, LEAKED: 0})
    return _table() + [f"{what}: {number:,}" for what, number in _notes.items()]


def _table():
    if not _figures:
        return []
    lines = ["".join([f"{'':10}", *(f"{name:>16}" for name in COUNTED)])]
    for kind, numbers in sorted(_figures.items()):
        lines.append("".join([f"{kind:10}", *(f"{numbers[name]:>16,}" for name in COUNTED)]))
    return lines


def repeats(usual):
    """How often a test repeats what it does: `usual`, times URINGLOOP_REPEAT in a long run."""
    return max(1, round(usual * float(os.environ.get("URINGLOOP_REPEAT", "1"))))


def examples(usual):
    """How many examples a model is shown: `usual`, or URINGLOOP_EXAMPLES."""
    return int(os.environ.get("URINGLOOP_EXAMPLES") or usual)
