# Handle and TimerHandle: a callback with its arguments and context, and whether it is still wanted.
#
# Owner: whoever called call_soon() or call_later(), and the ready queue or timer heap until it ran.
# asyncio's own classes are Python classes that a cdef class cannot inherit, so `__class__` answers
# for isinstance(); attributes that debuggers and asyncio's helpers read keep their names.
# TimerHandle has no freelist: Cython keeps them for base classes only, and pymalloc is close.
#
# The collector does not see a handle that call_soon() made while the loop runs: such a loop is
# alive, so what waits in its queue cannot be garbage. Most handles are gone when they have run; one
# that somebody holds then, or that still waits when the loop stops, is shown to the collector.

_DESCRIBE_TAKES_DEBUG = (
    "debug" in inspect.signature(format_helpers._format_callback_source).parameters)


cdef class CallbackLoop


cdef inline PyObject *call(callback, tuple args) noexcept:
    """The result, or NULL with the exception set."""
    cdef Py_ssize_t count = PyTuple_GET_SIZE(args)
    if count == 0:
        return try_call_no_args(callback)
    if count == 1:
        return try_call_one_arg(callback, <object>PyTuple_GET_ITEM(args, 0))
    return try_call(callback, args, NULL)


@cython.freelist(1024)
cdef class Handle:
    """What call_soon() returns; the interface of asyncio.Handle."""
    cdef object callback
    cdef tuple args
    cdef object context
    cdef CallbackLoop loop
    cdef object source_traceback
    cdef object representation
    cdef bint is_cancelled
    cdef object __weakref__

    def __init__(self):
        raise TypeError("handles are made by call_soon() and call_later()")

    @property
    def __class__(self):
        return asyncio.Handle

    @property
    def _callback(self):
        return self.callback

    @property
    def _args(self):
        return self.args

    @property
    def _context(self):
        return self.context

    @property
    def _loop(self):
        return self.loop

    @property
    def _cancelled(self):
        return self.is_cancelled

    @property
    def _source_traceback(self):
        return self.source_traceback

    @property
    def _repr(self):
        return self.representation

    def _repr_info(self):
        return asyncio.Handle._repr_info(self)

    def __repr__(self):
        if self.representation is not None:
            return self.representation
        return "<{}>".format(" ".join(self._repr_info()))

    def get_context(self):
        """The contextvars.Context that the callback runs in."""
        return self.context

    def cancel(self):
        """The callback will not be called. Cancelling twice, or too late, does nothing."""
        self.check_made()
        self.withdraw()

    def cancelled(self):
        """Whether cancel() was called."""
        return self.is_cancelled

    cdef int withdraw(self) except -1:
        if self.is_cancelled:
            return 0
        self.is_cancelled = True
        if self.loop._debug:
            # "Executing <Handle ...> took 2.5 seconds" still has to name what ran.
            self.representation = repr(self)
        self.callback = None
        self.args = None
        return 0

    @cython.final
    cdef inline void hide(self) noexcept:
        """From the collector. The handle waits in the queue of a loop that runs."""
        PyObject_GC_UnTrack(self)

    @cython.final
    cdef inline void show(self) noexcept:
        if not PyObject_GC_IsTracked(self):
            PyObject_GC_Track(self)

    @cython.final
    cdef int run(self) except -1:
        """Call the callback in its context; only SystemExit and KeyboardInterrupt come out."""
        # Local references: the callback may cancel its own handle.
        callback, args = self.callback, self.args
        cdef PyObject *result
        # Without `try`, which would save and restore the thread's exception for each callback.
        if try_enter_context(self.context) == 0:
            result = call(callback, args)
            if try_exit_context(self.context) == 0 and result is not NULL:
                Py_DECREF(<object>result)
                return 0
            Py_XDECREF(result)
        return self.failed()

    cdef int failed(self) except -1:
        """Report the exception that is set."""
        self.show()             # the handler may keep it, and what is raised again ends the run
        try:
            raise_what_is_set()
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as exc:
            self.report(exc)
        return 0

    cdef int report(self, exc) except -1:
        if _DESCRIBE_TAKES_DEBUG:
            source = format_helpers._format_callback_source(
                self.callback, self.args, debug=self.loop._debug)
        else:
            source = format_helpers._format_callback_source(self.callback, self.args)
        context = {"message": f"Exception in callback {source}", "exception": exc, "handle": self}
        if self.source_traceback:
            context["source_traceback"] = self.source_traceback
        self.loop.call_exception_handler(context)
        return 0

    def _run(self):
        self.check_made()
        if not self.is_cancelled:
            self.run()

    cdef int check_made(self) except -1:
        """A handle out of __new__() has no loop, and nothing to run."""
        if self.loop is None:
            raise TypeError("handles are made by call_soon() and call_later()")
        return 0


cdef class TimerHandle(Handle):
    """What call_later() and call_at() return; the interface of asyncio.TimerHandle."""
    cdef double deadline
    cdef int64_t deadline_ns
    cdef Py_ssize_t heap_index
    cdef TimerHeap heap

    @property
    def __class__(self):
        return asyncio.TimerHandle

    @property
    def _when(self):
        return self.deadline

    @property
    def _scheduled(self):
        return self.heap_index >= 0

    def _repr_info(self):
        return asyncio.TimerHandle._repr_info(self)

    def when(self):
        """The deadline in seconds of loop.time()."""
        return self.deadline

    cdef int withdraw(self) except -1:
        if not self.is_cancelled and self.heap_index >= 0:
            self.heap.remove(self)
        return Handle.withdraw(self)

    def __hash__(self):
        return hash(self.deadline)

    def __eq__(self, other):
        if not isinstance(other, asyncio.TimerHandle):
            return NotImplemented
        return (self.deadline == other._when and self.callback == other._callback
                and self.args == other._args and self.is_cancelled == other._cancelled)

    def __lt__(self, other):
        if not isinstance(other, asyncio.TimerHandle):
            return NotImplemented
        return self.deadline < other._when

    def __le__(self, other):
        if not isinstance(other, asyncio.TimerHandle):
            return NotImplemented
        return self.deadline < other._when or self == other

    def __gt__(self, other):
        if not isinstance(other, asyncio.TimerHandle):
            return NotImplemented
        return self.deadline > other._when

    def __ge__(self, other):
        if not isinstance(other, asyncio.TimerHandle):
            return NotImplemented
        return self.deadline > other._when or self == other
