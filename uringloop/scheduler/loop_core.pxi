# LoopCore: the tick, and the life of a loop.
#
# One tick, in the order of asyncio's iteration, so that what was ready first runs first:
#   1. collect: completions and readiness go into the answer queue, readers' handles into the ready
#      queue. Blocks in epoll_wait only when nothing is ready, due or unsubmitted.
#   2. due timers become ready; the handles that were ready before the collection run, then the
#      answers are dispatched, then the rest of the snapshot runs.
#   3. flush: every transport that wrote or wants to receive prepares its SQEs; one submit.
# Handles that become ready meanwhile wait for the next tick.

cdef enum:
    # Descriptors outside the ring are looked at at least this often while callbacks keep coming.
    POLL_INTERVAL_NS = 50000
    # How long the loop blocks while before_wait() has not looked at everything.
    LOOK_AGAIN_NS = 1000000


@cython.internal
cdef class Flushable:
    """What has something to submit at the end of the tick."""
    cdef bint is_dirty
    cdef Flushable next_dirty

    cdef int flush(self) except -1:
        """Prepare SQEs, or make the system calls. May call protocols; may become dirty again."""
        raise NotImplementedError


@cython.internal
cdef class Touchable:
    """What has to know when it was last touched, to the tick and never too early."""
    cdef int64_t touched_ns     # 0 from touch() until the next tick reads the clock
    cdef Touchable next_touched


cdef class LoopCore(CallbackLoop):
    cdef OperationTable operations
    cdef AnswerQueue answers
    cdef Waiting waiting
    cdef Ring ring
    cdef Counters counters
    cdef Touchable touched      # in this tick: the first of a chain
    cdef Flushable first_dirty, last_dirty      # a chain: joining it takes no memory
    cdef int64_t last_poll_ns
    cdef uint64_t thread
    cdef bint wants_ring
    cdef bint is_idle           # nothing runs in this tick
    cdef bytes scratch          # for the small recv(2) of all sockets
    cdef SpareBytes spares      # for the messages copied out of it, or of blocks
    cdef str _backend, _backend_reason
    cdef object warn
    cdef unsigned ring_entries, recv_buffers
    cdef Py_ssize_t recv_buffer_size
    cdef Py_ssize_t zerocopy_size       # the option send_zerocopy; else larger than any write
    cdef uint16_t zerocopy_flags

    def __cinit__(self, *args, **kwargs):
        self.operations = OperationTable()
        self.spares = SpareBytes()
        self.answers = AnswerQueue()
        self.poller = Poller(self.operations, self.answers, self.ready)
        self.waiting = Waiting()
        # Kept, because a transport may be finalized when the module's names are gone already.
        self.warn = warnings.warn
        self._backend = "epoll"
        self._backend_reason = ""
        self.zerocopy_size = PY_SSIZE_T_MAX

    def _configure(self, str backend, str reason, options):
        """What Loop.__init__ decided; the ring itself is made by the thread that first runs."""
        self._backend = backend
        self._backend_reason = reason
        self.wants_ring = backend == "io_uring"
        self.ring_entries = options.ring_entries
        self.recv_buffers = options.recv_buffers
        self.recv_buffer_size = options.recv_buffer_size
        self.waiting.spin_ns = <int64_t>(<double>options.busy_poll * 1e9)

    def _send_zerocopy(self, Py_ssize_t size, uint16_t flags):
        """Writes of at least so many bytes are sent without a copy."""
        self.zerocopy_size = size
        self.zerocopy_flags = flags

    @property
    def backend(self):
        """"io_uring" or "epoll": what the loop runs on, for good once it has run."""
        return self._backend

    @property
    def backend_reason(self):
        """Why the loop has this backend."""
        return self._backend_reason

    # --- descriptors -------------------------------------------------------------------------

    def _add_reader(self, fd, callback, *args):
        cdef int number = self.descriptor_to_watch(fd)
        handle = self.make_handle(callback, args, None)
        self.poller.set_reader(number, handle)
        self.poller.remember_file(number, fd)
        return handle

    def _add_writer(self, fd, callback, *args):
        cdef int number = self.descriptor_to_watch(fd)
        handle = self.make_handle(callback, args, None)
        self.poller.set_writer(number, handle)
        self.poller.remember_file(number, fd)
        return handle

    def _remove_reader(self, fd):
        if self._closed:
            return False
        cdef int number = self.poller.find_descriptor(fd)
        cdef bint had = self.poller.clear_reader(number)
        self.poller.forget_file(number)
        return had

    def _remove_writer(self, fd):
        if self._closed:
            return False
        cdef int number = self.poller.find_descriptor(fd)
        cdef bint had = self.poller.clear_writer(number)
        self.poller.forget_file(number)
        return had

    cdef int descriptor_to_watch(self, fd) except -1:
        cdef int number
        self.check_open()
        number = descriptor_of(fd)
        self.check_open()       # a fileno() of the user's may have closed the loop
        return number

    def _watched(self, int fd):
        """(mask, reader, writer) of a descriptor as epoll knows it, or None."""
        if not 0 <= fd < self.poller.capacity or not self.poller.watches[fd].mask:
            return None
        return (self.poller.watches[fd].mask, self.poller.readers[fd], self.poller.writers[fd])

    def _owner(self, fd):
        cdef object number = descriptor_number(fd)
        return self.poller.owner(number) if 0 <= number <= INT_MAX else None

    def _clear_owner(self, int fd):
        owner = self.poller.owner(fd)
        return owner is not None and self.poller.disown(fd, owner) == 0

    # --- the tick ----------------------------------------------------------------------------

    cdef int mark_dirty(self, Flushable item) noexcept:
        """The item has something to submit: at the end of this tick, or at once if none runs."""
        if item.is_dirty:
            return 0
        item.is_dirty = True
        if self.last_dirty is None:
            self.first_dirty = item
        else:
            self.last_dirty.next_dirty = item
        self.last_dirty = item
        if self.poller.waiting:
            self.poller.wake()      # another thread wrote, which asyncio sends at once
        return 0

    cdef Flushable take_dirty(self):
        """The first of those that have something to submit; there must be one."""
        item = self.first_dirty
        self.first_dirty, item.next_dirty = item.next_dirty, None
        if self.first_dirty is None:
            self.last_dirty = None
        item.is_dirty = False
        return item

    cdef bint has_to_submit(self) noexcept:
        """Whether anything waits for before_submit(), the submit or after_submit()."""
        return self.ring is not None and self.ring.has_unsubmitted()

    cdef int before_submit(self) except -1:
        """Prepare what names descriptors that the user may close: no user code runs until they are
        submitted."""
        return 0

    cdef int after_submit(self) except -1:
        """The kernel has looked the descriptors up: the user may close them now."""
        return 0

    cdef bint before_wait(self) except -1:
        """The loop is about to block: a callback may still be made ready.

        Returns whether it is to be called again soon.
        """
        return False

    @cython.final
    cdef int flush(self) except -1:
        if self.dead:
            self.refuse_dead()      # a callback forked, and this is the child
        while self.first_dirty is not None:
            try:
                self.flush_items()
            except (SystemExit, KeyboardInterrupt, RingError):
                raise
            except BaseException as exc:
                self.report_io_error(exc)
        if self.has_to_submit():
            self.submit_prepared()
        elif self.ring is not None and self.ring.buffers is not None:
            self.ring.buffers.publish()
        return 0

    cdef int submit_prepared(self) except -1:
        # No finalizer may close a descriptor in between. (From Python 3.12 on a collection waits
        # for the interpreter's loop anyway.)
        cdef bint collects = PyGC_Disable()
        try:
            self.before_submit()
        finally:
            try:
                self.submit()
            finally:
                if collects:
                    PyGC_Enable()
        return 0

    cdef int submit(self) except -1:
        """All that is prepared, also when the rest cannot be: what waits until the next tick would
        find users' descriptors closed, or reused."""
        if self.ring is None:
            return 0
        if self.ring.buffers is not None:
            self.ring.buffers.publish()
        if self.ring.submit_all():
            self.after_submit()
        return 0

    cdef int flush_items(self) except -1:
        cdef Flushable item = None
        try:
            while self.first_dirty is not None:
                item = self.take_dirty()
                item.flush()
        except (SystemExit, KeyboardInterrupt, RingError):
            self.mark_dirty(item)           # to be gone on with in the next run
            raise
        return 0

    @cython.final
    cdef int64_t collect(self) except -1:
        """Returns the time in nanoseconds."""
        cdef int64_t now
        if self.ring is not None:
            self.ring.drain()
        now = liburing.monotonic_ns()
        if self.touched is not None:
            self.stamp_touched(now)
        if self.time_to_wait(now) != 0:
            return self.wait(now)
        if self.must_poll(now):
            self.last_poll_ns = now
            self.poll(0)
        return now

    cdef int64_t wait(self, int64_t now) except -1:
        """Block, unless what comes first gives the loop work to do. Returns the time after it."""
        cdef bint look_again
        cdef int64_t timeout_ns, began = now
        if self.waiting.looks_quickly():
            self.poll(0)
            if self.time_to_wait(now) == 0:
                self.last_poll_ns = now
                return now
            self.waiting.found_nothing()
        self.handle_signals()       # one that came during C code would wait for the next event
        look_again = self.before_wait()
        timeout_ns = self.time_to_wait(now)         # the two may have given it work to do
        if timeout_ns != 0 and self.waiting.spins_now():
            self.spin(now, timeout_ns)
            self.handle_signals()   # as before
            now = liburing.monotonic_ns()
            timeout_ns = self.time_to_wait(now)
            if timeout_ns == 0:
                self.last_poll_ns = now
                return now
        if look_again and not 0 <= timeout_ns < LOOK_AGAIN_NS:
            timeout_ns = LOOK_AGAIN_NS
        self.poll(timeout_ns)
        self.last_poll_ns = liburing.monotonic_ns()
        if timeout_ns != 0:
            self.waiting.slept(self.last_poll_ns - began)
        return self.last_poll_ns

    cdef int spin(self, int64_t now, int64_t timeout_ns) except -1:
        """Look for work without sleeping, GIL released, and take what is found."""
        cdef liburing.io_uring *ring = NULL
        cdef int64_t limit_ns = self.waiting.spin_ns
        if self.ring is not None and self.ring.usable():
            ring = &self.ring.ring
        if timeout_ns > 0:
            limit_ns = min(limit_ns, timeout_ns)
        if not self.waiting.spin(self.poller, ring, now, limit_ns):
            return 0
        if ring is not NULL:
            self.ring.drain()
        # Task work wants the kernel to be entered, and a spin that always ends by completions would
        # never see descriptors.
        if self.answers.head == self.answers.tail or self.poller.watched > 0:
            self.poll(0)
        return 0

    @cython.final
    cdef int poll(self, int64_t timeout_ns) except -1:
        cdef bint interrupted
        self.counters.polls += 1
        interrupted = self.poller.wait(timeout_ns)
        if self.ring is not None:
            self.ring.drain()
        if interrupted:
            self.handle_signals()
        return 0

    @cython.final
    cdef inline int64_t time_to_wait(self, int64_t now) noexcept:
        """Nanoseconds to the next timer; 0 when there is work to do, -1 for ever."""
        # Dirty before the first tick, or unsubmitted when an exception ended the last run.
        if (self.ready.count > 0 or self._stopping or self.answers.head != self.answers.tail
                or self.first_dirty is not None
                or (self.ring is not None and self.ring.has_unsubmitted())):
            return 0
        return max(0, self.timers.first_ns() - now) if self.timers.count else -1

    cdef int handle_signals(self) except -1:
        PyErr_CheckSignals()
        if self.dead:
            self.refuse_dead()      # a handler forked, and this is the child
        return 0

    cdef int stamp_touched(self, int64_t now) except -1:
        """The tick is over in which they were touched."""
        cdef Touchable item
        while self.touched is not None:
            item = self.touched
            self.touched, item.next_touched = item.next_touched, None
            item.touched_ns = now
        return 0

    @cython.final
    cdef inline bint must_poll(self, int64_t now) noexcept:
        """Whether a tick that has work to do looks at epoll all the same."""
        return (self.poller.watched > 0 or self._stopping
                or now - self.last_poll_ns >= POLL_INTERVAL_NS
                or (self.ring is not None and liburing.taskrun_pending(&self.ring.ring)))

    @cython.final
    cdef inline int take_due_timers(self, int64_t now) except -1:
        cdef TimerHandle handle
        while self.timers.count and self.timers.first_ns() <= now:
            handle = self.timers.first()
            self.ready.push(handle)         # it may fail, and the timer stays then
            if handle.heap_index >= 0:      # else a finalizer has cancelled it meanwhile
                self.timers.remove(handle)
        return 0

    @cython.final
    cdef inline int run_ready(self, Py_ssize_t count) except -1:
        """Run that many handles; fewer when a nested iteration took some, or one forked."""
        cdef Handle handle
        while count > 0 and self.ready.count > 0 and not self.dead:
            count -= 1
            handle = self.ready.pop()
            if not handle.is_cancelled:
                if self._debug:
                    self.run_in_debug_mode(handle)
                else:
                    handle.run()
            if Py_REFCNT(handle) > 1:
                handle.show()
        return 0

    cdef int run_in_debug_mode(self, Handle handle) except -1:
        cdef int64_t started
        self._current_handle = handle
        started = liburing.monotonic_ns()
        try:
            handle.run()
            self.log_if_slow(handle, liburing.monotonic_ns() - started)
        finally:
            self._current_handle = None
        return 0

    cdef int log_if_slow(self, object what, int64_t elapsed_ns) except -1:
        """asyncio's warning about what held the loop longer than slow_callback_duration."""
        cdef double seconds = elapsed_ns * 1e-9
        if seconds >= self.slow_callback_duration:
            what = base_events._format_handle(what) if isinstance(what, Handle) else repr(what)
            base_events.logger.warning("Executing %s took %.3f seconds", what, seconds)
        return 0

    cdef int dispatch(self) except -1:
        """Tell every operation its answers, in the order in which they were taken."""
        while True:
            try:
                return self.dispatch_all()
            except (SystemExit, KeyboardInterrupt, RingError):
                raise
            except BaseException as exc:
                self.report_io_error(exc)

    cdef int report_io_error(self, exc) except -1:
        """An exception that no transport has dealt with, out of connection_lost() for example."""
        self.call_exception_handler({"message": "Exception in an I/O callback", "exception": exc})
        return 0

    cdef int dispatch_all(self) except -1:
        cdef Answer answer
        cdef Operation operation
        cdef int64_t started = 0
        while not self.dead and self.answers.pop(&answer):
            operation = self.operations.find(answer.user_data)
            if operation is None:
                # It ended meanwhile: readiness of a descriptor that nobody watches any more.
                continue
            if answer.flags != READINESS:
                self.ring.answered(operation, answer.flags)
            if self._debug:
                owner = operation.owner()
                started = liburing.monotonic_ns()
                operation.complete(answer.result, answer.flags)
                self.log_if_slow(owner, liburing.monotonic_ns() - started)
            else:
                operation.complete(answer.result, answer.flags)
        return 0

    @cython.final
    cdef int tick(self) except -1:
        cdef Py_ssize_t earlier = self.ready.count, later
        if self.dead:
            self.refuse_dead()
        self.counters.ticks += 1
        self.take_due_timers(self.collect())
        self.is_idle = not self.ready.count and self.answers.head == self.answers.tail
        later = self.ready.count - earlier
        self.run_ready(earlier)
        if self.answers.head != self.answers.tail:
            self.dispatch()
        self.run_ready(later)
        self.flush()
        return 0

    def _run_once(self):
        """One iteration. run_forever() does not come here; tools that nest loops do."""
        cdef bint outer = self.ticking
        self.begin_running()
        try:
            self.tick()
        finally:
            self.ticking = outer
            if not outer:
                self.ready.show_all()

    def _run_until_stopped(self):
        """Iterate until stop(). The caller has made this the thread's running loop."""
        self.begin_running()
        try:
            while True:
                self.tick()
                if self._stopping:
                    break
        finally:
            self.ticking = False
            self.ready.show_all()
            # What was written must leave although nobody may ever run the loop again.
            if not self.dead:
                self.flush()

    # --- life cycle --------------------------------------------------------------------------

    cdef int begin_running(self) except -1:
        cdef uint64_t thread = PyThread_get_thread_ident()
        if self.dead:
            self.refuse_dead()
        if self.ticking and self.thread != thread:
            raise RuntimeError("This event loop is already running")
        self.poller.open()
        if self.wants_ring and self.ring is None:
            self.open_ring()
        elif self.ring is not None and self.thread != thread and self.ring.in_flight:
            # Requests belong to the thread that submitted them and die with it. They are ended
            # here with their data, and each transport asks again from this thread. (A new thread
            # may have the number of one that has ended; its requests answer ECANCELED by
            # themselves then.)
            if not self.ring.settle():
                raise RuntimeError("requests of the thread that ran this loop before do not end")
        self.thread = thread
        self.last_poll_ns = 0
        self.ticking = True
        return 0

    cdef int refuse_dead(self) except -1:
        raise RuntimeError(
            "this event loop belongs to the parent process: after fork() a child must make "
            "its own (uringloop.new_event_loop())")

    cdef int open_ring(self) except -1:
        cdef Ring ring = Ring(self.operations, self.answers)
        cdef str step = "setup"
        cdef int error = ring.open(self.ring_entries)
        if error == 0:
            step = "buffers"
            error = ring.open_buffers(self.recv_buffers, min(64, self.recv_buffers),
                                      self.recv_buffer_size)
            if error:
                ring.close()
        if error == 0:
            try:
                self.poller.watch_ring(ring.ring.ring_fd)
            except OSError:
                ring.close()
                raise
            self.ring = ring
            return 0
        # Raises when io_uring was demanded, else says once per process that epoll is used.
        self._backend_reason = self._ring_refused(error, step)
        self._backend = "epoll"
        self.wants_ring = False
        self.zerocopy_size = PY_SSIZE_T_MAX
        return 0

    def _stats(self):
        return read_counters(self)

    def _release(self):
        """The part of close() that is ours: nothing of this loop runs or is watched any more."""
        try:
            if self.ring is not None:
                if not self.dead:
                    self.poller.unwatch_ring()
                self.ring.close()
        finally:
            self.poller.close()
            self.stamp_touched(liburing.monotonic_ns())     # the chain would keep the loop alive
            while self.first_dirty is not None:
                self.take_dirty()
            self.ready.clear()
            self.timers.clear()
            self.scratch = None
            self.kept_loop_keyword = None

    def _after_fork_in_child(self):
        """Let go of what is shared with the parent. A loop that never ran may go on."""
        if self.ring is not None or self.ticking:
            self.dead = True
            self.ready.show_all()
            if self.ring is not None:
                self.ring.abandon()
            self.poller.abandon()
        else:
            self.poller.reopen()


cdef inline void touch(LoopCore loop, Touchable item) noexcept:
    """Note that something happened, without reading the clock."""
    if item.touched_ns:
        item.touched_ns = 0
        item.next_touched = loop.touched
        loop.touched = item
