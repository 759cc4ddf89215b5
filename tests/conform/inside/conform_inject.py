"""Makes the loop named by CONFORM_LOOP the default one of this process.

Owns the class `SelectorEventLoop` that tests get wherever they ask asyncio for a loop: from the
policy, from asyncio.run(), by the name of the class, or from uvloop where programs prefer that.
Imported before any test is.
"""

import asyncio
import contextlib
import importlib.util
import os
import signal
from asyncio import unix_events

# A shell's background job ignores SIGINT, and so do its children: tests that send it would hang.
signal.signal(signal.SIGINT, signal.default_int_handler)

KIND = os.environ["CONFORM_LOOP"]
made = 0    # loops under test made in this process


def _base():
    if KIND == "asyncio":
        return asyncio.SelectorEventLoop
    if KIND == "uvloop":
        import uvloop

        return uvloop.Loop
    import uringloop

    with contextlib.closing(uringloop.new_event_loop()) as loop:
        if loop.backend != KIND:
            raise RuntimeError(f"{loop.backend} instead of {KIND}: {loop.backend_reason}")
    return uringloop.Loop


_Base = _base()


class SelectorEventLoop(_Base):
    """Takes a selector as asyncio's class does; only asyncio has a use for it."""

    def __init__(self, selector=None):
        global made
        made += 1
        if KIND == "asyncio":
            super().__init__(selector)
            return
        super().__init__()
        if selector is not None:
            selector.close()


def install():
    """Puts SelectorEventLoop into asyncio and uvloop."""
    unix_events._UnixDefaultEventLoopPolicy._loop_factory = SelectorEventLoop
    for module in (asyncio, unix_events):
        module.SelectorEventLoop = SelectorEventLoop
        if hasattr(module, "EventLoop"):    # 3.13
            module.EventLoop = SelectorEventLoop
    if KIND != "uvloop" and importlib.util.find_spec("uvloop"):
        import uvloop

        uvloop.Loop = uvloop.new_event_loop = SelectorEventLoop
        uvloop.EventLoopPolicy = asyncio.DefaultEventLoopPolicy


install()
