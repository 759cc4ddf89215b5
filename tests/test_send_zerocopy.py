"""The option send_zerocopy: what is sent without a copy, and how long its memory is kept. On epoll
the option changes nothing."""

import asyncio
import errno
import gc
import os
import socket
import sys
import threading
import weakref

import pytest
from helpers import (
    Recorder,
    assert_same,
    connected,
    in_child,
    in_thread,
    make_pair,
    only_ours,
    pattern,
    read_exactly,
    read_to_end,
    reset,
    reuse,
    run_child,
    run_once,
    socket_pair,
    ticks,
    tls_connected,
    until,
)

import uringloop
from uringloop import _core

KINDS = ("io_uring", "epoll")
SIZE = 20_000                   # the option's value here
LARGE = 100_000
PLENTY = 8 << 20                # more than any pair of socket buffers holds


@pytest.fixture
def loop_options():
    return {"send_zerocopy": SIZE}


def sends(loop):
    return loop.stats().zerocopy_sends


def fresh(size, seed):
    """A pattern that nobody else holds, so that its memory is used again once it is let go of."""
    return bytes(memoryview(pattern(size, seed)))


def use_memory_again(size=300_000):
    """Fill what is free with something else."""
    gc.collect()
    return [bytes([number]) * size for number in range(20)]


async def returned(loop):
    """All memory is the program's again."""
    await until(lambda: not loop.stats().zerocopy_pending)


# What is lent


@pytest.mark.parametrize("size, count", [(SIZE - 1, 0), (SIZE, 1), (256 << 10, 1), (600_000, 3)])
async def test_writes_from_the_given_size_on_are_not_copied(loop, loop_kind, size, count):
    async with connected() as (transport, _, peer):
        reading = asyncio.ensure_future(in_thread(read_exactly, peer, size))
        transport.write(pattern(size))
        assert_same(await reading, pattern(size))
        await returned(loop)
        assert sends(loop) == (count if loop_kind == "io_uring" else 0)
        # Over loopback the kernel copies when the peer's end gets it.
        assert loop.stats().zerocopy_copied == sends(loop)


async def test_a_head_and_a_body_leave_in_one_request(loop, loop_kind):
    async with connected() as (transport, _, peer):
        transport.write(b"head")
        transport.write(pattern(LARGE))
        transport.write(b"tail")
        expected = b"head" + pattern(LARGE) + b"tail"
        assert_same(await in_thread(read_exactly, peer, len(expected)), expected)
        await returned(loop)
        assert sends(loop) == (loop_kind == "io_uring")


@pytest.mark.parametrize("parts, lent", [((50_000, 30_000), 1), ((10_000,) * 8, 0)])
async def test_writelines_lends_for_the_sake_of_a_large_part(loop, loop_kind, parts, lent):
    data = [pattern(size, seed) for seed, size in enumerate(parts)]
    async with connected() as (transport, _, peer):
        transport.writelines(data)
        assert_same(await in_thread(read_exactly, peer, sum(parts)), b"".join(data))
        await returned(loop)
        assert sends(loop) == (lent if loop_kind == "io_uring" else 0)


@pytest.mark.parametrize("kind", [bytearray, memoryview])
async def test_what_may_change_is_copied_before_write_returns(loop, kind):
    data = bytearray(pattern(1 << 20))
    async with connected(small=True) as (transport, _, peer):
        transport.write(kind(data))
        data[:] = bytes(len(data))
        assert_same(await in_thread(read_exactly, peer, len(data)), pattern(1 << 20))


async def test_unix_sockets_are_not_asked(loop):
    async with connected(family="unix") as (transport, _, peer):
        transport.write(pattern(LARGE))
        assert_same(await in_thread(read_exactly, peer, LARGE), pattern(LARGE))
        assert sends(loop) == 0


def test_a_write_while_the_loop_does_not_run_is_sent_at_once(loop):
    with socket_pair() as (ours, peer):
        transport, protocol = loop.run_until_complete(
            loop.create_connection(Recorder, sock=ours))
        transport.write(pattern(LARGE))
        assert_same(read_exactly(peer, LARGE), pattern(LARGE))
        assert sends(loop) == 0
        transport.close()
        loop.run_until_complete(protocol.lost())


async def test_tls_lends_what_it_has_encrypted(loop, loop_kind, contexts):
    async with tls_connected(contexts, small=False) as (transport, _, peer):
        reading = asyncio.ensure_future(in_thread(read_exactly, peer, PLENTY))
        transport.write(pattern(PLENTY))
        assert_same(await reading, pattern(PLENTY))
        assert bool(sends(loop)) == (loop_kind == "io_uring")


# Order and ends


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("end", ["close", "write_eof"])
async def test_everything_arrives_in_order_before_the_end(loop, small, end):
    sizes = [1, 30_000, 5, SIZE, SIZE - 1, 300_000, 1000] * 5
    parts = [pattern(size, seed) for seed, size in enumerate(sizes)]
    async with connected(small=small) as (transport, protocol, peer):
        reading = asyncio.ensure_future(in_thread(read_to_end, peer))
        for number, part in enumerate(parts):
            transport.write(part)
            if number % 3 == 0:
                await asyncio.sleep(0)
        getattr(transport, end)()
        assert_same(await reading, b"".join(parts))
        if end == "close":
            assert await protocol.lost() is None


async def test_a_connection_ends_while_the_kernel_holds_its_memory(loop, loop_kind):
    """The end is not kept from the peer, and the memory not from the kernel."""
    async with connected() as (transport, protocol, peer):
        transport.write(fresh(300_000, 5))
        transport.close()
        assert await protocol.lost() is None
        assert transport.get_extra_info("socket").fileno() == -1
        if loop_kind == "io_uring":
            assert loop.stats().zerocopy_pending
        noise = use_memory_again()
        assert_same(await in_thread(read_to_end, peer), pattern(300_000, 5))
        await returned(loop)
        assert noise


@pytest.mark.parametrize("end", ["abort", "close by the peer", "reset by the peer"])
async def test_a_send_that_waits_is_ended(loop, end):
    with socket_pair(small=True) as (ours, peer):
        transport, protocol = await loop.create_connection(Recorder, sock=ours)
        transport.write(pattern(PLENTY))
        await ticks()
        assert transport.get_write_buffer_size() > 0
        if end == "abort":
            transport.abort()
            assert await protocol.lost() is None
            peer.close()
        else:
            (reset if end == "reset by the peer" else socket.socket.close)(peer)
            assert isinstance(await protocol.lost(), (ConnectionResetError, BrokenPipeError))
        await returned(loop)


async def test_what_was_accepted_before_an_abort_arrives_unchanged(loop, loop_kind):
    data = pattern(400_000, 3)
    with socket_pair(small=True) as (ours, peer):
        transport, protocol = await loop.create_connection(Recorder, sock=ours)
        transport.write(fresh(len(data), 3))
        await ticks()
        transport.abort()
        await protocol.lost()
        # The request was ended, out of its turn. What it has brought into the socket is lent.
        assert loop.stats().zerocopy_pending == (loop_kind == "io_uring")
        noise = use_memory_again()
        got = await in_thread(read_to_end, peer)
        assert 0 < len(got) < len(data)
        assert_same(got, data[:len(got)])
        assert noise
        await returned(loop)


async def test_what_is_held_for_a_peer_that_does_not_read_is_bounded(loop, loop_kind):
    async with connected() as (transport, protocol, peer):
        for seed in range(40):
            transport.write(pattern(1 << 20, seed % 4))
            await ticks(2)
        await ticks(50)
        assert protocol.calls.count("pause_writing") == 1
        waiting = transport.get_write_buffer_size()
        held = loop.stats().bytes_sent
        assert waiting + held == 40 << 20
        assert held <= 16 << 20             # what both socket buffers take
        if loop_kind == "io_uring":
            assert 0 < loop.stats().zerocopy_pending <= held / SIZE
        transport.abort()
        peer.close()
        await protocol.lost()
        await returned(loop)


async def test_the_memory_is_let_go_of(loop):
    async with connected(small=True) as (transport, _, peer):
        data = bytes(LARGE)
        count = sys.getrefcount(data)
        transport.write(data)
        await ticks()
        assert sys.getrefcount(data) > count
        await in_thread(read_exactly, peer, LARGE)
        await returned(loop)
        await until(lambda: sys.getrefcount(data) == count)


async def test_a_number_that_names_another_socket_before_the_flush(loop, loop_kind):
    if loop_kind == "epoll":
        pytest.skip("it has sent all at once")
    ours, peer = make_pair()
    transport, protocol = await loop.create_connection(Recorder, sock=ours)
    number = ours.fileno()
    transport.write(pattern(LARGE))
    os.close(number)
    other, other_peer = reuse(number, "tcp")
    with peer, other, other_peer:
        exc = await protocol.lost()
        assert exc.errno == errno.EBADF
        other_peer.setblocking(False)
        with pytest.raises(BlockingIOError):
            other_peer.recv(1)
        assert transport.get_extra_info("socket").fileno() == -1


# Flow control


async def test_flow_control_counts_what_the_kernel_has_not_accepted(loop):
    async with connected() as (transport, protocol, peer):
        transport.write(pattern(LARGE))
        await until(lambda: transport.get_write_buffer_size() == 0)
        await ticks()
        calls = [call for call in protocol.calls if call.endswith("_writing")]
        assert calls in ([], ["pause_writing", "resume_writing"])
        assert_same(await in_thread(read_exactly, peer, LARGE), pattern(LARGE))


async def test_drain_holds_a_writer_up(loop):
    data = pattern(1 << 20)
    with socket_pair(small=True) as (ours, peer):
        _, writer = await asyncio.open_connection(sock=ours)
        reading = asyncio.ensure_future(in_thread(read_to_end, peer))
        for _ in range(8):
            writer.write(data)
            await writer.drain()
            assert writer.transport.get_write_buffer_size() <= 64 << 10
        writer.close()
        await writer.wait_closed()
        assert_same(await reading, data * 8)


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_write_timeout_sees_a_peer_that_does_not_read(loop, when):
    async with connected() as (transport, protocol, peer):
        if when == "before":
            transport.set_write_timeout(0.05)
        transport.write(pattern(PLENTY))
        await ticks()
        transport.set_write_timeout(0.05)
        assert isinstance(await protocol.lost(), TimeoutError)
        peer.close()
        await returned(loop)


# Loops


def write_to_a_peer_that_does_not_read(loop, size=PLENTY):
    """(transport, peer) with memory in the kernel."""
    ours, peer = make_pair()
    transport, _ = loop.run_until_complete(loop.create_connection(Recorder, sock=ours))
    loop.call_soon(lambda: transport.write(fresh(size, 3)))
    for _ in range(10):
        run_once(loop)
    return transport, peer


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_a_loop_is_closed_while_the_kernel_holds_memory(new_loop, loop_kind):
    """What was accepted still arrives, unchanged, whoever uses memory now."""
    loop = new_loop()
    transport, peer = write_to_a_peer_that_does_not_read(loop, 2 << 20)
    if loop_kind == "io_uring":
        assert loop.stats().zerocopy_pending
    loop.close()
    sent = loop.stats().bytes_sent
    assert loop.stats().zerocopy_pending == 0
    del transport, loop
    noise = use_memory_again(2 << 20)
    assert_same(read_exactly(peer, sent), pattern(2 << 20, 3)[:sent])
    peer.close()
    assert noise


async def everything_arrives(loop, transport, peer, size):
    assert_same(await in_thread(read_exactly, peer, size), pattern(size, 3))
    await returned(loop)
    transport.abort()
    peer.close()
    await ticks()


def test_the_loop_moves_to_another_thread_while_the_kernel_holds_memory(loop):
    transport, peer = write_to_a_peer_that_does_not_read(loop, 1 << 20)
    failures = []

    def run():
        try:
            loop.run_until_complete(
                asyncio.wait_for(everything_arrives(loop, transport, peer, 1 << 20), 30))
        except BaseException as exc:
            failures.append(exc)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert not thread.is_alive() and not failures


def test_a_fork_changes_nothing_for_the_parent(loop):
    transport, peer = write_to_a_peer_that_does_not_read(loop, 1 << 20)

    def child():
        loop.close()
        assert use_memory_again(1 << 20)

    assert in_child(child) == 0
    loop.run_until_complete(everything_arrives(loop, transport, peer, 1 << 20))


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_a_transport_that_is_dropped_leaves_its_memory_to_the_kernel(loop, loop_kind):
    transport, peer = write_to_a_peer_that_does_not_read(loop, 300_000)
    transport.pause_reading()
    dropped = weakref.ref(transport)
    if loop_kind == "io_uring":
        assert loop.stats().zerocopy_pending
    del transport
    for _ in range(3):
        run_once(loop)
        gc.collect()
    assert dropped() is None
    noise = use_memory_again()
    assert_same(read_to_end(peer), pattern(300_000, 3))
    peer.close()
    assert noise
    loop.run_until_complete(returned(loop))


# Where it can't be


def test_a_kernel_without_zero_copy_sends_gets_copies(loop_kind, new_loop, monkeypatch, caplog):
    only_ours(loop_kind, "zero-copy sends")
    uringloop.backend.zerocopy_flags.cache_clear()
    monkeypatch.setattr(_core, "probe_zerocopy", lambda: -1)
    try:
        loop = new_loop()
        assert ("send_zerocopy has no effect" in caplog.text) == (loop_kind == "io_uring")
        transport, peer = write_to_a_peer_that_does_not_read(loop, 300_000)
        assert_same(read_exactly(peer, 300_000), pattern(300_000, 3))
        assert sends(loop) == 0
        transport.abort()
        peer.close()
    finally:
        uringloop.backend.zerocopy_flags.cache_clear()


LITTLE_MEMORY = """
import concurrent.futures.thread, os, resource, uringloop
resource.setrlimit(resource.RLIMIT_MEMLOCK, (128 << 10, 128 << 10))
os.setuid(65534)
loop = uringloop.new_event_loop(uringloop.LoopOptions(
    backend=kind, send_zerocopy=4096, ring_entries=16, recv_buffers=64))

async def main():
    data = helpers.pattern(3 << 20)
    async with helpers.connected() as (transport, _, peer):
        reading = asyncio.ensure_future(asyncio.to_thread(helpers.read_exactly, peer, len(data)))
        for start in range(0, len(data), 30_000):
            transport.write(data[start:start + 30_000])
            await asyncio.sleep(0)
        helpers.assert_same(await reading, data)

loop.run_until_complete(main())
print(loop.stats().zerocopy_sends)
loop.close()
"""


def test_little_locked_memory_means_copies(loop_kind):
    """ENOMEM from the kernel, for some sends or for all of them."""
    if os.geteuid():
        pytest.skip("needs root, to become somebody who is limited")
    child = run_child(loop_kind, LITTLE_MEMORY)
    assert child.returncode == 0, child.stderr
    assert (int(child.stdout) > 0) == (loop_kind == "io_uring")


async def test_a_socket_that_refuses_zero_copy_is_copied_to_from_then_on(loop, loop_kind):
    try:
        mptcp = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262)      # IPPROTO_MPTCP
    except OSError:
        pytest.skip("this kernel has no MPTCP, whose sockets refuse it")
    with socket.create_server(("127.0.0.1", 0)) as listener, mptcp:
        mptcp.connect(listener.getsockname())
        mptcp.setblocking(False)
        peer, _ = listener.accept()
        with peer:
            transport, protocol = await loop.create_connection(Recorder, sock=mptcp)
            data = pattern(1 << 20)
            transport.write(data)
            assert_same(await in_thread(read_exactly, peer, len(data)), data)
            transport.write(data)
            assert_same(await in_thread(read_exactly, peer, len(data)), data)
            assert sends(loop) == (loop_kind == "io_uring")
            transport.abort()
            await protocol.lost()
