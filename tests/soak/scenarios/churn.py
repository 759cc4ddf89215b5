"""Connections made and ended, in all manners, by both sides: every one hears of its end."""

import asyncio
import os
import socket
import tempfile
import time

from soak import exchange
from soak.run import side_by_side

AT_ONCE = 64
HOSTS = ("127.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.0.4")    # more ports for clients
SMALL, LARGE = 2_000, 300_000       # bytes; one exchange in LARGE_EVERY is large
LARGE_EVERY = 50


def sizes_of(rng, large=LARGE, every=LARGE_EVERY):
    """Bytes to the server, bytes to the client."""
    limit = large if rng.random() < 1 / every else SMALL
    return rng.randint(1, limit), rng.randint(1, limit)


async def run(run):
    loop = asyncio.get_running_loop()
    book = exchange.Book(run)
    server = await loop.create_server(book.server, HOSTS, 0, family=socket.AF_INET, backlog=1024)
    addresses = [sock.getsockname() for sock in server.sockets]
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        path = os.path.join(folder, "socket")
        local = await loop.create_unix_server(book.server, path, backlog=1024)
        await _churn(run, book, [*addresses, path])
        for each in (server, local):
            each.close()
            await each.wait_closed()


async def connected(factory, address):
    """Opens a connection to an address of either family."""
    loop = asyncio.get_running_loop()
    if isinstance(address, str):
        await loop.create_unix_connection(factory, address)
    else:
        await loop.create_connection(factory, *address)


async def _churn(run, book, addresses):
    exact = run.options.get("churn")
    left = [round(exact * run.share)] if exact else None
    ended = dict.fromkeys(range(len(exchange.NAMES)), 0)

    async def one():
        manner = run.rng.randrange(len(exchange.NAMES))
        address = run.rng.choice(addresses)
        await book.talk(lambda factory: connected(factory, address), manner,
                        sizes_of(run.rng))
        ended[manner] += 1

    async def so_many():
        while left[0] > 0:
            left[0] -= 1
            await one()

    start = time.monotonic()
    if exact:
        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(so_many())
    else:
        await side_by_side(run, AT_ONCE, one)
    number = sum(ended.values())
    run.figures["churn"] = f"{number / (time.monotonic() - start):,.0f} connections/s"
    await book.all_closed()
    if run.counts["connections"] != number:
        run.lost(number - run.counts["connections"], "connections that were never made")
