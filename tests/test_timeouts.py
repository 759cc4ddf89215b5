"""set_read_timeout() and set_write_timeout(): connections on which nothing moves, per direction."""

import asyncio
import contextlib
import contextvars
import gc
import math
import ssl
import time
import weakref

import pytest
from helpers import (
    Recorder,
    connected,
    has_ended,
    in_thread,
    make_pair,
    read_exactly,
    run_once,
    serving,
    ticks,
    until,
)
from timed import (
    LONG,
    NO_DATA,
    NOT_SENT,
    PLENTY,
    RESOLUTION,
    SHORT,
    Buffering,
    Receiving,
    a_while,
    asked,
    assert_timed_out,
    stepping,
    timers,
)

import uringloop

KINDS = ("io_uring", "epoll")


# Read


@pytest.mark.parametrize("family", ["tcp", "unix"])
@pytest.mark.parametrize("factory", [Receiving, Buffering])
async def test_silence_ends_the_connection(loop, factory, family):
    async with connected(factory, family) as (transport, protocol, peer):
        await ticks()
        since = loop.time()
        transport.set_read_timeout(SHORT)
        await protocol.lost()
        assert_timed_out(protocol, NO_DATA, since)
        assert await in_thread(has_ended, peer)
        assert transport.is_closing()


async def test_unsent_output_is_dropped(loop):
    async with connected(Receiving) as (transport, protocol, _):
        transport.write(PLENTY)
        transport.set_read_timeout(SHORT)
        assert isinstance(await protocol.lost(), TimeoutError)
        assert transport.get_write_buffer_size() == 0


async def test_servers_set_it_in_connection_made(loop):
    made = []

    class Serving(Receiving):
        def connection_made(self, transport):
            super().connection_made(transport)
            made.append(self)
            self.since = loop.time()
            transport.set_read_timeout(SHORT)

    async with serving(Serving) as (_, address):
        reader, writer = await asyncio.open_connection(*address)
        await reader.read()
        await until(lambda: made and made[0].lost_with)
        assert_timed_out(made[0], NO_DATA, made[0].since)
        writer.close()


@pytest.mark.parametrize("size", [1, 100_000])
@pytest.mark.parametrize("factory", [Receiving, Buffering])
@pytest.mark.parametrize("family", ["tcp", "unix"])
async def test_each_arrival_begins_a_new_period(loop, factory, size, family):
    async with connected(factory, family) as (transport, protocol, peer):
        peer.setblocking(False)
        sent_at = 0

        def send():
            nonlocal sent_at
            sent_at = loop.time()
            with contextlib.suppress(BlockingIOError):
                peer.send(bytes(size))

        transport.set_read_timeout(SHORT)
        with stepping(loop, send):
            await a_while(loop, 6)
            assert protocol.data and not protocol.lost_with
        await protocol.lost()
        assert_timed_out(protocol, NO_DATA, sent_at)
        assert_timed_out(protocol, NO_DATA, protocol.received_at)


@pytest.mark.parametrize("size", [1, 100_000])
async def test_the_period_begins_after_the_protocol_has_handled_the_data(loop, size):
    class Slow(Receiving):
        def data_received(self, data):
            time.sleep(2 * SHORT)
            super().data_received(data)

    async with connected(Slow) as (transport, protocol, peer):
        transport.set_read_timeout(SHORT)
        peer.sendall(bytes(size))
        await protocol.lost()
        assert len(protocol.data) == size
        assert_timed_out(protocol, NO_DATA, protocol.received_at)


@pytest.mark.parametrize("size", [1, 100_000])
async def test_what_came_while_the_loop_was_busy_counts(loop, size):
    class Busy(Receiving):
        def data_received(self, data):
            if not self.data:
                time.sleep(2 * SHORT)
                peer.send(b"x")
            super().data_received(data)

    async with connected(Busy) as (transport, protocol, peer):
        transport.set_read_timeout(SHORT)
        await ticks()
        # In large mode, and while that is changed, the receive has to be asked for again.
        for number in range(6):
            time.sleep(2 * SHORT)
            peer.sendall(bytes(size))
            await protocol.received(size * (number + 1))
            assert not protocol.lost_with
        await protocol.lost()
        assert len(protocol.data) == 6 * size + 1


async def test_the_deadline_is_a_period_after_the_last_data(loop):
    class Noting(Receiving):
        def data_received(self, data):
            super().data_received(data)
            loop.call_soon(lambda: noted.append(loop.time()))

    noted, deadlines = [], []

    def look():
        """After the timer's own turn, which is the one made first."""
        looked_at = loop.time()
        deadlines.append((timers(loop)[0].when(), looked_at))

    async with connected(Noting) as (transport, protocol, peer):
        transport.set_read_timeout(SHORT)
        peer.sendall(b"x")
        first, = timers(loop)
        loop.call_at(first.when(), look)
        await until(lambda: noted and deadlines)
        (deadline, looked_at), = deadlines
        assert deadline + RESOLUTION >= protocol.received_at + SHORT
        # Where the loop woke so late that this period was over as well, it is the time it woke.
        assert deadline - RESOLUTION <= max(noted[0] + SHORT, looked_at)


async def test_what_came_while_another_callback_ran_counts(loop):
    async with connected(Receiving) as (transport, protocol, peer):
        transport.set_read_timeout(SHORT)
        await ticks()
        for number in range(3):
            loop.call_soon(time.sleep, 2 * SHORT)
            loop.call_soon(peer.sendall, b"x")
            await protocol.received(number + 1)
        assert not protocol.lost_with


def test_what_waited_for_a_receive_block_counts(loop_kind, ledger):
    """The pool has 4 blocks: most connections have to ask again while their timers run out."""
    options = uringloop.LoopOptions(backend=loop_kind, recv_buffers=4)
    loop = uringloop.new_event_loop(options)
    loop.set_exception_handler(ledger.handler)
    pairs = [make_pair("unix") for _ in range(16)]

    def wait_and_send():
        time.sleep(2 * SHORT)
        for _, peer in pairs:
            peer.sendall(b"x")

    async def main():
        protocols = []
        for ours, _ in pairs:
            transport, protocol = await loop.create_connection(Receiving, sock=ours)
            protocols.append(protocol)
            transport.set_read_timeout(SHORT)
        await ticks()
        loop.call_soon(wait_and_send)
        await until(lambda: all(protocol.data or protocol.lost_with for protocol in protocols))
        assert [protocol.lost_with for protocol in protocols] == [[]] * 16
        for protocol in protocols:
            await protocol.lost()
            assert_timed_out(protocol, NO_DATA, protocol.received_at)

    loop.run_until_complete(main())
    if loop_kind == "io_uring":
        assert loop.stats().buffers_ran_dry > 0
    loop.close()
    for _, peer in pairs:
        peer.close()


def test_what_an_interrupt_left_in_the_queue_counts(loop):
    """The next run has the timer's turn before that of the data."""
    def interrupt():
        raise KeyboardInterrupt

    def wait_and_send():
        time.sleep(2 * SHORT)
        peer.sendall(b"x")
        loop.call_soon(interrupt)

    async def begin():
        ours, peer = make_pair()
        transport, protocol = await loop.create_connection(Receiving, sock=ours)
        await ticks()
        transport.set_read_timeout(SHORT)
        return protocol, peer

    protocol, peer = loop.run_until_complete(begin())
    loop.call_soon(wait_and_send)
    with pytest.raises(KeyboardInterrupt):
        loop.run_forever()
    loop.run_until_complete(until(lambda: protocol.data or protocol.lost_with))
    assert bytes(protocol.data) == b"x" and not protocol.lost_with
    loop.run_until_complete(protocol.lost())
    assert_timed_out(protocol, NO_DATA, protocol.received_at)
    peer.close()


async def test_it_stands_still_until_reading_begins(loop):
    class Late(Receiving):
        def connection_made(self, transport):
            super().connection_made(transport)
            transport.pause_reading()
            transport.set_read_timeout(SHORT)

    async with connected(Late) as (transport, protocol, _):
        await a_while(loop)
        assert not protocol.lost_with and timers(loop) == []
        since = loop.time()
        transport.resume_reading()
        await protocol.lost()
        assert_timed_out(protocol, NO_DATA, since)


async def test_it_stands_still_while_reading_is_paused(loop):
    async with connected(Receiving) as (transport, protocol, _):
        transport.set_read_timeout(SHORT)
        for _ in range(2):
            await ticks()
            transport.pause_reading()
            await a_while(loop)
            assert not protocol.lost_with and timers(loop) == []
            since = loop.time()
            transport.resume_reading()
        await protocol.lost()
        assert_timed_out(protocol, NO_DATA, since)


async def test_pausing_and_resuming_begins_a_new_period(loop):
    async with connected(Receiving) as (transport, protocol, _):
        since = 0

        def turn():
            nonlocal since
            since = loop.time()
            transport.pause_reading()
            transport.resume_reading()

        transport.set_read_timeout(SHORT)
        with stepping(loop, turn):
            await a_while(loop)
            assert not protocol.lost_with
        await protocol.lost()
        assert_timed_out(protocol, NO_DATA, since)


async def test_it_may_be_set_while_paused(loop):
    async with connected(Receiving) as (transport, protocol, _):
        transport.pause_reading()
        transport.set_read_timeout(SHORT)
        await a_while(loop)
        assert not protocol.lost_with
        transport.resume_reading()
        assert isinstance(await protocol.lost(), TimeoutError)


async def test_held_data_counts_when_it_is_delivered(loop):
    class Slow(Receiving):
        def data_received(self, data):
            if self.data:
                time.sleep(2 * SHORT)
            super().data_received(data)

    async with connected(Slow) as (transport, protocol, peer):
        transport.set_read_timeout(SHORT)
        peer.sendall(b"first")
        await protocol.received(5)
        peer.sendall(b"second")
        transport.pause_reading()
        await a_while(loop)
        assert bytes(protocol.data) == b"first" and not protocol.lost_with
        if loop.backend == "io_uring":
            assert loop.stats().bytes_received == 11        # else it waits in the socket
        transport.resume_reading()
        await protocol.lost()
        assert bytes(protocol.data) == b"firstsecond"
        assert_timed_out(protocol, NO_DATA, protocol.received_at)


async def test_after_the_end_of_file_there_is_nothing_to_wait_for(loop):
    class HalfOpen(Receiving):
        keep_open_after_eof = True

    async with connected(HalfOpen) as (transport, protocol, peer):
        transport.set_read_timeout(SHORT)
        peer.shutdown(1)
        await until(lambda: "eof_received" in protocol.calls)
        await a_while(loop)
        transport.set_read_timeout(SHORT)
        await a_while(loop)
        assert not protocol.lost_with
        transport.write(b"still open")
        assert await in_thread(read_exactly, peer, 10) == b"still open"


async def test_it_may_be_changed_at_any_time(loop):
    async with connected(Receiving) as (transport, protocol, _):
        transport.set_read_timeout(SHORT)
        transport.set_read_timeout(LONG)
        await a_while(loop)
        transport.set_read_timeout(SHORT)
        transport.set_read_timeout(None)
        await a_while(loop)
        assert not protocol.lost_with and timers(loop) == []
        transport.set_read_timeout(None)
        transport.set_read_timeout(LONG)
        await ticks()
        since = loop.time()
        transport.set_read_timeout(SHORT)
        await protocol.lost()
        assert_timed_out(protocol, NO_DATA, since)


async def test_changing_it_again_and_again_keeps_the_connection(loop):
    async with connected(Receiving) as (transport, protocol, _):
        transport.set_read_timeout(SHORT)
        with stepping(loop, transport.set_read_timeout, SHORT):
            await a_while(loop)
            assert not protocol.lost_with
            assert len(timers(loop)) == 1


# Streams and TLS


async def test_a_stream_reader_raises_timeout_error(loop):
    async def silent(reader, writer):
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    writer.transport.set_read_timeout(SHORT)
    with pytest.raises(TimeoutError, match=NO_DATA):
        await reader.readline()
    writer.close()
    server.close()


async def test_a_stream_writer_raises_timeout_error(loop):
    release = asyncio.Event()

    async def deaf(reader, writer):
        await release.wait()
        writer.close()

    server = await asyncio.start_server(deaf, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    writer.transport.set_write_timeout(SHORT)
    writer.write(2 * PLENTY)
    with pytest.raises(TimeoutError, match=NOT_SENT):
        await writer.drain()
    writer.close()
    release.set()
    server.close()
    await ticks()


async def test_a_stream_that_is_fed_is_kept(loop):
    """The short way into a StreamReader counts as well."""
    ours, peer = make_pair()
    reader, writer = await asyncio.open_connection(sock=ours)
    writer.transport.set_read_timeout(SHORT)
    with stepping(loop, peer.sendall, b"line\n"):
        begin = loop.time()
        while loop.time() - begin < 4 * SHORT:
            assert await reader.readline() == b"line\n"
    assert loop.stats().messages_fed > 0
    writer.close()
    peer.close()


async def test_under_tls_it_is_set_on_the_transport_below(loop, certificate):
    server_context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server_context.load_cert_chain(*certificate)
    client_context = ssl.create_default_context(cafile=certificate[0])

    async def silent(reader, writer):
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0, ssl=server_context)
    protocol = Receiving()
    below, _ = await loop.create_connection(
        Recorder, *server.sockets[0].getsockname())
    below.set_read_timeout(LONG)
    above = await loop.start_tls(below, protocol, client_context, server_hostname="localhost")
    assert len(timers(loop)) == 1
    since = loop.time()
    below.set_read_timeout(SHORT)
    above.write(b"hello")
    await protocol.lost()
    assert_timed_out(protocol, NO_DATA, since)
    server.close()


# Wrong values, and the end


@pytest.mark.parametrize("method", ["set_read_timeout", "set_write_timeout"])
async def test_wrong_values(loop, method):
    async with connected(Receiving) as (transport, protocol, _):
        set_timeout = getattr(transport, method)
        for closed in (False, True):
            for wrong in ("1", b"1", [], True, False, 1j, object()):
                with pytest.raises(TypeError, match="seconds must be a number or None"):
                    set_timeout(wrong)
            for wrong in (0, 0.0, -1, -0.5, math.nan, math.inf, -math.inf, -10**400):
                with pytest.raises(ValueError, match="positive and finite.*None switches"):
                    set_timeout(wrong)
            with pytest.raises(TypeError):
                set_timeout()
            if not closed:
                transport.close()
                await protocol.lost()


@pytest.mark.parametrize("method", ["set_read_timeout", "set_write_timeout"])
async def test_huge_values_never_run_out(loop, method):
    async with connected(Receiving) as (transport, protocol, _):
        for seconds in (1e6, 1e12, 1e300, 2**63, 10**400):
            getattr(transport, method)(seconds)
            transport.write(b"x")
            await ticks()
        transport.write(PLENTY)
        await a_while(loop)
        assert not protocol.lost_with
        assert len(timers(loop)) == 1


async def test_tiny_values_run_out_at_once(loop):
    async with connected(Receiving) as (transport, protocol, _):
        transport.set_read_timeout(5e-324)
        assert isinstance(await protocol.lost(), TimeoutError)


@pytest.mark.parametrize("ending", ["close", "abort"])
async def test_on_a_closed_transport_it_has_no_effect(loop, ending):
    async with connected(Receiving) as (transport, protocol, _):
        getattr(transport, ending)()
        for _ in range(2):
            transport.set_read_timeout(SHORT)
            transport.set_write_timeout(SHORT)
            await protocol.lost()
            transport.set_read_timeout(None)
            transport.set_write_timeout(None)
        await a_while(loop)
        assert protocol.lost_with == [None]
        assert timers(loop) == []


async def test_a_timer_is_one_handle_however_much_moves(loop):
    async with connected(Receiving) as (transport, protocol, peer):
        transport.set_read_timeout(LONG)
        transport.set_write_timeout(LONG)
        transport.write(b"x")
        before = timers(loop)
        assert len(before) == 2
        for number in range(200):
            peer.sendall(b"y")
            transport.write(b"x")
            await protocol.received(number + 1)
        assert set(map(id, timers(loop))) == set(map(id, before))


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("ending", ["close", "abort", "peer"])
async def test_no_timer_outlives_its_connection(loop, ending, debug):
    loop.set_debug(debug)
    for _ in range(8):
        ours = [make_pair() for _ in range(125)]
        made = [await loop.create_connection(Receiving, sock=sock) for sock, _ in ours]
        for transport, _ in made:
            transport.set_read_timeout(LONG)
            transport.set_write_timeout(LONG)
            transport.write(b"x")
        assert len(timers(loop)) == 250
        for transport, _ in made:
            if ending != "peer":
                getattr(transport, ending)()
        for _, peer in ours:
            peer.close()
        await until(lambda: all(protocol.lost_with for _, protocol in made))
        assert timers(loop) == []


@pytest.mark.parametrize("in_a_cycle", [False, True])
async def test_a_timer_keeps_no_transport(loop, in_a_cycle):
    ours, peer = make_pair()
    transport, protocol = await loop.create_connection(Receiving, sock=ours)
    await ticks()
    variable = contextvars.ContextVar("variable")

    def begin():
        variable.set(transport)
        transport.set_read_timeout(LONG)
        transport.set_write_timeout(LONG)
        transport.write(b"x")

    contextvars.copy_context().run(begin)
    await until(lambda: transport.get_write_buffer_size() == 0)
    transport.pause_reading()
    await ticks()
    assert len(timers(loop)) == 2
    if in_a_cycle:
        transport.me = transport
    gone = weakref.ref(transport)
    protocol.transport = None
    with pytest.warns(ResourceWarning, match="unclosed transport"):
        del transport
        gc.collect()
    assert gone() is None
    assert timers(loop) == []
    peer.close()


@pytest.mark.filterwarnings("ignore:unclosed transport:ResourceWarning")
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_closing_the_loop_with_timers_pending(new_loop):
    loop = new_loop()

    async def begin():
        ours, peer = make_pair()
        transport, _ = await loop.create_connection(Receiving, sock=ours)
        transport.set_read_timeout(LONG)
        transport.set_write_timeout(LONG)
        await ticks()
        transport.write(PLENTY)
        return transport, peer

    transport, peer = loop.run_until_complete(begin())
    transport.set_read_timeout(SHORT)
    loop.close()
    assert timers(loop) == []
    transport.set_read_timeout(None)
    transport.set_write_timeout(None)
    peer.close()
    del transport
    gc.collect()


async def test_a_debugged_loop_runs_them(loop, caplog):
    loop.set_debug(True)
    async with connected(asked(lambda self: len(self.asked_at) < 3)) as (transport, protocol, _):
        transport.set_read_timeout(SHORT)
        assert isinstance(await protocol.lost(), TimeoutError)


async def test_each_direction_of_many_connections(loop):
    """A thousand timeouts that run out together."""
    protocols, peers = [], []
    for _ in range(4):
        for _ in range(125):
            ours, peer = make_pair("unix")
            transport, protocol = await loop.create_connection(Receiving, sock=ours)
            peers.append(peer)
            protocols.append((protocol, loop.time()))
            transport.set_read_timeout(SHORT)
            transport.set_write_timeout(SHORT)
            transport.write(PLENTY[:1 << 20])
        await until(lambda: all(protocol.lost_with for protocol, _ in protocols))
        for peer in peers:
            peer.close()
    for protocol, since in protocols:
        assert isinstance(protocol.lost_with[0], TimeoutError)
        assert protocol.lost_at - since + RESOLUTION >= SHORT
    run_soon = []
    loop.call_soon(run_soon.append, 1)
    await until(lambda: run_soon)
    assert timers(loop) == []


def test_a_loop_that_stands_still_times_nothing(loop):
    async def begin():
        ours, peer = make_pair()
        transport, protocol = await loop.create_connection(Receiving, sock=ours)
        await ticks()
        transport.set_read_timeout(SHORT)
        return protocol, peer

    protocol, peer = loop.run_until_complete(begin())
    time.sleep(2 * SHORT)
    peer.sendall(b"x")
    for _ in range(5):
        run_once(loop)
    assert bytes(protocol.data) == b"x" and not protocol.lost_with
    loop.run_until_complete(protocol.lost())
    assert_timed_out(protocol, NO_DATA, protocol.received_at)
    peer.close()


async def test_tools_find_the_methods(loop):
    async with connected(Receiving) as (transport, _, _):
        assert {"set_read_timeout", "set_write_timeout", "write"} <= set(dir(transport))
        assert isinstance(transport, uringloop.StreamTransport)
