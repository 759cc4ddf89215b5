"""Values of loops in rounds, paired: ratios to the baseline within each round, and their spread.

What disturbs a machine disturbs neighbours in time alike: a ratio within a round holds where the
values themselves don't.
"""

from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class Paired:
    """The median ratio over rounds, with the lowest and the highest."""

    ratio: float
    low: float
    high: float


def paired(own: dict[int, float], base: dict[int, float]) -> Paired | None:
    """Ratios of `own` by `base`, values by round; None when no round has both."""
    ratios = [own[number] / base[number] for number in own if base.get(number)]
    return Paired(median(ratios), min(ratios), max(ratios)) if ratios else None


def spread(values: list[float]) -> float:
    """(highest - lowest) / median."""
    return (max(values) - min(values)) / median(values)
