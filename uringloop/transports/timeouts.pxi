# InactivityTimer: ends a connection on which nothing has moved for too long, in one direction.
#
# Read: no data came for `seconds` while the transport reads. While reading is paused the timer
# stands still; it starts anew with resume_reading(), and what was held meanwhile counts when it is
# delivered. After the end of file there is nothing to wait for. Write: output waits, and the kernel
# took none of it for `seconds`, also after close(). Nothing that waits, no timer: what sendfile
# sends on its own is not seen here.
#
# Owner: the Receiver or the Sender. The heap's handle reaches the transport by a weak reference
# only, and holds no context that might lead there: a transport which nobody else holds is
# finalized, with its warning, and takes its timer along.
#
# Activity costs a mark (LoopCore: touch), and neither a clock nor the heap: the handle stays where
# it is, and when it fires it goes back for what is left of the period since the last activity. The
# mark gets its time when the tick is over, after the protocol's callbacks: never early.

cdef enum:
    # A period that ran out is believed in the third tick: while the loop was busy with something
    # else data may have come, and a receive may have to be asked for again before it is seen.
    TICKS_OF_GRACE = 2
    # Sixty years: in nanoseconds still far from 63 bits.
    LONGEST_TIMEOUT_S = 2000000000


@cython.internal
@cython.final
cdef class InactivityTimer(Touchable):
    cdef LoopCore loop
    cdef object reference       # to the transport, weak
    cdef TimerHandle handle     # in the heap or about to run; None while there is nothing to time
    cdef double seconds
    cdef int64_t period_ns      # 0 once it is cancelled
    cdef int grace
    cdef bint reads             # the direction

    cdef int start(self) except -1:
        """A new period begins: so does reading, or output that has to wait."""
        touch(self.loop, self)
        if self.handle is None:
            return self.arm(liburing.monotonic_ns() + self.period_ns)
        return 0

    cdef int arm(self, int64_t deadline_ns) except -1:
        if self.period_ns and self.handle is None:
            self.handle = self.loop.make_timer(
                <double>deadline_ns / 1e9, self._ran_out, (), PyContext_New())
        return 0

    cdef int cancel(self) except -1:
        """It was replaced, or its direction is closed."""
        self.period_ns = 0
        handle, self.handle = self.handle, None
        if handle is not None:
            (<TimerHandle>handle).withdraw()
        return 0

    cdef bint counts(self, StreamTransport transport) noexcept:
        if self.reads:
            return transport.receiver.wanted and transport.receiver.end is None
        return transport.sender.size > 0

    def _ran_out(self):
        cdef StreamTransport transport = self.reference()
        cdef int64_t now = liburing.monotonic_ns(), deadline_ns
        self.handle = None
        if transport is None or not self.counts(transport):
            return
        deadline_ns = (self.touched_ns or now) + self.period_ns
        if deadline_ns > now:
            self.grace = TICKS_OF_GRACE
            self.arm(deadline_ns)
        elif self.grace:
            self.grace -= 1
            self.arm(now)
        else:
            self.grace = TICKS_OF_GRACE
            self.expire(transport)

    cdef int expire(self, StreamTransport transport) except -1:
        context = enter_context(transport.receiver.context)
        try:
            return self.ask(transport)
        finally:
            PyContext_Exit(context)

    cdef int ask(self, StreamTransport transport) except -1:
        """Let the protocol keep the connection if it can and will, else abort it."""
        cdef str name = "read_timed_out" if self.reads else "write_timed_out"
        cdef bint keep = False
        try:
            method = getattr(transport.protocol, name, None)
            if method is not None:
                keep = method()
        except (SystemExit, KeyboardInterrupt):
            self.arm(liburing.monotonic_ns())       # asked again in the next run
            raise
        except BaseException as exc:
            return transport.fatal_error(exc, f"Fatal error: protocol.{name}() call failed.")
        if keep:
            return self.start()
        # Who closed in read_timed_out() wants the last words to be sent.
        if transport.lost or (self.reads and transport.closing):
            return 0
        what = "no data received" if self.reads else "no data could be sent"
        return transport.fatal_error(
            TimeoutError(f"{what} for {self.seconds} s"), "Timeout on socket transport")


cdef InactivityTimer make_inactivity_timer(StreamTransport transport, seconds, bint reads):
    """A timer that is not started yet; None for None."""
    cdef InactivityTimer timer
    if seconds is None:
        return None
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise TypeError(f"seconds must be a number or None, not {type(seconds).__name__!r}")
    if not 0 < seconds < float("inf"):          # false for NaN
        raise ValueError(
            f"seconds must be positive and finite, not {seconds!r}; None switches the timeout off")
    timer = InactivityTimer.__new__(InactivityTimer)
    timer.loop = transport.loop
    timer.reference = weakref.ref(transport)
    if transport.receiver.context is None and not transport.lost:
        transport.receiver.context = PyContext_CopyCurrent()    # until reading begins
    timer.seconds = min(seconds, LONGEST_TIMEOUT_S)
    timer.period_ns = <int64_t>ceil(timer.seconds * 1e9)
    timer.touched_ns = 1
    timer.grace = TICKS_OF_GRACE
    timer.reads = reads
    return timer
