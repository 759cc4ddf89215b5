"""What is printed at the end: one table, and every difference that is not in a list."""

from .results import differences
from .suite import LOOPS, OURS


def text_of(plans, not_run, expectations, complete):
    """(text, True when nothing is wrong). not_run: (suite, python, reason) triples;
    complete: everything ran, so that lines of the lists that nothing matched can be told."""
    found = {plan: _differences(plan, expectations) for plan in plans}
    lines = [*_table(plans, found, not_run), *_kept(plans), *_unsteady(plans)]
    wrong = [one for some in found.values() for one in some if not one.expected]
    if wrong:
        lines += ["", "Pass on asyncio, not on uringloop, and not in a list of expected ones:"]
        lines += [f"  {one.outcome:<8} {one.python} {one.loop:<8} {one.test}\n"
                  f"           {_last_line(one.message)}" for one in wrong]
    broken = [f"asyncio cannot run it: {test}: {_last_line(result.message)}" for plan in plans
              for test, result in _unreadable(plan.column("asyncio"))]
    lines += ["", *broken] if broken else []
    if complete:
        lines += [f"expected to differ, but did not: {pattern}"
                  for pattern in expectations.unused()]
    lines += ["", f"{len(wrong)} unexpected difference{'' if len(wrong) == 1 else 's'}"]
    return "\n".join(lines), not wrong and not broken


def _unreadable(column):
    """Files of which no test could run: what a suite requires is missing, most likely."""
    if column:
        yield from ((test, result) for test, result in sorted(column.tests.items())
                    if result.bad and test.endswith(">"))


def _differences(plan, expectations):
    reference = plan.column("asyncio")
    if reference is None:
        return []
    return [one for column in plan.columns if column.loop in OURS
            for one in differences(reference, column, expectations)]


def _table(plans, found, not_run):
    width = max([len(plan.suite.name) for plan in plans]
                + [len(suite) for suite, *_ in not_run] + [5])
    titles = "".join(f"  {loop:^18}" for loop in LOOPS)
    numbers = f"  {'pass':>6}{'fail':>6}{'skip':>6}"
    yield f"{'':{width + 8}}{titles}"
    yield (f"{'suite':<{width}}  python{numbers * len(LOOPS)}  expected  unexpected"
           "   loops made")
    for plan in plans:
        cells = ""
        for loop in LOOPS:
            column = plan.column(loop)
            counts = column.counts() if column else ("-", "", "")
            cells += "  " + "".join(f"{count:>6}" for count in counts)
        expected = sum(bool(one.expected) for one in found[plan])
        made = sum(column.loops for column in plan.columns if column.loop in OURS)
        yield (f"{plan.suite.name:<{width}}  {plan.env.version:<6}{cells}  {expected:>8}  "
               f"{len(found[plan]) - expected:>10}   {made:>10}")
    for suite, python, reason in not_run:
        yield f"{suite:<{width}}  {python:<6}  not run: {reason}"


def _kept(plans):
    kept = sorted({column.loop for plan in plans for column in plan.columns if column.kept})
    if kept:
        yield f"Columns of {' and '.join(kept)} are of an earlier run (FRESH=1 repeats them)."


def _unsteady(plans):
    for plan in plans:
        for column in plan.columns:
            for test, message in sorted(column.unsteady.items()):
                yield (f"unsteady (failed once, then passed alone): {column.python} "
                       f"{column.loop} {test}: {_last_line(message)}")


def _last_line(message):
    lines = [line for line in message.splitlines() if line.strip()]
    return lines[-1].strip() if lines else ""
