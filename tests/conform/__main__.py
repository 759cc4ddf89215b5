"""python -m conform [--suites a,b] [--only PART] PYTHON...  (with tests/ in PYTHONPATH)

The first Python runs every suite, the others run the standard library's. Exit status 1 when a
test that asyncio passes fails on uringloop and no list of expected differences has it.
"""

import argparse
import os
import pathlib
import shutil
import signal
import sys

import ecosystem.suites
import stdlib.suites

from . import environment, plan, report
from .results import Expectations
from .suite import LOOPS

TESTS = pathlib.Path(__file__).resolve().parents[1]
SUITES = {suite.name: suite for suite in (*stdlib.suites.SUITES, *ecosystem.suites.SUITES)}


def arguments():
    parser = argparse.ArgumentParser(prog="conform", description=__doc__)
    parser.add_argument("pythons", nargs="+", metavar="PYTHON")
    parser.add_argument("--suites", default="", help=f"of {', '.join(SUITES)}; default: all")
    parser.add_argument("--loops", default=",".join(LOOPS), help="default: %(default)s")
    parser.add_argument("--only", default="", help="test files with this in their name")
    parser.add_argument("--jobs", type=int, default=(os.cpu_count() or 1) + 1,
                        help="files at a time (they wait more than they compute)")
    parser.add_argument("--fresh", action="store_true", help="asyncio and uvloop run again, too")
    parser.add_argument("--no-lists", action="store_true", help="expect no difference at all")
    options = parser.parse_args()
    for name, known in (("suites", SUITES), ("loops", LOOPS)):
        chosen = [word for word in getattr(options, name).split(",") if word] or list(known)
        unknown = set(chosen) - set(known)
        if unknown:
            parser.error(f"--{name}: {', '.join(sorted(unknown))} not in {', '.join(known)}")
        setattr(options, name, chosen)
    return options


def tell(line):
    print(line, flush=True)


def make_plans(options):
    """(plans, [(suite, python, reason why it cannot run)])."""
    plans, not_run, refused = [], [], False
    environments = [environment.Environment(python) for python in options.pythons]
    for env in environments:
        loops = list(options.loops)
        refused_here = env.io_uring_refused() if "io_uring" in loops else ""
        if refused_here:
            loops.remove("io_uring")
            not_run.append(("all suites", env.version, f"io_uring: {refused_here}"))
            tell(f"io_uring on {env.version}: not run: {refused_here}")
        names = options.suites if env is environments[0] else [
            suite.name for suite in stdlib.suites.SUITES if suite.name in options.suites]
        for name in names:
            suite = SUITES[name]
            tell(f"{name} on {env.version}: {suite.about}")
            reason = suite.missing()
            try:
                if not reason:
                    plans.append(plan.Plan(suite, env, loops, options.only))
            except environment.NotRun as error:
                reason, refused = str(error), True
            if reason:
                tell(f"    not run: {reason}")
                not_run.append((name, env.version, reason.splitlines()[0]))
    return plans, not_run, refused


def main():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))    # ends the children, too
    options = arguments()
    if options.fresh:
        shutil.rmtree(plan.results_folder(), ignore_errors=True)
    lists = "" if options.no_lists else "\n".join(
        path.read_text() for path in sorted(TESTS.glob("*/expected.txt")))
    expectations = Expectations(lists)
    plans, not_run, refused = make_plans(options)
    plan.run(plans, options.jobs, expectations, tell)
    complete = set(options.suites) == set(SUITES) and not options.only and not not_run
    text, fine = report.text_of(plans, not_run, expectations, complete)
    tell(f"\n{text}")
    (environment.BUILD / "report.txt").write_text(text + "\n")
    return 0 if fine and not refused and plans else 1


if __name__ == "__main__":
    sys.exit(main())
