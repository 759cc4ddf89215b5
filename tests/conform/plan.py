"""Which files run where: every test file on every loop, side by side, then the doubtful again.

A failure on one loop may be chance (foreign tests measure time, and the machine is busy), so what
failed runs again with nothing beside it. Where asyncio and uringloop failed, one success on asyncio
is enough to hold uringloop to it. On uringloop a test must pass STEADY times in a row, the first
time after all that its file runs before it, to count as unsteady only; hangs and crashes get no
such chance. Results of asyncio and uvloop are kept and used again as long as what they depend on
is the same.
"""

import concurrent.futures
import dataclasses
import fnmatch
import hashlib
import json
import time

from . import environment, process
from .results import STEADY, Column, differences
from .suite import OURS

DEATHS = 15         # processes of a file that may die before it is given up,
PEERS_DEATHS = 2    # and on uvloop, whose own hangs are of no interest


class Plan:
    """The columns of one suite on one Python."""

    def __init__(self, suite, env, loops, only=""):
        self.suite, self.env, self.only = suite, env, only
        env.install(suite)
        self.folder = env.folder_of(suite)
        self.files = self._find_files()
        if not self.files:
            raise environment.NotRun(f"no test files in {self.folder}")
        self.key = self._key()
        self.columns = [self._column(loop) for loop in loops if loop in suite.loops]

    def _find_files(self):
        found = sorted(path.relative_to(self.folder).as_posix()
                       for pattern in self.suite.files for path in self.folder.glob(pattern))
        return [name for name in dict.fromkeys(found) if self.only in name
                and not any(fnmatch.fnmatchcase(name, out) for out in self.suite.without)]

    def _key(self):
        inside = sorted(environment.INSIDE.glob("*.py"))
        parts = [environment.CONSTRAINTS.read_text(), *(path.read_text() for path in inside),
                 environment.run(self.env.python, "-VV"), *self.files]
        parts += [f"{field.name}={getattr(self.suite, field.name)!r}"
                  for field in dataclasses.fields(self.suite)
                  if not callable(getattr(self.suite, field.name))]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def _column(self, loop):
        fresh = Column(self.suite.name, self.env.version, loop, self.key)
        kept = None if loop in OURS else Column.load(results_folder(), fresh.title)
        return kept if kept and kept.key == self.key else fresh

    def column(self, loop):
        return next((column for column in self.columns if column.loop == loop), None)

    def jobs(self):
        """(column, file) pairs that must run."""
        return [(column, name) for name in self.files for column in self.columns
                if not column.kept]

    def run_file(self, column, name, only=None, log=""):
        """Runs one test file; the TestFile with its results."""
        suite = self.suite
        command = [self.env.python, "-m", "pytest", "-q", "--tb=short", "-p", "conform_plugin",
                   "-p", "no:cacheprovider", f"--rootdir={self.folder}",
                   "-c", self.folder / suite.ini if suite.ini else "/dev/null",
                   "-o", "addopts=", *_each("-p", suite.plugins), *_each("-o", suite.settings)]
        if suite.select:
            command += ["-k", suite.select]
        environ = self.env.environ(suite, column.loop)
        environ["CONFORM_DESELECT"] = json.dumps(suite.deselect)
        path = environment.BUILD / "logs" / column.title / f"{name.replace('/', '_')}{log}.log"
        with suite.service() as more:
            prefix = environment.with_localhost() if suite.localhost else ()
            words = [str(word) for word in (*prefix, *command, *more, name)]
            return process.TestFile(name, words, folder=self.folder, environ=environ, log=path,
                                    limit=suite.limit, only=only,
                                    deaths=PEERS_DEATHS if column.loop == "uvloop" else DEATHS
                                    ).run()

    def take(self, column, file):
        """Enters the results of a file into its column."""
        for test, result in file.results.items():
            column.tests[f"{self.suite.name}/{test}"] = result
        column.loops += file.loops

    def again(self, expectations):
        """Runs again what failed and may be chance; yields lines that tell of it."""
        reference = self.column("asyncio")
        if reference is None:
            return
        ours = [column for column in self.columns if column.loop in OURS]
        if not reference.kept:
            too = {test for column in ours for test in _failed(column)}
            yield from self._again_by_file(reference, too.intersection(_failed(reference)), 1)
        for column in ours:
            found = differences(reference, column, expectations)
            failed = [one.test for one in found if one.outcome == "failed" and not one.expected]
            yield from self._again_by_file(column, failed, STEADY)

    def _again_by_file(self, column, tests, runs):
        tests = [test for test in tests if not test.endswith(">")]
        for name, some in sorted(self._by_file(tests).items()):
            yield from self._again(column, name, some, runs)

    def _by_file(self, tests):
        files = {}
        for test in tests:
            name = test.partition("/")[2]
            files.setdefault(name.partition("::")[0], set()).add(name)
        return files

    def _again(self, column, name, tests, runs):
        passed = dict.fromkeys(tests, 0)
        for number in range(1, runs + 1):
            if process.stopping.is_set() or not tests:
                return
            # The first of several times with what runs before it, too.
            only = None if number == 1 < runs else tests
            file = self.run_file(column, name, only=only, log=f".again{number}")
            for test, result in file.results.items():
                if result.outcome in ("hang", "crash"):
                    column.tests[f"{self.suite.name}/{test}"] = result
                if test in passed:
                    passed[test] += result.outcome == "passed"
            tests = {test for test in tests if passed[test] == number}
        for test in sorted(tests):
            full = f"{self.suite.name}/{test}"
            result = column.tests[full]
            column.unsteady[full] = result.message
            column.tests[full] = process.Result("passed")
            yield f"unsteady: {column.python} {column.loop} {full}: failed once, then passed"


def _failed(column):
    return [test for test, result in column.tests.items() if result.outcome == "failed"]


def _each(option, values):
    return [word for value in values for word in (option, value)]


def results_folder():
    return environment.BUILD / "results"


def run(plans, workers, expectations, tell):
    """Runs all files of all plans, `workers` at a time; tell(line) hears of each."""
    jobs = [(plan, column, name) for plan in plans for column, name in plan.jobs()]
    done = 0

    def work(plan, column, name):
        start = time.monotonic()
        file = plan.run_file(column, name)
        return plan, column, file, time.monotonic() - start

    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(work, *job) for job in jobs]
        try:
            for future in concurrent.futures.as_completed(futures):
                plan, column, file, seconds = future.result()
                done += 1
                plan.take(column, file)
                column.seconds += seconds
                tell(f"[{done}/{len(jobs)}] {_summary(column, file, seconds)}")
        except BaseException:
            process.stopping.set()
            pool.shutdown(cancel_futures=True)
            raise
    for plan in plans:
        for line in plan.again(expectations):
            tell(line)
        for column in plan.columns:
            if not column.kept and not plan.only:
                column.save(results_folder())


def _summary(column, file, seconds):
    outcomes = [result.outcome for result in file.results.values()]
    counts = ", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in
                       ("passed", "failed", "hang", "crash", "skipped") if outcome in outcomes)
    deaths = "".join(f"\n    {result.outcome}: {test}" for test, result in file.results.items()
                     if result.outcome in ("hang", "crash"))
    return (f"{column.suite} {column.python} {column.loop} {file.name}: "
            f"{counts or 'nothing ran'} ({seconds:.1f} s){deaths}")
