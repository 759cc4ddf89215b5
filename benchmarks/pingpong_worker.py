"""The process that plays ping-pong with itself: `python -m benchmarks.pingpong_worker CONFIG`.

CONFIG is JSON: loop, pairs, size, warmup, seconds, and certificate (a file, or "" without TLS).
Both ends of every socketpair(2) are transports of one loop: one end sends a message, the other
sends back what it gets, and the first sends again when it has its message back. A warm-up compares
the bytes, the measured window their number. The result is one line of JSON: `result`, which
load_process.LoadResult takes, with a message for each round trip, and what serve.py says of a loop.
"""

import asyncio
import json
import os
import socket
import ssl
import sys
import time

from benchmarks import loops
from benchmarks.certificate import server_context
from benchmarks.echo_servers import EchoProtocol
from benchmarks.serve import describe, report


class Pinger(asyncio.Protocol):
    """One message in flight at a time, until told to stop."""

    def __init__(self, game: "Game") -> None:
        self._game = game
        self._received = 0
        self._started = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def start(self) -> None:
        """Send the next message."""
        self._received = 0
        self._started = time.perf_counter()
        self._transport.write(self._game.message)

    def data_received(self, data: bytes) -> None:
        game, start = self._game, self._received
        self._received = start + len(data)
        if game.verify and data != game.message[start : self._received]:
            game.fail("the bytes that came back are others than were sent")
        elif self._received > len(game.message):
            game.fail("more bytes came back than were sent")
        elif self._received == len(game.message):
            now = time.perf_counter()
            game.latencies.append(now - self._started)
            if now < game.deadline:
                self.start()
            else:
                game.finish_one()

    def connection_lost(self, exc: Exception | None) -> None:
        self._game.fail(f"a connection was lost: {exc}")


class Game:
    """All pairs and the phase that they are in."""

    def __init__(self, size: int) -> None:
        self.message = os.urandom(size)
        self.latencies: list[float] = []
        self._kept: list[list[float]] = []
        self.verify = False
        self.deadline = 0.0
        self._active = 0
        self._ended: asyncio.Future | None = None

    async def run_phase(self, pingers: list[Pinger], seconds: float, verify: bool) -> None:
        """Play for `seconds`, then until every message is back. Raises RuntimeError."""
        # Kept: freeing a list as large as the warm-up's makes glibc stop to map the loop's own
        # large blocks, which would hide what they cost.
        self._kept.append(self.latencies)
        self.latencies, self.verify, self._active = [], verify, len(pingers)
        self._ended = asyncio.get_running_loop().create_future()
        self.deadline = time.perf_counter() + seconds
        for pinger in pingers:
            pinger.start()
        await self._ended

    def finish_one(self) -> None:
        """A pair has ended its phase."""
        self._active -= 1
        if not self._active and self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    def fail(self, reason: str) -> None:
        """End the phase at once."""
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(RuntimeError(reason))


async def connect(game: Game, certificate: str) -> tuple[Pinger, object]:
    """One pair; returns the end that starts, and what has to be kept alive."""
    loop = asyncio.get_running_loop()
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.setblocking(False)
    pinger = Pinger(game)
    if certificate:
        client = ssl.create_default_context(cafile=certificate)
        (transport, _), (peer, _) = await asyncio.gather(
            loop.create_connection(
                lambda: pinger, sock=ours, ssl=client, server_hostname="localhost"
            ),
            loop.connect_accepted_socket(
                EchoProtocol, theirs, ssl=server_context(certificate)
            ),
        )
    else:
        transport, _ = await loop.create_connection(lambda: pinger, sock=ours)
        peer, _ = await loop.create_connection(EchoProtocol, sock=theirs)
    return pinger, (transport, peer)


async def play(config: dict) -> dict:
    """The warm-up and the window; the result as load_process.LoadResult takes it."""
    game = Game(config["size"])
    pairs = [await connect(game, config["certificate"]) for _ in range(config["pairs"])]
    pingers = [pinger for pinger, _ in pairs]
    await game.run_phase(pingers, config["warmup"], verify=True)
    cpu, start = time.process_time(), time.perf_counter()
    await game.run_phase(pingers, config["seconds"], verify=False)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    latencies = sorted(game.latencies)
    return {
        "messages": len(latencies),
        "seconds": seconds,
        "p50_us": latencies[len(latencies) // 2] * 1e6,
        "p99_us": latencies[len(latencies) * 99 // 100] * 1e6,
        "client_cpu_seconds": 0.0,
        "server_cpu_seconds": cpu,
    }


async def main(spec: loops.LoopSpec, config: dict) -> None:
    """Play and report."""
    result = await play(config)
    report({"result": result, **describe(spec, asyncio.get_running_loop(), "pingpong")})
    sys.stdin.read()  # the benchmark reads this process's memory before it lets go


if __name__ == "__main__":
    options = json.loads(sys.argv[1])
    chosen = loops.parse_name(options["loop"])
    sys.exit(loops.run(chosen, lambda: main(chosen, options), report))
