"""loop.sock_*: one call after another on plain sockets, cancelled, closed, mixed with direct use.

What only this loop promises (calls wait in order, a cancelled call loses nothing, a closed socket
ends its calls) is tested on both backends; the rest is compared with asyncio and uvloop.
"""

import asyncio
import contextvars
import errno
import gc
import hashlib
import os
import resource
import socket
import struct
import threading
import warnings
import weakref

import pytest
from helpers import (
    LIMIT,
    Recorder,
    assert_same,
    end,
    in_thread,
    make_pair,
    pattern,
    read_exactly,
    reset,
    run_child,
    run_once,
    socket_pair,
    ticks,
)

OURS = ("io_uring", "epoll")


def only_ours(loop_kind, what):
    if loop_kind not in OURS:
        pytest.skip(f"{loop_kind} makes no such promise: {what}")


async def waiting(loop, call):
    """A task in which the call waits already, its request being in the kernel."""
    task = loop.create_task(call)
    await ticks()
    assert not task.done()
    return task


# Receiving


@pytest.mark.parametrize("family", ["tcp", "unix"])
async def test_what_is_there_and_what_comes_later(loop, family):
    with socket_pair(family) as (ours, peer):
        peer.sendall(b"first")
        assert await loop.sock_recv(ours, 100) == b"first"
        for i in range(100):
            task = loop.create_task(loop.sock_recv(ours, 100))
            if i % 3:
                await ticks(i % 4)
            peer.sendall(b"%d" % i)
            assert await task == b"%d" % i


async def test_recv_into(loop):
    with socket_pair() as (ours, peer):
        buffer = bytearray(b"........")
        task = await waiting(loop, loop.sock_recv_into(ours, buffer))
        peer.sendall(b"abc")
        assert await task == 3
        assert buffer == b"abc....."
        peer.sendall(b"0123456789")
        assert await loop.sock_recv_into(ours, memoryview(buffer)[4:]) == 4
        assert buffer == b"abc.0123"


@pytest.mark.parametrize("early", [True, False])
async def test_the_end_of_the_stream_is_seen_again_and_again(loop, early):
    with socket_pair() as (ours, peer):
        task = None if early else await waiting(loop, loop.sock_recv(ours, 10))
        peer.shutdown(socket.SHUT_WR)
        if task:
            assert await task == b""
        assert await loop.sock_recv(ours, 10) == b""
        assert await loop.sock_recv_into(ours, bytearray(10)) == 0


@pytest.mark.parametrize("early", [True, False])
async def test_a_reset(loop, early):
    with socket_pair() as (ours, peer):
        task = None if early else await waiting(loop, loop.sock_recv(ours, 10))
        reset(peer)
        with pytest.raises(ConnectionResetError) as caught:
            await (task or loop.sock_recv(ours, 10))
        assert caught.value.errno == errno.ECONNRESET
        assert await loop.sock_recv(ours, 10) == b""


async def test_a_waiting_call_takes_no_more_than_it_asked_for(loop):
    with socket_pair() as (ours, peer):
        task = await waiting(loop, loop.sock_recv(ours, 10))
        peer.sendall(pattern(100))
        assert await task == pattern(100)[:10]
        assert ours.recv(30) == pattern(100)[10:40]
        assert await loop.sock_recv(ours, 1000) == pattern(100)[40:]


async def test_between_calls_nothing_of_the_socket_is_taken(loop):
    with socket_pair() as (ours, peer):
        for i in range(50):
            task = loop.create_task(loop.sock_recv(ours, 100))
            await ticks(i % 3)
            peer.sendall(b"call %d" % i)
            assert await task == b"call %d" % i
            peer.sendall(b"direct %d" % i)
            await ticks()
            other = ours.dup() if i % 2 else ours
            assert other.recv(100) == b"direct %d" % i
            if other is not ours:
                other.close()


@pytest.mark.parametrize("size", [1, 100, 16384, 65536, 1 << 20])
async def test_a_long_stream(loop, size):
    total = min(3_000_000, 3000 * size)
    with socket_pair() as (ours, peer):
        sender = loop.create_task(in_thread(peer.sendall, pattern(total)))
        got = bytearray()
        while len(got) < total:
            data = await loop.sock_recv(ours, size)
            assert 0 < len(data) <= size
            got += data
        assert_same(got, pattern(total))
        await sender


@pytest.mark.parametrize("size", [1, 100, 16384, 1 << 20])
async def test_a_long_stream_into_a_buffer(loop, size):
    total = min(2_000_000, 3000 * size)
    with socket_pair() as (ours, peer):
        sender = loop.create_task(in_thread(peer.sendall, pattern(total)))
        got = bytearray()
        buffer = bytearray(size)
        while len(got) < total:
            count = await loop.sock_recv_into(ours, buffer)
            got += memoryview(buffer)[:count]
        assert_same(got, pattern(total))
        await sender


@pytest.mark.uvloop_differs("resizes under the receive", "its own buffer handling", run=False)
async def test_a_buffer_that_shrinks_under_a_waiting_call(loop):
    with socket_pair() as (ours, peer):
        buffer = bytearray(100)
        task = await waiting(loop, loop.sock_recv_into(ours, buffer))
        del buffer[3:]
        peer.sendall(b"abcdef")
        assert await task == 3
        assert buffer == b"abc"
        assert await loop.sock_recv(ours, 10) == b"def"


# Cancelling


@pytest.mark.asyncio_differs("a cancellation that comes after the data loses it",
                             "https://github.com/python/cpython/issues/86296")
@pytest.mark.uvloop_differs("a cancellation that comes after the data loses it",
                            "https://github.com/MagicStack/uvloop/issues/169", run=False)
@pytest.mark.parametrize("into", [False, True])
@pytest.mark.parametrize("looks", range(4))
async def test_cancelling_loses_no_byte(loop, into, looks):
    """Data and cancellation in every order, 300 times."""
    with socket_pair() as (ours, peer):
        got, sent = bytearray(), bytearray()
        buffer = bytearray(100)
        for i in range(300):
            call = loop.sock_recv_into(ours, buffer) if into else loop.sock_recv(ours, 100)
            task = loop.create_task(call)
            await ticks(looks)
            if i % 2:
                message = b"%d;" % i
                peer.sendall(message)
                sent += message
            if i % 4 > 1:
                await ticks(1)
            task.cancel()
            try:
                result = await task
                got += memoryview(buffer)[:result] if into else result
            except asyncio.CancelledError:
                pass
        while len(got) < len(sent):
            got += await asyncio.wait_for(loop.sock_recv(ours, 7), LIMIT)
        assert got == sent


async def stash(loop, ours, peer, data):
    """Let data be received for a call that is cancelled before it is told (io_uring)."""
    task = await waiting(loop, loop.sock_recv(ours, 1000))
    peer.sendall(data)
    os.stat(".")                    # a system call: the kernel completes the receive
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_what_came_for_a_cancelled_call_goes_to_the_next(loop, loop_kind):
    only_ours(loop_kind, "stash")
    with socket_pair() as (ours, peer):
        await stash(loop, ours, peer, b"0123456789")
        peer.sendall(b"abc")
        assert await loop.sock_recv(ours, 4) == b"0123"
        buffer = bytearray(3)
        assert await loop.sock_recv_into(ours, buffer) == 3 and buffer == b"456"
        assert await loop.sock_recvfrom(ours, 2) == (b"78", None)
        assert await loop.sock_recvfrom_into(ours, buffer, 1) == (1, None) and buffer == b"956"
        assert await loop.sock_recv(ours, 100) == b"abc"


async def test_what_came_for_a_cancelled_call_goes_to_those_that_wait(loop, loop_kind):
    only_ours(loop_kind, "order")
    with socket_pair() as (ours, peer):
        first = loop.create_task(loop.sock_recv(ours, 100))
        second = loop.create_task(loop.sock_recv(ours, 4))
        third = loop.create_task(loop.sock_recv(ours, 100))
        await ticks()
        peer.sendall(b"0123456789")
        os.stat(".")
        first.cancel()
        assert await second == b"0123"
        assert await third == b"456789"
        assert first.cancelled()


async def test_what_came_for_a_cancelled_call_goes_to_a_transport(loop, loop_kind):
    only_ours(loop_kind, "stash")
    with socket_pair() as (ours, peer):
        await stash(loop, ours, peer, b"early ")
        transport, protocol = await loop.create_connection(Recorder, sock=ours)
        peer.sendall(b"late")
        assert await protocol.received(10) == b"early late"
        end(transport)
        await protocol.lost()


@pytest.mark.parametrize("how", ["detach", "dup"])
async def test_what_came_for_a_cancelled_call_stays_with_the_socket(loop, loop_kind, how):
    only_ours(loop_kind, "stash")
    with socket_pair() as (ours, peer):
        await stash(loop, ours, peer, b"kept")
        if how == "detach":
            other = socket.socket(fileno=ours.detach())
        else:
            other = ours.dup()
        other.setblocking(False)
        with other:
            assert await loop.sock_recv(other, 10) == b"kept"


async def test_a_number_used_again_gets_nothing_of_the_old_socket(loop, loop_kind):
    only_ours(loop_kind, "stash")
    for _ in range(100):
        with socket_pair() as (ours, peer):
            await stash(loop, ours, peer, b"old")
            number = ours.fileno()
            ours.close()
            with socket_pair() as (new, new_peer):
                if new.fileno() != number:
                    new, new_peer = new_peer, new
                new.setblocking(False)
                new_peer.sendall(b"new")
                assert await loop.sock_recv(new, 10) == b"new"


async def test_timeouts_by_the_hundred(loop):
    with socket_pair() as (ours, peer):
        for i in range(200):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0 if i % 2 else 0.0001):
                    await loop.sock_recv(ours, 10)
        peer.sendall(b"x")
        assert await loop.sock_recv(ours, 10) == b"x"


async def test_cancelling_with_a_message(loop):
    with socket_pair() as (ours, _):
        task = await waiting(loop, loop.sock_recv(ours, 10))
        task.cancel("enough")
        with pytest.raises(asyncio.CancelledError, match="enough"):
            await task


# Order


@pytest.mark.asyncio_differs("the second call displaces the first", "asyncio.sock_recv is for one "
                             "call at a time; python.org documentation of add_reader", run=False)
@pytest.mark.uvloop_differs("the second call displaces the first",
                            "https://github.com/MagicStack/uvloop/issues/168", run=False)
async def test_calls_wait_in_order(loop):
    with socket_pair() as (ours, peer):
        tasks = [loop.create_task(loop.sock_recv(ours, 4)) for _ in range(50)]
        await ticks()
        tasks[7].cancel()
        for i in range(49):
            peer.sendall(b"%4d" % i)
        got = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(got.pop(7), asyncio.CancelledError)
        assert got == [b"%4d" % i for i in range(49)]


@pytest.mark.asyncio_differs("the second call displaces the first",
                             "one call at a time on asyncio", run=False)
@pytest.mark.uvloop_differs("the second call displaces the first",
                            "one call at a time on uvloop", run=False)
async def test_sends_wait_in_order(loop):
    with socket_pair(small=True) as (ours, peer):
        parts = [pattern(size, seed) for seed, size in enumerate([100_000, 10, 50_000, 1, 70_000])]
        tasks = [loop.create_task(loop.sock_sendall(ours, part)) for part in parts]
        whole = b"".join(parts)
        got = await in_thread(read_exactly, peer, len(whole))
        assert_same(got, whole)
        await asyncio.gather(*tasks)


# Sending


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
@pytest.mark.parametrize("size", [0, 1, 1000, 16383, 16384, 3_000_000])
async def test_sendall(loop, kind, size):
    with socket_pair(small=True) as (ours, peer):
        reader = loop.create_task(in_thread(read_exactly, peer, size))
        assert await loop.sock_sendall(ours, kind(pattern(size))) is None
        assert_same(await reader, pattern(size))


async def test_sendall_of_wide_items(loop, loop_kind):
    only_ours(loop_kind, "asyncio counts items for bytes there")
    with socket_pair(small=True) as (ours, peer):
        data = memoryview(pattern(400_000)).cast("I")
        reader = loop.create_task(in_thread(read_exactly, peer, 400_000))
        await loop.sock_sendall(ours, data)
        assert_same(await reader, pattern(400_000))


async def test_sendall_to_a_peer_that_is_gone(loop):
    with socket_pair() as (ours, peer):
        reset(peer)
        with pytest.raises(OSError) as caught:
            for _ in range(10):
                await loop.sock_sendall(ours, b"x" * 1000)
        assert caught.value.errno in (errno.ECONNRESET, errno.EPIPE)


async def test_sendall_that_is_cut_off_half_way(loop):
    with socket_pair(small=True) as (ours, peer):
        task = await waiting(loop, loop.sock_sendall(ours, pattern(3_000_000)))
        await in_thread(read_exactly, peer, 100_000)
        reset(peer)
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            await task


@pytest.mark.parametrize("size", [1000, 3_000_000])
async def test_sendall_cancelled(loop, size):
    """What the kernel has taken arrives in order; nothing is sent after the cancellation."""
    with socket_pair(small=True) as (ours, peer):
        while True:
            try:
                ours.send(b"-" * 1000)
            except BlockingIOError:
                break
        task = await waiting(loop, loop.sock_sendall(ours, pattern(size)))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        reader = loop.create_task(in_thread(lambda: peer.makefile("rb").read()))
        await loop.sock_sendall(ours, b"the end")
        ours.shutdown(socket.SHUT_WR)
        got = (await reader).lstrip(b"-")
        assert got.endswith(b"the end")
        assert pattern(size).startswith(got[:-7])


async def test_many_small_sends_leave_whole(loop):
    with socket_pair() as (ours, peer):
        reader = loop.create_task(in_thread(read_exactly, peer, 100 * 1000))
        for i in range(1000):
            await loop.sock_sendall(ours, pattern(100, i))
        assert_same(await reader, b"".join(pattern(100, i) for i in range(1000)))


# Sockets that are closed under a call


CALLS = {
    "recv": lambda loop, sock: loop.sock_recv(sock, 10),
    "recv_into": lambda loop, sock: loop.sock_recv_into(sock, bytearray(10)),
    "recvfrom": lambda loop, sock: loop.sock_recvfrom(sock, 10),
    "sendall": lambda loop, sock: loop.sock_sendall(sock, b"x" * (16 << 20)),
}


@pytest.mark.parametrize("call", CALLS)
async def test_a_socket_closed_under_a_call(loop, loop_kind, call):
    only_ours(loop_kind, "asyncio's call waits for ever")
    with socket_pair(small=True) as (ours, peer):
        task = await waiting(loop, CALLS[call](loop, ours))
        ours.close()
        with pytest.raises(OSError, match=f"sock_{call}") as caught:
            await task
        assert caught.value.errno == errno.EBADF
        while await in_thread(peer.recv, 1 << 20):
            pass                    # the end of the stream, because nothing holds the socket


async def test_many_sockets_closed_under_calls(loop, loop_kind):
    only_ours(loop_kind, "asyncio's call waits for ever")
    pairs = [make_pair("unix") for _ in range(900)]
    tasks = [loop.create_task(loop.sock_recv(ours, 10)) for ours, _ in pairs]
    await ticks()
    for ours, _ in pairs[::3]:
        ours.close()
    for task in tasks[::3]:
        with pytest.raises(OSError):
            await task
    for (_, peer), task in zip(pairs, tasks, strict=True):
        if not task.done():
            peer.send(b"x")
            assert await task == b"x"
    # Nothing is left to look after: the loop sleeps.
    await asyncio.sleep(0.01)
    before = loop.stats().ticks
    await asyncio.sleep(0.2)
    assert loop.stats().ticks - before < 20
    for ours, peer in pairs:
        ours.close()
        peer.close()


async def test_the_loop_sleeps_while_many_calls_wait(loop, loop_kind):
    only_ours(loop_kind, "own counters")
    pairs = [make_pair("unix") for _ in range(900)]
    tasks = [loop.create_task(loop.sock_recv(ours, 10)) for ours, _ in pairs]
    await asyncio.sleep(0.05)
    before = loop.stats().ticks
    await asyncio.sleep(0.3)
    assert loop.stats().ticks - before < 20
    for task, (ours, peer) in zip(tasks, pairs, strict=True):
        task.cancel()
        ours.close()
        peer.close()
    await asyncio.wait(tasks)


async def test_a_listening_socket_closed_under_accept(loop, loop_kind):
    only_ours(loop_kind, "asyncio's call waits for ever")
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    address = listener.getsockname()
    task = await waiting(loop, loop.sock_accept(listener))
    listener.close()
    with pytest.raises(OSError, match="sock_accept"):
        await task
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)


async def test_a_number_that_names_another_socket_at_once(loop, loop_kind):
    """Closed and used again before the loop looks: neither gets what is the other's."""
    only_ours(loop_kind, "asyncio's call waits for ever")
    for i in range(200):
        with socket_pair() as (ours, peer):
            task = loop.create_task(loop.sock_recv(ours, 10))
            await ticks(i % 3)
            number = ours.fileno()
            ours.close()
            new, new_peer = make_pair()
            if new.fileno() != number:
                new, new_peer = new_peer, new
                new.setblocking(False)
            assert new.fileno() == number
            with new, new_peer:
                new_peer.sendall(b"new")
                assert await loop.sock_recv(new, 10) == b"new"
                with pytest.raises(OSError):
                    await task
                peer.settimeout(LIMIT)
                assert peer.recv(1) == b""


async def test_a_closed_socket_is_refused(loop):
    with socket_pair() as (ours, _):
        ours.close()
        for call in (loop.sock_recv(ours, 1), loop.sock_recv_into(ours, bytearray(1)),
                     loop.sock_sendall(ours, b"x"), loop.sock_recvfrom(ours, 1),
                     loop.sock_accept(ours), loop.sock_connect(ours, ("127.0.0.1", 1))):
            with pytest.raises((OSError, ValueError, NotImplementedError)):
                await call


async def test_a_socket_dropped_under_a_call(loop, loop_kind):
    only_ours(loop_kind, "calls hold their socket")
    ours, peer = make_pair()
    with peer:
        task = await waiting(loop, loop.sock_recv(ours, 10))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            del ours
            gc.collect()
            peer.sendall(b"still there")
            assert await task == b"still ther"
            del task
            gc.collect()
            await ticks()


# Connecting and accepting


async def test_accept_and_connect(loop):
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    with listener:
        for early in (True, False, True):
            accepted = loop.create_task(loop.sock_accept(listener))
            await ticks(0 if early else 5)
            with socket.socket() as client:
                client.setblocking(False)
                await loop.sock_connect(client, listener.getsockname())
                served, address = await accepted
                with served:
                    assert address == client.getsockname()
                    assert served.gettimeout() == 0
                    await loop.sock_sendall(client, b"hello")
                    assert await loop.sock_recv(served, 10) == b"hello"


async def test_accept_cancelled_loses_no_connection(loop):
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    with listener:
        for i in range(100):
            task = loop.create_task(loop.sock_accept(listener))
            await ticks(i % 4)
            with socket.create_connection(listener.getsockname()) as client:
                task.cancel()
                await asyncio.wait([task])
                if task.cancelled():
                    task = loop.create_task(loop.sock_accept(listener))
                served, address = await task
                served.close()
                assert address == client.getsockname()


async def test_connect_refused(loop):
    with socket.socket() as bound, socket.socket() as client:
        bound.bind(("127.0.0.1", 0))
        client.setblocking(False)
        with pytest.raises(ConnectionRefusedError):
            await loop.sock_connect(client, bound.getsockname())


async def test_connect_to_a_full_unix_listener(loop, loop_kind, tmp_path):
    only_ours(loop_kind, "asyncio takes the socket for connected")
    path = os.fspath(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(0)
        listener.setblocking(False)
        clients = [socket.socket(socket.AF_UNIX) for _ in range(5)]
        for client in clients:
            client.setblocking(False)
        tasks = [loop.create_task(loop.sock_connect(client, path)) for client in clients]
        await ticks(20)
        assert not all(task.done() for task in tasks)
        for _ in clients:
            served, _ = await loop.sock_accept(listener)
            served.close()
        await asyncio.gather(*tasks)
        for client in clients:
            client.getpeername()
            client.close()


# Datagrams


def udp_pair():
    ours, peer = socket.socket(type=socket.SOCK_DGRAM), socket.socket(type=socket.SOCK_DGRAM)
    for sock in (ours, peer):
        sock.bind(("127.0.0.1", 0))
    ours.setblocking(False)
    peer.settimeout(LIMIT)
    return ours, peer


@pytest.mark.uvloop_differs("has no sock_recvfrom()",
                            "https://github.com/MagicStack/uvloop/issues/561")
async def test_datagrams_keep_their_bounds(loop):
    ours, peer = udp_pair()
    with ours, peer:
        for i, size in enumerate([0, 1, 65507, 20000, 0, 17000]):
            waits = i % 2
            task = loop.create_task(loop.sock_recvfrom(ours, 65536))
            await ticks(5 * waits)
            peer.sendto(pattern(size, i), ours.getsockname())
            data, address = await task
            assert_same(data, pattern(size, i))
            assert address == peer.getsockname()
            assert await loop.sock_sendto(ours, b"back", peer.getsockname()) == 4
            assert peer.recv(10) == b"back"


async def test_recv_of_datagrams(loop):
    ours, peer = udp_pair()
    with ours, peer:
        for size in (65507, 0, 30000):
            task = await waiting(loop, loop.sock_recv(ours, 100_000))
            peer.sendto(pattern(size), ours.getsockname())
            assert_same(await task, pattern(size))
        peer.sendto(pattern(100), ours.getsockname())
        peer.sendto(b"next", ours.getsockname())
        assert await loop.sock_recv(ours, 10) == pattern(100)[:10]      # the rest is cut off
        assert await loop.sock_recv(ours, 10) == b"next"


# What a call is


async def test_calls_are_coroutines(loop):
    with socket_pair() as (ours, peer):
        call = loop.sock_recv(ours, 10)
        assert asyncio.iscoroutine(call) and not asyncio.isfuture(call)
        peer.sendall(b"1")
        assert await call == b"1"
        peer.sendall(b"2")
        assert await asyncio.wait_for(loop.sock_recv(ours, 10), LIMIT) == b"2"
        peer.sendall(b"3")
        assert await asyncio.gather(loop.sock_recv(ours, 10)) == [b"3"]
        peer.sendall(b"4")
        assert await asyncio.shield(loop.sock_recv(ours, 10)) == b"4"
        task = await waiting(loop, loop.sock_recv(ours, 10))
        assert "sock_recv" in repr(task)
        peer.sendall(b"5")
        assert await task == b"5"


def test_calls_run_by_the_loop(new_loop):
    loop = new_loop()
    with socket_pair() as (ours, peer):
        peer.sendall(b"x")
        assert loop.run_until_complete(loop.sock_recv(ours, 10)) == b"x"
        assert loop.run_until_complete(loop.sock_sendall(ours, b"y")) is None
        assert peer.recv(10) == b"y"


async def test_a_call_is_lazy_and_awaited_once(loop):
    with socket_pair() as (ours, peer):
        peer.sendall(b"abc")
        call = loop.sock_recv(ours, 1)
        assert ours.recv(1) == b"a"
        assert await call == b"b"
        with pytest.raises(RuntimeError, match="cannot reuse already awaited coroutine"):
            await call
        unwanted = loop.sock_recv(ours, 1)
        unwanted.close()
        assert await loop.sock_recv(ours, 1) == b"c"


async def test_a_call_that_is_never_awaited(loop):
    with socket_pair() as (ours, _), pytest.warns(RuntimeWarning, match="never awaited"):
        loop.sock_recv(ours, 1)
        gc.collect()


def test_a_call_cannot_be_made_by_hand(new_loop, loop_kind):
    only_ours(loop_kind, "own class")
    with socket_pair() as (ours, _):
        call = new_loop().sock_recv(ours, 1)
        call.close()
        with pytest.raises(TypeError):
            type(call)()
        with pytest.raises(TypeError):
            type(call).__new__(type(call)).send(None)


async def test_the_context_of_a_waiting_task(loop):
    variable = contextvars.ContextVar("variable")

    async def receive(value):
        variable.set(value)
        data = await loop.sock_recv(ours, 10)
        assert variable.get() == value
        return data

    with socket_pair() as (ours, peer):
        task = loop.create_task(receive("inner"))
        variable.set("outer")
        await ticks()
        peer.sendall(b"x")
        assert await task == b"x"
        assert variable.get() == "outer"


def test_exceptions_out_of_a_task_that_received(new_loop):
    loop = new_loop()
    with socket_pair() as (ours, peer):
        async def receive(exception):
            await loop.sock_recv(ours, 10)
            raise exception

        for exception in (KeyboardInterrupt, SystemExit):
            task = loop.create_task(receive(exception))
            run_once(loop)
            run_once(loop)
            peer.sendall(b"x")
            with pytest.raises(exception):
                loop.run_until_complete(asyncio.sleep(LIMIT))
            with pytest.raises(exception):
                task.result()
        peer.sendall(b"y")
        assert loop.run_until_complete(loop.sock_recv(ours, 10)) == b"y"
        for leftover in asyncio.all_tasks(loop):
            leftover.cancel()
        run_once(loop)


# Bad input: the same errors as asyncio's


BAD = [
    ("sock_recv", (-1,)), ("sock_recv", ("1",)), ("sock_recv", (1.5,)), ("sock_recv", (None,)),
    ("sock_recv", (1 << 80,)), ("sock_recv", (0,)), ("sock_recv", (True,)),
    ("sock_recv_into", (b"readonly",)), ("sock_recv_into", (5,)), ("sock_recv_into", ("x",)),
    ("sock_recv_into", (bytearray(),)), ("sock_recv_into", (memoryview(bytearray(8))[::2],)),
    ("sock_sendall", ("text",)), ("sock_sendall", (None,)), ("sock_sendall", (5,)),
    ("sock_sendall", (memoryview(b"01234567")[::2],)), ("sock_sendall", (b"",)),
    ("sock_recvfrom", (-1,)), ("sock_recvfrom", ("1",)), ("sock_recvfrom_into", (b"ro",)),
    ("sock_recvfrom_into", (bytearray(4), 9)), ("sock_sendto", ("text", "/tmp")),
    ("sock_accept", ()),
]


def outcome(loop, method, arguments):
    with socket_pair() as (ours, peer):
        peer.sendall(b"data")
        try:
            call = getattr(loop, method)(ours, *arguments)
            return loop.run_until_complete(asyncio.wait_for(call, LIMIT))
        except Exception as error:
            return type(error), str(error)


@pytest.mark.parametrize(("method", "arguments"), BAD, ids=[f"{m}-{a!r:.30}" for m, a in BAD])
def test_bad_input_ends_as_in_asyncio(new_loop, loop_kind, method, arguments):
    only_ours(loop_kind, "compared with asyncio here")
    reference = asyncio.SelectorEventLoop()
    try:
        expected = outcome(reference, method, arguments)
    finally:
        reference.close()
    assert outcome(new_loop(), method, arguments) == expected


async def test_blocking_sockets_are_refused_in_debug_mode(loop):
    loop.set_debug(True)
    with socket_pair() as (ours, peer):
        ours.setblocking(True)
        for call in (loop.sock_recv(ours, 1), loop.sock_sendall(ours, b"x"),
                     loop.sock_recv_into(ours, bytearray(1)), loop.sock_accept(ours),
                     loop.sock_connect(ours, ("127.0.0.1", 1))):
            with pytest.raises(ValueError, match="non-blocking"):
                await call


async def test_a_blocking_socket_does_not_block_the_loop(loop, loop_kind):
    only_ours(loop_kind, "asyncio's blocks")
    loop.set_debug(False)
    with socket_pair() as (ours, peer):
        ours.setblocking(True)
        task = await waiting(loop, loop.sock_recv(ours, 10))
        peer.sendall(b"x")
        assert await task == b"x"


async def test_the_socket_of_a_transport_is_refused(loop):
    with socket_pair() as (ours, _):
        transport, protocol = await loop.create_connection(Recorder, sock=ours)
        for call in (loop.sock_recv(ours, 1), loop.sock_recv_into(ours, bytearray(1)),
                     loop.sock_accept(ours)):
            with pytest.raises((RuntimeError, OSError)):
                await call
        end(transport)
        await protocol.lost()


class Upper(socket.socket):
    def recv(self, size):
        return super().recv(size).upper()

    def send(self, data):
        return super().send(bytes(data).lower())


@pytest.mark.parametrize("waits", [False, True])
async def test_methods_of_a_subclass_are_used(loop, waits):
    with socket_pair() as (ours, peer):
        sock = Upper(fileno=ours.detach())
        sock.setblocking(False)
        with sock:
            task = loop.create_task(loop.sock_recv(sock, 10))
            await ticks(5 * waits)
            peer.sendall(b"abc")
            assert await task == b"ABC"
            await loop.sock_sendall(sock, b"XYZ")
            assert peer.recv(10) == b"xyz"


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


# Calls that are ended by what happens on the way


async def test_the_error_of_a_cancelled_call_goes_to_the_one_behind_it(loop, loop_kind):
    only_ours(loop_kind, "order")
    with socket_pair() as (ours, peer):
        first = loop.create_task(loop.sock_recv(ours, 10))
        second = loop.create_task(loop.sock_recv(ours, 10))
        await ticks()
        reset(peer)
        os.stat(".")
        assert first.cancel()
        with pytest.raises(ConnectionResetError):
            await second
        assert first.cancelled()


@pytest.mark.parametrize("method", ["sock_recv", "sock_recvfrom"])
async def test_calls_cancelled_together_keep_the_order_of_the_bytes(loop, loop_kind, method):
    only_ours(loop_kind, "order")
    with socket_pair() as (ours, peer):
        calls = [loop.sock_recv(ours, 10), *(getattr(loop, method)(ours, 4) for _ in range(3))]
        tasks = [loop.create_task(call) for call in calls]
        await ticks()
        peer.sendall(b"0123456789")
        os.stat(".")
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert await loop.sock_recv(ours, 20) == b"0123456789"


async def test_a_buffer_released_before_the_end_of_the_stream(loop):
    with socket_pair() as (ours, peer):
        view = memoryview(bytearray(10))
        task = await waiting(loop, loop.sock_recv_into(ours, view))
        view.release()
        peer.close()
        with pytest.raises((TypeError, ValueError)):
            await task


class Cancelling(socket.socket):
    task = None

    def recv(self, size):
        data = super().recv(size)
        self.task.cancel()
        return data


async def test_a_receive_that_cancels_its_own_call(loop, loop_kind):
    only_ours(loop_kind, "asyncio reports InvalidStateError")
    with socket_pair() as (ours, peer):
        with Cancelling(fileno=ours.detach()) as sock:
            sock.setblocking(False)
            sock.task = await waiting(loop, loop.sock_recv(sock, 10))
            peer.sendall(b"kept")
            with pytest.raises(asyncio.CancelledError):
                await sock.task
            other = sock.dup()
        with other:
            other.setblocking(False)
            assert await loop.sock_recv(other, 10) == b"kept"


def test_calls_that_outlive_their_loop(loop_kind):
    only_ours(loop_kind, "child process")
    done = run_child(loop_kind, """
import gc, socket, warnings
for how in ("cancel", "close", "collect"):
    loop = helpers.make_loop(kind)
    pairs = [socket.socketpair() for _ in range(5)]
    for a, b in pairs:
        a.setblocking(False)
    tasks = [loop.create_task(loop.sock_recv(a, 10)) for a, b in pairs]
    tasks += [loop.create_task(loop.sock_recv(a, 10)) for a, b in pairs]
    loop.run_until_complete(asyncio.sleep(0.01))
    coroutines = [task.get_coro() for task in tasks]
    for task in tasks:
        task._log_destroy_pending = False
    loop.close()
    if how == "cancel":
        for task in tasks:
            try:
                task.cancel()
            except RuntimeError as error:
                assert "closed" in str(error)
    elif how == "close":
        for coroutine in coroutines:
            coroutine.close()
    del loop, tasks, task, coroutines
    coroutine = None
    gc.collect()
    for a, b in pairs:
        a.close(), b.close()
print("fine")
""")
    assert (done.stdout, done.returncode) == ("fine\n", 0), done.stderr


async def test_a_transport_takes_the_socket_of_a_waiting_call(loop, loop_kind):
    only_ours(loop_kind, "asyncio's call waits for ever")
    with socket_pair() as (ours, peer):
        task = await waiting(loop, loop.sock_recv(ours, 10))
        transport, protocol = await loop.create_connection(Recorder, sock=ours)
        peer.sendall(b"for the transport")
        assert await protocol.received(17) == b"for the transport"
        with pytest.raises(RuntimeError, match="sock_recv"):
            await task
        end(transport)
        await protocol.lost()


async def test_a_call_that_is_awaited_twice_at_once(loop, loop_kind):
    only_ours(loop_kind, "the first waits for ever")
    with socket_pair() as (ours, peer):
        call = loop.sock_recv(ours, 10)
        first = await waiting(loop, call)
        with pytest.raises(RuntimeError, match="awaited already|already awaited"):
            await asyncio.ensure_future(call)
        peer.sendall(b"x")
        assert await first == b"x"


async def test_a_finished_call_refuses_everything(loop):
    with socket_pair() as (ours, peer):
        peer.sendall(b"x")
        call = loop.sock_recv(ours, 10)
        assert await call == b"x"
        with pytest.raises(RuntimeError, match="cannot reuse already awaited coroutine"):
            call.throw(ZeroDivisionError())
        call.close()


async def test_calls_count_in_the_statistics(loop, loop_kind):
    only_ours(loop_kind, "own counters")
    with socket_pair() as (ours, peer):
        before = loop.stats()
        await loop.sock_sendall(ours, b"x" * 300)
        peer.sendall(b"y" * 200)
        await loop.sock_recv(ours, 200)
        after = loop.stats()
        assert after.bytes_sent - before.bytes_sent == 300
        assert after.bytes_received - before.bytes_received == 200


def test_what_came_for_a_call_when_its_loop_was_closed(new_loop, loop_kind):
    only_ours(loop_kind, "stash")
    with socket_pair() as (ours, peer):
        loop = new_loop()
        task = loop.create_task(loop.sock_recv(ours, 4))
        run_once(loop)
        run_once(loop)
        peer.sendall(b"0123456789")
        os.stat(".")
        task._log_destroy_pending = False
        loop.close()
        other = new_loop()
        got = b""
        while len(got) < 10:
            got += other.run_until_complete(other.sock_recv(ours, 7))
        assert got == b"0123456789"


async def test_a_socket_detached_under_a_call_whose_bytes_have_come(loop, loop_kind):
    only_ours(loop_kind, "asyncio's call waits for ever")
    with socket_pair() as (ours, peer):
        first = await waiting(loop, loop.sock_recv(ours, 10))
        peer.sendall(b"same")
        with socket.socket(fileno=ours.detach()) as other:
            other.setblocking(False)
            second = loop.create_task(loop.sock_recv(other, 10))
            peer.sendall(b" more")
            results = await asyncio.gather(first, second, return_exceptions=True)
            got = b"".join(result for result in results if isinstance(result, bytes))
            if got == b"same":
                got += await loop.sock_recv(other, 10)
            assert got == b"same more"


async def test_add_reader_displaces_no_call_for_good(loop, loop_kind):
    only_ours(loop_kind, "order")
    with socket_pair() as (ours, peer):
        first = await waiting(loop, loop.sock_recv(ours, 1))
        loop.add_reader(ours, print)
        loop.remove_reader(ours)
        second = loop.create_task(loop.sock_recv(ours, 1))
        await ticks()
        peer.sendall(b"ab")
        assert (await first, await second) == (b"a", b"b")


async def test_what_was_learned_of_a_socket_is_not_held_against_the_next(loop, loop_kind):
    only_ours(loop_kind, "own heuristics")
    for _ in range(20):
        with socket_pair() as (ours, peer):
            peer.sendall(b"x")
            assert await loop.sock_recv(ours, 10) == b"x"
            ours.close()
            with socket.create_server(("127.0.0.1", 0)) as listener:
                listener.setblocking(False)
                with pytest.raises(OSError, match="not connected"):
                    await loop.sock_recv(listener, 10)


async def test_a_send_that_waits_goes_before_those_of_a_transport(loop):
    with socket_pair() as (ours, peer):
        task = loop.create_task(loop.sock_sendall(ours, b"first "))
        await asyncio.sleep(0)
        transport, protocol = await loop.create_connection(Recorder, sock=ours)
        transport.write(b"second")
        assert await in_thread(read_exactly, peer, 12) == b"first second"
        await task
        end(transport)
        await protocol.lost()


@pytest.mark.uvloop_differs("the ResourceWarning comes later", "its own sockets", run=False)
async def test_a_finished_call_holds_nothing(loop):
    class Data(bytearray):
        pass

    ours, peer = make_pair()
    with peer:
        data = Data(b"x")
        reference = weakref.ref(data)
        calls = [loop.sock_sendall(ours, data), loop.sock_recv(ours, 10)]
        await calls[0]
        peer.sendall(b"y")
        assert await calls[1] == b"y"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            del data, ours
            gc.collect()
        assert reference() is None
        assert await in_thread(peer.recv, 10) == b"x"
        assert await in_thread(peer.recv, 10) == b""


async def test_a_number_that_dup2_gives_to_another_socket(loop, loop_kind):
    only_ours(loop_kind, "stash")
    with socket_pair() as (ours, peer), socket_pair() as (new, new_peer):
        task = await waiting(loop, loop.sock_recv(ours, 100))
        peer.sendall(b"old")
        os.dup2(new.fileno(), ours.fileno())
        task.cancel()
        await asyncio.wait([task])
        new_peer.sendall(b"new")
        assert await loop.sock_recv(ours, 100) == b"new"


async def test_a_stash_of_many_sockets_out_of_descriptors(loop, loop_kind):
    only_ours(loop_kind, "stash")
    pairs = [make_pair("unix") for _ in range(70)]
    tasks = [loop.create_task(loop.sock_recv(ours, 10)) for ours, _ in pairs]
    await ticks()
    for i, (_, peer) in enumerate(pairs):
        peer.sendall(b"%d" % i)
    os.stat(".")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (8, limits[1]))
    try:
        for task in tasks:
            task.cancel()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    await asyncio.wait(tasks)
    for i, (ours, peer) in enumerate(pairs):
        assert await loop.sock_recv(ours, 10) == b"%d" % i
        ours.close()
        peer.close()
