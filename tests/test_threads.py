"""Loops and threads: a loop in each of many, loops that move between them, call_soon_threadsafe()
against everything, and what must not crash although it is not supported.
"""

import asyncio
import contextlib
import socket
import threading

import pytest
from helpers import (
    LIMIT,
    PY313,
    Echo,
    Recorder,
    assert_same,
    connected,
    end,
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
)

CLOSED = "https://docs.python.org/3/library/asyncio-eventloop.html#asyncio.loop.close"
CLEANUP = "https://github.com/python/cpython/blob/v3.13.0/Lib/asyncio/base_events.py#L672-L685"
THREADS = "https://docs.python.org/3/library/asyncio-dev.html#concurrency-and-multithreading"


class Failures(list):
    """Runs functions in threads, all at once; keeps what they raise."""

    def run(self, functions):
        threads = [threading.Thread(target=self._call, args=(function,)) for function in functions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT)
            assert not thread.is_alive()
        assert self == []

    def _call(self, function):
        try:
            function()
        except BaseException as exc:
            self.append(exc)


async def echo_verified(loop, number):
    """Bytes of this thread's own go through a transport and through calls, both ways."""
    data = pattern(200_000, number)
    ours, peer = make_pair("unix")
    peer.setblocking(False)
    transport, protocol = await loop.create_connection(Echo, sock=ours)
    sending = asyncio.ensure_future(loop.sock_sendall(peer, data))
    received = bytearray()
    while len(received) < len(data):
        received += await loop.sock_recv(peer, 1 << 16)
    await sending
    assert_same(received, data)
    assert_same(protocol.data, data)
    transport.close()
    await protocol.lost()
    peer.close()


def test_32_loops_in_32_threads_at_once(loop_kind, ledger):
    barrier = threading.Barrier(32)

    def work(number):
        loop = make_loop(loop_kind)
        with contextlib.closing(loop):
            barrier.wait(LIMIT)
            for turn in repeats(3):
                loop.run_until_complete(echo_verified(loop, 1000 * turn + number))

    Failures().run([lambda number=number: work(number) for number in range(32)])


def test_a_loop_moves_on_with_everything_pending(new_loop):
    """Connections, calls, an accept, a reader and timers, each run in another thread."""
    loop = new_loop()
    fired = []
    seen = []

    async def start():
        started = {}
        ours, peer = make_pair()
        started["transport"], started["protocol"] = await loop.create_connection(
            Echo, sock=ours)
        started["peer"] = peer
        started["pairs"] = [make_pair("unix", small=True) for _ in range(3)]
        (receiver, _), (sender, _), (watched, _) = started["pairs"]
        started["receiving"] = asyncio.ensure_future(loop.sock_recv(receiver, 100))
        started["sending"] = asyncio.ensure_future(loop.sock_sendall(sender, pattern(1 << 20)))
        started["listener"] = socket.create_server(("127.0.0.1", 0))
        started["listener"].setblocking(False)
        started["accepting"] = asyncio.ensure_future(loop.sock_accept(started["listener"]))
        loop.add_reader(watched, lambda: seen.append(watched.recv(100)))
        for number in range(5):
            # Not 0: uvloop runs that as call_soon(), after timers that are due.
            loop.call_later(0.001 * (number + 1), fired.append, number)
        await ticks(3)
        return started

    async def step(started, number):
        await in_thread(started["peer"].sendall, b"%d" % number)
        assert await in_thread(started["peer"].recv, 10) == b"%d" % number

    async def finish(started):
        (receiver, first), (sender, second), (watched, third) = started["pairs"]
        first.sendall(b"received")
        assert await started["receiving"] == b"received"
        reading = asyncio.ensure_future(in_thread(read_exactly, second, 1 << 20))
        assert_same(await reading, pattern(1 << 20))
        await started["sending"]
        with socket.create_connection(started["listener"].getsockname()):
            connection, _ = await started["accepting"]
            connection.close()
        third.sendall(b"watched")
        await until(lambda: seen)
        assert seen == [b"watched"]
        loop.remove_reader(watched)
        await until(lambda: len(fired) == 5)
        assert fired == list(range(5))
        end(started["transport"])
        await started["protocol"].lost()
        for sock in (started["peer"], started["listener"], *sum(started["pairs"], ())):
            sock.close()
        await loop.shutdown_default_executor()

    started = {}
    Failures().run([lambda: started.update(loop.run_until_complete(start()))])
    for number in repeats(5):
        Failures().run([lambda: loop.run_until_complete(step(started, number))])
    Failures().run([lambda: loop.run_until_complete(finish(started))])


def test_a_storm_of_call_soon_threadsafe(new_loop):
    """16 threads: every callback runs once, those of one thread in order."""
    loop = new_loop()
    calls = 2000
    seen = [[] for _ in range(16)]

    def storm(number):
        for call in range(calls):
            loop.call_soon_threadsafe(seen[number].append, call)
            if call % 500 == 0:
                # Now and then the loop has gone to sleep.
                threading.Event().wait(0.001)

    async def main():
        await in_thread(Failures().run,
                        [lambda number=number: storm(number) for number in range(16)])
        await until(lambda: sum(map(len, seen)) >= 16 * calls)
        await loop.shutdown_default_executor()

    for _ in repeats(2):
        for one in seen:
            one.clear()
        if loop.is_closed():
            loop = new_loop()
        loop.run_until_complete(main())
        assert seen == [list(range(calls))] * 16
        loop.close()


@pytest.mark.uvloop_differs("its wake-up handle is closed under the callers", CLOSED, run=False)
def test_call_soon_threadsafe_against_close(loop_kind, ledger):
    """Each call runs or raises; none crashes, none hangs."""
    for _ in repeats(20):
        loop = make_loop(loop_kind)
        ran = []
        made = [0] * 4
        started = threading.Barrier(5)

        def call(number, loop=loop, ran=ran, made=made, started=started):
            started.wait(LIMIT)
            try:
                while True:
                    loop.call_soon_threadsafe(ran.append, number)
                    made[number] += 1
            except RuntimeError as exc:
                assert "closed" in str(exc)

        def close(loop=loop, started=started):
            started.wait(LIMIT)
            for _ in range(5):
                run_once(loop)
            loop.close()

        Failures().run([*(lambda number=number: call(number) for number in range(4)), close])
        for number in range(4):
            assert ran.count(number) <= made[number] + 1


@pytest.mark.asyncio_differs("the refused thread's clean-up ends the running of the first", CLEANUP,
                             when=PY313, run=False)
def test_a_loop_that_runs_is_not_run_by_another_thread(new_loop, loop_kind):
    loop = new_loop()
    running, over = threading.Event(), threading.Event()
    answers = []
    future = loop.create_future()

    async def main():
        running.set()
        await in_thread(over.wait, LIMIT)
        await loop.shutdown_default_executor()
        return "undisturbed"

    def intrude():
        running.wait(LIMIT)
        attempts = [loop.run_forever, lambda: loop.run_until_complete(future), loop.close]
        if loop_kind in ("io_uring", "epoll"):
            attempts.append(loop._run_once)
        for attempt in attempts:
            with contextlib.suppress(RuntimeError):
                attempt()
                answers.append(attempt)
        over.set()

    thread = threading.Thread(target=intrude)
    thread.start()
    assert loop.run_until_complete(main()) == "undisturbed"
    thread.join(LIMIT)
    assert answers == []


async def test_another_thread_writes_while_the_loop_sleeps(loop):
    """Not supported, but asyncio's transports send at once, and programs rely on it."""
    async with connected() as (transport, _, peer):
        await asyncio.sleep(0.01)

        def write(data):
            threading.Event().wait(0.02)        # the loop sleeps, for longer than the limit
            transport.write(data)
            return read_exactly(peer, len(data))

        peer.settimeout(LIMIT)
        for size in (10, 1000, 40_000):
            assert await in_thread(write, bytes(size)) == bytes(size)


WRONG = """
import contextlib, faulthandler, random, threading, time
faulthandler.enable()
logging = __import__("logging")
logging.disable()
loop.set_exception_handler(lambda loop, context: None)
METHODS = ["write", "writelines", "pause_reading", "resume_reading", "get_write_buffer_size",
           "set_write_buffer_limits", "is_reading", "is_closing", "get_protocol", "write_eof",
           "close", "abort", "__repr__"]
ARGUMENTS = {"write": lambda chance: [bytes(chance.choice([1, 100, 20_000, 300_000]))],
             "writelines": lambda chance: [[b"a" * 10, bytearray(5)]],
             "set_write_buffer_limits": lambda chance: [chance.choice([0, 1000, 1 << 20])]}

def disturb(transports, seed, stop):
    chance = random.Random(seed)
    while not stop.is_set():
        name = chance.choice(METHODS[:-4] if chance.random() < 0.98 else METHODS)
        method = getattr(chance.choice(transports), name)
        arguments = ARGUMENTS[name](chance) if name in ARGUMENTS else []
        with contextlib.suppress(Exception):
            method(*arguments)

async def main(seed):
    pairs = [helpers.make_pair("unix") for _ in range(8)]
    transports, stop = [], threading.Event()
    for ours, peer in pairs:
        transports.append((await loop.create_connection(helpers.Echo, sock=ours))[0])
        peer.setblocking(False)
    threads = [threading.Thread(target=disturb, args=(transports, 10 * seed + n, stop))
               for n in range(3)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 0.7
    while time.monotonic() < deadline:
        for _, peer in pairs:
            with contextlib.suppress(OSError):
                peer.recv(1 << 16)
            with contextlib.suppress(OSError):
                peer.send(b"y" * 1000)
        await asyncio.sleep(0)
    stop.set()
    for thread in threads:
        thread.join()
    for transport in transports:
        with contextlib.suppress(Exception):
            transport.abort()
    for _, peer in pairs:
        peer.close()
    await helpers.ticks(20)

for seed in helpers.repeats(2):
    loop.run_until_complete(main(seed))
with contextlib.suppress(Exception):
    loop.close()
print("alive")
"""


@pytest.mark.uvloop_differs("is not thread-safe", THREADS, run=False)
def test_transports_used_by_wrong_threads_do_not_crash(loop_kind):
    child = run_child(loop_kind, WRONG, limit=60 + 10 * len(repeats(2)))
    assert (child.returncode, child.stdout) == (0, "alive\n"), child.stderr


SWEEP = """
import os, socket, threading
import test_sock_ends
pairs = [socket.socketpair() for _ in range(65)]
for ours, peer in pairs:
    ours.setblocking(False)
late = []

def stash_more():
    other = helpers.make_loop(kind)
    made = [socket.socketpair() for _ in range(5)]      # the first have numbers that listdir() saw
    late.extend(made[-1])
    late[0].setblocking(False)
    other.run_until_complete(test_sock_ends.stash(other, *late, b"kept"))
    other.close()

def listdir(path, listdir=os.listdir):
    names = listdir(path)
    os.listdir = listdir
    thread = threading.Thread(target=stash_more)
    thread.start()
    thread.join()
    return names

async def main():
    for ours, peer in pairs[:64]:
        await test_sock_ends.stash(loop, ours, peer, b"x")
    os.listdir = listdir
    await test_sock_ends.stash(loop, *pairs[64], b"x")
    assert late, "no sweep"
    print(await asyncio.wait_for(loop.sock_recv(late[0], 10), 10))
    for ours, peer in pairs:
        assert await loop.sock_recv(ours, 10) == b"x"
loop.run_until_complete(main())
loop.close()
"""


def test_what_is_stashed_while_another_loop_sweeps_is_kept(loop_kind):
    only_ours(loop_kind, "stash")
    if loop_kind == "epoll":
        pytest.skip("readiness takes nothing out of a socket")
    child = run_child(loop_kind, SWEEP)
    assert (child.returncode, child.stdout) == (0, "b'kept'\n"), child.stderr


def test_a_call_of_another_loop_on_the_same_socket(loop_kind, ledger):
    """One thread sends on a socket, another receives on it, each with its own loop."""
    with socket_pair() as (ours, peer):
        peer.setblocking(False)
        data = pattern(1 << 20)
        received = bytearray()

        def work(main):
            loop = make_loop(loop_kind)
            with contextlib.closing(loop):
                loop.run_until_complete(main(loop))

        async def send(loop):
            await loop.sock_sendall(ours, data)

        async def echo(loop):
            left = len(data)
            while left:
                part = await loop.sock_recv(peer, 1 << 16)
                await loop.sock_sendall(peer, part)
                left -= len(part)

        async def receive(loop):
            while len(received) < len(data):
                received.extend(await loop.sock_recv(ours, 1 << 16))

        Failures().run([lambda main=main: work(main) for main in (send, echo, receive)])
        assert_same(received, data)


def test_protocols_of_many_loops_keep_their_contexts(loop_kind, ledger):
    """Callbacks run in the thread of their own loop."""
    where = {}

    class Noting(Recorder):
        def data_received(self, data):
            super().data_received(data)
            where.setdefault(id(asyncio.get_running_loop()), set()).add(threading.get_ident())

    def work():
        loop = make_loop(loop_kind)
        loops.append(loop)

        async def main():
            async with connected(Noting) as (_, protocol, peer):
                for number in range(20):
                    peer.sendall(b"x")
                    await protocol.received(number + 1)

        loop.run_until_complete(main())

    loops = []
    Failures().run([work] * 8)
    assert len(where) == 8
    assert all(len(threads) == 1 for threads in where.values())
    for loop in loops:
        loop.close()
