"""A proxy that misbehaves: delays, splits, joins, half-closes, and resets at random offsets.

A process of its own on `selectors`, so that nothing of a loop under test is in it. What becomes of
a connection follows from the seed and the number in its first eight bytes: see fate().
"""

import collections
import random
import selectors
import socket
import struct
import sys
import time

HIGH_WATER = 1 << 18        # bytes that wait here before reading pauses
RESET_SHARE = 0.3           # of the connections
LATEST_RESET = 60_000       # bytes
MANNERS = ("pass", "pass", "delay", "split", "join")
GRACE = 10.0                # seconds that ends may take to be seen after the last exchange
LONGEST_DELAY = 0.02        # seconds
TINY, TINY_BYTES = 7, 300   # a split sends pieces up to TINY bytes, so many bytes in all


def fate(seed, key):
    """(to the server?, offset) at which this connection is reset, or None."""
    rng = random.Random(f"{seed}/{key}")
    if rng.random() >= RESET_SHARE:
        return None
    return rng.random() < 0.5, rng.choice((0, rng.randint(0, 40), rng.randint(0, LATEST_RESET)))


class Way:
    """One direction: chunks that wait, each with the time when it may go and how."""

    def __init__(self, pair, source, sink, rng):
        self.pair, self.source, self.sink, self.rng = pair, source, sink, rng
        self.chunks = collections.deque()       # [due, bytes, largest piece]
        self.waiting = self.passed = 0          # bytes
        self.ended = self.shut = False
        self.reset_at = None

    def read(self):
        try:
            data = self.source.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            return self.pair.reset()
        now = time.monotonic()
        manner = self.rng.choice(MANNERS)
        if not data:
            self.ended = True
            self.chunks.append([now + self.rng.choice((0, LONGEST_DELAY)), b"", 1])
            return
        self.waiting += len(data)
        if manner == "split":
            head, data = data[:TINY_BYTES], data[TINY_BYTES:]
            self.chunks.append([now, head, TINY])
        if manner == "join" and self.chunks and self.chunks[-1][1]:
            last = self.chunks[-1]
            last[:] = now + LONGEST_DELAY, last[1] + data, 1 << 20
        elif data:
            late = manner in ("delay", "join")
            due = now + (self.rng.uniform(0, LONGEST_DELAY) if late else 0)
            self.chunks.append([due, data, 1 << 20])

    def write(self, now):
        """Sends what is due; the time to come back, or None."""
        while self.chunks and not self.pair.closed:
            due, data, piece = self.chunks[0]
            if due > now:
                return due
            if not data:
                self.chunks.popleft()
                self.shut = True
                return self.pair.half_close(self)
            piece = self.rng.randint(1, piece) if piece <= TINY else piece
            if self.reset_at is not None:
                piece = min(piece, self.reset_at - self.passed)
                if piece <= 0:
                    return self.pair.reset()
            try:
                sent = self.sink.send(data[:piece])
            except BlockingIOError:
                return now + 0.001
            except OSError:
                return self.pair.reset()
            self.passed += sent
            self.waiting -= sent
            self.chunks[0][1] = data[sent:]
            if sent == len(data):
                self.chunks.popleft()
        return None


class Pair:
    """A client's connection and ours to the server."""

    def __init__(self, proxy, client):
        self.proxy, self.client, self.server = proxy, client, None
        self.head, self.closed, self.ways = b"", False, ()
        _prepare(client)

    def read_head(self):
        """Until the number of the connection is here."""
        try:
            data = self.client.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            return self.reset()
        self.head += data
        if len(self.head) >= 8:
            self.begin()

    def begin(self):
        key = int.from_bytes(self.head[:8])
        self.server = socket.create_connection(self.proxy.target)
        _prepare(self.server)
        rng = random.Random(f"{self.proxy.seed}/{key}/manners")
        self.ways = (Way(self, self.client, self.server, rng),
                     Way(self, self.server, self.client, rng))
        if (end := fate(self.proxy.seed, key)) is not None:
            self.ways[0 if end[0] else 1].reset_at = end[1]
        self.ways[0].chunks.append([time.monotonic(), self.head, 1 << 20])
        self.ways[0].waiting = len(self.head)
        self.proxy.count("proxied")

    def half_close(self, way):
        try:
            way.sink.shutdown(socket.SHUT_WR)
        except OSError:
            return self.reset()
        if all(each.shut for each in self.ways):
            self.close()
        return None

    def reset(self):
        """Ends both connections with a RST."""
        self.proxy.count("reset")
        for sock in filter(None, (self.client, self.server)):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close()

    def close(self):
        if not self.closed:
            self.closed = True
            self.proxy.forget(self)
            for sock in filter(None, (self.client, self.server)):
                sock.close()


def _prepare(sock):
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)


class Proxy:
    """All pairs, and the selector."""

    def __init__(self, run, target, seed):
        self.run, self.target, self.seed = run, target, seed
        self.count = run.count
        self.pairs = set()
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.listener.setblocking(False)
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.listener, selectors.EVENT_READ)
        self.selector.register(sys.stdin, selectors.EVENT_READ)

    def forget(self, pair):
        self.pairs.discard(pair)
        for sock in filter(None, (pair.client, pair.server)):
            if sock in self.selector.get_map():
                self.selector.unregister(sock)

    def watch(self, sock, wanted, callback):
        """Registers for reading what is to be read, and only that."""
        known = sock in self.selector.get_map()
        if wanted and not known:
            self.selector.register(sock, selectors.EVENT_READ, callback)
        elif wanted and known:
            self.selector.modify(sock, selectors.EVENT_READ, callback)
        elif known:
            self.selector.unregister(sock)

    def serve(self):
        """Until the first process says something, or is gone."""
        due = end = None
        while end is None or (self.pairs and time.monotonic() < end):
            timeout = None if due is None else max(0, due - time.monotonic())
            for key, _ in self.selector.select(timeout):
                if key.fileobj is sys.stdin:
                    self.selector.unregister(sys.stdin)
                    end = time.monotonic() + GRACE
                elif key.fileobj is self.listener:
                    self.accept()
                else:
                    key.data()
            now = time.monotonic()
            times = [time_ for pair in list(self.pairs) if (time_ := self.go_on(pair, now))]
            due = min([*times, *([end] if end else [])], default=None)

    def accept(self):
        try:
            client, _ = self.listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        pair = Pair(self, client)
        self.pairs.add(pair)
        self.watch(client, True, pair.read_head)

    def go_on(self, pair, now):
        """Sends what is due of one pair; the time to come back, or None."""
        times = [time_ for way in pair.ways if not pair.closed and (time_ := way.write(now))]
        for way in pair.ways:
            if not pair.closed:
                self.watch(way.source, not way.ended and way.waiting < HIGH_WATER, way.read)
        return min(times, default=None) if not pair.closed else None


def proxy(run, link, target, seed):
    """The process: tells its address, ends when told."""
    server = Proxy(run, tuple(target), seed)
    link.tell(address=server.listener.getsockname())
    server.serve()
    if server.pairs:
        run.lost(len(server.pairs), f"the end of {len(server.pairs)} of the proxy's connections")
