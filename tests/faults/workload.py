"""Work for a loop under faults: connections of every kind that move data both ways.

Each connection sends a pattern of its own to a server that echoes it, and checks what comes back
by its position. A connection that fails has to say why, and what it got until then must be the
beginning of its pattern: nothing lost, repeated or swapped. All others have to be complete.
"""

import asyncio
import dataclasses
import os
import socket
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(__file__), os.pardir))      # as a script

from helpers import assert_same, pattern, until  # noqa: E402

BEGINNING = 7 * 3 * 20
STEPS = (1, 700, 70, 3000, 20_000, 11)      # sizes of writes, in turn


@dataclasses.dataclass
class Outcome:
    """What became of a run's connections."""

    connections: int = 0
    bytes: int = 0
    failed: list = dataclasses.field(default_factory=list)      # (connection, exception)
    errors: list = dataclasses.field(default_factory=list)      # OSErrors seen at either end

    def errnos(self):
        return [error.errno for error in self.errors]


def steps(data):
    """The data in pieces of different sizes."""
    start = turn = 0
    while start < len(data):
        size = STEPS[turn % len(STEPS)]
        yield data[start:start + size]
        start, turn = start + size, turn + 1


class Ended:
    """What the protocols of both ends have in common: they count, and note their errors."""

    def __init__(self, work):
        self.work = work
        self.ended = work.loop.create_future()

    def connection_made(self, transport):
        self.transport = transport
        self.work.made += 1

    def connection_lost(self, exc):
        self.work.lost += 1
        assert not self.ended.done(), "connection_lost() twice"
        self.work.note(exc)
        self.ended.set_result(exc)


class Echo(Ended, asyncio.Protocol):
    """Sends back what comes; holds the peer up while its own output does not leave."""

    def data_received(self, data):
        self.transport.write(data)

    def pause_writing(self):
        self.transport.pause_reading()

    def resume_writing(self):
        self.transport.resume_reading()


class BufferedEcho(Ended, asyncio.BufferedProtocol):
    def get_buffer(self, sizehint):
        self.buffer = bytearray(5000)
        return self.buffer

    def buffer_updated(self, count):
        self.transport.write(memoryview(self.buffer)[:count])


class Client(Ended, asyncio.Protocol):
    """Sends its pattern and collects what comes back.

    The beginning leaves in three small chunks at once, again and again, so that there is a SENDMSG
    for each fault to meet; the rest as fast as it can.
    """

    def __init__(self, work, seed, got):
        super().__init__(work)
        data = pattern(work.size, seed)
        self.small = [data[start:start + 7] for start in range(0, BEGINNING, 7)][::-1]
        self.rest = list(steps(data[BEGINNING:]))[::-1]
        self.got = got

    def connection_made(self, transport):
        super().connection_made(transport)
        self.paused = False
        self.go_on()

    def go_on(self):
        if self.small:
            for _ in range(3):
                self.transport.write(self.small.pop())
            return
        while self.rest and not self.paused and not self.transport.is_closing():
            self.transport.write(self.rest.pop())
            if len(self.rest) > 4:
                self.transport.writelines([self.rest.pop(), self.rest.pop()])

    def pause_writing(self):
        self.paused = True

    def resume_writing(self):
        self.paused = False
        self.go_on()

    def data_received(self, data):
        self.got += data
        if len(self.got) >= self.work.size:
            self.transport.close()
        elif not self.transport.is_closing():
            self.go_on()


class BufferedClient(Client, asyncio.BufferedProtocol):
    def get_buffer(self, sizehint):
        self.buffer = bytearray(3000)
        return self.buffer

    def buffer_updated(self, count):
        self.data_received(memoryview(self.buffer)[:count])


def datagram_pair():
    """Two connected sockets with names: asyncio cannot send to a peer without one."""
    pair = [socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(2)]
    for each in pair:
        each.bind("")           # Linux chooses an abstract name
    for each, other in (pair, pair[::-1]):
        each.connect(other.getsockname())
    return pair


class DatagramEnd(Ended, asyncio.DatagramProtocol):
    """One end of a pair of datagram sockets. Either end is told of what may be lost."""

    def __init__(self, work, told):
        super().__init__(work)
        self.told = told            # a queue: datagrams that came to the client, errors of both

    def send(self, data):
        try:
            self.transport.sendto(data)
        except OSError as exc:
            self.error_received(exc)

    def error_received(self, exc):
        self.work.note(exc)
        self.told.put_nowait(exc)

    def connection_lost(self, exc):
        super().connection_lost(exc)
        self.told.put_nowait(exc or EOFError("the endpoint was closed"))


class DatagramEcho(DatagramEnd):
    def datagram_received(self, data, address):
        self.send(data)


class DatagramClient(DatagramEnd):
    def datagram_received(self, data, address):
        self.told.put_nowait(data)


class Workload:
    """`await Workload(loop).run()` gives an Outcome. TLS only with (server's, client's) contexts.

    Raises AssertionError for a byte that is not what was sent, or a connection_lost() that is
    missing; what ends a connection before its time is in the Outcome.
    """

    def __init__(self, loop, *, size=40_000, each=2, contexts=None):
        self.loop = loop
        self.size = size
        self.each = each
        self.contexts = contexts
        self.made = self.lost = 0
        self.outcome = Outcome()
        self.server_tasks = set()

    def note(self, exc):
        if isinstance(exc, OSError):
            self.outcome.errors.append(exc)

    async def run(self):
        with tempfile.TemporaryDirectory() as folder:
            servers = await self.start_servers(folder)
            clients = [self.by_streams, self.by_protocol, self.by_buffered_protocol, self.by_sock,
                       self.by_datagrams]
            clients += [self.by_tls] if self.contexts else []
            try:
                await asyncio.gather(*(self.attempt(client, seed) for client in clients
                                       for seed in range(self.each)))
            finally:
                for server in servers:
                    server.close()
                self.accepting.cancel()
                self.listener.close()
        await until(lambda: self.made == self.lost and not self.server_tasks)
        return self.outcome

    async def attempt(self, client, seed):
        got = bytearray()
        self.outcome.connections += 1
        try:
            await client(seed, got)
        except (OSError, EOFError) as exc:
            self.note(exc)
            self.outcome.failed.append((f"{client.__name__} {seed}", exc))
        else:
            assert len(got) == self.size, (client, len(got))
        assert_same(got, pattern(self.size, seed)[:len(got)])
        self.outcome.bytes += len(got)

    async def both(self, *coroutines):
        """Run them at once; the first exception ends the others."""
        tasks = [self.loop.create_task(coroutine) for coroutine in coroutines]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            for task in tasks:
                self.note(None if task.cancelled() else task.exception())

    # --- servers -----------------------------------------------------------------------------

    async def start_servers(self, folder):
        self.path = os.path.join(folder, "socket")
        loop = self.loop
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.setblocking(False)
        self.accepting = loop.create_task(self.accept())
        servers = [
            await asyncio.start_server(self.serve_streams, "127.0.0.1", 0),
            await loop.create_server(lambda: Echo(self), "127.0.0.1", 0),
            await loop.create_unix_server(lambda: BufferedEcho(self), self.path)]
        if self.contexts:
            servers.append(await asyncio.start_server(
                self.serve_streams, "127.0.0.1", 0, ssl=self.contexts[0]))
        self.addresses = [server.sockets[0].getsockname() for server in servers]
        return servers

    def remember(self, task):
        self.server_tasks.add(task)
        task.add_done_callback(self.server_tasks.discard)

    async def serve_streams(self, reader, writer):
        self.remember(asyncio.current_task())
        try:
            while data := await reader.read(30_000):
                writer.write(data)
                await writer.drain()
            writer.close()
            await writer.wait_closed()
        except OSError as exc:
            self.note(exc)
            writer.close()

    async def accept(self):
        while True:
            try:
                sock, _ = await self.loop.sock_accept(self.listener)
            except OSError as exc:      # the connection stays in the backlog
                self.note(exc)
                await asyncio.sleep(0.01)
                continue
            self.remember(self.loop.create_task(self.serve_sock(sock)))

    async def serve_sock(self, sock):
        buffer = bytearray(9000)
        with sock:
            try:
                while size := await self.loop.sock_recv_into(sock, buffer):
                    await self.loop.sock_sendall(sock, memoryview(buffer)[:size])
            except OSError as exc:
                self.note(exc)

    # --- clients -----------------------------------------------------------------------------

    async def by_streams(self, seed, got, address=None, **options):
        reader, writer = await asyncio.open_connection(*address or self.addresses[0], **options)

        async def send():
            for data in steps(pattern(self.size, seed)):
                writer.write(data)
                await writer.drain()
            if writer.can_write_eof():
                writer.write_eof()

        async def receive():
            while len(got) < self.size:
                data = await reader.read(25_000)
                if not data:
                    raise EOFError(f"ended after {len(got)} bytes")
                got.extend(data)

        try:
            await self.both(send(), receive())
        finally:
            writer.close()
            try:
                await writer.wait_closed()
            except OSError as exc:
                self.note(exc)

    async def by_tls(self, seed, got):
        await self.by_streams(seed, got, self.addresses[3], ssl=self.contexts[1],
                              server_hostname="localhost")

    async def by_protocol(self, seed, got):
        _, protocol = await self.loop.create_connection(
            lambda: Client(self, seed, got), *self.addresses[1])
        await self.ended(protocol)

    async def by_buffered_protocol(self, seed, got):
        _, protocol = await self.loop.create_unix_connection(
            lambda: BufferedClient(self, seed, got), self.path)
        await self.ended(protocol)

    async def ended(self, protocol):
        exc = await protocol.ended
        if exc is not None:
            raise exc
        if len(protocol.got) < self.size:
            raise EOFError(f"ended after {len(protocol.got)} bytes")

    async def by_datagrams(self, seed, got):
        """One after the other; again only when an error was told."""
        told = asyncio.Queue()
        made, protocols = [*datagram_pair()], []
        try:
            for place, end in enumerate((DatagramClient, DatagramEcho)):
                made[place], protocol = await self.loop.create_datagram_endpoint(
                    lambda end=end: end(self, told), sock=made[place])
                protocols.append(protocol)
            client, echo = protocols
            for number, data in enumerate(steps(pattern(self.size, seed))):
                data = number.to_bytes(4, "big") + data
                client.send(data)
                while (answer := await told.get()) != data:
                    if isinstance(answer, bytes):       # an older one that was sent twice
                        continue
                    if client.ended.done() or echo.ended.done():
                        raise answer
                    client.send(data)
                got.extend(data[4:])
        finally:
            for each in made:
                each.close()

    async def by_sock(self, seed, got):
        loop = self.loop

        async def send():
            for data in steps(pattern(self.size, seed)):
                await loop.sock_sendall(sock, data)

        async def receive():
            while len(got) < self.size:
                data = await loop.sock_recv(sock, 17_000)
                if not data:
                    raise EOFError(f"ended after {len(got)} bytes")
                got.extend(data)

        with socket.socket() as sock:
            sock.setblocking(False)
            await loop.sock_connect(sock, self.listener.getsockname())
            await self.both(send(), receive())


# --- as a script: workload.py KIND waits for a line, works, and prints what became of it ----------


def attempt(kind):
    """"done", "ended" (some connections, with an OSError), or "raised ..." out of the loop."""
    import uringloop

    contexts = []
    loop = uringloop.new_event_loop(
        uringloop.LoopOptions(backend="auto" if kind == "io_uring" else kind))
    try:
        loop.set_exception_handler(lambda loop, context: contexts.append(context))
        outcome = loop.run_until_complete(asyncio.wait_for(Workload(loop).run(), 20))
    finally:
        loop.close()
    strange = [repr(context) for context in contexts
               if not isinstance(context.get("exception"), OSError)]
    assert not strange, strange
    return "ended" if outcome.failed or contexts else "done", outcome.connections, outcome.bytes


def main(kind):
    import gc
    import json
    import warnings

    from helpers import open_fds

    warnings.simplefilter("ignore")
    asyncio.constants.ACCEPT_RETRY_DELAY = 0.01
    before = open_fds()
    print("ready", flush=True)
    sys.stdin.readline()
    connections = received = 0
    try:
        result, connections, received = attempt(kind)
    except OSError as exc:
        result = f"raised {exc!r}"
    for _ in range(3):
        gc.collect()
    left = [name for fd, name in open_fds().items() if fd not in before]
    print(json.dumps({"result": result, "connections": connections, "bytes": received,
                      "leaked": left}))


if __name__ == "__main__":
    main(sys.argv[1])
