"""The measured process of a micro benchmark: `python -m benchmarks.micro_process CONFIG`.

Runs one case on one loop: finds how many repeats fill a slice of the window, which warms up too,
then measures the slices. Prints one line of JSON: `operations` per slice, `seconds` and
`cpu_seconds` of each, and what serve.py says of a loop; or `failed` and `absent`.
"""

import asyncio
import gc
import json
import resource
import sys
import time

from benchmarks import loops
from benchmarks.micro_cases import CASES, MicroCase, Repeat
from benchmarks.serve import describe, report

SLICES = 5
"""Parts of the window; the median of them stands for it, so that one disturbance is ignored."""

_MOST_GROWTH = 10


def cpu_seconds() -> float:
    """CPU time of this process, all threads, and of its children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


async def timed(repeat: Repeat, repeats: int) -> tuple[float, float]:
    """Wall and CPU time of so many repeats, in seconds."""
    gc.collect()  # each slice pays for the garbage it makes, not for that of the one before
    cpu_before, start = cpu_seconds(), time.perf_counter()
    await repeat(repeats)
    seconds = time.perf_counter() - start
    return seconds, cpu_seconds() - cpu_before


async def calibrate(repeat: Repeat, seconds: float) -> int:
    """How many repeats take about `seconds`."""
    repeats = 1
    while True:
        taken, _ = await timed(repeat, repeats)
        fitting = max(1, round(repeats * seconds / max(taken, 1e-9)))
        if taken >= seconds / 2 or fitting <= repeats:
            return fitting
        repeats = min(fitting, repeats * _MOST_GROWTH)


async def measure(spec: loops.LoopSpec, case: MicroCase, window: float) -> None:
    """Calibrate, then measure a window of so many seconds, and report it."""
    async with case.enter() as repeat:
        repeats = await calibrate(repeat, window / SLICES)
        slices = [await timed(repeat, repeats) for _ in range(SLICES)]
    report(
        {
            "operations": repeats * case.operations,
            "seconds": [seconds for seconds, _ in slices],
            "cpu_seconds": [cpu for _, cpu in slices],
            "info": describe(spec, asyncio.get_running_loop(), "micro"),
        }
    )


def main(config: dict) -> int:
    """Run the case of `config`; returns the exit status."""
    spec = loops.parse_name(config["loop"])
    case = CASES[config["case"]]
    return loops.run(spec, lambda: measure(spec, case, config["seconds"]), report)


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
