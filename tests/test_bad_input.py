"""Arguments that are wrong: of the wrong type, out of range, closed, or hostile on purpose.

The same calls on asyncio and on our loops: the outcome is compared (the type of the exception, a
result, or a call that waits), and what reached the exception handler. Then the loop must still
work, and nothing may be left behind.
"""

import array
import asyncio
import contextlib
import dataclasses
import math
import os
import random
import socket

import figures
import pytest
from helpers import (
    LIMIT,
    LyingInt,
    Recorder,
    make_loop,
    make_pair,
    only_ours,
    run_once,
    socket_pair,
    still_works,
    ticks,
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
