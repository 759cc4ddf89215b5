"""Stream transports: half close, close, abort, and what is left open."""

import asyncio
import gc
import socket
import warnings

import pytest
from helpers import (
    BufferedRecorder,
    Recorder,
    assert_same,
    connected,
    has_ended,
    in_thread,
    make_pair,
    pattern,
    read_exactly,
    read_to_end,
    reset,
    socket_pair,
    ticks,
    until,
)

both_families = pytest.mark.parametrize("family", ["tcp", "unix"])


# Half close


async def test_write_after_write_eof_is_a_runtime_error(loop):
    async with connected() as (transport, _, _):
        assert transport.can_write_eof()
        transport.write_eof()
        with pytest.raises(RuntimeError):
            transport.write(b"more")


async def test_writelines_after_write_eof_is_a_runtime_error(loop):
    async with connected() as (transport, _, _):
        transport.write_eof()
        with pytest.raises(RuntimeError):
            transport.writelines([b"more"])


@both_families
async def test_write_eof_ends_our_stream_and_leaves_the_other_open(loop, family):
    async with connected(family=family) as (transport, protocol, peer):
        transport.write(b"question")
        transport.write_eof()
        assert await in_thread(read_to_end, peer) == b"question"
        assert not transport.is_closing()
        peer.sendall(b"answer")
        assert await protocol.received(6) == b"answer"


async def test_write_eof_waits_for_what_was_written(loop):
    data = pattern(1 << 20)
    async with connected(small=True) as (transport, protocol, peer):
        transport.write(data)
        transport.write_eof()
        assert_same(await in_thread(read_to_end, peer), data)
        peer.sendall(b"answer")
        assert await protocol.received(6) == b"answer"


@both_families
async def test_eof_received_returning_true_keeps_the_writing_side_open(loop, family):
    class HalfOpen(Recorder):
        keep_open_after_eof = True

    async with connected(HalfOpen, family) as (transport, protocol, peer):
        peer.shutdown(socket.SHUT_WR)
        await until(lambda: "eof_received" in protocol.calls)
        await ticks()
        assert not transport.is_closing()
        transport.write(b"still here")
        assert await in_thread(read_exactly, peer, 10) == b"still here"
        transport.close()
        assert await in_thread(read_to_end, peer) == b""
        assert await protocol.lost() is None
        assert protocol.calls == ["connection_made", "eof_received", "connection_lost"]


@pytest.mark.parametrize("answer", [None, False, 0])
async def test_eof_received_returning_false_closes_the_transport(loop, answer):
    class Closing(Recorder):
        keep_open_after_eof = answer

    async with connected(Closing) as (transport, protocol, peer):
        peer.shutdown(socket.SHUT_WR)
        assert await protocol.lost() is None
        assert transport.is_closing()
        assert await in_thread(read_to_end, peer) == b""
        assert protocol.calls == ["connection_made", "eof_received", "connection_lost"]


async def test_eof_flushes_what_was_written_before_closing(loop):
    data = pattern(1 << 20)
    async with connected(small=True) as (transport, protocol, peer):
        transport.write(data)
        peer.shutdown(socket.SHUT_WR)
        await until(lambda: "eof_received" in protocol.calls)
        assert_same(await in_thread(read_to_end, peer), data)
        assert await protocol.lost() is None


# Close and abort


@both_families
async def test_close_flushes_8_mib_to_a_slow_reader_and_then_ends(loop, family):
    data = pattern(8 << 20)
    async with connected(family=family, small=True) as (transport, protocol, peer):
        transport.write(data)
        transport.close()
        assert transport.is_closing()
        await ticks(20)
        assert protocol.lost_with == []
        assert_same(await in_thread(read_to_end, peer), data)
        assert await protocol.lost() is None
        assert protocol.lost_with == [None]


async def test_close_delivers_no_more_data(loop):
    async with connected() as (transport, protocol, peer):
        transport.close()
        peer.sendall(b"late")
        await protocol.lost()
        await ticks()
        assert protocol.calls == ["connection_made", "connection_lost"]


async def test_close_does_not_call_connection_lost_at_once(loop):
    async with connected() as (transport, protocol, _):
        transport.close()
        assert protocol.lost_with == []
        await protocol.lost()


async def test_abort_drops_what_was_written_and_loses_the_connection_once(loop):
    data = pattern(4 << 20)
    async with connected(small=True) as (transport, protocol, peer):
        transport.write(data)
        transport.abort()
        assert transport.is_closing()
        assert protocol.lost_with == []
        assert await protocol.lost() is None
        await ticks()
        assert protocol.lost_with == [None]
        received = await in_thread(_read_what_comes, peer)
        assert len(received) < len(data)
        assert_same(received, data[: len(received)])


def _read_what_comes(sock):
    received = bytearray()
    try:
        while chunk := sock.recv(65536):
            received += chunk
    except ConnectionResetError:
        pass
    return received


async def test_abort_in_data_received_stops_delivery(loop):
    class Aborting(Recorder):
        def data_received(self, data):
            super().data_received(data)
            self.transport.abort()

    async with connected(Aborting) as (_, protocol, peer):
        peer.sendall(pattern(3))
        assert await protocol.lost() is None
        assert protocol.calls == ["connection_made", "data_received", "connection_lost"]


async def test_a_reset_becomes_connection_reset_error(loop):
    async with connected() as (transport, protocol, peer):
        reset(peer)
        assert isinstance(await protocol.lost(), ConnectionResetError)
        assert transport.is_closing()
        assert protocol.calls == ["connection_made", "connection_lost"]


@pytest.mark.parametrize("paused", [False, True])
async def test_a_reset_while_writing_loses_the_connection_with_that_error(loop, paused):
    async with connected(small=True) as (transport, protocol, peer):
        if paused:
            transport.pause_reading()
        transport.write(pattern(4 << 20))
        await ticks()
        reset(peer)
        assert isinstance(await protocol.lost(), ConnectionResetError)
        assert protocol.calls.count("connection_lost") == 1
        assert transport.get_write_buffer_size() == 0


async def test_writing_to_a_closed_unix_peer_loses_the_connection_quietly(loop):
    class HalfOpen(Recorder):
        keep_open_after_eof = True

    async with connected(HalfOpen, "unix") as (transport, protocol, peer):
        peer.close()
        await until(lambda: "eof_received" in protocol.calls)
        transport.write(b"nobody reads this")
        assert isinstance(await protocol.lost(), (BrokenPipeError, ConnectionResetError))


# set_protocol


async def test_get_protocol_follows_set_protocol(loop):
    async with connected() as (transport, protocol, _):
        assert transport.get_protocol() is protocol
        other = Recorder()
        transport.set_protocol(other)
        assert transport.get_protocol() is other


async def test_the_new_protocol_gets_connection_lost(loop):
    async with connected() as (transport, protocol, _):
        other = Recorder()
        transport.set_protocol(other)
        transport.close()
        assert await other.lost() is None
        assert protocol.calls == ["connection_made"]


def _plain():
    protocol = Recorder()
    protocol.calls.append("set")
    return protocol


def _buffered():
    protocol = BufferedRecorder([7, 4096, 1, 100_000])
    protocol.calls.append("set")
    return protocol


@pytest.mark.parametrize("order", ["plain-plain", "plain-buffered", "buffered-plain"])
async def test_set_protocol_in_mid_stream_loses_nothing(loop, order):
    data = pattern(2 << 20)
    makers = {"plain": _plain, "buffered": _buffered}
    first, second = (makers[name] for name in order.split("-"))
    used = [first()]
    async with connected(lambda: used[0]) as (transport, _, peer):
        sending = asyncio.ensure_future(in_thread(peer.sendall, data))
        while sum(len(protocol.data) for protocol in used) < len(data):
            before = len(used[-1].data)
            await until(lambda: len(used[-1].data) > before)
            used.append((second if len(used) % 2 else first)())
            transport.set_protocol(used[-1])
            if sum(len(protocol.data) for protocol in used) == len(data):
                break
        await sending
        assert_same(b"".join(bytes(protocol.data) for protocol in used), data)


async def test_set_protocol_inside_data_received_takes_effect_for_the_next_data(loop):
    data = pattern(1 << 20)
    heir = _buffered()

    class First(Recorder):
        def data_received(self, data):
            super().data_received(data)
            self.transport.set_protocol(heir)

    async with connected(First) as (_, first, peer):
        sending = asyncio.ensure_future(in_thread(peer.sendall, data))
        await until(lambda: len(first.data) + len(heir.data) >= len(data))
        await sending
        assert len(first.chunks) == 1
        assert_same(bytes(first.data + heir.data), data)


# Left open


def test_an_unclosed_transport_warns_and_does_not_crash(new_loop):
    loop = new_loop()
    with socket_pair() as (ours, peer), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        transport, protocol = loop.run_until_complete(loop.create_connection(Recorder, sock=ours))
        peer.sendall(b"unread")
        loop.close()
        del transport, protocol, ours
        gc.collect()
    texts = [str(w.message) for w in caught if w.category is ResourceWarning]
    assert any("transport" in text.lower() for text in texts), texts


async def test_an_exception_out_of_connection_lost_after_a_flushed_close(loop, errors):
    """The last bytes leave in an I/O callback, and connection_lost() is called out of it."""
    class Raises(Recorder):
        def connection_lost(self, exc):
            super().connection_lost(exc)
            raise ZeroDivisionError

    async with connected(Raises, small=True) as (transport, protocol, peer):
        transport.write(b"x" * 300_000)
        transport.close()
        received = await in_thread(read_to_end, peer)
        await protocol.lost()
        await ticks()
    assert len(received) == 300_000
    assert [type(context["exception"]) for context in errors] == [ZeroDivisionError]


def test_reading_resumed_while_the_loop_does_not_run(loop):
    class Stops(Recorder):
        def data_received(self, data):
            super().data_received(data)
            loop.stop()

    async def start():
        ours, peer = make_pair()
        transport, protocol = await loop.create_connection(Stops, sock=ours)
        transport.pause_reading()
        await ticks()
        return transport, protocol, peer

    transport, protocol, peer = loop.run_until_complete(start())
    transport.resume_reading()
    peer.sendall(b"x")

    async def finish():
        transport.abort()
        await protocol.lost()

    loop.run_forever()      # nothing but the reading can end it
    assert protocol.data == b"x"
    loop.run_until_complete(finish())
    peer.close()


@pytest.mark.parametrize("family", ["tcp", "unix"])
@pytest.mark.parametrize("end", ["abort", "close"])
async def test_the_peer_sees_the_end_after_one_iteration(loop, end, family):
    """A loop that blocks then, as on a thread that waits for the end, would never get there."""
    async with connected(family=family) as (transport, _, peer):
        await asyncio.sleep(0.01)
        getattr(transport, end)()
        await asyncio.sleep(0)
        assert has_ended(peer)


@pytest.mark.parametrize("family", ["tcp", "unix"])
async def test_the_peer_sees_an_abort_with_unsent_data_after_one_iteration(loop, family):
    async with connected(family=family, small=True) as (transport, _, peer):
        transport.write(pattern(1 << 20))
        await asyncio.sleep(0.01)
        transport.abort()
        await asyncio.sleep(0)
        while peer.recv(1 << 20):
            pass
