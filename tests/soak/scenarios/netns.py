"""Client and server in two network namespaces, over a link that delays and loses packets.

The namespaces belong to the two processes and go with them. Loss and delay are the kernel's netem;
where it has none, a token bucket with a short queue (tbf) drops packets; what was used is told.

Orderly ends only: nobody repeats a RST that was dropped, and who has nothing to send never knows.
"""

import asyncio
import os
import subprocess

from benchmarks.processes import ProcessFailed
from soak import exchange
from soak.peer import peer
from soak.run import NotRun, side_by_side

from .churn import sizes_of

AT_ONCE = 8
SERVER, CLIENT = "10.99.0.1", "10.99.0.2"
LARGE, LARGE_EVERY = 200_000, 5
# The first that the kernel knows.
DISCIPLINES = (("netem", "loss", "1%", "delay", "2ms", "1ms"),
               ("tbf", "rate", "40mbit", "burst", "8kb", "limit", "40kb"))


def command(*words):
    """Runs it; (exit status, output of both kinds)."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=30)
    except FileNotFoundError as error:
        return 127, str(error)
    return done.returncode, " ".join((done.stdout + done.stderr).split())


def new_namespace():
    """The words that start a process in a network namespace of its own. NotRun says why not."""
    users = () if os.geteuid() == 0 else ("--user", "--map-root-user")
    words = ("unshare", *users, "--net")
    status, output = command(*words, "true")
    if status:
        raise NotRun(f"no network namespace: {' '.join(words)}: {output or status}")
    # Loopback is down there at first.
    return *words, "sh", "-c", 'ip link set lo up && exec "$0" "$@"'


class Namespace:
    """The network of a process."""

    def __init__(self, process):
        users = () if os.geteuid() == 0 else ("--user", "--preserve-credentials")
        self.words = ("nsenter", "--target", str(process.pid), *users, "--net")

    def run(self, *words):
        """Runs a command there; NotRun when it fails."""
        status, output = command(*self.words, *words)
        if status:
            raise NotRun(f"{' '.join(words)}: {output or status}")
        return output


def connect(server, client, client_pid):
    """A pair of virtual devices between both."""
    server.run("ip", "link", "add", "soak0", "type", "veth", "peer", "name", "soak1", "netns",
               str(client_pid))
    for side, device, address in (server, "soak0", SERVER), (client, "soak1", CLIENT):
        side.run("ip", "address", "add", f"{address}/24", "dev", device)
        side.run("ip", "link", "set", device, "up")


def spoil(run, sides):
    """Loss and delay on both devices; which discipline it is."""
    for words in DISCIPLINES:
        try:
            for at, side in enumerate(sides):
                side.run("tc", "qdisc", "replace", "dev", f"soak{at}", "root", *words)
        except NotRun as error:
            run.note(f"netns: not here: {error}")
        else:
            return " ".join(words)
    run.note("netns: without loss or delay")
    return "neither loss nor delay"


def dropped(sides):
    """Packets the disciplines dropped."""
    words = " ".join(side.run("tc", "-s", "qdisc", "show", "dev", f"soak{at}")
                     for at, side in enumerate(sides)).replace(",", "").split()
    return sum(int(words[at + 1]) for at, word in enumerate(words) if word.strip("(") == "dropped")


async def run(run):
    prefix = new_namespace()
    async with peer(run, "scenarios.netns:server", prefix) as first, \
            peer(run, "scenarios.netns:clients", prefix) as second:
        try:
            await asyncio.gather(first.hear(), second.hear())
        except ProcessFailed as error:
            raise NotRun(f"no process in a namespace of its own: {error}") from None
        sides = [Namespace(first), Namespace(second)]
        await asyncio.to_thread(connect, *sides, second.pid)
        discipline = await asyncio.to_thread(spoil, run, sides)
        first.tell(go=True)
        second.tell(address=[SERVER, (await first.hear())["port"]])
        # The packets count while the second is still there; it ends when told.
        await second.hear()
        drops = await asyncio.to_thread(dropped, sides)
        second.tell(end=True)
        await second.result(run)
        first.tell(end=True)
        await first.result(run)
    run.count("dropped", drops)
    run.figures["netns"] = f"{discipline}: {drops:,} packets dropped"


async def server(run, link):
    """The process that accepts."""
    link.tell(ready=True)
    await link.hear()
    loop = asyncio.get_running_loop()
    book = exchange.Book(run)
    server = await loop.create_server(book.server, SERVER, 0)
    link.tell(port=server.sockets[0].getsockname()[1])
    await link.hear()
    await book.all_closed()
    server.close()
    await server.wait_closed()


async def clients(run, link):
    """The process that connects."""
    link.tell(ready=True)
    address = (await link.hear())["address"]
    loop = asyncio.get_running_loop()
    book = exchange.Book(run)

    async def one():
        await book.talk(lambda factory: loop.create_connection(factory, *address),
                        run.rng.choice(exchange.WHOLE),
                        sizes_of(run.rng, LARGE, LARGE_EVERY))

    await side_by_side(run, AT_ONCE, one)
    await book.all_closed()
    link.tell(done=True)
    await link.hear()
