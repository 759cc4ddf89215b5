"""What an environment may do to a loop that works: signals by the thousand, few descriptors, little
memory, a seccomp filter that comes later, a process that is stopped for a while."""

import asyncio
import contextlib
import json
import os
import signal
import threading

import figures
import pytest
from helpers import run_child, until
from workload import Workload

KINDS = ("asyncio", "io_uring", "epoll")


@contextlib.contextmanager
def signals(pause):
    """SIGUSR1 to the main thread again and again; yields a list of one number, how many."""
    main, stop, sent = threading.main_thread().ident, threading.Event(), [0]

    def send():
        while not stop.wait(pause):
            signal.pthread_kill(main, signal.SIGUSR1)
            sent[0] += 1

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield sent
    finally:
        stop.set()
        thread.join()


@pytest.fixture
def usual_handler():
    old = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, old)


def worked(loop, loop_kind, faults, **options):
    outcome = loop.run_until_complete(asyncio.wait_for(Workload(loop, **options).run(), 60))
    assert not outcome.failed
    assert not outcome.errors
    figures.count(loop_kind, cases=1, faults=faults(), connections=outcome.connections,
                  bytes=outcome.bytes)


@pytest.mark.parametrize("pause", [0.001, 0.0001])
@pytest.mark.parametrize("interrupts", [False, True], ids=["restart", "interrupt"])
def test_signals_with_a_python_handler_lose_nothing(new_loop, loop_kind, contexts, usual_handler,
                                                    interrupts, pause):
    seen = []
    signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    signal.siginterrupt(signal.SIGUSR1, interrupts)
    for _ in range(figures.repeats(1)):
        with signals(pause) as sent:
            worked(new_loop(), loop_kind, lambda sent=sent: sent[0], contexts=contexts,
                   size=200_000)
    assert seen


def test_signals_with_a_handler_of_the_loop_lose_nothing(new_loop, loop_kind, contexts,
                                                         usual_handler):
    loop = new_loop()
    for _ in range(figures.repeats(1)):
        seen = []
        loop.add_signal_handler(signal.SIGUSR1, seen.append, None)
        with signals(0.0005) as sent:
            worked(loop, loop_kind, lambda sent=sent: sent[0], contexts=contexts, size=200_000)
        loop.run_until_complete(until(lambda seen=seen: seen))      # the last of them comes, too
        loop.remove_signal_handler(signal.SIGUSR1)
        assert 0 < len(seen) <= sent[0]


FEW_DESCRIPTORS = """
import gc, json, resource, warnings
import workload
loop.close()
warnings.simplefilter("ignore")
asyncio.constants.ACCEPT_RETRY_DELAY = 0.01
before = helpers.open_fds()
first = max(before) + 1
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
report = {"raised": 0, "done": 0, "connections": 0, "bytes": 0, "leaked": [], "stalled": []}
for spare in SPARE:
    resource.setrlimit(resource.RLIMIT_NOFILE, (first + spare, hard))
    loop = work = outcome = None
    try:
        loop = helpers.make_loop(kind)
        loop.set_exception_handler(lambda loop, context: None)
        work = workload.Workload(loop, size=5000)
        # A server that lacks a descriptor for its client waits for one.
        loop.call_later(0.3, resource.setrlimit, resource.RLIMIT_NOFILE, (hard, hard))
        outcome = loop.run_until_complete(asyncio.wait_for(work.run(), 20))
        report["done"] += not outcome.failed
        report["connections"] += outcome.connections
        report["bytes"] += outcome.bytes
    except TimeoutError:
        report["stalled"].append(spare)
    except (OSError, AssertionError) as exc:
        assert isinstance(exc, OSError) or "instead of" in str(exc), exc
        report["raised"] += 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if loop is not None:
        loop.close()
    loop = work = outcome = None
    for _ in range(3):
        gc.collect()
    left = {fd: name for fd, name in helpers.open_fds().items() if fd not in before}
    if left:
        report["leaked"].append((spare, list(left.values())))
        before = helpers.open_fds()
print(json.dumps(report))
"""


def child_report(ended):
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads(ended.stdout.splitlines()[-1])


def in_faults():
    here = os.path.dirname(os.path.abspath(__file__))
    return f"import sys\nsys.path.insert(0, {here!r})\n"


@pytest.mark.timeout(150)
def test_every_descriptor_may_be_the_last(loop_kind):
    """The limit is reached at each step: an error, or the work is done; none is left open."""
    spare = "range(0, 60)" if figures.repeats(1) > 1 else "(0, 1, 2, 3, 4, 6, 9, 14, 60)"
    found = child_report(run_child(
        loop_kind, in_faults() + FEW_DESCRIPTORS.replace("SPARE", spare), limit=140))
    assert not found["leaked"]
    assert not found["stalled"]
    assert found["raised"] >= 4
    assert found["done"] >= 1
    figures.count(loop_kind, cases=found["raised"] + found["done"], faults=found["raised"],
                  connections=found["connections"], bytes=found["bytes"])


FILTERED = """
import errno, gc, json, os, refuse_io_uring, warnings
import workload
warnings.simplefilter("ignore")
before = helpers.open_fds()
loop.set_exception_handler(lambda loop, context: None)

async def main():
    first = await workload.Workload(loop, size=5000).run()
    assert not first.failed
    for number in NUMBERS:
        refuse_io_uring.refuse(number, number, ERROR)
    return await workload.Workload(loop, size=50_000).run()

result = "done"
try:
    outcome = loop.run_until_complete(asyncio.wait_for(main(), 30))
    assert not outcome.failed, outcome
except OSError as exc:
    result = repr(exc)
loop.close()
print(json.dumps({"result": result}))
"""


@pytest.mark.parametrize("error", ["EPERM", "ENOSYS"])
@pytest.mark.parametrize("calls", ["register", "enter", "enter and register", "epoll_pwait2"])
def test_a_filter_that_comes_later(loop_kind, calls, error):
    """What the loop can do without, it does without; else a clear error, and close() works."""
    numbers = {"register": [427], "enter": [426], "enter and register": [426, 427],
               "epoll_pwait2": [441]}[calls]
    script = FILTERED.replace("NUMBERS", repr(numbers)).replace("ERROR", f"errno.{error}")
    found = child_report(run_child(loop_kind, in_faults() + script, limit=60))
    if loop_kind == "io_uring" and 426 in numbers:
        assert "io_uring_enter failed while the loop was running" in found["result"]
    else:
        assert found["result"] == "done"
    figures.count(loop_kind, cases=1, faults=1)


STOPPED = """
import json, os, signal
order = []
for number in range(20):
    loop.call_later(0.05 + 0.01 * number, order.append, number)
print("ready", flush=True)
loop.call_later(0.4, loop.stop)
loop.run_forever()
print(json.dumps({"order": order}))
"""


def test_timers_of_a_process_that_was_stopped_run_once_each_and_in_order(loop_kind):
    code = "import os, signal, time\npid = os.getpid()\nif os.fork() == 0:\n" \
           "    time.sleep(0.1)\n    os.kill(pid, signal.SIGSTOP)\n    time.sleep(0.3)\n" \
           "    os.kill(pid, signal.SIGCONT)\n    os._exit(0)\n" + STOPPED
    found = child_report(run_child(loop_kind, code))
    assert found["order"] == list(range(20))
    figures.count(loop_kind, cases=1, faults=1)


def test_no_clock_that_can_jump_is_read(loop_kind):
    """time.time() and the like may say what they want."""
    script = """
import datetime, json, time
time.time = time.time_ns = lambda: 0
order = []
for number in range(5):
    loop.call_later(0.01 * number, order.append, number)
loop.call_later(0.1, loop.stop)
loop.run_forever()
print(json.dumps({"order": order}))
"""
    assert child_report(run_child(loop_kind, script))["order"] == list(range(5))


@pytest.mark.parametrize("options", [{}, {"ring_entries": 8192, "recv_buffers": 32768}],
                         ids=["usual", "large"])
@pytest.mark.parametrize("limit", [0, 8192, 65536, 262144])
def test_little_locked_memory_without_privileges(loop_kind, limit, options):
    """The rings shrink, or the loop says why it runs on epoll; the work is done in each case."""
    if loop_kind == "asyncio" or os.geteuid() != 0:
        pytest.skip("about the ring; needs root to become nobody")
    script = """
import json, os, resource, uringloop, warnings
import workload
loop.close()
resource.setrlimit(resource.RLIMIT_MEMLOCK, (MOST, MOST))
os.setgid(65534); os.setuid(65534)
from uringloop import backend
backend._found.clear()
chosen = "epoll" if kind == "epoll" else "auto"
loop = uringloop.new_event_loop(uringloop.LoopOptions(backend=chosen, **OPTIONS))
outcome = loop.run_until_complete(asyncio.wait_for(workload.Workload(loop).run(), 30))
assert not outcome.failed and not outcome.errors, outcome
loop.close()
print(json.dumps({"backend": loop.backend, "reason": loop.backend_reason}))
"""
    found = child_report(run_child(loop_kind, in_faults() + script.replace(
        "MOST", str(limit)).replace("OPTIONS", repr(options))))
    if found["backend"] != loop_kind:
        assert "RLIMIT_MEMLOCK" in found["reason"]
        assert limit < 65536, "there is room for a ring of 256"
    figures.count(loop_kind, cases=1, faults=1)
