"""wrk, the HTTP load generator (github.com/wg/wrk): run it and read its report."""

import re
import shutil

from benchmarks.generator import run_generator
from benchmarks.load_process import LoadResult
from benchmarks.processes import Placement, ProcessFailed

_UNIT_US = {"us": 1.0, "ms": 1e3, "s": 1e6, "m": 60e6, "h": 3600e6}


def available() -> bool:
    """Whether wrk is on PATH."""
    return shutil.which("wrk") is not None


def run_wrk(
    url: str, connections: int, seconds: int, server_pid: int, placement: Placement, timeout: float
) -> LoadResult:
    """Load `url` for `seconds` with one thread. Raises ProcessFailed.

    The CPU times are those of the whole run, connecting included: some ms in some seconds.
    """
    command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "--latency", url]
    return parse_report(*run_generator(command, placement, server_pid, timeout))


def parse_report(text: str, client_cpu_seconds: float, server_cpu_seconds: float) -> LoadResult:
    """The result in wrk's report. Raises ProcessFailed when it isn't one, or without a reply."""
    total = re.search(r"(\d+) requests in ([\d.]+)(us|ms|s|m|h),", text)
    median, p99 = (re.search(rf"\b{n}%\s+([\d.]+)(us|ms|s|m|h)\b", text) for n in (50, 99))
    if total is None or median is None or p99 is None:
        raise ProcessFailed(f"wrk said {text[-200:]!r}")
    if int(total[1]) == 0:
        raise ProcessFailed("wrk got no reply")
    return LoadResult(
        messages=int(total[1]),
        seconds=float(total[2]) * _UNIT_US[total[3]] / 1e6,
        p50_us=float(median[1]) * _UNIT_US[median[2]],
        p99_us=float(p99[1]) * _UNIT_US[p99[2]],
        client_cpu_seconds=client_cpu_seconds,
        server_cpu_seconds=server_cpu_seconds,
        errors=parse_errors(text),
    )


def parse_errors(text: str) -> dict[str, int]:
    """The errors in wrk's report by kind; it prints these lines only when there are some."""
    errors = {}
    if line := re.search(r"Socket errors: (.*)", text):
        errors = {f"socket {kind}": int(n) for kind, n in re.findall(r"(\w+) (\d+)", line[1])}
    if line := re.search(r"Non-2xx or 3xx responses: (\d+)", text):
        errors["non-2xx"] = int(line[1])
    return {kind: count for kind, count in errors.items() if count}
