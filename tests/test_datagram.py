"""Datagram endpoints: whole messages, their order, errors that leave the endpoint usable, the
buffer and its limits, closing, families and options, what is refused."""

import asyncio
import contextlib
import errno
import os
import pathlib
import socket
import struct

import pytest
from helpers import LIMIT, PY312, PY313, in_thread, pattern, ticks, until

UVLOOP_UDP = "https://github.com/MagicStack/uvloop/blob/v0.21.0/uvloop/handles/udp.pyx"
UVLOOP_LOOP = "https://github.com/MagicStack/uvloop/blob/v0.21.0/uvloop/loop.pyx"
UVLOOP_UNIX = "https://github.com/MagicStack/uvloop/issues/403"
UVLOOP_EMPTY = "https://github.com/MagicStack/uvloop/issues/594"
EMPTY = "https://github.com/python/cpython/issues/113812"
ACCOUNTING = "https://github.com/python/cpython/issues/135444"
AFTER_CLOSE = "https://github.com/python/cpython/pull/28110"
TWICE = "https://github.com/python/cpython/issues/156512"
LATE_ABORT = "https://github.com/agronholm/anyio/issues/1250"
UNNAMED = "https://docs.python.org/3/library/asyncio-protocol.html#asyncio.DatagramTransport.sendto"
ANY_PORT = ("127.0.0.1", 0)


class Datagrams(asyncio.DatagramProtocol):
    def __init__(self, echo=False):
        self.echo = echo
        self.received = []
        self.errors = []
        self.lost_with = []
        self.calls = []

    def connection_made(self, transport):
        self.transport = transport
        self.calls.append("connection_made")

    def datagram_received(self, data, address):
        self.received.append((data, address))
        if self.echo:
            self.transport.sendto(data, address)

    def error_received(self, exc):
        self.errors.append(exc)

    def connection_lost(self, exc):
        self.calls.append("connection_lost")
        self.lost_with.append(exc)

    def pause_writing(self):
        self.calls.append("pause_writing")

    def resume_writing(self):
        self.calls.append("resume_writing")

    def messages(self):
        return [data for data, _ in self.received]


@contextlib.asynccontextmanager
async def endpoint(loop, factory=Datagrams, **options):
    made = await loop.create_datagram_endpoint(factory, **options)
    try:
        yield made
    finally:
        made[0].close()
        await until(lambda: made[1].lost_with)


def udp_socket(address=ANY_PORT, family=socket.AF_INET):
    """A bound blocking socket for the other end."""
    sock = socket.socket(family, socket.SOCK_DGRAM)
    sock.settimeout(20)
    sock.bind(address)
    return sock


def free_address():
    with udp_socket() as placeholder:
        return placeholder.getsockname()


@pytest.fixture
def unix_pair(ledger, tmp_path):
    """(non-blocking socket for a loop, blocking peer): connected Unix datagram sockets.

    The kernel queues few datagrams between them and loses none. The peer has a name.
    """
    name = os.fspath(tmp_path / "peer")
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ours,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as peer,
    ):
        peer.bind(name)
        peer.settimeout(20)
        ours.bind(os.fspath(tmp_path / "ours"))
        ours.connect(name)
        ours.setblocking(False)
        yield ours, peer


async def fill(transport, size=1000):
    """Sends numbered datagrams until the transport has to keep one back. Returns them."""
    sent = []
    while not transport.get_write_buffer_size():
        sent.append(b"%04d" % len(sent) + bytes(size - 4))
        transport.sendto(sent[-1])
        await asyncio.sleep(0)
        assert len(sent) < 5000
    return sent


def drain(peer, count):
    return [peer.recv(1 << 20) for _ in range(count)]


def drain_to_last(peer):
    received = [peer.recv(1 << 20)]
    while received[-1] != b"last":
        received.append(peer.recv(1 << 20))
    return received


# Messages


async def test_datagrams_are_echoed_whole_and_one_by_one(loop):
    async with endpoint(loop, lambda: Datagrams(True), local_addr=ANY_PORT) as (server, _):
        address = server.get_extra_info("sockname")
        async with endpoint(loop, remote_addr=address) as (client, protocol):
            sizes = [1, 100, 5000, 60_000, 3]
            for number, size in enumerate(sizes, 1):
                client.sendto(pattern(size, number))
                await until(lambda number=number: len(protocol.received) == number)
            expected = [pattern(size, number) for number, size in enumerate(sizes, 1)]
            assert protocol.messages() == expected
            assert {source for _, source in protocol.received} == {address}


async def test_many_datagrams_in_one_tick_keep_their_order(loop):
    async with endpoint(loop, local_addr=ANY_PORT) as (server, protocol):
        address = server.get_extra_info("sockname")
        async with endpoint(loop, local_addr=ANY_PORT) as (client, _):
            for number in range(100):
                client.sendto(b"%3d" % number, address)
            await until(lambda: len(protocol.received) == 100)
            assert [int(data) for data in protocol.messages()] == list(range(100))


async def test_a_received_datagram_is_bytes_and_tells_its_sender(loop):
    async with endpoint(loop, local_addr=ANY_PORT) as (transport, protocol):
        with udp_socket() as peer:
            peer.sendto(b"hello", transport.get_extra_info("sockname"))
            await until(lambda: protocol.received)
            assert protocol.received == [(b"hello", peer.getsockname())]
            assert type(protocol.received[0][0]) is bytes


async def test_an_empty_datagram_is_received(loop):
    async with endpoint(loop, local_addr=ANY_PORT) as (transport, protocol):
        with udp_socket() as peer:
            for data in (b"before", b"", b"", b"after"):
                peer.sendto(data, transport.get_extra_info("sockname"))
            await until(lambda: len(protocol.received) == 4)
            assert protocol.messages() == [b"before", b"", b"", b"after"]
            assert not transport.is_closing()


async def test_an_empty_unix_datagram_is_no_end(loop, unix_pair):
    ours, peer = unix_pair
    async with endpoint(loop, sock=ours) as (transport, protocol):
        for data in (b"", b"after"):
            peer.sendto(data, ours.getsockname())
        await until(lambda: len(protocol.received) == 2)
        assert protocol.messages() == [b"", b"after"]
        assert not transport.is_closing()


@pytest.mark.asyncio_differs("drops empty datagrams", EMPTY, when=not PY313)
@pytest.mark.uvloop_differs("drops empty datagrams", UVLOOP_EMPTY)
@pytest.mark.parametrize("connected", [True, False], ids=["connected", "unconnected"])
async def test_an_empty_datagram_is_sent(loop, connected):
    with udp_socket() as peer:
        address = peer.getsockname()
        options = {"remote_addr": address} if connected else {"local_addr": ANY_PORT}
        async with endpoint(loop, **options) as (transport, _):
            for data in (b"before", b"", bytearray(), memoryview(b""), b"last"):
                transport.sendto(data, None if connected else address)
            received = await in_thread(drain_to_last, peer)
            assert received == [b"before", b"", b"", b"", b"last"]


@pytest.mark.asyncio_differs("drops empty datagrams", EMPTY, when=not PY313)
@pytest.mark.uvloop_differs("drops empty datagrams", UVLOOP_EMPTY)
async def test_an_empty_datagram_keeps_its_place_in_the_buffer(loop, unix_pair):
    ours, peer = unix_pair
    async with endpoint(loop, sock=ours) as (transport, _):
        sent = await fill(transport)
        for data in (b"", b"between", b"", b"last"):
            transport.sendto(data)
            sent.append(data)
        assert await in_thread(drain_to_last, peer) == sent


@pytest.mark.asyncio_differs("loses track of its buffer's size", ACCOUNTING, when=PY313, run=False)
async def test_thousands_of_datagrams_to_a_slow_receiver_arrive_in_order(loop, unix_pair):
    ours, peer = unix_pair
    sent = [b"%04d" % number + pattern(number % 200) for number in range(5000)]
    async with endpoint(loop, sock=ours) as (transport, protocol):
        for data in sent:
            transport.sendto(data)
        assert protocol.calls == ["connection_made", "pause_writing"]
        received = []

        def read():
            while len(received) < len(sent):
                received.append(peer.recv(1000))

        await in_thread(read)
        assert received == sent
        await until(lambda: protocol.calls[-1] == "resume_writing")
        assert protocol.calls == ["connection_made", "pause_writing", "resume_writing"]
        assert transport.get_write_buffer_size() == 0


async def test_thousands_of_datagrams_from_a_fast_sender_arrive_in_order(loop, unix_pair):
    ours, peer = unix_pair
    async with endpoint(loop, sock=ours) as (_, protocol):

        def write():
            for number in range(5000):
                peer.sendto(b"%d" % number, ours.getsockname())

        await in_thread(write)
        await until(lambda: len(protocol.received) == 5000)
        assert [int(data) for data in protocol.messages()] == list(range(5000))


async def test_the_largest_udp_datagram_arrives_whole(loop):
    data = pattern(65_507)
    async with endpoint(loop, lambda: Datagrams(True), local_addr=ANY_PORT) as (server, _):
        address = server.get_extra_info("sockname")
        async with endpoint(loop, remote_addr=address) as (client, protocol):
            client.sendto(data)
            await until(lambda: protocol.received)
            assert protocol.messages() == [data]


async def test_a_large_unix_datagram_arrives_whole(loop, unix_pair):
    data = pattern(200_000)
    ours, peer = unix_pair
    for sock in unix_pair:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) < 2 * len(data):
            pytest.skip("net.core.wmem_max is too small here")
    async with endpoint(loop, sock=ours) as (transport, protocol):
        peer.sendto(data, ours.getsockname())
        transport.sendto(data)
        assert await in_thread(peer.recv, 1 << 20) == data
        await until(lambda: protocol.received)
        assert protocol.messages() == [data]


# What may be sent


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
async def test_bytes_like_objects_are_sent(loop, kind):
    with udp_socket() as peer:
        async with endpoint(loop, remote_addr=peer.getsockname()) as (transport, _):
            transport.sendto(kind(b"hello"))
            assert await in_thread(peer.recv, 100) == b"hello"


@pytest.mark.uvloop_differs("drops None as if it were empty", UVLOOP_UDP)
@pytest.mark.parametrize("wrong", ["text", None, 5, [b"x"]], ids=lambda w: type(w).__name__)
async def test_what_is_not_bytes_like_is_a_type_error(loop, wrong):
    with udp_socket() as peer:
        async with endpoint(loop, remote_addr=peer.getsockname()) as (transport, _):
            with pytest.raises(TypeError):
                transport.sendto(wrong)
            transport.sendto(b"fine")
            assert await in_thread(peer.recv, 100) == b"fine"


@pytest.mark.uvloop_differs("keeps a reference", UVLOOP_UDP)
async def test_a_buffered_bytearray_may_be_changed(loop, unix_pair):
    ours, peer = unix_pair
    async with endpoint(loop, sock=ours) as (transport, _):
        sent = await fill(transport)
        data = bytearray(b"before")
        transport.sendto(data)
        transport.sendto(memoryview(data))
        data[:] = b"after!"
        received = await in_thread(drain, peer, len(sent) + 2)
        assert received[-2:] == [b"before", b"before"]


async def test_only_the_peer_is_an_address_of_a_connected_endpoint(loop):
    with udp_socket() as peer, udp_socket() as other:
        async with endpoint(loop, remote_addr=peer.getsockname()) as (transport, _):
            transport.sendto(b"1")
            transport.sendto(b"2", None)
            transport.sendto(b"3", peer.getsockname())
            with pytest.raises(ValueError, match="Invalid address"):
                transport.sendto(b"4", other.getsockname())
            assert await in_thread(drain, peer, 3) == [b"1", b"2", b"3"]


@pytest.mark.uvloop_differs("tells nobody", UVLOOP_UDP, run=False)
async def test_an_unconnected_endpoint_without_an_address_ends_with_a_type_error(loop, errors):
    transport, protocol = await loop.create_datagram_endpoint(Datagrams, local_addr=ANY_PORT)
    transport.sendto(b"where to?")
    await until(lambda: protocol.lost_with)
    assert isinstance(protocol.lost_with[0], TypeError)
    assert [type(context["exception"]) for context in errors] == [TypeError]


@pytest.mark.asyncio_differs("takes a peer without a name for none", UNNAMED)
async def test_a_socketpair_has_a_peer_although_it_has_no_name(loop, ledger):
    ours, peer = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    ours.setblocking(False)
    peer.settimeout(20)
    with ours, peer:
        async with endpoint(loop, sock=ours) as (transport, protocol):
            sent = await fill(transport)
            transport.sendto(b"last")
            assert await in_thread(drain, peer, len(sent) + 1) == [*sent, b"last"]
            peer.send(b"answer")
            await until(lambda: protocol.received)
            assert protocol.messages() == [b"answer"]


# Errors that leave the endpoint usable


async def test_a_refused_datagram_is_an_error_received(loop):
    address = free_address()
    async with endpoint(loop, remote_addr=address) as (transport, protocol):
        for number in range(1, 4):
            transport.sendto(b"anybody?")
            await until(lambda number=number: len(protocol.errors) >= number)
        assert {type(error) for error in protocol.errors} == {ConnectionRefusedError}
        assert not transport.is_closing()
        with udp_socket(address) as peer:
            transport.sendto(b"now")
            assert await in_thread(peer.recv, 100) == b"now"
            peer.sendto(b"yes", transport.get_extra_info("sockname"))
            await until(lambda: protocol.received)
            assert protocol.messages() == [b"yes"]


async def test_a_datagram_that_is_too_long_is_an_error_received(loop):
    with udp_socket() as peer:
        async with endpoint(loop, remote_addr=peer.getsockname()) as (transport, protocol):
            transport.sendto(bytes(65_508))
            await until(lambda: protocol.errors)
            assert [error.errno for error in protocol.errors] == [errno.EMSGSIZE]
            transport.sendto(b"short")
            assert await in_thread(peer.recv, 100) == b"short"


@pytest.mark.uvloop_differs("wants IP addresses", UVLOOP_UNIX)
async def test_a_missing_unix_socket_is_an_error_received(loop, tmp_path):
    name = os.fspath(tmp_path / "bound")
    options = {"local_addr": name, "family": socket.AF_UNIX}
    async with endpoint(loop, **options) as (transport, protocol):
        transport.sendto(b"x", os.fspath(tmp_path / "missing"))
        await until(lambda: protocol.errors)
        assert isinstance(protocol.errors[0], FileNotFoundError)
        assert not transport.is_closing()


async def test_a_buffered_datagram_that_fails_does_not_stop_the_others(loop, unix_pair):
    ours, peer = unix_pair
    async with endpoint(loop, sock=ours) as (transport, protocol):
        sent = await fill(transport)
        transport.sendto(bytes(8 << 20))
        transport.sendto(b"after")
        assert await in_thread(drain, peer, len(sent) + 1) == [*sent, b"after"]
        assert [error.errno for error in protocol.errors] == [errno.EMSGSIZE]


@pytest.mark.asyncio_differs("goes on with a transport that is gone", TWICE)
@pytest.mark.parametrize("method", ["close", "abort"])
async def test_the_endpoint_may_be_closed_by_the_error_of_the_last_datagram(
        loop, unix_pair, method):
    class Closing(Datagrams):
        def error_received(self, exc):
            super().error_received(exc)
            getattr(self.transport, method)()

    ours, peer = unix_pair
    transport, protocol = await loop.create_datagram_endpoint(Closing, sock=ours)
    sent = await fill(transport)
    transport.sendto(bytes(8 << 20))
    assert await in_thread(drain, peer, len(sent)) == sent
    await until(lambda: protocol.lost_with)
    await ticks(20)
    assert [error.errno for error in protocol.errors] == [errno.EMSGSIZE]
    assert protocol.lost_with == [None]


@pytest.mark.asyncio_differs("loses track of its buffer's size", ACCOUNTING, when=PY313, run=False)
@pytest.mark.asyncio_differs("calls connection_lost() twice", TWICE)
@pytest.mark.parametrize("method", ["close", "abort"])
async def test_the_endpoint_may_be_closed_when_writing_resumes(loop, unix_pair, method):
    class Closing(Datagrams):
        def resume_writing(self):
            super().resume_writing()
            getattr(self.transport, method)()

    ours, peer = unix_pair
    transport, protocol = await loop.create_datagram_endpoint(Closing, sock=ours)
    transport.set_write_buffer_limits(high=0)
    sent = await fill(transport)
    assert await in_thread(drain, peer, len(sent)) == sent
    await until(lambda: protocol.lost_with)
    await ticks(20)
    assert protocol.calls[-2:] == ["resume_writing", "connection_lost"]
    assert protocol.lost_with == [None]


@pytest.mark.parametrize("method", ["close", "abort"])
async def test_the_endpoint_may_be_closed_by_a_refused_datagram(loop, method):
    class Closing(Datagrams):
        def error_received(self, exc):
            super().error_received(exc)
            getattr(self.transport, method)()

    options = {"remote_addr": free_address()}
    transport, protocol = await loop.create_datagram_endpoint(Closing, **options)
    transport.sendto(b"anybody?")
    await until(lambda: protocol.lost_with)
    await ticks(20)
    assert len(protocol.errors) == 1
    assert protocol.lost_with == [None]


async def test_an_exception_out_of_datagram_received_is_reported_and_the_next_comes(
        loop, errors):
    class Failing(Datagrams):
        def datagram_received(self, data, address):
            super().datagram_received(data, address)
            raise ZeroDivisionError(data.decode())

    async with endpoint(loop, Failing, local_addr=ANY_PORT) as (transport, protocol):
        with udp_socket() as peer:
            for data in (b"1", b"2"):
                peer.sendto(data, transport.get_extra_info("sockname"))
        await until(lambda: len(errors) == 2)
        assert [str(context["exception"]) for context in errors] == ["1", "2"]
        assert protocol.messages() == [b"1", b"2"]
        assert not transport.is_closing()


# The buffer


@pytest.mark.asyncio_differs("loses track of its buffer's size", ACCOUNTING, when=PY313, run=False)
async def test_the_limits_pause_and_resume_the_protocol_again_and_again(loop, unix_pair):
    ours, peer = unix_pair
    async with endpoint(loop, sock=ours) as (transport, protocol):
        transport.set_write_buffer_limits(high=5000, low=1000)
        if PY312:
            assert transport.get_write_buffer_limits() == (1000, 5000)
        for _ in range(5):
            protocol.calls.clear()
            count = len(await fill(transport))
            assert protocol.calls == []
            while not protocol.calls:
                transport.sendto(bytes(1000))
                count += 1
            assert protocol.calls == ["pause_writing"]
            assert transport.get_write_buffer_size() > 5000
            await in_thread(drain, peer, count)
            await until(lambda: protocol.calls[1:])
            assert protocol.calls == ["pause_writing", "resume_writing"]
            await until(lambda: transport.get_write_buffer_size() == 0)


async def test_the_buffer_counts_what_waits(loop, unix_pair):
    ours, peer = unix_pair
    async with endpoint(loop, sock=ours) as (transport, _):
        assert transport.get_write_buffer_size() == 0
        count = len(await fill(transport))
        before = transport.get_write_buffer_size()
        transport.sendto(bytes(300))
        assert 300 <= transport.get_write_buffer_size() - before <= 320
        await in_thread(drain, peer, count + 1)


@pytest.mark.asyncio_differs("counts the items of a memoryview", UNNAMED)
async def test_the_buffer_counts_the_bytes_of_a_memoryview(loop, unix_pair):
    ours, peer = unix_pair
    async with endpoint(loop, sock=ours) as (transport, _):
        count = len(await fill(transport))
        before = transport.get_write_buffer_size()
        transport.sendto(memoryview(bytes(400)).cast("I"))
        added = transport.get_write_buffer_size() - before
        transport.sendto(b"last")
        assert len(await in_thread(drain_to_last, peer)) == count + 2
        assert added >= 400
        await ticks(20)
        assert transport.get_write_buffer_size() == 0


async def test_reading_pauses_and_resumes(loop):
    async with endpoint(loop, local_addr=ANY_PORT) as (transport, protocol):
        if not hasattr(transport, "pause_reading"):
            pytest.skip("this loop's datagram transports cannot pause")
        with udp_socket() as peer:
            peer.sendto(b"1", transport.get_extra_info("sockname"))
            await until(lambda: protocol.received)
            transport.pause_reading()
            peer.sendto(b"2", transport.get_extra_info("sockname"))
            await ticks(20)
            assert protocol.messages() == [b"1"]
            transport.resume_reading()
            await until(lambda: len(protocol.received) == 2)
            assert protocol.messages() == [b"1", b"2"]


# The end


async def test_close_sends_what_is_buffered_first(loop, unix_pair):
    ours, peer = unix_pair
    transport, protocol = await loop.create_datagram_endpoint(Datagrams, sock=ours)
    sent = await fill(transport)
    transport.sendto(b"last")
    transport.close()
    assert transport.is_closing()
    await ticks(20)
    assert protocol.lost_with == []
    assert await in_thread(drain, peer, len(sent) + 1) == [*sent, b"last"]
    await until(lambda: protocol.lost_with)
    await ticks(20)
    assert protocol.lost_with == [None]


@pytest.mark.asyncio_differs("abort() raises AttributeError", LATE_ABORT)
async def test_abort_after_the_end_does_nothing(loop, unix_pair):
    ours, peer = unix_pair
    transport, protocol = await loop.create_datagram_endpoint(Datagrams, sock=ours)
    sent = await fill(transport)
    transport.close()
    assert await in_thread(drain, peer, len(sent)) == sent
    await until(lambda: protocol.lost_with)
    transport.abort()
    transport.close()
    await ticks(20)
    assert protocol.lost_with == [None]


@pytest.mark.uvloop_differs("reports what it dropped", UVLOOP_UDP)
async def test_abort_drops_what_is_buffered(loop, unix_pair):
    ours, peer = unix_pair
    transport, protocol = await loop.create_datagram_endpoint(Datagrams, sock=ours)
    sent = await fill(transport)
    transport.sendto(b"never")
    transport.abort()
    await until(lambda: protocol.lost_with)
    await ticks(20)
    assert protocol.lost_with == [None]
    peer.setblocking(False)
    received = []
    with contextlib.suppress(BlockingIOError):
        while True:
            received.append(peer.recv(2000))
    assert received == sent[:-1]


@pytest.mark.parametrize("calls", [("close", "close"), ("abort", "close"), ("close", "abort")])
async def test_connection_lost_comes_once(loop, calls):
    transport, protocol = await loop.create_datagram_endpoint(Datagrams, local_addr=ANY_PORT)
    for method in calls:
        getattr(transport, method)()
    await until(lambda: protocol.lost_with)
    for method in calls:
        getattr(transport, method)()
    await ticks(20)
    assert protocol.calls == ["connection_made", "connection_lost"]
    assert protocol.lost_with == [None]
    assert transport.is_closing()


async def test_nothing_is_received_after_close(loop):
    class Closing(Datagrams):
        def datagram_received(self, data, address):
            super().datagram_received(data, address)
            self.transport.close()

    transport, protocol = await loop.create_datagram_endpoint(Closing, local_addr=ANY_PORT)
    with udp_socket() as peer:
        for data in (b"1", b"2", b"3"):
            peer.sendto(data, transport.get_extra_info("sockname"))
        await until(lambda: protocol.lost_with)
        await ticks(20)
    assert protocol.messages() == [b"1"]
    assert protocol.lost_with == [None]


@pytest.mark.asyncio_differs("raises AttributeError", AFTER_CLOSE)
@pytest.mark.parametrize("method", ["close", "abort"])
@pytest.mark.parametrize("connected", [True, False], ids=["connected", "unconnected"])
async def test_sending_after_the_end_does_nothing(loop, method, connected):
    with udp_socket() as peer:
        address = peer.getsockname()
        options = {"remote_addr": address} if connected else {"local_addr": ANY_PORT}
        transport, protocol = await loop.create_datagram_endpoint(Datagrams, **options)
        getattr(transport, method)()
        await until(lambda: protocol.lost_with)
        for _ in range(10):
            transport.sendto(b"too late", None if connected else address)
        await ticks(20)
        peer.setblocking(False)
        with pytest.raises(BlockingIOError):
            peer.recv(100)
        assert protocol.lost_with == [None]
        assert protocol.errors == []


@pytest.mark.uvloop_differs("leaves the transport open", UVLOOP_UDP, run=False)
async def test_a_cancelled_creation_leaves_nothing_behind(loop):
    for rounds in range(10):
        creating = asyncio.ensure_future(
            loop.create_datagram_endpoint(Datagrams, local_addr=ANY_PORT))
        await ticks(rounds)
        creating.cancel()
        await asyncio.wait([creating])
        if not creating.cancelled():
            creating.result()[0].close()
    await ticks()


# Addresses, families and options


async def test_the_extra_info_names_the_socket_and_its_addresses(loop):
    with udp_socket() as peer:
        address = peer.getsockname()
        async with endpoint(loop, remote_addr=address) as (transport, protocol):
            sock = transport.get_extra_info("socket")
            assert sock.type == socket.SOCK_DGRAM
            assert transport.get_extra_info("sockname") == sock.getsockname()
            assert transport.get_extra_info("peername") == address
            assert transport.get_extra_info("nothing") is None
            assert transport.get_extra_info("nothing", 5) == 5
            assert transport.get_protocol() is protocol
    async with endpoint(loop, local_addr=ANY_PORT) as (transport, _):
        assert transport.get_extra_info("peername") is None


@pytest.mark.asyncio_differs(
    "its class inherits DatagramTransport since 3.12",
    "https://docs.python.org/3/library/asyncio-protocol.html#asyncio.DatagramTransport",
    when=not PY312)
@pytest.mark.uvloop_differs("has a class of its own", UVLOOP_UDP)
async def test_the_transport_is_a_datagram_transport(loop):
    async with endpoint(loop, local_addr=ANY_PORT) as (transport, _):
        assert isinstance(transport, asyncio.DatagramTransport)


async def test_a_new_protocol_gets_what_comes_next(loop):
    async with endpoint(loop, local_addr=ANY_PORT) as (transport, protocol):
        second = Datagrams()
        with udp_socket() as peer:
            peer.sendto(b"1", transport.get_extra_info("sockname"))
            await until(lambda: protocol.received)
            transport.set_protocol(second)
            peer.sendto(b"2", transport.get_extra_info("sockname"))
            await until(lambda: second.received)
        transport.set_protocol(protocol)
        assert (protocol.messages(), second.messages()) == ([b"1"], [b"2"])


async def test_a_local_and_a_remote_address_may_be_given_together(loop):
    with udp_socket() as peer:
        options = {"local_addr": ANY_PORT, "remote_addr": peer.getsockname()}
        async with endpoint(loop, **options) as (transport, _):
            transport.sendto(b"x")
            data, source = await in_thread(peer.recvfrom, 100)
            assert (data, source) == (b"x", transport.get_extra_info("sockname"))


async def test_host_names_are_looked_up(loop):
    with udp_socket() as peer:
        options = {"remote_addr": ("localhost", peer.getsockname()[1]),
                   "family": socket.AF_INET}
        async with endpoint(loop, **options) as (transport, _):
            transport.sendto(b"x")
            assert await in_thread(peer.recv, 100) == b"x"


@pytest.mark.parametrize("connected", [True, False], ids=["connected", "unconnected"])
async def test_a_socket_of_the_users_own(loop, connected):
    with udp_socket() as peer:
        ours = udp_socket()
        ours.setblocking(False)
        if connected:
            ours.connect(peer.getsockname())
        async with endpoint(loop, sock=ours) as (transport, protocol):
            transport.sendto(b"x", None if connected else peer.getsockname())
            data, source = await in_thread(peer.recvfrom, 100)
            assert data == b"x"
            peer.sendto(b"y", source)
            await until(lambda: protocol.received)
            assert protocol.received == [(b"y", peer.getsockname())]
        assert ours.fileno() == -1


def ipv6_works():
    try:
        with udp_socket(("::1", 0), socket.AF_INET6):
            return True
    except OSError:
        return False


needs_ipv6 = pytest.mark.skipif(not ipv6_works(), reason="no IPv6 loopback here")


@needs_ipv6
async def test_ipv6_addresses_have_four_parts(loop):
    async with endpoint(loop, local_addr=("::1", 0)) as (transport, protocol):
        address = transport.get_extra_info("sockname")
        assert address[0] == "::1" and address[2:] == (0, 0)
        with udp_socket(("::1", 0), socket.AF_INET6) as peer:
            peer.sendto(b"x", address)
            await until(lambda: protocol.received)
            assert protocol.received == [(b"x", peer.getsockname())]
            for target in (peer.getsockname(), peer.getsockname()[:2],
                           (*peer.getsockname()[:3], socket.if_nametoindex("lo"))):
                transport.sendto(b"y", target)
                assert await in_thread(peer.recv, 100) == b"y"


def link_local():
    """(address, name) of a network interface, or None."""
    try:
        lines = pathlib.Path("/proc/net/if_inet6").read_text().splitlines()
    except FileNotFoundError:
        return None
    for line in lines:
        digits, _, _, scope, _, name = line.split()
        if scope == "20":
            return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)), name
    return None


@pytest.mark.skipif(not link_local(), reason="no interface has a link-local address here")
async def test_a_link_local_address_keeps_its_scope(loop):
    host, name = link_local()
    async with endpoint(loop, local_addr=(f"{host}%{name}", 0)) as (transport, protocol):
        address = transport.get_extra_info("sockname")
        assert (address[0], address[3]) == (host, socket.if_nametoindex(name))
        async with endpoint(loop, remote_addr=(f"{host}%{name}", address[1])) as (other, _):
            assert other.get_extra_info("peername") == address
            other.sendto(b"connected", address)
            other.sendto(b"connected")
        async with endpoint(loop, local_addr=("::", 0)) as (other, _):
            other.sendto(b"unconnected", address)
            await until(lambda: len(protocol.received) == 3)
        assert protocol.messages() == [b"connected", b"connected", b"unconnected"]
        assert {source[3] for _, source in protocol.received} == {address[3]}


def names(tmp_path, abstract):
    """Two names of Unix sockets that nobody else has."""
    stem = f"\0{os.getpid()}-{tmp_path.name}-" if abstract else os.fspath(tmp_path) + "/"
    return stem + "left", stem + "right"


@pytest.mark.uvloop_differs("wants IP addresses", UVLOOP_UNIX)
@pytest.mark.parametrize("abstract", [False, True], ids=["path", "abstract"])
async def test_unix_endpoints_answer_each_other(loop, tmp_path, abstract):
    left_name, right_name = names(tmp_path, abstract)
    options = {"family": socket.AF_UNIX}
    async with (
        endpoint(loop, local_addr=left_name, **options) as (left, left_protocol),
        endpoint(loop, lambda: Datagrams(True), local_addr=right_name, **options),
        endpoint(loop, local_addr=None, remote_addr=right_name, **options) as (anonymous, _),
    ):
        left.sendto(b"question", right_name)
        await until(lambda: left_protocol.received)
        shown = right_name.encode() if abstract else right_name
        assert left_protocol.received == [(b"question", shown)]
        assert anonymous.get_extra_info("peername") == shown


@pytest.mark.uvloop_differs("wants IP addresses", UVLOOP_UNIX)
async def test_a_unix_sender_without_a_name_has_no_address(loop, tmp_path):
    name = os.fspath(tmp_path / "server")
    options = {"local_addr": name, "family": socket.AF_UNIX}
    async with endpoint(loop, **options) as (_, protocol):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as peer:
            peer.sendto(b"x", name)
        await until(lambda: protocol.received)
        assert [(data, bool(address)) for data, address in protocol.received] == [(b"x", False)]


@pytest.mark.uvloop_differs("wants IP addresses", UVLOOP_UNIX)
async def test_a_unix_path_that_exists_but_is_no_socket_is_in_use(loop, tmp_path):
    path = tmp_path / "file"
    path.touch()
    with pytest.raises(OSError) as info:
        await loop.create_datagram_endpoint(
            Datagrams, local_addr=os.fspath(path), family=socket.AF_UNIX)
    assert info.value.errno == errno.EADDRINUSE
    assert path.exists()


async def test_broadcasts_must_be_allowed(loop):
    with udp_socket(("0.0.0.0", 0)) as peer:
        address = ("127.255.255.255", peer.getsockname()[1])
        async with endpoint(loop, local_addr=ANY_PORT) as (transport, protocol):
            transport.sendto(b"x", address)
            await until(lambda: protocol.errors)
            assert isinstance(protocol.errors[0], PermissionError)
        options = {"local_addr": ANY_PORT, "allow_broadcast": True}
        async with endpoint(loop, **options) as (transport, protocol):
            sock = transport.get_extra_info("socket")
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST)
            transport.sendto(b"everybody", address)
            assert await in_thread(peer.recv, 100) == b"everybody"


@pytest.mark.uvloop_differs("its OSError has no errno", UVLOOP_LOOP)
async def test_a_port_is_shared_only_with_reuse_port(loop):
    async with endpoint(loop, local_addr=ANY_PORT, reuse_port=True) as (first, protocol):
        address = first.get_extra_info("sockname")
        with pytest.raises(OSError) as info:
            await loop.create_datagram_endpoint(Datagrams, local_addr=address)
        assert info.value.errno == errno.EADDRINUSE
        async with endpoint(loop, local_addr=address, reuse_port=True) as (_, other):
            # The kernel chooses by the sender's address; many senders reach both.
            peers = [udp_socket() for _ in range(64)]
            for number, peer in enumerate(peers):
                peer.sendto(b"%d" % number, address)
            await until(lambda: len(protocol.received) + len(other.received) == 64)
            for peer in peers:
                peer.close()
            numbers = sorted(map(int, protocol.messages() + other.messages()))
            assert numbers == list(range(64))


async def test_multicast_over_the_loopback_interface(loop):
    group = "239.255.77.1"
    receiver = udp_socket(("0.0.0.0", 0))
    receiver.setblocking(False)
    membership = struct.pack("4s4s", socket.inet_aton(group), socket.inet_aton("127.0.0.1"))
    try:
        receiver.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, membership)
    except OSError as exc:
        receiver.close()
        pytest.skip(f"no multicast on the loopback interface here: {exc}")
    async with endpoint(loop, sock=receiver) as (server, protocol):
        async with endpoint(loop, local_addr=ANY_PORT) as (client, _):
            sock = client.get_extra_info("socket")
            sock.setsockopt(
                socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton("127.0.0.1"))
            client.sendto(b"members", (group, server.get_extra_info("sockname")[1]))
            await until(lambda: protocol.received)
            source = client.get_extra_info("sockname")
            assert protocol.received == [(b"members", source)]


# What is refused


@pytest.mark.uvloop_differs("lets connect(2) find the second family", UVLOOP_LOOP)
@pytest.mark.parametrize("options", [
    {}, {"sock": "stream"}, {"sock": "datagram", "local_addr": ANY_PORT},
    {"sock": "datagram", "family": socket.AF_INET}, {"sock": "datagram", "reuse_port": True},
    {"local_addr": ("127.0.0.1", 0), "remote_addr": ("::1", 9)},
], ids=["nothing", "stream", "sock and address", "sock and family", "sock and option",
        "two families"])
async def test_arguments_that_do_not_fit_are_a_value_error(loop, options):
    with contextlib.ExitStack() as stack:
        if "sock" in options:
            kind = {"stream": socket.SOCK_STREAM, "datagram": socket.SOCK_DGRAM}[options["sock"]]
            sock = stack.enter_context(socket.socket(socket.AF_INET, kind))
            sock.setblocking(False)
            options = {**options, "sock": sock}
        with pytest.raises(ValueError):
            await loop.create_datagram_endpoint(Datagrams, **options)


@pytest.mark.uvloop_differs("takes a tuple for the path", UVLOOP_UNIX)
@pytest.mark.parametrize("options", [
    {"local_addr": "127.0.0.1"}, {"local_addr": ("127.0.0.1",)},
    {"local_addr": ("127.0.0.1", 0, 0)}, {"local_addr": 9},
    {"local_addr": ("a", 1), "family": socket.AF_UNIX},
], ids=["text", "one part", "three parts", "number", "unix"])
async def test_what_is_no_address_is_a_type_error(loop, options):
    with pytest.raises(TypeError):
        await loop.create_datagram_endpoint(Datagrams, **options)


@pytest.mark.uvloop_differs("its OSError has no errno", UVLOOP_LOOP)
async def test_an_address_in_use_is_an_os_error(loop):
    with udp_socket() as other, pytest.raises(OSError) as info:
        await loop.create_datagram_endpoint(Datagrams, local_addr=other.getsockname())
    assert info.value.errno == errno.EADDRINUSE


async def test_the_descriptor_of_an_endpoint_is_refused_to_others(loop):
    async with endpoint(loop, local_addr=ANY_PORT) as (transport, _):
        fd = transport.get_extra_info("socket").fileno()
        for method in (loop.add_reader, loop.add_writer):
            with pytest.raises(RuntimeError, match="is used by transport"):
                method(fd, print)


async def test_an_endpoint_shows_what_it_is(loop):
    async with endpoint(loop, local_addr=ANY_PORT) as (transport, _):
        assert repr(transport).startswith("<")
        fd = transport.get_extra_info("socket").fileno()
        text = repr(transport)
    assert str(fd) in text or "UDP" in text
    assert "clos" in repr(transport)


async def test_a_remote_address_with_broadcast(loop):
    """Such an endpoint is not connected: the address goes with each datagram."""
    with socket.socket(type=socket.SOCK_DGRAM) as peer:
        peer.bind(("127.0.0.1", 0))
        peer.settimeout(LIMIT)
        options = {"remote_addr": peer.getsockname(), "allow_broadcast": True}
        async with endpoint(loop, **options) as (transport, protocol):
            transport.sendto(b"without an address")
            assert await in_thread(peer.recv, 100) == b"without an address"
            transport.sendto(b"with it", peer.getsockname())
            assert await in_thread(peer.recv, 100) == b"with it"
            assert not protocol.errors
