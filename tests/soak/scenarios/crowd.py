"""Ten thousand connections at once, messages of 1 byte to 256 KiB, every one echoed and compared.

The clients are another process on the same kind of loop, so that each side needs one descriptor for
a connection.
"""

import asyncio
import math
import resource

from soak import leaks
from soak.echo import EchoClient, EchoServer
from soak.peer import peer
from soak.run import side_by_side

CONNECTIONS = 10_000
SPARE = 200             # descriptors for everything else
LONGEST = 1 << 18
TALKING = 200           # connections with a message on its way
CONNECTING = 100
UNREST = 1024           # bytes for each connection that fragments of the heap may keep
HOSTS = ("127.0.0.1", "127.0.0.2")


def as_many_as_possible(run):
    """Raises the limit of descriptors; how many connections this process may have."""
    wanted = run.options.get("connections", CONNECTIONS)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    limit = wanted + SPARE if hard == unlimited else min(wanted + SPARE, hard)
    if soft != unlimited and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    if hard != unlimited and hard < wanted + SPARE:
        wanted = max(hard - SPARE, 1)
        run.note(f"crowd: {wanted} connections only, RLIMIT_NOFILE is {hard}")
    return wanted


async def run(run):
    number = as_many_as_possible(run)
    run.unrest = number * UNREST
    loop = asyncio.get_running_loop()
    ends = set()
    server = await loop.create_server(lambda: EchoServer(run, ends), HOSTS, 0, backlog=4096)
    before = leaks.rss()
    addresses = [sock.getsockname() for sock in server.sockets]
    async with peer(run, "scenarios.crowd:clients", number=number, addresses=addresses) as other:
        message = await other.hear()
        if message.get("connected") != number:
            run.fault(f"clients: {message}")
        while len(ends) < message["connected"] and run.left() > -60:
            await asyncio.sleep(0.05)       # the listener's queue may hold the last
        if len(ends) != message["connected"]:
            run.lost(message["connected"] - len(ends), "connections that were not accepted")
        if run.is_first:
            idle = (leaks.rss() - before) / max(len(ends), 1)
            run.figures["crowd"] = (f"{len(ends):,} connections at once, "
                                    f"{idle / 1024:.2f} KiB of the server's memory each while idle")
        other.tell(go=True)
        await other.result(run)
    server.close()
    for _ in range(600):
        if not ends:
            break
        await asyncio.sleep(0.05)
    else:
        run.lost(len(ends), f"connection_lost() of {len(ends)} connections")
    await server.wait_closed()


async def clients(run, link, number, addresses):
    """The other process: connects all, tells, talks until the time is over, ends them."""
    as_many_as_possible(run)
    loop = asyncio.get_running_loop()
    everyone = []
    left = iter(range(number))

    async def connect():
        for at in left:
            address = addresses[at % len(addresses)]
            _, client = await loop.create_connection(
                lambda at=at: EchoClient(run, at), *address)
            everyone.append(client)

    async with asyncio.TaskGroup() as group:
        for _ in range(CONNECTING):
            group.create_task(connect())
    link.tell(connected=len(everyone))
    await link.hear()
    silent = list(everyone)
    run.rng.shuffle(silent)
    busy = set()

    async def talk():
        # All once, whatever the time; then by chance.
        client = silent.pop() if silent else run.rng.choice(everyone)
        if client in busy:
            return
        busy.add(client)
        await client.ask(int(math.exp(run.rng.uniform(0, math.log(LONGEST + 1)))))
        busy.discard(client)

    await side_by_side(run, TALKING, talk)
    while silent:
        await silent.pop().ask(1)
    for at, client in enumerate(everyone):
        client.transport.abort() if at % 2 else client.transport.close()
    await asyncio.gather(*(client.closed for client in everyone))
