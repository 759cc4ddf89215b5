"""What must be after a scenario as it was before: descriptors, operations, objects, memory."""

import asyncio
import collections
import ctypes
import gc
import os
import time

from helpers import open_fds
from leaks import alive

SETTLE = 20.0               # seconds; a guard, what is closed needs an iteration or two
RSS_TOLERANCE = 8 << 20     # bytes: the allocators' own unrest, whatever the time

# A loop keeps one for each side of a descriptor's number: as many as were open at once.
KEPT = ("SocketQueue",)

_PAGE = os.sysconf("SC_PAGE_SIZE")


def rss():
    """Bytes of this process that are in memory, what free() kept given back before."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except AttributeError:      # another C library: it keeps what it keeps
        pass
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * _PAGE


def engine_objects():
    """{name: how many} of the live objects of the extension module that the collector knows."""
    gc.collect()
    return collections.Counter({name: number for name, number in alive().items()
                                if name not in KEPT})


async def warm_up():
    """Whatever a loop and its process make once and keep, they make now."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(asyncio.Protocol, "127.0.0.1", 0)
    transport, _ = await loop.create_connection(
        asyncio.Protocol, *server.sockets[0].getsockname())
    await asyncio.to_thread(len, ())
    transport.close()
    server.close()
    for _ in range(5):
        await asyncio.sleep(0.01)


class Traces:
    """What there is at one moment. Take it where the scenario has closed all it opened."""

    def __init__(self, loop):
        self.fds = open_fds()
        self.objects = engine_objects()
        stats = loop.stats() if hasattr(loop, "stats") else None
        self.operations = stats.operations if stats else 0
        self.in_flight = stats.in_flight if stats else 0
        self.buffers = stats.buffers if stats else 0
        self.buffers_lent = stats.buffers_lent if stats else 0
        self.tasks = len(asyncio.all_tasks(loop))

    def since(self, before):
        """{what: how many more} than before; nothing may be lent or in flight at all."""
        left = {
            "fds": len(self.fds.keys() - before.fds.keys()),
            "operations": self.operations - before.operations,
            "in_flight": self.in_flight - before.in_flight,
            "buffers_lent": self.buffers_lent,
            "tasks": self.tasks - before.tasks,
            **{name: number for name, number in (self.objects - before.objects).items()},
        }
        return {what: number for what, number in left.items() if number > 0}


async def leaked(loop, before):
    """What is left of a scenario, once it had the time to go: {what: how many}."""
    deadline = time.monotonic() + SETTLE
    while left := Traces(loop).since(before):
        if time.monotonic() > deadline:
            return left
        await asyncio.sleep(0.05)
    return {}
