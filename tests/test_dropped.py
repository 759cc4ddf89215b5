"""What is dropped without being closed: transports, servers, pipes, and calls half-way, in cycles
or not. It goes on, or ends with a warning, as on asyncio; nothing crashes and nothing is kept."""

import asyncio
import gc
import os
import socket
import weakref

import pytest
from helpers import (
    LIMIT,
    Recorder,
    has_ended,
    in_thread,
    make_loop,
    make_pair,
    repeats,
    socket_pair,
    ticks,
    until,
)
from references import STALE, UVLOOP_POLL


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
@pytest.mark.uvloop_differs("keeps its handles", UVLOOP_POLL, run=False)
async def test_a_paused_transport_that_nobody_holds(loop):
    for _ in repeats(3):
        ours, peer = make_pair()
        transport, protocol = await loop.create_connection(Recorder, sock=ours)
        del ours
        transport.pause_reading()
        await ticks()
        gone = weakref.ref(protocol)
        with pytest.warns(ResourceWarning, match="unclosed transport"):
            del transport, protocol
            for _ in range(3):
                gc.collect()
                await ticks()
        assert gone() is None
        assert await in_thread(has_ended, peer)
        peer.close()


async def test_a_reading_transport_that_nobody_holds_goes_on(loop):
    received = []

    class Keeping(asyncio.Protocol):
        def connection_made(self, transport):
            self.transport = transport

        def data_received(self, data):
            received.append(data)
            self.transport.close()

    ours, peer = make_pair()
    await loop.create_connection(Keeping, sock=ours)
    del ours
    for _ in range(3):
        gc.collect()
        await ticks()
    peer.sendall(b"x")
    assert await in_thread(peer.recv, 1) == b""
    assert received == [b"x"]
    peer.close()


async def test_a_server_that_nobody_holds_goes_on(loop):
    protocols = []

    def factory():
        protocols.append(Recorder())
        return protocols[-1]

    server = await loop.create_server(factory, "127.0.0.1", 0)
    sock = socket.socket(fileno=os.dup(server.sockets[0].fileno()))
    gone = weakref.ref(server)
    del server
    for _ in range(3):
        gc.collect()
        await ticks()
    with socket.create_connection(sock.getsockname()) as client, sock:
        client.sendall(b"x")
        await until(lambda: protocols and protocols[0].data == b"x")
        protocols[0].transport.abort()
        await protocols[0].lost()
    server = gone()
    if server is not None:      # else what serves holds none
        server.close()


async def test_a_datagram_transport_that_nobody_holds_goes_on(loop):
    received = []

    class Keeping(asyncio.DatagramProtocol):
        def connection_made(self, transport):
            self.transport = transport

        def datagram_received(self, data, addr):
            received.append(data)
            self.transport.close()

    transport, _ = await loop.create_datagram_endpoint(Keeping, ("127.0.0.1", 0))
    address = transport.get_extra_info("sockname")
    del transport, _
    for _ in range(3):
        gc.collect()
        await ticks()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as peer:
        peer.sendto(b"x", address)
        await until(lambda: received)
    await ticks()
    assert received == [b"x"]


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
@pytest.mark.uvloop_differs("keeps its handles", UVLOOP_POLL, run=False)
async def test_a_paused_pipe_that_nobody_holds(loop):
    reading, writing = os.pipe()
    transport, protocol = await loop.connect_read_pipe(Recorder, os.fdopen(reading, "rb", 0))
    transport.pause_reading()
    await ticks()
    with pytest.warns(ResourceWarning, match="unclosed transport"):
        del transport, protocol
        for _ in range(3):
            gc.collect()
            await ticks()
    with pytest.raises(BrokenPipeError):
        os.write(writing, b"x")
    os.close(writing)


def drop_half_way(loop, sock, other, kind):
    """A call in a reference cycle, started or not; returns nothing that holds it."""
    calls = {"recv": lambda: loop.sock_recv(sock, 10),
             "recv_into": lambda: loop.sock_recv_into(sock, bytearray(10)),
             "sendall": lambda: loop.sock_sendall(other, b"O" * (8 << 20)),
             "recvfrom": lambda: loop.sock_recvfrom(sock, 10)}

    async def awaiting():
        await calls[kind]()

    holder = []
    coroutine = awaiting()
    holder.append((coroutine, holder))
    coroutine.send(None)


@pytest.mark.parametrize("kind", ["recv", "recv_into", "recvfrom", "sendall"])
@pytest.mark.uvloop_differs("keeps what it waits for", UVLOOP_POLL, run=False)
@pytest.mark.asyncio_differs("its reader keeps the future that nobody awaits", STALE, run=False)
async def test_a_call_dropped_half_way_in_a_cycle(loop, kind):
    """Its waiting ends, so that the next call gets the bytes."""
    with socket_pair() as (ours, peer), socket_pair(small=True) as (other, other_peer):
        for number in repeats(20):
            drop_half_way(loop, ours, other, kind)
            if number % 2:
                await ticks(2)
            if number % 3 == 0:
                peer.sendall(b"%03d" % (number % 1000))
            if number % 4:
                await ticks(1)
            for _ in range(3):
                gc.collect()
            if number % 3 == 0:
                got = b""
                while len(got) < 3:
                    got += await asyncio.wait_for(loop.sock_recv(ours, 10), LIMIT)
                assert got == b"%03d" % (number % 1000)
        await ticks()
        if kind == "sendall":
            with pytest.raises(TimeoutError):
                other_peer.settimeout(0.2)
                while True:
                    assert set(await in_thread(other_peer.recv, 1 << 20)) == {ord("O")}


async def test_a_call_never_awaited_in_a_cycle(loop, loop_kind):
    with socket_pair() as (ours, peer):
        holder = []
        holder.append((loop.sock_recv(ours, 10), holder))
        with pytest.warns(RuntimeWarning, match="sock_recv' was never awaited"):
            del holder
            gc.collect()
        peer.sendall(b"x")
        assert await loop.sock_recv(ours, 10) == b"x"


@pytest.mark.parametrize("held", ["by its owner", "by a loop that stops"])
@pytest.mark.filterwarnings("ignore:unclosed event loop:ResourceWarning")
def test_a_handle_in_a_cycle_with_its_callback_is_collected(loop_kind, held):
    gone = []

    class Owner:
        def schedule(self, loop):
            self.handle = loop.call_soon(self.called, loop)
            if held == "by a loop that stops":
                loop.stop()
            else:
                loop.call_later(0.001, loop.stop)

        def called(self, loop):
            pass

    loop = make_loop(loop_kind)
    owner = Owner()
    gone.append(weakref.ref(owner))
    loop.call_soon(owner.schedule, loop)
    del owner
    loop.run_forever()
    if held == "by its owner":
        gc.collect()
        assert gone[0]() is None
        loop.close()
    del loop
    gc.collect()
    assert gone[0]() is None
