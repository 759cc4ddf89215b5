# Receiver: the input of one stream transport.
#
# Two modes. Small: a multishot receive out of the buffer ring stays armed; one SQE serves any
# number of messages. Large: readiness from the poller, then recv(2) straight into the message,
# because blocks that pass through the ring are cold by the time they are read. A full block
# switches to large, a run of small messages back. Without a ring only the large mode exists.
#
# What arrives while the protocol does not want it (paused, or a cancelled request that had won) is
# held here, in order, and delivered before anything newer. A request is armed again only after the
# last answer of the one before.

cdef enum:
    # From here a block itself becomes the message; below, copying is cheaper than a fresh block.
    HAND_OVER_SIZE = 8192
    # A bytes object of this size stays below malloc's mmap threshold of 128 KiB.
    READ_SIZE = 120 * 1024
    # The longest datagram that asyncio receives whole.
    SCRATCH_SIZE = 256 * 1024
    SMALL_MESSAGE = 8192
    SMALL_RUN = 32
    # A connection that found no block in a full pool has so many messages more, for each block of
    # the pool, before it comes back: the way there and back costs more than it gains in 32.
    DRY_RUN = 4
    # recv(2) goes into a block that stays hot, to be copied out of it, until messages are of this
    # size. A fresh block for each costs more: malloc gives the end of its heap back in between.
    READ_ASIDE_SIZE = 32768


@cython.internal
@cython.final
cdef class Receiver(Operation):
    cdef StreamTransport transport
    cdef object context         # the protocol's callbacks run in it, as in a reader of asyncio
    cdef bint wanted            # started, not paused, not closing
    cdef bint large             # the mode
    cdef bint watching          # the last request was made to the poller, not to the ring
    cdef bint must_arm
    cdef bint delivery_scheduled
    cdef int small_in_a_row
    cdef ssize_t last_size      # of what recv(2) brought last
    cdef object held            # deque of bytes, or None
    cdef object end             # None; EOFError, the class, for end of file; or the OSError
    cdef InactivityTimer timer  # None without a timeout

    cdef object owner(self):
        return self.transport

    cdef int preload(self, list items) except -1:
        """Hold what was received before there was a transport: bytes, maybe an OSError last."""
        for item in items:
            if isinstance(item, bytes):
                self.hold(item)
            else:
                self.end = item
        return 0

    cdef int start(self) except -1:
        """Deliver what is held, then receive."""
        self.wanted = True
        self.context = PyContext_CopyCurrent()
        if self.timer is not None:
            self.timer.start()
        if self.held or self.end is not None:
            self.schedule_delivery()
        else:
            self.arm()
        return 0

    cdef int pause(self) except -1:
        """Deliver nothing more; what the kernel still sends is held."""
        self.wanted = False
        self.must_arm = False
        return self.halt()

    cdef int stop(self) except -1:
        """The connection is closing: nothing will be delivered any more."""
        self.set_timer(None)
        self.pause()
        if self.held and self.transport.is_detached():
            self.stash_held()
        self.held = None
        self.end = None
        return 0

    cdef int set_timer(self, InactivityTimer timer) except -1:
        if self.timer is not None:
            self.timer.cancel()
        self.timer = timer
        if timer is not None and self.wanted:
            timer.start()
        return 0

    cdef int halt(self) except -1:
        """End the request in flight; in the ring its last answer comes later."""
        if self.state == IDLE:
            return 0
        if self.watching:
            return self.transport.loop.poller.unwatch_input(self.transport.fd, self)
        return self.transport.loop.ring.cancel(self)

    cdef int arm(self) except -1:
        """Have a request prepared by the end of the tick."""
        if self.wanted and self.end is None and self.state == IDLE:
            self.must_arm = True
            self.transport.loop.mark_dirty(self.transport)
        return 0

    cdef int prepare(self) except -1:
        """Called from the flush: put the request into the ring or the poller."""
        cdef LoopCore loop = self.transport.loop
        cdef liburing.io_uring_sqe *sqe
        if not self.wanted or self.end is not None or self.state != IDLE:
            self.must_arm = False
            return 0
        if not self.transport.owns_descriptor():
            return self.input_ended(os_error(EBADF))
        self.watching = self.large or loop.ring is None
        try:
            if self.watching:
                loop.poller.watch_input(self.transport.fd, self)
            else:
                sqe = loop.ring.start(self, liburing.IORING_OP_RECV, self.transport.fd, NULL, 0)
                sqe.flags = liburing.IOSQE_BUFFER_SELECT
                sqe.ioprio = liburing.IORING_RECV_MULTISHOT
                sqe.buf_group = BUFFER_GROUP
        except RingError:
            raise                   # must_arm stays: it is asked for again in the next run
        except (OSError, MemoryError) as exc:
            self.must_arm = False
            return self.failed(exc)
        self.must_arm = False
        return 0

    cdef int failed(self, exc) except -1:
        """Nothing more can be received."""
        if self.transport is None:
            return 0
        return self.transport.fatal_error(exc, "Fatal read error on socket transport")

    cdef int complete(self, int32_t result, uint32_t flags) except -1:
        if self.timer is not None and (result > 0 or flags == READINESS):
            touch(self.timer.loop, self.timer)
        try:
            context = enter_context(self.context)
            try:
                return self.take_answer(result, flags)
            finally:
                PyContext_Exit(context)
        except MemoryError as exc:
            # The message is gone: what follows must not look like its continuation.
            return self.failed(exc)

    cdef int take_answer(self, int32_t result, uint32_t flags) except -1:
        if flags == READINESS:
            return self.read_now()
        if self.transport.finished:
            return self.take_late_answer(result, flags)
        # Bookkeeping first: the protocol may raise.
        if not flags & liburing.IORING_CQE_F_MORE:
            self.request_ended(result)
        if result > 0:
            return self.take_block(flags >> liburing.IORING_CQE_BUFFER_SHIFT, result)
        # An error may name a block; it is never offered again (liburing #1530).
        if result == 0:
            return self.input_ended(EOFError)
        if result == -ENOBUFS or is_retry(result):
            return 0
        return self.input_ended(os_error(-result))

    cdef int end_now(self) except -1:
        """connection_lost was called: take the last answers out of their turn."""
        cdef Ring ring = self.transport.loop.ring
        if self.state == IDLE or self.watching:
            return 0
        self.take_last_answers()
        if self.state != IDLE:
            ring.cancel_now(self)
            ring.drain()
            self.take_last_answers()
        return 0

    cdef int take_last_answers(self) except -1:
        cdef Ring ring = self.transport.loop.ring
        cdef Answer answer
        while self.state != IDLE and ring.answers.take(self.user_data, &answer):
            if not answer.flags & liburing.IORING_CQE_F_MORE:
                ring.finished(self)
            self.give_back_block(answer.result, answer.flags)
        return 0

    cdef int give_back_block(self, int32_t result, uint32_t flags) except -1:
        cdef BufferRing buffers = self.transport.loop.ring.buffers
        cdef unsigned block = flags >> liburing.IORING_CQE_BUFFER_SHIFT
        if result > 0:
            buffers.lend(block)
            if self.transport.is_detached():
                self.stash(buffers.copy(block, result))
            else:
                buffers.give_back(block)
        return 0

    cdef int stash(self, bytes data) except -1:
        """The socket is the user's again: what was received is for its next reader."""
        cdef SockLoop loop = self.transport.loop
        return loop.stash.put(self.transport.cookie or None, data)

    cdef int stash_held(self) except -1:
        while self.held:
            self.stash(self.held.popleft())
        return 0

    cdef int leave_detached(self) except -1:
        """End as asyncio does, which finds no descriptor."""
        if self.watching:
            self.halt()
        else:
            self.end_now()
        return self.input_ended(os_error(EBADF))

    cdef int take_late_answer(self, int32_t result, uint32_t flags) except -1:
        """connection_lost was called: the block goes back, and the descriptor may be closed."""
        self.give_back_block(result, flags)
        return self.transport.release_when_idle()

    cdef int discard(self, int32_t result, uint32_t flags) except -1:
        self.held = None
        if self.transport.finished:
            return self.transport.release_when_idle()
        return 0

    cdef int request_ended(self, int32_t result) except -1:
        # The data waits in the socket. As many blocks as connections readable at once are wanted,
        # so each that finds none adds one; with no room left it goes without.
        if result == -ENOBUFS and not self.transport.loop.ring.ran_dry():
            self.large = True
            self.transport.loop.counters.mode_switches += 1
            self.small_in_a_row = -DRY_RUN * <int>self.transport.loop.ring.buffers.count
        if result > 0 or result == -ENOBUFS or is_retry(result):
            # Not asked for when the completion queue was full, or a thread ended.
            return self.arm()
        return 0

    cdef int take_block(self, unsigned block, int32_t size) except -1:
        cdef LoopCore loop = self.transport.loop
        cdef BufferRing buffers = loop.ring.buffers
        cdef const char *content = buffers.lend(block)
        loop.counters.bytes_received += size
        if self.transport.is_detached():
            self.stash(buffers.copy(block, size))
            return self.leave_detached()
        if self.transport.closing:
            buffers.give_back(block)
            return 0
        if size == buffers.block_size and not self.large:
            # The answer comes first: the request to end may find the queue refused.
            try:
                return self.pass_on(block, content, size)
            finally:
                if self.wanted:
                    self.switch_to_large()
        return self.pass_on(block, content, size)

    cdef int pass_on(self, unsigned block, const char *content, int32_t size) except -1:
        """Deliver or hold a lent block's content; the block goes back."""
        cdef LoopCore loop = self.transport.loop
        cdef BufferRing buffers = loop.ring.buffers
        if not self.wanted or self.held:
            self.hold(buffers.copy(block, size))
        elif self.transport.buffered:
            try:
                self.feed(content, size)
            finally:
                buffers.give_back(block)
        elif self.transport.feed is not None and self.feed_reader(block, content, size):
            pass
        elif size < HAND_OVER_SIZE:
            self.copy_out(block, content, size)
        else:
            self.transport.data_received(buffers.hand_over(block, size))
        return 0

    cdef int copy_out(self, unsigned block, const char *content, int32_t size) except -1:
        cdef LoopCore loop = self.transport.loop
        loop.counters.messages_copied += 1
        try:
            data = loop.spares.message(content, size)
        finally:
            loop.ring.buffers.give_back(block)
        self.transport.data_received(data)
        return loop.spares.take_back(data)

    cdef bint feed_reader(self, unsigned block, const char *content, int32_t size) except -1:
        """Try the short way into a StreamReader; the block goes back if it was taken."""
        cdef LoopCore loop = self.transport.loop
        cdef bint fed = True
        try:
            fed = self.transport.fed(content, size)
        finally:
            if fed:
                loop.counters.messages_fed += 1
                loop.ring.buffers.give_back(block)
        return fed

    cdef int hold(self, bytes data) except -1:
        if self.held is None:
            self.held = collections.deque()
        self.held.append(data)
        return 0

    cdef int hold_rest(self, const char *content, Py_ssize_t size) except -1:
        """Hold what a protocol did not take of a message: it comes before all else that is held."""
        if size:
            if self.held is None:
                self.held = collections.deque()
            self.held.appendleft(PyBytes_FromStringAndSize(content, size))
            if self.wanted:
                self.schedule_delivery()
        return 0

    cdef int switch_to_large(self) except -1:
        self.large = True
        self.small_in_a_row = 0
        self.transport.loop.counters.mode_switches += 1
        return self.halt()

    cdef int switch_to_small(self) except -1:
        self.large = False
        self.transport.loop.counters.mode_switches += 1
        self.halt()
        return self.arm()

    cdef int feed(self, const char *content, Py_ssize_t size) except -1:
        """Copy into the buffers of a BufferedProtocol, which may pause, close or be replaced."""
        cdef StreamTransport transport = self.transport
        cdef Py_ssize_t copied
        while size > 0 and not transport.closing:
            if not self.wanted:
                return self.hold_rest(content, size)
            if transport.tls is not None:
                return transport.pass_to_tls(content, size)
            if not transport.buffered:
                return transport.data_received(PyBytes_FromStringAndSize(content, size))
            try:
                copied = transport.fill_buffer(content, size)
                content += copied
                size -= copied
                if copied:
                    transport.buffer_updated(copied)
            except BaseException:       # KeyboardInterrupt: the connection goes on in the next run
                self.hold_rest(content, size)
                raise
        return 0

    cdef int read_now(self) except -1:
        """The descriptor is readable: one recv(2), so that no connection starves the others."""
        cdef LoopCore loop = self.transport.loop
        cdef ssize_t size
        cdef object space
        cdef PyObject *message
        if not self.wanted or self.transport.closing:
            return 0
        if self.transport.is_detached():
            return self.leave_detached()
        if self.transport.buffered and self.transport.tls is None:
            size = self.transport.buffer_received()
            if size > 0:
                self.count_message(size)
            return 0
        if (self.last_size < READ_ASIDE_SIZE or self.transport.feed is not None
                or self.transport.tls is not None):
            space = scratch_of(loop)
        else:
            space = PyBytes_FromStringAndSize(NULL, READ_SIZE)
        size = liburing.recv(self.transport.fd, PyBytes_AS_STRING(space), READ_SIZE,
                             liburing.MSG_DONTWAIT)
        if size <= 0:
            return self.read_failed(size)
        if self.transport.tls is not None:
            self.count_message(size)
            return self.transport.pass_to_tls(PyBytes_AS_STRING(space), size)
        if self.transport.feed is not None and self.transport.fed(PyBytes_AS_STRING(space), size):
            loop.counters.messages_fed += 1
            return self.count_message(size)
        if space is loop.scratch:
            loop.counters.messages_copied += 1
            data = loop.spares.message(PyBytes_AS_STRING(space), size)
        else:
            message = <PyObject *>space
            Py_INCREF(space)
            space = None                # shrink() wants the only reference
            data = shrink(message, size)
        self.count_message(size)
        self.transport.data_received(data)
        return loop.spares.take_back(data)

    cdef int count_message(self, ssize_t size) except -1:
        cdef LoopCore loop
        if self.transport is None:      # a nested loop ended the connection meanwhile
            return 0
        loop = self.transport.loop
        loop.counters.bytes_received += size
        self.last_size = size
        if size >= SMALL_MESSAGE:
            self.small_in_a_row = min(self.small_in_a_row, 0)
            return 0
        if self.small_in_a_row < SMALL_RUN:
            self.small_in_a_row += 1
        if self.small_in_a_row == SMALL_RUN and self.large and loop.ring is not None:
            self.switch_to_small()
        return 0

    cdef int read_failed(self, ssize_t size) except -1:
        """recv(2) returned 0 or failed, errno being set."""
        cdef int error = errno
        if size < 0 and error in (EAGAIN, EINTR):
            return 0
        self.halt()
        return self.input_ended(EOFError if size == 0 else os_error(error))

    cdef int input_ended(self, end) except -1:
        if self.transport.closing or self.end is not None:
            return 0
        self.end = end
        if not self.wanted or self.held:
            return 0
        return self.report_end()

    cdef int report_end(self) except -1:
        self.must_arm = False
        if self.end is not EOFError:
            return self.transport.fatal_error(self.end, "Fatal read error on socket transport")
        try:
            return self.transport.eof_received()
        except BaseException:       # KeyboardInterrupt: asked again in the next run, as by asyncio
            self.schedule_delivery()
            raise

    cdef int schedule_delivery(self) except -1:
        if not self.delivery_scheduled:
            try:
                self.transport.loop.schedule(self._deliver_held, (), None)
            except MemoryError as exc:
                return self.failed(exc)
            self.delivery_scheduled = True
        return 0

    def _deliver_held(self):
        self.delivery_scheduled = False
        if self.transport is None:
            return
        if self.timer is not None and self.held:
            touch(self.timer.loop, self.timer)
        try:
            context = enter_context(self.context)
            try:
                self.deliver_held()
            finally:
                PyContext_Exit(context)
        except MemoryError as exc:
            self.failed(exc)

    cdef int deliver_held(self) except -1:
        cdef StreamTransport transport = self.transport
        cdef bytes data
        try:
            while self.held and self.wanted and not transport.closing:
                data = self.held.popleft()
                if transport.buffered:
                    self.feed(PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data))
                else:
                    transport.data_received(data)
        finally:
            # After a KeyboardInterrupt too: the connection goes on in the next run.
            if self.wanted and not transport.closing:
                if self.held:
                    self.schedule_delivery()
                elif self.end is None:
                    self.arm()
        if self.wanted and not transport.closing and self.end is not None and not self.held:
            self.report_end()
        return 0


cdef bytes scratch_of(LoopCore loop):
    """The block of SCRATCH_SIZE bytes that small reads of all sockets go through, so it stays hot.

    Memory is taken for what of it was ever used.
    """
    if loop.scratch is None:
        loop.scratch = PyBytes_FromStringAndSize(NULL, SCRATCH_SIZE)
    return loop.scratch
