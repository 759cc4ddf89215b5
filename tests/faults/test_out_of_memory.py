"""Each allocation of the engine's fails once: errors are raised or reported, connections end, and
nothing crashes, stands still unheard, leaks a descriptor or delivers a wrong byte."""

import json
import os
import pathlib
import subprocess
import sys

import figures
import pytest
from helpers import run_child

import uringloop
from uringloop import _core

pytestmark = pytest.mark.skipif(not hasattr(_core, "disturb_memory"),
                                reason="needs the proving build (make faults)")
KINDS = ("io_uring", "epoll")
SCRIPT = pathlib.Path(__file__).with_name("out_of_memory.py")
ALLOCATIONS = 600           # more than the script's work makes
PER_CHILD = 60


def sweep(kind, first, last, burst, options=""):
    search = os.fspath(pathlib.Path(uringloop.__file__).parents[1])
    ended = subprocess.run(
        [sys.executable, "-X", "faulthandler", SCRIPT, kind, str(first), str(last), str(burst)],
        env={**os.environ, "PYTHONPATH": search, "URINGLOOP_OPTIONS": options},
        capture_output=True, text=True, timeout=150)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads(ended.stdout)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("first", range(0, ALLOCATIONS, PER_CHILD))
@pytest.mark.parametrize("burst", [1, 2, 5])
def test_an_allocation_that_fails_ends_no_more_than_its_own_work(loop_kind, first, burst):
    step = max(1, 4 // figures.repeats(1))
    for start in range(first, first + PER_CHILD, 20 * step):
        found = sweep(loop_kind, start, start + 20, burst)
        assert not found["silent"], "stands still, and nobody was told"
        assert not found["leaked"]
        assert not found["odd"]
        # After one failure nothing stands still; after several at once a task may not be woken,
        # as asyncio's may not whose call_soon() failed. Somebody was told then.
        assert burst > 1 or not found["stalled"]
        figures.count(loop_kind, cases=found["cases"], faults=found["cases"] * burst)
        if found["most"] <= start:
            break               # the work makes fewer allocations


@pytest.mark.timeout(200)
@pytest.mark.parametrize("first", range(0, ALLOCATIONS, PER_CHILD))
def test_an_allocation_fails_where_sends_are_zero_copy(loop_kind, first):
    if loop_kind == "epoll":
        pytest.skip("has no zero-copy sends")
    found = sweep(loop_kind, first, first + PER_CHILD // 3, 1, "send_zerocopy=4096")
    assert not (found["silent"] or found["leaked"] or found["odd"] or found["stalled"])
    figures.count(loop_kind, cases=found["cases"], faults=found["cases"])


CALLS = """
from uringloop import _core

async def send(number):
    ours, peer = helpers.make_pair("unix")
    ours.setblocking(False)
    with ours, peer:
        _core.disturb_memory(number, 1)
        try:
            await loop.sock_sendall(ours, b"first ")
        except MemoryError:
            pass
        made = _core.undisturbed_memory()
        await helpers.ticks()
        await loop.sock_sendall(ours, b"second")
        assert peer.recv(100) in (b"second", b"first second")
    return made

number = made = 0
while number <= made:
    made = loop.run_until_complete(send(number))
    number += 1
loop.close()
print("over")
"""


def test_a_call_that_fails_for_want_of_memory_leaves_the_next_one_alone(loop_kind):
    child = run_child(loop_kind, CALLS)
    assert (child.returncode, child.stdout) == (0, "over\n"), child.stderr
