"""What the printed reports have in common: the heading, the speed columns, rows of absent loops."""

from benchmarks import machine, summary, table
from benchmarks.options import RunOptions

SPEED_HEADERS = [
    "loop", "req/s", "p50 us", "p99 us", "CPU us/msg", "req/s ratio", "CPU ratio", "spread",
    "busy server/client",
]  # fmt: skip


def speed_line(row: summary.Row) -> list[str]:
    """A row of the speed table."""
    return [
        row.loop,
        f"{row.rate:,.0f}",
        f"{row.p50_us:,.1f}",
        f"{row.p99_us:,.1f}",
        f"{row.server_cpu_us:.2f}",
        summary.ratio_text(row.rate_ratio),
        summary.ratio_text(row.cpu_ratio),
        f"{row.spread:.1%}",
        f"{row.server_busy:.0%} / {row.client_busy:.0%}",
    ]


def loop_table(
    title: str,
    names: list[str],
    headers: list[str],
    lines: dict[str, list[str]],
    notes: dict[str, str],
    left: tuple[int, ...] = (0,),
) -> str:
    """A titled table with a row for every loop asked for, absent ones with their reason."""
    rows = [lines.get(name) or [name, notes[name]] for name in names]
    return f"{title}\n{table.render(headers, rows, left)}\n"


def method(options: RunOptions, traced: bool = False) -> str:
    """How servers are measured, for the heading."""
    scheduling = "SCHED_FIFO" if options.realtime else "normal scheduling"
    rounds = "under strace" if traced else f"{options.rounds} paired rounds"
    return (
        f"server on CPU {options.cpus[0]}, client on CPU {options.cpus[1]}, {scheduling}, "
        f"{options.warmup:g} s warm-up, {options.seconds:g} s measured, {rounds}"
    )


def print_heading(host: dict, info: dict[str, dict], method: str) -> None:
    """Machine, versions and method, above the tables."""
    print(machine.headline(host))
    for name, loop in info.items():
        version = f" {loop['versions'][name]}" if loop["versions"].get(name) else ""
        backend = f", backend {loop['backend']}" if loop["backend"] else ""
        print(f"{name}: {loop['loop_class']}{version}{backend}, {loop['python']}")
    print(method + "\n")
