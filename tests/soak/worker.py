"""One scenario on one loop, in both parts: `python -m soak.worker CONFIG` prints a JSON result."""

import asyncio
import faulthandler
import importlib
import json
import signal
import sys
import time
import traceback

from helpers import WITH_ASAN, make_loop

from . import leaks
from .run import NotRun, Run

PARTS = (1 / 3, 2 / 3)
BUFFER = 16_384     # bytes of a receive block; the pool may grow with the connections
PATIENCE = 180.0    # seconds a part may take beyond its time before it counts as hung
SLOWEST = 200       # connections a second, where their number is given


def patience(options):
    """Seconds that a part with these options may take beyond its time."""
    return PATIENCE + (options.get("churn") or 0) / SLOWEST


async def _part(scenario, run):
    """Runs the scenario once; whatever it raises becomes a fault."""
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(run.handle_exception)
    try:
        async with asyncio.timeout(run.seconds + patience(run.options)) as limit:
            await scenario(run)
    except NotRun:
        raise
    except Exception as error:
        if limit.expired():
            run.fault(f"hung: not at its end long after its time: {_waiting()}")
        run.fault("".join(traceback.format_exception(error))[-1500:])


def _waiting():
    tasks = [task.get_coro().__qualname__ for task in asyncio.all_tasks()]
    return ", ".join(f"{tasks.count(name)} {name}" for name in sorted(set(tasks)))


async def _parts(scenario, config, tolerance):
    loop = asyncio.get_running_loop()
    total = Run(config["kind"], 0, config["seed"])
    before = memory = None
    await leaks.warm_up()
    for share in PARTS:
        run = Run(config["kind"], config["seconds"] * share, f"{config['seed']}/{share:.2f}",
                  config["options"], share)
        run.is_first = before is None
        await _part(scenario, run)
        total.add(run.as_json())
        last = (memory, before)
        if before is not None:
            left = await leaks.leaked(loop, before)
            total.count("leaked", sum(left.values()))
            if left:
                total.fault(f"leaked: {left}")
        before = leaks.Traces(loop)
        memory = leaks.rss()
    pool = (before.buffers - last[1].buffers) * BUFFER
    growth = memory - last[0] - pool
    total.count("rss_growth", growth)
    total.count("pool_growth", pool)
    if tolerance is not None and growth > tolerance + run.unrest:
        total.fault(f"leaked: memory grew by {growth / 2**20:.1f} MiB between the ends of the "
                    f"parts, over {(tolerance + run.unrest) / 2**20:.0f} MiB (the pool's "
                    f"{pool / 2**20:.1f} MiB apart)")
    return total


def measure(config, tolerance=leaks.RSS_TOLERANCE):
    """Runs a scenario: config is kind, scenario, seconds, seed, options. A result for JSON."""
    scenario = importlib.import_module(f"soak.scenarios.{config['scenario']}").run
    loop = make_loop(config["kind"])
    start = time.monotonic()
    not_run = None
    total = Run(config["kind"], 0, config["seed"])
    try:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            total = runner.run(_parts(scenario, config, tolerance))
    except NotRun as error:
        not_run = str(error)
    return {**{name: config[name] for name in ("kind", "scenario", "seed")},
            "seconds": time.monotonic() - start, "not_run": not_run, **total.as_json()}


def main(text):
    config = json.loads(text)
    limit = config["seconds"] + 3 * patience(config["options"])
    faulthandler.dump_traceback_later(limit, exit=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))    # ends the peers, too
    tolerance = None if WITH_ASAN else leaks.RSS_TOLERANCE
    print(json.dumps(measure(config, tolerance)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
