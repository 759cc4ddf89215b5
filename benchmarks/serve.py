"""The server process: `python -m benchmarks.serve CONFIG`, CONFIG being JSON.

Runs one server on one loop until it is killed. The first line on stdout is JSON: `address`,
`backend`, `loop_class`, `python` and `versions`, or `failed` and `absent`. Nothing else of the
benchmark runs in this process while it is measured: no control pipe, no thread.
"""

import asyncio
import ctypes
import importlib.metadata
import json
import platform
import sys

from benchmarks import loops
from benchmarks.echo_servers import EchoConfig, start_echo
from benchmarks.http_app import PACKAGES, start_aiohttp, start_uvicorn
from benchmarks.redis_server import start_redis

_APPS = {"aiohttp": start_aiohttp, "uvicorn": start_uvicorn, "redis": start_redis}

_PR_SET_PTRACER = 0x59616D61  # prctl(2)
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)


def allow_tracer() -> None:
    """Let strace attach although it is no ancestor: Yama's ptrace_scope 1 forbids it otherwise.

    Without Yama the call fails with EINVAL, and nothing has to be allowed.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)


def describe(spec: loops.LoopSpec, loop: asyncio.AbstractEventLoop, app: str) -> dict:
    """What the report has to say about this process."""
    versions = {spec.name: spec.version()}
    versions |= {name: importlib.metadata.version(name) for name in PACKAGES.get(app, ())}
    return {
        "backend": loops.reported_backend(loop),
        "loop_class": f"{type(loop).__module__}.{type(loop).__qualname__}",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "versions": versions,
    }


def report(line: dict) -> None:
    """Write one line for the benchmark."""
    print(json.dumps(line), flush=True)


async def serve(spec: loops.LoopSpec, config: dict) -> None:
    """Start the server, report it, and keep it until the process is killed."""
    address: object
    if config["app"] == "echo":
        address, keep = await start_echo(EchoConfig(**config["echo"]))
    else:
        address, keep = await _APPS[config["app"]]()
    loop = asyncio.get_running_loop()
    report({"address": address, **describe(spec, loop, config["app"])})
    await loop.create_future()
    del keep


def main(config: dict) -> int:
    """Run the server of `config`; returns the exit status when it can't be started."""
    if config.get("traced"):
        allow_tracer()
    spec = loops.parse_name(config["loop"])
    return loops.run(spec, lambda: serve(spec, config), report)


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
