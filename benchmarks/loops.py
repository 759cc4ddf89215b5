"""Event loops by name: what a name on the command line stands for.

Both sides use this file: the benchmark for the environment of a server process, the server
process for the loop itself.
"""

import asyncio
import importlib
import importlib.metadata
from dataclasses import dataclass

BASELINE = "uvloop"
"""The loop that ratios refer to."""

DEFAULT_NAMES = ("asyncio", "uvloop", "uringloop", "uringloop-epoll")

_FACTORIES = {
    "asyncio": "asyncio:new_event_loop",
    "uvloop": "uvloop:new_event_loop",
    "uringloop": "uringloop:new_event_loop",
    "uringloop-epoll": "uringloop:new_event_loop",
    "uringloop-zerocopy": "uringloop:new_event_loop",
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

    The factory of a floor is empty: its server is floor.c.
    """

    name: str
    factory: str
    backend: str | None

    def environment(self) -> dict[str, str]:
        """The variables that its server process needs."""
        variables = {"URINGLOOP_BACKEND": self.backend} if self.backend else {}
        if self.name in _OPTIONS:
            variables["URINGLOOP_OPTIONS"] = _OPTIONS[self.name]
        return variables

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
        names = importlib.metadata.packages_distributions().get(module_name, [])
        if names:
            return importlib.metadata.version(names[0])
        return getattr(importlib.import_module(module_name), "__version__", None)


def reported_backend(loop: asyncio.AbstractEventLoop) -> str | None:
    """What the loop itself calls its backend: `io_uring` or `epoll`; None if it doesn't tell."""
    return getattr(loop, "backend", None)


def parse_name(name: str) -> LoopSpec:
    """The loop called `name`. Raises ValueError for a name that is none."""
    if name in _FACTORIES:
        return LoopSpec(name, _FACTORIES[name], _BACKENDS.get(name))
    if name in _FLOORS:
        return LoopSpec(name, "", _FLOORS[name])
    module_name, colon, attribute = name.partition(":")
    if not colon or not attribute.isidentifier() or not module_name.replace(".", "").isidentifier():
        known = ", ".join([*_FACTORIES, *_FLOORS])
        raise ValueError(f"unknown loop {name!r}: expected one of {known}, or module:factory")
    return LoopSpec(name, name, None)
