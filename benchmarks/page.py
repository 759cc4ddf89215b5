"""`python -m benchmarks report FILE.json`: a run as Markdown, on stdout or in a page of the docs.

A page has its generated parts between markers, `<!-- table -->` and `<!-- /table -->`; what stands
elsewhere is written by hand and stays. The chart goes beside the page, under its name.
"""

import argparse
import json
import re
import sys
from pathlib import Path

from benchmarks import chart, suite_report
from benchmarks.verdicts import report_rows


def parts(run: dict) -> dict[str, str]:
    """The generated parts of a page by the names of their markers."""
    reports = report_rows(run)
    failures = suite_report.failed_lines(reports)
    return {
        "table": f"{suite_report.table(reports)}\n\n{suite_report.summary_line(reports)}.",
        "machine": suite_report.machine_lines(run),
        "lost": suite_report.lost_lines(reports),
        "failures": failures or "None.",
    }


def fill(page: str, run: dict) -> str:
    """The page with its generated parts renewed. Raises ValueError for one without markers."""
    for name, text in parts(run).items():
        between = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        page, count = between.subn(lambda found: f"{found[1]}\n{text}\n\n{found[2]}", page)
        if count != 1:
            raise ValueError(f"expected <!-- {name} --> and <!-- /{name} --> once, on own lines")
    return page


def main(arguments: list[str]) -> int:
    """The `report` command; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks report", description="The file of `table` as Markdown."
    )
    parser.add_argument("file", type=Path, help="what `table` has written")
    parser.add_argument(
        "--docs", type=Path, metavar="PAGE", help="renew this page and the chart beside it instead"
    )
    given = parser.parse_args(arguments)
    run = json.loads(given.file.read_text())
    if given.docs is None:
        print(suite_report.markdown(run))
        return 0
    try:
        page = fill(given.docs.read_text(), run)
    except ValueError as error:
        print(f"{given.docs}: {error}", file=sys.stderr)
        return 1
    given.docs.write_text(page)
    given.docs.with_suffix(".svg").write_text(chart.draw(run))
    return 0
