"""A second process of a scenario: started from the first, told and heard in lines of JSON."""

import asyncio
import contextlib
import importlib
import inspect
import json
import os
import sys

from helpers import make_loop

from benchmarks.processes import ManagedProcess

from . import TESTS, leaks
from .run import Run

PATIENCE = 240.0    # seconds until a peer that says nothing counts as hung


class Peer:
    """The other process, as the first one sees it."""

    def __init__(self, process):
        self._process = process
        self.pid = process.pid

    async def hear(self):
        """The next message; benchmarks.processes.ProcessFailed when it ended or hangs."""
        return json.loads(await asyncio.to_thread(self._process.read_line, PATIENCE))

    def tell(self, **message):
        self._process.send_line(json.dumps(message))

    async def result(self, run):
        """Waits for its end; what it counted is added to `run`."""
        message = await self.hear()
        run.add(message["result"])


@contextlib.asynccontextmanager
async def peer(run, where, prefix=(), **arguments):
    """Starts `module:function` of this package in a process: `await function(run, link,
    **arguments)` on a loop of the same kind, or `function(...)` if it is no coroutine."""
    config = {"kind": run.kind, "seconds": max(run.left(), 0.1), "seed": f"{run.seed}/{where}",
              "share": run.share, "options": run.options, "where": where, "arguments": arguments}
    search = os.pathsep.join([str(TESTS), *(entry for entry in sys.path if entry)])
    command = [*prefix, sys.executable, "-m", "soak.peer", json.dumps(config)]
    process = ManagedProcess(command, environment={"PYTHONPATH": search})
    try:
        yield Peer(process)
    finally:
        await asyncio.to_thread(process.stop)


class Link:
    """The first process, as the other one sees it."""

    def tell(self, **message):
        print(json.dumps(message), flush=True)

    async def hear(self):
        """The next message; EOFError when the first process is gone."""
        line = await asyncio.to_thread(sys.stdin.readline)
        if not line:
            raise EOFError("the first process is gone")
        return json.loads(line)


async def _on_a_loop(function, run, arguments):
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(run.handle_exception)
    await leaks.warm_up()
    before = leaks.Traces(loop)
    await function(run, Link(), **arguments)
    left = await leaks.leaked(loop, before)
    run.count("leaked", sum(left.values()))
    if left:
        run.fault(f"leaked in the other process: {left}")


def main(text):
    config = json.loads(text)
    module, _, name = config["where"].partition(":")
    function = getattr(importlib.import_module(f"soak.{module}"), name)
    run = Run(config["kind"], config["seconds"], config["seed"], config["options"],
              config["share"])
    if inspect.iscoroutinefunction(function):
        loop = make_loop(run.kind)
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(_on_a_loop(function, run, config["arguments"]))
    else:
        function(run, Link(), **config["arguments"])
    Link().tell(result=run.as_json())


if __name__ == "__main__":
    main(sys.argv[1])
