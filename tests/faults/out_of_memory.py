"""out_of_memory.py KIND FIRST LAST BURST: short work on loops of this kind, in which BURST
allocations that the engine makes fail, from the nth on, for each n in the range. Prints a line of
JSON. Needs the proving build.

Whatever fails may fail with MemoryError. What may not happen is a crash, a wrong byte, a descriptor
that stays open, or a connection of which nobody hears any more.
"""

import asyncio
import contextlib
import gc
import json
import os
import signal
import socket
import sys
import time
import traceback
import warnings

sys.path.insert(0, os.path.join(os.path.dirname(__file__), os.pardir))

from helpers import make_loop, open_fds, pattern  # noqa: E402

from uringloop import _core  # noqa: E402

# The work takes a few milliseconds. It stands still when so many looks in a row, each with time to
# go on before it, find that the process has done next to nothing; or that it does but never ends.
LOOK_S = 0.1
IDLE_LOOKS = 10
LOOKS = 300
IDLE_S = 0.003
SIZE = 60_000


class Stalled(BaseException):
    """Nothing happens any more."""


class Watchman:
    """A handler of SIGALRM that raises when the work stands still."""

    def __init__(self):
        self.begin()

    def begin(self):
        self.looks = self.idle = 0
        self.used = time.process_time()

    def __call__(self, number, frame):
        used = time.process_time()
        self.looks += 1
        self.idle = self.idle + 1 if used - self.used < IDLE_S else 0
        self.used = used
        if self.idle >= IDLE_LOOKS or self.looks >= LOOKS:
            raise Stalled


watchman = Watchman()


class Collector(asyncio.Protocol):
    def __init__(self, got, size, ended, connected):
        self.got, self.size, self.ended, self.connected = got, size, ended, connected

    def connection_made(self, transport):
        self.transport = transport
        self.connected.append(self)

    def data_received(self, data):
        self.got += data
        self.transport.write(data)
        if len(self.got) >= self.size:
            self.transport.close()

    def connection_lost(self, exc):
        if not self.ended.done():
            self.ended.set_result(exc)


class Buffered(Collector, asyncio.BufferedProtocol):
    def get_buffer(self, sizehint):
        self.buffer = bytearray(4000)
        return self.buffer

    def buffer_updated(self, count):
        self.data_received(self.buffer[:count])


async def talk(loop, factory, listener, size, streams):
    """A connection whose one end is a transport, and whose other makes sock_* calls."""
    got, ended, back, connected = bytearray(), loop.create_future(), bytearray(), []
    streams += [got, back]
    server = await loop.create_server(lambda: factory(got, size, ended, connected), sock=listener)
    with socket.socket() as peer:
        peer.setblocking(False)
        await loop.sock_connect(peer, listener.getsockname())
        timer = loop.call_later(60, print)
        data = pattern(size)
        for start in range(0, size, 7000):
            piece = data[start:start + 7000]
            await loop.sock_sendall(peer, piece if start // 7000 % 2 else bytearray(piece))
            wanted = start + len(piece)
            while len(back) < wanted:
                received = await loop.sock_recv(peer, 5000)
                if not received:
                    # asyncio, too, says nothing of a connection that it could not make.
                    return await ended if connected else ConnectionError("not served")
                back += received
        timer.cancel()
        server.close()
        return await ended


def attempt(kind, factory, first, burst):
    """One piece of work with failing allocations: (outcome, MemoryError seen?, allocations)."""
    seen, streams = [], []
    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as stack:
        sys.unraisablehook = lambda unraisable: seen.append(unraisable.exc_type)
        outcome = "done"
        watchman.begin()
        signal.setitimer(signal.ITIMER_REAL, LOOK_S, LOOK_S)
        try:
            loop = make_loop(kind)
            stack.callback(loop.close)
            _core.disturb_memory(first, burst)
            loop.set_exception_handler(
                lambda loop, context: seen.append(type(context.get("exception"))))
            lost_with = loop.run_until_complete(talk(loop, factory, listener, SIZE, streams))
            if lost_with is not None:
                seen.append(type(lost_with))
                outcome = "ended"
        except Stalled:
            outcome = "stalled"
        except MemoryError:
            seen.append(MemoryError)
            outcome = "raised"
        except OSError:
            outcome = "ended"
        except (RuntimeError, SystemError, AttributeError, UnboundLocalError) as exc:
            outcome = f"raised {exc!r}"
        finally:
            made = _core.undisturbed_memory()
            with contextlib.suppress(Stalled):
                signal.setitimer(signal.ITIMER_REAL, 0)
    for got in streams:
        assert pattern(SIZE).startswith(got), "wrong bytes"
    return outcome, MemoryError in seen, made


def main(kind, first, last, burst):
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, watchman)
    asyncio.constants.ACCEPT_RETRY_DELAY = 0.01
    make_loop(kind).close()
    attempt(kind, Collector, 1 << 40, 0)        # imports, and what is made once
    before = open_fds()
    report = {"cases": 0, "stalled": [], "silent": [], "odd": [], "leaked": [], "outcomes": {},
              "most": 0}
    for number in range(first, last):
        print(number, file=sys.stderr, flush=True)
        try:
            outcome, heard, made = attempt(kind, (Collector, Buffered)[number % 2], number, burst)
        except Exception:
            outcome, heard, made = f"raised {traceback.format_exc()[-400:]}", True, 0
        report["most"] = max(report["most"], made)
        report["cases"] += 1
        report["outcomes"][outcome] = report["outcomes"].get(outcome, 0) + 1
        if outcome == "stalled":
            report["stalled" if heard else "silent"].append(number)
        elif outcome.startswith("raised "):
            report["odd"].append((number, outcome))
        gc.collect()
        left = {fd: name for fd, name in open_fds().items() if fd not in before}
        if left:
            report["leaked"].append((number, list(left.values())))
            before = open_fds()
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:5]))
