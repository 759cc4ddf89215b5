"""TLS records as a peer cuts them, refuses to end them, or sends several at once; what the protocol
does in between; and how our own are made."""

import asyncio
import contextlib
import contextvars
import socket
import ssl
import weakref

import pytest
from helpers import (
    BufferedRecorder,
    Recorder,
    assert_same,
    connected,
    end_of,
    in_thread,
    only_ours,
    pattern,
    read_exactly,
    read_to_end,
    socket_pair,
    ticks,
    tls_connected,
    until,
)
from tls_parts import FLOOD, handshake

UVLOOP_SSL = "https://github.com/MagicStack/uvloop/blob/v0.21.0/uvloop/sslproto.pyx"
VERSIONS = [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3]
variable = contextvars.ContextVar("variable", default="default")


class Peer:
    """The client's side, record by record; `socket` takes whatever is given to it."""

    def __init__(self, context, sock):
        self.socket = sock
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self.incoming, self.outgoing, server_hostname="localhost")

    def record(self, data):
        self.tls.write(data)
        return self.outgoing.read()

    def close_notify(self):
        with contextlib.suppress(ssl.SSLWantReadError):
            self.tls.unwrap()
        return self.outgoing.read()


@contextlib.asynccontextmanager
async def cut_by_hand(contexts, factory=Recorder):
    """Our transport and protocol, of a server, and a Peer that has shaken hands."""
    loop = asyncio.get_running_loop()
    contexts[0].num_tickets = 0         # nothing that the peer would have to read
    with socket_pair() as (ours, theirs):
        theirs.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
        peer, protocol = Peer(contexts[1], theirs), factory()
        connecting = asyncio.ensure_future(
            loop.connect_accepted_socket(lambda: protocol, ours, ssl=contexts[0]))
        await in_thread(handshake, peer.tls, peer.incoming, peer.outgoing, theirs)
        transport, _ = await connecting
        try:
            yield transport, protocol, peer
        finally:
            await end_of(transport, protocol)


# In pieces


@pytest.mark.parametrize("factory", [Recorder, BufferedRecorder])
@pytest.mark.parametrize("version", VERSIONS)
async def test_records_that_come_byte_by_byte_are_put_together(loop, contexts, version, factory):
    contexts[0].maximum_version = version
    async with cut_by_hand(contexts, factory) as (_, protocol, peer):
        assert peer.tls.version().replace(".", "_") == version.name
        for number in range(3):
            record = peer.record(pattern(40, number))
            protocol.data.clear() if factory is BufferedRecorder else None
            before = len(protocol.data)
            for at in range(len(record)):
                peer.socket.sendall(record[at:at + 1])
                await ticks(2)
                assert len(protocol.data) == before or at + 1 == len(record)
            assert_same((await protocol.received(before + 40))[before:], pattern(40, number))


@pytest.mark.parametrize("piece", [1021, 5, 16_401, 16_406, 16_411, 40_000])
async def test_a_long_stream_in_pieces_of_any_size(loop, contexts, piece):
    data = pattern(120_000)
    async with cut_by_hand(contexts) as (_, protocol, peer):
        peer.tls.write(data[:1])
        sent = 1
        while sent < len(data):
            sent += peer.tls.write(data[sent:])
        stream = peer.outgoing.read()
        if piece == 5:
            stream = stream[:3000]
        sending = asyncio.ensure_future(in_thread(
            lambda: [peer.socket.sendall(stream[at:at + piece])
                     for at in range(0, len(stream), piece)]))
        expected = data if piece != 5 else data[:1]
        assert_same(await protocol.received(len(expected)), expected)
        await sending


# Refused by their headers


@pytest.mark.parametrize("header", [
    b"\x17\x03\x03\xff\xff", b"\x17\x03\x02\x00\x20", b"\x16\x03\x03\x00\x20",
    b"\x17\x02\x03\x00\x20", b"\x18\x03\x03\x00\x20", b"\x80\x80\x01\x03\x01", b"GET /"])
async def test_a_header_alone_is_refused(loop, contexts, header):
    # A kind of record that is not expected is refused with its header or when it is whole.
    contexts[0].minimum_version = ssl.TLSVersion.TLSv1_3
    async with cut_by_hand(contexts) as (_, protocol, peer):
        peer.socket.sendall(header)
        assert isinstance(await protocol.lost(), ssl.SSLError)


async def test_a_record_that_was_changed_on_its_way_is_refused(loop, contexts):
    async with cut_by_hand(contexts) as (_, protocol, peer):
        record = bytearray(peer.record(b"data"))
        record[-1] ^= 1
        peer.socket.sendall(record)
        assert isinstance(await protocol.lost(), ssl.SSLError)
        assert protocol.data == b""


# Several at once


class Acting(Recorder):
    """Does something when data comes for the first time."""

    def data_received(self, data):
        first = "data_received" not in self.calls
        super().data_received(data)
        if first:
            self.act()


def burst(peer, close=False):
    """Three records, maybe close_notify, in one segment."""
    records = b"".join(peer.record(part) for part in (b"one", b"two", b"three"))
    peer.socket.sendall(records + (peer.close_notify() if close else b""))


async def test_records_of_one_segment_are_one_message(loop, contexts):
    async with cut_by_hand(contexts) as (_, protocol, peer):
        burst(peer)
        assert await protocol.received(11) == b"onetwothree"
        assert protocol.calls == ["connection_made", "data_received"]


async def test_records_and_close_notify_in_one_segment(loop, contexts):
    async with cut_by_hand(contexts) as (_, protocol, peer):
        burst(peer, close=True)
        peer.socket.close()
        assert await protocol.lost() is None
        assert protocol.calls == ["connection_made", "data_received", "eof_received",
                                  "connection_lost"]
        assert protocol.data == b"onetwothree"


@pytest.mark.parametrize("method", ["abort", "close", "pause_reading"])
async def test_what_the_protocol_does_when_data_comes(loop, contexts, errors, method):
    async with cut_by_hand(contexts, Acting) as (transport, protocol, peer):
        protocol.act = lambda: getattr(transport, method)()
        burst(peer)
        await protocol.received(11)
        burst(peer)
        await ticks(20)
        if method == "pause_reading":
            await until(lambda: transport.get_read_buffer_size() > 0)
        assert protocol.calls.count("data_received") == 1
        if method == "pause_reading":
            transport.resume_reading()
            assert await protocol.received(22) == b"onetwothree" * 2
            assert transport.get_read_buffer_size() == 0
    assert not errors


async def test_a_buffer_that_gets_full_in_the_middle_of_a_record(loop, contexts):
    class Small(BufferedRecorder):
        def get_buffer(self, sizehint):
            self.buffer = bytearray(7)
            return memoryview(self.buffer)

    async with cut_by_hand(contexts, Small) as (_, protocol, peer):
        peer.socket.sendall(peer.record(pattern(30)) + peer.record(pattern(14, 1)))
        assert_same(await protocol.received(44), pattern(30) + pattern(14, 1))


# Ours


async def test_what_is_written_may_be_changed_afterwards(loop, contexts):
    async with tls_connected(contexts) as (transport, _, peer):
        for size in (100, 20_000):
            for make in (bytearray, lambda data: memoryview(bytearray(data))):
                data = make(pattern(size))
                transport.write(data)
                transport.writelines([data, data])
                data[:] = bytes(size)
                assert_same(await in_thread(read_exactly, peer, 3 * size), pattern(size) * 3)


async def test_small_writes_of_a_tick_are_one_record(loop, loop_kind, contexts):
    only_ours(loop_kind, "one record for the writes of a tick")
    async with cut_by_hand(contexts) as (transport, protocol, peer):
        await ticks(20)
        for number in range(100):
            transport.write(b"%02d" % number)
        transport.writelines([b"last", b"line"])
        wanted = b"".join(b"%02d" % number for number in range(100)) + b"lastline"
        record = await in_thread(read_exactly, peer.socket, 5 + 17 + len(wanted))
        peer.incoming.write(record)
        assert peer.tls.read(1000) == wanted


async def test_very_many_small_writes_of_a_tick_are_full_records(loop, loop_kind, contexts):
    only_ours(loop_kind, "full records for the writes of a tick")
    data = pattern(100_000)
    parts = [data[at:at + 1] for at in range(50_000)]
    parts += [data[50_000:80_000], b"", data[80_000:80_010], data[80_010:]]
    async with cut_by_hand(contexts) as (transport, protocol, peer):
        await ticks(20)
        transport.writelines(parts)
        received, records = b"", 0
        while len(received) < len(data):
            header = await in_thread(read_exactly, peer.socket, 5)
            size = int.from_bytes(header[3:])
            peer.incoming.write(header + await in_thread(read_exactly, peer.socket, size))
            received += peer.tls.read(1 << 14)
            records += 1
        assert_same(received, data)
        assert records <= 3 * -(-len(data) // (1 << 14))


@pytest.mark.parametrize("writes", [1, 3])
async def test_the_size_of_the_write_buffer_is_what_the_kernel_has_not_taken(
        loop, contexts, writes):
    async with tls_connected(contexts) as (transport, _, peer):
        for _ in range(writes):
            transport.write(b"x" * 10)
            assert transport.get_write_buffer_size() == 0
        assert await in_thread(read_exactly, peer, 10 * writes) == b"x" * 10 * writes


async def test_what_was_written_before_close_is_sent_before_close_notify(loop, contexts):
    async with tls_connected(contexts) as (transport, protocol, peer):
        transport.write(b"last")
        transport.close()
        transport.write(b"late")
        assert await in_thread(read_to_end, peer) == b"last"
        await in_thread(peer.close)
        await protocol.lost()


async def test_writes_before_the_loop_runs_again(loop, contexts):
    async with tls_connected(contexts) as (transport, _, peer):
        transport.set_write_buffer_limits(high=0)
        transport.write(b"limits of zero")
        assert await in_thread(read_exactly, peer, 14) == b"limits of zero"


@pytest.mark.uvloop_differs("runs them in the context of the connection", UVLOOP_SSL)
@pytest.mark.parametrize("size", [65_536, 10_000])
async def test_each_callback_runs_in_its_context(loop, contexts, size):
    seen = {}

    class Seeing(Recorder):
        def data_received(self, data):
            super().data_received(data)
            seen["data_received"] = variable.get()

        def pause_writing(self):
            super().pause_writing()
            seen["pause_writing"] = variable.get()

        def resume_writing(self):
            super().resume_writing()
            seen["resume_writing"] = variable.get()

    async with tls_connected(contexts, Seeing) as (transport, protocol, peer):
        await in_thread(peer.sendall, b"data")
        await protocol.received(4)
        variable.set("written")
        while "pause_writing" not in protocol.calls:
            transport.write(bytes(size))
            await asyncio.sleep(0)
        variable.set("later")
        reading = asyncio.ensure_future(in_thread(read_to_end, peer))
        await until(lambda: "resume_writing" in protocol.calls)
        assert seen == {"data_received": "default", "pause_writing": "written",
                        "resume_writing": "written"}
        transport.close()
        await reading
        await in_thread(peer.close)
        await protocol.lost()


# The parts that a program may replace


async def test_a_sub_class_of_sslobject_sees_what_it_overrides(loop, contexts):
    calls = []

    class Counting(ssl.SSLObject):
        def read(self, *args):
            calls.append("read")
            return super().read(*args)

        def write(self, data):
            calls.append("write")
            return super().write(data)

    contexts[1].sslobject_class = Counting
    async with tls_connected(contexts) as (transport, protocol, peer):
        transport.write(pattern(50_000))
        assert_same(await in_thread(read_exactly, peer, 50_000), pattern(50_000))
        await in_thread(peer.sendall, pattern(50_000))
        assert_same(await protocol.received(50_000), pattern(50_000))
        assert {"read", "write"} == set(calls)


class TooMuch(ssl.SSLObject):
    def read(self, *args):
        return super().read(*args) + bytes(1 << 20)


class NoBytes(ssl.SSLObject):
    def read(self, *args):
        super().read(*args)
        return 12345


class TooFar(ssl.SSLObject):
    def write(self, data):
        return super().write(data) + (1 << 20)


class Backwards(ssl.SSLObject):
    def write(self, data):
        super().write(data)
        return -(1 << 20)


class Nothing(ssl.SSLObject):
    def write(self, data):
        return 0


@pytest.mark.parametrize("kind", [TooMuch, NoBytes, TooFar, Backwards, Nothing])
async def test_a_sub_class_that_answers_nonsense_ends_its_connection(
        loop, loop_kind, contexts, errors, kind):
    if loop_kind in ("asyncio", "uvloop"):
        pytest.skip("which pass it on, or repeat it for ever")
    contexts[1].sslobject_class = kind
    async with tls_connected(contexts) as (transport, protocol, peer):
        transport.write(bytes(50_000))
        if "read" in vars(kind):
            await in_thread(peer.sendall, b"x")
        assert isinstance(await protocol.lost(), (ValueError, TypeError))
    assert [type(context["exception"]) for context in errors] == [type(protocol.lost_with[0])]


class Through(asyncio.Transport):
    """Somebody's own transport over another, with no more than start_tls() asks for."""

    _start_tls_compatible = True

    def __init__(self, below):
        super().__init__()
        self.below, self.protocol = below, below.get_protocol()
        below.set_protocol(self.Forward(self))

    class Forward(asyncio.Protocol):
        def __init__(self, transport):
            self.transport = transport

        def data_received(self, data):
            while data:
                space = self.transport.protocol.get_buffer(-1)
                size = min(len(data), len(space))
                space[:size] = data[:size]
                self.transport.protocol.buffer_updated(size)
                data = data[size:]

        def eof_received(self):
            return self.transport.protocol.eof_received()

        def connection_lost(self, exc):
            self.transport.protocol.connection_lost(exc)

        def pause_writing(self):
            self.transport.protocol.pause_writing()

        def resume_writing(self):
            self.transport.protocol.resume_writing()

    def set_protocol(self, protocol):
        self.protocol = protocol

    def get_protocol(self):
        return self.protocol

    def __getattr__(self, name):
        return getattr(self.below, name)

    def write(self, data):
        self.below.write(data)

    def close(self):
        self.below.close()

    def is_closing(self):
        return self.below.is_closing()

    def pause_reading(self):
        self.below.pause_reading()

    def resume_reading(self):
        self.below.resume_reading()

    def get_extra_info(self, name, default=None):
        return self.below.get_extra_info(name, default)


@pytest.mark.uvloop_differs("checks the class of the transport", UVLOOP_SSL, run=False)
async def test_start_tls_over_a_transport_of_somebody_else(loop, contexts):
    async with connected() as (transport, protocol, peer):
        wrapping = asyncio.ensure_future(in_thread(
            lambda: contexts[0].wrap_socket(peer, server_side=True)))
        tls = await loop.start_tls(
            Through(transport), protocol, contexts[1], server_hostname="localhost")
        with await wrapping as tls_peer:
            await in_thread(tls_peer.sendall, pattern(300_000))
            assert_same(await protocol.received(300_000), pattern(300_000))
            reading = asyncio.ensure_future(in_thread(read_exactly, tls_peer, FLOOD))
            tls.write(pattern(FLOOD))
            assert_same(await reading, pattern(FLOOD))
            tls.close()
            assert await in_thread(read_to_end, tls_peer) == b""
            await in_thread(tls_peer.close)
            assert await protocol.lost() is None


# What goes wrong in callbacks


MESSAGES = {
    "connection_made": "Fatal error: protocol.buffer_updated() call failed.",
    "data_received": "Fatal error on SSL protocol",
    "eof_received": "Error calling eof_received()",
    "pause_writing": "protocol.pause_writing() failed",
    "resume_writing": "protocol.resume_writing() failed",
}


@pytest.mark.parametrize("name", [
    pytest.param("connection_made", marks=pytest.mark.uvloop_differs(
        "says it otherwise", UVLOOP_SSL)),
    "data_received", "eof_received", "pause_writing", "resume_writing"])
async def test_an_exception_out_of_a_callback_is_told_as_by_asyncio(
        loop, contexts, errors, name):
    class Failing(Recorder):
        pass

    def fail(self, *args):
        getattr(Recorder, name)(self, *args)
        raise ZeroDivisionError(name)

    setattr(Failing, name, fail)
    contexts[0].num_tickets = 0
    with socket_pair() as (ours, theirs):
        peer, protocol = Peer(contexts[1], theirs), Failing()
        connecting = asyncio.ensure_future(
            loop.connect_accepted_socket(lambda: protocol, ours, ssl=contexts[0]))
        with contextlib.suppress(ConnectionError):
            await in_thread(handshake, peer.tls, peer.incoming, peer.outgoing, theirs)
        if name != "connection_made":
            transport, _ = await connecting
            peer.socket.sendall(peer.record(b"data"))
            if name in ("pause_writing", "resume_writing"):
                transport.set_write_buffer_limits(high=0)
                transport.write(b"x")
                await until(lambda: "resume_writing" in protocol.calls)
                transport.abort()
            elif name == "eof_received":
                peer.socket.sendall(peer.close_notify())
        else:
            with contextlib.suppress(ZeroDivisionError):
                await connecting
        peer.socket.close()
        await protocol.lost()
        assert [(context["message"], str(context["exception"])) for context in errors][:1] == [
            (MESSAGES[name], name)]


@pytest.mark.uvloop_differs("keeps its TLS", UVLOOP_SSL, run=False)
async def test_a_transport_that_is_closed_after_the_end_holds_no_tls(loop, contexts):
    async with cut_by_hand(contexts) as (transport, protocol, peer):
        tls = weakref.ref(transport.get_extra_info("ssl_object"))
        peer.socket.close()
        await protocol.lost()
        assert tls() is not None
        transport.close()
        await until(lambda: tls() is None)
