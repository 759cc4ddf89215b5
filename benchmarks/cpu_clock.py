"""CPU time of another process, from the operating system."""

import ctypes
import os
import time


def process_cpu_seconds(pid: int) -> float:
    """User and system time of all threads of `pid`, kernel workers of a ring included.

    clock_getcpuclockid(3): nanosecond resolution, where getrusage(2) of another process doesn't
    exist and /proc/PID/stat counts ticks of 10 ms. Raises OSError when there is no such process.
    """
    clock = ctypes.c_int()
    error = ctypes.CDLL(None).clock_getcpuclockid(ctypes.c_int(pid), ctypes.byref(clock))
    if error:
        raise OSError(error, f"no CPU clock of process {pid}: {os.strerror(error)}")
    return time.clock_gettime_ns(clock.value) / 1e9
