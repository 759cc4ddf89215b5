"""Descriptors that change hands: closed, detached, duplicated, their numbers used again, under
calls and transports. The new owner of a number never gets or loses a byte.

What becomes of the call or transport whose socket went is in test_sock_ends.py.
"""

import asyncio
import os
import socket

import pytest
from helpers import (
    LIMIT,
    Recorder,
    assert_same,
    connected,
    end,
    has_ended,
    in_thread,
    make_pair,
    only_ours,
    pattern,
    read_exactly,
    read_to_end,
    repeats,
    reuse,
    socket_pair,
    ticks,
    until,
    waiting,
)
from references import BY_OUR_HANDS, LIBUV_POLL, SOCK_DOC, STALE, UVLOOP_POLL, aborts

# Calls on sockets


def stream():
    ours, peer = make_pair(small=True)
    return ours, peer, None


def datagram():
    """A receiver; a sender to it."""
    ours = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    ours.bind(("127.0.0.1", 0))
    ours.setblocking(False)
    peer = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    peer.connect(ours.getsockname())
    return ours, peer, None


def full_datagram():
    """A sender whose receiver takes no more."""
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    peer.bind("")           # an abstract name
    peer.settimeout(LIMIT)
    ours = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    ours.connect(peer.getsockname())
    ours.setblocking(False)
    with pytest.raises(BlockingIOError):
        while True:
            ours.send(b"-" * 100)
    return ours, peer, None


def listening():
    ours = socket.create_server(("127.0.0.1", 0))
    ours.setblocking(False)
    return ours, socket.socket(), None


def unconnected():
    """A socket; a listener whose queue is full, so that connecting to it takes long."""
    peer = socket.create_server(("127.0.0.1", 0), backlog=0)
    filling = []
    for _ in range(3):
        sock = socket.socket()
        sock.setblocking(False)
        sock.connect_ex(peer.getsockname())
        filling.append(sock)
    ours = socket.socket()
    ours.setblocking(False)
    return ours, peer, filling


CALLS = {
    "recv": (stream, lambda loop, sock, peer: loop.sock_recv(sock, 100)),
    "recv_into": (stream, lambda loop, sock, peer: loop.sock_recv_into(sock, bytearray(100))),
    "recvfrom": (datagram, lambda loop, sock, peer: loop.sock_recvfrom(sock, 100)),
    "recvfrom_into": (datagram, lambda loop, sock, peer: loop.sock_recvfrom_into(
        sock, bytearray(100))),
    "sendall": (stream, lambda loop, sock, peer: loop.sock_sendall(sock, b"O" * (4 << 20))),
    "sendto": (full_datagram, lambda loop, sock, peer: loop.sock_sendto(
        sock, b"O", peer.getsockname())),
    "accept": (listening, lambda loop, sock, peer: loop.sock_accept(sock)),
    "connect": (unconnected, lambda loop, sock, peer: loop.sock_connect(sock, peer.getsockname())),
}


def take_away(sock, how):
    """Free the number of a socket."""
    if how == "close":
        sock.close()
    else:
        os.close(sock.detach() if how == "detach" else sock.fileno())


async def assert_untouched(new, new_peer, count=3):
    """Bytes go both ways, all of them, and nothing else comes."""
    new.setblocking(False)
    new_peer.setblocking(False)
    for number in range(count):
        token = b"%d" % number
        new_peer.sendall(token)
        await ticks()
        assert new.recv(100) == token
        new.sendall(token)
        assert new_peer.recv(100) == token
    for sock in (new, new_peer):
        with pytest.raises(BlockingIOError):
            sock.recv(100)
        sock.settimeout(LIMIT)


# Not: os.close() of what is queued. A socket object does not know of it (docs/compatibility.md).
WAYS = [("queued", "close"), ("queued", "detach"),
        ("in flight", "close"), ("in flight", "detach"), ("in flight", "os.close")]


@aborts
@pytest.mark.parametrize("when, how", WAYS)
@pytest.mark.parametrize("call", CALLS)
async def test_a_number_used_again_under_a_call(loop, call, when, how):
    make, start = CALLS[call]
    for _ in repeats(2):
        ours, peer, others = make()
        number = ours.fileno()
        task = loop.create_task(start(loop, ours, peer))
        if when == "queued":
            await asyncio.sleep(0)
        else:
            await ticks()
        assert not task.done()
        take_away(ours, how)
        new, new_peer = reuse(number)
        await assert_untouched(new, new_peer)
        # The old peer goes on: what is its goes nowhere else.
        if call.startswith("recv"):
            peer.send(b"O")
        elif call == "sendall":
            await in_thread(peer.recv, 1 << 20)
        elif call == "sendto":
            peer.recv(100)
        await assert_untouched(new, new_peer)
        task.cancel()
        await asyncio.wait([task])
        await assert_untouched(new, new_peer)
        if how == "os.close":
            ours.detach()
        for sock in (ours, peer, new, new_peer, *(others or ())):
            sock.close()


@pytest.mark.asyncio_differs("its map of descriptors is stale", STALE, run=False)
@pytest.mark.uvloop_differs("its poll handle is stale", LIBUV_POLL, run=False)
@pytest.mark.parametrize("call", CALLS)
async def test_a_call_on_the_new_owner_of_a_number(loop, call):
    make, start = CALLS[call]
    for _ in repeats(3):
        ours, peer, others = make()
        number = ours.fileno()
        task = await waiting(loop, start(loop, ours, peer))
        ours.close()
        new, new_peer = reuse(number)
        new.setblocking(False)
        receiving = loop.create_task(loop.sock_recv(new, 100))
        await ticks()
        new_peer.sendall(b"new")
        assert await asyncio.wait_for(receiving, LIMIT) == b"new"
        await asyncio.wait_for(loop.sock_sendall(new, pattern(1 << 16)), LIMIT)
        assert_same(read_exactly(new_peer, 1 << 16), pattern(1 << 16))
        task.cancel()
        await asyncio.wait([task])
        for sock in (peer, new, new_peer, *(others or ())):
            sock.close()


async def test_bytes_that_came_before_a_detach_stay_with_the_connection(loop, loop_kind):
    only_ours(loop_kind, "asyncio's call waits for ever")
    with socket_pair() as (ours, peer):
        task = await waiting(loop, loop.sock_recv(ours, 4))
        with socket.socket(fileno=ours.detach()) as other:
            other.setblocking(False)
            peer.sendall(b"12345678")
            await ticks()
            with pytest.raises(OSError):
                await task
            got = b""
            while len(got) < 8:
                got += await asyncio.wait_for(loop.sock_recv(other, 100), LIMIT)
            assert got == b"12345678"


# add_reader and add_writer


@pytest.mark.asyncio_differs("its map of descriptors is stale", STALE, run=False)
@aborts
@pytest.mark.parametrize("watching", ["sock_recv", "transport", "add_reader"])
async def test_removing_a_closed_file_leaves_the_new_owner_of_its_number_alone(loop, watching):
    left, right = socket.socketpair()
    number = left.fileno()
    loop.add_reader(left, print, "stale")
    loop.add_writer(left, int)
    await ticks()
    left.close()
    right.close()
    new, new_peer = reuse(number)
    new.setblocking(False)
    seen = []
    transport = None
    if watching == "sock_recv":
        task = await waiting(loop, loop.sock_recv(new, 10))
        task.add_done_callback(lambda task: seen.append(task.result()))
    elif watching == "transport":
        transport, protocol = await loop.create_connection(Recorder, sock=new)
        seen = protocol.chunks
        await ticks()
    else:
        loop.add_reader(number, lambda: seen.append(new.recv(10)))
    loop.remove_reader(left)
    loop.remove_writer(left)
    await ticks()
    new_peer.send(b"new")
    await until(lambda: seen, 5)
    assert seen == [b"new"]
    if transport is not None:
        end(transport)
        await protocol.lost()
    elif watching == "add_reader":
        loop.remove_reader(number)
    new.close()
    new_peer.close()


@aborts
@pytest.mark.parametrize("method", ["add_reader", "add_writer"])
async def test_a_number_used_again_under_a_watcher(loop, method):
    """The callback belongs to the file that is gone."""
    for _ in repeats(5):
        seen = []
        left, right = make_pair(small=True)
        if method == "add_writer":
            with pytest.raises(BlockingIOError):
                while True:
                    left.send(b"-" * 1000)
        number = left.fileno()
        getattr(loop, method)(left, seen.append, "called")
        await ticks()
        left.close()
        new, new_peer = reuse(number)
        await assert_untouched(new, new_peer)
        assert seen == []
        getattr(loop, method.replace("add", "remove"))(left)
        for sock in (right, new, new_peer):
            sock.close()


# Transports


@aborts
@pytest.mark.asyncio_differs("closes the new owner's descriptor", BY_OUR_HANDS, run=False)
@pytest.mark.parametrize("kind", ["tcp", "unix"])
@pytest.mark.parametrize("last", ["abort", "close"])
async def test_a_descriptor_closed_behind_a_transport(loop, errors, kind, last):
    """os.close() with a large write in flight: the rest goes to nobody, and nobody's file is
    closed at the end."""
    for _ in repeats(5):
        ours, peer = make_pair(kind, small=True)
        number = ours.fileno()
        transport, protocol = await loop.create_connection(Recorder, sock=ours)
        transport.write(pattern(1 << 20))
        await ticks()
        os.close(number)
        new, new_peer = reuse(number)
        await assert_untouched(new, new_peer)
        received = len(await in_thread(peer.recv, 1 << 16))
        while received < 1 << 20:
            # Bytes that the kernel has taken still come; the rest does not.
            peer.settimeout(0.2)
            try:
                data = await in_thread(peer.recv, 1 << 20)
            except TimeoutError:
                break
            if not data:
                break
            received += len(data)
        await assert_untouched(new, new_peer)
        getattr(transport, last)()
        await protocol.lost()
        await ticks()
        await assert_untouched(new, new_peer)
        for sock in (peer, new, new_peer):
            sock.close()


@aborts
@pytest.mark.asyncio_differs("closes the new owner's descriptor", BY_OUR_HANDS, run=False)
@pytest.mark.parametrize("act", ["write_eof", "pause and resume", "large message", "nothing"])
async def test_an_idle_transports_descriptor_is_closed_behind_it(loop, errors, act):
    for _ in repeats(3):
        ours, peer = make_pair()
        number = ours.fileno()
        transport, protocol = await loop.create_connection(Recorder, sock=ours)
        await ticks()
        if act == "pause and resume":
            transport.pause_reading()
            await ticks()
        os.close(number)
        new, new_peer = reuse(number, "tcp")
        if act == "write_eof":
            transport.write_eof()
        elif act == "pause and resume":
            transport.resume_reading()
        elif act == "large message":
            peer.sendall(pattern(1 << 16))
        await ticks()
        await assert_untouched(new, new_peer)
        transport.abort()
        await protocol.lost()
        await ticks()
        await assert_untouched(new, new_peer)
        for sock in (peer, new, new_peer):
            sock.close()


@pytest.mark.uvloop_differs("raises EBADF", UVLOOP_POLL, run=False)
async def test_a_socket_detached_under_a_transport(loop, loop_kind):
    """The transport ends as soon as it finds out; every byte goes to the socket's new owner."""
    for before in (b"", b"before"):
        ours, peer = make_pair()
        transport, protocol = await loop.create_connection(Recorder, sock=ours)
        peer.sendall(before)
        await protocol.received(len(before))
        with socket.socket(fileno=ours.detach()) as other:
            other.setblocking(False)
            for number in range(5):
                peer.sendall(b"%d" % number)
                await ticks()
            assert (await protocol.lost()).errno == 9
            assert protocol.data == before
            peer.sendall(b"5")
            got = b""
            while len(got) < 6:
                got += await loop.sock_recv(other, 100)
            assert got == b"012345"
            await loop.sock_sendall(other, b"open")
            assert await in_thread(peer.recv, 10) == b"open"
        assert await in_thread(peer.recv, 10) == b""
        peer.close()


@pytest.mark.uvloop_differs("raises EBADF", UVLOOP_POLL, run=False)
@pytest.mark.parametrize("size", [10, 1 << 20])
async def test_writing_to_a_transport_whose_socket_was_detached(loop, size):
    ours, peer = make_pair()
    transport, protocol = await loop.create_connection(Recorder, sock=ours)
    await ticks()
    with socket.socket(fileno=ours.detach()) as other:
        transport.write(pattern(size))
        assert (await protocol.lost()).errno == 9
        other.sendall(b"only this")
    assert await in_thread(read_to_end, peer) == b"only this"
    peer.close()


@pytest.mark.uvloop_differs("raises EBADF", UVLOOP_POLL, run=False)
async def test_a_socket_detached_under_a_paused_transport(loop):
    with socket_pair() as (ours, peer):
        transport, protocol = await loop.create_connection(Recorder, sock=ours)
        await ticks()
        transport.pause_reading()
        peer.sendall(b"for the new owner")
        await ticks()
        with socket.socket(fileno=ours.detach()) as other:
            other.setblocking(False)
            transport.abort()
            await protocol.lost()
            await ticks()
            peer.sendall(b"!")
            got = b""
            while len(got) < 18:
                got += await loop.sock_recv(other, 100)
            assert got == b"for the new owner!"
            assert protocol.data == b""


@pytest.mark.asyncio_differs("sends and receives as the descriptor says: blocking", SOCK_DOC,
                             run=False)
@pytest.mark.uvloop_differs("sends and receives as the descriptor says: blocking", LIBUV_POLL,
                            run=False)
@pytest.mark.parametrize("size", [100, 1 << 20])
async def test_a_dup_that_is_made_blocking_does_not_block_the_loop(loop, size):
    """The flag is one of the open file: another process that has it may change it."""
    async with connected(small=True) as (transport, protocol, peer):
        os.set_blocking(transport.get_extra_info("socket").fileno(), True)
        total = 0
        while total < 1 << 20:
            transport.write(pattern(size))
            transport.write(bytearray(size))
            total += 2 * size
            if total % 10_000 == 0:
                await asyncio.sleep(0)
        await in_thread(peer.sendall, b"x" * 100_000)
        await protocol.received(100_000)
        assert len(await in_thread(read_exactly, peer, total)) == total


async def test_a_dup_keeps_the_connection_when_its_transport_closes(loop):
    with socket_pair() as (ours, peer):
        with ours.dup() as copy:
            copy.setblocking(False)
            transport, protocol = await loop.create_connection(Recorder, sock=ours)
            peer.sendall(b"first")
            await protocol.received(5)
            transport.close()
            await protocol.lost()
            await ticks()
            peer.sendall(b"second")
            assert await loop.sock_recv(copy, 100) == b"second"
            await loop.sock_sendall(copy, b"third")
            assert await in_thread(peer.recv, 100) == b"third"
        assert await in_thread(has_ended, peer)


@pytest.mark.asyncio_differs("breaks (EBADF), and the number is another's",
                             BY_OUR_HANDS, run=False)
async def test_a_socket_closed_under_a_transport_keeps_its_number(loop):
    ours, peer = make_pair()
    number = ours.fileno()
    transport, protocol = await loop.create_connection(Recorder, sock=ours)
    ours.close()
    others = [make_pair("unix") for _ in range(5)]
    assert number not in {sock.fileno() for pair in others for sock in pair}
    peer.sendall(b"still")
    await protocol.received(5)
    transport.write(b"here")
    assert await in_thread(peer.recv, 10) == b"here"
    transport.close()
    await protocol.lost()
    assert await in_thread(peer.recv, 10) == b""
    for sock in (peer, *(sock for pair in others for sock in pair)):
        sock.close()


class DatagramRecorder(asyncio.DatagramProtocol):
    def __init__(self):
        self.datagrams = []
        self.errors = []
        self.is_lost = False

    def datagram_received(self, data, addr):
        self.datagrams.append(data)

    def error_received(self, exc):
        self.errors.append(exc)

    def connection_lost(self, exc):
        self.is_lost = True


@aborts
@pytest.mark.parametrize("last", ["abort", "close"])
async def test_a_datagram_socket_closed_under_its_transport(loop, last):
    for _ in repeats(3):
        ours, peer, _ = datagram()
        number = ours.fileno()
        transport, protocol = await loop.create_datagram_endpoint(DatagramRecorder, sock=ours)
        peer.send(b"before")
        await until(lambda protocol=protocol: protocol.datagrams == [b"before"])
        ours.close()
        new, new_peer = reuse(number)
        transport.sendto(b"O", peer.getsockname())
        await assert_untouched(new, new_peer)
        assert [error.errno for error in protocol.errors] == [9]
        getattr(transport, last)()
        await until(lambda protocol=protocol: protocol.is_lost)
        await assert_untouched(new, new_peer)
        assert protocol.datagrams == [b"before"]
        for sock in (peer, new, new_peer):
            sock.close()


class Resuming(Recorder):
    """Does something when told that its output was sent."""

    def __init__(self, action):
        super().__init__()
        self.action = action

    def resume_writing(self):
        super().resume_writing()
        self.action()


@pytest.mark.asyncio_differs("its server cannot close a socket that is closed", STALE, run=False)
@pytest.mark.uvloop_differs("its listeners are duplicates", UVLOOP_POLL, run=False)
async def test_a_listener_replaced_while_its_server_starts(loop):
    """In a callback that runs when the loop is about to submit: the accept is for the old one."""
    old = socket.create_server(("127.0.0.1", 0))
    new = []

    def replace():
        number = old.fileno()
        old.close()
        new.append(socket.create_server(("127.0.0.1", 0)))
        assert new[0].fileno() == number
        new.append(socket.create_connection(new[0].getsockname()))

    async with connected(lambda: Resuming(replace), small=True) as (transport, protocol, peer):
        peer.setblocking(False)
        server = await loop.create_server(Recorder, sock=old, start_serving=False)
        starting = server.start_serving()
        starting.send(None)
        transport.write(bytes(100_000))
        assert protocol.calls[-1] == "pause_writing"
        while transport.get_write_buffer_size():
            peer.recv(1 << 20)
        await until(lambda: new)
        starting.close()
        listener, client = new
        with listener, client:
            await ticks()
            listener.settimeout(5)
            connection, _ = await in_thread(listener.accept)
            with connection:
                connection.sendall(b"hello")
                assert client.recv(10) == b"hello"
        server.close()


@pytest.mark.asyncio_differs("its server cannot close a socket that is detached", STALE)
@pytest.mark.uvloop_differs("its listeners are duplicates", UVLOOP_POLL, run=False)
async def test_a_listeners_number_used_again(loop):
    """os.close() behind a server: it serves nobody any more, and accepts from nobody else."""
    old, new = (socket.create_server(("127.0.0.1", 0)) for _ in range(2))
    address, made = old.getsockname(), []
    server = await loop.create_server(lambda: made.append(Recorder()) or made[-1], sock=old)
    await ticks()
    os.close(old.fileno())
    with new:
        os.dup2(new.fileno(), old.fileno(), inheritable=False)
        for _ in range(2):
            with pytest.raises(ConnectionError):
                await in_thread(read_a_byte, address)
        with socket.create_connection(new.getsockname()) as client:
            await ticks()
            new.settimeout(LIMIT)
            connection, _ = await in_thread(new.accept)
            with connection:
                connection.sendall(b"hello")
                assert client.recv(10) == b"hello"
    assert not made
    os.close(old.detach())
    server.close()


def read_a_byte(address):
    """Connects; ConnectionError where nobody serves, be it by a reset or by an end at once."""
    with socket.create_connection(address, LIMIT) as sock:
        if not sock.recv(1):
            raise ConnectionAbortedError
