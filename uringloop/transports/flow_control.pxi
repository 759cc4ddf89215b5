# Flow control: when a protocol is told to pause and resume writing.
#
# The mark is compared with the bytes that the kernel has not accepted yet.

cdef object enter_context(context):
    """Enter a context, or a copy of it where a nested loop is in it already; to be exited."""
    try:
        PyContext_Enter(context)
    except RuntimeError:
        context = context.copy()
        PyContext_Enter(context)
    return context


cdef class FlowControlTransport(Transport):
    cdef Py_ssize_t high_water, low_water
    cdef bint writing_paused
    # Where resume_writing(), and connection_lost() after a close() that had to wait, run: asyncio
    # copies the context when it starts to wait, and keeps it until all output is sent.
    cdef object writing_context

    def __repr__(self):
        info = [type(self).__name__]
        if not self.holds_descriptor:
            info.append("closed")
        elif self.closing:
            info.append("closing")
        info.append(f"fd={self.fd}")
        if self.loop is not None and not self.loop._closed:
            info.append("read=polling" if self.awaits_input() else "read=idle")
            sending = "polling" if self.awaits_output() else "idle"
            info.append(f"write=<{sending}, bufsize={self.output_size()}>")
        return "<{}>".format(" ".join(info))

    cdef bint awaits_input(self) noexcept:
        return False

    cdef bint awaits_output(self) noexcept:
        return False

    cdef Py_ssize_t output_size(self) noexcept:
        return 0

    cdef int send_early(self) except -1:
        raise NotImplementedError

    @property
    def _protocol_paused(self):
        return self.writing_paused

    def get_write_buffer_limits(self):
        """(low, high) in bytes."""
        return self.low_water, self.high_water

    def set_write_buffer_limits(self, high=None, low=None):
        """Set the marks in bytes: pause_writing() above high, resume_writing() at or below low.

        Defaults as in asyncio: high = 64 KiB (or 4 * low), low = high // 4. ValueError unless
        high >= low >= 0.
        """
        if high is None:
            high = 64 * 1024 if low is None else 4 * low
        if low is None:
            low = high // 4
        if not high >= low >= 0:
            raise ValueError(f"high ({high!r}) must be >= low ({low!r}) must be >= 0")
        self.high_water = int(min(high, PY_SSIZE_T_MAX))
        self.low_water = int(min(low, PY_SSIZE_T_MAX))
        # What waits for the end of the iteration only is no reason to pause.
        if self.output_size() > self.high_water:
            self.send_early()
        self.maybe_pause_writing()

    cdef int maybe_pause_writing(self) except -1:
        if self.writing_paused or self.output_size() <= self.high_water:
            return 0
        self.writing_paused = True
        if self.writing_context is None:
            self.writing_context = PyContext_CopyCurrent()
        try:
            self.protocol.pause_writing()
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as exc:
            self.report_flow_error(exc, "protocol.pause_writing() failed")
        return 0

    cdef int maybe_resume_writing(self) except -1:
        if not self.writing_paused or self.output_size() > self.low_water:
            return 0
        self.writing_paused = False
        try:
            self.protocol.resume_writing()
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as exc:
            self.report_flow_error(exc, "protocol.resume_writing() failed")
        return 0

    cdef int report_flow_error(self, exc, str message) except -1:
        self.loop.call_exception_handler({
            "message": message, "exception": exc, "transport": self, "protocol": self.protocol})
        return 0
