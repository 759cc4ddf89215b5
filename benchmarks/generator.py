"""A load generator of another project: run, with the CPU times of both sides around it."""

import resource

from benchmarks.cpu_clock import process_cpu_seconds
from benchmarks.processes import ManagedProcess, Placement, ProcessFailed


def run_generator(
    command: list[str], placement: Placement, server_pid: int, timeout: float
) -> tuple[str, float, float]:
    """What it wrote, its CPU seconds, and those of the server. Raises ProcessFailed.

    The CPU times are those of the whole run, connecting included.
    """
    client_before, server_before = _children_cpu_seconds(), process_cpu_seconds(server_pid)
    with ManagedProcess(command, placement) as process:
        report = process.read_all(timeout)
    try:
        server_cpu_seconds = process_cpu_seconds(server_pid) - server_before
    except OSError:
        raise ProcessFailed("the server ended under load") from None
    return report, _children_cpu_seconds() - client_before, server_cpu_seconds


def _children_cpu_seconds() -> float:
    """CPU time of the children reaped so far; between two calls only the generator ends."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
