"""Suite: what the runner must know of a test suite that others wrote."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

LOOPS = ("asyncio", "uvloop", "io_uring", "epoll")
OURS = ("io_uring", "epoll")


@contextlib.contextmanager
def no_service():
    """What a suite that needs no server has for `service`: (more pytest arguments)."""
    yield ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Suite:
    """files, without: patterns of the test files, below the unpacked sdist (or `package`).
    limit: seconds without progress that make a hang.
    """

    name: str
    about: str
    files: tuple[str, ...]
    without: tuple[str, ...] = ()
    loops: tuple[str, ...] = LOOPS
    limit: float = 60.0

    # Where the tests come from: an importable package, or members of a project's sdist.
    package: str = ""
    project: str = ""
    version: str = ""
    sha256: str = ""
    unpack: tuple[str, ...] = ("tests", "pyproject.toml", "setup.cfg", "README.md")
    requires: tuple[str, ...] = ()      # distributions; versions are in ecosystem/constraints.txt

    # How pytest runs them.
    ini: str = "pyproject.toml"         # the suite's own settings of pytest, "" for none
    plugins: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()      # NAME=VALUE, as in pytest's ini files
    select: str = ""                    # pytest -k
    deselect: tuple[str, ...] = ()      # parts of test ids: not about a loop, or not runnable here
    environ: dict[str, str] = dataclasses.field(default_factory=dict)
    localhost: bool = False             # wants a localhost that is ::1 as well
    service: Callable[[], Any] = no_service
    missing: Callable[[], str] = lambda: ""     # why the suite cannot run on this machine
