"""Datagram endpoints: whole messages, their order, errors that leave the endpoint usable, the
buffer and its limits, closing, families and options, what is refused."""

import asyncio
import contextlib
import errno
import os
import socket

import pytest
from datagrams import (
    ANY_PORT,
    Datagrams,
    drain,
    drain_to_last,
    endpoint,
    fill,
    free_address,
    udp_socket,
)
from helpers import PY312, PY313, in_thread, pattern, ticks, until

UVLOOP_UDP = "https://github.com/MagicStack/uvloop/blob/v0.21.0/uvloop/handles/udp.pyx"
UVLOOP_UNIX = "https://github.com/MagicStack/uvloop/issues/403"
UVLOOP_EMPTY = "https://github.com/MagicStack/uvloop/issues/594"
EMPTY = "https://github.com/python/cpython/issues/113812"
ACCOUNTING = "https://github.com/python/cpython/issues/135444"
AFTER_CLOSE = "https://github.com/python/cpython/pull/28110"
TWICE = "https://github.com/python/cpython/issues/156512"
LATE_ABORT = "https://github.com/agronholm/anyio/issues/1250"
UNNAMED = "https://docs.python.org/3/library/asyncio-protocol.html#asyncio.DatagramTransport.sendto"


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
