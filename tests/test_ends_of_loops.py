"""Loops that end with everything at once in flight: closed, dropped, or alive when the interpreter
ends; what was handed over outlives them.

Each of the operations alone is in test_teardown.py and test_life_of_loops.py.
"""

import asyncio
import gc
import os
import signal
import socket
import sys
import threading
import time
import weakref

import pytest
from helpers import (
    LIMIT,
    Recorder,
    make_loop,
    make_pair,
    open_fds,
    pattern,
    repeats,
    run_child,
    ticks,
)
from transcripts import assert_child_as_asyncio

UVLOOP_LOOP = "https://github.com/MagicStack/uvloop/blob/v0.21.0/uvloop/loop.pyx"
OWN_KINDS = ("io_uring", "epoll")


class Everything:
    """One of each kind of operation, all in flight on a loop when start() returns."""

    def __init__(self, loop, contexts, folder):
        self.loop = loop
        self.contexts = contexts
        self.folder = folder
        self.tasks = []
        self.files = []         # to be closed by the test; all other descriptors are the loop's
        self.release = threading.Event()

    def task(self, coroutine):
        task = self.loop.create_task(coroutine)
        task._log_destroy_pending = False
        self.tasks.append(task)

    def pair(self, **options):
        ours, peer = make_pair("unix", **options)
        self.files += [ours, peer]
        return ours, peer

    async def start(self):
        await self.start_transports()
        self.start_calls()
        await self.start_endpoints()
        self.start_rest()
        await ticks(4)

    async def start_transports(self):
        loop = self.loop
        self.transports = []
        for number in range(4):
            ours, peer = make_pair(small=True)
            self.files.append(peer)
            transport, protocol = await loop.create_connection(Recorder, sock=ours)
            self.transports.append(transport)
            if number == 0:
                transport.write(bytes(2 << 20))             # the socket is full
            elif number == 1:
                peer.sendall(b"for nobody")
            elif number == 2:
                transport.pause_reading()
                peer.sendall(b"held")
            else:
                transport.write(bytes(1 << 20))
                transport.close()                           # flushing
        self.server = await loop.create_server(Recorder, "127.0.0.1", 0)
        self.files.append(socket.create_connection(self.server.sockets[0].getsockname()))

    def start_calls(self):
        loop = self.loop
        for call in (lambda sock: loop.sock_recv(sock, 100),
                     lambda sock: loop.sock_recv_into(sock, bytearray(100)),
                     lambda sock: loop.sock_recvfrom(sock, 100),
                     lambda sock: loop.sock_recvfrom_into(sock, bytearray(100)),
                     lambda sock: loop.sock_sendall(sock, bytes(1 << 20))):
            self.task(call(self.pair(small=True)[0]))
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setblocking(False)
        self.files.append(listener)
        self.task(loop.sock_accept(listener))
        full = socket.create_server(("127.0.0.1", 0), backlog=0)
        self.files.append(full)
        for _ in range(3):
            connecting = socket.socket()
            connecting.setblocking(False)
            self.files.append(connecting)
            self.task(loop.sock_connect(connecting, full.getsockname()))

    async def start_endpoints(self):
        loop = self.loop
        await loop.create_datagram_endpoint(asyncio.DatagramProtocol, ("127.0.0.1", 0))
        reading, writing = os.pipe()
        self.files.append(os.fdopen(writing, "wb", 0))
        await loop.connect_read_pipe(Recorder, os.fdopen(reading, "rb", 0))
        reading, writing = os.pipe()
        self.files.append(os.fdopen(reading, "rb", 0))
        transport, _ = await loop.connect_write_pipe(Recorder, os.fdopen(writing, "wb", 0))
        transport.write(bytes(1 << 20))
        ours, peer = self.pair()
        self.task(loop.create_connection(               # the handshake is never answered
            Recorder, sock=ours, ssl=self.contexts[1], server_hostname="localhost"))
        ours, peer = make_pair(small=True)
        self.files.append(peer)
        transport, _ = await loop.create_connection(Recorder, sock=ours)
        self.file = open(self.folder / "file", "rb")
        self.files.append(self.file)
        self.task(loop.sendfile(transport, self.file))
        self.transports.append(transport)

    def start_rest(self):
        loop = self.loop
        watched, peer = self.pair()
        loop.add_reader(watched, int)
        loop.add_writer(peer, peer.getsockname)
        loop.call_soon(int)
        for delay in (0.001, 0.1, 3600):
            loop.call_later(delay, int)
        loop.run_in_executor(None, self.release.wait, LIMIT)
        loop.run_in_executor(None, int)
        self.task(loop.getaddrinfo("127.0.0.1", 1))
        loop.add_signal_handler(signal.SIGUSR1, int)

    def end(self):
        self.release.set()
        for file in self.files:
            file.close()


def settled(before):
    """The descriptors of this process that were not there before, once all threads have ended."""
    deadline = time.monotonic() + 10
    while True:
        gc.collect()
        left = {fd: name for fd, name in open_fds().items() if fd not in before}
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.001)


@pytest.fixture
def unheard(monkeypatch):
    """What coroutines say when their loop is gone: pytest would keep their frames with it."""
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "file").write_bytes(pattern(4 << 20))
    return tmp_path


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore:.*never awaited:RuntimeWarning")
@pytest.mark.uvloop_differs("closes with handles left", UVLOOP_LOOP, run=False)
def test_closing_with_one_of_everything_in_flight(loop_kind, contexts, folder, unheard):
    before = open_fds()
    for _ in repeats(20):
        loop = make_loop(loop_kind)
        loop.set_exception_handler(lambda loop, context: None)
        everything = Everything(loop, contexts, folder)
        loop.run_until_complete(everything.start())
        loop.close()
        if loop_kind in OWN_KINDS:
            stats = loop.stats()
            assert (stats.in_flight, stats.operations, stats.buffers_lent) == (0, 0, 0)
        everything.end()
        del everything, loop
    assert settled(before) == {}


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore:.*never awaited:RuntimeWarning")
@pytest.mark.uvloop_differs("closes with handles left", UVLOOP_LOOP, run=False)
def test_dropping_a_loop_with_one_of_everything_in_flight(loop_kind, contexts, folder, unheard):
    before = open_fds()
    for _ in repeats(5):
        loop = make_loop(loop_kind)
        loop.set_exception_handler(lambda loop, context: None)
        everything = Everything(loop, contexts, folder)
        loop.run_until_complete(everything.start())
        loop.remove_signal_handler(signal.SIGUSR1)      # signal's own table would keep the loop
        everything.end()
        gone = weakref.ref(loop)
        del loop, everything
        deadline = time.monotonic() + LIMIT
        while gone() is not None and time.monotonic() < deadline:
            gc.collect()
            time.sleep(0.001)
        assert gone() is None
    assert settled(before) == {}


@pytest.mark.uvloop_differs("has another warning, and stays open", UVLOOP_LOOP, run=False)
def test_a_loop_that_is_dropped_says_so(loop_kind, ledger):
    loop = make_loop(loop_kind)
    loop.run_until_complete(asyncio.sleep(0))
    with pytest.warns(ResourceWarning, match="unclosed event loop"):
        del loop
        gc.collect()


SIZES = (100, 8191, 8192, 16_384, 100_000, 3_000_000)


@pytest.mark.parametrize("end", ["close", "drop"])
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_messages_and_results_outlive_their_loop(loop_kind, end):
    """Blocks of the kernel's that became messages are the user's alone."""
    for turn in repeats(3):
        loop = make_loop(loop_kind)

        async def main(loop=loop, turn=turn):
            kept = []
            for number, size in enumerate(SIZES):
                data = pattern(size, turn * 100 + number)
                ours, peer = make_pair("unix")
                peer.setblocking(False)
                transport, protocol = await loop.create_connection(Recorder, sock=ours)
                await loop.sock_sendall(peer, data)
                await protocol.received(size)
                kept.append((data, protocol.chunks))
                transport.abort()
                await protocol.lost()
                ours, other = make_pair("unix")
                other.setblocking(False)
                sending = asyncio.ensure_future(loop.sock_sendall(other, data))
                chunks = []
                while sum(map(len, chunks)) < size:
                    chunks.append(await loop.sock_recv(ours, 1 << 16))
                await sending
                kept.append((data, chunks))
                for sock in (peer, ours, other):
                    sock.close()
            return kept

        kept = loop.run_until_complete(main())
        if end == "close":
            loop.close()
        del loop, main
        gc.collect()
        rubbish = [bytes(16_384) for _ in range(200)]      # over what was freed wrongly
        for data, chunks in kept:
            assert b"".join(chunks) == data
        del rubbish


# The end of the interpreter

BUSY = """
import atexit, helpers, os, socket, sys, threading, warnings
warnings.simplefilter("ignore")
async def talk():
    ours, peer = helpers.make_pair()
    transport, protocol = await loop.create_connection(helpers.Echo, sock=ours)
    other, other_peer = helpers.make_pair()
    global kept
    kept = transport, protocol, peer, other, other_peer, loop.create_task(
        loop.sock_recv(other, 10)), await loop.create_server(helpers.Echo, "127.0.0.1", 0)
    kept[-2]._log_destroy_pending = False
    loop.call_later(3600, print)
    peer.setblocking(False)
    while True:
        await loop.sock_sendall(peer, b"x")
        await loop.sock_recv(peer, 1)
        started.set()
started = threading.Event()
def run():
    loop.run_until_complete(talk())
"""
ENDINGS = {
    "daemon thread": """
threading.Thread(target=run, daemon=True).start()
started.wait()
print("over")
""",
    "daemon thread and atexit": """
atexit.register(lambda: print("atexit", loop.is_running()))
threading.Thread(target=run, daemon=True).start()
started.wait()
""",
    "os._exit in a thread": """
threading.Thread(target=lambda: (started.wait(), os._exit(3)), daemon=True).start()
run()
""",
    "os._exit in a callback": """
loop.call_soon(os._exit, 4)
run()
""",
    "sys.exit in a callback": """
loop.call_later(0.01, sys.exit, 5)
loop.run_until_complete(asyncio.sleep(60))
""",
    "sys.exit in data_received": """
class Leaving(asyncio.Protocol):
    def data_received(self, data):
        sys.exit(6)
async def main():
    global transport
    ours, peer = helpers.make_pair()
    transport, _ = await loop.create_connection(Leaving, sock=ours)
    peer.sendall(b"x")
    await asyncio.sleep(60)
loop.run_until_complete(main())
""",
    "an exception at exit": """
async def main():
    global transport, peer
    ours, peer = helpers.make_pair()
    transport, _ = await loop.create_connection(helpers.Echo, sock=ours)
    await helpers.ticks()
loop.run_until_complete(main())
def fail():
    transport.write(b"x")
    1 / 0
atexit.register(fail)
atexit.register(lambda: loop.run_until_complete(asyncio.sleep(0)))
print("over")
""",
    "running at exit": """
async def main():
    global transport, peer
    ours, peer = helpers.make_pair()
    transport, protocol = await loop.create_connection(helpers.Echo, sock=ours)
    peer.sendall(b"hello")
    await protocol.received(5)
    print(peer.recv(5))
atexit.register(lambda: (loop.run_until_complete(main()), loop.close()))
""",
    "globals of a module": """
import types
module = sys.modules["keeper"] = types.ModuleType("keeper")
async def main():
    module.pairs = [helpers.make_pair() for _ in range(5)]
    module.transports = [await loop.create_connection(helpers.Echo, sock=ours)
                         for ours, _ in module.pairs]
    module.tasks = [loop.create_task(asyncio.sleep(9))]
    module.tasks[0]._log_destroy_pending = False
    module.transports[0][0].write(bytes(4 << 20))
    module.loop = loop
    await helpers.ticks()
loop.run_until_complete(main())
print("over")
""",
    "a cycle through builtins": """
import builtins
async def main():
    ours, peer = helpers.make_pair()
    builtins.kept = [loop, peer, await loop.create_connection(helpers.Echo, sock=ours)]
    builtins.kept.append(builtins.kept)
    builtins.kept[2][0].write(bytes(4 << 20))
loop.run_until_complete(main())
print("over")
""",
    "a __del__ that uses the loop": """
class Last:
    def __del__(self, loop=loop, print=print):
        try:
            loop.run_until_complete(asyncio.sleep(0))
            print("ran")
        except BaseException as exc:
            print("failed", type(exc).__name__)
last = Last()
loop.run_until_complete(asyncio.sleep(0))
""",
}
THREAD_ENDS = {
    "ends by itself": """
async def stop_soon():
    await asyncio.sleep(0.1)
    print("loop over")
threading.Thread(target=lambda: (loop.run_until_complete(stop_soon()), loop.close())).start()
print("main over", flush=True)
""",
    "is stopped at exit": """
thread = threading.Thread(target=lambda: (loop.run_forever(), loop.close(), print("closed")))
thread.start()
threading._register_atexit(lambda: loop.call_soon_threadsafe(loop.stop))
print("main over", flush=True)
""",
}


@pytest.mark.parametrize("name", ENDINGS)
@pytest.mark.uvloop_differs("says other things", UVLOOP_LOOP, run=False)
def test_the_interpreter_ends(loop_kind, name):
    # Where a thread is when the interpreter ends is luck.
    for number in repeats(3 if "thread" in name else 1):
        assert_child_as_asyncio(loop_kind, f"{BUSY}{ENDINGS[name]}# {number}\n")


@pytest.mark.parametrize("name", THREAD_ENDS)
def test_the_interpreter_waits_for_a_loop_in_a_thread(loop_kind, name):
    assert_child_as_asyncio(loop_kind, BUSY + THREAD_ENDS[name])


def test_an_interrupt_at_exit_is_no_crash(loop_kind):
    """With a loop running in a thread, and the faulthandler on: no signal ends the process."""
    child = run_child(loop_kind, BUSY + """
threading.Thread(target=run, daemon=True).start()
started.wait()
def fail():
    raise KeyboardInterrupt
atexit.register(fail)
sys.exit(7)
""", flags=("-X", "faulthandler"))
    assert child.returncode in (7, 130, -signal.SIGINT), child.stderr
    assert "Fatal" not in child.stderr, child.stderr
