"""A stream transport, its peer, and what is expected of both.

Owner: the Machine has the loop; a Connection has a socket pair, the transport on one end and the
peer, plain system calls on the other. Every verb of a program is a method `do_<verb>`.
"""

import asyncio
import errno
import socket

from helpers import make_pair, reset
from machine import Planned, Stream

PEER_ERRORS = (errno.ECONNRESET, errno.EPIPE)
CALLBACKS = ("data_received", "eof_received", "pause_writing", "resume_writing",
             "connection_made", "connection_lost", "get_buffer")


class Watching(asyncio.BaseProtocol):
    """Reports every callback to its connection."""

    def __init__(self, connection):
        self.connection = connection

    def connection_made(self, transport):
        self.connection.made(transport)

    def connection_lost(self, exc):
        self.connection.lost(self, exc)

    def eof_received(self):
        return self.connection.ended(self)

    def pause_writing(self):
        self.connection.told_to_pause(self)

    def resume_writing(self):
        self.connection.told_to_resume(self)


class Plain(Watching, asyncio.Protocol):
    def data_received(self, data):
        self.connection.received(self, data)


class Buffered(Watching, asyncio.BufferedProtocol):
    """Offers buffers of a few sizes in turn, tiny ones among them."""

    sizes = (3, 64, 1, 100_000)

    def __init__(self, connection):
        super().__init__(connection)
        self.turn = 0

    def get_buffer(self, sizehint):
        self.connection.asked_for_buffer(self)
        self.turn += 1
        self.buffer = bytearray(self.sizes[self.turn % len(self.sizes)])
        return self.buffer

    def buffer_updated(self, nbytes):
        self.connection.received(self, self.buffer[:nbytes], checked=True)


class Connection:
    def __init__(self, machine, number, family, small, protocol, keep_open):
        self.machine = machine
        self.loop = machine.loop
        self.family = family
        self.keep_open = keep_open          # what eof_received() returns
        self.input, self.output = Stream(2 * number), Stream(2 * number + 1)
        self.socket, self.peer = make_pair(family, small=small)
        self.peer.setblocking(False)
        self.transport = None
        self.is_made = self.is_lost = False
        self.eofs = 0
        self.eof_again = False              # may be told once more
        self.writing_paused = self.offering = False
        self.eof_written = False
        self.closed_here = self.aborted = False
        self.fatal = []                     # what callbacks raised and the connection died of
        self.may_lose_output = self.may_lose_input = False
        self.peer_shut = self.peer_closed = self.peer_saw_end = False
        self.reactions = {name: [] for name in CALLBACKS}
        self.habit = None
        self.tasks = []
        self.kept = []
        self.reader = self.writer = None
        self.protocol = self.new_protocol(protocol)
        self.connecting = self.loop.create_task(self.connect())

    def __repr__(self):
        facts = [name for name, fact in vars(self).items() if fact is True]
        return (f"<{self.transport!r} input {self.input.got}/{self.input.sent} output "
                f"{self.output.got}/{self.output.sent} {self.eofs} eofs {' '.join(facts)}>")

    def new_protocol(self, kind):
        if kind == "reader":
            return self.new_reader_protocol()
        return {"plain": Plain, "buffered": Buffered}[kind](self)

    def new_reader_protocol(self):
        """asyncio's own, unchanged but for reports out of its callbacks."""
        reader = asyncio.StreamReader(1000, loop=self.loop)
        self.kept.append(reader)
        protocol = asyncio.StreamReaderProtocol(reader, loop=self.loop)

        def reporting(name, report):
            original = getattr(protocol, name)

            def call(*arguments):
                result = original(*arguments)
                report(protocol, *arguments)
                return result

            setattr(protocol, name, call)

        reporting("connection_lost", self.lost)
        reporting("eof_received", self.ended)
        reporting("pause_writing", self.told_to_pause)
        reporting("resume_writing", self.told_to_resume)
        original = protocol.connection_made

        def made(transport):
            original(transport)
            self.made(transport)

        protocol.connection_made = made
        return protocol

    async def connect(self):
        try:
            await self.loop.create_connection(lambda: self.protocol, sock=self.socket)
        except OSError as exc:
            assert self.peer_closed, exc

    # What the transport reports

    def expect(self, condition, message):
        if not condition:
            self.machine.fail(f"connection {self.input.content[:4].hex()}: {message}")

    def called(self, protocol, name):
        self.machine.activity += 1
        self.expect(protocol is self.protocol, f"{name} of a protocol that was replaced")
        self.expect(self.is_made, f"{name} before connection_made")
        self.expect(not self.is_lost, f"{name} after connection_lost")

    def react(self, name, fatal=False):
        if self.reactions[name]:
            action = self.reactions[name].pop(0)
            if action == ("raise",):
                exc = Planned(name)
                self.machine.raised.append(exc)
                if fatal:
                    self.fatal.append(exc)
                    self.may_lose_output = self.may_lose_input = True
                raise exc
            if action == ("interrupt",):
                if name == "eof_received":
                    self.eof_again = True
                raise KeyboardInterrupt
            self.do(action)

    def made(self, transport):
        self.machine.activity += 1
        self.expect(not self.is_made, "connection_made twice")
        self.is_made = True
        self.transport = transport
        if isinstance(self.protocol, asyncio.StreamReaderProtocol):
            self.adopt_reader()
        self.react("connection_made")

    def adopt_reader(self):
        self.reader = self.protocol._stream_reader
        self.writer = asyncio.StreamWriter(self.transport, self.protocol, self.reader, self.loop)
        self.kept.append(self.writer)       # it closes the transport when it is deleted

    def may_deliver(self, name):
        self.expect(self.transport.is_reading(), f"{name} while not reading")
        self.expect(not self.eofs or (name == "get_buffer" and self.eof_again),
                    f"{name} after eof_received")

    def asked_for_buffer(self, protocol):
        self.called(protocol, "get_buffer")
        self.may_deliver("get_buffer")
        self.offering = True
        try:
            self.react("get_buffer", fatal=True)
        finally:
            self.offering = False

    def received(self, protocol, data, checked=False):
        self.called(protocol, "data_received")
        if not checked:
            self.may_deliver("data_received")
        self.expect(len(data), "data_received without data")
        self.check_input(data)
        if self.habit == "stutter":
            self.do_pause()
            self.loop.call_soon(self.do_resume)
        elif self.habit == "echo":
            self.do_write(len(data), "bytes")
        self.react("data_received", fatal=True)

    def check_input(self, data):
        try:
            self.input.check(data)
        except AssertionError as exc:
            self.machine.fail(f"input: {exc}")

    def ended(self, protocol):
        self.called(protocol, "eof_received")
        # asyncio asks the socket even if get_buffer() has closed the connection.
        self.expect(self.transport.is_reading() or not self.machine.ours,
                    "eof_received while not reading")
        self.expect(not self.eofs or self.eof_again, "eof_received twice")
        self.eofs += 1
        self.eof_again = False
        self.expect(self.peer_shut or self.peer_closed, "eof_received and no end of the peer's")
        self.swallow()
        if not self.may_lose_input:
            self.expect(self.input.got == self.input.sent,
                        f"eof_received after {self.input.got} of {self.input.sent} bytes")
        self.react("eof_received", fatal=True)
        if not self.keep_open and not isinstance(protocol, asyncio.StreamReaderProtocol):
            self.closing_here()
        return self.keep_open

    def told_to_pause(self, protocol):
        self.called(protocol, "pause_writing")
        self.expect(not self.writing_paused, "pause_writing twice")
        self.writing_paused = True
        size, (_, high) = (self.transport.get_write_buffer_size(),
                           self.transport.get_write_buffer_limits())
        # To ask is to try again (on ours), and the kernel may take what it just refused.
        refused = self.machine.ours and self.output.sent - self.output.got >= 4096
        self.expect(size > high or refused, f"pause_writing at {size} bytes, high water {high}")
        self.react("pause_writing")

    def told_to_resume(self, protocol):
        self.called(protocol, "resume_writing")
        self.expect(self.writing_paused, "resume_writing without pause_writing")
        self.writing_paused = False
        size, (low, _) = (self.transport.get_write_buffer_size(),
                          self.transport.get_write_buffer_limits())
        self.expect(size <= low, f"resume_writing at {size} bytes, low water {low}")
        self.react("resume_writing")

    def lost(self, protocol, exc):
        self.called(protocol, "connection_lost")
        self.is_lost = True
        if self.reader is not None:
            self.swallow()
        if exc is None:
            self.expect(self.closed_here or self.aborted, "connection_lost(None) unasked")
        elif isinstance(exc, OSError):
            self.expect(self.peer_closed and exc.errno in PEER_ERRORS,
                        f"connection_lost({exc!r})")
        else:
            self.expect(exc in self.fatal, f"connection_lost({exc!r})")
        self.react("connection_lost")

    # What the program does on this side

    def do(self, action):
        verb, *arguments = action
        getattr(self, "do_" + verb)(*arguments)

    def dropped(self):
        """Whether a write goes nowhere: asyncio counts them, uvloop drops after close()."""
        return getattr(self.transport, "_conn_lost", self.transport.is_closing())

    def do_when(self, callback, action):
        self.reactions[callback].append(action)

    def do_write(self, size, kind):
        if self.transport is None or self.eof_written:
            return
        if self.is_lost and not self.machine.ours:
            return      # AttributeError of asyncio's if close() had to flush
        dropped = self.dropped()
        data = self.output.content[:size] if dropped else self.output.next(size)
        if self.peer_closed:
            self.may_lose_input = True
        if kind == "bytes":
            self.transport.write(data)
            return
        data = bytearray(data)
        self.transport.write(data if kind == "bytearray" else memoryview(data))
        if self.machine.ours or not self.transport.get_write_buffer_size():
            data[:] = bytes(len(data))

    def do_writelines(self, sizes, times):
        if self.transport is None or self.eof_written or self.dropped():
            return
        if self.transport.is_closing() and not self.machine.ours:
            return      # gh-136234
        if self.peer_closed:
            self.may_lose_input = True
        self.transport.writelines([self.output.next(size) for size in sizes * times])

    def do_pause(self):
        if self.transport is not None:
            self.eof_again = self.eofs > 0      # asyncio's resume_reading() finds the end again
            self.transport.pause_reading()

    def do_resume(self):
        if self.transport is not None:
            self.transport.resume_reading()

    def do_write_eof(self):
        if self.transport is None:
            return
        if not self.transport.is_closing():
            self.eof_written = True
        try:
            self.transport.write_eof()
        except OSError:
            # asyncio's comes out of shutdown(2) when the peer has reset the connection.
            assert not self.machine.ours and self.peer_closed

    def closing_here(self):
        self.closed_here = True
        self.may_lose_input = True
        if self.input.got < self.input.sent:
            self.may_lose_output = True     # the kernel resets a connection with unread data

    def do_close(self):
        if self.transport is not None:
            self.closing_here()
            self.transport.close()

    def do_abort(self):
        if self.transport is not None:
            self.aborted = self.may_lose_output = self.may_lose_input = True
            self.transport.abort()

    def do_limits(self, high, low):
        if self.transport is not None:
            self.transport.set_write_buffer_limits(high, low)

    def do_size(self):
        if self.transport is not None:
            size = self.transport.get_write_buffer_size()
            # The ring tells of a send in flight, of at most 256 KiB, when all of it is taken.
            in_flight = 1 << 18 if self.machine.kind == "io_uring" else 0
            self.expect(0 <= size <= self.output.sent - self.output.got + in_flight,
                        f"{size} bytes buffered")
            if self.machine.ours and not self.writing_paused:
                high = self.transport.get_write_buffer_limits()[1]
                self.expect(size <= high, f"not paused at {size} bytes, high water {high}")

    def do_switch(self, kind):
        """Another protocol from now on."""
        if self.transport is None or self.is_lost or self.offering:
            return      # a buffer that was asked for belongs to the protocol that gave it
        self.swallow()
        self.reader = self.writer = None
        self.protocol = self.new_protocol(kind)
        if kind == "reader":
            self.protocol._transport = self.transport
            self.protocol._stream_reader.set_transport(self.transport)
            self.adopt_reader()
            if self.eofs:
                self.reader.feed_eof()
            if self.writing_paused:
                asyncio.streams.FlowControlMixin.pause_writing(self.protocol)
        self.transport.set_protocol(self.protocol)

    def swallow(self):
        """Take what waits in the StreamReader, if there is one."""
        if self.reader is not None and self.reader._buffer:
            data = bytes(self.reader._buffer)
            self.reader._buffer.clear()
            self.check_input(data)

    def do_read(self, size):
        if self.reader is not None and self.reader._waiter is None:
            self.tasks.append(self.loop.create_task(self.read(self.reader, size)))

    async def read(self, reader, size):
        try:
            data = await reader.read(size)
        except (OSError, Planned, RuntimeError):    # the connection's end; two that read
            return
        self.machine.activity += 1
        self.check_input(data)

    def do_drain(self):
        if self.writer is not None:
            self.tasks.append(self.loop.create_task(self.drain(self.writer)))

    async def drain(self, writer):
        try:
            await writer.drain()
        except (OSError, Planned):
            pass
        self.machine.activity += 1

    def do_habit(self, habit):
        """What every data_received() does from now on."""
        self.habit = habit

    def do_cancel(self, which):
        waiting = [task for task in self.tasks if not task.done()]
        if waiting:
            waiting[which % len(waiting)].cancel()

    def do_raise(self):
        """Only in a callback (react)."""

    do_interrupt = do_raise

    # What the program does on the peer's side

    def do_peer_send(self, size):
        if self.peer_shut or self.peer_closed:
            return
        start = self.input.sent
        data = self.input.content[start:start + size]
        try:
            self.input.sent += self.peer.send(data)
        except BlockingIOError:
            pass
        except OSError as exc:
            self.peer_failed(exc)
        if self.closed_here:
            self.may_lose_output = True

    def do_peer_burst(self, size, times):
        for _ in range(times):
            self.do_peer_send(size)

    def peer_failed(self, exc):
        self.peer_saw_end = True
        self.expect(exc.errno in PEER_ERRORS, f"the peer's {exc!r}")
        self.expect(self.is_lost or self.transport is not None and self.transport.is_closing(),
                    f"the peer sees {exc!r} of an open connection")

    def do_peer_recv(self, size):
        """Returns whether there may be more."""
        if self.peer_closed or self.peer_saw_end:
            return False
        try:
            data = self.peer.recv(size)
        except BlockingIOError:
            return False
        except OSError as exc:
            self.peer_failed(exc)
            return False
        if data:
            self.output.check(data)
            return True
        self.peer_saw_end = True
        self.expect(self.eof_written or self.closed_here or self.aborted or self.fatal,
                    "the peer sees the end of an open connection")
        if not self.may_lose_output:
            self.expect(self.output.got == self.output.sent,
                        f"the peer sees the end after {self.output.got} of "
                        f"{self.output.sent} bytes")
        return False

    def do_peer_shut(self):
        if not self.peer_shut and not self.peer_closed:
            self.peer_shut = True
            try:
                self.peer.shutdown(socket.SHUT_WR)
            except OSError as exc:
                assert exc.errno == errno.ENOTCONN

    def do_peer_close(self):
        if not self.peer_closed:
            self.peer_closed = self.may_lose_output = True
            if self.output.got < self.output.sent:
                self.may_lose_input = True
            self.peer.close()

    def do_peer_reset(self):
        if not self.peer_closed:
            self.peer_closed = self.may_lose_output = self.may_lose_input = True
            reset(self.peer)

    # The end

    def drain_peer(self):
        while self.do_peer_recv(1 << 20):
            self.machine.activity += 1

    def settle(self):
        """Whether all that was sent has come, both ways; helps on what waits for a reader."""
        if self.transport is None:
            return self.connecting.done()
        self.drain_peer()
        if self.is_lost:
            return True
        self.swallow()
        if self.reader is not None:
            self.reader._maybe_resume_transport()
        self.transport.resume_reading()
        if self.transport.is_closing() or (self.peer_closed and not self.eofs):
            return False        # the end is still to come
        if self.input.got < self.input.sent or (self.peer_shut and not self.eofs):
            return False
        return self.peer_closed or (
            self.output.got == self.output.sent and not self.writing_paused)

    def is_over(self):
        self.drain_peer()
        return self.transport is None or (self.is_lost and (self.peer_saw_end or self.peer_closed))

    def give_up(self):
        """After the last check, or instead of it."""
        self.peer.close()
        if self.transport is None:
            self.socket.close()
