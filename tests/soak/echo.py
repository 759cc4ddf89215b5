"""An echo server, and clients that verify what comes back."""

import asyncio

from .content import LONGEST, ContentFault, Stream


class Verified(asyncio.Protocol):
    """Counts its calls; `expect(stream, data)` compares. `closed` is done at connection_lost."""

    def __init__(self, run):
        self.run = run
        self.transport = None
        self.closed = asyncio.get_running_loop().create_future()
        self.error = None

    def connection_made(self, transport):
        self.transport = transport

    def expect(self, stream, data):
        self.run.count("bytes", len(data))
        try:
            stream.verify(data)
        except ContentFault as fault:
            self.run.fault(f"{type(self).__name__}: {fault}")
            self.transport.abort()

    def connection_lost(self, exc):
        self.error = exc
        if self.closed.done():
            self.run.fault(f"{type(self).__name__}: connection_lost() came twice")
        else:
            self.closed.set_result(None)


class EchoServer(Verified):
    """Sends back what comes, after its first eight bytes: the number of the stream."""

    def __init__(self, run, ends=None):
        super().__init__(run)
        self.head, self.stream, self.ends = b"", None, ends

    def connection_made(self, transport):
        super().connection_made(transport)
        if self.ends is not None:
            self.ends.add(self)

    def data_received(self, data):
        if self.stream is None:
            self.head += data
            if len(self.head) < 8:
                return
            self.stream = Stream(int.from_bytes(self.head[:8]))
            data = self.head[8:]
        if data:
            self.expect(self.stream, data)
            self.transport.write(data)

    def pause_writing(self):
        self.transport.pause_reading()

    def resume_writing(self):
        self.transport.resume_reading()

    def connection_lost(self, exc):
        super().connection_lost(exc)
        if self.ends is not None:
            self.ends.discard(self)


class EchoClient(Verified):
    """`await ask(size)`: sends so many bytes and waits until they are back."""

    def __init__(self, run, key):
        super().__init__(run)
        self.key = key
        self.outgoing, self.incoming = Stream(key), Stream(key)
        self.answer = None

    def connection_made(self, transport):
        super().connection_made(transport)
        self.run.count("connections")
        transport.write(self.key.to_bytes(8))

    async def ask(self, size):
        if self.closed.done():
            return
        self.answer = asyncio.get_running_loop().create_future()
        while size:
            piece = min(size, LONGEST)
            self.transport.write(self.outgoing.take(piece))
            size -= piece
        await self.answer
        self.run.count("messages")

    def data_received(self, data):
        self.expect(self.incoming, data)
        if self.incoming.position >= self.outgoing.position and not self.answer.done():
            self.answer.set_result(None)

    def connection_lost(self, exc):
        super().connection_lost(exc)
        missing = self.outgoing.position - self.incoming.position
        if missing:
            self.run.lost(missing, f"EchoClient {self.key}: {missing} bytes, then {exc!r}")
        if self.answer is not None and not self.answer.done():
            self.answer.set_result(None)


class Flood(EchoClient):
    """Keeps `depth` bytes on their way as long as the time of its run lasts; one piece at least."""

    def __init__(self, run, key, depth, piece):
        super().__init__(run, key)
        self.depth, self.piece = depth, piece

    def connection_made(self, transport):
        super().connection_made(transport)
        self.write()
        self.fill()

    def write(self):
        self.transport.write(self.outgoing.take(self.piece))
        self.run.count("messages")

    def fill(self):
        while (self.outgoing.position - self.incoming.position <= self.depth - self.piece
               and self.run.left() > 0):
            self.write()

    def data_received(self, data):
        self.expect(self.incoming, data)
        self.fill()
        if self.outgoing.position == self.incoming.position:
            self.transport.close()
