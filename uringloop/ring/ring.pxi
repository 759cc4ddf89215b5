# Ring: one io_uring instance, from setup to teardown.
#
# Facts about the kernel (docs/kernel.md) and what we do about them:
#   - DEFER_TASKRUN strands completions while the ring fd is watched by epoll: never set.
#     COOP_TASKRUN is always set; completions then wait for the next kernel entry, which
#     TASKRUN_FLAG shows in memory.
#   - The kernel looks a descriptor up when the SQE is issued, not when it is queued. Requests
#     that name one are therefore prepared right before submit() (LoopCore.flush), with no user
#     code in between. A cancel request names user_data only and may be queued at any time.
#   - Requests in flight hold the file and the memory they name. close() cancels them all, waits
#     for every final completion by count, and frees only then. What never completes is leaked.
#   - A forked child shares the ring's memory, and the kernel accepts its submissions: every entry
#     checks the fork count.

cdef enum:
    CLOSE_LIMIT_S = 5
    # Submits that the kernel may refuse (out of memory) before requests are taken back, the last of
    # them with a pause in between.
    SUBMIT_TRIES = 100
    TRIES_AT_ONCE = 20
    SUBMIT_PAUSE_NS = 20000


class RingError(OSError):
    """The ring itself failed, not one request: the loop cannot go on."""


cdef object os_error(int error, str what=None):
    """The OSError subclass for a positive errno, as the socket module would raise it."""
    text = os.strerror(error)
    return OSError(error, text if what is None else f"{what}: {text}")


# The collector must not clear it: only close() knows whether the kernel still writes here.
@cython.internal
@cython.final
@cython.no_gc_clear
cdef class Ring:
    cdef liburing.io_uring ring
    cdef OperationTable operations
    cdef AnswerQueue answers
    cdef BufferRing buffers
    cdef bint alive
    cdef unsigned fork_count
    cdef Py_ssize_t in_flight
    cdef readonly Py_ssize_t loans      # of those in flight, what only waits for a notification
    cdef uint64_t enters, submissions, completions, overflows, buffers_ran_dry
    cdef uint64_t zerocopy_sends, zerocopy_copied

    def __cinit__(self, OperationTable operations, AnswerQueue answers):
        self.operations = operations
        self.answers = answers
        self.ring.ring_fd = -1

    cdef int open(self, unsigned entries) except -1:
        """Set the ring up. Returns 0 or a positive errno; ENOMEM is retried with fewer entries."""
        cdef liburing.io_uring_params params
        cdef int error
        while True:
            memset(&params, 0, sizeof(params))
            params.flags = (
                liburing.IORING_SETUP_COOP_TASKRUN | liburing.IORING_SETUP_TASKRUN_FLAG
                | liburing.IORING_SETUP_SUBMIT_ALL | liburing.IORING_SETUP_CLAMP
                | liburing.IORING_SETUP_CQSIZE)
            # A full completion queue ends multishot requests: keep it much larger than the SQ.
            params.cq_entries = 8 * entries
            error = liburing.io_uring_queue_init_params(entries, &self.ring, &params)
            # RLIMIT_MEMLOCK counts the rings of all processes of an unprivileged user.
            if error == -ENOMEM and entries > 16:
                entries //= 4
                continue
            break
        if error < 0:
            return -error
        self.alive = True
        self.fork_count = liburing.fork_count
        return 0

    cdef inline bint has_unsubmitted(self) noexcept:
        return liburing.io_uring_sq_ready(&self.ring) > 0

    cdef inline bint usable(self) noexcept:
        return self.alive and self.fork_count == liburing.fork_count

    cdef int check_usable(self) except -1:
        if self.fork_count != liburing.fork_count:
            raise RuntimeError(
                "this event loop belongs to the parent process: after fork() a child must make "
                "its own (uringloop.new_event_loop())")
        if not self.alive:
            raise RuntimeError("the ring is closed")
        return 0

    cdef liburing.io_uring_sqe *next_sqe(self) except NULL:
        """A vacant SQE; a full queue is submitted early."""
        cdef liburing.io_uring_sqe *sqe
        self.check_usable()
        sqe = liburing.io_uring_get_sqe(&self.ring)
        if sqe is NULL:
            self.submit_all()       # it leaves nothing in the queue, whatever the kernel says
            sqe = liburing.io_uring_get_sqe(&self.ring)
        return sqe

    cdef liburing.io_uring_sqe *start(self, Operation operation, uint8_t opcode, int fd,
                                      const void *address, uint32_t length) except NULL:
        """idle -> submitted: an SQE for the operation, to be completed by the caller."""
        cdef liburing.io_uring_sqe *sqe
        self.operations.begin(operation)
        try:
            sqe = self.next_sqe()
        except BaseException:
            self.operations.end(operation)
            raise
        liburing.prepare(sqe, opcode, fd, address, length, operation.user_data)
        self.in_flight += 1
        return sqe

    cdef int cancel(self, Operation operation) except -1:
        """submitted -> cancelling. The operation's own answer still comes, with data if it won."""
        if operation.state != SUBMITTED or not self.usable():
            return 0
        self.queue_cancel(operation.user_data, 0)
        self.operations.cancelling(operation)
        return 0

    cdef int queue_cancel(self, uint64_t user_data, uint32_t flags) except -1:
        cdef liburing.io_uring_sqe *sqe = self.next_sqe()
        liburing.prepare(sqe, liburing.IORING_OP_ASYNC_CANCEL, -1,
                         <void *><uintptr_t>user_data, 0, 0)
        sqe.flags = liburing.IOSQE_CQE_SKIP_SUCCESS
        sqe.cancel_flags = flags
        return 0

    cdef int cancel_now(self, Operation operation) except -1:
        """Cancel before returning: the operation holds its file no longer (Linux 6.0).

        ENOENT from the kernel says that it has ended by itself, its answer being posted already.
        """
        cdef int error
        if operation.state == IDLE or not self.usable():
            return 0
        self.submit_all()
        self.operations.cancelling(operation)
        error = self.cancel_at_once(operation.user_data, 0, 1)
        # A worker thread that has the request does not end it in time, or a signal ends the wait
        # for that: then it ends later.
        if error < 0 and error not in (-ENOENT, -EALREADY, -ETIME, -EINTR):
            # A seccomp filter that came later, or no memory: the same by another system call.
            self.queue_cancel(operation.user_data, 0)
            self.submit_all()
        return 0

    cdef bint end_now(self, Operation operation, Answer *answer) except -1:
        """Cancel a single-shot request and take its answer out of its turn.

        Returns False when it has not come: it ends later, in its turn.
        """
        self.cancel_now(operation)
        self.drain()
        if not self.answers.take(operation.user_data, answer):
            return False
        self.answered(operation, answer.flags)
        return True

    cdef int submit(self) except -1:
        """One io_uring_enter for everything queued, GIL held, without waiting.

        RingError when the kernel refuses for another reason than a lack of memory.
        """
        cdef int submitted
        cdef unsigned ready
        self.check_usable()
        ready = liburing.io_uring_sq_ready(&self.ring)
        while ready:
            submitted = liburing.submit(&self.ring)
            self.enters += 1
            if submitted == -EAGAIN or submitted == -EBUSY or submitted == -EINTR:
                # Out of request memory, or completions wait for room (make some), or a signal
                # came: what is left stays queued.
                self.drain()
                return 0
            if submitted < 0:
                self.take_back()
                raise RingError(-submitted, "io_uring_enter failed while the loop was running: "
                                + os.strerror(-submitted))
            self.submissions += submitted
            ready = liburing.io_uring_sq_ready(&self.ring)
        return 0

    cdef bint submit_all(self) except -1:
        """submit() until nothing is left in the queue.

        Returns False when the kernel has no memory for some requests, which were taken back.
        """
        cdef int tries
        for tries in range(SUBMIT_TRIES):
            self.submit()
            if not self.has_unsubmitted():
                return True
            if tries >= TRIES_AT_ONCE:
                liburing.pause_ns(SUBMIT_PAUSE_NS)
        self.take_back()
        return False

    cdef int take_back(self) except -1:
        """Answer what the kernel does not accept with ECANCELED: it is asked for again.

        Left in the queue, it would be submitted after user code has run, which may have closed the
        descriptors that it names. Cancel requests are made by another system call.
        """
        cdef unsigned i, count = liburing.io_uring_sq_ready(&self.ring)
        cdef liburing.io_uring_sqe *sqe
        self.answers.reserve(count)
        for i in range(count):
            sqe = liburing.queued(&self.ring, i)
            if sqe.user_data:
                self.answers.push(sqe.user_data, -ECANCELED, 0)
            else:
                self.cancel_at_once(sqe.addr, sqe.cancel_flags, 0)
        liburing.unqueue(&self.ring)
        return 0

    cdef int cancel_at_once(self, uint64_t user_data, uint32_t flags, int seconds) noexcept:
        """IORING_REGISTER_SYNC_CANCEL. Returns 0 or a negative errno."""
        cdef liburing.io_uring_sync_cancel_reg registration
        memset(&registration, 0, sizeof(registration))
        registration.addr = user_data
        registration.flags = flags
        registration.timeout.tv_sec = seconds
        return liburing.io_uring_register_sync_cancel(&self.ring, &registration)

    cdef inline int drain(self) except -1:
        """Move every posted completion to the answer queue. Calls nobody."""
        if self.usable() and (liburing.io_uring_cq_ready(&self.ring)
                              or liburing.io_uring_cq_has_overflow(&self.ring)):
            self.drain_posted()
        return 0

    cdef int drain_posted(self) except -1:
        cdef unsigned head, tail
        cdef int error
        cdef liburing.io_uring_cqe *cqe
        while True:
            head = self.ring.cq.khead[0]
            tail = head + liburing.io_uring_cq_ready(&self.ring)    # an acquire load of the tail
            self.answers.reserve(tail - head)
            while head != tail:
                cqe = &self.ring.cq.cqes[head & self.ring.cq.ring_mask]
                self.completions += 1
                if cqe.user_data:
                    self.answers.push(cqe.user_data, cqe.res, cqe.flags)
                head += 1
            liburing.io_uring_cq_advance(&self.ring, tail - self.ring.cq.khead[0])
            if not liburing.io_uring_cq_has_overflow(&self.ring):
                break
            # Completions wait in the kernel for room; without GETEVENTS epoll would report the
            # ring readable for ever.
            self.overflows += 1
            error = liburing.io_uring_get_events(&self.ring)
            if error < 0 and error != -EINTR:
                raise RingError(-error, f"io_uring_enter failed: {os.strerror(-error)}")
        if self.ring.cq.koverflow[0]:
            raise RingError(EOVERFLOW, "io_uring dropped completions")
        return 0

    cdef bint ran_dry(self) except -1:
        """A receive found no block: one more for the next. Returns whether there is one."""
        self.buffers_ran_dry += 1
        try:
            return self.buffers.grow(1) > 0
        except MemoryError:
            return False

    cdef inline int answered(self, Operation operation, uint32_t flags) except -1:
        """A completion of an operation was taken from the answer queue."""
        if not flags & liburing.IORING_CQE_F_MORE:
            return self.finished(operation)
        if operation.loan is not None:
            self.loans += 1
            return self.operations.pass_on(operation)
        return 0

    cdef int finished(self, Operation operation) except -1:
        """The final completion of an operation was taken from the answer queue."""
        self.in_flight -= 1
        self.operations.end(operation)
        return 0

    cdef int cancel_all(self) except -1:
        """Ask the kernel to end every request of this ring; their completions still come."""
        cdef uint32_t all_of_them = (
            liburing.IORING_ASYNC_CANCEL_ANY | liburing.IORING_ASYNC_CANCEL_ALL)
        cdef int error
        self.take_back()
        error = self.cancel_at_once(0, all_of_them, 1)
        if error < 0 and error != -ENOENT:
            self.queue_cancel(0, all_of_them)
            liburing.io_uring_submit(&self.ring)
        return 0

    cdef Py_ssize_t unanswered(self) except -1:
        """Requests whose final completion is not in the answer queue yet. Of a zero-copy send the
        result counts: the notification may take as long as the peer likes."""
        cdef Py_ssize_t count = self.in_flight - self.loans, i
        cdef Answer *answers = self.answers.answers
        cdef Operation operation
        for i in range(self.answers.head, self.answers.tail):
            if answers[i].flags == READINESS or answers[i].flags & liburing.IORING_CQE_F_NOTIF:
                continue
            operation = self.operations.find(answers[i].user_data)
            if not answers[i].flags & liburing.IORING_CQE_F_MORE or (
                    operation is not None and operation.loan is not None):
                count -= 1
        return count

    cdef bint settle(self) except -1:
        """Cancel everything and wait until the answer queue holds every final completion.

        Returns whether it does; a request of a thread that is stuck in the kernel may not end.
        """
        cdef liburing.io_uring_cqe *cqe
        cdef liburing.__kernel_timespec pause
        cdef int error
        cdef int64_t limit = liburing.monotonic_ns() + CLOSE_LIMIT_S * <int64_t>1000000000
        self.cancel_all()
        self.drain()
        while self.unanswered() > 0:
            if liburing.monotonic_ns() > limit:
                return False
            pause.tv_sec = 0
            pause.tv_nsec = 10000000
            with nogil:
                error = liburing.io_uring_wait_cqe_timeout(&self.ring, &cqe, &pause)
            self.drain()
            if error == -EPERM or error == -ENOSYS:
                return self.unanswered() == 0       # a seccomp filter that came later
        return True

    cdef int open_buffers(self, unsigned capacity, unsigned count, Py_ssize_t block_size) except -1:
        """Register the receive blocks. Returns 0 or a positive errno; ENOMEM retries smaller."""
        cdef BufferRing buffers
        cdef int error
        while True:
            buffers = BufferRing.__new__(BufferRing)
            error = buffers.open(&self.ring, capacity, count, block_size)
            if error == ENOMEM and capacity > 64:
                capacity //= 4
                continue
            break
        if error == 0:
            buffers.publish()
            self.buffers = buffers
        return error

    cdef int abandon(self) except -1:
        """In a forked child: give the mappings and descriptors up; the parent's ring goes on."""
        if self.alive:
            self.alive = False
            liburing.io_uring_queue_exit(&self.ring)
        return 0

    cdef int close(self) except -1:
        """Cancel, take every final answer, free; what the kernel may still use is leaked."""
        cdef bint settled = True
        cdef Answer answer
        cdef Operation operation
        if not self.alive:
            return 0
        if not self.usable():
            return self.abandon()
        if self.in_flight:
            settled = self.settle()
        while self.answers.pop(&answer):
            operation = self.operations.find(answer.user_data)
            if operation is None:
                continue
            if answer.flags != READINESS:
                self.answered(operation, answer.flags)
            operation.discard(answer.result, answer.flags)
        if settled and self.loans:
            self.leak_loans()
        self.alive = False
        if self.buffers is not None:
            self.buffers.close(leak=not settled)
        if not settled:
            Py_INCREF(self.operations)
        liburing.io_uring_queue_exit(&self.ring)
        return 0

    cdef int leak_loans(self) except -1:
        """Peers have not acknowledged all that was sent: the kernel reads it when they do."""
        for operation in self.operations.operations:
            if isinstance(operation, Loan):
                (<Loan>operation).leak()
                self.finished(operation)
        return 0

    def __dealloc__(self):
        # Only reached open when the interpreter skips finalizers: closing the descriptor alone
        # would let the kernel write into freed blocks (docs/kernel.md), so these are leaked.
        if self.alive:
            if self.buffers is not None:
                self.buffers.close(leak=self.in_flight > 0)
            if self.in_flight:
                Py_INCREF(self.operations)
            liburing.io_uring_queue_exit(&self.ring)


if liburing.watch_forks():
    raise MemoryError("pthread_atfork")
