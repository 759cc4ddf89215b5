"""Exchanges through a proxy that delays, splits, joins, half-closes and resets.

What arrives is a right beginning of what was sent, and all of it unless the proxy was to reset the
connection (soak.chaos.fate).
"""

import asyncio

from soak import exchange
from soak.chaos import fate
from soak.peer import peer
from soak.run import side_by_side

from .churn import sizes_of

AT_ONCE = 32
LARGE, LARGE_EVERY = 200_000, 4


async def run(run):
    loop = asyncio.get_running_loop()
    seed = run.seed
    book = exchange.Book(run, may_be_cut=lambda key: fate(seed, key) is not None)
    server = await loop.create_server(book.server, "127.0.0.1", 0, backlog=256)
    target = server.sockets[0].getsockname()
    async with peer(run, "chaos:proxy", target=target, seed=seed) as other:
        address = (await other.hear())["address"]

        async def one():
            await book.talk(lambda factory: loop.create_connection(factory, *address),
                            run.rng.randrange(len(exchange.NAMES)),
                            sizes_of(run.rng, LARGE, LARGE_EVERY))

        await side_by_side(run, AT_ONCE, one)
        await book.all_closed()
        other.tell(end=True)
        await other.result(run)
    server.close()
    await server.wait_closed()
    run.figures["chaos"] = (f"{run.counts['proxied']:,} connections through the proxy, "
                            f"{run.counts['reset']:,} of them reset")
