"""The option sock_readahead: a receive that stays armed between calls, and where its bytes go."""

import asyncio
import gc
import os
import random
import socket
import threading
import warnings

import pytest
from helpers import (
    LIMIT,
    Recorder,
    assert_same,
    end,
    in_thread,
    make_pair,
    pattern,
    read_to_end,
    reset,
    socket_pair,
    ticks,
    until,
    waiting,
)

import uringloop

KINDS = ("io_uring", "epoll")


@pytest.fixture(params=[{}, {"recv_buffers": 4, "recv_buffer_size": 64}], ids=["", "tiny pool"])
def loop_options(request):
    return {"sock_readahead": True, **request.param}


async def armed(loop, ours, peer):
    """Make a first call, so that the socket is read ahead from now on."""
    peer.sendall(b"!")
    assert await loop.sock_recv(ours, 1) == b"!"
    await ticks()


@pytest.mark.parametrize("family", ["tcp", "unix"])
async def test_bytes_that_come_between_calls(loop, family):
    with socket_pair(family) as (ours, peer):
        await armed(loop, ours, peer)
        for i in range(100):
            peer.sendall(b"%3d" % i)
            if i % 3:
                await ticks(i % 4)
            got = b""
            while len(got) < 3:
                got += await loop.sock_recv(ours, 100)
            assert got == b"%3d" % i


async def test_calls_that_wait_when_the_pool_runs_dry(loop):
    data = pattern(1000)
    with socket_pair() as (ours, peer):
        await armed(loop, ours, peer)
        calls = [await waiting(loop, loop.sock_recv(ours, 1))]
        calls += [loop.create_task(loop.sock_recv(ours, 1)) for _ in range(2)]
        peer.sendall(data)
        got = b"".join([await call for call in calls])
        while len(got) < len(data):
            got += await loop.sock_recv(ours, 100)
        assert_same(got, data)


async def test_calls_of_any_size_and_kind(loop):
    chance = random.Random(1)
    total = 500_000
    with socket_pair() as (ours, peer):
        sender = loop.create_task(in_thread(peer.sendall, pattern(total)))
        got = bytearray()
        while len(got) < total:
            size = chance.choice([1, 7, 64, 1000, 16384, 100_000])
            buffer = bytearray(size)
            kind = chance.randrange(4)
            if kind == 0:
                got += await loop.sock_recv(ours, size)
            elif kind == 1:
                count = await loop.sock_recv_into(ours, buffer)
                got += buffer[:count]
            elif kind == 2:
                got += (await loop.sock_recvfrom(ours, size))[0]
            else:
                count, _ = await loop.sock_recvfrom_into(ours, buffer)
                got += buffer[:count]
        assert_same(got, pattern(total))
        await sender


async def test_no_more_is_held_than_the_limit(loop):
    with socket_pair() as (ours, peer):
        await armed(loop, ours, peer)
        sender = loop.create_task(in_thread(peer.sendall, pattern(20_000_000)))
        before = loop.stats().bytes_received
        for _ in range(200):
            await asyncio.sleep(0.001)
        # 64 KiB, and what was on its way when the limit was reached.
        assert loop.stats().bytes_received - before < 4_000_000
        assert not sender.done()
        got = bytearray()
        while len(got) < 20_000_000:
            got += await loop.sock_recv(ours, 1 << 18)
        assert_same(got, pattern(20_000_000))
        await sender


async def test_the_end_and_a_reset(loop):
    with socket_pair() as (ours, peer):
        await armed(loop, ours, peer)
        peer.sendall(b"last")
        peer.shutdown(socket.SHUT_WR)
        await ticks()
        assert await loop.sock_recv(ours, 10) == b"last"
        for _ in range(3):
            assert await loop.sock_recv(ours, 10) == b""
        assert await loop.sock_recv_into(ours, bytearray(3)) == 0
    with socket_pair() as (ours, peer):
        await armed(loop, ours, peer)
        reset(peer)
        await ticks()
        with pytest.raises(ConnectionResetError):
            await loop.sock_recv(ours, 10)
        assert await loop.sock_recv(ours, 10) == b""


async def test_cancelling_loses_no_byte(loop):
    with socket_pair() as (ours, peer):
        got, sent = b"", b""
        for i in range(300):
            task = loop.create_task(loop.sock_recv(ours, 100))
            await ticks(i % 4)
            peer.sendall(b"%d;" % i)
            sent += b"%d;" % i
            if i % 3:
                await ticks(1)
            task.cancel()
            await asyncio.wait([task])
            got += b"" if task.cancelled() else task.result()
        while len(got) < len(sent):
            got += await asyncio.wait_for(loop.sock_recv(ours, 50), LIMIT)
        assert got == sent


async def test_calls_wait_in_order(loop):
    with socket_pair() as (ours, peer):
        await armed(loop, ours, peer)
        tasks = [loop.create_task(loop.sock_recv(ours, 4)) for _ in range(20)]
        await ticks()
        tasks[3].cancel()
        peer.sendall(b"".join(b"%4d" % i for i in range(19)))
        got = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(got.pop(3), asyncio.CancelledError)
        assert got == [b"%4d" % i for i in range(19)]


async def test_a_transport_gets_what_is_held(loop):
    with socket_pair() as (ours, peer):
        await armed(loop, ours, peer)
        peer.sendall(b"before ")
        await ticks()
        transport, protocol = await loop.create_connection(Recorder, sock=ours)
        peer.sendall(b"after")
        assert await protocol.received(12) == b"before after"
        end(transport)
        await protocol.lost()


async def test_a_detached_socket_keeps_what_is_held(loop):
    with socket_pair() as (ours, peer):
        await armed(loop, ours, peer)
        peer.sendall(b"kept")
        await ticks()
        with socket.socket(fileno=ours.detach()) as other:
            other.setblocking(False)
            peer.sendall(b" and more")
            got = b""
            while len(got) < 13:
                got += await loop.sock_recv(other, 100)
            assert got == b"kept and more"


@pytest.mark.parametrize("waits", [False, True])
async def test_closing_the_socket_is_seen_by_the_peer(loop, waits):
    with socket_pair() as (ours, peer):
        await armed(loop, ours, peer)
        task = loop.create_task(loop.sock_recv(ours, 1)) if waits else None
        await ticks()
        ours.close()
        assert await in_thread(read_to_end, peer) == b""
        if task:
            with pytest.raises(OSError):
                await task
        await until(lambda: loop.stats().in_flight <= 1)


async def test_dropping_the_socket_is_seen_by_the_peer(loop):
    ours, peer = make_pair()
    with peer:
        await armed(loop, ours, peer)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            del ours
            gc.collect()
        assert await in_thread(read_to_end, peer) == b""


async def test_a_number_used_again(loop):
    for i in range(100):
        ours, peer = make_pair()
        with peer:
            await armed(loop, ours, peer)
            peer.sendall(b"old")
            await ticks(i % 3)
            number = ours.fileno()
            ours.close()
            new, new_peer = make_pair()
            if new.fileno() != number:
                new, new_peer = new_peer, new
                new.setblocking(False)
            with new, new_peer:
                new_peer.sendall(b"new")
                assert await loop.sock_recv(new, 10) == b"new"


async def test_more_sockets_than_blocks(loop):
    pairs = [make_pair("unix") for _ in range(100)]

    async def talk(ours, peer, seed):
        for i in range(10):
            peer.sendall(pattern(200, seed + i))
            got = b""
            while len(got) < 200:
                got += await loop.sock_recv(ours, 150)
            assert got == pattern(200, seed + i)

    await asyncio.gather(*(talk(*pair, seed) for seed, pair in enumerate(pairs)))
    for ours, peer in pairs:
        ours.close()
        peer.close()


def test_a_loop_closed_while_it_reads_ahead(new_loop):
    loop = new_loop()
    pairs = [make_pair() for _ in range(20)]
    for ours, peer in pairs:
        loop.run_until_complete(armed(loop, ours, peer))
        peer.sendall(b"unread")
    os.stat(".")
    loop.close()
    for ours, peer in pairs:
        ours.close()
        peer.close()


def test_reading_ahead_goes_on_in_another_thread(new_loop):
    loop = new_loop()
    with socket_pair() as (ours, peer):
        thread = threading.Thread(target=loop.run_until_complete, args=(armed(loop, ours, peer),))
        thread.start()
        thread.join()
        peer.sendall(b"x")
        assert loop.run_until_complete(loop.sock_recv(ours, 10)) == b"x"
        peer.sendall(b"y")
        assert loop.run_until_complete(loop.sock_recv(ours, 10)) == b"y"


def test_the_environment_switches_it_on():
    from uringloop.options import effective_options

    options = effective_options(None, {"URINGLOOP_OPTIONS": "sock_readahead=true"})
    assert options.sock_readahead is True
    with pytest.raises(ValueError, match="sock_readahead must be one of"):
        effective_options(None, {"URINGLOOP_OPTIONS": "sock_readahead=maybe"})
    with pytest.raises(TypeError, match="sock_readahead"):
        uringloop.LoopOptions(sock_readahead=1)


@pytest.mark.parametrize(("method", "arguments"), [
    ("sock_recv", (-1,)), ("sock_recv", ("a",)), ("sock_recv", (1 << 80,)), ("sock_recv", (0,)),
    ("sock_recv_into", (b"readonly",)), ("sock_recvfrom", (-1,)), ("sock_recvfrom", ("x",)),
    ("sock_recvfrom_into", (bytearray(10), -1)), ("sock_recvfrom_into", (bytearray(10), 100)),
])
async def test_a_bad_argument_takes_nothing_of_what_is_held(loop, method, arguments):
    with socket_pair() as (ours, peer):
        await armed(loop, ours, peer)
        peer.sendall(b"held")
        await ticks()
        try:
            assert await getattr(loop, method)(ours, *arguments) == b""
        except (TypeError, ValueError, OverflowError):
            pass
        assert await loop.sock_recv(ours, 10) == b"held"


async def test_a_refused_call_leaves_a_transport_its_bytes(loop):
    with socket_pair() as (ours, peer):
        transport, protocol = await loop.create_connection(Recorder, sock=ours)
        with pytest.raises(RuntimeError):
            await loop.sock_recv(ours, 10)
        for i in range(5):
            peer.sendall(b"%d" % i)
            await protocol.received(i + 1)
        assert protocol.data == b"01234"
        end(transport)
        await protocol.lost()


async def test_a_socket_that_is_not_connected_yet(loop):
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as ours:
        ours.setblocking(False)
        for _ in range(2):
            with pytest.raises(OSError, match="not connected"):
                await loop.sock_recv(ours, 10)
        await loop.sock_connect(ours, listener.getsockname())
        peer, _ = listener.accept()
        with peer:
            peer.sendall(b"hello")
            assert await loop.sock_recv(ours, 10) == b"hello"


def test_an_interrupted_delivery_goes_on_in_the_next_run(new_loop):
    loop = new_loop()
    with socket_pair() as (ours, peer):
        loop.run_until_complete(armed(loop, ours, peer))

        async def interrupted():
            await loop.sock_recv(ours, 1)
            raise KeyboardInterrupt

        first = loop.create_task(interrupted())
        second = loop.create_task(loop.sock_recv(ours, 1))
        loop.run_until_complete(ticks())
        peer.sendall(b"ab")
        with pytest.raises(KeyboardInterrupt):
            loop.run_until_complete(second)
        assert loop.run_until_complete(asyncio.wait_for(second, LIMIT)) == b"b"
        assert isinstance(first.exception(), KeyboardInterrupt)
