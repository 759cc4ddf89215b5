"""Prepare a process, then become the program: `launch.py PARENT CPU POLICY COMMAND...`.

PARENT is the pid of the benchmark, CPU a number or `any`, POLICY `rt` or `normal`. Run as a
script and replaced by exec, so that the pid which the benchmark knows is the program's own.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # prctl(2); survives exec
_RT_PRIORITY = 1  # any FIFO priority comes before every normal process


def main(parent: str, cpu: str, policy: str, *command: str) -> str:
    """Exec `command`; returns an error text when that fails."""
    # The kernel kills this process when the benchmark dies, SIGKILL included: no server outlives
    # its run. The parent may have died before the call; then the signal would never come.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):
        return "launch: the benchmark has ended"
    try:
        if cpu != "any":
            os.sched_setaffinity(0, {int(cpu)})
        if policy == "rt":
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(_RT_PRIORITY))
    except OSError as error:
        return f"launch: cannot pin to CPU {cpu}, policy {policy}: {error}"
    try:
        os.execvp(command[0], command)
    except OSError as error:
        return f"launch: cannot run {command[0]}: {error}"


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
