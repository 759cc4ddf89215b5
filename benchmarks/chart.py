"""`python -m benchmarks chart FILE.json OUT.svg`: the ratios of a run as a picture.

One line per row: a bar from uvloop's 1 to the ratio of each of our loops, on a logarithmic scale,
so that twice as fast and half as fast are as far from uvloop. Written by hand: SVG is text.
"""

import argparse
import json
import math
from html import escape
from pathlib import Path

from benchmarks import rows
from benchmarks.loops import BASELINE
from benchmarks.verdicts import OURS, OURS_EPOLL, RowReport, Verdict, report_rows

WIDTH = 1000
LEFT, RIGHT = 284, 844
"""The plot's edges; names are before it, figures after it."""

HEAD, FOOT = 112, 52
ROW, GROUP = 27, 34
LOWEST, HIGHEST = 0.2, 6.4
TICKS = (0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8, 12)

COLUMNS = {OURS: 898, OURS_EPOLL: 970}
COLOURS = {OURS: "#1d4ed8", OURS_EPOLL: "#0d9488"}
THICKNESS = {OURS: 8, OURS_EPOLL: 5}
OFFSETS = {OURS: -4.5, OURS_EPOLL: 4}
INK, SOFT, GRID, BAND = "#111827", "#6b7280", "#e5e7eb", "#f8fafc"
GOOD, BAD, PEER = "#15803d", "#b91c1c", "#a21caf"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"


class Scale:
    """From a ratio to a position; what lies outside is drawn at the edge."""

    def __init__(self, highest: float) -> None:
        self._low = math.log(LOWEST)
        self._high = math.log(max(HIGHEST, highest * 1.05))

    def holds(self, ratio: float) -> bool:
        """Whether a ratio is inside."""
        return self._low <= math.log(ratio) <= self._high

    def x(self, ratio: float) -> float:
        """The position of a ratio."""
        share = (math.log(ratio) - self._low) / (self._high - self._low)
        return round(LEFT + (RIGHT - LEFT) * min(1.0, max(0.0, share)), 1)


def text(x: float, y: float, words: str, **style: object) -> str:
    """A text; `style` are attributes, with _ for -."""
    return f'<text x="{x:g}" y="{y:g}"{attributes(style)}>{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, colour: str, width: float = 1) -> str:
    """A line."""
    ends = f'x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}"'
    return f'<line {ends} stroke="{colour}" stroke-width="{width:g}"/>'


def rectangle(x: float, y: float, width: float, height: float, fill: str, radius: int = 0) -> str:
    """A filled rectangle."""
    size = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
    return f'<rect {size} rx="{radius}" fill="{fill}"/>'


def circle(x: float, y: float, radius: float, **style: object) -> str:
    """A circle."""
    return f'<circle cx="{x:g}" cy="{y:g}" r="{radius:g}"{attributes(style)}/>'


def attributes(style: dict[str, object]) -> str:
    """Attributes of an element."""
    return "".join(f' {name.replace("_", "-")}="{value}"' for name, value in style.items())


def hinted(words: str, *parts: str) -> str:
    """Elements with a text that shows where the pointer rests."""
    return f"<g><title>{escape(words)}</title>{''.join(parts)}</g>"


def bar(report: RowReport, loop: str, scale: Scale, middle: float) -> str:
    """The bar of one of our loops, with the range of its rounds."""
    ratio = report.ratio(loop)
    if ratio is None:
        return ""
    y = middle + OFFSETS[loop]
    one, end = scale.x(1), scale.x(ratio.ratio)
    low, high = scale.x(ratio.low), scale.x(ratio.high)
    thickness = THICKNESS[loop]
    left, width = min(one, end), max(1.5, abs(end - one))
    return hinted(
        f"{report.row.title}: {loop} {ratio.ratio:.2f}, rounds {ratio.low:.2f} to {ratio.high:.2f}",
        rectangle(left, y - thickness / 2, width, thickness, COLOURS[loop], 1),
        line(low, y, high, y, INK),
        line(low, y - 2, low, y + 2, INK),
        line(high, y - 2, high, y + 2, INK),
    )


def marker(report: RowReport, loop: str | None, scale: Scale, middle: float, shape: str) -> str:
    """The mark of another loop: asyncio's, the best peer's, the floor's."""
    ratio = report.ratio(loop) if loop else None
    if loop is None or ratio is None:
        return ""
    x = scale.x(ratio.ratio)
    words = f"{report.row.title}: {loop} {ratio.ratio:.2f}"
    if not scale.holds(ratio.ratio):
        figure = text(x + 3, middle + 4, f"◂ {ratio.ratio:.2f}", fill=SOFT, **SMALL)
        return hinted(words, rectangle(x, middle - 7, 42, 14, "#ffffff", 3), figure)
    return hinted(words, shape_of(shape, x, middle))


SMALL = {"font_size": 10.5}


def shape_of(shape: str, x: float, y: float) -> str:
    """The mark itself."""
    if shape == "asyncio":
        return circle(x, y, 3.4, fill="#9ca3af", stroke="#ffffff", stroke_width=1)
    if shape == "peer":
        return circle(x, y, 4, fill="#ffffff", stroke=PEER, stroke_width=2)
    if shape == "floor":
        points = f"{x:g},{y - 5:g} {x + 5:g},{y:g} {x:g},{y + 5:g} {x - 5:g},{y:g}"
        return f'<polygon points="{points}" fill="#ffffff" stroke="{INK}" stroke-width="1.4"/>'
    return line(x, y - 11, x, y + 11, "#ea580c", 2.4)


def verdict_mark(verdict: Verdict, x: float, y: float) -> str:
    """A tick or a cross before a figure; faint when the rounds don't agree."""
    steps = "m0,0 l3,3.4 l5.4,-7.4" if verdict.met else "m1,-4 l6.4,7.4 m0,-7.4 l-6.4,7.4"
    colour = GOOD if verdict.met else BAD
    opacity = 1 if verdict.certain else 0.4
    path = f'<path d="M{x:g},{y:g} {steps}" fill="none" stroke="{colour}" stroke-width="1.9"'
    return hinted(str(verdict), f'{path} opacity="{opacity}"/>')


def row_elements(report: RowReport, scale: Scale, middle: float) -> list[str]:
    """All of one row."""
    title = f"{report.row.title}"
    parts = [text(LEFT - 14, middle + 4, title, text_anchor="end", fill=INK, font_size=12.5)]
    if report.error is not None or report.ratio(BASELINE) is None:
        words = report.error or f"{BASELINE} was not measured"
        return [*parts, text(scale.x(1) + 8, middle + 4, words[:70], fill=BAD, **SMALL)]
    # The marks of others in the middle, over the bars: what is compared stays in sight.
    parts += [bar(report, loop, scale, middle) for loop in COLUMNS]
    target = scale.x(report.target(OURS))
    words = f"{report.row.title}: target {report.target(OURS):.2f}"
    parts.append(hinted(words, shape_of("target", target, middle)))
    parts.append(marker(report, "asyncio", scale, middle, "asyncio"))
    parts.append(marker(report, report.floor, scale, middle, "floor"))
    parts.append(marker(report, report.peer, scale, middle, "peer"))
    for loop, x in COLUMNS.items():
        ratio, verdict = report.ratio(loop), report.verdict(loop)
        if ratio is None or verdict is None:
            parts.append(text(x, middle + 4, "–", text_anchor="end", fill=SOFT, font_size=12.5))
            continue
        style = {"font_size": 12.5, "font_weight": 600, "fill": COLOURS[loop]}
        parts.append(text(x, middle + 4.5, f"{ratio.ratio:.2f}", text_anchor="end", **style))
        parts.append(verdict_mark(verdict, x - 43, middle + 1))
    return parts


def legend() -> list[str]:
    """What the marks mean, above the plot."""
    entries = [
        (OURS, rectangle(0, -4, 22, 8, COLOURS[OURS], 1), 22),
        (OURS_EPOLL, rectangle(0, -2.5, 22, 5, COLOURS[OURS_EPOLL], 1), 22),
        ("target (io_uring)", shape_of("target", 4, 0), 8),
        ("asyncio", shape_of("asyncio", 4, 0), 8),
        ("best peer", shape_of("peer", 5, 0), 10),
        ("C without Python", shape_of("floor", 5, 0), 10),
        ("range of the rounds", line(0, 0, 18, 0, INK) + line(0, -3, 0, 3, INK)
         + line(18, -3, 18, 3, INK), 18),
    ]  # fmt: skip
    parts, x = [], 28
    for words, mark, width in entries:
        parts.append(f'<g transform="translate({x:g},72)">{mark}</g>')
        parts.append(text(x + width + 6, 76, words, fill=INK, font_size=11.5))
        x += width + 6 + len(words) * 6.4 + 20
    return parts


def heading(run: dict) -> list[str]:
    """Title and machine."""
    host = run["machine"]
    commit = f", commit {host['commit']}" if host["commit"] else ""
    about = f"{host['cpu']}, {host['cpus']} CPUs, {host['kernel']}, CPython {run['python']}"
    about += f", {host['date'][:10]}{commit}"
    title = f"Ratio to {BASELINE}: right of the line is faster"
    return [
        text(28, 30, title, fill=INK, font_size=18, font_weight=700),
        text(28, 50, about, fill=SOFT, font_size=11.5),
        *legend(),
    ]


def axis(scale: Scale, top: float, bottom: float) -> list[str]:
    """The grid, and the figures at both ends of it."""
    parts = []
    for tick in TICKS:
        if not scale.holds(tick):
            continue
        x = scale.x(tick)
        parts.append(line(x, top, x, bottom, SOFT if tick == 1 else GRID, 1.6 if tick == 1 else 1))
        words = BASELINE if tick == 1 else f"{tick:g}"
        style = {"text_anchor": "middle", "fill": INK if tick == 1 else SOFT, "font_size": 11}
        parts += [text(x, top - 6, words, **style), text(x, bottom + 15, words, **style)]
    for loop, x in COLUMNS.items():
        style = {"text_anchor": "end", "fill": COLOURS[loop], "font_size": 11, "font_weight": 600}
        words = "io_uring" if loop == OURS else "epoll"
        parts.append(text(x, top - 6, words, **style))
    return parts


def footer(run: dict, y: float) -> list[str]:
    """What is no ratio, under the plot."""
    parts = []
    for report in report_rows(run):
        if report.row.metric == "syscalls":
            figures = [(name, report.value(name)) for name in (BASELINE, *COLUMNS)]
            words = ", ".join(f"{name} {value:.2f}" for name, value in figures if value is not None)
            line_ = f"System calls per message, {report.row.title}: {words}"
            parts.append(text(28, y, line_, fill=INK, font_size=11.5))
    return parts


def draw(run: dict) -> str:
    """The picture of a run's file."""
    reports = [report for report in report_rows(run) if report.row.metric != "syscalls"]
    ratios = [found.ratio for each in reports for loop in COLUMNS if (found := each.ratio(loop))]
    scale = Scale(max([*ratios, *(each.target(OURS) for each in reports)], default=HIGHEST))
    y, body, bands = float(HEAD), [], []
    for group, words in rows.GROUPS.items():
        members = [report for report in reports if report.row.group == group]
        if not members:
            continue
        style = {"fill": INK, "font_size": 13, "font_weight": 700}
        body.append(text(28, y + GROUP - 11, words, **style))
        y += GROUP
        for number, report in enumerate(members):
            if number % 2 == 0:
                bands.append(rectangle(16, y, WIDTH - 32, ROW, BAND, 3))
            body += row_elements(report, scale, y + ROW / 2)
            y += ROW
    height = y + FOOT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" '
        f'width="{WIDTH}" height="{height:g}" font-family="{FONT}">',
        rectangle(0, 0, WIDTH, height, "#ffffff", 8),
        *bands, *heading(run), *axis(scale, HEAD, y), *body, *footer(run, y + 38), "</svg>",
    ]  # fmt: skip
    return "\n".join(filter(None, parts)) + "\n"


def main(arguments: list[str]) -> int:
    """The `chart` command; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks chart", description="Draw the file of `table` as SVG."
    )
    parser.add_argument("file", type=Path, help="what `table` has written")
    parser.add_argument("out", type=Path, help="the SVG to write")
    given = parser.parse_args(arguments)
    given.out.write_text(draw(json.loads(given.file.read_text())))
    return 0
