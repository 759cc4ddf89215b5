# StreamTransport: TCP and Unix stream sockets; the meeting point of protocol, Receiver and Sender.
#
# Writes are collected during a tick and leave together in the flush: that is where io_uring's gain
# comes from. Exceptions: a large write goes out at once by send(2), and so does every write while
# the loop is not running, because nobody knows when it will run again.

_TOO_LATE_WARNINGS = constants.LOG_THRESHOLD_FOR_CONNLOST_WRITES


@cython.final
cdef class StreamTransport(FlowControlTransport):
    cdef Receiver receiver
    cdef Sender sender
    cdef ReaderFeed feed        # if the protocol is asyncio's for a StreamReader
    cdef TlsProtocol tls        # if it is the engine's for TLS
    cdef dict __dict__          # tests and tools replace write() and the like on one transport
    cdef bint buffered          # the protocol is a BufferedProtocol
    cdef bint reading_paused
    cdef bint eof_written
    cdef bint output_shut       # shutdown(SHUT_WR) was called
    cdef object empty_waiter

    _start_tls_compatible = True
    _sendfile_compatible = constants._SendfileMode.TRY_NATIVE

    cdef bint awaits_input(self) noexcept:
        return self.receiver.wanted and self.receiver.end is None

    cdef bint awaits_output(self) noexcept:
        return self.sender.state != IDLE

    def set_protocol(self, protocol):
        """Switch to another protocol, of either kind; what arrives next goes to it."""
        self.protocol = protocol
        self.buffered = isinstance(protocol, asyncio.BufferedProtocol)
        self.tls = <TlsProtocol>protocol if type(protocol) is TlsProtocol else None
        feed = <ReaderFeed>_READER_FEED
        self.feed = feed if feed.serves(protocol) else None

    @property
    def _paused(self):
        return self.reading_paused

    @property
    def _eof(self):
        return self.eof_written

    # --- input -------------------------------------------------------------------------------

    def _start_reading(self):
        if not self.closing and not self.reading_paused:
            self.receiver.start()

    def is_reading(self):
        """Whether data is delivered as it arrives."""
        return not self.closing and not self.reading_paused

    def pause_reading(self):
        """Deliver no data until resume_reading(); what is on its way is kept in order."""
        if self.closing or self.reading_paused:
            return
        self.reading_paused = True
        self.receiver.pause()
        if self.loop._debug:
            asyncio_logger.debug("%r pauses reading", self)

    def resume_reading(self):
        """Deliver data again, beginning with what was kept."""
        if self.closing or not self.reading_paused:
            return
        self.reading_paused = False
        self.loop.check_open()
        self.receiver.start()
        if self.loop._debug:
            asyncio_logger.debug("%r resumes reading", self)

    def set_read_timeout(self, seconds):
        """Abort with TimeoutError when no data comes for so long while reading; None: never.

        A read_timed_out() of the protocol is called instead; the connection is kept, for another
        period, if it returns true. TypeError, or ValueError unless positive and finite.
        """
        timer = make_inactivity_timer(self, seconds, True)
        if not self.closing:
            self.receiver.set_timer(timer)

    cdef int stop_receiving(self) except -1:
        return self.receiver.stop()

    cdef bint fed(self, const char *content, Py_ssize_t size) except -1:
        """Try to give data to a StreamReader directly; False if data_received() is to be called."""
        try:
            return self.feed.feed(self.protocol, content, size)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as exc:
            self.fatal_error(exc, "Fatal error: protocol.data_received() call failed.")
        return True

    cdef int pass_to_tls(self, const char *content, Py_ssize_t size) except -1:
        try:
            self.tls.bytes_received(content, size)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as exc:
            self.fatal_error(exc, "Fatal error: protocol.buffer_updated() call failed.")
        return 0

    cdef int data_received(self, bytes data) except -1:
        try:
            self.protocol.data_received(data)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as exc:
            self.fatal_error(exc, "Fatal error: protocol.data_received() call failed.")
        return 0

    cdef Py_ssize_t fill_buffer(self, const char *content, Py_ssize_t size) except -1:
        """Copy into one get_buffer(). Returns the bytes taken; 0 after a fatal error."""
        cdef Py_buffer view
        cdef Py_ssize_t copied
        try:
            self.get_buffer(&view)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as exc:
            self.fatal_error(exc, "Fatal error: protocol.get_buffer() call failed.")
            return 0
        copied = min(size, view.len)
        memcpy(view.buf, content, copied)
        PyBuffer_Release(&view)
        return copied

    cdef Py_ssize_t buffer_received(self) except -1:
        """recv(2) into one get_buffer(). Returns the bytes received, 0 when there were none."""
        cdef Py_buffer view
        cdef ssize_t size
        try:
            self.get_buffer(&view)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as exc:
            self.fatal_error(exc, "Fatal error: protocol.get_buffer() call failed.")
            return 0
        size = liburing.recv(self.fd, view.buf, view.len, liburing.MSG_DONTWAIT)
        error = errno
        PyBuffer_Release(&view)
        if size <= 0:
            set_errno(error)
            self.receiver.read_failed(size)
            return 0
        self.buffer_updated(size)
        return size

    cdef int get_buffer(self, Py_buffer *view) except -1:
        buffer = self.protocol.get_buffer(-1)
        if not len(buffer):
            raise RuntimeError("get_buffer() returned an empty buffer")
        PyObject_GetBuffer(buffer, view, PyBUF_WRITABLE)
        if view.len == 0:       # items without a size
            PyBuffer_Release(view)
            raise RuntimeError("get_buffer() returned an empty buffer")
        return 0

    cdef int buffer_updated(self, Py_ssize_t size) except -1:
        try:
            self.protocol.buffer_updated(size)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as exc:
            self.fatal_error(exc, "Fatal error: protocol.buffer_updated() call failed.")
        return 0

    cdef int eof_received(self) except -1:
        if self.loop._debug:
            asyncio_logger.debug("%r received EOF", self)
        try:
            keep_open = self.protocol.eof_received()
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as exc:
            return self.fatal_error(exc, "Fatal error: protocol.eof_received() call failed.")
        if not keep_open:
            self.close()
        return 0

    # --- output ------------------------------------------------------------------------------

    def can_write_eof(self):
        """True: TCP and Unix sockets can be closed for writing alone."""
        return True

    def get_write_buffer_size(self):
        """Bytes that the kernel has not accepted yet."""
        self.send_early()
        return self.sender.size

    cdef int send_early(self) except -1:
        """Send what only waits for the end of the iteration."""
        if self.sender.size and self.sender.state == IDLE and not self.sender.waits_for_flush():
            self.send_now()
        return 0

    cdef Py_ssize_t output_size(self) noexcept:
        return self.sender.size

    cdef int take_from_tls(self) except -1:
        """What TLS above us was given to write comes before what we are told to do now."""
        if self.tls is not None:
            self.tls.write_deferred()
        return 0

    cdef int check_writable(self, str method) except -1:
        if self.eof_written:
            raise RuntimeError(f"Cannot call {method}() after write_eof()")
        if self.empty_waiter is not None:
            raise RuntimeError(f"unable to {method}; sendfile is in progress")
        return 0

    cdef bint is_too_late(self) except -1:
        """Whether the connection is lost; asyncio drops such writes, and warns in the end."""
        if not self.lost:
            return False
        if self.lost >= _TOO_LATE_WARNINGS:
            asyncio_logger.warning("socket.send() raised exception.")
        self.lost += 1
        return True

    def write(self, data):
        """Send bytes-like data; never blocks. TypeError for anything else."""
        if not isinstance(data, (bytes, bytearray, memoryview)):
            raise TypeError("data argument must be a bytes-like object, "
                            f"not {type(data).__name__!r}")
        self.take_from_tls()
        if self.eof_written or self.empty_waiter is not None:
            self.check_writable("write")
        if type(data) is bytes:
            if not data or self.is_too_late():
                return
            self.sender.append(<bytes>data)
        else:
            if self.is_too_late():
                return
            chunk = self.snapshot(data)
            if not chunk:
                return
            self.sender.append(chunk)
        self.output_queued()

    cdef int write_bytes(self, bytes data) except -1:
        """write() of bytes that are not empty, without its checks of what they are."""
        if self.eof_written or self.empty_waiter is not None:
            self.check_writable("write")
        if self.is_too_late():
            return 0
        self.sender.append(data)
        return self.output_queued()

    def writelines(self, list_of_data):
        """Send an iterable of bytes-like objects, as one write."""
        self.take_from_tls()
        self.check_writable("writelines")
        if self.lost or not list_of_data:
            return
        parts = [part if type(part) is bytes else snapshot_of(part) for part in list_of_data]
        total = sum(map(len, parts))
        # Once more: the iterable may have closed the connection.
        self.check_writable("writelines")
        if not total or self.lost:
            return
        if total <= JOIN_SIZE:
            self.sender.append(b"".join(parts))
        else:
            self.sender.extend([part for part in parts if part], total)
        self.output_queued()

    cdef bytes snapshot(self, data):
        """The content as bytes, less what a large write could send without the copy."""
        cdef Py_buffer view
        cdef ssize_t sent
        if (self.sender.size == 0 and memoryview(data).nbytes >= SEND_NOW_SIZE
                and not self.loop.dead and not self.is_detached()):
            PyObject_GetBuffer(data, &view, PyBUF_FULL_RO)
            try:
                if PyBuffer_IsContiguous(&view, b"C"):
                    sent = liburing.send(self.fd, view.buf, view.len, SEND_FLAGS)
                    if sent > 0:
                        self.loop.counters.bytes_sent += sent
                        return self.rest_of(&view, sent)
                    if errno != EAGAIN and errno != EINTR:
                        # Reported here: a second try would answer EPIPE instead of ECONNRESET.
                        self.sender.failed(errno)
                        return b""
            finally:
                PyBuffer_Release(&view)
        return snapshot_of(data)

    cdef bytes rest_of(self, Py_buffer *view, Py_ssize_t sent):
        """What is not sent of a buffer, whose beginning is."""
        try:
            return PyBytes_FromStringAndSize(<char *>view.buf + sent, view.len - sent)
        except MemoryError as exc:
            self.fatal_error(exc, "Fatal write error on socket transport")
        return b""

    cdef int output_queued(self) except -1:
        """Data was appended: now, or in the flush of this tick?"""
        cdef Py_ssize_t large = SEND_HOT_SIZE if self.loop.ring is None else SEND_NOW_SIZE
        if self.sender.state == IDLE and (
                self.sender.size >= large or self.sender.size > self.high_water
                or not self.loop.ticking) and not self.sender.waits_for_flush():
            self.send_now()
        if self.sender.size:
            self.loop.check_open()      # as asyncio says it, where nobody would send the rest
            self.loop.mark_dirty(self)
            self.maybe_pause_writing()
        return 0

    cdef int send_now(self) except -1:
        cdef int error = self.sender.send_now()
        if error:
            self.sender.failed(error)
        elif self.sender.size or self.awaits_drain():
            self.loop.mark_dirty(self)
        else:
            self.writing_context = None
        return 0

    cdef int output_sent(self) except -1:
        """The kernel took output: resume the protocol, and do what waited for the end of it."""
        context = self.writing_context
        if context is None:
            return self.after_output()
        context = enter_context(context)
        try:
            return self.after_output()
        finally:
            PyContext_Exit(context)

    cdef int after_output(self) except -1:
        if self.lost:           # by abort(): as in asyncio, nobody is told of what was dropped
            return 0
        self.maybe_resume_writing()
        if self.sender.size or self.lost:
            return 0
        if not self.closing:
            self.writing_context = None
        if self.empty_waiter is not None and not self.empty_waiter.done():
            self.empty_waiter.set_result(None)
        if self.closing:
            self._call_connection_lost(None)
        elif self.eof_written:
            self.shut_down()
        return 0

    def set_write_timeout(self, seconds):
        """Abort with TimeoutError when output waits and none leaves for so long; None: never.

        A write_timed_out() of the protocol is called instead; the connection is kept, for another
        period, if it returns true. TypeError, or ValueError unless positive and finite.
        """
        timer = make_inactivity_timer(self, seconds, False)
        if not self.lost:
            self.sender.set_timer(timer)

    def write_eof(self):
        """Close the writing side once everything is sent; reading goes on."""
        self.take_from_tls()
        if self.closing or self.eof_written:
            return
        self.eof_written = True
        if not self.sender.size:
            self.shut_down()

    cdef int shut_down(self) except -1:
        # SHUT_WR does not end a receive in flight (docs/kernel.md).
        if self.output_shut or self.loop.dead:
            return 0
        self.output_shut = True
        if not self.owns_descriptor():
            return self.sender.failed(EBADF)
        if liburing.shutdown(self.fd, liburing.SHUT_WR) < 0 and errno != ENOTCONN:
            return self.sender.failed(errno)
        return 0

    cdef int drop_output(self) except -1:
        return self.sender.drop()

    def _make_empty_waiter(self):
        if self.empty_waiter is not None:
            raise RuntimeError("Empty waiter is already set")
        self.empty_waiter = self.loop.create_future()
        if not self.sender.size:
            self.empty_waiter.set_result(None)
        return self.empty_waiter

    def _reset_empty_waiter(self):
        self.empty_waiter = None
        if self.finished:
            self.release_when_idle()

    # --- both --------------------------------------------------------------------------------

    cdef int flush(self) except -1:
        if self.must_be_told:
            return self.tell_of_loss()
        if self.receiver.must_arm:
            self.receiver.prepare()
        if self.sender.size:
            self.sender.prepare()
        elif self.sender.state == IDLE and self.awaits_drain():
            # send(2) at once took the last of it, out of a call that could not say so.
            self.output_sent()
        return 0

    cdef bint awaits_drain(self) noexcept:
        """Whether somebody has to be told that all output is sent."""
        return not self.lost and (
            self.writing_paused or self.empty_waiter is not None or self.closing
            or (self.eof_written and not self.output_shut))

    def close(self):
        """Send what was written, then close; connection_lost(None) follows."""
        self.take_from_tls()
        if self.closing:
            return
        self.closing = True
        self.receiver.stop()
        if self.sender.size and self.sender.state == IDLE:
            # As in asyncio, where it has been tried: when nothing has to wait, the connection is
            # lost now and later writes are dropped; else they go out too (TLS relies on that).
            error = 0 if self.sender.waits_for_flush() else self.sender.send_now()
            if error:
                self.sender.failed(error)
                return
            self.loop.mark_dirty(self)
        if not self.sender.size:
            self.lose_connection(None)
        elif not self.owns_descriptor():
            self.sender.failed(EBADF)       # nothing would tell that there is room
        elif self.writing_context is None:
            self.writing_context = PyContext_CopyCurrent()

    cdef bint is_idle(self) noexcept:
        # sendfile uses the descriptor, too, from its wait for an empty buffer to its end.
        return (self.receiver.state == IDLE and self.sender.state == IDLE
                and self.empty_waiter is None)

    cdef int connection_lost(self, exc) except -1:
        self.sender.set_timer(None)
        try:
            Transport.connection_lost(self, exc)
        finally:
            self.end_sendfile(exc)
        return 0

    cdef int end_sendfile(self, exc) except -1:
        """Tell a sendfile in progress that the connection is lost; it gives the descriptor back."""
        if self.empty_waiter is None:
            return 0
        if self.empty_waiter.done():
            # It may wait for the socket to be writable: now it is, and sendfile(2) fails.
            if self.owns_descriptor() and not self.loop.dead:
                liburing.shutdown(self.fd, liburing.SHUT_RDWR)
        elif exc is not None:
            self.empty_waiter.set_exception(exc)
        else:
            self.empty_waiter.set_exception(ConnectionError("Connection is closed by peer"))
        return 0

    cdef int end_requests(self) except -1:
        self.receiver.end_now()
        return self.sender.end_now()

    cdef int release_when_idle(self) except -1:
        if self.is_idle():
            self.release()
        return 0

    cdef int release(self) except -1:
        alive = self            # the two below may hold the last references
        Transport.release(self)
        self.sender.forget()
        self.receiver.must_arm = False
        # No cycle is left for the collector: nothing calls the two any more.
        self.receiver.transport = None
        self.receiver.context = None
        self.sender.transport = None
        self.writing_context = None
        return 0

    cdef int give_up(self) except -1:
        self.receiver.transport = self.sender.transport = None      # no cycle
        return Transport.give_up(self)


cdef bytes snapshot_of(data):
    """The content of a bytes-like object of any shape, in C order."""
    return memoryview(data).tobytes()


cdef int set_no_delay(int fd) noexcept:
    """Nagle's algorithm off on TCP, protocol 0 included; refused by other stream sockets."""
    cdef int on = 1
    return liburing.setsockopt(fd, liburing.IPPROTO_TCP, liburing.TCP_NODELAY, &on, sizeof(on))


cdef StreamTransport new_stream_transport(protocol):
    cdef StreamTransport transport = StreamTransport.__new__(StreamTransport, _BY_THE_LOOP)
    cdef Receiver receiver = Receiver.__new__(Receiver)
    cdef Sender sender = Sender.__new__(Sender)
    receiver.transport = sender.transport = transport
    transport.keeps_number = True
    transport.receiver = receiver
    transport.sender = sender
    transport.high_water = 64 * 1024
    transport.low_water = 16 * 1024
    transport.set_protocol(protocol)
    return transport


def make_stream_transport(SockLoop loop, sock, protocol, waiter=None, extra=None, server=None):
    """Make a transport as asyncio does: connection_made, then reading, then the waiter, each in
    the next iteration."""
    cdef StreamTransport transport = new_stream_transport(protocol)
    try:
        transport.own(loop, sock, {} if extra is None else dict(extra), server)
        if sock.family in (liburing.AF_INET, liburing.AF_INET6):
            set_no_delay(transport.fd)
            transport.sender.may_lend = loop.zerocopy_size < PY_SSIZE_T_MAX
        transport.receiver.preload(loop.take_received(transport.fd))
        transport.schedule_start(waiter)
    except BaseException:
        transport.receiver.stash_held()
        transport.give_up()
        raise
    return transport


cdef int serve_accepted(SockLoop loop, const Accepted *conn, protocol, server) except -1:
    """The same for an accepted connection, whose descriptor is the caller's if that fails."""
    cdef StreamTransport transport = new_stream_transport(protocol)
    try:
        transport.own_accepted(loop, conn, server)
        set_no_delay(conn.fd)
        transport.sender.may_lend = loop.zerocopy_size < PY_SSIZE_T_MAX
        loop.refuse_calls(conn.fd)
        transport.schedule_start(None)
    except BaseException:
        transport.give_up()
        raise
    return 0
