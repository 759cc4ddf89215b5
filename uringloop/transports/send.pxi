# Sender: the output of one stream transport.
#
# Owner: the chunks belong to the sender until the kernel has taken them. Bytes objects are
# referenced, everything else is copied before write() returns (the caller may change it).
#
# At most one send is in flight per socket: two would interleave. It is MSG_WAITALL, so a short
# result means an error or a cancellation, and sending the rest tells which. It carries at most
# CHUNK_SIZE bytes: beyond that the kernel moves the request to a worker thread, where it cannot be
# cancelled any more (docs/kernel.md). With a write timeout it is not MSG_WAITALL: every bit of
# progress has to be seen.
#
# With the option send_zerocopy, a request that carries a large part of a write to a TCP socket is
# a zero-copy send. Such a write waits for the flush, and the chunks are lent to the kernel until
# its notification (ring/loan.pxi). Everything else goes by the result, as for a send that copies:
# then the kernel has accepted the bytes, and the next send may follow.

cdef enum:
    CHUNK_SIZE = 256 * 1024
    MAX_VECTORS = 1024          # IOV_MAX; one more is EMSGSIZE
    # From here send(2) at once is cheaper than a trip through the ring.
    SEND_NOW_SIZE = 16384
    # ... and, where there is none, than waiting for the flush, when the message is cold.
    SEND_HOT_SIZE = 8192
    # One fast reader does not hold the loop for longer than this takes to send.
    SEND_NOW_LIMIT = 1024 * 1024
    # writelines() of no more than this is joined into one chunk.
    JOIN_SIZE = 65536
    # DONTWAIT: a dup of the descriptor, maybe in another process, may have been made blocking.
    SEND_FLAGS = liburing.MSG_NOSIGNAL | liburing.MSG_DONTWAIT


@cython.internal
@cython.final
cdef class Sender(Operation):
    cdef StreamTransport transport
    cdef list chunks            # bytes; those before `first` are sent
    cdef Py_ssize_t first
    cdef Py_ssize_t offset      # bytes of chunks[first] that are sent
    cdef Py_ssize_t size        # bytes in all that are not sent
    cdef bint watching          # the last request was made to the poller, not to the ring
    cdef InactivityTimer timer  # None without a timeout
    cdef Py_ssize_t in_flight_size
    cdef uint64_t prepared_in   # the number of the tick
    cdef bint waits_for_all     # it is MSG_WAITALL
    cdef bint cut_short         # ... and the last such sent less: its error was lost
    cdef bint dropped           # what is in flight belongs to a connection that was aborted
    cdef bint may_lend          # chunks of at least the loop's zerocopy_size
    cdef bint has_large         # there may be one in the queue
    cdef bint lends             # the last request was a zero-copy send
    cdef bint copies_next       # ... and the kernel had no memory for it
    cdef liburing.msghdr message
    cdef liburing.iovec first_vector        # enough for one chunk: sending needs no memory
    cdef liburing.iovec *vectors
    cdef Py_ssize_t vector_room

    def __cinit__(self):
        self.chunks = []
        self.vectors = &self.first_vector
        self.vector_room = 1

    def __dealloc__(self):
        if self.vectors is not &self.first_vector:
            PyMem_RawFree(self.vectors)

    cdef object owner(self):
        return self.transport

    cdef inline int append(self, bytes chunk) except -1:
        if self.timer is not None and not self.size:
            self.timer.start()
        self.chunks.append(chunk)
        self.size += PyBytes_GET_SIZE(chunk)
        if self.may_lend and PyBytes_GET_SIZE(chunk) >= self.transport.loop.zerocopy_size:
            self.has_large = True
        return 0

    cdef int extend(self, list chunks, Py_ssize_t size) except -1:
        """Append chunks of so many bytes, all or none; none of them is empty."""
        if self.timer is not None and not self.size:
            self.timer.start()
        self.chunks.extend(chunks)
        self.size += size
        for chunk in chunks if self.may_lend else ():
            if PyBytes_GET_SIZE(chunk) >= self.transport.loop.zerocopy_size:
                self.has_large = True
        return 0

    cdef inline bint waits_for_flush(self) noexcept:
        """Whether what is queued is to be lent, so that no send(2) may take it before."""
        return self.has_large and self.transport.loop.ticking

    cdef void make_vectors(self, Py_ssize_t wanted) noexcept:
        """Room for more vectors, if there is memory."""
        cdef liburing.iovec *vectors = <liburing.iovec *>PyMem_RawMalloc(
            wanted * sizeof(liburing.iovec))
        if vectors is NULL:
            return
        if self.vectors is not &self.first_vector:
            PyMem_RawFree(self.vectors)
        self.vectors = vectors
        self.vector_room = wanted

    cdef Py_ssize_t gather(self) except -1:
        """Point the vectors at what is to be sent next. Returns the bytes; message counts them."""
        cdef Py_ssize_t index = self.first, skip = self.offset, total = 0, length
        cdef Py_ssize_t count = 0, wanted = min(PyList_GET_SIZE(self.chunks) - index, MAX_VECTORS)
        cdef PyObject *chunk
        if wanted > self.vector_room:
            self.make_vectors(wanted)
            wanted = min(wanted, self.vector_room)
        while count < wanted and total < CHUNK_SIZE:
            chunk = <PyObject *>PyList_GET_ITEM(self.chunks, index)
            length = min(PyBytes_GET_SIZE(<object>chunk) - skip, CHUNK_SIZE - total)
            self.vectors[count].iov_base = PyBytes_AS_STRING(<object>chunk) + skip
            self.vectors[count].iov_len = length
            total += length
            skip = 0
            count += 1
            index += 1
        memset(&self.message, 0, sizeof(self.message))
        self.message.msg_iov = self.vectors
        self.message.msg_iovlen = count
        return total

    cdef int consume(self, Py_ssize_t sent) except -1:
        """The kernel has taken that many bytes: drop their chunks."""
        cdef Py_ssize_t left
        self.size -= sent
        if self.timer is not None and sent and self.size:
            touch(self.timer.loop, self.timer)
        self.transport.loop.counters.bytes_sent += sent
        if not self.size:
            self.transport.loop.spares.take_back(
                <object>PyList_GET_ITEM(self.chunks, PyList_GET_SIZE(self.chunks) - 1))
            return self.forget()
        while sent:
            left = PyBytes_GET_SIZE(<object>PyList_GET_ITEM(self.chunks, self.first)) - self.offset
            if sent < left:
                self.offset += sent
                return 0
            sent -= left
            self.offset = 0
            self.chunks[self.first] = None
            self.first += 1
        if self.first >= 1024 and 2 * self.first > PyList_GET_SIZE(self.chunks):
            try:
                del self.chunks[:self.first]
            except MemoryError:
                return 0                    # another time
            self.first = 0
        return 0

    cdef int send_now(self) except -1:
        """send(2) until all is sent or the socket is full, but no more than SEND_NOW_LIMIT bytes.

        Returns 0 or a positive errno.
        """
        cdef Py_ssize_t wanted, limit = self.size - SEND_NOW_LIMIT
        cdef ssize_t sent
        if self.transport.loop.dead:
            return 0            # what waits here is the parent's to send
        if self.transport.is_detached():
            return EBADF
        while self.size > 0 and self.size > limit:
            wanted = self.gather()
            if self.message.msg_iovlen == 1:
                sent = liburing.send(self.transport.fd, self.vectors[0].iov_base,
                                     self.vectors[0].iov_len, SEND_FLAGS)
            else:
                sent = liburing.sendmsg(self.transport.fd, &self.message, SEND_FLAGS)
            if sent < 0:
                if errno == EINTR:
                    continue
                return 0 if errno == EAGAIN else errno
            self.consume(sent)
            if sent < wanted:
                return 0
        return 0

    cdef int prepare(self) except -1:
        """Called from the flush: put the next request into the ring or the poller."""
        cdef LoopCore loop = self.transport.loop
        cdef liburing.io_uring_sqe *sqe
        cdef int error
        if self.state != IDLE or not self.size:
            return 0
        if self.transport.is_detached():
            return self.failed(EBADF)
        if loop.ring is None or self.goes_alone():
            error = self.send_now()
            if error:
                return self.failed(error)
            if loop.ring is None and self.size and not self.watch():
                return 0
            if loop.ring is None or not self.size:
                return self.transport.output_sent()
        self.in_flight_size = self.gather()
        self.prepared_in = loop.counters.ticks
        self.watching = False
        self.lends = self.has_large and self.lend(loop.ring)
        if self.lends and not self.transport.owns_descriptor():
            return self.failed(EBADF)
        try:
            sqe = self.start(loop.ring)
        except MemoryError as exc:
            return self.transport.fatal_error(exc, "Fatal write error on socket transport")
        self.waits_for_all = self.timer is None
        sqe.msg_flags = liburing.MSG_NOSIGNAL
        if self.waits_for_all:
            sqe.msg_flags |= liburing.MSG_WAITALL
        if self.lends:
            sqe.ioprio = loop.zerocopy_flags
            loop.ring.zerocopy_sends += 1
        return 0

    cdef bint goes_alone(self) noexcept:
        """Whether nothing else will be submitted in this flush: send(2) is one system call as well
        then, and needs no completion."""
        cdef LoopCore loop = self.transport.loop
        return (self.size < SEND_NOW_SIZE and not self.has_large
                and loop.first_dirty is None and not loop.ring.has_unsubmitted())

    cdef bint watch(self) except -1:
        """Have the poller tell when the socket has room. Returns False after a fatal error."""
        try:
            self.transport.loop.poller.watch_output(self.transport.fd, self)
        except (OSError, MemoryError) as exc:
            self.transport.fatal_error(exc, "Fatal write error on socket transport")
            return False
        self.watching = True
        return True

    cdef liburing.io_uring_sqe *start(self, Ring ring) except NULL:
        if self.message.msg_iovlen == 1:
            return ring.start(
                self, liburing.IORING_OP_SEND_ZC if self.lends else liburing.IORING_OP_SEND,
                self.transport.fd, self.vectors[0].iov_base, <uint32_t>self.vectors[0].iov_len)
        return ring.start(
            self, liburing.IORING_OP_SENDMSG_ZC if self.lends else liburing.IORING_OP_SENDMSG,
            self.transport.fd, &self.message, 1)

    cdef bint lend(self, Ring ring) noexcept:
        """Lend what was gathered, if a part of it is large enough, and there is memory to do so."""
        cdef Loan loan
        cdef size_t i, largest = 0
        if self.copies_next:
            self.copies_next = False
            return False
        for i in range(self.message.msg_iovlen):
            largest = max(largest, self.vectors[i].iov_len)
        if largest < <size_t>self.transport.loop.zerocopy_size:
            return False
        try:
            loan = Loan.__new__(Loan)
            loan.ring = ring
            loan.memory = self.chunks[self.first:self.first + <Py_ssize_t>self.message.msg_iovlen]
            self.loan = loan
        except MemoryError:
            return False
        return True

    cdef bint must_copy(self, int error) noexcept:
        """Whether a zero-copy send failed for being one: it's made again as one that copies."""
        if error == ENOMEM or error == ENOBUFS:
            self.copies_next = True     # RLIMIT_MEMLOCK counts what is lent: it comes back
        elif error == EOPNOTSUPP or error == EINVAL:
            self.may_lend = self.has_large = False
        else:
            return False
        return True

    cdef int complete(self, int32_t result, uint32_t flags) except -1:
        cdef int error = 0
        if flags == READINESS:
            error = self.send_now() if self.transport.owns_descriptor() else EBADF
            if error or not self.size:
                self.stop_watching()
        elif self.dropped:
            self.forget()
            if self.transport.finished:
                self.transport.release_when_idle()
            return 0
        elif result >= 0:
            self.cut_short = self.waits_for_all and result < self.in_flight_size
            self.consume(result)
        elif not is_retry(result) and not (self.lends and self.must_copy(-result)):
            error = -result
        if not error and self.size and self.state == IDLE:
            if self.is_late() and not self.transport.owns_descriptor():
                error = EBADF
            else:
                self.transport.loop.mark_dirty(self.transport)
        if error:
            return self.failed(error)
        return self.transport.output_sent()

    cdef bint is_late(self) noexcept:
        """Whether a system call more is nothing to what is left, or to what it has waited."""
        return (self.size >= SEND_NOW_SIZE
                or self.transport.loop.counters.ticks > self.prepared_in + 1)

    cdef int discard(self, int32_t result, uint32_t flags) except -1:
        self.forget()
        if self.transport.finished:
            return self.transport.release_when_idle()
        return 0

    cdef int failed(self, int error) except -1:
        try:
            if (error == EPIPE and self.cut_short
                    and (self.transport.sock is None
                         or self.transport.sock.family != liburing.AF_UNIX)):
                # The kernel dropped the error that ended MSG_WAITALL half-way, and EPIPE says only
                # that there was one. (A Unix peer may have called shutdown(SHUT_RD).)
                error = ECONNRESET
            exc = os_error(error)
        except MemoryError as no_memory:
            exc = no_memory
        return self.transport.fatal_error(exc, "Fatal write error on socket transport")

    cdef int set_timer(self, InactivityTimer timer) except -1:
        if self.timer is not None:
            self.timer.cancel()
        elif timer is not None and self.state == SUBMITTED and not self.watching:
            # Made again, without MSG_WAITALL: how far it has come is told by its answer only.
            self.transport.loop.ring.cancel(self)
            self.waits_for_all = False
        self.timer = timer
        if timer is not None and self.size:
            timer.start()
        return 0

    cdef int stop_watching(self) except -1:
        if self.watching:
            self.transport.loop.poller.unwatch_output(self.transport.fd, self)
        return 0

    cdef int drop(self) except -1:
        """The connection was aborted: send nothing more. What is in flight keeps its memory."""
        self.set_timer(None)
        self.stop_watching()
        self.size = 0
        if self.state == IDLE:
            self.forget()
        else:
            self.dropped = True
            self.transport.loop.ring.cancel(self)
        return 0

    cdef int end_now(self) except -1:
        """connection_lost was called: take the answer of what was aborted out of its turn."""
        cdef Ring ring = self.transport.loop.ring
        cdef Answer answer
        if self.state == IDLE or self.watching:
            return 0
        if ring.answers.take(self.user_data, &answer):
            ring.answered(self, answer.flags)
        elif not ring.end_now(self, &answer):
            return 0
        return self.forget()

    cdef int forget(self) except -1:
        PyList_SetSlice(self.chunks, 0, PyList_GET_SIZE(self.chunks), NULL)
        self.first = self.offset = self.size = 0
        self.has_large = False
        self.loan = None
        return 0
