"""Code of the user that runs where nobody expects it: buffers, finalizers and descriptors that call
back, and protocols that do anything anywhere. No memory is touched that is not there, no other
connection suffers, and the loop still works.
"""

import asyncio
import collections
import contextlib
import gc
import itertools
import random
import weakref

import figures
import pytest
from helpers import (
    PY312,
    LyingInt,
    only_ours,
    read_exactly,
    socket_pair,
    still_works,
    ticks,
    until,
)

CONNECTIONS = figures.repeats(40)       # of hostile protocols, for each seed


def nothing(*arguments):
    return None


# Buffers that change, and code of the user that runs where the loop looks at an argument


async def test_a_buffer_cannot_shrink_under_a_sock_sendall_that_waits(loop):
    data = bytearray(b"x" * 1_000_000)
    with socket_pair(small=True) as (ours, peer):
        sending = loop.create_task(loop.sock_sendall(ours, data))
        await ticks()
        with pytest.raises(BufferError):
            data.clear()
        got = await asyncio.to_thread(read_exactly, peer, len(data))
        await sending
        assert got == bytes(data)
        data.clear()                    # it is free again


async def test_sends_that_queue_up_hold_their_buffers_too(loop, loop_kind):
    only_ours(loop_kind, "calls wait in order")
    data = bytearray(b"y" * 1000)
    with socket_pair(small=True) as (ours, peer):
        first = loop.create_task(loop.sock_sendall(ours, bytes(1_000_000)))
        second = loop.create_task(loop.sock_sendall(ours, data))
        await ticks()
        with pytest.raises(BufferError):
            data.clear()
        got = await asyncio.to_thread(read_exactly, peer, 1_001_000)
        await asyncio.gather(first, second)
        assert got[-1000:] == bytes(data)


@pytest.mark.parametrize("number", [LyingInt(-5), LyingInt(-2**40), -1])
async def test_an_int_that_lies_about_its_sign_is_no_size(loop, loop_kind, number):
    not_uvloop(loop_kind)
    with socket_pair() as (ours, peer):
        peer.send(b"some bytes")
        with pytest.raises(ValueError):
            await loop.sock_recv(ours, number)
        with pytest.raises(ValueError):
            await loop.sock_recvfrom_into(ours, bytearray(10), number)
        assert await loop.sock_recv(ours, 100) == b"some bytes"


class Buffer:
    """A buffer in Python (3.12): does something when it is asked for, or let go."""

    def __init__(self, *, got=nothing, let_go=nothing, size=100):
        self.memory = bytearray(size)
        self.got, self.let_go = got, let_go

    def __len__(self):
        return len(self.memory)

    def __buffer__(self, flags):
        self.got()
        return memoryview(self.memory)

    def __release_buffer__(self, view):
        view.release()
        self.let_go()


needs_buffers_in_python = pytest.mark.skipif(
    not PY312, reason="buffers made in Python are new in 3.12")


@needs_buffers_in_python
@pytest.mark.parametrize("time", [1, 2, 3])
async def test_a_buffer_that_closes_the_socket_gets_nothing_of_the_next_one(loop, loop_kind, time):
    only_ours(loop_kind, "asyncio is asked in the fuzzer")
    with socket_pair() as (ours, peer), contextlib.ExitStack() as stack:
        victims, looks = [], itertools.count(1)

        def close_and_reuse():
            if next(looks) == time:
                ours.close()
                victims.append(stack.enter_context(socket_pair()))
                victims[0][1].send(b"for somebody else")

        peer.send(b"some bytes")
        buffer = Buffer(got=close_and_reuse)
        try:
            size = await loop.sock_recv_into(ours, buffer)
        except OSError:
            size = 0
        assert buffer.memory[:size] in (b"", b"some bytes")
        for victim, _ in victims:
            assert victim.recv(100) == b"for somebody else"


@needs_buffers_in_python
@pytest.mark.parametrize("moment", ["got", "let_go"])
@pytest.mark.parametrize("act", ["close", "cancel", "read", "next"])
async def test_a_buffer_may_do_anything_to_its_own_call(loop, loop_kind, moment, act):
    only_ours(loop_kind, "no other loop is asked for that")
    with socket_pair() as (ours, peer):
        done = []

        def interfere():
            if len(done) < 3:
                done.append(act)
                if act == "close" and len(done) == 3:
                    ours.close()
                elif act == "cancel":
                    receiving.cancel()
                elif act == "read" and len(done) == 2:
                    with contextlib.suppress(BlockingIOError):
                        ours.recv(4)
                elif act == "next":
                    others.append(loop.create_task(loop.sock_recv(ours, 1)))

        others = []
        buffer = Buffer(**{moment: interfere})
        receiving = loop.create_task(loop.sock_recv_into(ours, buffer))
        await ticks()
        peer.send(b"some bytes")
        await until(lambda: receiving.done() or others)
        peer.close()
        await asyncio.wait([receiving, *others])
        for task in (receiving, *others):
            assert task.cancelled() or task.exception() is None or \
                isinstance(task.exception(), OSError)
    await still_works(loop)


async def test_a_view_released_under_its_call_leaves_the_cancellation_alone(loop, loop_kind):
    with socket_pair() as (ours, peer):
        view = memoryview(bytearray(100))
        receiving = loop.create_task(loop.sock_recv_into(ours, view))
        await ticks()
        peer.send(b"some bytes")
        view.release()
        receiving.cancel()
        with pytest.raises((asyncio.CancelledError, ValueError)):
            await receiving
        assert receiving.cancelled()
        assert await loop.sock_recv(ours, 100) == b"some bytes"


def not_uvloop(loop_kind):
    """uvloop 0.23 ends with a segmentation fault in some of these, which would end the session."""
    if loop_kind == "uvloop":
        pytest.skip("uvloop crashes when code runs where it looks at an argument")


@pytest.mark.parametrize("method", ["add_reader", "add_writer"])
def test_a_fileno_that_closes_the_loop_leaves_no_descriptor(loop_kind, new_loop, method):
    not_uvloop(loop_kind)
    loop = new_loop()
    with socket_pair() as (ours, _):

        class Closing:
            def fileno(self):
                loop.close()
                return ours.fileno()

        with pytest.raises((RuntimeError, AttributeError, ValueError, TypeError)):
            getattr(loop, method)(Closing(), nothing)
        assert loop.is_closed()


class Finalized:
    """Does something when the last reference to it goes."""

    def __init__(self, act):
        self.act = act

    def __del__(self):
        self.act()

    def __call__(self, *arguments):
        pass


async def test_finalizers_of_watchers_may_watch_and_unwatch(loop, loop_kind):
    not_uvloop(loop_kind)
    with socket_pair() as (ours, peer):
        calls = []

        def meddle():
            calls.append("finalized")
            loop.remove_reader(ours)
            loop.remove_writer(peer)
            loop.add_reader(peer, calls.append, "peer is readable")

        loop.add_reader(ours, Finalized(meddle))
        loop.add_writer(peer, Finalized(meddle))
        await ticks()
        loop.remove_reader(ours)
        loop.remove_writer(peer)
        gc.collect()
        await until(lambda: "finalized" in calls)
        ours.send(b"x")
        await until(lambda: "peer is readable" in calls)
        loop.remove_reader(peer)


@pytest.mark.parametrize("side", ["reader", "writer"])
async def test_the_last_watcher_wins_when_a_replaced_ones_finalizer_adds_its_own(
        loop, loop_kind, side):
    not_uvloop(loop_kind)
    add, remove = getattr(loop, f"add_{side}"), getattr(loop, f"remove_{side}")
    with socket_pair() as (ours, peer):
        called = []
        peer.send(b"x")
        add(ours, Finalized(lambda: add(ours, called.append, "the finalizer's")))
        add(ours, called.append, "its successor")
        await until(lambda: called)
        assert set(called) == {"the finalizer's"}
        add(ours, Finalized(lambda: called.append(remove(ours))))
        add(ours, called.append, "its successor")
        called.clear()
        remove(ours)
        await ticks()
        assert not called


def test_finalizers_run_by_the_closing_of_a_loop_find_it_closed(loop_kind, new_loop):
    not_uvloop(loop_kind)
    loop, found = new_loop(), []

    def look():
        for call in (lambda: loop.call_soon(nothing), lambda: loop.call_later(1, int),
                     lambda: loop.add_reader(0, int)):
            try:
                call()
            except RuntimeError as exc:
                found.append(str(exc))

    loop.call_soon(Finalized(look))
    loop.call_later(1000, Finalized(look))
    with socket_pair() as (ours, _):
        loop.add_reader(ours, Finalized(look))
        loop.close()
        gc.collect()
    assert found == ["Event loop is closed"] * 9


async def test_weakref_callbacks_may_use_the_loop(loop, loop_kind):
    not_uvloop(loop_kind)
    called = []

    class Thing:
        def __call__(self):
            pass

    for schedule in (loop.call_soon, lambda call: loop.call_later(0, call)):
        thing = Thing()
        references = [weakref.ref(thing, lambda _: loop.call_soon(called.append, "gone"))]
        schedule(thing)
        del thing
        await until(lambda: called)
        called.clear()
        del references


# Protocols that do anything, anywhere


class Hostile(asyncio.Protocol):
    """At each of its callbacks does something at random, errors included."""

    def __init__(self, generator, loop):
        self.generator, self.loop = generator, loop
        self.calls = collections.Counter()
        self.after_the_end = 0
        self.transport = None
        self.successor = None

    def act(self):
        transport, dice = self.transport, self.generator
        if transport is None:
            return
        for _ in range(dice.choice([0, 0, 1, 1, 1, 2])):
            dice.choice([
                lambda: transport.write(bytes(dice.choice([0, 1, 100, 20_000, 200_000]))),
                lambda: transport.write(bytearray(dice.choice([1, 30_000]))),
                lambda: transport.writelines([bytes(10), bytes(dice.choice([0, 70_000]))]),
                transport.pause_reading, transport.resume_reading, transport.resume_reading,
                transport.get_write_buffer_size,
                lambda: transport.set_write_buffer_limits(dice.choice([0, 10, 100_000])),
                lambda: transport.set_protocol(self.change()),
                lambda: self.loop.call_soon(self.act_later),
                lambda: self.loop.call_later(0.0001, self.act_later),
                lambda: dice.random() < 0.1 and transport.write_eof(),
                lambda: dice.random() < 0.05 and transport.close(),
                lambda: dice.random() < 0.05 and transport.abort(),
                lambda: dice.random() < 0.03 and 1 / 0,
            ])()

    def change(self):
        """Another protocol, of the other kind; it shares the count."""
        kind = BufferedHostile if type(self) is Hostile else Hostile
        other = kind(self.generator, self.loop)
        other.transport, other.calls = self.transport, self.calls
        return other

    def act_later(self):
        with contextlib.suppress(RuntimeError, ZeroDivisionError):      # e.g. after write_eof()
            self.act()

    def note(self, name):
        if self.calls["connection_lost"]:
            self.calls["late"] += 1
        self.calls[name] += 1
        self.act()

    def connection_made(self, transport):
        self.transport = transport
        self.note("connection_made")

    def data_received(self, data):
        self.note("data_received")

    def eof_received(self):
        self.note("eof_received")
        return self.generator.random() < 0.5

    def pause_writing(self):
        self.note("pause_writing")

    def resume_writing(self):
        self.note("resume_writing")

    def connection_lost(self, exc):
        self.note("connection_lost")


class BufferedHostile(Hostile, asyncio.BufferedProtocol):
    data_received = None

    def get_buffer(self, sizehint):
        self.note("get_buffer")
        return self.generator.choice(
            [bytearray(5), bytearray(70_000), bytearray(0), memoryview(bytearray(20_000)), None])

    def buffer_updated(self, nbytes):
        self.note("buffer_updated")


async def stand_up_to(loop, seed):
    """One connection of a hostile protocol, and a peer that sends, reads and goes away."""
    generator = random.Random(seed)
    with socket_pair("unix", small=True) as (ours, peer):
        kind = generator.choice([Hostile, BufferedHostile])
        hostile = kind(generator, loop)
        transport = loop._make_socket_transport(ours, hostile)
        peer.setblocking(False)
        for _ in range(generator.randrange(5, 40)):
            with contextlib.suppress(OSError):
                peer.send(bytes(generator.choice([1, 100, 9_000, 20_000])))
            if generator.random() < 0.7:
                with contextlib.suppress(OSError):
                    peer.recv(generator.choice([10, 100_000]))
            await ticks(generator.choice([0, 1, 2, 3]))
        if generator.random() < 0.5:
            peer.close()
        else:
            transport.close()
            await ticks(3)
        transport.abort()
        await until(lambda: hostile.calls["connection_lost"])
        await ticks()
        assert hostile.calls["connection_made"] == 1
        assert hostile.calls["connection_lost"] == 1
        assert hostile.calls["late"] == 0, dict(hostile.calls)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(4))
def test_a_protocol_that_does_anything_anywhere_ends_once(loop_kind, new_loop, errors, seed):
    only_ours(loop_kind, "uvloop forbids some of it")
    loop = new_loop()
    for number in range(CONNECTIONS):
        loop.run_until_complete(stand_up_to(loop, 1000 * seed + number))
    figures.note("connections of hostile protocols", CONNECTIONS)
    loop.run_until_complete(still_works(loop))
    unexpected = [context for context in errors if not isinstance(
        context.get("exception"), (ZeroDivisionError, RuntimeError, TypeError, AttributeError))]
    assert not unexpected
