"""The file of a run as Markdown: its table, what it ran on, and the rows that are lost."""

from benchmarks import rows
from benchmarks.loops import BASELINE
from benchmarks.verdicts import OURS, OURS_EPOLL, RowReport, report_rows

HEADERS = [
    "row", "asyncio", f"{BASELINE} (= 1)", OURS, OURS_EPOLL, "best peer", "floor", "target", "mark",
]  # fmt: skip

NOTE = f"""\
Ratios to {BASELINE}, above 1 is better, medians over the rounds, with the lowest and the highest
round of our own loops. The word in brackets is what is compared: CPU is {BASELINE}'s CPU time per
message or operation by the loop's, req/s the loop's requests per second by {BASELINE}'s. The
column of {BASELINE} has its own figure. "Floor" is the better of two C servers without Python.
Target and mark are those of {OURS} / {OURS_EPOLL}; "?" says that the rounds don't agree on
which side of the target the loop is, "behind" names a loop of another project with a higher ratio
(for {OURS_EPOLL}: {BASELINE})."""


def title(report: RowReport) -> str:
    """A row's name, with what is compared in it."""
    return f"{report.row.title} ({rows.METRIC_NAMES[report.row.metric]})"


def figure(report: RowReport, loop: str) -> str:
    """A loop's own figure with its unit; an empty text when it wasn't measured."""
    value = report.value(loop)
    if value is None:
        return ""
    if report.row.metric == "rate":
        return f"{value:,.0f}/s"
    if report.row.metric == "syscalls":
        return f"{value:.2f}"
    if value < 1:
        return f"{value * 1e3:,.0f} ns"
    return f"{value:.2f} µs" if value < 10 else f"{value:,.0f} µs"


def ratio_cell(report: RowReport, loop: str | None, spread: bool = False, name: str = "") -> str:
    """A loop's ratio, or why there is none."""
    if loop is None:
        return "–"
    if report.row.metric == "syscalls":
        return figure(report, loop) or "–"
    ratio = report.ratio(loop)
    if ratio is None:
        return "failed" if report.failures.get(loop, "absent").startswith("failed") else "–"
    text = f"{ratio.ratio:.2f}"
    if spread:
        text = f"**{text}** ({ratio.low:.2f}–{ratio.high:.2f})"
    return f"{text} {name}".strip()


def table_line(report: RowReport) -> list[str]:
    """The cells of one row."""
    if report.error is not None:
        words = f"failed: {report.error}" if report.measured else report.error
        return [title(report), words, *[""] * (len(HEADERS) - 2)]
    verdicts = [report.verdict(loop) for loop in (OURS, OURS_EPOLL)]
    targets = [report.target(loop) for loop in (OURS, OURS_EPOLL)]
    most = "≤ " if report.row.metric == "syscalls" else ""
    return [
        title(report),
        ratio_cell(report, "asyncio"),
        figure(report, BASELINE) or "–",
        ratio_cell(report, OURS, spread=True),
        ratio_cell(report, OURS_EPOLL, spread=True),
        ratio_cell(report, report.peer, name=report.peer or ""),
        ratio_cell(report, report.floor),
        " / ".join(f"{most}{target:.2f}" for target in targets),
        " / ".join("–" if verdict is None else str(verdict) for verdict in verdicts),
    ]


def table(reports: list[RowReport]) -> str:
    """The table of a run."""
    lines = [HEADERS, ["---"] * len(HEADERS), *map(table_line, reports)]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


def machine_lines(run: dict) -> str:
    """Machine, versions and lengths of a run, as a list."""
    host, settings = run["machine"], run["settings"]
    versions = {}
    for info in run["loops"].values():
        versions |= {name: version for name, version in info["versions"].items() if version}
    versions |= run["packages"]
    commit = f", commit {host['commit']}" if host["commit"] else ""
    scheduling = "SCHED_FIFO" if settings["realtime"] else "normal scheduling"
    lines = [
        f"{host['cpu']}, {host['cpus']} CPUs, {host['kernel']}, CPython {run['python']}",
        ", ".join(f"{name} {version}" for name, version in versions.items()),
        f"{host['date']}{commit}, load average {host['load_average']:.2f} before the start",
        f"server on CPU {settings['cpus'][0]}, client on CPU {settings['cpus'][1]}, {scheduling}, "
        f"{settings['rounds']} paired rounds of {settings['seconds']:g} s after "
        f"{settings['warmup']:g} s of warm-up, {settings['micro_seconds']:g} s without network",
    ]
    lines += [f"{name}: {text}" for name, text in run["unavailable"].items()]
    return "\n".join(f"- {line}" for line in lines)


def lost_lines(reports: list[RowReport]) -> str:
    """The rows in which one of our loops misses its target or is behind another, as a list."""
    lines = []
    for report in reports:
        words = []
        for loop in (OURS, OURS_EPOLL):
            verdict = report.verdict(loop) if report.error is None else None
            if verdict is not None and verdict.lost:
                reached = ratio_cell(report, loop)
                words.append(f"{loop} {reached} of {verdict.target:.2f}, {verdict}")
        if words:
            lines.append(f"- {title(report)}: {'; '.join(words)}")
    return "\n".join(lines) or "None."


def failed_lines(reports: list[RowReport]) -> str:
    """What failed, row by row; empty when nothing did."""
    errors = [report for report in reports if report.measured and report.error]
    lines = [f"- {title(report)}: {report.error}" for report in errors]
    for report in reports:
        lines += [
            f"- {title(report)}, {loop}: {text}"
            for loop, text in report.failures.items()
            if not text.startswith("absent")
        ]
    return "\n".join(lines)


def summary_line(reports: list[RowReport]) -> str:
    """How many rows are met, for each of our loops."""
    texts = []
    for loop in (OURS, OURS_EPOLL):
        verdicts = [found for report in reports if (found := report.verdict(loop))]
        met = sum(verdict.met for verdict in verdicts)
        first = sum(verdict.behind is None for verdict in verdicts)
        place = "first" if loop == OURS else f"not behind {BASELINE}"
        texts.append(f"{loop}: {met} of {len(verdicts)} targets met, {place} in {first}")
    return "; ".join(texts)


def markdown(run: dict) -> str:
    """The whole report of a run's file."""
    reports = report_rows(run)
    parts = [
        "# Benchmarks", machine_lines(run), NOTE, table(reports), summary_line(reports),
        "## Lost rows", lost_lines(reports),
    ]  # fmt: skip
    if failures := failed_lines(reports):
        parts += ["## Failures", failures]
    return "\n\n".join(parts)
