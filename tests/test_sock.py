"""loop.sock_*: one call after another on plain sockets, mixed with direct use, and bad input.

What only this loop promises (calls wait in order) is tested on both backends; the rest is compared
with asyncio and uvloop.
"""

import asyncio
import contextvars
import errno
import gc
import os
import socket

import pytest
from helpers import (
    LIMIT,
    Recorder,
    assert_same,
    end,
    in_thread,
    only_ours,
    pattern,
    read_exactly,
    reset,
    run_once,
    socket_pair,
    ticks,
    waiting,
)

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
