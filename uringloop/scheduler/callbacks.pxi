# CallbackLoop: what a program asks of a loop: callbacks now and later, futures, tasks.
#
# Nothing runs here: the tick (loop_core.pxi) takes handles out of the queue, and timers out of
# their heap.

cdef class CallbackLoop:
    cdef ReadyQueue ready
    cdef TimerHeap timers
    cdef Poller poller          # to be woken
    cdef bint ticking, dead
    cdef public bint _closed, _debug, _stopping
    cdef public object _thread_id, _current_handle, _task_factory
    # Of asyncio.futures and asyncio.tasks: what a program has put there in place of their classes
    # is used, as by asyncio.
    cdef dict futures_names, tasks_names
    cdef dict kept_loop_keyword

    def __cinit__(self, *args, **kwargs):
        self.ready = ReadyQueue()
        self.timers = TimerHeap()
        self.futures_names = vars(futures)
        self.tasks_names = vars(tasks)
        # Until __init__ has run: __del__ must not warn about a loop that was never made.
        self._closed = True

    cdef inline int check_open(self) except -1:
        if self._closed:
            raise RuntimeError("Event loop is closed")
        return 0

    def _check_closed(self):
        self.check_open()

    def is_closed(self):
        """Whether close() was called."""
        return self._closed

    def is_running(self):
        """Whether run_forever() or run_until_complete() is executing."""
        return self._thread_id is not None

    def get_debug(self):
        """Whether debug mode is on."""
        return self._debug

    def time(self):
        """Seconds of CLOCK_MONOTONIC, read now, with nanosecond resolution."""
        return <double>liburing.monotonic_ns() / 1e9

    # --- futures and tasks -------------------------------------------------------------------

    cdef inline dict loop_keyword(self):
        """{"loop": self}, which calls may share: they read it."""
        if self.kept_loop_keyword is not None:
            return self.kept_loop_keyword
        made = {"loop": self}
        if not self._closed:
            self.kept_loop_keyword = made       # a cycle, until close()
        return made

    def create_future(self):
        """A new asyncio.Future of this loop."""
        keyword = self.loop_keyword()
        return PyObject_Call(self.futures_names["Future"], (), <PyObject *>keyword)

    def create_task(self, coro, **kwargs):
        """A new asyncio.Task that runs a coroutine; with a task factory, what that makes of it.

        name and context as for asyncio.create_task().
        """
        self.check_open()
        if (self._debug or self._task_factory is not None
                or len(kwargs) != ("name" in kwargs) + ("context" in kwargs)):
            return asyncio.BaseEventLoop.create_task(self, coro, **kwargs)
        if kwargs:
            kwargs["loop"] = self
        else:
            kwargs = self.loop_keyword()
        return PyObject_Call(self.tasks_names["Task"], (coro,), <PyObject *>kwargs)

    cdef int check_debug(self, callback, str method) except -1:
        self._check_thread()
        self._check_callback(callback, method)
        return 0

    cdef inline int fill(self, Handle handle, callback, tuple args, context) except -1:
        handle.callback = callback
        handle.args = args
        handle.loop = self
        handle.context = PyContext_CopyCurrent() if context is None else context
        if self._debug:
            handle.source_traceback = format_helpers.extract_stack(sys._getframe(0))
        return 0

    cdef inline Handle make_handle(self, callback, tuple args, context):
        handle = <Handle>Handle.__new__(Handle)
        self.fill(handle, callback, args, context)
        return handle

    cdef inline int make_ready(self, Handle handle) except -1:
        """A handle that is new."""
        self.ready.push(handle)
        if self.ticking and not self.dead:
            handle.hide()
        return 0

    cdef inline Handle schedule(self, callback, tuple args, context):
        """call_soon(), for callbacks of the engine's own too."""
        self.check_open()
        if self._debug:
            self.check_debug(callback, "call_soon")
        handle = self.make_handle(callback, args, context)
        self.make_ready(handle)
        return handle

    def call_soon(self, callback, *args, context=None):
        """Run the callback in the next iteration, in the order of the calls."""
        return self.schedule(callback, args, context)

    def call_soon_threadsafe(self, callback, *args, context=None):
        """call_soon() for other threads and signal handlers; wakes the loop if it waits."""
        self.check_open()
        if self._debug:
            self._check_callback(callback, "call_soon_threadsafe")
        handle = self.make_handle(callback, args, context)
        self.make_ready(handle)
        self.poller.wake()
        return handle

    cdef TimerHandle make_timer(self, double deadline, callback, tuple args, context):
        handle = <TimerHandle>TimerHandle.__new__(TimerHandle)
        self.fill(handle, callback, args, context)
        handle.deadline = deadline
        handle.deadline_ns = deadline_to_ns(deadline)
        handle.heap_index = -1
        self.timers.push(handle)
        return handle

    def call_later(self, delay, callback, *args, context=None):
        """Run the callback after `delay` seconds, never earlier. Returns a TimerHandle."""
        if delay is None:
            raise TypeError("delay must not be None")
        cdef double seconds = delay
        self.check_open()
        if self._debug:
            self.check_debug(callback, "call_at")   # the method that asyncio names
        return self.make_timer(<double>liburing.monotonic_ns() / 1e9 + seconds,
                               callback, args, context)

    def call_at(self, when, callback, *args, context=None):
        """Run the callback when loop.time() reaches `when` seconds. Returns a TimerHandle."""
        if when is None:
            raise TypeError("when cannot be None")
        self.check_open()
        if self._debug:
            self.check_debug(callback, "call_at")
        return self.make_timer(deadline_of(when), callback, args, context)

    def _add_callback(self, handle):
        # asyncio's signal handling queues an asyncio.Handle of its own.
        if isinstance(<object>handle, asyncio.Handle) and not handle._cancelled:
            self.ready.push(self.make_handle(_run_unless_cancelled, (handle,), None))

    def _write_to_self(self):
        self.poller.wake()

    def stop(self):
        """Leave run_forever() at the end of the current iteration."""
        self._stopping = True


def _run_unless_cancelled(handle):
    if not handle._cancelled:
        handle._run()


cdef double deadline_of(when) except? -1:
    """A time as a double. An int that is none is as good as never, or as now."""
    try:
        return when
    except OverflowError:
        return float("inf") if when > 0 else float("-inf")


cdef int64_t deadline_to_ns(double seconds) noexcept:
    """Nanoseconds, rounded up so that no timer is early; out of range means never (or now)."""
    if not seconds < 9e9:       # NaN compares false, and is due at once as in asyncio
        return INT64_MAX if seconds >= 9e9 else 0
    if seconds <= 0:
        return 0
    cdef int64_t deadline_ns = <int64_t>ceil(seconds * 1e9)
    if <double>deadline_ns / 1e9 < seconds:
        deadline_ns += 1        # loop.time() is a rounded number too
    return deadline_ns
