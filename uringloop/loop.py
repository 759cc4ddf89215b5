"""Loop: the engine's LoopCore over asyncio's selector loop.

What is hot comes from the engine: callbacks, transports of sockets, TLS, sock_*. Everything else
(create_connection, create_server, DNS, executors, subprocesses, signals, pipes) is asyncio's
own code, repaired in places, over our descriptors and transports. docs/compatibility.md
lists each private hook that this file uses.
"""

import asyncio
import dataclasses
import os
import select
import selectors
import signal
import socket
import ssl
import sys
import threading
import weakref
from asyncio import base_events, constants, events
from collections.abc import Callable, Coroutine
from typing import IO, Any, TypeVar, TypeVarTuple, Unpack

from . import _core, backend
from .options import LoopOptions, effective_options
from .pipes import WritePipeTransport
from .processes import SubprocessTransport, child_watcher

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopStats:
    """Counters of one loop since its creation; all are numbers of events unless a unit is named.

    enters: io_uring_enter calls that submitted, and `submissions` the SQEs they carried. in_flight:
    requests the kernel has not finished. buffers: receive blocks in the pool; buffers_lent: those
    whose data is being handled right now; buffers_ran_dry: times the kernel found none
    (the data stayed in the socket). overflows: times the completion queue was full. polls:
    epoll_wait calls that the loop waited in or looked with. spins: times it looked for up to
    busy_poll seconds before it would block; spins_paid: those that found something.
    messages_copied, messages_handed_over, messages_fed: how received data reached protocols: copied
    out of a block, as the block itself, or into the buffer of a StreamReader.
    mode_switches: changes between the receive modes. bytes_received, bytes_sent: payload bytes of
    transports of sockets and of sock_* on stream sockets. zerocopy_sends: requests of the option
    send_zerocopy; zerocopy_copied: those that the kernel copied all the same; zerocopy_pending:
    those whose memory it still holds, which are in flight. operations: all that is waited for,
    readiness of transports included.
    """

    ticks: int
    polls: int
    spins: int
    spins_paid: int
    enters: int
    submissions: int
    completions: int
    in_flight: int
    buffers: int
    buffers_lent: int
    buffers_ran_dry: int
    overflows: int
    bytes_received: int
    bytes_sent: int
    messages_copied: int
    messages_fed: int
    messages_handed_over: int
    mode_switches: int
    zerocopy_sends: int
    zerocopy_copied: int
    zerocopy_pending: int
    operations: int


class Loop(_core.SockLoop, asyncio.SelectorEventLoop):
    """An event loop on io_uring, or on epoll where that is refused.

    options: a LoopOptions; None means the defaults. URINGLOOP_BACKEND and URINGLOOP_OPTIONS
    override them. OSError when backend="io_uring" and the kernel refuses.
    """

    # Made when the first signal handler is added; asyncio's code looks at them earlier.
    _ssock = _csock = None

    def __init__(self, options: LoopOptions | None = None) -> None:
        self._options = effective_options(options)
        chosen, reason = backend.choose(self._options)
        self._configure(chosen, reason, self._options)
        if self._options.send_zerocopy is not None and chosen == "io_uring":
            flags = backend.zerocopy_flags()
            if flags >= 0:
                self._send_zerocopy(self._options.send_zerocopy, flags)
        super().__init__(selector=_Descriptors(self))
        self._transports: weakref.WeakValueDictionary[int, Any] = _Transports(self)
        self._set_up_sockets(self._transports.data, self._options.sock_readahead)
        self._listeners: dict[socket.socket, _core.Listener] = {}
        _loops.add(self)

    def _ring_refused(self, error: int, step: str) -> str:
        # Called by LoopCore when the probe succeeded but the loop's own ring cannot be made.
        return backend.fall_back(self._options, error, step)

    def __repr__(self) -> str:
        return (f"<{type(self).__name__} backend={self.backend} running={self.is_running()} "
                f"closed={self.is_closed()} debug={self.get_debug()}>")

    def stats(self) -> LoopStats:
        """The loop's counters now, as a LoopStats."""
        return LoopStats(**self._stats())

    # --- running -----------------------------------------------------------------------------

    def run_forever(self) -> None:
        """Run until stop() is called."""
        self._check_closed()
        self._check_running()
        self._set_coroutine_origin_tracking(self._debug)
        old_hooks = sys.get_asyncgen_hooks()
        try:
            self._thread_id = threading.get_ident()
            sys.set_asyncgen_hooks(firstiter=self._asyncgen_firstiter_hook,
                                   finalizer=self._asyncgen_finalizer_hook)
            events._set_running_loop(self)
            self._run_until_stopped()
        finally:
            self._stopping = False
            self._thread_id = None
            events._set_running_loop(None)
            self._set_coroutine_origin_tracking(False)
            sys.set_asyncgen_hooks(*old_hooks)

    # --- signals: asyncio's self-pipe, but only once there is a handler ------------------------

    def _make_self_pipe(self) -> None:
        pass

    def _close_self_pipe(self) -> None:
        if self._csock is not None:
            super()._close_self_pipe()

    def add_signal_handler(self, sig: int, callback: Callable[[Unpack[Ts]], object],
                           *args: *Ts) -> None:
        """Call a function in the loop when a signal arrives; main thread only."""
        if self._csock is None and not self.is_closed():
            super()._make_self_pipe()
        super().add_signal_handler(sig, callback, *args)

    # --- sockets without transports --------------------------------------------------------------

    async def sock_connect(self, sock: socket.socket, address: Any) -> None:
        """Connect a non-blocking socket; OSError if that fails."""
        if not _core.is_known_socket(sock):
            return await super().sock_connect(sock, address)
        base_events._check_ssl_socket(sock)
        if self._debug and sock.gettimeout() != 0:
            raise ValueError("the socket must be non-blocking")
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            resolved = await self._ensure_resolved(
                address, family=sock.family, type=sock.type, proto=sock.proto, loop=self)
            address = resolved[0][4]
        delay = 0.001
        while True:
            try:
                sock.connect(address)
                return
            except (BlockingIOError, InterruptedError):
                if sock.family != socket.AF_UNIX:
                    await self._sock_connected(sock, address)
                    return
            # The listener's queue is full and the socket is not connecting (connect(2), EAGAIN):
            # nothing will say when there is room.
            await asyncio.sleep(delay)
            delay = min(2 * delay, 0.1)

    # --- transports and servers ----------------------------------------------------------------

    def _make_socket_transport(self, sock: socket.socket, protocol: asyncio.BaseProtocol,
                               waiter: asyncio.Future[None] | None = None, *,
                               extra: dict[str, Any] | None = None,
                               server: asyncio.AbstractServer | None = None,
                               ) -> asyncio.Transport:
        self._ensure_fd_no_transport(sock)
        return _core.make_stream_transport(self, sock, protocol, waiter, extra, server)

    def _make_ssl_transport(
            self, rawsock: socket.socket, protocol: asyncio.BaseProtocol,
            sslcontext: ssl.SSLContext | None, waiter: asyncio.Future[None] | None = None, *,
            server_side: bool = False, server_hostname: str | None = None,
            extra: dict[str, Any] | None = None, server: asyncio.AbstractServer | None = None,
            ssl_handshake_timeout: float | None = constants.SSL_HANDSHAKE_TIMEOUT,
            ssl_shutdown_timeout: float | None = constants.SSL_SHUTDOWN_TIMEOUT,
    ) -> asyncio.Transport:
        self._ensure_fd_no_transport(rawsock)
        tls = _core.make_tls_protocol(
            self, protocol, sslcontext, waiter, server_side, server_hostname,
            handshake_timeout=ssl_handshake_timeout, shutdown_timeout=ssl_shutdown_timeout)
        try:
            _core.make_stream_transport(self, rawsock, tls, None, extra, server)
        except BaseException:
            tls.transport.abort()       # nobody will ever have it to close
            raise
        return tls.transport

    def _make_datagram_transport(self, sock: socket.socket, protocol: asyncio.BaseProtocol,
                                 address: Any = None,
                                 waiter: asyncio.Future[None] | None = None,
                                 extra: dict[str, Any] | None = None) -> asyncio.DatagramTransport:
        self._ensure_fd_no_transport(sock)
        return _core.make_datagram_transport(self, sock, protocol, address, waiter, extra)

    def _make_write_pipe_transport(self, pipe: Any, protocol: asyncio.BaseProtocol,
                                   waiter: asyncio.Future[None] | None = None,
                                   extra: dict[str, Any] | None = None) -> WritePipeTransport:
        return WritePipeTransport(self, pipe, protocol, waiter, extra)

    async def _make_subprocess_transport(
            self, protocol: asyncio.BaseProtocol, args: Any, shell: bool, stdin: Any, stdout: Any,
            stderr: Any, bufsize: int, extra: dict[str, Any] | None = None,
            **kwargs: Any) -> SubprocessTransport:
        waiter = self.create_future()
        # Entered before the process is made: without somebody to wait for it there shall be none.
        with child_watcher(self) as watcher:
            transport = SubprocessTransport(self, protocol, args, shell, stdin, stdout, stderr,
                                            bufsize, waiter=waiter, extra=extra, **kwargs)
            watcher.add_child_handler(transport.get_pid(), self._child_watcher_callback, transport)
        try:
            await waiter
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException:
            transport.close()
            await transport._wait()
            raise
        return transport

    def _child_watcher_callback(self, pid: int, returncode: int,
                                transport: SubprocessTransport) -> None:
        transport._is_reaped = True
        super()._child_watcher_callback(pid, returncode, transport)

    async def start_tls(
            self, transport: asyncio.WriteTransport, protocol: asyncio.BaseProtocol,
            sslcontext: ssl.SSLContext, *, server_side: bool = False,
            server_hostname: str | None = None, ssl_handshake_timeout: float | None = None,
            ssl_shutdown_timeout: float | None = None) -> asyncio.Transport | None:
        """Go on with TLS over a transport: returns the transport that the protocol uses from now.

        None if the connection was closed here before or meanwhile. A failed handshake closes it
        and raises.
        """
        plain = _checked_for_tls(transport, sslcontext)
        if plain.is_closing() and plain.get_protocol() is None:
            return None     # connection_lost() was called: nothing would end the handshake
        waiter = self.create_future()
        tls = _core.make_tls_protocol(
            self, protocol, sslcontext, waiter, server_side, server_hostname,
            call_connection_made=False, handshake_timeout=ssl_handshake_timeout,
            shutdown_timeout=ssl_shutdown_timeout)
        handles = []
        try:
            # Nothing may reach the new protocol before its connection_made().
            plain.pause_reading()
            tls.take_over(plain)
            handles.append(self.call_soon(tls.connection_made, plain))
            handles.append(self.call_soon(plain.resume_reading))
            await waiter
        except BaseException:
            plain.close()
            for handle in handles:
                handle.cancel()
            raise
        return tls.transport

    async def _sendfile_native(self, transp: Any, file: IO[bytes], offset: int,
                               count: int | None) -> int:
        # asyncio's leaves the transport paused when it is cancelled in the wait (gh-157025).
        del self._transports[transp._sock_fd]
        was_reading = transp.is_reading()
        transp.pause_reading()
        try:
            await transp._make_empty_waiter()
            if transp.is_closing():
                raise ConnectionError("Connection is closed by peer")
            return await self.sock_sendfile(transp._sock, file, offset, count, fallback=False)
        finally:
            transp._reset_empty_waiter()
            self._transports[transp._sock_fd] = transp
            if was_reading:
                transp.resume_reading()

    def _start_serving(
            self, protocol_factory: Callable[[], asyncio.BaseProtocol], sock: socket.socket,
            sslcontext: ssl.SSLContext | None = None,
            server: asyncio.AbstractServer | None = None, backlog: int = 100,
            ssl_handshake_timeout: float | None = constants.SSL_HANDSHAKE_TIMEOUT,
            ssl_shutdown_timeout: float | None = constants.SSL_SHUTDOWN_TIMEOUT) -> None:
        self._check_closed()
        self._listeners[sock] = _core.make_listener(
            self, protocol_factory, sock, sslcontext, server, backlog, ssl_handshake_timeout,
            ssl_shutdown_timeout)

    def _stop_serving(self, sock: socket.socket) -> None:
        listener = self._listeners.pop(sock, None)
        if listener is not None:
            _core.stop_listener(listener)
        super()._stop_serving(sock)


def _checked_for_tls(transport: Any, sslcontext: Any) -> Any:
    """The transport, if start_tls() can use both; TypeError otherwise."""
    if not isinstance(sslcontext, ssl.SSLContext):
        raise TypeError("sslcontext is expected to be an instance of ssl.SSLContext, "
                        f"got {sslcontext!r}")
    if not getattr(transport, "_start_tls_compatible", False):
        raise TypeError(f"transport {transport!r} is not supported by start_tls()")
    return transport


class _Descriptors:
    """What asyncio's code asks of `loop._selector`; the descriptors are in the engine's poller."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop

    def get_map(self) -> "_Descriptors":
        return self

    def get(self, file: Any, default: Any = None) -> Any:
        """The SelectorKey of a watched descriptor or file object."""
        fd: int = file if isinstance(file, int) else file.fileno()
        watched = self._loop._watched(fd)
        if watched is None:
            return default
        mask, reader, writer = watched
        mask = ((selectors.EVENT_READ if mask & select.EPOLLIN else 0)
                | (selectors.EVENT_WRITE if mask & select.EPOLLOUT else 0))
        return selectors.SelectorKey(fd, fd, mask, (reader, writer))

    def get_key(self, file: Any) -> selectors.SelectorKey:
        key: selectors.SelectorKey | None = self.get(file)
        if key is None:
            raise KeyError(f"{file!r} is not registered")
        return key

    def close(self) -> None:
        # BaseSelectorEventLoop.close() ends with this; the loop counts as closed already.
        loop = self._loop
        loop._release()
        loop._listeners.clear()
        # A dictionary that does not know the loop: no cycle, a closed loop that is let go is freed.
        loop._transports = weakref.WeakValueDictionary()


class _Transports(weakref.WeakValueDictionary[int, Any]):
    """`loop._transports`: the transport that owns a descriptor.

    The engine keeps its own; the dictionary has what others make of asyncio's classes.
    """

    def __init__(self, loop: Loop) -> None:
        super().__init__()
        self._loop = loop

    def get(self, fd: int, default: Any = None) -> Any:
        return self._loop._owner(fd) or super().get(fd, default)

    def __getitem__(self, fd: int) -> Any:
        return self._loop._owner(fd) or super().__getitem__(fd)

    def __setitem__(self, fd: int, transport: Any) -> None:
        if not _core.set_owner(self._loop, fd, transport):
            super().__setitem__(fd, transport)

    def __delitem__(self, fd: int) -> None:
        if not self._loop._clear_owner(fd):
            super().__delitem__(fd)


def new_event_loop(options: LoopOptions | None = None) -> Loop:
    """A new Loop; to be given to asyncio.Runner(loop_factory=...), uvicorn's --loop and the like.

    OSError when options demand io_uring and the kernel refuses; ValueError and TypeError for
    options out of range, environment variables included.
    """
    return Loop(options)


def run(main: Coroutine[Any, Any, T], *, debug: bool | None = None,
        options: LoopOptions | None = None) -> T:
    """asyncio.run() on a new Loop: run a coroutine, clean up, return its result."""
    if asyncio._get_running_loop() is not None:
        raise RuntimeError("uringloop.run() cannot be called from a running event loop")
    with asyncio.Runner(debug=debug, loop_factory=lambda: new_event_loop(options)) as runner:
        return runner.run(main)


_loops: weakref.WeakSet[Loop] = weakref.WeakSet()


def _forget_parents_loops() -> None:
    _core.forget_stash()
    for loop in list(_loops):
        loop._after_fork_in_child()
        if loop._csock is not None:
            # Signals of the child are none of the parent's; asyncio sees to it from 3.12 on.
            signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_forget_parents_loops)
