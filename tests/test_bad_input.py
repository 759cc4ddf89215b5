"""Arguments that are wrong: of the wrong type, out of range, closed, or hostile on purpose.

The same calls on asyncio and on our loops: the outcome is compared (the type of the exception, a
result, or a call that waits), and what reached the exception handler. Then the loop must still
work, and nothing may be left behind.
"""

import array
import asyncio
import collections
import contextlib
import dataclasses
import gc
import itertools
import math
import os
import random
import socket
import weakref

import figures
import pytest
from helpers import (
    LIMIT,
    PY312,
    Recorder,
    make_loop,
    make_pair,
    only_ours,
    read_exactly,
    run_once,
    socket_pair,
    ticks,
    until,
)

from uringloop import LoopOptions, new_event_loop
from uringloop.options import effective_options

CASES = figures.repeats(200)
SEEDS = (1, 2, 3, 4)


# Values. Each is made anew for every call, from the resources of one run.


class Raising:
    """Raises out of every method by which the loop may look at it."""

    def _refuse(self, *arguments):
        raise ZeroDivisionError("hostile")

    fileno = __len__ = __index__ = __int__ = __float__ = __iter__ = __bool__ = __buffer__ = _refuse


class Fileno:
    def __init__(self, value):
        self.value = value

    def fileno(self):
        return self.value


class LyingInt(int):
    """Says of itself that it is small and positive."""

    def __gt__(self, other):
        return True

    __ge__ = __lt__ = __le__ = __gt__


class Resources:
    """What the values of one run are made of; all of it is closed at the end."""

    def __init__(self):
        self.stack = contextlib.ExitStack()
        self.tasks = []

    def socket(self, *arguments):
        sock = self.stack.enter_context(socket.socket(*arguments))
        sock.setblocking(False)
        return sock

    def pair(self):
        ours, peer = make_pair("unix")
        peer.send(b"some bytes")
        self.stack.callback(ours.close)
        self.stack.callback(peer.close)
        return ours

    def blocking(self):
        ours = self.pair()
        ours.settimeout(0.01)
        return ours

    def closed(self):
        ours = self.pair()
        ours.close()
        return ours

    def closed_descriptor(self):
        read_end, write_end = os.pipe()
        os.close(read_end)
        os.close(write_end)
        return read_end

    def listening(self):
        sock = self.socket()
        sock.bind(("127.0.0.1", 0))
        sock.listen(1)
        return sock

    def file(self):
        return self.stack.enter_context(open(os.devnull, "rb"))


def released():
    view = memoryview(bytearray(8))
    view.release()
    return view


NUMBERS = {
    "zero": lambda at: 0, "one": lambda at: 1, "minus one": lambda at: -1, "true": lambda at: True,
    "5": lambda at: 5, "2**31-1": lambda at: 2**31 - 1, "2**31": lambda at: 2**31,
    "2**63": lambda at: 2**63, "2**70": lambda at: 2**70, "-2**63": lambda at: -2**63,
    "-2**70": lambda at: -2**70, "10**400": lambda at: 10**400,
    "half": lambda at: 0.5, "-1.5": lambda at: -1.5, "nan": lambda at: math.nan,
    "inf": lambda at: math.inf, "-inf": lambda at: -math.inf, "1j": lambda at: 1j,
    "lying -5": lambda at: LyingInt(-5), "lying 2**70": lambda at: LyingInt(2**70),
}
ODDITIES = {
    "none": lambda at: None, "empty str": lambda at: "", "str": lambda at: "abc",
    "object": lambda at: object(), "list": lambda at: [1], "dict": lambda at: {},
    "raising": lambda at: Raising(), "class": lambda at: int, "function": lambda at: print_nothing,
    "raising function": lambda at: Raising()._refuse,
}
BUFFERS = {
    "empty bytes": lambda at: b"", "bytes": lambda at: b"abc", "bytearray": lambda at: bytearray(9),
    "empty bytearray": lambda at: bytearray(), "view": lambda at: memoryview(bytearray(9)),
    "read-only view": lambda at: memoryview(b"abcdef"), "released view": lambda at: released(),
    "every second": lambda at: memoryview(bytearray(9))[::2],
    "doubles": lambda at: array.array("d", [1, 2]), "large": lambda at: bytearray(300_000),
    "view of doubles": lambda at: memoryview(array.array("d", [1, 2])),
    "grid": lambda at: memoryview(bytearray(12)).cast("B", (3, 4)),
    "no items": lambda at: memoryview(bytearray(0)),
}
SOCKETS = {
    "pair": Resources.pair, "tcp": lambda at: at.socket(), "closed": Resources.closed,
    "udp": lambda at: at.socket(socket.AF_INET, socket.SOCK_DGRAM), "blocking": Resources.blocking,
    "listening": Resources.listening, "its number": lambda at: at.pair().fileno(),
    "closed descriptor": Resources.closed_descriptor,
}
FILES = {
    "file": Resources.file, "fileno str": lambda at: Fileno("abc"),
    "fileno -1": lambda at: Fileno(-1),
    "fileno 2**40": lambda at: Fileno(2**40), "fileno none": lambda at: Fileno(None),
    "fileno raising": lambda at: Raising(), "fileno float": lambda at: Fileno(1.5),
}
ADDRESSES = {
    "address": lambda at: ("127.0.0.1", 1), "short": lambda at: ("127.0.0.1",),
    "port str": lambda at: ("127.0.0.1", "abc"), "port 2**20": lambda at: ("127.0.0.1", 2**20),
    "path": lambda at: "/nowhere/at/all", "port none": lambda at: ("127.0.0.1", None),
    "bytes path": lambda at: b"/nowhere/at/all", "long path": lambda at: "/" + 200 * "x",
}
CALLBACKS = {"callback": lambda at: print_nothing, "failing": lambda at: Raising()._refuse}
FACTORIES = {"factory": lambda at: Recorder, "failing factory": lambda at: Raising()._refuse}
ALL = {**NUMBERS, **ODDITIES, **BUFFERS, **SOCKETS, **FILES, **ADDRESSES, **CALLBACKS, **FACTORIES}


def print_nothing(*arguments):
    return None


# Calls: the object, the method, and which values are sensible for each argument.

CALLS = [
    ("loop", "call_soon", (CALLBACKS,)),
    ("loop", "call_soon_threadsafe", (CALLBACKS,)),
    ("loop", "call_later", (NUMBERS, CALLBACKS)),
    ("loop", "call_at", (NUMBERS, CALLBACKS)),
    ("loop", "add_reader", (SOCKETS | FILES | NUMBERS, CALLBACKS)),
    ("loop", "add_writer", (SOCKETS | FILES | NUMBERS, CALLBACKS)),
    ("loop", "remove_reader", (SOCKETS | FILES | NUMBERS,)),
    ("loop", "remove_writer", (SOCKETS | FILES | NUMBERS,)),
    ("loop", "set_exception_handler", (CALLBACKS,)),
    ("loop", "set_task_factory", (CALLBACKS,)),
    ("loop", "call_exception_handler", (ODDITIES,)),
    ("loop", "create_task", (ODDITIES,)),
    ("loop", "sock_recv", (SOCKETS, NUMBERS)),
    ("loop", "sock_recv_into", (SOCKETS, BUFFERS)),
    ("loop", "sock_recvfrom", (SOCKETS, NUMBERS)),
    ("loop", "sock_recvfrom_into", (SOCKETS, BUFFERS, NUMBERS)),
    ("loop", "sock_sendall", (SOCKETS, BUFFERS)),
    ("loop", "sock_sendto", (SOCKETS, BUFFERS, ADDRESSES)),
    ("loop", "sock_accept", (SOCKETS,)),
    ("loop", "sock_connect", (SOCKETS, ADDRESSES)),
    ("loop", "sock_sendfile", (SOCKETS, FILES, NUMBERS, NUMBERS)),
    ("loop", "connect_accepted_socket", (FACTORIES, SOCKETS)),
    ("loop", "connect_read_pipe", (FACTORIES, FILES | SOCKETS)),
    ("loop", "connect_write_pipe", (FACTORIES, FILES | SOCKETS)),
    ("loop", "start_tls", (ODDITIES, ODDITIES, ODDITIES)),
    ("loop", "create_unix_connection", (FACTORIES, ADDRESSES)),
    ("loop", "create_connection sock=", (FACTORIES, SOCKETS)),
    ("loop", "create_unix_connection sock=", (FACTORIES, SOCKETS)),
    ("loop", "create_server sock=", (FACTORIES, SOCKETS)),
    ("loop", "create_unix_server sock=", (FACTORIES, SOCKETS)),
    ("loop", "create_datagram_endpoint sock=", (FACTORIES, SOCKETS)),
    ("loop", "add_signal_handler", (NUMBERS, CALLBACKS)),
    ("loop", "remove_signal_handler", (NUMBERS,)),
    ("loop", "run_in_executor", (ODDITIES, CALLBACKS)),
    ("loop", "set_default_executor", (ODDITIES,)),
    ("loop", "subprocess_exec", (FACTORIES, ODDITIES)),
    ("loop", "call_soon context=", (CALLBACKS, ODDITIES)),
    ("loop", "call_later context=", (NUMBERS, CALLBACKS, ODDITIES)),
    ("transport", "write", (BUFFERS,)),
    ("transport", "writelines", (ODDITIES | BUFFERS,)),
    ("transport", "set_write_buffer_limits", (NUMBERS, NUMBERS)),
    ("transport", "set_protocol", (ODDITIES,)),
    ("transport", "get_extra_info", (ODDITIES,)),
]


def chosen_cases(seed, count):
    """`count` calls: (object, method, names of the values), mostly with one argument wrong."""
    generator = random.Random(seed)
    cases = []
    for _ in range(count):
        target, method, pools = generator.choice(CALLS)
        names = [generator.choice(sorted(pool)) for pool in pools]
        if generator.random() < 0.6:
            names[generator.randrange(len(names))] = generator.choice(sorted(ALL))
        cases.append((target, method, tuple(names)))
    return cases


# They wait for a thread or a process.
IN_THREADS = ("sock_connect", "sock_sendfile", "run_in_executor", "subprocess_exec")


class Run:
    """One loop that is given the calls one after the other."""

    def __init__(self, kind, debug=False):
        self.kind, self.debug = kind, debug
        self.contexts = []
        self.begin()

    def begin(self):
        self.loop = make_loop(self.kind)
        self.loop.set_debug(self.debug)
        self.loop.slow_callback_duration = LIMIT
        self.loop.set_exception_handler(self.handler)

    def handler(self, loop, context):
        self.contexts.append(type(context.get("exception")).__name__)

    def outcomes(self, cases):
        found = []
        for case in cases:
            try:
                found.append(self.loop.run_until_complete(self.outcome(*case)))
            except Exception as exc:        # out of the loop itself
                found.append((BREAKS, type(exc).__name__))
                end_broken(self.loop)
                self.begin()
        self.loop.run_until_complete(still_works(self.loop))
        self.loop.close()
        return found

    async def outcome(self, target, method, names):
        """What one call comes to."""
        at = Resources()
        self.contexts.clear()
        with at.stack, socket_pair() as (ours, peer):
            transport = None
            try:
                if target == "transport":
                    transport, _ = await self.loop.create_connection(Recorder, sock=ours)
                result = await self.call(
                    self.loop if transport is None else transport, method,
                    [ALL[name](at) for name in names])
            finally:
                if transport is not None:
                    transport.set_protocol(Recorder())
                    transport.abort()
                reported = await self.tidy()
        return result, reported

    async def call(self, thing, method, values):
        method, _, keyword = method.partition(" ")
        keywords = {keyword.strip("="): values.pop()} if keyword else {}
        try:
            result = getattr(thing, method)(*values, **keywords)
            if not asyncio.isfuture(result) and not hasattr(result, "send"):
                await self.undo(method, values, result)
                return "done"
        except (Exception, asyncio.CancelledError) as exc:
            return type(exc).__name__
        task = asyncio.ensure_future(result)
        for _ in range(10):
            await asyncio.sleep(0)
        if not task.done() and method in IN_THREADS:
            await asyncio.wait([task], timeout=LIMIT)       # a thread looks the address up
        waits = not task.done()
        task.cancel()
        await asyncio.wait([task])
        if waits:
            return "waits"
        exc = None if task.cancelled() else task.exception()
        if exc is not None:
            return type(exc).__name__
        result = task.result()
        for made in result if isinstance(result, tuple) else (result,):
            if hasattr(made, "abort"):
                made.abort()
            elif hasattr(made, "close"):
                made.close()
        return "done"

    async def undo(self, method, values, result):
        await ticks(2)
        if method in ("add_reader", "add_writer"):
            getattr(self.loop, method.replace("add", "remove"))(values[0])
        elif method in ("call_later", "call_at"):
            result.cancel()
        elif method == "add_signal_handler":
            self.loop.remove_signal_handler(values[0])

    async def tidy(self):
        """Undo what the call may have done to the loop. Returns what reached the handler."""
        self.loop.set_exception_handler(self.handler)
        self.loop.set_task_factory(None)
        await ticks(2)
        reported = tuple(sorted(self.contexts))
        if self.kind == "asyncio":          # whose failed transports keep their numbers
            for transport in list(self.loop._transports.values()):
                transport.abort()
        await ticks(3)
        return reported


BREAKS = "the loop breaks"


def end_broken(loop):
    """asyncio compares a timer's time when it is due; nothing makes that loop run again."""
    getattr(loop, "_scheduled", []).clear()
    for task in asyncio.all_tasks(loop):
        task.cancel()
    for _ in range(5):
        run_once(loop)
    loop.close()


async def still_works(loop):
    """A timer, a thread's call, a transport, a sock_* call."""
    await asyncio.sleep(0.001)
    assert await asyncio.to_thread(lambda: 5) == 5
    with socket_pair() as (ours, peer):
        peer.send(b"hello")
        assert await loop.sock_recv(ours, 100) == b"hello"
        transport, protocol = await loop.create_connection(Recorder, sock=ours)
        peer.send(b"again")
        await protocol.received(5)
        transport.write(b"answer")
        assert await asyncio.to_thread(peer.recv, 100) == b"answer"
        transport.abort()
        await protocol.lost()


# What ends otherwise on purpose: (method, value) and why.
DIFFERENT = {
    ("sock_sendall", "doubles"): "asyncio counts its items as bytes and waits for ever",
    ("sock_sendall", "view of doubles"): "the same",
    ("sock_sendall", "grid"): "the same",
    ("call_later", "raising"): "its __float__() is asked, whose exception is not hidden",
    ("call_later", "fileno raising"): "the same",
    ("call_at", "raising"): "the same",
    ("call_at", "fileno raising"): "the same",
    ("call_later", "1j"): "asyncio makes a timer of it, and refuses it only later",
    ("sock_recv_into", "fileno raising"): "the same",
    ("sock_recv_into", "raising"): "the exception of its __buffer__() is not hidden (Python 3.12)",
    ("write", "every second"): "sent; docs/compatibility.md",
    ("writelines", "none"): "asyncio refuses it before Python 3.12",
    ("writelines", "zero"): "the same",
    ("writelines", "released view"): "no error on Python 3.11",
    ("writelines", "file"): "asyncio fails where an iterator yields nothing, from Python 3.12 on",
}
for _side in ("reader", "writer"):
    for _value in ("minus one", "-2**63", "-2**70", "closed", "fileno -1"):
        DIFFERENT[f"remove_{_side}", _value] = (
            "nothing is watched; asyncio raises, as out of Server.close() for a closed socket")


@pytest.mark.filterwarnings("ignore")       # coroutines never awaited, transports never closed
@pytest.mark.parametrize("seed", SEEDS)
def test_wrong_arguments_end_as_with_asyncio(loop_kind, seed):
    only_ours(loop_kind, "they are compared with asyncio")
    cases = chosen_cases(seed, CASES)
    expected = Run("asyncio", debug=seed % 2 == 0).outcomes(cases)
    got = Run(loop_kind, debug=seed % 2 == 0).outcomes(cases)
    figures.note("bad inputs tried", len(cases))
    different = [f"{case}: {ours}, asyncio: {theirs}"
                 for case, ours, theirs in zip(cases, got, expected)
                 if ours != theirs and not is_known(case, ours, theirs)]
    assert not different, "\n".join(different)


def is_known(case, ours, theirs):
    _, method, names = case
    if any(name.startswith("lying") for name in names):
        return ours[0] != BREAKS            # what it is taken for depends on who asks first
    if theirs[0] == BREAKS:
        return ours[0] != BREAKS
    if method.endswith(" context="):        # no run(), and no Context
        return ours == ("done", ("TypeError",)) and theirs == ("done", ("AttributeError",)) or (
            is_known((None, method.split()[0], names), ours, theirs))
    return any((method, name) in DIFFERENT for name in names)


def outcome_when_closed(kind, target, method, names):
    """What a call on a closed loop, or on a transport of one, comes to."""
    at = Resources()
    loop = make_loop(kind)
    loop.set_exception_handler(lambda loop, context: None)
    method, _, keyword = method.partition(" ")
    with at.stack, socket_pair() as (ours, _):
        thing = loop
        if target == "transport":
            thing, _ = loop.run_until_complete(loop.create_connection(Recorder, sock=ours))
        loop.close()
        values = [ALL[name](at) for name in names]
        keywords = {keyword.strip("="): values.pop()} if keyword else {}
        try:
            result = getattr(thing, method)(*values, **keywords)
            if hasattr(result, "send"):
                result.send(None)
                result.close()
                return "waits"
        except StopIteration:
            return "done"
        except Exception as exc:
            return type(exc).__name__
        return "done"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", SEEDS)
def test_a_closed_loop_refuses_as_asyncios_does(loop_kind, seed):
    only_ours(loop_kind, "they are compared with asyncio")
    cases = [case for case in chosen_cases(100 + seed, CASES // 2)
             if case[1] not in ("create_task", "subprocess_exec")]
    different = []
    for case in cases:
        expected = outcome_when_closed("asyncio", *case)
        got = outcome_when_closed(loop_kind, *case)
        if got != expected and not is_known(case, (got, ()), (expected, ())):
            different.append(f"{case}: {got}, asyncio: {expected}")
    figures.note("bad inputs tried", len(cases))
    assert not different, "\n".join(different)


# Options


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(LoopOptions)])
def test_options_are_in_range_or_refused(name):
    for value in ALL.values():
        at = Resources()
        with at.stack:
            chosen = value(at)
            try:
                options = LoopOptions(**{name: chosen})
            except (TypeError, ValueError) as exc:
                assert name in str(exc)
            else:
                assert new_event_loop(options).close() is None
        figures.note("bad inputs tried", 1)


WORDS = [
    "", "=", ",", "epoll", "ring_entries", "ring_entries=", "=5", "recv_buffers=64", "\0", "-1",
    "recv_buffers=1e3", "sock_readahead=maybe", "backend=", "backend=kqueue", "9" * 5000,
    "ring_entries=" + "9" * 5000, "recv_buffer_size=\u0663\u0663\u0663", "a=b=c", " ", "\udcff",
]


@pytest.mark.parametrize("seed", SEEDS)
def test_environment_variables_are_understood_or_refused_with_their_name(seed):
    generator = random.Random(seed)
    for _ in range(CASES):
        environ = {
            "URINGLOOP_OPTIONS": ",".join(generator.choices(WORDS, k=generator.randrange(4))),
            "URINGLOOP_BACKEND": generator.choice(["", "auto", "epoll", *WORDS]),
        }
        try:
            options = effective_options(None, environ)
        except (TypeError, ValueError) as exc:
            assert "URINGLOOP_" in str(exc)
        else:
            assert options == LoopOptions(**dataclasses.asdict(options))
        figures.note("bad inputs tried", 1)


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

    def __init__(self, *, got=print_nothing, let_go=print_nothing, size=100):
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
            getattr(loop, method)(Closing(), print_nothing)
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
        for call in (lambda: loop.call_soon(print_nothing), lambda: loop.call_later(1, int),
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
    count = CASES // 5
    for number in range(count):
        loop.run_until_complete(stand_up_to(loop, 1000 * seed + number))
    figures.note("connections of hostile protocols", count)
    loop.run_until_complete(still_works(loop))
    unexpected = [context for context in errors if not isinstance(
        context.get("exception"), (ZeroDivisionError, RuntimeError, TypeError, AttributeError))]
    assert not unexpected
