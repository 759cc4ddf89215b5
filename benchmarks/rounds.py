"""Paired rounds: every loop in each round, in changing order, each measured by one function."""

from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks import summary
from benchmarks.load_process import LoadResult
from benchmarks.processes import ProcessFailed
from benchmarks.progress import progress
from benchmarks.server_process import ServerFailed, failure_text


@dataclass
class Outcome:
    """The samples of all rounds, and by name the reasons of the loops that dropped out."""

    samples: list[summary.Sample] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)

    def rows(self, names: list[str]) -> list[summary.Row]:
        """The rows of the loops that were measured in every round."""
        good = [name for name in names if name not in self.failures]
        return [summary.summarize(self.samples, name) for name in good]

    def as_json(self) -> dict:
        """For the JSON report."""
        samples = [summary.sample_json(sample) for sample in self.samples]
        return {"failures": self.failures, "samples": samples}


def exit_status(parts: list[dict]) -> int:
    """1 when a loop that is installed has failed in one of the parts of a report."""
    failures = [text for part in parts for text in part["failures"].values()]
    return int(any(text.startswith("failed") for text in failures))


def describe(result: LoadResult) -> str:
    """A result as a line of progress."""
    return f"{result.rate:,.0f} req/s  {result.server_cpu_us:.2f} us CPU"


def run_rounds(
    names: list[str],
    rounds: int,
    measure: Callable[[str], LoadResult],
    text: Callable[[LoadResult], str] = describe,
) -> Outcome:
    """Call `measure` for each name in each round; one that fails isn't measured again."""
    outcome = Outcome()
    for number in range(rounds):
        for name in summary.round_order(names, number):
            if name in outcome.failures:
                continue
            try:
                result = measure(name)
            except (ServerFailed, ProcessFailed) as error:
                outcome.failures[name] = failure_text(error)
                progress(f"  round {number + 1}/{rounds}  {name}  {outcome.failures[name]}")
                continue
            outcome.samples.append(summary.Sample(name, number, result))
            progress(f"  round {number + 1}/{rounds}  {name}  {text(result)}")
    return outcome
