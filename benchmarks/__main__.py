"""The command line: `python -m benchmarks COMMAND [options]`."""

import signal
import sys

from benchmarks import chart, echo, http_demo, idle, micro, page, pingpong, redis, scaling, suite

COMMANDS = {
    "echo": echo.main,
    "http": http_demo.main,
    "idle": idle.main,
    "pingpong": pingpong.main,
    "redis": redis.main,
    "scaling": scaling.main,
    "micro": micro.main,
    "table": suite.main,
    "report": page.main,
    "chart": chart.main,
}

USAGE = """usage: python -m benchmarks COMMAND [options]

  echo      echo servers on several loops, under a closed-loop client (--syscalls counts calls)
  http      aiohttp or uvicorn on each loop, under wrk; ends within two minutes
  idle      wake-ups and memory of servers whose connections are silent
  pingpong  socket pairs inside one process, in MiB/s
  redis     a small Redis server on each loop, under redis-benchmark
  scaling   CPU time and memory from one connection to ten thousand
  micro     operations of a loop without network: callbacks, timers, tasks, threads, pipes
  table     every row that has a target: half an hour; --quick takes six to eight
  report    the file of table as Markdown, on stdout or in a page of the documentation
  chart     the file of table as SVG

`python -m benchmarks COMMAND --help` lists the options of a command."""


def main(arguments: list[str]) -> int:
    """Run one command; returns the exit status (0 good, 1 a loop failed, 2 bad usage)."""
    if arguments and arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    if not arguments or arguments[0] not in COMMANDS:
        print(USAGE, file=sys.stderr)
        return 2
    # SIGTERM ends the process at once by default, without the `finally` blocks that stop the
    # servers; as SystemExit it takes the same way out as Ctrl-C.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        return COMMANDS[arguments[0]](arguments[1:])
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
