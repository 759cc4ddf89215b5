"""One conversation over a connection, in nine manners of ending, verified at both ends.

The client says in its first bytes (HEAD) what is to happen: how many bytes go each way, and who
ends the connection, and how. What was sent before an orderly end must arrive whole; before an abort
or a reset, what arrives must be the beginning of it. connection_lost must come, once, to both.
"""

import asyncio
import socket
import struct

from .content import LONGEST, ContentFault, Stream

HEAD = struct.Struct("!QBII")       # key, manner, bytes to the server, bytes to the client
PAUSES, LONGEST_PAUSE = 0.05, 0.003 # the share of messages after which an end reads no more, s
LIMIT = 60.0                        # seconds until an exchange counts as hung

# Whole: all bytes of both directions arrive.
CLIENT_CLOSES, CLIENT_HALF_CLOSES, SERVER_CLOSES, SERVER_HALF_CLOSES = WHOLE = range(4)
# Cut: the one that ends the connection does it with output still waiting, or unread input.
CLIENT_ABORTS, CLIENT_RESETS, SERVER_ABORTS, SERVER_RESETS, NOTHING_SAID = CUT = range(4, 9)
OVER_TLS = (CLIENT_CLOSES, SERVER_CLOSES, *CUT)     # there, one side cannot end alone
NAMES = ("client closes", "client half-closes", "server closes", "server half-closes",
         "client aborts", "client resets", "server aborts", "server resets", "nothing said")


class End(asyncio.Protocol):
    """What both ends have in common: bytes are verified, calls counted."""

    def __init__(self, book):
        self.book, self.run = book, book.run
        self.transport = None
        self.key = self.manner = None
        self.incoming = self.outgoing = None        # Streams
        self.wanted = 0                             # bytes that are to come
        self.cut = False                            # what comes may end early
        self.made = self.lost = self.ended = False  # ended: eof_received was called

    def connection_made(self, transport):
        self.transport = transport
        if self.made:
            self.run.fault(f"{self}: connection_made() came twice")
        self.made = True
        self.book.opened(self)

    def begin(self, key, manner, wanted, streams):
        self.key, self.manner, self.wanted = key, manner, wanted
        self.incoming, self.outgoing = map(Stream, streams)
        self.cut = self.cut or manner in CUT or self.book.may_be_cut(key)

    def take(self, data):
        if self.lost or self.ended:
            self.run.fault(f"{self}: data came after the end")
        self.run.count("messages")
        self.run.count("bytes", len(data))
        try:
            self.incoming.verify(data)
        except ContentFault as fault:
            self.run.fault(f"{self}: {fault}")
            self.transport.abort()
        if self.incoming.position > self.wanted:
            self.run.fault(f"{self}: more came than was sent")
        if self.run.rng.random() < PAUSES and self.transport.is_reading():
            self.transport.pause_reading()
            asyncio.get_running_loop().call_later(
                self.run.rng.choice((0, LONGEST_PAUSE)), self.go_on)

    def go_on(self):
        if not self.lost and not self.transport.is_closing():
            self.transport.resume_reading()

    @property
    def complete(self):
        return self.incoming is not None and self.incoming.position == self.wanted

    def send(self, size):
        """Writes that much in pieces of random sizes."""
        while size:
            piece = min(size, self.run.rng.randint(1, LONGEST))
            self.transport.write(self.outgoing.take(piece))
            size -= piece

    def reset(self):
        """Ends the connection with a RST."""
        sock = self.transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def eof_received(self):
        if self.ended:
            self.run.fault(f"{self}: eof_received() came twice")
        self.ended = True
        return False

    def connection_lost(self, exc):
        if self.lost:
            self.run.fault(f"{self}: connection_lost() came twice")
        self.lost = True
        if not self.cut:
            if not self.complete:
                came = self.incoming.position if self.incoming else 0
                self.run.lost(self.wanted - came,
                              f"{self}: {came} of {self.wanted} bytes came, then {exc!r}")
            elif exc is not None:
                self.run.fault(f"{self}: connection_lost({exc!r})")
        self.book.closed(self)

    def __repr__(self):
        manner = "before its first bytes" if self.manner is None else NAMES[self.manner]
        return f"{type(self).__name__} {self.key} ({manner})"


class Server(End):
    """The end that was accepted; its first bytes say what to do."""

    early = b""

    def data_received(self, data):
        if self.incoming is None:
            self.early += data
            if len(self.early) < HEAD.size:
                return
            data = self.early[HEAD.size:]
            self.start(*HEAD.unpack_from(self.early))
        if data and not self.transport.is_closing():
            self.take(data)
        if self.complete:
            self.answer()

    def start(self, key, manner, wanted, size):
        self.begin(key, manner, wanted, (2 * key, 2 * key + 1))
        self.size = size
        if manner in (SERVER_ABORTS, SERVER_RESETS):
            self.send(size)
            self.transport.abort() if manner == SERVER_ABORTS else self.reset()
        elif manner == SERVER_HALF_CLOSES:
            self.send(size)
            self.transport.write_eof()

    def answer(self):
        """All of the client's bytes are here."""
        if self.manner == SERVER_CLOSES:
            self.send(self.size)
            self.transport.close()
        elif self.manner in (CLIENT_CLOSES, CLIENT_ABORTS, CLIENT_RESETS):
            self.send(self.size)

    def eof_received(self):
        super().eof_received()
        if self.manner == CLIENT_HALF_CLOSES:
            self.send(self.size)
            self.transport.close()
            return True
        return False

    def connection_lost(self, exc):
        if self.incoming is None:
            self.cut = True
        super().connection_lost(exc)


class Buffered:
    """Mixed into an end: the transport fills buffers of random sizes."""

    def get_buffer(self, sizehint):
        # A view: asyncio's TLS fills the rest of a bytearray through a copy (gh-156275).
        self.buffer = memoryview(bytearray(self.run.rng.choice((1000, 10_000, 100_000))))
        return self.buffer

    def buffer_updated(self, size):
        self.data_received(bytes(self.buffer[:size]))


class BufferedServer(Buffered, Server, asyncio.BufferedProtocol):
    pass


class Client(End):
    """The end that connects."""

    def __init__(self, book, key, manner, sizes):
        super().__init__(book)
        self.size, size = sizes
        self.begin(key, manner, size, (2 * key + 1, 2 * key))
        self.done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport):
        super().connection_made(transport)
        self.run.count("connections")
        manner = self.manner
        if manner == NOTHING_SAID:
            return transport.close()
        transport.write(HEAD.pack(self.key, manner, self.size, self.wanted))
        if manner == SERVER_HALF_CLOSES:
            return                      # the rest when the server has ended
        self.send(self.size)
        if manner == CLIENT_HALF_CLOSES:
            transport.write_eof()
        elif manner == CLIENT_ABORTS:
            transport.abort()

    def data_received(self, data):
        self.take(data)
        if self.manner == CLIENT_RESETS:
            self.reset()
        elif self.manner == CLIENT_CLOSES and self.complete:
            self.transport.close()

    def eof_received(self):
        super().eof_received()
        if self.manner == SERVER_HALF_CLOSES:
            self.send(self.size)
            self.transport.close()
            return True
        return False

    def connection_lost(self, exc):
        super().connection_lost(exc)
        if not self.done.done():
            self.done.set_result(None)


class BufferedClient(Buffered, Client, asyncio.BufferedProtocol):
    pass


class Book:
    """The ends that live, and what is known of both ends of each connection."""

    def __init__(self, run, may_be_cut=lambda key: False):
        self.run, self.may_be_cut = run, may_be_cut
        self.alive = set()

    def opened(self, end):
        self.alive.add(end)

    def closed(self, end):
        self.alive.discard(end)

    def server(self):
        return self.run.rng.choice((Server, BufferedServer))(self)

    async def talk(self, connect, manner, sizes):
        """One exchange: `await connect(factory)` opens the client's end."""
        kind = self.run.rng.choice((Client, BufferedClient))
        client = kind(self, self.run.new_key(), manner, sizes)
        if sizes[1] == 0 and manner in (CLIENT_CLOSES, CLIENT_RESETS):
            raise ValueError("nothing would tell the client to go on")
        try:
            async with asyncio.timeout(LIMIT):
                await connect(lambda: client)
                await client.done
        except TimeoutError:
            self.run.lost(1, f"the end of {client!r}: {client.transport!r}")
            if client.transport is not None:
                client.transport.abort()
        return client

    async def all_closed(self):
        """Waits until every end has heard of its end."""
        for _ in range(int(LIMIT / 0.05)):
            if not self.alive:
                return
            await asyncio.sleep(0.05)
        self.run.lost(len(self.alive), f"connection_lost() of {list(self.alive)[:5]}")
        for end in list(self.alive):
            end.transport.abort()
