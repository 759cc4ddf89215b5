"""Event loops by name: what a name on the command line stands for.

Both sides use this file: the benchmark for the environment of a server process, the server
process for the loop itself.
"""

import asyncio
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace

BASELINE = "uvloop"
"""The loop that ratios refer to."""

OURS = ("uringloop", "uringloop-epoll")

DEFAULT_NAMES = ("asyncio", BASELINE, *OURS)

_FACTORIES = {
    "asyncio": "asyncio:new_event_loop",
    "uvloop": "uvloop:new_event_loop",
    "uringloop": "uringloop:new_event_loop",
    "uringloop-epoll": "uringloop:new_event_loop",
    "uringloop-zerocopy": "uringloop:new_event_loop",
}
_PEERS = {
    "aiofastnet": "benchmarks.loops:aiofastnet_on_uvloop",
    "rloop": "rloop:new_event_loop",
    "blazio": "blazio:new_event_loop",
    "talyn": "talyn:Loop",
}
"""Others, by the factories that their documentation names (requirements-peers.txt)."""

# glibc maps what is larger than 128 KiB with mmap(2) until the program has freed such a block, and
# gives the end of the heap back. Who allocates 256 KiB for each receive and shrinks it (uvloop's
# TLS, asyncio's transports) pays for three system calls. An operator can raise both limits; so does
# the suffix -mmap, to show what is the allocator's part.
_KEEP_SUFFIX = "-mmap"
KEEP_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(32 * 1024**2),
    "MALLOC_TRIM_THRESHOLD_": str(256 * 1024**2),
}

_BACKENDS = {"uringloop": "io_uring", "uringloop-epoll": "epoll", "uringloop-zerocopy": "io_uring"}
_OPTIONS = {"uringloop-zerocopy": "send_zerocopy=16384"}

_FLOORS = {"floor-epoll": "epoll", "floor-io_uring": "io_uring"}
"""Echo servers in C (floor.c): the least that a loop could cost, measured like a loop."""


class LoopUnavailable(Exception):
    """A loop that can't be created here; `absent` says that its module isn't installed."""

    def __init__(self, reason: str, absent: bool = False) -> None:
        super().__init__(reason)
        self.absent = absent


@dataclass(frozen=True)
class LoopSpec:
    """One loop to measure: its name, its `module:factory`, and its backend if the name says it.

    The factory of a floor is empty: its server is floor.c. `keeps_memory` is for the suffix -mmap.
    """

    name: str
    factory: str
    backend: str | None
    keeps_memory: bool = False

    def environment(self) -> dict[str, str]:
        """The variables that its server process needs."""
        variables = {"URINGLOOP_BACKEND": self.backend} if self.backend else {}
        if self.name in _OPTIONS:
            variables["URINGLOOP_OPTIONS"] = _OPTIONS[self.name]
        return {**variables, **KEEP_MEMORY} if self.keeps_memory else variables

    def create(self) -> asyncio.AbstractEventLoop:
        """A new loop. Raises LoopUnavailable, also when uringloop chose another backend."""
        module_name, _, attribute = self.factory.partition(":")
        try:
            module = importlib.import_module(module_name)
            loop = getattr(module, attribute)()
        except ImportError as error:
            raise LoopUnavailable(str(error), absent=True) from error
        except Exception as error:
            raise LoopUnavailable(f"{type(error).__name__}: {error}") from error
        backend = reported_backend(loop)
        if self.backend is not None and backend != self.backend:
            loop.close()
            raise LoopUnavailable(f"asked for backend {self.backend}, the loop runs on {backend}")
        return loop

    def version(self) -> str | None:
        """Version of the distribution that provides the loop; None when it can't be told."""
        module_name = self.factory.partition(":")[0].partition(".")[0]
        peer = self.name.removesuffix(_KEEP_SUFFIX)
        module_name = peer if peer in _PEERS else module_name
        try:
            # Not packages_distributions(): it reads all that is installed, and freeing a block as
            # large as such a list makes glibc stop to map the server's own large blocks.
            return importlib.metadata.version(module_name)
        except importlib.metadata.PackageNotFoundError:
            return getattr(importlib.import_module(module_name), "__version__", None)


def run(spec: LoopSpec, main: Callable[[], Coroutine], report: Callable[[dict], None]) -> int:
    """Run `main()` on a new loop; what fails is reported as `failed` and `absent`, status 1."""
    try:
        with asyncio.Runner(loop_factory=spec.create) as runner:
            runner.run(main())
    except LoopUnavailable as error:
        report({"failed": str(error), "absent": error.absent})
    except Exception as error:
        report({"failed": f"{type(error).__name__}: {error}", "absent": False})
        raise  # the traceback goes to stderr, which the benchmark quotes
    else:
        return 0
    return 1


def installed_peers() -> list[str]:
    """The peers that are there."""
    return [name for name in _PEERS if importlib.util.find_spec(name) is not None]


def aiofastnet_on_uvloop() -> asyncio.AbstractEventLoop:
    """uvloop with aiofastnet's transports: the faster of the two that its documentation shows."""
    import aiofastnet
    import uvloop

    return aiofastnet.loop_factory(uvloop.new_event_loop)()


def reported_backend(loop: asyncio.AbstractEventLoop) -> str | None:
    """What the loop itself calls its backend: `io_uring` or `epoll`; None if it doesn't tell."""
    return getattr(loop, "backend", None)


def parse_name(name: str) -> LoopSpec:
    """The loop called `name`. Raises ValueError for a name that is none."""
    if name.endswith(_KEEP_SUFFIX):
        return replace(parse_name(name.removesuffix(_KEEP_SUFFIX)), name=name, keeps_memory=True)
    if name in _FACTORIES or name in _PEERS:
        return LoopSpec(name, {**_FACTORIES, **_PEERS}[name], _BACKENDS.get(name))
    if name in _FLOORS:
        return LoopSpec(name, "", _FLOORS[name])
    module_name, colon, attribute = name.partition(":")
    if not colon or not attribute.isidentifier() or not module_name.replace(".", "").isidentifier():
        known = ", ".join([*_FACTORIES, *_PEERS, *_FLOORS])
        raise ValueError(f"unknown loop {name!r}: expected one of {known}, or module:factory")
    return LoopSpec(name, name, None)
