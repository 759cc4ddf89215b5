"""The runner of foreign suites (conform/) sees what is planted: differences, hangs, crashes."""

import pathlib
import sys
import textwrap

import pytest
from conform import environment, plan, report, results
from conform.process import Result
from conform.suite import Suite

PLANTED = """
    import asyncio
    import os
    import time
    import unittest

    OURS = os.environ["CONFORM_LOOP"] == "epoll"
    MARKER = os.environ["CONFORM_MARKER"]


    class Planted(unittest.TestCase):
        def test_1_fine(self):
            asyncio.run(asyncio.sleep(0))

        def test_2_differs(self):
            self.assertFalse(OURS)

        def test_3_hangs(self):
            while OURS:
                time.sleep(0.1)

        def test_4_crashes(self):
            if OURS:
                os.abort()

        def test_5_is_skipped(self):
            if OURS:
                self.skipTest("ours")

        def test_6_fails_everywhere(self):
            self.fail()

        def test_7_fails_once(self):
            if OURS and not os.path.exists(MARKER):
                open(MARKER, "x").close()
                self.fail()

        def test_8_fails_once_on_asyncio_and_always_on_ours(self):
            if OURS or not os.path.exists(MARKER + "8"):
                open(MARKER + "8", "a").close()
                self.fail()

        def test_9_after_all(self):
            pass

    if not OURS:
        Planted.test_a_missing = lambda self: None
"""


class Here(environment.Environment):
    """The Python that runs this test, and a folder of planted tests."""

    def __init__(self, folder):
        self.version, self.python = "3.x", pathlib.Path(sys.executable)
        self.folder, self.tests = pathlib.Path(sys.prefix), folder
        self.search_path = environment.ROOT

    def install(self, suite):
        pass

    def folder_of(self, suite):
        return self.tests


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs a planted test file on asyncio and epoll; (plan, what was told)."""
    monkeypatch.setattr(environment, "BUILD", tmp_path / "build")

    def run(source, expected=""):
        tests = tmp_path / "tests"
        tests.mkdir(exist_ok=True)
        (tests / "test_planted.py").write_text(textwrap.dedent(source))
        suite = Suite(name="planted", about="", files=("test_*.py",), ini="", limit=3,
                      environ={"CONFORM_MARKER": str(tmp_path / "marker")})
        planted = plan.Plan(suite, Here(tests), ("asyncio", "epoll"))
        told = []
        expectations = results.Expectations(expected)
        plan.run([planted], 1, expectations, told.append)
        text, fine = report.text_of([planted], [], expectations, True)
        return planted, "\n".join([*told, text]), fine

    return run


def found(planted, expected=""):
    """{test: outcome} of the differences."""
    some = results.differences(planted.column("asyncio"), planted.column("epoll"),
                               results.Expectations(expected))
    return {one.test.rpartition("::")[2]: one.outcome for one in some if not one.expected}


def test_planted_differences_hangs_and_crashes_are_told(run):
    planted, text, fine = run(PLANTED)
    assert found(planted) == {"test_2_differs": "failed", "test_3_hangs": "hang",
                              "test_4_crashes": "crash", "test_5_is_skipped": "skipped",
                              "test_8_fails_once_on_asyncio_and_always_on_ours": "failed",
                              "test_a_missing": "not run"}
    assert planted.column("asyncio").counts() == (9, 1, 0)
    assert planted.column("epoll").counts() == (3, 5, 1)
    assert list(planted.column("epoll").unsteady) == [
        "planted/test_planted.py::Planted::test_7_fails_once"]
    assert "6 unexpected differences" in text and "unsteady" in text
    assert not fine
    # The stacks of the hang are in the log.
    [log] = environment.BUILD.glob("logs/planted-3.x-epoll/test_planted.py.log")
    assert "test_3_hangs" in log.read_text()


def test_the_list_excuses_failures_but_neither_hangs_nor_crashes(run):
    planted, text, fine = run(PLANTED, "planted/* # whatever")
    assert found(planted, "planted/* # whatever") == {"test_3_hangs": "hang",
                                                      "test_4_crashes": "crash"}
    assert not fine


def test_results_of_asyncio_are_kept(run):
    source = """
        import asyncio

        def test_it():
            asyncio.run(asyncio.sleep(0))
    """
    first, _, fine = run(source)
    assert fine and not first.column("asyncio").kept
    again, text, fine = run(source)
    assert fine and again.column("asyncio").kept and not again.column("epoll").kept
    assert again.column("asyncio").tests == first.column("asyncio").tests
    assert "of an earlier run" in text


def test_a_suite_that_makes_no_loop_is_no_success(run):
    planted, text, fine = run("def test_it():\n    pass\n")
    assert found(planted) == {"planted/<loops>": "failed"}
    assert not fine


def test_a_file_that_asyncio_cannot_run_is_no_success(run):
    planted, text, fine = run("import asyncio\nasyncio.new_event_loop().close()\nimport nothing_\n")
    assert not fine
    assert "cannot run" in text


def column(**outcomes):
    tests = {f"s/f.py::{name}": Result(outcome) for name, outcome in outcomes.items()}
    return results.Column("s", "3.12", "epoll", tests=tests, loops=1)


@pytest.mark.parametrize("theirs, mine, expected", [
    ("passed", "passed", None), ("passed", "failed", "failed"), ("passed", "hang", "hang"),
    ("failed", "failed", None), ("failed", "crash", "crash"), ("failed", "hang", "hang"),
    ("crash", "crash", None), ("hang", "failed", None), ("skipped", "failed", "failed"),
    ("passed", "skipped", "skipped"), ("failed", "skipped", None), ("failed", "passed", None)])
def test_what_counts_as_a_difference(theirs, mine, expected):
    some = results.differences(column(t=theirs), column(t=mine), results.Expectations(""))
    assert [one.outcome for one in some] == ([expected] if expected else [])


def test_lines_of_the_list():
    lists = results.Expectations("""
        # a comment
        s/f.py::a[1-*]  # brackets are no wildcards
        s/f.py::b 3.12 epoll # only there
    """)
    assert lists.reason("s/f.py::a[1-x]", "3.11", "io_uring") == "brackets are no wildcards"
    assert lists.reason("s/f.py::b", "3.12", "epoll") == "only there"
    assert not lists.reason("s/f.py::b", "3.12", "io_uring")
    assert not lists.reason("s/f.py::b", "3.13", "epoll")
    assert not lists.reason("s/f.py::bc", "3.12", "epoll")
    assert lists.unused() == []
    with pytest.raises(ValueError, match="reason"):
        results.Expectations("s/f.py::a")


def test_the_lists_of_the_suites_can_be_read():
    for path in (environment.ROOT / "tests").glob("*/expected.txt"):
        results.Expectations(path.read_text())
