"""The report of the HTTP demo: its table, and the same for a machine."""

import platform
from dataclasses import asdict

from benchmarks import loops, machine, summary, table, wrk
from benchmarks.http_measure import CONNECTIONS, Demo

HEADERS = [
    "loop", "backend", "req/s", "p99 ms", "CPU us/req", "syscalls/req", "req/s ratio", "CPU ratio",
    "errors",
]  # fmt: skip


def report_line(demo: Demo, name: str) -> list[str]:
    """The row of one loop."""
    if name in demo.failures:
        return [name, demo.failures[name]]
    if all(sample.loop != name for sample in demo.samples):
        return [name, "not measured: time was up"]
    row = summary.summarize(demo.samples, name)
    return [
        name,
        demo.info[name]["backend"] or "-",
        f"{row.rate:,.0f}",
        f"{row.p99_us / 1e3:.2f}",
        f"{row.server_cpu_us:.1f}",
        demo.syscalls_per_request.get(name, "n/a"),
        summary.ratio_text(row.rate_ratio),
        summary.ratio_text(row.cpu_ratio),
        summary.error_text(row.errors),
    ]


def print_report(demo: Demo, names: list[str], host: dict) -> None:
    """The table, with what is needed to read it."""
    print(machine.headline(host))
    versions = {"": platform.python_implementation() + " " + platform.python_version()}
    for info in demo.info.values():
        versions |= {name: version for name, version in info["versions"].items() if version}
    print(", ".join(f"{name} {version}".strip() for name, version in versions.items()))
    client = "wrk" if wrk.available() else "a Python client (wrk is not installed)"
    rounds = "1 round" if demo.rounds == 1 else f"{demo.rounds} rounds"
    print(
        f"GET / on {demo.app}, {client} with {CONNECTIONS} connections,\n"
        f"server on CPU {demo.cpus[0]}, client on CPU {demo.cpus[1]}, medians over "
        f"{rounds} of {demo.seconds} s, ratios to {loops.BASELINE} (above 1 is better)\n"
    )
    print(table.render(HEADERS, [report_line(demo, name) for name in names]) + "\n", flush=True)


def as_json(demo: Demo, names: list[str], host: dict) -> dict:
    """The results for the JSON report."""
    measured = [name for name in names if any(s.loop == name for s in demo.samples)]
    return {
        "app": demo.app,
        "machine": host,
        "loops": demo.info,
        "failures": demo.failures,
        "client": "wrk" if wrk.available() else "http_client",
        "rows": [asdict(summary.summarize(demo.samples, name)) for name in measured],
        "syscalls_per_request": demo.syscalls_per_request,
        "samples": [summary.sample_json(sample) for sample in demo.samples],
    }
