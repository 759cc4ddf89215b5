"""Connections over TLS, from their beginning or by start_tls(), against a model of a byte stream:
what one side sends comes whole and in order to the other, whoever closes, aborts or cancels."""

import asyncio
import ssl

import pytest
from helpers import make_pair, reset
from hypothesis import strategies as st
from machine import WAYS, Machine, Stream, counted, explore

KINDS = ("asyncio", "io_uring", "epoll")
SIZES = (1, 100, 16_384, 16_385, 70_000, 200_000)

ACTIONS = [("write", size) for size in SIZES] * 2 + [("pause",), ("resume",), ("resume",)] * 2
ACTIONS += [("peer_send", size) for size in SIZES] * 2 + [("peer_pump",)] * 12
ACTIONS += [("close",), ("abort",), ("cancel",), ("peer_close",), ("peer_drop",), ("peer_reset",)]
ACTIONS += [("echo",), ("stutter",)]

connection = st.tuples(
    st.sampled_from(("tcp", "unix")), st.booleans(), st.booleans(), st.booleans())
step = st.tuples(st.integers(0, 1), st.sampled_from(ACTIONS))
# A handshake takes a few turns, and most programs should see its end.
turn = st.tuples(st.sampled_from(WAYS), st.lists(step, max_size=10))
program = st.tuples(
    st.sampled_from([{}, {"ring_entries": 2, "recv_buffers": 4, "recv_buffer_size": 64}]),
    st.lists(connection, min_size=1, max_size=2), st.integers(0, 12),
    st.lists(turn, max_size=10))


class Side(asyncio.Protocol):
    """Our protocol; one connection_made() per transport that it gets."""

    def __init__(self, connection):
        self.connection = connection

    def connection_made(self, transport):
        self.connection.plain = transport

    def data_received(self, data):
        self.connection.received(data)

    def eof_received(self):
        self.connection.machine.activity += 1

    def connection_lost(self, exc):
        self.connection.lost(exc)


class Connection:
    def __init__(self, machine, number, contexts, family, small, server_side, upgraded):
        self.machine = machine
        self.loop = machine.loop
        self.input, self.output = Stream(2 * number), Stream(2 * number + 1)
        self.socket, self.peer = make_pair(family, small=small)
        self.peer.setblocking(False)
        self.plain = self.transport = None
        self.habit = None
        self.losses = 0
        self.ended = self.peer_ended = self.peer_gone = self.cancelled = False
        ours, theirs = contexts if server_side else contexts[::-1]
        name = None if server_side else "localhost"
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = theirs.wrap_bio(self.incoming, self.outgoing, not server_side,
                                   "localhost" if server_side else None)
        self.is_secure = self.closing_peer = False
        self.unsent = b""               # the peer's records that its socket had no room for
        self.connecting = self.loop.create_task(
            self.connect(ours, server_side, name, upgraded))

    def __repr__(self):
        facts = [name for name, fact in vars(self).items() if fact is True]
        return (f"<{self.transport!r} input {self.input.got}/{self.input.sent} output "
                f"{self.output.got}/{self.output.sent} {' '.join(facts)}>")

    async def connect(self, context, server_side, name, upgraded):
        protocol = Side(self)
        limits = {"ssl_shutdown_timeout": 30}
        try:
            if upgraded:
                plain, _ = await self.loop.create_connection(lambda: protocol, sock=self.socket)
                self.transport = await self.loop.start_tls(
                    plain, protocol, context, server_side=server_side, server_hostname=name,
                    **limits)
            elif server_side:
                self.transport, _ = await self.loop.connect_accepted_socket(
                    lambda: protocol, self.socket, ssl=context, **limits)
            else:
                self.transport, _ = await self.loop.create_connection(
                    lambda: protocol, sock=self.socket, ssl=context, server_hostname=name,
                    **limits)
        except OSError as exc:
            if not self.peer_gone:
                self.machine.fail(f"the handshake failed: {exc!r}")

    def received(self, data):
        self.machine.activity += 1
        if self.losses:
            self.machine.fail("data_received after connection_lost")
        try:
            self.input.check(data)
        except AssertionError as exc:
            self.machine.fail(f"input: {exc}")
        if self.habit == "echo":
            self.do_write(len(data))
        elif self.habit == "stutter":
            self.do_pause()
            self.loop.call_soon(self.do_resume)

    def lost(self, exc):
        self.machine.activity += 1
        self.losses += 1
        if self.losses > 1:
            self.machine.fail("connection_lost twice")
        # asyncio's: data of the peer's that comes after our close_notify is an error of TLS.
        closed = self.ended and isinstance(exc, ssl.SSLError)
        if exc is not None and not self.peer_gone and not closed:
            self.machine.fail(f"connection_lost({exc!r})")

    def do(self, action):
        verb, *arguments = action
        getattr(self, "do_" + verb)(*arguments)

    def do_write(self, size):
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(self.output.next(size))

    def do_pause(self):
        if self.transport is not None and not self.ended:
            self.transport.pause_reading()

    def do_resume(self):
        # asyncio's transport may be of no more use once close() was called.
        if self.transport is not None and not self.ended:
            self.transport.resume_reading()

    def do_echo(self):
        self.habit = "echo"

    def do_stutter(self):
        self.habit = "stutter"

    def do_close(self):
        if self.transport is not None and not self.ended:
            self.do_resume()            # paused, it would not see the answer to its close_notify
            self.ended = True
            self.transport.close()

    def do_abort(self):
        if self.transport is not None and not self.ended:
            self.ended = True
            self.transport.abort()

    def do_cancel(self):
        if not self.connecting.done():
            self.cancelled = self.ended = True
            self.connecting.cancel()

    # The peer

    def do_peer_pump(self):
        """Move what can be moved: records out and in, the handshake, the other's data."""
        if self.peer_gone:
            return
        try:
            self.pump_out()
            while data := self.peer.recv(1 << 18):
                self.incoming.write(data)
                self.take_records()
            self.peer_ended = True
        except BlockingIOError:
            pass
        except OSError as exc:
            assert self.ended or self.losses, f"the peer's {exc!r}"
            self.peer_ended = True
        if not self.peer_ended:
            self.take_records()
            self.pump_out()

    def take_records(self):
        try:
            if not self.is_secure:
                self.tls.do_handshake()
                self.is_secure = True
            while data := self.tls.read(1 << 18):
                self.output.check(data)
                self.machine.activity += 1
            self.closing_peer = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:
            self.closing_peer = True        # close_notify

    def pump_out(self):
        try:
            self.unsent += self.outgoing.read()
            while self.unsent:
                self.unsent = self.unsent[self.peer.send(self.unsent):]
        except BlockingIOError:
            pass
        except OSError as exc:
            assert self.ended or self.losses, f"the peer's {exc!r}"
            self.peer_ended = True

    def do_peer_send(self, size):
        if self.is_secure and not self.peer_gone and not self.peer_ended and not self.closing_peer:
            self.tls.write(self.input.next(size))
            self.pump_out()

    def do_peer_close(self):
        """close_notify and the end of the stream, in the middle of what is under way."""
        if self.is_secure and not self.peer_gone:
            try:
                self.tls.unwrap()
            except ssl.SSLError:
                pass
            self.pump_out()
        self.do_peer_drop()

    def do_peer_drop(self):
        if not self.peer_gone:
            self.peer_gone = True
            self.peer.close()

    def do_peer_reset(self):
        if not self.peer_gone:
            self.peer_gone = True
            reset(self.peer)

    # The end

    def settle(self):
        """Whether all has come, unless somebody ended the connection before."""
        self.do_peer_pump()
        self.do_resume()
        if self.peer_gone or self.ended or self.losses:
            return self.connecting.done()
        return (self.connecting.done() and self.is_secure
                and (self.input.got, self.output.got) == (self.input.sent, self.output.sent))

    def is_over(self):
        self.do_peer_pump()
        if self.closing_peer and not self.peer_gone:
            self.do_peer_close()
        elif self.peer_ended:
            self.do_peer_drop()
        return self.losses == 1 or self.plain is None or self.never_made()

    def never_made(self):
        """A handshake that failed or was cancelled: its protocol was not told of any connection."""
        return self.transport is None and self.connecting.done()

    def give_up(self):
        self.peer.close()
        if self.plain is None:
            self.socket.close()


def run(kind, contexts, options, kinds_of_connections, shakes, turns):
    machine = Machine(kind, options)
    connections = []
    with counted(kind, machine, connections):
        for number, how in enumerate(kinds_of_connections):
            connections.append(Connection(machine, number, contexts, *how))
        for _ in range(shakes):
            machine.iterate()
            for each in connections:
                each.do_peer_pump()
        for way, steps in turns:
            for number, action in steps:
                connections[number % len(connections)].do(action)
            machine.run(way)
        for each in connections:
            each.habit = None
        machine.run_until(Connection.settle, connections)
        for each in connections:
            each.do_close()
        machine.run_until(Connection.is_over, connections)
        for each in connections:
            each.do_peer_drop()
        machine.run_until_quiet()
        for each in connections:
            each.give_up()
        machine.finish()


@pytest.mark.timeout(1800)
def test_no_byte_is_lost_over_tls(request, loop_kind, contexts):
    explore(request, program, 100, lambda program: run(loop_kind, contexts, *program))
