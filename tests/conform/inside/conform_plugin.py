"""A pytest plugin (-p conform_plugin): the loop under test, and a line of JSON for each event.

    {"event": "start", "test": ID}
    {"event": "result", "test": ID, "outcome": passed | failed | skipped, "message": TEXT}
    {"event": "end"}

Each also has "loops", the number of loops under test made so far. They go to CONFORM_EVENTS.
Tests that CONFORM_DONE lists (JSON) are left out: an earlier process has run them. When
CONFORM_ONLY is set, only the tests that it lists run.
"""

import faulthandler
import json
import os

import conform_inject
import pytest

faulthandler.enable()

_process = os.getpid()
_log = open(os.environ["CONFORM_EVENTS"], "a", buffering=1)
_outcomes = {}
_rank = {"passed": 0, "skipped": 1, "failed": 2}


def emit(event, **fields):
    if os.getpid() == _process:     # a forked child has the file, too
        _log.write(json.dumps({"event": event, "loops": conform_inject.made, **fields}) + "\n")


def _listed(variable):
    if variable not in os.environ:
        return None
    with open(os.environ[variable]) as file:
        return set(json.load(file))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    done, only = _listed("CONFORM_DONE") or (), _listed("CONFORM_ONLY")
    parts = json.loads(os.environ.get("CONFORM_DESELECT", "[]"))

    def wanted(test):
        return (test not in done and (only is None or test in only)
                and not any(part in test for part in parts))

    left_out = [item for item in items if not wanted(item.nodeid)]
    items[:] = [item for item in items if wanted(item.nodeid)]
    config.hook.pytest_deselected(items=left_out)


def pytest_collectreport(report):
    if report.failed:
        _result(report.nodeid + "::<import>", "failed", str(report.longrepr))
    elif report.skipped and report.nodeid.endswith(".py"):
        _result(report.nodeid + "::<module>", "skipped", str(report.longrepr))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logstart(nodeid, location):
    _outcomes[nodeid] = ("passed", "")
    emit("start", test=nodeid)


def pytest_runtest_logreport(report):
    if report.passed:
        return
    before = _outcomes.get(report.nodeid, ("passed", ""))
    outcome = "failed" if report.failed else "skipped"      # xfail is reported as skipped
    if _rank[outcome] > _rank[before[0]]:
        _outcomes[report.nodeid] = (outcome, str(report.longrepr))


def pytest_runtest_logfinish(nodeid, location):
    _result(nodeid, *_outcomes.pop(nodeid))


def _result(test, outcome, message):
    emit("result", test=test, outcome=outcome, message=message[-800:])


def pytest_sessionfinish(session, exitstatus):
    emit("end")


def pytest_unconfigure():
    _log.close()
