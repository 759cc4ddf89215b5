"""TLS: connections made and ended all the time, beside one that carries as much as it can."""

import asyncio
import functools
import pathlib
import tempfile

from helpers import make_certificate, make_contexts

from soak import exchange
from soak.echo import EchoServer, Flood
from soak.run import NotRun, side_by_side

from .churn import sizes_of

AT_ONCE = 8
LARGE, LARGE_EVERY = 100_000, 10        # bytes; one exchange in so many is large
DEPTH, PIECE = 1 << 20, 1 << 16         # bytes on their way, bytes in one write, of the long one


@functools.cache
def contexts():
    """The SSL contexts of the whole process."""
    try:
        with tempfile.TemporaryDirectory(prefix="soak-") as folder:
            return make_contexts(make_certificate(pathlib.Path(folder)))
    except FileNotFoundError:
        raise NotRun("the openssl command is not installed") from None


async def run(run):
    loop = asyncio.get_running_loop()
    ours, theirs = contexts()
    book = exchange.Book(run)
    server = await loop.create_server(book.server, "127.0.0.1", 0, ssl=ours)
    address = server.sockets[0].getsockname()
    ends = set()
    echo = await loop.create_server(lambda: EchoServer(run, ends), "127.0.0.1", 0, ssl=ours)
    long = await _connected(loop, lambda: Flood(run, 1, DEPTH, PIECE), echo, theirs)

    async def one():
        await book.talk(
            lambda factory: loop.create_connection(factory, *address, ssl=theirs,
                                                   server_hostname="localhost"),
            run.rng.choice(exchange.OVER_TLS), sizes_of(run.rng, LARGE, LARGE_EVERY))

    await side_by_side(run, AT_ONCE, one)
    await book.all_closed()
    async with asyncio.timeout(exchange.LIMIT):
        await long.closed
        await asyncio.gather(*(end.closed for end in ends))
    volume = long.incoming.position
    if volume < PIECE:
        run.lost(PIECE - volume, f"the long connection carried {volume} bytes only")
    run.figures["tls"] = (f"{run.counts['connections'] - 1:,} handshakes; {volume / 2**20:,.0f} "
                          "MiB there and back on one connection beside them")
    for each in (server, echo):
        each.close()
        await each.wait_closed()


async def _connected(loop, factory, server, context):
    _, protocol = await loop.create_connection(
        factory, *server.sockets[0].getsockname(), ssl=context, server_hostname="localhost")
    return protocol
