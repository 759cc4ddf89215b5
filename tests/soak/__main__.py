"""The command line: `PYTHONPATH=tests python -m soak --minutes N --kinds io_uring,epoll`.

Exit status: 0 all checks passed on uringloop, 1 one failed, 2 bad usage, 3 nothing could be run.
What asyncio and uvloop do wrong is told only.
"""

import argparse
import json
import pathlib
import random
import signal
import sys
import time

from helpers import LOOP_KINDS, why_not

from benchmarks import machine
from benchmarks.processes import ManagedProcess, ProcessFailed
from benchmarks.progress import progress

from . import ROOT, TESTS, leaks, report, worker
from .scenarios import SCENARIOS


def names_of(known):
    """An argparse type: names separated by commas, out of those that are known."""

    def parse(text):
        names = list(dict.fromkeys(filter(None, text.split(","))))
        unknown = [name for name in names if name not in known]
        if unknown or not names:
            raise argparse.ArgumentTypeError(
                f"{','.join(unknown) or 'nothing'} is not of {','.join(known)}")
        return names

    return parse


def arguments():
    parser = argparse.ArgumentParser(prog="python -m soak", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--minutes", type=float, default=2.0, help="for all, about; the least of a scenario apart")
    add("--kinds", type=names_of(LOOP_KINDS), default=list(report.OURS),
        help=f"of {','.join(LOOP_KINDS)}; default {','.join(report.OURS)}")
    add("--scenarios", type=names_of(SCENARIOS), default=list(SCENARIOS),
        help=f"of {','.join(SCENARIOS)}; default all")
    add("--seed", type=int, default=random.randrange(1 << 32), help="repeats the dice of a run")
    add("--connections", type=int, default=10_000, help="at once, in crowd")
    add("--churn", type=int, help="exact number of connections of churn, on each kind")
    add("--json", type=pathlib.Path, metavar="FILE", help="writes the results there as well")
    return parser.parse_args()


def seconds_of(options):
    """{scenario: seconds on each kind}: the minutes by the scenarios' shares."""
    shares = {name: SCENARIOS[name][1] for name in options.scenarios}
    each = 60 * options.minutes / len(options.kinds) / sum(shares.values())
    return {name: share * each for name, share in shares.items()}


def run_one(kind, scenario, seconds, options):
    """The result of one scenario on one kind, from a process of its own."""
    sizes = {"connections": options.connections, "churn": options.churn}
    config = {"kind": kind, "scenario": scenario, "seconds": seconds, "seed": options.seed,
              "options": sizes}
    command = [sys.executable, "-m", "soak.worker", json.dumps(config)]
    limit = seconds + 4 * worker.patience(sizes)
    start = time.monotonic()
    try:
        with ManagedProcess(command, environment={"PYTHONPATH": f"{ROOT}:{TESTS}"}) as process:
            return json.loads(process.read_all(limit))
    except ProcessFailed as error:
        return {"kind": kind, "scenario": scenario, "seed": options.seed, "not_run": None,
                "seconds": time.monotonic() - start, "counts": {"faults": 1}, "figures": {},
                "notes": [], "faults": [f"the process died or hung: {error}"]}


def not_run(kind, scenario, seed, reason):
    return {"kind": kind, "scenario": scenario, "seed": seed, "not_run": reason, "seconds": 0,
            "counts": {}, "figures": {}, "faults": [], "notes": []}


def save(options, host, results):
    if options.json is not None:
        given = {"minutes": options.minutes, "seed": options.seed, "churn": options.churn,
                 "connections": options.connections}
        text = json.dumps({"machine": host, "options": given, "results": results}, indent=2)
        options.json.write_text(text + "\n")


def main():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))    # ends the children, too
    options = arguments()
    host = machine.describe()
    print(machine.headline(host))
    print(f"seed {options.seed}, Python {sys.version.split()[0]}, about {options.minutes:g} "
          f"minutes; memory may grow by {leaks.RSS_TOLERANCE >> 20} MiB between the ends of a "
          f"scenario's two parts (crowd: and by 1 KiB for each connection)", flush=True)
    refused = {kind: why_not(kind) for kind in options.kinds}
    results = []
    for scenario, seconds in seconds_of(options).items():
        progress(f"{scenario}: {SCENARIOS[scenario][0]}")
        for kind in options.kinds:
            if refused[kind]:
                result = not_run(kind, scenario, options.seed, refused[kind])
            else:
                result = run_one(kind, scenario, seconds, options)
            results.append(result)
            counts = result["counts"]
            outcome = (f"not run: {result['not_run']}" if result["not_run"] else
                       f"{counts['faults']} faults: {result['faults'][0]}"
                       if counts.get("faults") else "passed")
            progress(f"    {kind}  {result['seconds']:.1f} s  {outcome}")
            save(options, host, results)        # so that an interrupted run keeps what it has
    text, fine = report.text_of(results)
    print(text)
    if all(result["not_run"] for result in results):
        return 3
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
