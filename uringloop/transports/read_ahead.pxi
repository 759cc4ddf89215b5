# ReadAhead: a multishot receive that stays armed between the sock_recv() calls on one socket.
#
# Only with the option sock_readahead, which says that the loop owns the read side of every stream
# socket that sock_recv() was called on: what arrives is held here, in order, for the next call (or
# for a transport made of the socket). One SQE serves any number of calls.
#
# The socket object is referenced weakly: a request in flight must not keep it from being collected,
# nor its peer from seeing the end when it is closed (SockLoop compares descriptors).

cdef enum:
    # More than this is not held: the receive is ended until calls have taken it.
    HOLD_LIMIT = 65536


@cython.internal
@cython.final
cdef class ReadAhead(Watched):
    cdef SockLoop loop
    cdef SocketQueue queue
    cdef object sock            # weak
    cdef int fd
    cdef object cookie          # of the socket: its number may be another's when it is closed
    cdef object held            # deque of bytes
    cdef Py_ssize_t held_size
    cdef object end             # None; EOFError for the end of the stream; or the error

    def __repr__(self):
        return f"<ReadAhead fd={self.fd} held={self.held_size}>"

    cdef bint is_of(self, sock) except -1:
        """Whether it is this socket that is read, and open."""
        return sock is not None and self.sock() is sock and awaitable.socket_fd(sock) == self.fd

    cdef int look(self) except -1:
        return 0 if self.is_of(self.sock()) else self.stop()

    cdef bint serve(self, SocketCall call) except -1:
        """Give a call what is held. Returns whether there was anything; raises a stream's error."""
        cdef bytes data
        cdef Py_ssize_t taken
        if self.held:
            data = self.held[0]
            taken = call.take(PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data))
            self.held.popleft()
            self.held_size -= taken
            if taken < PyBytes_GET_SIZE(data):
                self.held.appendleft(data[taken:])
            elif not self.held:
                self.queue.request()
            return True
        if self.end is None:
            return False
        if isinstance(self.end, EOFError):
            call.take(b"", 0)
            return True
        # Told once. The next call begins anew: the socket may not have been connected yet.
        alive = self
        end, self.end = self.end, None
        self.stop()
        raise end

    cdef int arm(self) except -1:
        """Put the receive into the ring. Called right before the submit."""
        cdef liburing.io_uring_sqe *sqe
        if self.state != IDLE or self.end is not None or self.held_size >= HOLD_LIMIT:
            return 0
        sqe = self.loop.ring.start(self, liburing.IORING_OP_RECV, self.fd, NULL, 0)
        sqe.flags = liburing.IOSQE_BUFFER_SELECT
        sqe.ioprio = liburing.IORING_RECV_MULTISHOT
        sqe.buf_group = BUFFER_GROUP
        return 0

    cdef int complete(self, int32_t result, uint32_t flags) except -1:
        cdef SocketQueue queue = self.queue
        cdef SocketCall call
        if self.place < 0:              # stop() could not wait for its last answer
            self.take_answer(None, result, flags)
            return self.leave()
        call = queue.head
        if self.held or self.end is not None or self.loop.stash.has(self.cookie):
            call = None                 # something older comes first
        self.take_answer(call, result, flags)
        if flags & liburing.IORING_CQE_F_MORE:
            if self.held_size >= HOLD_LIMIT:
                self.loop.ring.cancel(self)
        elif result == -ENOBUFS and not self.loop.ring.ran_dry():
            self.stop()                 # the pool is exhausted: recv(2) for this call
        else:
            queue.request()
        if call is None:
            return 0
        return queue.head_done(call) if result > 0 else queue.retry_head()

    cdef int take_answer(self, SocketCall call, int32_t result, uint32_t flags) except -1:
        """Give what came to a call, and hold what it does not take."""
        cdef BufferRing buffers = self.loop.ring.buffers
        cdef unsigned block = flags >> liburing.IORING_CQE_BUFFER_SHIFT
        cdef const char *content
        cdef Py_ssize_t taken = 0
        if result <= 0:
            if result == 0:
                self.end = EOFError()
            elif result != -ENOBUFS and not is_retry(result):
                self.end = os_error(-result)
            return 0
        self.loop.counters.bytes_received += result
        content = buffers.lend(block)
        if self.end is not None:        # told before what comes behind it
            buffers.give_back(block)
            return 0
        try:
            if call is not None:
                taken = call.offer(content, result)
        finally:
            try:
                if taken < result:
                    self.held.append(PyBytes_FromStringAndSize(content + taken, result - taken))
                    self.held_size += result - taken
            except MemoryError as exc:
                self.end = exc          # what follows must not look like its continuation
            finally:
                buffers.give_back(block)
        return 0

    cdef int discard(self, int32_t result, uint32_t flags) except -1:
        self.take_answer(None, result, flags)
        return self.leave()

    cdef int stop(self) except -1:
        """The socket is not read ahead any more; the stash has what was held."""
        cdef Ring ring = self.loop.ring
        cdef Answer answer
        if self.place < 0:
            return 0
        alive = self                    # the queue and the loop have the last references
        self.loop.unwatch(self)
        self.queue.ahead = None
        if self.state != IDLE:
            ring.cancel_now(self)
            ring.drain()
            while self.state != IDLE and ring.answers.take(self.user_data, &answer):
                if not answer.flags & liburing.IORING_CQE_F_MORE:
                    ring.finished(self)
                self.take_answer(None, answer.result, answer.flags)
        return self.leave()

    cdef int leave(self) except -1:
        """Hand what is held to the stash."""
        while self.held:
            self.loop.stash.put(self.cookie, self.held.popleft())
        if self.end is not None and not isinstance(self.end, EOFError):
            self.loop.stash.put(self.cookie, self.end)
        self.held_size = 0
        self.end = None
        return 0
