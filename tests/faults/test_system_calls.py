"""System calls that fail for real (strace --inject), at the first, second, nth call: the work is
done, or ends with a clear error; no crash, no hang, no byte lost, no descriptor left."""

import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time

import figures
import pytest

import uringloop

KINDS = ("io_uring", "epoll")
SCRIPT = pathlib.Path(__file__).with_name("workload.py")

# What a call may answer, and how often in a row: "N" the Nth only, "N+" from it on, "N+M" each Mth.
ONCE = ("1", "3")
RARE = ("eventfd2", "epoll_create1", "shutdown", "io_uring_setup", "socketpair")      # called once
STORM = ("1+2",)
CASES = [
    *((call, "EINTR", when) for call in ("epoll_pwait2", "epoll_wait", "accept4", "recvfrom",
                                         "sendto", "sendmsg", "io_uring_enter")
      for when in STORM),
    *((call, "EAGAIN", when) for call in ("recvfrom", "sendto", "sendmsg", "accept4",
                                          "io_uring_enter") for when in STORM),
    *((call, error, when) for call, errors in {
        "epoll_create1": ("EMFILE", "ENFILE", "ENOMEM"),
        "eventfd2": ("EMFILE", "ENFILE", "ENOMEM"),
        "epoll_ctl": ("ENOMEM", "ENOSPC", "EPERM"),
        "epoll_pwait2": ("ENOSYS", "EPERM"),
        "accept4": ("EMFILE", "ENFILE", "ENOMEM", "ENOBUFS", "ECONNABORTED", "EPERM"),
        "recvfrom": ("ECONNRESET", "ENOMEM", "ETIMEDOUT"),
        "sendto": ("EPIPE", "ECONNRESET", "ENOBUFS", "ENOMEM"),
        "sendmsg": ("EPIPE", "ENOBUFS"),
        "shutdown": ("ENOTCONN", "ENOBUFS"),
        "getsockopt": ("ENOBUFS", "ENOPROTOOPT"),
        "setsockopt": ("ENOMEM", "EINVAL"),
        "socketpair": ("EMFILE", "ENFILE"),
        "io_uring_setup": ("ENOMEM", "EPERM", "EMFILE", "ENFILE", "ENOSYS", "EINVAL"),
        "io_uring_register": ("ENOMEM", "EINVAL", "EPERM"),
        "io_uring_enter": ("ENOMEM", "EPERM", "EBADF", "EBUSY", "ENOSYS"),
        "write": ("EAGAIN",),
    }.items() for error in errors for when in (("1",) if call in RARE else ONCE)),
    *((call, error, "1+") for call, error in (
        ("epoll_pwait2", "ENOSYS"), ("io_uring_setup", "EPERM"), ("io_uring_setup", "ENOMEM"),
        ("io_uring_register", "EPERM"), ("io_uring_enter", "EPERM"), ("io_uring_enter", "EAGAIN"),
        ("setsockopt", "EINVAL"), ("eventfd2", "EMFILE"), ("epoll_create1", "EMFILE"))),
]
A_FEW = [case for case in CASES if case in {
    ("epoll_pwait2", "EINTR", "1+2"), ("recvfrom", "EINTR", "1+2"), ("accept4", "EMFILE", "3"),
    ("io_uring_setup", "ENOMEM", "1+"), ("io_uring_enter", "EPERM", "3"),
    ("epoll_pwait2", "ENOSYS", "1+")}]
assert len(A_FEW) == 6


def why_not():
    if not shutil.which("strace"):
        return "strace is not installed"
    tried = subprocess.run(["strace", "-f", "-o", "/dev/null", "true"], capture_output=True,
                           text=True)
    return f"strace cannot trace here: {tried.stderr}" if tried.returncode else None


@pytest.fixture(scope="module")
def strace():
    reason = why_not()
    if reason:
        pytest.skip(reason)


def injected(kind, call, error, when, log):
    """Run the workload with strace attached before it makes its loop: its report, and how many
    calls failed."""
    search = os.fspath(pathlib.Path(uringloop.__file__).parents[1])
    with contextlib.ExitStack() as stack:
        child = stack.enter_context(subprocess.Popen(
            [sys.executable, "-X", "faulthandler", SCRIPT, kind], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": search}))
        stack.callback(child.kill)
        assert child.stdout.readline() == "ready\n"
        tracer = stack.enter_context(subprocess.Popen(
            ["strace", "-f", "-qq", "-o", os.fspath(log), "-e", f"trace={call}", "-e",
             f"inject={call}:error={error}:when={when}", "-p", str(child.pid)],
            stderr=subprocess.PIPE))
        stack.callback(tracer.kill)
        wait_for_tracer(child.pid)
        out, err = child.communicate("\n", timeout=100)
        tracer.wait(20)
    assert child.returncode == 0, err[-3000:]
    return json.loads(out), log.read_text().count("(INJECTED)")


def wait_for_tracer(pid):
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        status = pathlib.Path(f"/proc/{pid}/status").read_text()
        if "TracerPid:\t0\n" not in status:
            return
        time.sleep(0.01)
    raise AssertionError("strace did not attach")


@pytest.mark.timeout(150)
@pytest.mark.parametrize("call, error, when", CASES if figures.repeats(1) > 1 else A_FEW)
def test_a_system_call_that_fails(strace, loop_kind, call, error, when, tmp_path):
    if loop_kind == "epoll" and call.startswith("io_uring"):
        pytest.skip("the epoll backend makes no such call")
    found, faults = injected(loop_kind, call, error, when, tmp_path / "calls")
    assert not found["leaked"]
    assert "TimeoutError" not in found["result"], "the work stood still"
    if error == "EINTR" or (error == "EAGAIN" and when != "1+"):
        assert found["result"] == "done"
    figures.count(loop_kind, cases=1, faults=faults, connections=found["connections"],
                  bytes=found["bytes"])
