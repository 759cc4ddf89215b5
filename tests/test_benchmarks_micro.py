"""`python -m benchmarks micro`: each case does what it says, and what fails is told."""

import asyncio
import json
import os
import pathlib
import sys

import pytest

# At the end of the path, where the checkout cannot hide another build of uringloop.
sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent))

from benchmarks import loops, micro, micro_cases, micro_process  # noqa: E402
from benchmarks.micro_cases import CASES, PIPES  # noqa: E402
from benchmarks.micro_measure import CaseFailed, MicroBench  # noqa: E402
from benchmarks.processes import Placement  # noqa: E402

REPEATS = 3


@pytest.fixture
def calls(monkeypatch):
    """How often the callback and the coroutine of the cases ran."""
    counted = []

    async def nothing_async():
        counted.append(1)

    monkeypatch.setattr(micro_cases, "nothing", lambda: counted.append(1))
    monkeypatch.setattr(micro_cases, "nothing_async", nothing_async)
    return counted


@pytest.mark.parametrize("name", CASES)
async def test_a_case_ends_and_can_be_repeated(name, loop):
    async with CASES[name].enter() as repeat:
        await repeat(1)
        await repeat(REPEATS)
    await loop.shutdown_default_executor()


@pytest.mark.parametrize("name", ["call_soon-batch", "create_task", "gather", "executor"])
async def test_a_repeat_does_as_many_operations_as_the_case_says(name, loop, calls):
    async with CASES[name].enter() as repeat:
        await repeat(REPEATS)
    await loop.shutdown_default_executor()
    assert len(calls) == REPEATS * CASES[name].operations


async def test_a_cancelled_timer_never_runs(loop, calls, monkeypatch):
    monkeypatch.setattr(micro_cases, "TIMEOUT_SECONDS", 0.0)
    async with CASES["call_later-cancel"].enter() as repeat:
        await repeat(REPEATS)
    await asyncio.sleep(0)
    assert not calls


async def test_each_event_of_the_pipes_reads_one_byte(loop, monkeypatch):
    sizes = []
    read = os.read

    def counting(fd, size):
        data = read(fd, size)
        if size == 1:
            sizes.append(len(data))
        return data

    monkeypatch.setattr(os, "read", counting)
    async with CASES["pipe-events"].enter() as repeat:
        await repeat(REPEATS)
    assert sizes == [1] * REPEATS * PIPES


@pytest.mark.parametrize(("cost", "seconds", "expected"), [
    (0.001, 0.1, 100), (0.5, 0.1, 1), (1e-6, 0.1, 100_000)])
def test_calibration_finds_how_many_repeats_fill_the_window(monkeypatch, cost, seconds, expected):
    async def timed(repeat, repeats):
        return repeats * cost, 0.0

    monkeypatch.setattr(micro_process, "timed", timed)
    found = asyncio.run(micro_process.calibrate(None, seconds))
    assert found == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("name", loops.DEFAULT_NAMES)
def test_a_fresh_process_measures_a_case(name):
    spec = loops.parse_name(name)
    pytest.importorskip(spec.factory.partition(":")[0])
    if spec.backend == "io_uring":
        import uringloop
        if reason := uringloop.unavailable_reason():
            pytest.skip(reason)
    result = MicroBench(0.01, Placement()).measure("gather", spec)
    assert result.operations % CASES["gather"].operations == 0
    assert len(result.seconds) == len(result.cpu_seconds) == micro_process.SLICES
    assert result.rate > 0 and result.cpu_us > 0
    assert result.info["backend"] == spec.backend
    assert result.info["versions"].keys() == {name}


@pytest.mark.parametrize(("name", "absent", "reason"), [
    ("no_such_module:Loop", True, "no_such_module"),
    ("asyncio:no_such_factory", False, "no_such_factory")])
def test_a_loop_that_does_not_start_says_why(name, absent, reason):
    with pytest.raises(CaseFailed, match=reason) as caught:
        MicroBench(0.01, Placement()).measure("task-step", loops.parse_name(name))
    assert caught.value.absent is absent


def test_the_command_prints_a_table_and_writes_every_slice(tmp_path, capsys):
    path = tmp_path / "micro.json"
    names = "asyncio,no_such_module:Loop"
    status = micro.main(["--cases", "task-st*", "--loops", names, "--rounds", "2",
                         "--seconds", "0.01", "--json", str(path)])
    printed = capsys.readouterr().out
    assert status == 0    # what isn't installed is no failure
    assert "task-step: sleep(0) in a task" in printed
    assert "absent: No module named 'no_such_module'" in printed
    [case] = json.loads(path.read_text())["cases"]
    assert [(sample["loop"], sample["round"]) for sample in case["samples"]] == [
        ("asyncio", 0), ("asyncio", 1)]


def test_a_loop_that_fails_makes_the_status_1(capsys):
    arguments = ["--cases", "task-step", "--loops", "asyncio:no_such_factory", "--seconds", "0.01"]
    assert micro.main(arguments) == 1
    assert "no_such_factory" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--cases", "no-such-case"], ["--loops", "nonsense"],
                                       ["--seconds", "0"], ["--rounds", "0"], ["--cpu", "9999"]])
def test_what_cannot_be_measured_is_refused_before(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        micro.main(arguments)
    assert caught.value.code == 2
    assert arguments[0] in capsys.readouterr().err
