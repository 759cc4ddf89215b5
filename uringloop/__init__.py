"""uringloop: asyncio's event loop on io_uring.

    uringloop.run(main())                         like asyncio.run()
    uringloop.install()                           every later asyncio.run() uses it
    asyncio.Runner(loop_factory=uringloop.new_event_loop)
"""

from typing import TYPE_CHECKING, Any

from ._core import StreamTransport
from ._version import __version__
from .backend import available, unavailable_reason
from .loop import Loop, LoopStats, new_event_loop, run
from .options import LoopOptions

if TYPE_CHECKING:
    from .policy import EventLoopPolicy, install

__all__ = (
    "EventLoopPolicy",
    "Loop",
    "LoopOptions",
    "LoopStats",
    "StreamTransport",
    "__version__",
    "available",
    "install",
    "new_event_loop",
    "run",
    "unavailable_reason",
)


def __getattr__(name: str) -> Any:
    # Python 3.14 deprecates event loop policies, and a later one will not have them: only who
    # asks for one pays for it.
    if name in ("EventLoopPolicy", "install"):
        from . import policy
        return getattr(policy, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
