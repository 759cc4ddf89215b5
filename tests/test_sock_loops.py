"""loop.sock_* calls and the life of their loop: stopped, run again, closed with calls that wait."""

import asyncio
import gc
import hashlib
import os
import socket
import struct
import threading
import weakref

import pytest
from helpers import (
    make_pair,
    only_ours,
    pattern,
    run_child,
    run_once,
    socket_pair,
    ticks,
    waiting,
)

# The life of the loop


def test_a_loop_closed_under_waiting_calls(new_loop, loop_kind):
    for _ in range(20):
        loop = new_loop()
        pairs = [make_pair() for _ in range(20)]
        tasks = [loop.create_task(loop.sock_recv(ours, 10)) for ours, _ in pairs]
        run_once(loop)
        run_once(loop)
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.wait(tasks))
        for ours, peer in pairs:
            ours.close()
            peer.close()
        loop.close()


def test_a_loop_closed_with_calls_in_flight(loop_kind):
    only_ours(loop_kind, "child process")
    done = run_child(loop_kind, """
import socket, gc
pairs = [socket.socketpair() for _ in range(50)]
for a, b in pairs:
    a.setblocking(False)
tasks = [loop.create_task(loop.sock_recv(a, 10)) for a, b in pairs]
tasks += [loop.create_task(loop.sock_sendall(a, b"x" * 4000000)) for a, b in pairs]
loop.run_until_complete(asyncio.sleep(0.01))
for a, b in pairs[::2]:
    b.send(b"data")
for task in tasks:
    task._log_destroy_pending = False
loop.close()
del tasks, task, loop
gc.collect()
for a, b in pairs[1::2]:
    b.send(b"after")
    assert a.recv(10) == b"after"
print("fine")
""")
    assert (done.stdout, done.returncode) == ("fine\n", 0), done.stderr


def test_calls_wait_on_in_another_thread(new_loop):
    """io_uring's requests die with their thread; the calls do not."""
    loop = new_loop()
    with socket_pair() as (ours, peer):
        task = None

        async def start():
            nonlocal task
            task = asyncio.ensure_future(loop.sock_recv(ours, 10))
            await ticks()

        thread = threading.Thread(target=loop.run_until_complete, args=(start(),))
        thread.start()
        thread.join()
        peer.sendall(b"x")
        assert loop.run_until_complete(task) == b"x"


def test_a_pending_call_does_not_leak(new_loop, loop_kind):
    only_ours(loop_kind, "own class")
    loop = new_loop()

    class Sock(socket.socket):
        pass

    async def main():
        ours, peer = make_pair()
        sock = Sock(fileno=ours.detach())
        sock.setblocking(False)
        task = await waiting(loop, loop.sock_recv(sock, 10))
        peer.close()
        assert await task == b""
        sock.close()
        return weakref.ref(sock)

    reference = loop.run_until_complete(main())
    gc.collect()
    assert reference() is None
    assert loop.stats().in_flight <= (1 if loop_kind == "io_uring" else 0)


async def test_five_hundred_conversations(loop):
    pairs = [make_pair("unix") for _ in range(250)]

    async def talk(sock, first):
        for i in range(20):
            if first:
                await loop.sock_sendall(sock, pattern(100, i))
                assert await loop.sock_recv(sock, 1000) == pattern(100, i)
            else:
                await loop.sock_sendall(sock, await loop.sock_recv(sock, 1000))

    for _, peer in pairs:
        peer.setblocking(False)
    await asyncio.gather(*(talk(ours, True) for ours, _ in pairs),
                         *(talk(peer, False) for _, peer in pairs))
    for ours, peer in pairs:
        ours.close()
        peer.close()


async def test_a_digest_both_ways_at_once(loop):
    size = 8_000_000
    with socket_pair() as (ours, peer):
        peer.setblocking(False)

        async def digest(sock):
            found, left = hashlib.sha1(), size
            while left:
                data = await loop.sock_recv(sock, min(left, 1 << 17))
                found.update(data)
                left -= len(data)
            return found.digest()

        results = await asyncio.gather(
            digest(ours), digest(peer), loop.sock_sendall(ours, pattern(size, 1)),
            loop.sock_sendall(peer, pattern(size, 2)))
        assert results[0] == hashlib.sha1(pattern(size, 2)).digest()
        assert results[1] == hashlib.sha1(pattern(size, 1)).digest()


async def test_a_reset_is_not_lost_with_a_cancelled_call(loop, loop_kind):
    only_ours(loop_kind, "stash")
    with socket_pair() as (ours, peer):
        task = await waiting(loop, loop.sock_recv(ours, 10))
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        peer.close()
        os.stat(".")
        task.cancel()
        await asyncio.wait([task])
        with pytest.raises(ConnectionResetError):
            await loop.sock_recv(ours, 10)
