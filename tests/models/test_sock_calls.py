"""loop.sock_recv(), sock_recv_into() and sock_sendall() against a model of a byte stream: several
calls wait on one socket, are cancelled at any moment, and what had come for them comes to the next
call, or to a transport made of the socket."""

import asyncio
import errno
import socket

import pytest
from helpers import make_pair
from hypothesis import strategies as st
from machine import WAYS, Machine, Stream, counted, explore, play

KINDS = ("io_uring", "epoll")       # asyncio's calls displace each other
SIZES = (1, 64, 100, 1000, 16_383, 16_384, 40_000)

RECEIVES = [(verb, size) for verb in ("recv", "recv_into") for size in SIZES]
ACTIONS = RECEIVES * 2 + [("direct", size) for size in (1, 1000)] * 3
ACTIONS += [("send", size) for size in SIZES] * 2
ACTIONS += [("peer_send", size) for size in SIZES] * 3
ACTIONS += [("peer_recv", size) for size in (1, 1000, 1 << 20)] * 5
ACTIONS += [("cancel", which) for which in range(4)] * 4 + [("cancel_sends",), ("peer_shut",)] * 2
ACTIONS += [("transport",), ("close",), ("peer_close",)]

connection = st.tuples(st.sampled_from(("tcp", "unix")), st.booleans())
step = st.tuples(st.integers(0, 1), st.sampled_from(ACTIONS))
turn = st.tuples(st.sampled_from(WAYS), st.booleans(), st.lists(step, max_size=12))
program = st.tuples(
    st.sampled_from([{}, {"ring_entries": 2, "recv_buffers": 4, "recv_buffer_size": 256}]),
    st.booleans(), st.lists(connection, min_size=1, max_size=2), st.lists(turn, max_size=12))


class Taker(asyncio.Protocol):
    """Takes over what the calls left."""

    is_lost = False

    def __init__(self, end):
        self.end = end

    def connection_made(self, transport):
        self.transport = transport

    def data_received(self, data):
        self.end.machine.activity += 1
        self.end.took(data)

    def eof_received(self):
        self.end.saw_end()
        return True

    def connection_lost(self, exc):
        self.is_lost = True


class End:
    """One socket on which calls are made, and its peer."""

    def __init__(self, machine, number, family, small):
        self.machine = machine
        self.loop = machine.loop
        self.input, self.output = Stream(2 * number), Stream(2 * number + 1)
        self.socket, self.peer = make_pair(family, small=small)
        self.peer.setblocking(False)
        self.receives, self.sends, self.all = [], [], []
        self.may_be_stashed = False     # a direct recv() would overtake
        self.sends_cut = False
        self.closed = self.peer_shut = self.peer_closed = self.has_ended = False
        self.taker = None

    def __repr__(self):
        facts = [name for name, fact in vars(self).items() if fact is True]
        return (f"<input {self.input.got}/{self.input.sent} output {self.output.got}/"
                f"{self.output.sent} {len(self.receives)} receives {' '.join(facts)}>")

    def do(self, action):
        verb, *arguments = action
        getattr(self, "do_" + verb)(*arguments)

    def usable(self):
        return not self.closed and self.taker is None

    def took(self, data):
        try:
            self.input.check(data)
        except AssertionError as exc:
            self.machine.fail(f"input: {exc}")
        if self.input.got == self.input.sent:
            self.may_be_stashed = False

    def saw_end(self):
        self.has_ended = True
        whole = self.input.got == self.input.sent or self.peer_closed
        if not (self.peer_shut or self.peer_closed) or not whole:
            self.machine.fail(f"the end after {self.input.got} of {self.input.sent} bytes")

    def start(self, calls, coroutine):
        task = self.loop.create_task(coroutine)
        calls.append(task)
        self.all.append(task)
        task.add_done_callback(calls.remove)

    def failed(self, exc):
        """Whether a call may fail so."""
        if isinstance(exc, RuntimeError):
            fits = self.taker is not None
        elif exc.errno == errno.EBADF:
            fits = self.closed
        else:
            fits = self.peer_closed and exc.errno in (errno.ECONNRESET, errno.EPIPE)
        if not fits:
            self.machine.fail(f"a call failed: {exc!r} {self}")

    async def receive(self, size, into):
        try:
            if into:
                buffer = bytearray(size)
                data = buffer[:await self.loop.sock_recv_into(self.socket, buffer)]
            else:
                data = await self.loop.sock_recv(self.socket, size)
        except (OSError, RuntimeError) as exc:
            return self.failed(exc)
        self.machine.activity += 1
        assert len(data) <= size
        if data:
            self.took(data)
        else:
            self.saw_end()

    def do_recv(self, size):
        if self.usable():
            self.start(self.receives, self.receive(size, False))

    def do_recv_into(self, size):
        if self.usable():
            self.start(self.receives, self.receive(size, True))

    def do_direct(self, size):
        """A recv(2) by the program itself, when no call waits and nothing is kept for one."""
        if not self.usable() or self.receives or self.may_be_stashed or self.machine.reads_ahead:
            return
        try:
            data = self.socket.recv(size)
        except BlockingIOError:
            return
        except OSError as exc:
            return self.failed(exc)
        if data:
            self.took(data)

    async def send(self, data):
        try:
            await self.loop.sock_sendall(self.socket, data)
        except (OSError, RuntimeError) as exc:
            self.sends_cut = True
            return self.failed(exc)
        self.machine.activity += 1

    def do_send(self, size):
        if self.usable() and not self.sends_cut:
            self.start(self.sends, self.send(self.output.next(size)))

    def do_cancel(self, which):
        if self.receives:
            self.may_be_stashed = True
            self.receives[which % len(self.receives)].cancel()

    def do_cancel_sends(self):
        """All of them, since how much of the first has gone nobody knows."""
        if self.sends:
            self.sends_cut = True
        for task in reversed(self.sends):
            task.cancel()

    def do_transport(self):
        """Calls that wait fail; a transport gets what comes, and what came for them."""
        if self.usable() and not self.sends:
            self.taker = Taker(self)
            self.all.append(self.loop.create_task(
                self.loop.create_connection(lambda: self.taker, sock=self.socket)))

    def do_close(self):
        if self.usable():
            self.closed = self.sends_cut = True
            self.socket.close()

    def do_peer_send(self, size):
        if self.peer_shut or self.peer_closed:
            return
        start = self.input.sent
        try:
            self.input.sent += self.peer.send(self.input.content[start:start + size])
        except BlockingIOError:
            pass
        except OSError as exc:
            assert self.closed and exc.errno in (errno.ECONNRESET, errno.EPIPE), exc

    def do_peer_recv(self, size):
        """Returns whether there may be more."""
        if self.peer_closed:
            return False
        try:
            data = self.peer.recv(size)
        except BlockingIOError:
            return False
        except OSError as exc:
            assert self.closed and exc.errno in (errno.ECONNRESET, errno.EPIPE), exc
            self.peer_saw_end = True
            return False
        self.output.check(data)
        if not data:
            assert self.closed, "the peer sees the end of an open socket"
            self.peer_saw_end = True
        return bool(data)

    peer_saw_end = False

    def do_peer_shut(self):
        if not self.peer_shut and not self.peer_closed and not self.closed:
            self.peer_shut = True
            self.peer.shutdown(socket.SHUT_WR)

    def do_peer_close(self):
        if not self.peer_closed:
            self.peer_closed = True
            self.peer.close()

    # The end

    def settle(self):
        """Whether all has come that was sent; makes the calls for it."""
        while self.do_peer_recv(1 << 20):
            self.machine.activity += 1
        if self.closed:
            return not self.receives and not self.sends and (self.peer_saw_end or self.peer_closed)
        if self.peer_closed:
            return not self.receives and not self.sends
        if self.output.got < self.output.sent and not self.sends_cut:
            return False
        if self.input.got < self.input.sent and self.taker is None and not self.receives:
            self.do_recv(70_000)
        return self.input.got == self.input.sent and not self.sends

    def give_up(self):
        self.peer.close()
        if self.taker is None:
            self.socket.close()

    def is_over(self):
        if self.taker is None:
            return not self.receives and not self.sends
        return self.taker.is_lost


def finish(machine, ends):
    machine.run_until(End.settle, ends)
    for each in ends:
        for task in each.all:
            task.cancel()
        if each.taker is not None and hasattr(each.taker, "transport"):
            each.taker.transport.abort()
    machine.run_until(End.is_over, ends)
    for each in ends:
        each.give_up()
    machine.finish()


def run(kind, options, reads_ahead, kinds_of_ends, turns):
    machine = Machine(kind, {**options, "sock_readahead": reads_ahead})
    machine.reads_ahead = reads_ahead
    ends = []
    with counted(kind, machine, ends):
        for number, how in enumerate(kinds_of_ends):
            ends.append(End(machine, number, *how))
        play(machine, ends, turns)
        finish(machine, ends)
        for each in ends:
            for task in each.all:
                if not task.cancelled() and task.exception() is not None:
                    raise task.exception()


@pytest.mark.timeout(1800)
def test_calls_get_every_byte_in_their_order(request, loop_kind):
    explore(request, program, 150, lambda program: run(loop_kind, *program))
