# Transport: who owns the protocol and the socket, and how both come to their end.
#
# Life cycle: open -> closing (close(), EOF) -> lost (connection_lost is scheduled, at most once)
# -> finished (connection_lost was called) -> released (the descriptor is closed). A descriptor is
# closed only when both operations are idle: until then the kernel may still use it.
#
# Users may all the same take the descriptor away, by sock.detach() or os.close(), and its number
# may name another file then. Whether it does is looked at before each request but the small sends,
# where a system call would cost more than it is worth.
#
# An accepted connection has no socket object, and tells nothing, until somebody asks
# (accepted.pxi).
#
# Owner: the protocol holds the transport; while it receives or sends, so does the operation table.

_SERVER_COUNTS_TRANSPORTS = (
    "transport" in inspect.signature(base_events.Server._attach).parameters)


class StreamTransportType(transports._FlowControlMixin, asyncio.Transport):
    """What our transports answer isinstance() with: a cdef class cannot inherit Python classes."""

    __slots__ = ()


# What is known of an accepted connection.
_KNOWN = frozenset(("peername", "socket", "sockname"))

# Nobody else can pass it: a transport that the loop did not make has no parts.
_BY_THE_LOOP = object()


cdef class Transport(Flushable):
    """What stream transports share; sub-classes know how bytes move."""
    cdef LoopCore loop
    # An accepted connection has neither until somebody asks (accepted.pxi).
    cdef object sock            # None at the end, too
    cdef dict extra             # what get_extra_info() tells
    cdef object protocol
    cdef object server
    cdef object lost_with
    cdef uint64_t cookie        # of the socket; 0: the kernel gives none
    cdef Accepted accepted      # from here on without a gap: thousands may be idle
    cdef int fd
    cdef bint holds_descriptor
    cdef bint known_socket      # awaitable.h may read its head
    cdef bint keeps_number      # a close() of the socket by somebody else waits for the end
    cdef bint closing
    cdef bint finished
    cdef bint server_counts_transports      # Python 3.13
    cdef bint must_be_told      # of the end: connection_lost could not be scheduled
    # 0 until connection_lost is scheduled; counts the writes that came too late.
    cdef int lost
    cdef object __weakref__

    def __cinit__(self, maker=None):
        if maker is not _BY_THE_LOOP:
            raise TypeError("transports are made by the event loop")

    @property
    def __class__(self):
        return StreamTransportType

    def __dir__(self):
        # Not only what `__class__` answers for has attributes.
        return sorted({*dir(type(self)), *getattr(self, "__dict__", ())})

    cdef int own(self, LoopCore loop, sock, dict extra, server) except -1:
        """Take the socket over."""
        cdef int fd = sock.fileno()
        if fd < 0:
            raise os_error(EBADF)
        self.loop = loop
        self.fd = fd
        self.cookie = socket_cookie(fd)
        self.extra = extra
        extra["socket"] = trsock.TransportSocket(sock)
        try:
            extra["sockname"] = sock.getsockname()
        except OSError:
            extra["sockname"] = None
        if "peername" not in extra:
            try:
                extra["peername"] = sock.getpeername()
            except OSError:
                extra["peername"] = None
        if self.keeps_number:
            # While this count is above zero, sock.close() by somebody else does not close the
            # descriptor, whose number would then name another file (as uvloop does it).
            sock._io_refs += 1
        self.sock = sock        # only now is there something to let go
        self.holds_descriptor = True
        self.known_socket = is_known_socket(sock)
        loop.poller.own(fd, self)
        return self.attach_server(server)

    cdef int own_accepted(self, LoopCore loop, const Accepted *conn, server) except -1:
        """Take an accepted connection over, which is its maker's again if that fails."""
        self.loop = loop
        self.fd = conn.fd
        self.cookie = socket_cookie(conn.fd)
        self.accepted = conn[0]
        loop.poller.own(conn.fd, self)
        self.holds_descriptor = True
        return self.attach_server(server)

    cdef object socket_object(self):
        """The socket object, that of an accepted connection being made now; None at the end."""
        if self.sock is None and self.holds_descriptor:
            if still_names(self.fd, self.cookie):
                sock = accepted_socket(self.fd, self.accepted.family, liburing.SOCK_STREAM,
                                       self.accepted.protocol)
            else:
                sock = closed_socket_object(&self.accepted)
            sock._io_refs += 1
            self.sock = sock
            self.known_socket = is_known_socket(sock)
        return self.sock

    cdef dict known(self):
        """What get_extra_info() tells."""
        if self.extra is None:
            sock = self.socket_object()
            if sock is None:
                sock = closed_socket_object(&self.accepted)
            self.extra = {"peername": internet_address(&self.accepted.remote),
                          "socket": trsock.TransportSocket(sock),
                          "sockname": internet_address(&self.accepted.local)}
        return self.extra

    cdef int attach_server(self, server) except -1:
        if server is not None:
            self.server_counts_transports = _SERVER_COUNTS_TRANSPORTS
            if self.server_counts_transports:
                server._attach(self)
            else:
                server._attach()
            self.server = server        # only now is there something to detach
        return 0

    cdef int give_up(self) except -1:
        """The transport could not be made: the socket is its maker's again."""
        self.finished = self.closing = True
        self.protocol = None
        if not self.holds_descriptor:
            return 0
        sock = self.part_with_socket()
        self.loop.poller.disown(self.fd, self)
        if sock is not None and self.accepted.family:
            sock.detach()               # made for somebody who asked: it would close the descriptor
        elif sock is not None and self.keeps_number:
            sock._io_refs -= 1
        return self.detach_server()

    cdef int schedule_start(self, waiter) except -1:
        """connection_made, then reading, then the waiter; all of them or none."""
        cdef list handles = []
        try:
            handles.append(self.loop.schedule(self.protocol.connection_made, (self,), None))
            handles.append(self.loop.schedule(self._start_reading, (), None))
            if waiter is not None:
                self.loop.schedule(futures._set_result_unless_cancelled, (waiter, None), None)
        except BaseException:
            for handle in handles:
                handle.cancel()
            raise
        return 0

    @property
    def _loop(self):
        return self.loop if not self.finished else None

    @property
    def _sock(self):
        return self.socket_object()

    @property
    def _sock_fd(self):
        return self.fd

    @property
    def _extra(self):
        return self.known()

    @property
    def _protocol(self):
        return self.protocol

    @property
    def _closing(self):
        return self.closing

    @property
    def _conn_lost(self):
        return self.lost

    @property
    def _server(self):
        return self.server

    def get_extra_info(self, name, default=None):
        """What is known by name ("socket", "sockname", "peername"), also after the end."""
        if self.extra is None and name not in _KNOWN:
            return default
        return self.known().get(name, default)

    def get_protocol(self):
        """The current protocol."""
        return self.protocol

    def is_closing(self):
        """Whether the transport is closing or closed."""
        return self.closing

    def abort(self):
        """Close at once: what was not sent is dropped; connection_lost(None) follows."""
        self.force_close(None)

    def _force_close(self, exc):
        self.force_close(exc)

    cdef inline bint is_detached(self) noexcept:
        return self.known_socket and awaitable.socket_fd(self.sock) != self.fd

    cdef bint owns_descriptor(self) noexcept:
        """Whether the number still names the socket. A system call."""
        return not self.is_detached() and still_names(self.fd, self.cookie)

    cdef int stop_receiving(self) except -1:
        raise NotImplementedError

    cdef int drop_output(self) except -1:
        raise NotImplementedError

    cdef bint is_idle(self) noexcept:
        return True

    cdef int fatal_error(self, exc, str message) except -1:
        """Report an error that ends the connection, as asyncio does: OSErrors only in debug."""
        try:
            if isinstance(exc, OSError):
                if self.loop._debug:
                    asyncio_logger.debug("%r: %s", self, message, exc_info=exc)
            else:
                self.loop.call_exception_handler({
                    "message": message, "exception": exc, "transport": self,
                    "protocol": self.protocol})
        finally:
            self.force_close(exc)
        return 0

    cdef int force_close(self, exc) except -1:
        if self.lost:
            return 0
        try:
            self.drop_output()
            if not self.closing:
                self.closing = True
                self.stop_receiving()
        finally:
            self.closing = True
            self.lose_connection(exc)
        return 0

    cdef int lose_connection(self, exc) except -1:
        """Schedule connection_lost; only ever once."""
        self.lost += 1
        try:
            self.loop.schedule(self._call_connection_lost, (exc,), None)
        except MemoryError:
            self.lost_with = exc            # out of the flush, which needs no memory
            self.must_be_told = True
            self.loop.mark_dirty(self)
        return 0

    cdef int tell_of_loss(self) except -1:
        exc, self.lost_with = self.lost_with, None
        self.must_be_told = False
        self._call_connection_lost(exc)
        return 0

    def _call_connection_lost(self, exc):
        self.connection_lost(exc)

    cdef int connection_lost(self, exc) except -1:
        self.lost = max(self.lost, 1)
        try:
            if self.protocol is not None:
                self.protocol.connection_lost(exc)
        finally:
            self.finish()
        return 0

    cdef int finish(self) except -1:
        """connection_lost was called: let go of the protocol, and of the socket when idle."""
        if self.finished:
            return 0
        self.finished = True
        self.protocol = None
        try:
            self.end_requests()
        finally:
            try:
                if self.is_idle():
                    self.release()
            finally:
                self.detach_server()
        return 0

    cdef int end_requests(self) except -1:
        """End what is in flight before returning, as far as the kernel does: a peer sees the end of
        the connection in the iteration in which asyncio's would."""
        return 0

    cdef int detach_server(self) except -1:
        server, self.server = self.server, None
        if server is not None:
            if self.server_counts_transports:
                server._detach(self)
            else:
                server._detach()
        return 0

    cdef object part_with_socket(self):
        sock, self.sock = self.sock, None
        self.holds_descriptor = False
        self.known_socket = False       # is_detached() reads a socket's memory
        return sock

    cdef int release(self) except -1:
        """Close the descriptor: no operation uses it any more."""
        cdef int fd = self.fd
        cdef bint is_ours
        if not self.holds_descriptor:
            return 0
        sock = self.part_with_socket()
        self.loop.poller.disown(fd, self)
        is_ours = still_names(fd, self.cookie)      # else closing it would hit the new owner
        # The number may soon name another file, and somebody may still hold the transport.
        self.fd = -1
        self.closing = True
        self.lost = max(self.lost, 1)
        if sock is None:
            if is_ours:
                close_fd(fd)
            return 0
        if not is_ours and sock.fileno() == fd:
            sock.detach()
        if self.keeps_number:
            sock._io_refs -= 1
        sock.close()
        return 0

    def __del__(self):
        if not self.holds_descriptor:
            return
        try:
            # Once connection_lost was called, only the loop's end kept the last answer away.
            if not self.finished:
                self.loop.warn(f"unclosed transport {self!r}", ResourceWarning, source=self)
        finally:
            # What is in flight holds the transport, so an operation is busy here only if the loop
            # is garbage as well, or somebody calls this by hand: its last answer releases then.
            self.finished = self.closing = True
            self.lost = max(self.lost, 1)
            self.stop_receiving()
            self.drop_output()
            if self.is_idle():
                self.release()
            self.detach_server()


def set_owner(LoopCore loop, int fd, transport):
    """Give a descriptor back to the transport that lent it to sendfile. False for asyncio's."""
    if not isinstance(transport, Transport):
        return False
    if (<Transport>transport).holds_descriptor:
        loop.poller.own(fd, transport)
    return True
