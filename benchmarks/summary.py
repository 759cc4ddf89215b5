"""From samples to rows: medians over rounds, and ratios paired within each round."""

from collections import Counter
from dataclasses import asdict, dataclass
from statistics import median

from benchmarks.load_process import LoadResult
from benchmarks.loops import BASELINE


@dataclass(frozen=True)
class Sample:
    """The result of one loop in one round."""

    loop: str
    round: int
    result: LoadResult


@dataclass(frozen=True)
class Row:
    """One loop's line: medians over rounds. Latencies and CPU time are in microseconds.

    `rate_ratio` is this loop's rate by the baseline's, `cpu_ratio` the baseline's CPU time per
    message by this loop's; above 1 is better in both. They are medians of the ratios within each
    round, since what disturbs a machine disturbs neighbours in time alike; None without a
    baseline. `spread` is (highest - lowest) / median of the rate over the rounds.
    """

    loop: str
    rounds: int
    rate: float
    p50_us: float
    p99_us: float
    server_cpu_us: float
    server_busy: float
    client_busy: float
    rate_ratio: float | None
    cpu_ratio: float | None
    spread: float
    errors: dict[str, int]


def summarize(samples: list[Sample], loop: str) -> Row:
    """The row of `loop`, which has at least one sample."""
    own = {sample.round: sample.result for sample in samples if sample.loop == loop}
    base = {sample.round: sample.result for sample in samples if sample.loop == BASELINE}
    paired = [(own[number], base[number]) for number in own if number in base]
    results = list(own.values())
    rates = [result.rate for result in results]
    return Row(
        loop=loop,
        rounds=len(results),
        rate=median(rates),
        p50_us=median(result.p50_us for result in results),
        p99_us=median(result.p99_us for result in results),
        server_cpu_us=median(result.server_cpu_us for result in results),
        server_busy=median(result.server_busy for result in results),
        client_busy=median(result.client_busy for result in results),
        rate_ratio=median(a.rate / b.rate for a, b in paired) if paired else None,
        cpu_ratio=median(b.server_cpu_us / a.server_cpu_us for a, b in paired) if paired else None,
        spread=(max(rates) - min(rates)) / median(rates),
        errors=dict(sum((Counter(result.errors) for result in results), Counter())),
    )


def round_order(names: list[str], number: int) -> list[str]:
    """The order of the loops in round `number`: every other reversed, rotated after each two.

    Rotation alone would leave each loop with the same one before it in every round; rotated in
    each round, two loops would never change places.
    """
    shift = number // 2 % len(names)
    order = names[shift:] + names[:shift]
    return order[::-1] if number % 2 else order


def ratio_text(ratio: float | None) -> str:
    """A ratio for a table."""
    return "-" if ratio is None else f"{ratio:.2f}"


def error_text(errors: dict[str, int]) -> str:
    """Errors by kind for people; `0` for none."""
    return ", ".join(f"{count} {kind}" for kind, count in errors.items()) or "0"


def sample_json(sample: Sample) -> dict:
    """A sample for the JSON report: units are in the names."""
    return {"loop": sample.loop, "round": sample.round, **asdict(sample.result)}
