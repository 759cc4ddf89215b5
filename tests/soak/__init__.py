"""Load for minutes: nothing is lost, nothing is left, nobody starves. `make soak MINUTES=10`.

`PYTHONPATH=tests python -m soak --minutes N --kinds io_uring,epoll` from the checkout.

    __main__.py     the command line: splits the minutes, prints the tables, the exit status
    report.py       the tables, the failed checks
    worker.py       one scenario on one loop, in a process of its own: both parts, the checks
    run.py          Run: the time, the dice, what was counted and what went wrong
    leaks.py        what must be after a scenario as it was before
    peer.py         a second process, for scenarios with more than one
    content.py      bytes by position: a loss, a repetition or a swap shows
    exchange.py     one conversation over a connection, in nine manners of ending
    echo.py         an echo server and clients that verify what comes back
    chaos.py        the proxy that delays, splits, joins and resets
    scenarios/      one module each; __init__.py lists them

A scenario runs in two parts, the second twice as long: what grows between their ends is a leak,
because everything is closed at both.
"""

import pathlib
import sys

TESTS = pathlib.Path(__file__).resolve().parent.parent
ROOT = TESTS.parent

# The processes and the tables are those of benchmarks/. At the end of the path, where the checkout
# cannot hide another build of uringloop.
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))
