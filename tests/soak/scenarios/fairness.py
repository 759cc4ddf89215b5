"""A trickle beside floods and slow consumers: it must not starve.

The trickle sends 64 bytes at a time to a server, waits for the echo, and measures. In `loaded`
windows that server serves floods and slow consumers as well. In `decoy` windows the same floods run
against a second server like the first: the machine is as busy, the loop of the trickle is not. So
the ratio of both is what the loop does, and not what the scheduler of a busy machine does. In
`quiet` windows nothing else runs. Windows take turns; each gives one p99, and the median of those
counts. The check: loaded p99 at most LIMIT times the larger of the other two.

The trickle uses blocking sockets in a thread of its own process, whose loop sleeps meanwhile.
"""

import asyncio
import math
import socket
import statistics
import time

from soak.content import ContentFault, Stream
from soak.echo import EchoServer, Flood, Verified
from soak.peer import peer
from soak.run import Run

LIMIT = 10.0
ROUNDS = 5
RAMP = 0.2                      # seconds until the load has its full speed
PAUSE = 0.001                   # seconds between the messages of the trickle
FLOODS = (((1 << 18, 1 << 16), 6), ((6_400, 64), 6))     # ((depth, piece), how many), bytes
SLOW = 6                        # consumers,
SIP, SIP_PAUSE = 4096, 0.02     # which take so many bytes every so many seconds


class Source(Verified):
    """Writes for ever, as flow control lets it."""

    def __init__(self, run):
        super().__init__(run)
        self.stream, self.paused, self.task = Stream(3), False, None

    def connection_made(self, transport):
        super().connection_made(transport)
        self.fill()

    def fill(self):
        while not self.paused and not self.transport.is_closing():
            self.transport.write(self.stream.take(1 << 14))

    def pause_writing(self):
        self.paused = True

    def resume_writing(self):
        self.paused = False
        self.fill()


class Sipper(Verified):
    """Reads little at a time and rests after it."""

    def __init__(self, run):
        super().__init__(run)
        self.stream, self.taken = Stream(3), 0

    def connection_made(self, transport):
        super().connection_made(transport)
        self.run.count("connections")

    def data_received(self, data):
        self.expect(self.stream, data)
        self.taken += len(data)
        self.transport.pause_reading()
        loop = asyncio.get_running_loop()
        loop.call_later(SIP_PAUSE * len(data) / SIP, self.go_on)

    def go_on(self):
        if not self.transport.is_closing():
            self.transport.resume_reading()


async def server(run, link):
    """A process: serves until told to end."""
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(lambda factory=factory: factory(run), "127.0.0.1", 0)
               for factory in (EchoServer, Source)]
    link.tell(addresses=[each.sockets[0].getsockname() for each in servers])
    await link.hear()
    for each in servers:
        each.close()
        await each.wait_closed()


async def load(run, link):
    """A process: floods and slow consumers, against the addresses and as long as it is told."""
    while (message := await link.hear()).get("addresses"):
        part = Run(run.kind, message["seconds"], run.seed)
        floods = await _loaded(part, *message["addresses"])
        link.tell(bytes={f"{piece} bytes": [flood.incoming.position for flood in some]
                         for (_, piece), some in floods.items()})
        run.add(part.as_json())


async def _loaded(run, echo, source):
    loop = asyncio.get_running_loop()
    floods, everyone = {}, []
    for (depth, piece), number in FLOODS:
        some = [await loop.create_connection(
            lambda depth=depth, piece=piece: Flood(run, run.new_key(), depth, piece), *echo)
            for _ in range(number)]
        floods[depth, piece] = [protocol for _, protocol in some]
        everyone += floods[depth, piece]
    sippers = []
    for _ in range(SLOW):
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SIP)
        sock.setblocking(False)
        await loop.sock_connect(sock, tuple(source))
        _, protocol = await loop.create_connection(lambda: Sipper(run), sock=sock)
        sippers.append(protocol)
    async with asyncio.timeout(run.seconds + 60):
        await asyncio.gather(*(flood.closed for flood in everyone))
    for sipper in sippers:
        for _ in range(1000):           # the window may have been short
            if sipper.taken:
                break
            await asyncio.sleep(0.01)
        sipper.transport.abort()
        if not sipper.taken:
            run.lost(1, "a slow consumer got nothing")
    await asyncio.gather(*(sipper.closed for sipper in sippers))
    return floods


def trickle(run, address, seconds):
    """Seconds that each message took there and back. Blocks."""
    took = []
    stream, back = Stream(5), Stream(5)
    with socket.create_connection(address, timeout=60) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
        sock.sendall((5).to_bytes(8))
        end = time.monotonic() + seconds
        while time.monotonic() < end or len(took) < 20:
            start = time.monotonic()
            sock.sendall(stream.take(64))
            got = 0
            while got < 64:
                data = sock.recv(64)
                if not data:
                    run.lost(64 - got, "the end of the trickle's connection")
                    return took
                try:
                    back.verify(data)
                except ContentFault as fault:
                    run.fault(f"trickle: {fault}")
                got += len(data)
            took.append(time.monotonic() - start)
            time.sleep(PAUSE)
    run.count("messages", len(took))
    run.count("bytes", 64 * len(took))
    return took


def p99(took):
    return sorted(took)[math.ceil(0.99 * len(took)) - 1]


def evenness(sizes):
    """Jain's index of fairness: 1 when all are alike, 1/n when one has all."""
    return sum(sizes) ** 2 / (len(sizes) * sum(size * size for size in sizes) or 1)


async def run(run):
    rounds = run.options.get("rounds", ROUNDS)
    ramp = min(RAMP, run.seconds / 10)
    window = max(run.seconds / (3 * rounds) - ramp, 0.05)
    worst, shares = {"quiet": [], "decoy": [], "loaded": []}, []
    async with peer(run, "scenarios.fairness:server") as first, \
            peer(run, "scenarios.fairness:server") as second, \
            peer(run, "scenarios.fairness:load") as third:
        addresses = (await first.hear())["addresses"]
        decoy = (await second.hear())["addresses"]
        for _ in range(rounds):
            for name, target in ("quiet", None), ("decoy", decoy), ("loaded", addresses):
                if target is not None:
                    third.tell(addresses=target, seconds=window + 2 * ramp)
                    await asyncio.sleep(ramp)
                worst[name].append(p99(await asyncio.to_thread(
                    trickle, run, tuple(addresses[0]), window)))
                if target is not None:
                    heard = await third.hear()
                    if target is addresses:
                        shares.append(heard["bytes"])
        for each in (first, second, third):
            each.tell(end=True)
            await each.result(run)
    _report(run, {name: statistics.median(some) for name, some in worst.items()}, shares)


def _report(run, p99s, shares):
    ratio = p99s["loaded"] / max(p99s["decoy"], p99s["quiet"])
    times = ", ".join(f"{name} {value * 1e3:.2f}" for name, value in p99s.items())
    even = "; ".join(f"{name}: {statistics.median(evenness(one[name]) for one in shares):.2f}"
                     for name in shares[0])
    run.figures["fairness"] = (f"the trickle's p99 in ms: {times}; {ratio:.1f} times unloaded; "
                               f"evenness of the floods (1 is alike): {even}")
    if ratio > run.options.get("fairness", LIMIT):
        run.fault(f"unfair: the trickle's p99 is {ratio:.1f} times that of an idle loop on a "
                  f"machine as busy, over {LIMIT:.0f}")
