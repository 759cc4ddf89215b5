"""`python -m benchmarks table`: its rows exist, a run survives failures, reports say what is."""

import json
import os
import pathlib
import re
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))    # at its end the checkout cannot hide another build of uringloop

from benchmarks import chart, loops, page, rows, suite, suite_report, summary  # noqa: E402
from benchmarks.echo_options import Cell  # noqa: E402
from benchmarks.echo_servers import MODES, TRANSPORTS  # noqa: E402
from benchmarks.http_app import PACKAGES  # noqa: E402
from benchmarks.load_process import LoadResult  # noqa: E402
from benchmarks.measure import Bench  # noqa: E402
from benchmarks.micro_cases import CASES  # noqa: E402
from benchmarks.micro_measure import MicroBench, MicroResult  # noqa: E402
from benchmarks.processes import ProcessFailed  # noqa: E402
from benchmarks.row_runs import RowBench, Values  # noqa: E402
from benchmarks.server_process import ServerFailed  # noqa: E402
from benchmarks.verdicts import RowReport, report_rows  # noqa: E402

BY_NAME = rows.by_name()
RATIO_ROWS = [row for row in rows.ROWS if row.metric != "syscalls"]
SVG = "{http://www.w3.org/2000/svg}"


# The registry


@pytest.mark.parametrize("row", rows.ROWS, ids=lambda row: row.name)
def test_a_row_is_something_that_a_command_can_run(row):
    if isinstance(row.run, rows.Micro):
        assert row.run.case in CASES
    elif isinstance(row.run, rows.Http):
        assert row.run.app in PACKAGES
    else:
        assert isinstance(row.run, Cell)
        assert row.run.mode in MODES and row.run.transport in TRANSPORTS
    assert row.group in rows.GROUPS
    assert row.metric in rows.METRIC_NAMES
    assert row.target > 0 and row.epoll_target > 0
    for name in row.loops:
        assert loops.parse_name(name).factory


def test_names_and_titles_tell_rows_apart():
    assert len(BY_NAME) == len(rows.ROWS)
    assert len({(row.title, row.metric) for row in rows.ROWS}) == len(rows.ROWS)


def test_every_case_and_application_has_a_row():
    assert {row.run.case for row in rows.ROWS if isinstance(row.run, rows.Micro)} == set(CASES)
    assert {row.run.app for row in rows.ROWS if isinstance(row.run, rows.Http)} == set(PACKAGES)


def test_many_connections_are_compared_by_cpu_time_and_one_by_its_round_trips():
    echo = [row for row in RATIO_ROWS if isinstance(row.run, Cell)]
    assert {row.metric for row in echo if row.run.connections >= 16} == {"cpu"}
    assert {row.metric for row in echo if row.run.connections == 1} == {"rate", "p50"}


def test_rows_are_chosen_by_patterns_in_the_order_of_the_registry():
    assert [row.name for row in rows.select("micro-g*,tls-tcp-1k-c16")] == [
        "tls-tcp-1k-c16", "micro-gather"]
    assert rows.select("*") == list(rows.ROWS)
    with pytest.raises(ValueError, match="'nonsense' is no row"):
        rows.select("micro-*,nonsense")


# A run


class FakeBench:
    """Measures at once: `fail` is what a (row, loop) raises."""

    def __init__(self, fail=()):
        self.fail = dict(fail)
        self.calls = []

    def describe(self, name):
        return {"loop_class": name, "backend": None, "versions": {name: "1"}, "python": "CPython"}

    def measure(self, row, name):
        self.calls.append((row.name, name))
        if error := self.fail.get((row.name, name)):
            raise error
        if row.metric == "syscalls":
            return Values(syscalls=2.0)
        return Values(rate=100.0, cpu_us=10.0, p50_us=1.0)


def new_run(names, loop_names=("uvloop", "uringloop"), rounds=3):
    settings = suite.Settings(rows=list(names), loops=list(loop_names), rounds=rounds, seconds=1.0,
                              warmup=0.1, micro_seconds=0.1, cpus=[0, 1], realtime=False)
    machine = {"date": "2026-01-02T03:04:05+00:00", "cpu": "a & b", "cpus": 2, "kernel": "Linux 6",
               "load_average": 0.5, "commit": None}
    return suite.Run(settings, machine, python="3.12.0")


def test_every_loop_is_measured_once_in_each_round(tmp_path):
    run = new_run(["micro-gather"])
    suite.measure_rows(FakeBench(), run, tmp_path / "run.json")
    samples = run.outcomes[0]["samples"]
    assert sorted((sample["loop"], sample["round"]) for sample in samples) == [
        (name, number) for name in ("uringloop", "uvloop") for number in range(3)]


@pytest.mark.parametrize("count", [2, 3, 4, 6])
def test_every_loop_is_first_and_last_as_often_as_any_other(count):
    names = [str(number) for number in range(count)]
    orders = [summary.round_order(names, number) for number in range(2 * count)]
    assert all(sorted(order) == names for order in orders)
    for place in (0, -1):
        assert sorted(order[place] for order in orders) == sorted(2 * names)
    # Nor does one always run in the wake of the same.
    for name in names:
        before = {order[order.index(name) - 1] for order in orders if order[0] != name}
        assert len(before) == min(2, count - 1)
    assert orders[0] != orders[1]


def test_floors_and_the_loops_of_a_row_join_in_where_they_apply(tmp_path):
    bench = FakeBench()
    names = ["protocol-tcp-1k-c1", "tls-tcp-1k-c16", "micro-gather"]
    suite.measure_rows(bench, new_run(names, rounds=1), tmp_path / "run.json")
    measured = {name: {loop for row, loop in bench.calls if row == name} for name in names}
    ours = {"uvloop", "uringloop"}
    assert measured["protocol-tcp-1k-c1"] == ours | {"floor-epoll", "floor-io_uring"}
    assert measured["tls-tcp-1k-c16"] == ours | {"uvloop-mmap"}
    assert measured["micro-gather"] == ours


def test_a_loop_that_fails_is_out_of_its_row_alone(tmp_path):
    bench = FakeBench({("micro-gather", "uringloop"): ProcessFailed("it\nhangs")})
    run = new_run(["micro-gather", "micro-queue"])
    suite.measure_rows(bench, run, tmp_path / "run.json")
    assert bench.calls.count(("micro-gather", "uringloop")) == 1
    gather, queue = run.outcomes
    assert gather["failures"] == {"uringloop": "failed: it\nhangs"}
    assert {sample["loop"] for sample in gather["samples"]} == {"uvloop"}
    assert not queue["failures"]
    assert suite.failed(gather) and not suite.failed(queue)


def test_a_peer_that_fails_or_a_loop_that_is_absent_is_no_failure_of_the_run():
    texts = {"rloop": "failed: it hangs", "asyncio": "absent: not here"}
    assert not suite.failed({"error": None, "failures": texts})
    assert suite.failed({"error": "x", "failures": {}})


def test_a_row_that_fails_names_its_error_and_the_next_is_measured(tmp_path, capsys):
    path = tmp_path / "run.json"
    bench = FakeBench({("micro-gather", "uvloop"): RuntimeError("no\nidea")})
    run = new_run(["micro-gather", "micro-queue"])
    suite.measure_rows(bench, run, path)
    assert [outcome["error"] for outcome in run.outcomes] == ["RuntimeError: no idea", None]
    assert "Traceback" in capsys.readouterr().err
    assert "failed: RuntimeError: no idea" in suite_report.markdown(asdict(run))


def test_a_run_that_ended_early_has_its_rows_and_goes_on(tmp_path):
    path = tmp_path / "run.json"
    names = ["micro-gather", "micro-queue", "micro-executor"]
    bench = FakeBench({("micro-gather", "uvloop"): RuntimeError("once"),
                       ("micro-executor", "uvloop"): KeyboardInterrupt()})
    with pytest.raises(KeyboardInterrupt):
        suite.measure_rows(bench, new_run(names), path)
    run = suite.Run.load(path)
    assert [outcome["name"] for outcome in run.outcomes] == names[:2]
    bench = FakeBench()
    suite.measure_rows(bench, run, path)
    assert {row for row, _ in bench.calls} == {"micro-gather", "micro-executor"}
    run = suite.Run.load(path)
    assert not run.missing()
    assert [outcome["error"] for outcome in run.outcomes] == [None] * 3
    assert list(tmp_path.iterdir()) == [path]


def test_rows_that_a_run_has_not_come_to_are_told_and_are_no_failure():
    run = new_run(["micro-gather", "micro-queue"])
    run.outcomes = [outcome_of("micro-gather", uvloop=[1.0], uringloop=[1.0])]
    text = suite_report.markdown(asdict(run))
    assert "| Queue between two tasks (CPU) | not measured |" in text
    assert "Failures" not in text
    assert "not measured" in chart.draw(asdict(run))


def test_rows_of_a_run_can_be_measured_again_and_others_added(tmp_path):
    path = tmp_path / "run.json"
    suite.measure_rows(FakeBench(), new_run(["micro-gather", "micro-queue"]), path)
    run = suite.Run.load(path)
    run.again(["micro-gather", "udp-1k-c16"])
    assert run.settings.rows == ["udp-1k-c16", "micro-gather", "micro-queue"]
    bench = FakeBench()
    suite.measure_rows(bench, run, path)
    assert {row for row, _ in bench.calls} == {"micro-gather", "udp-1k-c16"}
    assert {outcome["name"] for outcome in run.outcomes} == set(run.settings.rows)


def test_a_loop_that_does_not_start_is_asked_once_and_left_out(tmp_path):
    run = new_run(["micro-gather"])
    bench = FakeBench()
    absent = ServerFailed("No module named 'uvloop'", absent=True)

    def describe(name):
        if name == "uvloop":
            raise absent
        return FakeBench.describe(bench, name)

    bench.describe = describe
    suite.probe(bench, run)
    suite.measure_rows(bench, run, tmp_path / "run.json")
    assert run.unavailable == {"uvloop": "absent: No module named 'uvloop'"}
    assert {loop for _, loop in bench.calls} == {"uringloop"}
    assert "uvloop: absent" in suite_report.markdown(asdict(run))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"settings": {}}'])
def test_another_file_is_not_resumed(tmp_path, text, capsys):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(SystemExit) as caught:
        suite.main(["--resume", str(path)])
    assert caught.value.code == 2
    assert "is no file of `table`" in capsys.readouterr().err


def test_the_command_measures_and_writes_both_files(tmp_path, capsys):
    path = tmp_path / "run.json"
    arguments = ["--rows", "protocol-tcp-1k-c1,micro-gather", "--loops", "asyncio", "--rounds", "1",
                 "--seconds", "0.1", "--json", str(path)]
    assert suite.main(arguments) == 0
    printed = capsys.readouterr().out
    assert path.with_suffix(".md").read_text() == printed
    run = json.loads(path.read_text())
    measured = {outcome["name"]: {sample["loop"] for sample in outcome["samples"]}
                for outcome in run["outcomes"]}
    assert measured["micro-gather"] == {"asyncio"}
    assert "asyncio" in measured["protocol-tcp-1k-c1"]
    assert run["loops"]["asyncio"]["python"].endswith(run["python"])


def bench_of(folder):
    return RowBench(Bench(new_run([]).settings.run_options(), folder, folder), 0.1)


@pytest.mark.parametrize(("name", "kept"), [
    ("asyncio", True), ("rloop", True), ("uvloop", False), ("uringloop", False),
    ("uringloop-epoll", False)])
def test_other_loops_are_measured_with_large_blocks_kept(name, kept, monkeypatch, tmp_path):
    seen = []

    def measure(self, case, spec):
        seen.append(dict(os.environ))
        return MicroResult(1, [1.0], [1.0])

    monkeypatch.setattr(MicroBench, "measure", measure)
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1")
    before = dict(os.environ)
    bench_of(tmp_path).measure(BY_NAME["micro-gather"], name)
    [environment] = seen
    assert (environment == {**before, **loops.KEEP_MEMORY}) is kept
    assert dict(os.environ) == before


def test_a_row_gives_its_options_to_the_servers(monkeypatch, tmp_path):
    seen = []

    def measure(self, cell, spec):
        seen.append(os.environ["URINGLOOP_OPTIONS"])
        return LoadResult(1, 1.0, 1.0, 1.0, 1.0, 1.0)

    monkeypatch.setattr(Bench, "measure", measure)
    bench_of(tmp_path).measure(BY_NAME["protocol-tcp-1k-c1-busy"], "uringloop")
    assert seen == [BY_NAME["protocol-tcp-1k-c1-busy"].options]
    assert "URINGLOOP_OPTIONS" not in os.environ


# Reports


def outcome_of(name, **costs):
    """The outcome of a row in which each loop costs so much in each round; `_` stands for `-`."""
    figure = {"cpu": "cpu_us", "p50": "p50_us", "syscalls": "syscalls"}[BY_NAME[name].metric]
    nothing = asdict(Values())
    samples = [{"loop": loop.replace("_", "-"), "round": number, **nothing, figure: cost}
               for loop, values in costs.items() for number, cost in enumerate(values)]
    return {"name": name, "error": None, "samples": samples, "failures": {}}


def report_of(name, **costs):
    return RowReport(BY_NAME[name], outcome_of(name, **costs))


def full_run():
    """A run with every row: a loss, a failure, an error and a peer among them."""
    run = new_run(BY_NAME)
    for number, row in enumerate(rows.ROWS):
        if row.metric == "rate":
            run.outcomes.append({"name": row.name, "error": "x < y | z", "samples": [],
                                 "failures": {}})
            continue
        costs = {"uvloop": [10.0, 10.0], "asyncio": [100.0, 100.0], "rloop": [7.0, 7.0],
                 "uringloop": [8.0 + number % 3, 8.5], "uringloop_epoll": [9.5, 9.5]}
        outcome = outcome_of(row.name, **costs)
        outcome["failures"] = {"blazio": "failed: has | no transports"}
        run.outcomes.append(outcome)
    return json.loads(json.dumps(asdict(run)))


@pytest.mark.parametrize(("ours", "text"), [
    ([5.0, 5.0, 5.0], "met"), ([7.3, 5.0, 5.0], "met?"), ([9.0, 9.0, 9.0], "missed"),
    ([9.0, 9.0, 5.0], "missed?"), ([12.0, 12.0, 12.0], "missed, behind uvloop")])
def test_a_target_is_met_for_certain_when_all_rounds_agree(ours, text):
    report = report_of("micro-create_task", uvloop=[10.0] * 3, uringloop=ours)     # 1.4: 7.14
    assert str(report.verdict("uringloop")) == text
    assert report.verdict("uringloop").lost == (not text.startswith("met"))


def test_ratios_are_made_within_a_round():
    report = report_of("micro-gather", uvloop=[10.0, 40.0, 10.0], uringloop=[5.0, 20.0, 4.0])
    ratio = report.ratio("uringloop")
    assert (ratio.ratio, ratio.low, ratio.high) == (2.0, 2.0, 2.5)


def test_a_loop_of_another_project_that_is_ahead_is_named():
    report = report_of("micro-gather", uvloop=[10.0], uringloop=[5.0], uringloop_epoll=[5.0],
                       rloop=[4.0], blazio=[6.0], asyncio=[20.0])
    assert report.peer == "rloop"
    assert str(report.verdict("uringloop")) == "met, behind rloop"
    assert str(report.verdict("uringloop-epoll")) == "met"
    unsure = report_of("micro-gather", uvloop=[10.0] * 3, uringloop=[5.0, 5.0, 4.0],
                       rloop=[4.0, 4.0, 5.0])
    assert str(unsure.verdict("uringloop")) == "met, behind rloop?"


def test_a_share_of_the_floor_is_the_target_where_it_was_measured():
    costs = {"uvloop": [12.0], "uringloop": [10.0]}
    with_floor = report_of("protocol-tcp-1k-c64", **costs, floor_epoll=[10.0],
                           **{"floor_io_uring": [11.0]})
    assert with_floor.floor == "floor-epoll"
    assert with_floor.target("uringloop") == pytest.approx(0.95 * 1.2)
    assert with_floor.verdict("uringloop").met
    assert with_floor.peer is None
    without = report_of("protocol-tcp-1k-c64", **costs)
    assert without.target("uringloop") == BY_NAME["protocol-tcp-1k-c64"].target


def test_fewer_system_calls_are_better():
    report = report_of("syscalls", uvloop=[2.0], uringloop=[0.05], uringloop_epoll=[3.0])
    assert str(report.verdict("uringloop")) == "met"
    assert str(report.verdict("uringloop-epoll")) == "missed"


def test_without_uvloop_there_is_nothing_to_say():
    report = report_of("micro-gather", uringloop=[1.0])
    assert report.ratio("uringloop") is None and report.verdict("uringloop") is None
    assert len(suite_report.table_line(report)) == len(suite_report.HEADERS)


def test_the_table_has_all_rows_and_its_cells_are_in_columns():
    run = full_run()
    lines = suite_report.table(report_rows(run)).splitlines()
    assert len(lines) == 2 + len(rows.ROWS)
    assert {line.count("|") for line in lines} == {len(suite_report.HEADERS) + 1}
    for row, line in zip(rows.ROWS, lines[2:], strict=True):
        assert line.startswith(f"| {row.title} ({rows.METRIC_NAMES[row.metric]}) |")


def test_the_report_lists_what_is_lost_and_what_failed():
    text = suite_report.markdown(full_run())
    lost, failures = re.search(r"## Lost rows\n(.*)## Failures\n(.*)", text, re.DOTALL).groups()
    assert "- create_task and await (CPU): uringloop" in lost
    assert "met, behind rloop" in lost
    assert "- protocol TCP 1 KiB c1 (req/s): x < y | z" in failures
    assert "gather of 100 (CPU), blazio: failed: has | no transports" in failures


def test_a_page_keeps_what_is_written_by_hand():
    names = page.parts(full_run())
    markers = "\n".join(f"<!-- {name} -->\nold\n<!-- /{name} -->" for name in names)
    once = page.fill(f"above\n{markers}\nbelow\n", full_run())
    assert once.startswith("above\n") and once.endswith("\nbelow\n")
    assert "old" not in once and "gather of 100" in once
    assert page.fill(once, full_run()) == once


@pytest.mark.parametrize("text", ["", "<!-- table -->\n", "<!-- table -->\n<!-- /table -->\n" * 2])
def test_a_page_without_its_markers_is_refused(tmp_path, text, capsys):
    file, docs = tmp_path / "run.json", tmp_path / "page.md"
    file.write_text(json.dumps(full_run()))
    docs.write_text(text)
    assert page.main([str(file), "--docs", str(docs)]) == 1
    assert "<!-- table -->" in capsys.readouterr().err
    assert docs.read_text() == text


def test_the_documentation_shows_every_row_and_its_chart():
    text = (ROOT / "docs" / "performance.md").read_text()
    for row in rows.ROWS:
        assert f"| {row.title} ({rows.METRIC_NAMES[row.metric]}) |" in text
    assert "(performance.svg)" in text
    assert page.fill(text, full_run()) != text
    titles = {element.text for element in
              ElementTree.parse(ROOT / "docs" / "performance.svg").iter(f"{SVG}text")}
    assert {row.title for row in RATIO_ROWS} <= titles


# The chart


def numbers(element, *names):
    return [float(element.get(name)) for name in names]


def test_the_chart_is_valid_and_has_every_row(tmp_path):
    file, out = tmp_path / "run.json", tmp_path / "out.svg"
    file.write_text(json.dumps(full_run()))
    assert chart.main([str(file), str(out)]) == 0
    root = ElementTree.parse(out).getroot()
    words = [element.text for element in root.iter(f"{SVG}text")]
    for row in RATIO_ROWS:
        assert row.title in words
    assert {rows.GROUPS[row.group] for row in RATIO_ROWS} <= set(words)
    targets = [title.text for title in root.iter(f"{SVG}title") if ": target " in title.text]
    assert len(targets) == sum(row.metric in ("cpu", "p50") for row in rows.ROWS)
    width, height = numbers(root, "width", "height")
    for element in root.iter(f"{SVG}text"):
        x, y = numbers(element, "x", "y")
        assert 0 <= x <= width and 0 <= y <= height
        if element.text in {row.title for row in RATIO_ROWS}:    # written towards the left
            assert x - len(element.text) * float(element.get("font-size")) * 0.62 > 0


@pytest.mark.parametrize(("cost", "side"), [(5.0, "right"), (20.0, "left"), (1000.0, "edge")])
def test_a_bar_begins_at_uvloop_and_ends_at_the_ratio(cost, side):
    scale = chart.Scale(1.0)
    report = report_of("micro-gather", uvloop=[10.0], uringloop=[cost])
    group = ElementTree.fromstring(chart.bar(report, "uringloop", scale, 100))
    x, width = numbers(group.find("rect"), "x", "width")
    one = scale.x(1)
    start = {"right": one, "left": scale.x(0.5), "edge": chart.LEFT}[side]
    assert x == pytest.approx(start)
    end = scale.x(2) if side == "right" else one
    assert x + width == pytest.approx(end)


def test_twice_as_fast_and_half_as_fast_are_as_far_from_uvloop():
    scale = chart.Scale(1.0)
    assert scale.x(2) - scale.x(1) == pytest.approx(scale.x(1) - scale.x(0.5), abs=0.2)


def test_a_run_without_any_row_can_be_drawn_and_told():
    run = asdict(new_run([]))
    ElementTree.fromstring(chart.draw(run))
    assert "None." in suite_report.markdown(run)
