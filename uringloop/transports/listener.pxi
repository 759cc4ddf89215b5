# Listener: one listening socket of a server.
#
# On the ring a multishot accept stays armed; on epoll the socket is watched and accept4(2) called
# up to backlog times per readiness (which on the ring, by a multishot poll, is 4 % slower). The
# kernel gives an accepted descriptor only the flags that the request names. A request in flight
# keeps the socket listening after close(): it is cancelled, and the cancellation waited for, before
# the socket is closed; connections that still come are closed.

cdef enum:
    ACCEPT_BATCH = 64


@cython.internal
@cython.final
cdef class AcceptOperation(Watched):
    cdef Listener listener

    cdef object owner(self):
        return self.listener

    cdef int look(self) except -1:
        self.listener.is_open()         # stops it if not
        return 0

    cdef int arm(self) except -1:
        return self.listener.arm()

    cdef int complete(self, int32_t result, uint32_t flags) except -1:
        if flags == READINESS:
            return self.listener.accept_ready()
        if not flags & liburing.IORING_CQE_F_MORE:
            self.listener.request_ended(result)
        if result >= 0:
            return self.listener.accepted_by_request(result)
        if result != -ECONNABORTED and not is_retry(result):
            return self.listener.accept_failed(-result)
        return 0

    cdef int discard(self, int32_t result, uint32_t flags) except -1:
        if flags != READINESS and result >= 0:
            close_fd(result)
        return 0


@cython.final
cdef class Listener(Flushable):
    cdef SockLoop loop
    cdef object sock, server, protocol_factory, sslcontext, context
    cdef object handshake_timeout, shutdown_timeout
    cdef int fd, backlog
    cdef uint64_t cookie        # of the socket; 0: the kernel gives none
    cdef object family, kind, protocol
    cdef bint known_socket      # awaitable.h may read its head
    cdef int protocol_number
    cdef int family_number      # of TCP sockets, else 0: their connections need no socket object
    cdef bint serving
    cdef uint64_t looked_in     # the number of the tick in which the descriptor was ours
    cdef AcceptOperation operation
    # Accepted by readiness, all before any code of the user runs that could close the socket.
    cdef Accepted batch[ACCEPT_BATCH]
    cdef int batch_size, next_in_batch

    def __cinit__(self, maker=None):
        if maker is not _BY_THE_LOOP:
            raise TypeError("listeners are made by the event loop")

    def __dealloc__(self):
        while self.next_in_batch < self.batch_size:     # KeyboardInterrupt ended the last run
            close_fd(self.batch[self.next_in_batch].fd)
            self.next_in_batch += 1

    def __repr__(self):
        return f"<Listener fd={self.fd} server={self.server!r}>"

    cdef int start(self) except -1:
        if not self.serving:
            self.serving = True
            self.loop.watch(self.operation)
        return self.loop.mark_dirty(self)

    cdef int flush(self) except -1:
        """Watch the socket, or have an accept request made before the loop submits."""
        if self.loop.ring is not None:
            return self.loop.want_request(self.operation)
        if not self.owns_descriptor() or self.operation.state != IDLE:
            return 0
        try:
            return self.loop.poller.watch_input(self.fd, self.operation)
        except MemoryError:
            return self.accept_failed(ENOMEM)
        except OSError as exc:          # epoll has no room for it
            return self.accept_failed(exc.errno)

    cdef int arm(self) except -1:
        # Not in flush(): protocols run there, and may close the socket.
        cdef liburing.io_uring_sqe *sqe
        if not self.owns_descriptor() or self.operation.state != IDLE:
            return 0
        try:
            sqe = self.loop.ring.start(
                self.operation, liburing.IORING_OP_ACCEPT, self.fd, NULL, 0)
        except MemoryError:
            self.loop.call_soon(self._out_of_memory)    # the exception handler may run then
            return 0
        sqe.ioprio = liburing.IORING_ACCEPT_MULTISHOT
        sqe.accept_flags = liburing.SOCK_NONBLOCK | liburing.SOCK_CLOEXEC
        return 0

    cdef bint is_open(self) except -1:
        """Whether connections are wanted; not if the user closed the socket under the server."""
        # A look at memory, where it can be: a fileno() of the user's would run before the submit.
        if self.serving and self.fd != (awaitable.socket_fd(self.sock) if self.known_socket
                                        else self.sock.fileno()):
            self.stop()
        return self.serving

    cdef bint owns_descriptor(self) except -1:
        """is_open(), after os.close() too: the request in flight would go on accepting, and the
        next one accept from the number's new file. A system call."""
        if self.is_open() and not still_names(self.fd, self.cookie):
            self.stop()
        return self.serving

    cdef int halt(self) except -1:
        if self.operation.state == IDLE:
            return 0
        if self.loop.ring is None:
            return self.loop.poller.unwatch_input(self.fd, self.operation)
        return self.loop.ring.cancel_now(self.operation)

    cdef int stop(self) except -1:
        """Accept nothing more; the caller closes the socket."""
        if self.serving:
            self.serving = False
            self.loop.unwatch(self.operation)
        return self.halt()

    cdef int request_ended(self, int32_t result) except -1:
        if self.serving and (result >= 0 or result == -ECONNABORTED or is_retry(result)):
            self.start()
        return 0

    cdef int accept_ready(self) except -1:
        cdef int error = 0, room = max(self.backlog, 1)
        self.serve_batch()
        while error == 0 and room > 0 and self.owns_descriptor():
            error = self.accept_batch(min(room, ACCEPT_BATCH))
            room -= self.batch_size
            self.serve_batch()
        return 0 if error == 0 or error == EAGAIN else self.accept_failed(error)

    cdef int accept_batch(self, int limit) noexcept:
        """Returns 0, or the errno that says why there are no more."""
        cdef Accepted *conn
        cdef unsigned size
        self.next_in_batch = self.batch_size = 0
        while self.batch_size < limit:
            conn = &self.batch[self.batch_size]
            size = sizeof(conn.remote)
            conn.fd = accept4(self.fd, &conn.remote, &size,
                              liburing.SOCK_NONBLOCK | liburing.SOCK_CLOEXEC)
            if conn.fd >= 0:
                self.batch_size += 1
            elif errno not in (ECONNABORTED, EINTR):
                return errno
        return 0

    cdef int serve_batch(self) except -1:
        cdef Accepted conn
        try:
            while self.next_in_batch < self.batch_size:
                conn = self.batch[self.next_in_batch]   # a nested iteration may fill it again
                self.next_in_batch += 1
                self.accepted(conn.fd, &conn.remote)
        finally:
            if self.next_in_batch < self.batch_size:
                self.loop.schedule(self._serve_batch, (), None)     # in the next run
        return 0

    def _serve_batch(self):
        self.serve_batch()

    cdef int accept_failed(self, int error) except -1:
        """Out of descriptors or memory: say so, and try again in a second, as asyncio does."""
        self.halt()
        try:
            exc = os_error(error)
            context = {"message": "socket.accept() out of system resource", "exception": exc,
                       "socket": trsock.TransportSocket(self.sock)}
            if error not in (EMFILE, ENFILE, ENOBUFS, ENOMEM):
                context["message"] = "socket.accept() failed"
            self.loop.call_exception_handler(context)
        finally:
            if self.serving:
                self.loop.call_later(constants.ACCEPT_RETRY_DELAY, self._retry)
        return 0

    def _out_of_memory(self):
        self.accept_failed(ENOMEM)

    def _retry(self):
        if self.is_open():
            self.start()

    cdef bint is_right(self) except -1:
        """Whether what the request has accepted is to be served: what it had accepted before this
        tick, in which the user may have closed the socket, is as by asyncio."""
        if self.looked_in == self.loop.counters.ticks:
            return self.is_open()
        if not self.owns_descriptor():
            return False
        self.looked_in = self.loop.counters.ticks
        return True

    cdef int accepted_by_request(self, int fd) except -1:
        cdef bint right = False
        try:
            right = self.is_right()
        finally:
            if not right:
                close_fd(fd)
        return self.accepted(fd, NULL) if right else 0

    cdef int accepted(self, int fd, const liburing.sockaddr_in6 *peer) except -1:
        """A new connection, whose descriptor is ours to close until somebody else owns it."""
        try:
            context = PyContext_Copy(self.context)
            PyContext_Enter(context)
        except BaseException:
            close_fd(fd)
            raise
        try:
            if self.family_number and not self.loop._debug:
                self.serve(fd, peer)
            else:
                self.serve_socket(self.socket_of(fd))
        finally:
            PyContext_Exit(context)
        return 0

    cdef int serve(self, int fd, const liburing.sockaddr_in6 *peer) except -1:
        cdef Accepted conn
        conn.fd = fd
        conn.family = self.family_number
        conn.protocol = self.protocol_number
        ask_addresses(&conn, peer)
        protocol = None
        try:
            protocol = self.protocol_factory()
            serve_accepted(self.loop, &conn, protocol, self.server)
        except (SystemExit, KeyboardInterrupt):
            close_fd(fd)
            raise
        except BaseException as exc:
            close_fd(fd)
            self.report(exc, protocol)
        return 0

    cdef object socket_of(self, int fd):
        try:
            return accepted_socket(fd, self.family, self.kind, self.protocol)
        except BaseException:
            close_fd(fd)
            raise

    cdef int serve_socket(self, conn) except -1:
        protocol = None
        extra = {}
        try:
            extra["peername"] = conn.getpeername()
        except OSError:
            extra["peername"] = None        # the peer has gone already
        if self.loop._debug:
            asyncio_logger.debug("%r got a new connection from %r: %r",
                                 self.server, extra["peername"], conn)
        if self.sslcontext:
            self.loop.create_task(self.loop._accept_connection2(
                self.protocol_factory, conn, extra, self.sslcontext, self.server,
                self.handshake_timeout, self.shutdown_timeout))
            return 0
        try:
            protocol = self.protocol_factory()
            make_stream_transport(
                self.loop, conn, protocol, extra=extra, server=self.server)
        except (SystemExit, KeyboardInterrupt):
            conn.close()
            raise
        except BaseException as exc:
            conn.close()
            self.report(exc, protocol)
        return 0

    cdef int report(self, exc, protocol) except -1:
        """In debug mode only, as asyncio does."""
        if self.loop._debug:
            context = {"message": "Error on transport creation for incoming connection",
                       "exception": exc}
            if protocol is not None:
                context["protocol"] = protocol
            self.loop.call_exception_handler(context)
        return 0


def make_listener(SockLoop loop, protocol_factory, sock, sslcontext, server, backlog,
                  handshake_timeout, shutdown_timeout):
    """Start to accept on a listening socket; stop_listener() ends it."""
    cdef Listener listener = Listener.__new__(Listener, _BY_THE_LOOP)
    cdef AcceptOperation operation = AcceptOperation.__new__(AcceptOperation)
    listener.loop = loop
    listener.sock = sock
    listener.fd = sock.fileno()
    listener.known_socket = is_known_socket(sock) and awaitable.socket_fd(sock) == listener.fd
    listener.cookie = socket_cookie(listener.fd)
    listener.family = sock.family
    listener.kind = sock.type
    listener.protocol = sock.proto
    if (sock.family in (liburing.AF_INET, liburing.AF_INET6) and not sslcontext
            and sock.type == liburing.SOCK_STREAM):
        listener.family_number = sock.family
    listener.protocol_number = sock.proto
    listener.server = server
    listener.protocol_factory = protocol_factory
    listener.sslcontext = sslcontext
    listener.backlog = backlog
    listener.handshake_timeout = handshake_timeout
    listener.shutdown_timeout = shutdown_timeout
    listener.context = PyContext_CopyCurrent()
    listener.operation = operation
    operation.listener = listener
    listener.start()
    return listener


def stop_listener(Listener listener):
    """Accept nothing more on the listener's socket, which the caller may close now."""
    listener.stop()
