# SocketQueue: the calls that wait on one side of one descriptor, first in first out.
#
# Only the call at the head has a request in flight, and only while it waits: between calls nothing
# of a socket is ours, so that it may be read from directly, duplicated, detached or handed on.
# (With the option sock_readahead the read side is ours: read_ahead.pxi.) On the ring the request
# is a receive bounded by what the call asked for, the send of a small message, or else a poll; on
# epoll it is readiness. A poll consumes nothing: the call is tried again.
#
# Code of the user may run while a call is tried (a recv() of its own, a buffer written in Python)
# and end any call, this one included: look at the head again afterwards.

cdef enum RequestKind:
    POLL                # answered by the ring, as READINESS is by the poller
    READINESS_WATCH
    RECEIVE
    SEND


@cython.internal
@cython.final
cdef class SocketQueue(Watched):
    cdef SockLoop loop
    cdef int fd
    cdef bint is_output
    cdef SocketCall head
    cdef object followers       # deque of SocketCall, or None
    cdef RequestKind request_kind       # of what is in flight
    # The call has gone, its request not yet: what it brings is for the stash, under `cookie`.
    cdef bint orphaned
    cdef object cookie
    cdef uint64_t polled        # the cookie of the socket that a POLL is about
    cdef bytes sending          # what a SEND in flight refers to
    cdef ReadAhead ahead        # None unless the option is on
    # The socket object of the last call (weak), and what was learned of it.
    cdef object sock
    cdef object sock_cookie     # of an input queue
    cdef bint drained           # the last receive left nothing in the socket
    cdef bint large             # the last receive filled a block

    cdef object owner(self):
        return self.head or self

    def __repr__(self):
        return f"<SocketQueue fd={self.fd} {self.head!r}>"

    # --- calls ---------------------------------------------------------------------------------

    cdef bint should_try(self, SocketCall call) except -1:
        """Whether a new call is tried at once: not before those that wait; not where a look at the
        socket would most likely be in vain; not if its send can leave together with others."""
        if self.sock is None or self.sock() is not call.sock:
            self.meet(call.sock)
        if self.head is not None or call.kind == CONNECT:
            return False
        if call.kind == SENDALL:
            return not self.can_batch(call)
        return self.may_have_bytes() or not (self.drained and call.limit)

    cdef int meet(self, sock) except -1:
        """The next call is on another socket object, maybe of another socket with this number."""
        self.look()                 # before what is known of the old one is forgotten
        self.sock = weakref.ref(sock)
        self.sock_cookie = None if self.is_output else cookie_of(self.fd)
        self.drained = self.large = False
        return 0

    cdef bint can_batch(self, SocketCall call) except -1:
        return (self.loop.ring is not None and call.direct and type(call.argument) is bytes
                and 0 < PyBytes_GET_SIZE(call.argument) < SEND_NOW_SIZE and call.sent == 0)

    cdef bint may_have_bytes(self) except -1:
        """Whether the next input call may find bytes that were received already."""
        return self.ahead is not None or len(self.loop.stash.entries) > 0

    cdef int read_ahead(self, sock) except -1:
        """Keep a receive armed on the socket (the option sock_readahead)."""
        cdef ReadAhead ahead
        if self.sock is None or self.sock() is not sock:
            self.meet(sock)
        if (self.reads_ahead_of(sock) or self.loop.ring is None or self.state != IDLE
                or self.loop.poller.owner(self.fd) is not None):
            return 0
        ahead = ReadAhead.__new__(ReadAhead)
        ahead.loop = self.loop
        ahead.queue = self
        ahead.fd = self.fd
        ahead.cookie = self.sock_cookie
        ahead.sock = weakref.ref(sock)
        ahead.held = collections.deque()
        self.loop.watch(ahead)
        self.ahead = ahead
        return self.request()

    cdef bint reads_ahead_of(self, sock) except -1:
        if self.ahead is None:
            return False
        if not self.ahead.is_of(sock):
            self.ahead.stop()       # the number is another socket's now
            return False
        return True

    cdef int learn(self, Py_ssize_t size, Py_ssize_t limit) except -1:
        """Remember how much a receive found."""
        self.drained = size < limit
        self.large = size >= self.loop.recv_buffer_size
        return 0

    cdef int add(self, SocketCall call) except -1:
        if self.head is None:
            self.loop.watch(self)
            self.head = call
            call.queue = self
            return self.request()
        if self.followers is None:
            followers = collections.deque()
            # Making it may have run the collector, and that a finalizer which came here too.
            if self.followers is None:
                self.followers = followers
        self.followers.append(call)
        call.queue = self
        if self.state == IDLE:
            return self.request()   # add_reader() may have displaced what the head waited for
        return 0

    cdef int remove(self, SocketCall call) except -1:
        """The call waits no longer; what was received for it is stashed."""
        if call is not self.head:
            self.followers.remove(call)
            return 0
        self.halt()
        return self.next()

    cdef int next(self) except -1:
        """The head has ended: the call behind it takes its place."""
        self.head.let_socket_go()
        self.head.queue = None
        self.head = None
        if not self.followers:
            return self.loop.unwatch(self)
        self.head = self.followers.popleft()
        if not self.is_output and self.may_have_bytes():
            # Not now: no call may be given bytes that its task does not fetch at once.
            self.loop.call_soon(self._retry)
            return 0
        return self.request()

    cdef int head_failed(self, SocketCall call, exc) except -1:
        """The request, or what it brought, could not be dealt with: the call ends."""
        if self.head is not call or call is None:
            raise exc
        call.error = exc
        return self.head_done(call)

    def _retry(self):
        if self.head is not None and self.state == IDLE:
            self.retry_head()

    cdef int retry_head(self) except -1:
        """The socket may be ready: try the call again."""
        cdef SocketCall call = self.head
        cdef bint done
        try:
            done = call.attempt(self)
        except (SystemExit, KeyboardInterrupt):
            self.request()
            raise
        except BaseException as exc:
            call.error = exc
            done = True
        return self.head_done(call) if done else self.request()

    cdef int head_done(self, SocketCall call) except -1:
        """The call has its result or error, unless it was ended on the way."""
        if self.head is not call:
            return call.keep_value()
        self.next()
        return call.call_back()

    cdef int look(self) except -1:
        # asyncio's calls would wait for ever.
        cdef SocketCall call
        if self.head is None or awaitable.socket_fd(self.head.sock) == self.fd:
            return 0
        if self.ahead is not None:
            self.ahead.stop()
        self.halt()
        calls = self.take_calls()
        for call in calls:
            if awaitable.socket_fd(call.sock) == self.fd:
                self.add(call)
            else:
                call.fail_later(closed_under(call))
        return 0

    cdef int refuse_calls(self) except -1:
        """A transport has the socket now (asyncio's calls would wait for ever)."""
        cdef SocketCall call
        if self.ahead is not None:
            self.ahead.stop()
        if self.head is None:
            return 0
        self.halt()
        for call in self.take_calls():
            error = RuntimeError(
                f"File descriptor {self.fd} is used by a transport since {call.__name__}() waits")
            try:
                # A small send that waited for the iteration's end comes before the transport's.
                if call.kind == SENDALL and call.attempt(self):
                    error = None
            except OSError as exc:
                error = exc
            call.fail_later(error)
        return 0

    cdef list take_calls(self):
        """All calls, in order; none waits here any more."""
        cdef SocketCall call
        cdef list calls = [self.head, *(self.followers or ())]
        for call in calls:
            call.let_socket_go()
            call.queue = None
        self.head = self.followers = None
        self.loop.unwatch(self)
        return calls

    # --- the request in flight -----------------------------------------------------------------

    cdef int request(self) except -1:
        """Have a request made before the loop submits."""
        return self.loop.want_request(self)

    cdef int arm(self) except -1:
        """Make the request for the head. Called right before the submit."""
        cdef SocketCall call = self.head
        try:
            return self.make_request()
        except MemoryError as exc:
            if call is None or self.head is not call:
                raise
            self.next()
            call.fail_later(exc)
        return 0

    cdef int make_request(self) except -1:
        if self.ahead is not None and self.reads_ahead_of(self.ahead.sock()):
            return self.ahead.arm()
        self.look()
        if self.head is None or self.state != IDLE:
            return 0
        if (not self.is_output and self.may_have_bytes()
                and self.loop.stash.has(cookie_of(self.fd))):
            # Nothing newer may come before it.
            self.loop.call_soon(self._retry)
            return 0
        if self.loop.ring is None:
            return self.watch()
        if self.head.limit and not self.large:
            return self.prepare_receive()
        if self.head.kind == SENDALL and self.can_batch(self.head):
            return self.prepare_send()
        return self.prepare_poll()

    cdef int watch(self) except -1:
        cdef SocketCall call = self.head
        self.request_kind = READINESS_WATCH
        try:
            if self.is_output:
                self.loop.poller.watch_output(self.fd, self)
            else:
                self.loop.poller.watch_input(self.fd, self)
        except (OSError, MemoryError) as exc:
            self.next()
            call.fail_later(exc)
        return 0

    cdef int prepare_receive(self) except -1:
        cdef liburing.io_uring_sqe *sqe = self.loop.ring.start(
            self, liburing.IORING_OP_RECV, self.fd, NULL,
            <uint32_t>min(self.head.limit, self.loop.recv_buffer_size))
        sqe.flags = liburing.IOSQE_BUFFER_SELECT
        sqe.buf_group = BUFFER_GROUP
        self.request_kind = RECEIVE
        return 0

    cdef int prepare_send(self) except -1:
        cdef liburing.io_uring_sqe *sqe
        self.sending = self.head.argument
        # Before the request is made: what fails behind it would let go of a call in flight.
        if self.head.holds_socket:
            self.loop.holding_calls.append(self.head)
        sqe = self.loop.ring.start(
            self, liburing.IORING_OP_SEND, self.fd, PyBytes_AS_STRING(self.sending),
            <uint32_t>PyBytes_GET_SIZE(self.sending))
        sqe.msg_flags = liburing.MSG_WAITALL | liburing.MSG_NOSIGNAL
        self.request_kind = SEND
        return 0

    cdef int prepare_poll(self) except -1:
        cdef liburing.io_uring_sqe *sqe = self.loop.ring.start(
            self, liburing.IORING_OP_POLL_ADD, self.fd, NULL, 0)
        sqe.poll32_events = liburing.poll_events(
            liburing.POLLOUT if self.is_output else liburing.POLLIN)
        self.request_kind = POLL
        self.polled = socket_cookie(self.fd)
        return 0

    cdef int halt(self) except -1:
        """End the request in flight before returning; the socket may be closed then."""
        cdef Answer answer
        if self.state == IDLE or self.orphaned:
            return 0
        if self.request_kind == READINESS_WATCH:
            return self.stop_watching()
        self.cookie = self.sock_cookie
        if not self.loop.ring.end_now(self, &answer):
            self.orphaned = True
            return 0
        if self.request_kind == SEND and answer.result > 0:
            self.head.sent += answer.result
        return self.keep(answer.result, answer.flags)

    cdef int stop_watching(self) except -1:
        if self.is_output:
            return self.loop.poller.unwatch_output(self.fd, self)
        return self.loop.poller.unwatch_input(self.fd, self)

    cdef int complete(self, int32_t result, uint32_t flags) except -1:
        cdef SocketCall call = self.head
        try:
            return self.take_answer(result, flags)
        except MemoryError as exc:
            return self.head_failed(call, exc)

    cdef int take_answer(self, int32_t result, uint32_t flags) except -1:
        if self.request_kind == READINESS_WATCH:
            self.stop_watching()
        elif self.orphaned:
            self.orphaned = False
            self.keep(result, flags)
        elif is_retry(result):
            self.sending = None
            return self.request()
        elif self.request_kind == RECEIVE:
            return self.received(result, flags)
        elif self.request_kind == SEND:
            return self.sent(result)
        elif self.polled != socket_cookie(self.fd) and self.head is not None:
            return self.lost_number()
        return self.retry_head() if self.head is not None else 0

    cdef int lost_number(self) except -1:
        """os.close() behind the socket object's back: the number may be another's already."""
        cdef SocketCall call
        for call in self.take_calls():
            call.fail_later(closed_under(call))
        return 0

    cdef int sent(self, int32_t result) except -1:
        cdef SocketCall call = self.head
        self.sending = None
        if result < 0:
            call.error = os_error(-result)
            return self.head_done(call)
        self.loop.counters.bytes_sent += result
        call.sent += result
        if call.sent < PyBytes_GET_SIZE(call.argument):
            return self.retry_head()    # the rest tells why
        return self.head_done(call)

    cdef int received(self, int32_t result, uint32_t flags) except -1:
        cdef SocketCall call = self.head
        if result > 0:
            return self.deliver(flags >> liburing.IORING_CQE_BUFFER_SHIFT, result)
        if result == -ENOBUFS:
            # The data waits in the socket: one more block for the next time, and recv(2) now.
            self.loop.ring.ran_dry()
            return self.retry_head()
        self.drained = False
        if result == 0:
            call.offer(b"", 0)
        else:
            call.error = os_error(-result)
        return self.head_done(call)

    cdef int deliver(self, unsigned block, int32_t size) except -1:
        cdef SocketCall call = self.head
        cdef BufferRing buffers = self.loop.ring.buffers
        cdef Py_ssize_t taken = 0
        cdef const char *content = buffers.lend(block)
        self.loop.counters.bytes_received += size
        self.learn(size, min(call.limit, self.loop.recv_buffer_size))
        try:
            taken = call.offer(content, size)
        finally:
            if taken < size:
                self.loop.stash.put(self.sock_cookie, PyBytes_FromStringAndSize(
                    content + taken, size - taken))
            buffers.give_back(block)
        return self.head_done(call)

    cdef int keep(self, int32_t result, uint32_t flags) except -1:
        """The request won the race against its end: the next call gets what it brought."""
        cdef BufferRing buffers = self.loop.ring.buffers
        cdef unsigned block = flags >> liburing.IORING_CQE_BUFFER_SHIFT
        self.sending = None
        if self.request_kind != RECEIVE:
            return 0
        if result > 0:
            buffers.lend(block)
            self.loop.stash.put(self.cookie, buffers.copy(block, result))
        elif result < 0 and result != -ENOBUFS and not is_retry(result):
            self.loop.stash.put(self.cookie, os_error(-result))
        return 0

    cdef int discard(self, int32_t result, uint32_t flags) except -1:
        if not self.orphaned:
            self.cookie = self.sock_cookie
        return self.keep(result, flags)


cdef object closed_under(SocketCall call):
    return os_error(EBADF, f"socket closed while {call.__name__}() was waiting")
