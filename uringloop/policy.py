"""EventLoopPolicy and install(): uringloop for programs that call asyncio.run() themselves.

asyncio deprecates policies from Python 3.14 on and warns; so do these, because they use asyncio's.
"""

import asyncio

from .loop import Loop, new_event_loop
from .options import LoopOptions, checked


class EventLoopPolicy(asyncio.DefaultEventLoopPolicy):
    """asyncio's default policy, but new loops are uringloop's, with these LoopOptions."""

    def __init__(self, options: LoopOptions | None = None) -> None:
        super().__init__()
        self._options = checked(options)

    def new_event_loop(self) -> Loop:
        """A new Loop with the policy's options."""
        return new_event_loop(self._options)


def install(options: LoopOptions | None = None) -> None:
    """Make uringloop the event loop of this process: asyncio.run() and all that asks asyncio."""
    asyncio.set_event_loop_policy(EventLoopPolicy(options))
