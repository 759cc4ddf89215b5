# SockLoop: loop.sock_*, for sockets that no transport has.
#
# Owner of the queues, one for each descriptor and side that ever waited. What they share with
# asyncio is the contract, down to the texts of errors; calls wait in the order in which they were
# made, where asyncio's displace each other.

# Whether recv(2) does what sock.recv() does: not where a subclass has a recv() of its own.
_DIRECT_METHODS = {RECV: "recv", RECV_INTO: "recv_into", SENDALL: "send"}


cdef enum:
    # How many sockets are looked at, whether they were closed: before the loop blocks, and in each
    # tick, for a loop that never blocks.
    LOOKS_PER_WAIT = 256
    LOOKS_PER_TICK = 8


cdef class SockLoop(LoopCore):
    cdef list input_queues, output_queues       # by descriptor; None: none waited yet
    cdef list busy_queues       # with a call that waits
    cdef list unarmed_queues    # whose head has no request yet
    cdef list listeners         # of servers
    cdef list read_aheads
    cdef Py_ssize_t next_look, unlooked     # of before_wait()
    cdef Stash stash
    cdef bint reads_ahead       # the option sock_readahead
    cdef object any_done_future
    cdef dict foreign_transports        # asyncio's own, by descriptor

    def __cinit__(self, *args, **kwargs):
        self.input_queues = []
        self.output_queues = []
        self.busy_queues = []
        self.unarmed_queues = []
        self.listeners = []
        self.read_aheads = []
        self.stash = Stash()
        self.foreign_transports = {}

    # --- asyncio's methods -----------------------------------------------------------------------

    def sock_recv(self, sock, n):
        """Receive up to n bytes, as bytes; b"" at the end of the stream. A coroutine."""
        if not is_known_socket(sock):
            return selector_events.BaseSelectorEventLoop.sock_recv(self, sock, n)
        return self.make_call(RECV, sock, n, None)

    def sock_recv_into(self, sock, buf):
        """Receive into a writable buffer; returns the number of bytes. A coroutine."""
        if not is_known_socket(sock):
            return selector_events.BaseSelectorEventLoop.sock_recv_into(self, sock, buf)
        return self.make_call(RECV_INTO, sock, buf, None)

    def sock_recvfrom(self, sock, bufsize):
        """Receive a datagram of up to bufsize bytes: (bytes, address). A coroutine."""
        if not is_known_socket(sock):
            return selector_events.BaseSelectorEventLoop.sock_recvfrom(self, sock, bufsize)
        return self.make_call(RECVFROM, sock, bufsize, None)

    def sock_recvfrom_into(self, sock, buf, nbytes=0):
        """Receive a datagram into a buffer: (number of bytes, address). A coroutine."""
        if not is_known_socket(sock):
            return selector_events.BaseSelectorEventLoop.sock_recvfrom_into(self, sock, buf, nbytes)
        return self.make_call(RECVFROM_INTO, sock, buf, nbytes)

    def sock_accept(self, sock):
        """Accept a connection: (socket, address), the socket non-blocking. A coroutine."""
        if not is_known_socket(sock):
            return selector_events.BaseSelectorEventLoop.sock_accept(self, sock)
        return self.make_call(ACCEPT, sock, None, None)

    def sock_sendall(self, sock, data):
        """Send all of a bytes-like object; returns None. A coroutine."""
        if not is_known_socket(sock):
            return selector_events.BaseSelectorEventLoop.sock_sendall(self, sock, data)
        return self.make_call(SENDALL, sock, data, None)

    def sock_sendto(self, sock, data, address):
        """Send a datagram to an address; returns the number of bytes. A coroutine."""
        if not is_known_socket(sock):
            return selector_events.BaseSelectorEventLoop.sock_sendto(self, sock, data, address)
        return self.make_call(SENDTO, sock, data, address)

    def _sock_connected(self, sock, address):
        """Wait for the end of a connect(2) in progress; OSError if it failed. A coroutine."""
        return self.make_call(CONNECT, sock, address, None)

    def _set_up_sockets(self, dict transports, bint reads_ahead):
        """asyncio's own transports by descriptor, whose sockets are not to be used here; and the
        option sock_readahead."""
        self.foreign_transports = transports
        self.reads_ahead = reads_ahead

    cdef SocketCall make_call(self, CallKind kind, sock, argument, option):
        call = <SocketCall>SocketCall.__new__(SocketCall)
        call.loop = self
        call.kind = kind
        call.sock = sock
        call.argument = argument
        call.option = option
        call.direct = type(sock) is _SOCKET or is_direct(type(sock), kind)
        return call

    cdef list take_received(self, int fd):
        """What was received for calls on a socket that gets a transport now: bytes, maybe an
        OSError last."""
        cdef SocketQueue queue
        if fd < PyList_GET_SIZE(self.input_queues):
            queue = self.input_queues[fd]
            if queue is not None and queue.ahead is not None:
                queue.ahead.stop()
        return self.stash.take_all(fd) if self.stash.count else []

    # --- queues --------------------------------------------------------------------------------

    cdef SocketQueue queue_of(self, int fd, bint is_output):
        """The queue of a side of a descriptor; None for a closed socket."""
        cdef list queues = self.output_queues if is_output else self.input_queues
        cdef SocketQueue queue
        if fd < 0:
            return None
        if fd < PyList_GET_SIZE(queues):
            found = <object>PyList_GET_ITEM(queues, fd)
            if found is not None:
                return <SocketQueue>found
        else:
            queues.extend([None] * (fd + 1 - len(queues)))
        queue = SocketQueue.__new__(SocketQueue)
        queue.loop = self
        queue.fd = fd
        queue.is_output = is_output
        queue.place = -1
        queues[fd] = queue
        return queue

    cdef int queue_is_busy(self, SocketQueue queue) except -1:
        queue.place = PyList_GET_SIZE(self.busy_queues)
        self.busy_queues.append(queue)
        return 0

    cdef int queue_is_idle(self, SocketQueue queue) except -1:
        cdef SocketQueue last = self.busy_queues.pop()
        if last is not queue:
            last.place = queue.place
            self.busy_queues[last.place] = last
        queue.place = -1
        return 0

    cdef int starts_reading_ahead(self, ReadAhead ahead) except -1:
        ahead.place = PyList_GET_SIZE(self.read_aheads)
        self.read_aheads.append(ahead)
        return 0

    cdef int stops_reading_ahead(self, ReadAhead ahead) except -1:
        cdef ReadAhead last = self.read_aheads.pop()
        if last is not ahead:
            last.place = ahead.place
            self.read_aheads[last.place] = last
        ahead.place = -1
        return 0

    cdef inline object done_future(self):
        """A Future whose result is None."""
        if self.any_done_future is None:
            self.any_done_future = self.create_future()
            self.any_done_future.set_result(None)
        return self.any_done_future

    cdef int check_not_owned(self, int fd) except -1:
        """RuntimeError for the socket of a transport."""
        if self.poller.owner(fd) is not None or self.foreign_transports:
            self._ensure_fd_no_transport(fd)
        return 0

    cdef int before_submit(self) except -1:
        cdef SocketQueue queue
        cdef Py_ssize_t i = 0
        self.look_for_closed(LOOKS_PER_TICK)
        while i < PyList_GET_SIZE(self.unarmed_queues):
            queue = <SocketQueue>PyList_GET_ITEM(self.unarmed_queues, i)
            queue.arm()
            i += 1
        self.unarmed_queues.clear()
        return 0

    cdef bint before_wait(self) except -1:
        # When nothing has run since all were looked at, the loop may sleep.
        if not self.is_idle:
            self.unlooked = self.watched_sockets()
        self.look_for_closed(LOOKS_PER_WAIT)
        return self.unlooked > 0

    cdef Py_ssize_t watched_sockets(self) noexcept:
        return (PyList_GET_SIZE(self.busy_queues) + PyList_GET_SIZE(self.read_aheads)
                + PyList_GET_SIZE(self.listeners))

    cdef int look_for_closed(self, Py_ssize_t looks) except -1:
        """A request in flight holds its file: end those whose sockets were closed, some at a time,
        in turn."""
        cdef Py_ssize_t i
        for i in range(min(looks, self.watched_sockets())):
            # Backwards, because one that leaves a list puts the last into its place.
            if self.next_look <= 0:
                self.next_look = self.watched_sockets()
            self.next_look -= 1
            self.look_at(self.next_look)
            self.unlooked -= 1
        return 0

    cdef int look_at(self, Py_ssize_t place) except -1:
        cdef SocketQueue queue
        cdef ReadAhead ahead
        cdef Listener listener
        if place < PyList_GET_SIZE(self.busy_queues):
            queue = <SocketQueue>PyList_GET_ITEM(self.busy_queues, place)
            if awaitable.socket_fd(queue.head.sock) != queue.fd:
                queue.fail_closed()
            return 0
        place -= PyList_GET_SIZE(self.busy_queues)
        if place < PyList_GET_SIZE(self.read_aheads):
            ahead = <ReadAhead>PyList_GET_ITEM(self.read_aheads, place)
            if not ahead.is_of(ahead.sock()):
                ahead.stop()
            return 0
        place -= PyList_GET_SIZE(self.read_aheads)
        if place < PyList_GET_SIZE(self.listeners):
            listener = <Listener>PyList_GET_ITEM(self.listeners, place)
            listener.is_open()          # stops it if not
        return 0

    def _release(self):
        try:
            LoopCore._release(self)
        finally:
            self.input_queues.clear()
            self.output_queues.clear()
            self.busy_queues.clear()
            self.unarmed_queues.clear()
            self.listeners.clear()
            self.read_aheads.clear()
            self.stash.clear()
            self.any_done_future = None


cpdef bint is_known_socket(sock) except -1:
    """Whether the object is a socket whose head awaitable.h may read: mocks say so and are not."""
    return type(sock) is _SOCKET or issubclass(type(sock), _SOCKET)


cdef bint is_direct(kind_of_socket, CallKind kind) except -1:
    name = _DIRECT_METHODS.get(kind)
    return name is None or getattr(kind_of_socket, name) is getattr(_SOCKET, name)


class _NoSocket:
    """In place of sockets that awaitable.h does not know: asyncio's code serves them all then."""


def _known_socket_class():
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        try:
            sock = socket.socket(socket.AF_UNIX, kind | socket.SOCK_NONBLOCK)
        except OSError:
            return _NoSocket            # importing must not fail; nothing else will work either
        with sock:
            if (awaitable.socket_fd(sock) != sock.fileno()
                    or awaitable.socket_type(sock) != sock.type):
                return _NoSocket
    return _NoSocket if awaitable.socket_fd(sock) != -1 else socket.socket


_SOCKET = _known_socket_class()
