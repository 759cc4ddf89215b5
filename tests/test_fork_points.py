"""Forks at every point of a running loop: children use nothing of the parent's ring and may have
loops of their own; the parent's streams, calls and timers go on, verified byte for byte.

What else forks do is in test_fork.py; what a child may do with an idle loop in test_teardown.py.
"""

import asyncio
import contextlib
import gc
import os
import random
import socket
import threading

import pytest
from helpers import (
    LIMIT,
    Echo,
    Recorder,
    assert_same,
    connected,
    end,
    in_child,
    in_thread,
    make_loop,
    make_pair,
    only_ours,
    pattern,
    read_exactly,
    repeats,
    run_child,
    run_once,
    socket_pair,
    ticks,
    until,
    waiting,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
]

SIZES = (1, 100, 9000, 20_000)      # copied, handed over, sent at once


def run_own_loop(kind):
    """What a child does with a loop of its own."""
    asyncio._set_running_loop(None)     # before 3.12 a forked thread has its parent's

    async def main():
        async with connected(Echo) as (_, _, peer):
            peer.setblocking(False)
            await loop.sock_sendall(peer, b"child")
            assert await loop.sock_recv(peer, 100) == b"child"

    loop = make_loop(kind)
    loop.run_until_complete(main())
    loop.close()


def touch(loop, transport):
    """What a child does to its parent's connection, with no effect: the loop is the parent's."""
    asyncio._set_running_loop(None)
    for use in (lambda: transport.write(b"C" * 100), lambda: transport.write(bytearray(100_000)),
                lambda: transport.writelines([b"C" * 50_000, b"C"]),
                transport.get_write_buffer_size, transport.pause_reading,
                transport.resume_reading, lambda: transport.set_write_buffer_limits(0),
                lambda: transport.write(b"C" * 100_000), transport.write_eof, transport.close,
                transport.abort, loop.stop, lambda: loop.call_soon(print, "C"),
                lambda: loop.call_soon_threadsafe(print, "C"),
                lambda: loop.call_later(0, print, "C"), loop.close, loop._run_once):
        with contextlib.suppress(RuntimeError):
            use()
    gc.collect()


class ForkingEcho(Echo):
    """Sends everything back, and forks now and then before or after."""

    def __init__(self, child, chance, forks):
        super().__init__()
        self.child = child
        self.chance = chance
        self.forks = forks
        self.statuses = []

    def data_received(self, data):
        before = self.chance.random() < 0.5
        if before:
            self.fork()
        super().data_received(data)
        if not before:
            self.fork()

    def fork(self):
        if len(self.statuses) < self.forks and self.chance.random() < 0.5:
            self.statuses.append(in_child(self.child))


async def exchange(peer, protocol, forks):
    """Send until there were so many forks; all that was sent must come back."""
    sent = bytearray()
    received = bytearray()
    number = 0
    while len(protocol.statuses) < forks:
        message = pattern(SIZES[number % len(SIZES)], number)
        number += 1
        sent += message
        await in_thread(peer.sendall, message)
        if number % 3 == 0:
            received += await in_thread(read_exactly, peer, len(sent) - len(received))
    received += await in_thread(read_exactly, peer, len(sent) - len(received))
    assert_same(received, sent)
    assert_same(protocol.data, sent)
    assert set(protocol.statuses) == {0}


@pytest.mark.parametrize("family", ["tcp", "unix"])
@pytest.mark.parametrize("what", ["own loop", "touch"])
async def test_a_fork_inside_data_received(loop, loop_kind, what, family):
    """Before write(), and between write() and the loop's flush."""
    if what == "touch":
        only_ours(loop_kind, "the child of asyncio's sends, and shares its epoll")
    forks = len(repeats(12))

    def child():
        if what == "touch":
            touch(loop, protocol.transport)
        else:
            run_own_loop(loop_kind)

    protocol = ForkingEcho(child, random.Random(forks), forks)
    async with connected(lambda: protocol, family) as (_, _, peer):
        await exchange(peer, protocol, forks)


@pytest.mark.parametrize("action", ["get_write_buffer_size", "close", "write", "write a view",
                                    "writelines", "write_eof", "abort", "drop"])
async def test_a_child_sends_nothing_that_its_parent_has_queued(loop, loop_kind, action):
    only_ours(loop_kind, "the child of asyncio's sends what it writes")
    large = {"write": b"C" * 50_000, "write a view": memoryview(bytearray(50_000)),
             "writelines": [b"C" * 50_000] * 2}
    async with connected() as (transport, protocol, peer):
        sent = bytearray()

        def child():
            asyncio._set_running_loop(None)
            with contextlib.suppress(RuntimeError):
                if action in large:
                    getattr(transport, action.split()[0])(large[action])
                elif action == "drop":
                    transport.__del__()
                else:
                    getattr(transport, action)()

        for number in repeats(3):
            transport.write(pattern(100, number))
            sent += pattern(100, number)
            assert in_child(child) == 0
            assert_same(await in_thread(read_exactly, peer, 100), pattern(100, number))
        transport.close()
        await protocol.lost()
        assert await in_thread(peer.recv, 100) == b""


async def test_a_fork_inside_a_timer(loop, loop_kind):
    forks = len(repeats(10))
    statuses, fired = [], []

    def fire(number):
        fired.append(number)
        statuses.append(in_child(lambda: run_own_loop(loop_kind)))

    data = pattern(4 << 20)
    async with connected(Echo) as (_, protocol, peer):
        for number in range(forks):
            loop.call_later(0.001 * number, fire, number)
        sending = asyncio.ensure_future(in_thread(peer.sendall, data))
        assert_same(await in_thread(read_exactly, peer, len(data)), data)
        await sending
        await until(lambda: len(fired) == forks)
    assert sorted(fired) == list(range(forks))
    assert set(statuses) == {0}


@pytest.mark.parametrize("what", ["own loop", "cancel", "close"])
async def test_a_fork_while_calls_wait(loop, loop_kind, what):
    if what != "own loop":
        only_ours(loop_kind, "the child of asyncio's shares its epoll")
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    for number in repeats(5):
        with socket_pair("unix", small=True) as (ours, peer), socket_pair() as (other, other_peer):
            receiving = await waiting(loop, loop.sock_recv(ours, 100))
            sending = await waiting(loop, loop.sock_sendall(ours, pattern(1 << 20, number)))
            into = bytearray(100)
            filling = await waiting(loop, loop.sock_recv_into(other, into))
            accepting = await waiting(loop, loop.sock_accept(listener))
            tasks = (receiving, sending, filling, accepting)

            def child():
                asyncio._set_running_loop(None)
                for task in tasks if what == "cancel" else ():
                    task.cancel()
                for sock in (ours, other, listener) if what == "close" else ():
                    sock.close()
                run_own_loop(loop_kind)

            assert in_child(child) == 0
            peer.sendall(b"received")
            other_peer.sendall(b"filled")
            assert await asyncio.wait_for(receiving, LIMIT) == b"received"
            assert await asyncio.wait_for(filling, LIMIT) == 6 and into[:6] == b"filled"
            assert_same(await in_thread(read_exactly, peer, 1 << 20), pattern(1 << 20, number))
            await sending
            with socket.create_connection(listener.getsockname()):
                connection, _ = await asyncio.wait_for(accepting, LIMIT)
                connection.close()
    listener.close()


async def test_a_fork_inside_a_step_of_a_task_that_receives(loop, loop_kind):
    """The child leaves in the middle of the conversation; the parent has it to the end."""
    with socket_pair() as (ours, peer):
        peer.setblocking(False)

        async def answer():
            for _ in repeats(10):
                data = await loop.sock_recv(peer, 100)
                assert in_child(lambda: run_own_loop(loop_kind)) == 0
                await loop.sock_sendall(peer, data[::-1])

        answering = asyncio.ensure_future(answer())
        for number in repeats(10):
            await loop.sock_sendall(ours, b"%05d" % number)
            assert await loop.sock_recv(ours, 100) == (b"%05d" % number)[::-1]
        await answering


async def test_a_fork_inside_connection_lost(loop, loop_kind):
    statuses = []

    class Forking(Recorder):
        def connection_lost(self, exc):
            statuses.append(in_child(lambda: run_own_loop(loop_kind)))
            super().connection_lost(exc)

    for number in repeats(5):
        ours, peer = make_pair()
        transport, protocol = await loop.create_connection(Forking, sock=ours)
        transport.write(pattern(100_000, number))
        transport.close()
        assert_same(await in_thread(read_exactly, peer, 100_001), pattern(100_000, number))
        await protocol.lost()
        peer.close()
    assert set(statuses) == {0}


def test_forks_of_another_thread_while_loops_are_closed(loop_kind, ledger):
    stop = threading.Event()
    statuses = []

    def fork_often():
        while not stop.is_set():
            statuses.append(in_child(lambda: run_own_loop(loop_kind)))

    forking = threading.Thread(target=fork_often)
    forking.start()
    try:
        for number in repeats(15):
            loop = make_loop(loop_kind)
            pairs = [make_pair("unix") for _ in range(10)]

            async def main(loop=loop, pairs=pairs, number=number):
                made = [await loop.create_connection(Recorder, sock=ours) for ours, _ in pairs]
                for transport, _ in made[:5]:
                    transport.write(bytes(1 << 20))
                for (_, peer), (_, protocol) in zip(pairs, made):
                    peer.sendall(pattern(100, number))
                    assert await protocol.received(100) == pattern(100, number)
                for transport, _ in made:
                    end(transport)

            loop.run_until_complete(main())
            run_once(loop)
            loop.close()
            for _, peer in pairs:
                peer.close()
    finally:
        stop.set()
        forking.join(LIMIT)
    assert statuses and set(statuses) == {0}


SIGNALLED = """
import ctypes, os, signal
libc = ctypes.CDLL(None)
ours, peer = helpers.make_pair()
forks, parent = [], os.getpid()

def handler(number, frame):
    forks.append(os.fork())
    if forks[-1]:           # else the child is left in the wait of its parent's loop
        loop.call_soon_threadsafe(done.set_result, None)

signal.signal(signal.SIGALRM, handler)

async def main():
    transport, protocol = await loop.create_connection(helpers.Echo, sock=ours)
    loop.call_soon(print, "in the parent" if os.getpid() == parent else "in the child")
    global done
    for number in range(5):
        done = loop.create_future()
        if number % 2:
            signal.setitimer(signal.ITIMER_REAL, 0.02)      # while the loop waits
        else:
            loop.call_soon(getattr(libc, "raise"), signal.SIGALRM)      # before it waits
        await done
        peer.sendall(b"%d" % number)
        assert await helpers.in_thread(peer.recv, 10) == b"%d" % number
        print(os.waitstatus_to_exitcode(os.waitpid(forks[-1], 0)[1]), flush=True)
    transport.abort()
    await protocol.lost()

try:
    loop.run_until_complete(main())
except RuntimeError as exc:
    os._exit(7 if "belongs to the parent process" in str(exc) else 8)
peer.close()
loop.run_until_complete(loop.shutdown_default_executor())
loop.close()
"""


def test_a_fork_inside_a_signal_handler(loop_kind):
    only_ours(loop_kind, "the child goes on in the parent's loop")
    child = run_child(loop_kind, SIGNALLED, limit=60)
    assert (child.returncode, child.stdout) == (0, "in the parent\n" + "7\n" * 5), child.stderr


LEFT_OVER = """
import os
async def main():
    ran = []
    def fork():
        if os.fork() == 0:
            ran.append("child")
    loop.call_soon(fork)
    for number in range(5):
        loop.call_soon(lambda number=number: print(number, ran, flush=True))
    await helpers.ticks(3)
    print("parent", os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
try:
    loop.run_until_complete(main())
except RuntimeError as exc:
    os._exit(7 if "belongs to the parent process" in str(exc) else 8)
loop.close()
"""


def test_a_child_runs_no_callback_of_its_parent(loop_kind):
    only_ours(loop_kind, "the child goes on in the parent's loop")
    child = run_child(loop_kind, LEFT_OVER)
    lines = [f"{number} []" for number in range(5)] + ["parent 7"]
    assert (child.returncode, child.stdout.splitlines()) == (0, lines), child.stderr


MULTIPROCESSING = """
import multiprocessing, warnings, test_fork_points
warnings.simplefilter("ignore", DeprecationWarning)
data = helpers.pattern(1 << 20)
async def main():
    context = multiprocessing.get_context("fork")
    async with helpers.connected(helpers.Echo) as (transport, protocol, peer):
        for number in helpers.repeats(10):
            sending = asyncio.ensure_future(helpers.in_thread(peer.sendall, data))
            process = context.Process(target=test_fork_points.run_own_loop, args=(kind,))
            process.start()
            helpers.assert_same(
                await helpers.in_thread(helpers.read_exactly, peer, len(data)), data)
            await sending
            await helpers.in_thread(process.join)
            assert process.exitcode == 0, process.exitcode
loop.run_until_complete(main())
loop.run_until_complete(loop.shutdown_default_executor())
loop.close()
print("fine")
"""


def test_multiprocessing_by_fork_under_load(loop_kind):
    child = run_child(loop_kind, MULTIPROCESSING, limit=60 + 5 * len(repeats(10)))
    assert (child.returncode, child.stdout) == (0, "fine\n"), child.stderr


async def test_a_child_that_goes_on_for_long(loop, loop_kind):
    """It runs its own loop while the parent ends its connections and makes new ones."""
    reading, writing = os.pipe()
    pids = []
    async with connected(Echo) as (_, _, peer):
        for _ in repeats(3):
            pid = os.fork()
            if pid == 0:
                status = 1
                try:
                    os.read(reading, 1)
                    run_own_loop(loop_kind)
                    status = 0
                finally:
                    os._exit(status)
            pids.append(pid)
        peer.sendall(b"x")
        assert await in_thread(peer.recv, 10) == b"x"
    for number in repeats(3):
        async with connected(Echo) as (_, _, peer):
            peer.sendall(b"%d" % number)
            assert await in_thread(peer.recv, 10) == b"%d" % number
    os.write(writing, b"x" * len(pids))
    for pid in pids:
        assert os.waitstatus_to_exitcode((await in_thread(os.waitpid, pid, 0))[1]) == 0
    await ticks()
    os.close(reading)
    os.close(writing)
