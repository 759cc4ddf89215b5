"""What the tests share: loops by kind, socket pairs, pattern bytes, recording protocols."""

import array
import asyncio
import contextlib
import functools
import os
import pathlib
import socket
import ssl
import struct
import subprocess
import sys
import time

import figures
import pytest

LOOP_KINDS = ("asyncio", "uvloop", "io_uring", "epoll")
# AddressSanitizer keeps what is freed for a while, so that memory only seems to grow.
WITH_ASAN = "ASAN_OPTIONS" in os.environ
LIMIT = 30.0  # seconds a condition may take; a guard against hangs, never a measurement

PY312 = sys.version_info >= (3, 12)
PY313 = sys.version_info >= (3, 13)


# Loops


def why_not(kind):
    """The reason why loops of this kind cannot be tested here, or None."""
    if kind == "uvloop":
        try:
            import uvloop  # noqa: F401
        except ImportError as error:
            return f"uvloop is not installed: {error}"
    if kind == "io_uring":
        if os.environ.get("URINGLOOP_BACKEND") == "epoll":
            return "URINGLOOP_BACKEND=epoll"
        import uringloop

        if not uringloop.available():
            return "io_uring is not available on this machine"
    return None


def make_loop(kind, **options):
    """A loop of this kind; options are LoopOptions of ours and nothing to the others."""
    if kind == "asyncio":
        return asyncio.SelectorEventLoop()
    if kind == "uvloop":
        import uvloop

        return uvloop.new_event_loop()
    import uringloop

    loop = uringloop.new_event_loop(uringloop.LoopOptions(backend=kind, **options))
    assert loop.backend == kind, f"{loop.backend} instead of {kind}: {loop.backend_reason}"
    return loop


def search_path():
    """PYTHONPATH for children: the tests, the build that is being tested, and what else is here."""
    import uringloop

    here = pathlib.Path(__file__).resolve().parent
    tested = pathlib.Path(uringloop.__file__).resolve().parent.parent
    return os.pathsep.join([os.fspath(here), os.fspath(tested), *filter(None, sys.path)])


def run_child(kind, source, *, limit=LIMIT, flags=(), environment=(), **options):
    """Runs Python `source` in a new process, with `loop` made there; a CompletedProcess."""
    environment = {**os.environ, "PYTHONPATH": search_path(), **dict(environment)}
    head = f"import asyncio, helpers\nkind = {kind!r}\nloop = helpers.make_loop(kind)\n"
    # -P: not the package in the current folder, but the build that is being tested.
    command = [sys.executable, "-P", *flags, "-c", head + source]
    return subprocess.run(
        command, env=environment, timeout=limit, capture_output=True, text=True, **options
    )


def in_child(function):
    """Fork, run the function in the child, return its exit status; exceptions give status 1."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            function()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def repeats(count):
    """For what a test repeats: a range of `count`, times URINGLOOP_REPEAT in a long run."""
    return range(figures.repeats(count))


# Descriptors


def open_fds():
    """{descriptor: what it is} of this process."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the directory's own descriptor is gone by now
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return found


# Bytes


@functools.lru_cache(maxsize=16)
def pattern(size, seed=0):
    """`size` bytes of counting 32-bit words: a loss, a repetition or a swap shows."""
    start = (seed * 0x01000193) & 0x3FFFFFFF
    words = array.array("I", range(start, start + size // 4 + 1))
    words.byteswap()
    return words.tobytes()[:size]


def assert_same(got, expected):
    """Compares long bytes and names the first difference (a diff of megabytes is useless)."""
    if got == expected:
        return
    got, expected = bytes(got), bytes(expected)
    common = min(len(got), len(expected))
    low, high = 0, common
    while low < high:  # the longest equal prefix
        middle = (low + high + 1) // 2
        if got[:middle] == expected[:middle]:
            low = middle
        else:
            high = middle - 1
    if figures.ours:
        figures.note(figures.LOST, max(len(got), len(expected)) - low)
    raise AssertionError(
        f"{len(got)} bytes differ from {len(expected)} expected at offset {low}: "
        f"{got[low:low + 16].hex()} is not {expected[low:low + 16].hex()}"
    )


# Sockets


def _shrink(sock):
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16384)


def make_pair(family="tcp", *, small=False):
    """Two connected stream sockets: (non-blocking one for a loop, blocking one for the peer)."""
    if family == "unix":
        ours, peer = socket.socketpair()
        if small:
            _shrink(ours), _shrink(peer)
    else:
        with socket.socket() as listener, contextlib.ExitStack() as undo:
            if small:
                _shrink(listener)
            listener.bind(("127.0.0.1", 0))
            listener.listen(1)
            ours = undo.enter_context(socket.socket())
            if small:
                _shrink(ours)
            ours.connect(listener.getsockname())
            peer, _ = listener.accept()
            undo.pop_all()
    ours.setblocking(False)
    peer.settimeout(LIMIT)
    return ours, peer


@contextlib.contextmanager
def socket_pair(family="tcp", *, small=False):
    ours, peer = make_pair(family, small=small)
    try:
        yield ours, peer
    finally:
        ours.close()
        peer.close()


def reuse(number, family="unix"):
    """A pair, both blocking, whose first socket has the number of one that was just closed."""
    ours, peer = make_pair(family)
    ours.settimeout(LIMIT)
    if peer.fileno() == number:
        return peer, ours
    if ours.fileno() != number:
        with ours:
            os.dup2(ours.fileno(), number, inheritable=False)
        ours = socket.socket(fileno=number)
        ours.settimeout(LIMIT)
    return ours, peer


def reset(sock):
    """Closes a TCP socket with a RST instead of a FIN."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def read_exactly(sock, size):
    """Reads `size` bytes (fewer at the end of the stream); blocks, for threads."""
    chunks = []
    while size and (chunk := sock.recv(min(size, 1 << 18))):
        chunks.append(chunk)
        size -= len(chunk)
    return b"".join(chunks)


def read_to_end(sock):
    """Reads up to the FIN; blocks, for threads."""
    return read_exactly(sock, 1 << 62)


def has_ended(sock):
    """True when the peer's stream ended without more data, whether by FIN or by RST."""
    try:
        return sock.recv(1) == b""
    except (ConnectionResetError, BrokenPipeError):
        return True


# TLS


def make_certificate(folder):
    """(certificate file, key file) of 'localhost', made by the openssl command."""
    certificate, key = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    command += ["-keyout", os.fspath(key), "-out", os.fspath(certificate)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return os.fspath(certificate), os.fspath(key)


def make_contexts(certificate):
    """(server's, client's) SSL contexts."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(*certificate)
    return server, ssl.create_default_context(cafile=certificate[0])


# Waiting


async def until(predicate, limit=LIMIT):
    """Polls on the running loop until the predicate is true."""
    deadline = time.monotonic() + limit
    while not predicate():
        if time.monotonic() > deadline:
            raise AssertionError(f"not true within {limit} s: {predicate}")
        await asyncio.sleep(0.001)


async def ticks(count=5):
    """Lets the running loop go round a few times."""
    for _ in range(count):
        await asyncio.sleep(0)


def run_once(loop):
    """One iteration of a loop that is not running."""
    loop.call_soon(loop.stop)
    loop.run_forever()


in_thread = asyncio.to_thread


async def end_of(transport, protocol):
    """Abort a connection that has not ended, and wait for its end."""
    if not protocol.lost_with:
        transport.abort()
    await until(lambda: protocol.lost_with)


# Protocols


class Calls(asyncio.BaseProtocol):
    """The calls that protocols of all kinds get, in order."""

    def __init__(self):
        self.transport = None
        self.calls = []  # names of the protocol methods called, in order
        self.lost_with = []  # the arguments of connection_lost

    def connection_made(self, transport):
        self.transport = transport
        self.calls.append("connection_made")

    def connection_lost(self, exc):
        self.calls.append("connection_lost")
        self.lost_with.append(exc)

    def pause_writing(self):
        self.calls.append("pause_writing")

    def resume_writing(self):
        self.calls.append("resume_writing")


class Lifetime(Calls):
    """What Recorder and BufferedRecorder have in common."""

    keep_open_after_eof = False

    def __init__(self):
        super().__init__()
        self.data = bytearray()

    def eof_received(self):
        self.calls.append("eof_received")
        return self.keep_open_after_eof

    async def received(self, size):
        await until(lambda: len(self.data) >= size)
        return bytes(self.data)

    async def lost(self):
        await until(lambda: self.lost_with)
        return self.lost_with[0]


class Recorder(Lifetime, asyncio.Protocol):
    """Keeps each bytes object of data_received in `chunks`, and all of them in `data`."""

    def __init__(self):
        super().__init__()
        self.chunks = []

    def data_received(self, data):
        if self.calls[-1] != "data_received":
            self.calls.append("data_received")
        self.chunks.append(data)
        self.data += data


class BufferedRecorder(Lifetime, asyncio.BufferedProtocol):
    """Offers buffers of the given sizes in turn."""

    def __init__(self, sizes=(65536,)):
        super().__init__()
        self.sizes = list(sizes)
        self.turn = 0
        self.buffer = None

    def get_buffer(self, sizehint):
        self.buffer = bytearray(self.sizes[self.turn % len(self.sizes)])
        self.turn += 1
        return self.buffer

    def buffer_updated(self, nbytes):
        if self.calls[-1] != "buffer_updated":
            self.calls.append("buffer_updated")
        self.data += self.buffer[:nbytes]


class Echo(Recorder):
    def data_received(self, data):
        super().data_received(data)
        self.transport.write(data)


def end(transport):
    """Aborts a transport whose protocol was not told of the end yet."""
    protocol = transport.get_protocol()  # asyncio forgets it after connection_lost
    if protocol is not None and not getattr(protocol, "lost_with", None):
        transport.abort()


@contextlib.asynccontextmanager
async def connected(factory=Recorder, family="tcp", *, small=False):
    """A transport on the running loop and the blocking socket at its other end."""
    loop = asyncio.get_running_loop()
    with socket_pair(family, small=small) as (ours, peer):
        transport, protocol = await loop.create_connection(factory, sock=ours)
        try:
            yield transport, protocol, peer
        finally:
            end(transport)
            await ticks()


@contextlib.asynccontextmanager
async def two_transports(left_factory=Recorder, right_factory=Recorder, family="tcp", **options):
    """Both ends of one connection as transports: (transport, protocol, transport, protocol)."""
    loop = asyncio.get_running_loop()
    with socket_pair(family, **options) as (ours, peer):
        peer.setblocking(False)
        left, left_protocol = await loop.create_connection(left_factory, sock=ours)
        right, right_protocol = await loop.create_connection(right_factory, sock=peer)
        try:
            yield left, left_protocol, right, right_protocol
        finally:
            end(left)
            end(right)
            await ticks()


@contextlib.asynccontextmanager
async def tls_connected(contexts, factory=Recorder, *, server_side=False, small=True, **options):
    """A TLS transport on the running loop, its protocol, and the blocking TLS peer."""
    loop = asyncio.get_running_loop()

    def wrap(sock):
        name = "localhost" if server_side else None
        context = contexts[1] if server_side else contexts[0]
        return context.wrap_socket(sock, server_side=not server_side, server_hostname=name,
                                   suppress_ragged_eofs=False)

    with socket_pair(small=small) as (ours, peer):
        # The end of a record would wait for the delayed ACK of its beginning.
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
        wrapping = asyncio.ensure_future(in_thread(wrap, peer))
        protocol = factory()
        if server_side:
            transport, _ = await loop.connect_accepted_socket(
                lambda: protocol, ours, ssl=contexts[0], **options)
        else:
            transport, _ = await loop.create_connection(
                lambda: protocol, sock=ours, ssl=contexts[1], server_hostname="localhost",
                **options)
        with await wrapping as tls_peer:
            try:
                yield transport, protocol, tls_peer
            finally:
                await end_of(transport, protocol)


@contextlib.asynccontextmanager
async def serving(factory, **options):
    """A TCP server on a free port of 127.0.0.1: (server, address)."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(factory, "127.0.0.1", 0, **options)
    try:
        yield server, server.sockets[0].getsockname()
    finally:
        server.close()
        await ticks()


# loop.sock_*


def only_ours(loop_kind, what):
    """Skips a test of what asyncio and uvloop do not promise."""
    if loop_kind not in ("io_uring", "epoll"):
        pytest.skip(f"{loop_kind} makes no such promise: {what}")


async def waiting(loop, call):
    """A task in which the call waits already, its request being in the kernel."""
    task = loop.create_task(call)
    await ticks()
    assert not task.done()
    return task


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


class LyingInt(int):
    """Says of itself that it is small and positive."""

    def __gt__(self, other):
        return True

    __ge__ = __lt__ = __le__ = __gt__
