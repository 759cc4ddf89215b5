# SockLoop: loop.sock_*, for sockets that no transport has.
#
# Owner of the queues, one for each side of a descriptor that a call was made on. The contract is
# asyncio's, down to the texts of errors, but for one thing: calls wait in the order in which they
# were made, where asyncio's displace each other.

cdef enum:
    # How many operations are looked at, whether their sockets were closed: before the loop blocks,
    # and in each tick, for a loop that never blocks.
    LOOKS_PER_WAIT = 256
    LOOKS_PER_TICK = 8


cdef class SockLoop(LoopCore):
    cdef list input_queues, output_queues       # by descriptor; None: no call was made yet
    # Those that want a request before the next submit: a chain, which takes no memory to join.
    cdef Watched first_unarmed, last_unarmed
    cdef list holding_calls     # whose sends are prepared
    # Watched: what user code may close the socket of; the places behind the count are empty.
    cdef list watched
    cdef Py_ssize_t watched_count
    cdef Py_ssize_t next_look, unlooked     # places in `watched`
    cdef Stash stash
    cdef bint reads_ahead       # the option sock_readahead
    cdef object any_done_future
    cdef dict foreign_transports        # asyncio's own, by descriptor

    def __cinit__(self, *args, **kwargs):
        self.input_queues = []
        self.output_queues = []
        self.holding_calls = []
        self.watched = []
        self.stash = _STASH
        self.foreign_transports = {}

    def _set_up_sockets(self, dict transports, bint reads_ahead):
        """asyncio's own transports by descriptor, whose sockets are not to be used here; and the
        option sock_readahead."""
        self.foreign_transports = transports
        self.reads_ahead = reads_ahead

    # --- asyncio's methods -----------------------------------------------------------------------

    def sock_recv(self, sock, n):
        """Receive up to n bytes, as bytes; b"" at the end of the stream. A coroutine."""
        return self.make_call(RECV, sock, n, None)

    def sock_recv_into(self, sock, buf):
        """Receive into a writable buffer; returns the number of bytes. A coroutine."""
        return self.make_call(RECV_INTO, sock, buf, None)

    def sock_recvfrom(self, sock, bufsize):
        """Receive a datagram of up to bufsize bytes: (bytes, address). A coroutine."""
        return self.make_call(RECVFROM, sock, bufsize, None)

    def sock_recvfrom_into(self, sock, buf, nbytes=0):
        """Receive a datagram into a buffer: (number of bytes, address). A coroutine."""
        return self.make_call(RECVFROM_INTO, sock, buf, nbytes)

    def sock_accept(self, sock):
        """Accept a connection: (socket, address), the socket non-blocking. A coroutine."""
        return self.make_call(ACCEPT, sock, None, None)

    def sock_sendall(self, sock, data):
        """Send all of a bytes-like object; returns None. A coroutine."""
        return self.make_call(SENDALL, sock, data, None)

    def sock_sendto(self, sock, data, address):
        """Send a datagram to an address; returns the number of bytes. A coroutine."""
        return self.make_call(SENDTO, sock, data, address)

    def _sock_connected(self, sock, address):
        """Wait for the end of a connect(2) in progress; OSError if it failed. A coroutine."""
        return self.make_call(CONNECT, sock, address, None)

    cdef object make_call(self, CallKind kind, sock, argument, option):
        cdef SocketCall call
        if not is_known_socket(sock):
            return self.asyncios_call(kind, sock, argument, option)
        call = <SocketCall>SocketCall.__new__(SocketCall)
        call.loop = self
        call.kind = kind
        call.sock = sock
        call.argument = argument
        call.option = option
        call.direct = type(sock) is _SOCKET or is_direct(type(sock), kind)
        call.is_made = True
        return call

    cdef object asyncios_call(self, CallKind kind, sock, argument, option):
        method = getattr(selector_events.BaseSelectorEventLoop, _CALL_NAMES[kind])
        if kind == ACCEPT:
            return method(self, sock)
        if kind == RECVFROM_INTO or kind == SENDTO:
            return method(self, sock, argument, option)
        return method(self, sock, argument)

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
        # Making it may have run the collector, and that a finalizer which came here too.
        if queues[fd] is None:
            queues[fd] = queue
        return queues[fd]

    cdef list take_received(self, int fd):
        """What was received for calls on a socket that gets a transport now: bytes, maybe an
        OSError last. Calls that wait are refused."""
        self.refuse_calls(fd)
        return self.stash.take_all(cookie_of(fd)) if self.stash.entries else []

    cdef int refuse_calls(self, int fd) except -1:
        """End the calls that wait on the descriptor of a transport that is being made."""
        cdef SocketQueue queue
        if fd < PyList_GET_SIZE(self.input_queues) and self.input_queues[fd] is not None:
            queue = self.input_queues[fd]
            queue.refuse_calls()
        if fd < PyList_GET_SIZE(self.output_queues) and self.output_queues[fd] is not None:
            queue = self.output_queues[fd]
            queue.refuse_calls()
        return 0

    cdef int check_not_owned(self, int fd) except -1:
        """RuntimeError for the socket of a transport."""
        if self.poller.owner(fd) is not None or self.foreign_transports:
            self._ensure_fd_no_transport(fd)
        return 0

    cdef inline object done_future(self):
        """A Future whose result is None."""
        if self.any_done_future is None:
            future = self.create_future()
            future.set_result(None)
            self.any_done_future = future
        return self.any_done_future

    cdef bint has_to_submit(self) noexcept:
        return (self.watched_count > 0 or self.first_unarmed is not None
                or PyList_GET_SIZE(self.holding_calls) > 0 or LoopCore.has_to_submit(self))

    cdef int before_submit(self) except -1:
        cdef Watched item
        self.look_for_closed(LOOKS_PER_TICK)
        while self.first_unarmed is not None:
            item = self.take_unarmed()
            try:
                item.arm()
            except BaseException:
                self.want_request(item)             # in the next run
                raise
        return 0

    cdef int want_request(self, Watched item) noexcept:
        """Have the item make a request right before the next submit."""
        if item.is_unarmed:
            return 0
        item.is_unarmed = True
        if self.last_unarmed is None:
            self.first_unarmed = item
        else:
            self.last_unarmed.next_unarmed = item
        self.last_unarmed = item
        return 0

    cdef Watched take_unarmed(self):
        item = self.first_unarmed
        self.first_unarmed, item.next_unarmed = item.next_unarmed, None
        if self.first_unarmed is None:
            self.last_unarmed = None
        item.is_unarmed = False
        return item

    cdef int after_submit(self) except -1:
        cdef SocketCall call
        cdef Py_ssize_t i
        # Not by pop(), which takes memory to make the list shorter.
        for i in range(PyList_GET_SIZE(self.holding_calls)):
            call = <SocketCall>PyList_GET_ITEM(self.holding_calls, i)
            call.let_socket_go()
        self.holding_calls.clear()
        return 0

    # --- sockets that are closed under a request -------------------------------------------------

    cdef int watch(self, Watched item) except -1:
        # Never made shorter: leaving it cannot fail.
        if self.watched_count == PyList_GET_SIZE(self.watched):
            self.watched.append(item)
        else:
            self.watched[self.watched_count] = item
        item.place = self.watched_count
        self.watched_count += 1
        return 0

    cdef int unwatch(self, Watched item) except -1:
        cdef Watched last
        self.watched_count -= 1
        last = self.watched[self.watched_count]
        if last is not item:
            last.place = item.place
            self.watched[last.place] = last
        item.place = -1
        self.watched[self.watched_count] = None
        return 0

    cdef bint before_wait(self) except -1:
        # When nothing has run since all were looked at, the loop may sleep.
        if not self.is_idle:
            self.unlooked = self.watched_count
        self.look_for_closed(LOOKS_PER_WAIT)
        return self.unlooked > 0

    cdef int look_for_closed(self, Py_ssize_t looks) except -1:
        """Look at some of the watched, in turn."""
        cdef Watched item
        cdef Py_ssize_t i
        for i in range(min(looks, self.watched_count)):
            # Backwards, because one that leaves the list puts the last into its place.
            if not 0 < self.next_look <= self.watched_count:
                self.next_look = self.watched_count
                if self.next_look == 0:
                    break
            self.next_look -= 1
            self.unlooked -= 1
            item = <Watched>PyList_GET_ITEM(self.watched, self.next_look)
            item.look()
        return 0

    def _release(self):
        cdef Watched item
        try:
            LoopCore._release(self)
        finally:
            while self.watched_count:
                item = <Watched>PyList_GET_ITEM(self.watched, self.watched_count - 1)
                if isinstance(item, SocketQueue):
                    (<SocketQueue>item).take_calls()    # they wait for ever, as asyncio's
                else:
                    self.unwatch(item)
            self.watched.clear()
            self.input_queues.clear()
            self.output_queues.clear()
            while self.first_unarmed is not None:
                self.take_unarmed()
            self.holding_calls.clear()
            self.any_done_future = None


cpdef bint is_known_socket(sock) except -1:
    """Whether the object is a socket whose head awaitable.h may read: mocks say so and are not."""
    return type(sock) is _SOCKET or issubclass(type(sock), _SOCKET)


# What recv(2) and send(2) stand in for, unless a subclass of socket.socket has its own.
_DIRECT_METHODS = {RECV: "recv", RECV_INTO: "recv_into", SENDALL: "send"}


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
