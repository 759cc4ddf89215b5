# TlsProtocol: TLS over a stream transport, by a TlsCodec: states, flow control, protocols.
#
# To the transport below it is the protocol; a StreamTransport and another TlsProtocol (TLS in TLS)
# give it the bytes where they are, any other transport uses it as a BufferedProtocol. The
# application's protocol talks to the TlsTransport above. States and their order are those of
# asyncio's SSLProtocol, and so is whatever a protocol can see of them.
#
# In: all records that came whole make one message. Out: what is written in a tick is encrypted
# together at its end, and leaves with what the other transports send; a large write, and any that
# has to wait, is encrypted at once.
#
# Owner: the transport below holds the TlsProtocol, and that the TlsTransport until the connection
# is lost.

cdef enum TlsState:
    UNWRAPPED
    HANDSHAKING
    WRAPPED
    FLUSHING                    # close_notify is to be sent or the stream ended
    SHUTTING_DOWN


cdef enum AppState:
    APP_NEW                     # connection_made() is not called yet
    APP_CONNECTED
    APP_EOF                     # eof_received() was called
    APP_LOST


cdef enum:
    # Of input that is left when all records are decrypted: the beginning of the next.
    PART_OF_RECORD = 32768


class TlsProtocolType(asyncio.BufferedProtocol):
    """What a TlsProtocol answers isinstance() with."""

    __slots__ = ()


@cython.final
cdef class TlsProtocol(Flushable):
    cdef SockLoop loop
    cdef object below           # the transport; None before connection_made() and after the end
    cdef StreamTransport stream     # the same, if it is one of ours
    cdef readonly TlsTransport transport    # None once the connection is lost
    cdef object waiter
    # The application's protocol, and the short ways into it.
    cdef object app, app_get_buffer, app_buffer_updated
    cdef bint app_is_buffered
    cdef ReaderFeed feed
    cdef TlsProtocol inner      # the protocol is TLS itself
    cdef TlsCodec codec
    cdef bint server_side
    cdef dict extra
    cdef TlsState state
    cdef AppState app_state
    cdef object handshake_timeout, shutdown_timeout, handshake_timer, shutdown_timer
    cdef object handshake_began
    cdef bint got_eof
    cdef bint is_let_go         # close() was called when the transport had been closed already
    cdef int lost               # asyncio's _conn_lost; counts the writes that came too late
    # Input
    cdef bint app_reading_paused, below_reading_paused
    cdef Py_ssize_t read_high, read_low
    cdef object space           # for transports that ask for a buffer
    # Output
    cdef list backlog           # bytes, not encrypted; None before `backlog_first`
    cdef Py_ssize_t backlog_first, backlog_offset, backlog_size
    cdef bint deferred          # the backlog is to be encrypted by flush()
    cdef object deferred_in     # context of the first write
    cdef bint app_writing_paused, below_writing_paused
    cdef Py_ssize_t write_high, write_low
    cdef object __weakref__

    def __cinit__(self, maker=None):
        if maker is not _BY_THE_LOOP:
            raise TypeError("TLS is made by the event loop")
        self.codec = TlsCodec.__new__(TlsCodec)
        self.backlog = []

    @property
    def __class__(self):
        return TlsProtocolType

    cdef int set_app(self, protocol) except -1:
        self.app = protocol
        self.app_is_buffered = isinstance(protocol, asyncio.BufferedProtocol)
        self.app_get_buffer = protocol.get_buffer if self.app_is_buffered else None
        self.app_buffer_updated = protocol.buffer_updated if self.app_is_buffered else None
        self.inner = <TlsProtocol>protocol if type(protocol) is TlsProtocol else None
        feed = <ReaderFeed>_READER_FEED
        self.feed = feed if feed.serves(protocol) else None
        return 0

    cdef object extra_info(self, name, default):
        if name in self.extra:
            return self.extra[name]
        return default if self.below is None else self.below.get_extra_info(name, default)

    # --- the connection ------------------------------------------------------------------------

    def take_over(self, plain):
        """Become the protocol of a transport that is paused, and own what is under way.

        Bytes that a server's StreamReader has already are the beginning of the peer's handshake
        (gh-142352). A client's are not: no server speaks first in TLS.
        """
        self.below_writing_paused = getattr(plain, "_protocol_paused", False)
        # Whom the plain transport told to pause waits to be told to resume.
        self.app_writing_paused = (
            self.below_writing_paused and plain.get_protocol() is self.app)
        if self.server_side and isinstance(self.app, asyncio.StreamReaderProtocol):
            self.take_from_reader(self.app._stream_reader)
        plain.set_protocol(self)

    cdef int take_from_reader(self, reader) except -1:
        if reader is not None and reader._buffer:
            received = bytes(reader._buffer)
            self.codec.add_input(PyBytes_AS_STRING(received), PyBytes_GET_SIZE(received))
            reader._buffer.clear()
            reader._paused = False      # as the transport, from now on
        return 0

    def connection_made(self, transport):
        """Start the handshake, unless the connection was lost before."""
        if self.lost:
            return
        self.below = transport
        self.stream = <StreamTransport>transport if type(transport) is StreamTransport else None
        self.start_handshake()

    def connection_lost(self, exc):
        """The transport below is gone."""
        self.drop_output()
        self.lost += 1
        if self.transport is not None:
            self.transport.closed = True
        if self.state != HANDSHAKING and self.app_state in (APP_CONNECTED, APP_EOF):
            self.app_state = APP_LOST
            app = self.app
            try:
                self.loop.call_soon(app.connection_lost, exc)
            except MemoryError:
                app.connection_lost(exc)
        self.state = UNWRAPPED
        self.below = self.stream = self.transport = None
        self.app = self.app_get_buffer = self.app_buffer_updated = self.inner = self.feed = None
        self.wake_waiter(exc)
        self.shutdown_timer = cancel_timer(self.shutdown_timer)
        self.handshake_timer = cancel_timer(self.handshake_timer)
        if self.is_let_go:
            self.let_go()

    cdef int let_go(self) except -1:
        """Nobody asks about the connection any more: what a protocol that keeps its transport holds
        shall be no garbage. (asyncio's transport is of no use from here on.)"""
        self.is_let_go = True
        if self.lost and self.below is None:
            self.codec.let_go()
            self.extra = {}
        return 0

    cdef int wake_waiter(self, exc) except -1:
        waiter, self.waiter = self.waiter, None
        if waiter is None or waiter.cancelled():
            return 0
        if exc is None:
            waiter.set_result(None)
        else:
            waiter.set_exception(exc)
        return 0

    cdef int fatal_error(self, exc, str message) except -1:
        below = self.below
        if below is not None:
            below._force_close(exc)
        if isinstance(exc, OSError):
            if self.loop._debug:
                asyncio_logger.debug("%r: %s", self, message, exc_info=exc)
        elif not isinstance(exc, asyncio.CancelledError):
            self.loop.call_exception_handler({
                "message": message, "exception": exc, "transport": below, "protocol": self})
        return 0

    cdef int abort(self, exc) except -1:
        self.state = UNWRAPPED
        if self.below is not None:
            self.below._force_close(exc)
        return 0

    # --- the handshake -------------------------------------------------------------------------

    cdef int start_handshake(self) except -1:
        self.handshake_began = None
        if self.loop._debug:
            asyncio_logger.debug("%r starts SSL handshake", self)
            self.handshake_began = self.loop.time()
        self.state = HANDSHAKING
        self.handshake_timer = self.loop.call_later(
            self.handshake_timeout, self._check_handshake_timeout)
        return self.do_handshake()

    def _check_handshake_timeout(self):
        if self.state == HANDSHAKING:
            self.fatal_error(ConnectionAbortedError(
                f"SSL handshake is taking longer than {self.handshake_timeout} seconds: "
                "aborting the connection"), "Fatal error on transport")

    cdef int do_handshake(self) except -1:
        try:
            self.codec.sslobj.do_handshake()
        except _TRY_AGAIN:
            return self.send_records()
        except ssl.SSLError as exc:
            return self.handshake_failed(exc)
        return self.handshake_done()

    cdef int handshake_failed(self, exc) except -1:
        self.handshake_timer = cancel_timer(self.handshake_timer)
        self.state = UNWRAPPED
        self.fatal_error(exc, "SSL handshake failed on verifying the certificate"
                         if isinstance(exc, ssl.CertificateError) else "SSL handshake failed")
        return self.wake_waiter(exc)

    cdef int handshake_done(self) except -1:
        self.handshake_timer = cancel_timer(self.handshake_timer)
        try:
            if self.state != HANDSHAKING:
                raise RuntimeError("the connection was aborted in the handshake")
            self.state = WRAPPED
            certificate = self.codec.sslobj.getpeercert()
        except Exception as exc:
            return self.handshake_failed(exc)
        if self.loop._debug:
            asyncio_logger.debug("%r: SSL handshake took %.1f ms", self,
                                 (self.loop.time() - self.handshake_began) * 1e3)
        self.extra.update(peercert=certificate, cipher=self.codec.sslobj.cipher(),
                          compression=self.codec.sslobj.compression(), ssl_object=self.codec.sslobj)
        if self.app_state == APP_NEW:
            self.app_state = APP_CONNECTED
            self.app.connection_made(self.transport)
        self.wake_waiter(None)
        return self.read_records()

    # --- the end -------------------------------------------------------------------------------

    cdef int start_shutdown(self) except -1:
        self.write_deferred()
        if self.state not in (HANDSHAKING, WRAPPED):
            return 0
        if self.transport is not None:
            self.transport.closed = True
        if self.state == HANDSHAKING:
            return self.abort(None)
        self.state = FLUSHING
        self.shutdown_timer = self.loop.call_later(
            self.shutdown_timeout, self._check_shutdown_timeout)
        return self.finish_reading()

    def _check_shutdown_timeout(self):
        if self.state in (FLUSHING, SHUTTING_DOWN):
            self.below._force_close(TimeoutError("SSL shutdown timed out"))

    cdef int finish_reading(self) except -1:
        """FLUSHING: deliver what has come, then say close_notify after all that was written."""
        self.write_deferred()
        self.read_records()
        return self.finish_writing()

    cdef int finish_writing(self) except -1:
        if self.state != FLUSHING:          # aborted by the protocol, meanwhile
            return 0
        self.state = SHUTTING_DOWN
        return self.do_shutdown()

    cdef int do_shutdown(self) except -1:
        try:
            if not self.got_eof:
                self.codec.sslobj.unwrap()
        except _TRY_AGAIN:
            return self.send_records()
        except ssl.SSLError as exc:
            return self.shutdown_done(exc)
        self.send_records()
        self.call_eof_received()
        return self.shutdown_done(None)

    cdef int shutdown_done(self, exc) except -1:
        self.shutdown_timer = cancel_timer(self.shutdown_timer)
        if exc is not None:
            return self.fatal_error(exc, "Fatal error on transport")
        if self.below is not None:
            self.loop.call_soon(self.below.close)
        return 0

    def eof_received(self):
        """The stream below has ended; true keeps it open until the protocol reads on."""
        self.got_eof = True
        try:
            if self.loop._debug:
                asyncio_logger.debug("%r received EOF", self)
            if self.state == HANDSHAKING:
                self.handshake_failed(ConnectionResetError())
            elif self.state == WRAPPED:
                self.state = FLUSHING
                if self.app_reading_paused:
                    return True
                self.finish_reading()
            elif self.state == FLUSHING:
                self.write_backlog()
                self.finish_writing()
            elif self.state == SHUTTING_DOWN:
                self.do_shutdown()
        except Exception:
            if self.below is not None:
                self.below.close()
            raise

    cdef int call_eof_received(self) except -1:
        if self.app_state != APP_CONNECTED:
            return 0
        self.app_state = APP_EOF
        try:
            if self.app.eof_received():
                asyncio_logger.warning("returning true from eof_received() has no effect when "
                                       "using ssl")
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as exc:
            self.fatal_error(exc, "Error calling eof_received()")
        return 0

    # --- input ---------------------------------------------------------------------------------

    def get_buffer(self, sizehint):
        """A buffer for a transport below that is not ours."""
        if self.space is None:
            self.space = bytearray(READ_SIZE)
        return self.space

    def buffer_updated(self, nbytes):
        """So much of the buffer is filled."""
        if self.space is None or not 0 <= nbytes <= PyByteArray_GET_SIZE(self.space):
            raise ValueError(f"{nbytes} bytes are not what the buffer has room for")
        self.bytes_received(PyByteArray_AS_STRING(self.space), nbytes)

    cdef int bytes_received(self, const char *content, Py_ssize_t size) except -1:
        """Ciphertext, which is copied before anything else happens."""
        self.codec.add_input(content, size)
        if self.state == WRAPPED:
            return self.read_records()
        if self.state == HANDSHAKING:
            return self.do_handshake()
        if self.state == FLUSHING:
            return self.finish_reading()
        if self.state == SHUTTING_DOWN:
            return self.do_shutdown()
        return 0

    cdef int read_records(self) except -1:
        """Deliver what can be decrypted, then send what that made necessary."""
        if self.state not in (WRAPPED, FLUSHING):
            return 0
        try:
            if not self.app_reading_paused:
                if self.app_is_buffered and self.inner is None:
                    self.fill_buffer()
                else:
                    self.deliver()
                if not self.backlog:
                    self.send_records()
                elif not self.deferred:
                    self.write_backlog()
            self.control_input()
        except Exception as exc:
            self.fatal_error(exc, "Fatal error on SSL protocol")
        return 0

    cdef int deliver(self) except -1:
        """Decrypt and deliver until nothing is left, or the protocol paused or closed."""
        cdef Py_ssize_t room, size
        cdef PyObject *message
        while (self.codec.has_input() and not self.app_reading_paused
               and self.state in (WRAPPED, FLUSHING)):
            room = self.codec.room_wanted()
            if self.feed is not None or self.inner is not None or room >= READ_SIZE:
                space = scratch_of(self.loop)
                size = self.codec.decrypt(PyBytes_AS_STRING(space), READ_SIZE)
                if size:
                    self.deliver_scratch(PyBytes_AS_STRING(space), size)
            else:
                space = PyBytes_FromStringAndSize(NULL, room)
                size = self.codec.decrypt(PyBytes_AS_STRING(space), room)
                if size:
                    message = <PyObject *>space
                    Py_INCREF(space)
                    space = None                # shrink() wants the only reference
                    self.app.data_received(shrink(message, size))
            if self.codec.peer_closed:
                return self.end_of_input()
        return 0

    cdef int deliver_scratch(self, const char *content, Py_ssize_t size) except -1:
        if self.inner is not None:
            return self.inner.bytes_received(content, size)
        if self.feed is not None and self.feed.feed(self.app, content, size):
            self.loop.counters.messages_fed += 1
            return 0
        self.app.data_received(PyBytes_FromStringAndSize(content, size))
        return 0

    cdef int fill_buffer(self) except -1:
        """Decrypt into one buffer of a BufferedProtocol; when it gets full, go on soon."""
        cdef Py_buffer view
        cdef Py_ssize_t size = 0
        if not self.codec.has_input():
            return 0
        updated = self.app_buffer_updated       # get_buffer() may replace the protocol
        buffer = self.app_get_buffer(self.codec.input_size())
        try:
            PyObject_GetBuffer(buffer, &view, PyBUF_WRITABLE)
        except BufferError:
            raise TypeError("get_buffer() must return a read-write bytes-like object, "
                            f"not {type(buffer).__name__}") from None
        try:
            if view.len:
                size = self.codec.decrypt(<char *>view.buf, view.len)
            else:
                self.codec.peer_closed = True     # asyncio takes it for the end
        finally:
            PyBuffer_Release(&view)
        if size and self.codec.has_input() and not self.codec.peer_closed:
            self.loop.call_soon(self._read_on)
        if size:
            updated(size)
        return self.end_of_input() if self.codec.peer_closed else 0

    def _read_on(self):
        self.read_records()

    cdef int end_of_input(self) except -1:
        """close_notify: the peer sends nothing more."""
        self.call_eof_received()
        return self.start_shutdown()

    cdef int resume_app_reading(self) except -1:
        if self.app_reading_paused:
            self.app_reading_paused = False
            self.loop.call_soon(self._resume)
        return 0

    def _resume(self):
        if self.state == WRAPPED:
            self.read_records()
        elif self.state == FLUSHING:
            self.finish_reading()
        elif self.state == SHUTTING_DOWN:
            self.do_shutdown()

    cdef int control_input(self) except -1:
        """Pause the transport below when too much waits here, and resume it."""
        cdef Py_ssize_t size
        if (self.read_high > PART_OF_RECORD and not self.app_reading_paused
                and not self.below_reading_paused and not self.codec.has_input()):
            return 0            # not more than a part of a record
        if self.below is None:
            return 0
        size = self.codec.input_size()
        if size >= self.read_high and not self.below_reading_paused:
            self.below_reading_paused = True
            self.below.pause_reading()
        elif size <= self.read_low and self.below_reading_paused:
            self.below_reading_paused = False
            self.below.resume_reading()
        return 0

    # --- output --------------------------------------------------------------------------------

    cdef bint is_too_late(self) except -1:
        """Whether the connection is closing or lost; asyncio drops such writes, and warns in the
        end."""
        if self.state in (HANDSHAKING, WRAPPED):
            return False
        if self.lost >= _TOO_LATE_WARNINGS:
            asyncio_logger.warning("SSL connection is closed")
        self.lost += 1
        return True

    cdef int write(self, data) except -1:
        if self.inner is not None:
            self.inner.write_deferred()     # it was told to write before us
        if self.is_too_late():
            return 0
        if type(data) is bytes:
            self.append(data)
        elif not self.backlog and self.state == WRAPPED and is_large(data):
            return self.write_large(data)
        else:
            self.append(snapshot_of(data))
        return self.output_queued()

    cdef int write_parts(self, parts) except -1:
        if self.inner is not None:
            self.inner.write_deferred()     # as in write()
        if self.is_too_late():
            return 0
        chunks = [part if type(part) is bytes else snapshot_of(part) for part in parts]
        # Once more: the iterable may have closed the connection.
        if self.state not in (HANDSHAKING, WRAPPED):
            return 0
        chunks = [chunk for chunk in chunks if chunk]
        self.backlog.extend(chunks)             # all or none
        self.backlog_size += sum(map(len, chunks))
        return self.output_queued()

    cdef int append(self, bytes data) except -1:
        self.backlog.append(data)
        self.backlog_size += PyBytes_GET_SIZE(data)
        return 0

    cdef int output_queued(self) except -1:
        """Data was appended: encrypt it now, or in the flush of this tick?"""
        if self.state != WRAPPED:
            return 0
        if (self.backlog_size >= SEND_NOW_SIZE or self.backlog_size >= self.write_high
                or self.below_writing_paused or self.app_writing_paused
                or not self.loop.ticking or not self.backlog_size):
            return self.write_now()
        if not self.deferred:
            self.deferred_in = PyContext_CopyCurrent()
            self.deferred = True
            self.loop.mark_dirty(self)
        return 0

    cdef int flush(self) except -1:
        context, self.deferred_in = self.deferred_in, None
        if not self.deferred:
            return 0
        try:
            context = enter_context(context)
        except BaseException:
            self.deferred = False       # the next write, or room below, takes it along
            raise
        try:
            return self.write_deferred()
        finally:
            PyContext_Exit(context)

    cdef int write_deferred(self) except -1:
        """Encrypt what only waits for the end of the iteration; TLS above us comes first."""
        if self.inner is not None:
            self.inner.write_deferred()
        if self.deferred and self.state in (WRAPPED, FLUSHING):
            return self.write_now()
        return 0

    cdef int write_now(self) except -1:
        try:
            self.write_backlog()
        except Exception as exc:
            self.fatal_error(exc, "Fatal error on SSL protocol")
        return 0

    cdef int write_large(self, data) except -1:
        """Encrypt a large buffer without copying it before."""
        cdef Py_buffer view
        cdef Py_ssize_t done
        try:
            PyObject_GetBuffer(data, &view, PyBUF_FULL_RO)
            try:
                if PyBuffer_IsContiguous(&view, b"C"):
                    done = self.codec.encrypt(<const char *>view.buf, view.len)
                    if done < view.len:
                        self.append(PyBytes_FromStringAndSize(
                            <const char *>view.buf + done, view.len - done))
                else:
                    self.append(snapshot_of(data))
            finally:
                PyBuffer_Release(&view)
            self.write_backlog()
        except Exception as exc:
            self.fatal_error(exc, "Fatal error on SSL protocol")
        return 0

    cdef int write_backlog(self) except -1:
        """Encrypt what waits, as far as TLS lets us, and send it."""
        cdef bytes data
        cdef Py_ssize_t left, done
        self.deferred = False
        while self.backlog_first < PyList_GET_SIZE(self.backlog):
            data = self.next_chunk()
            left = PyBytes_GET_SIZE(data) - self.backlog_offset
            done = self.codec.encrypt(PyBytes_AS_STRING(data) + self.backlog_offset, left)
            self.backlog_size -= done
            if done < left:
                self.backlog_offset += done
                return self.send_records()
            self.backlog_offset = 0
            self.backlog[self.backlog_first] = None
            self.backlog_first += 1
        self.backlog.clear()
        self.backlog_first = 0
        return self.send_records()

    cdef bytes next_chunk(self):
        """The chunk to encrypt: small ones that follow each other become one, for full records."""
        cdef Py_ssize_t first = self.backlog_first, end = first, total = 0
        if not self.backlog_offset:
            while end < PyList_GET_SIZE(self.backlog) and total <= JOIN_SIZE:
                total += PyBytes_GET_SIZE(<object>PyList_GET_ITEM(self.backlog, end))
                end += 1
            end -= total > JOIN_SIZE
        if end - first > 1:
            joined = b"".join(self.backlog[first:end])
            self.backlog_first = end - 1
            self.backlog[end - 1] = joined
            while first < end - 1:
                self.backlog[first] = None
                first += 1
        return self.backlog[self.backlog_first]

    cdef int send_records(self) except -1:
        """Give the outgoing records to the transport below, unless that has paused us."""
        cdef bytes data
        if not self.below_writing_paused and self.below is not None:
            data = self.codec.give_output(READ_SIZE)
            if PyBytes_GET_SIZE(data) == READ_SIZE:
                self.send_pieces(data)
            elif data:
                if self.stream is not None:
                    self.stream.write_bytes(data)
                else:
                    self.below.write(data)
        return self.control_app_writing()

    cdef int send_pieces(self, bytes data) except -1:
        """More than one piece: they stay below malloc's mmap threshold."""
        cdef list pieces = [data]
        while PyBytes_GET_SIZE(data) == READ_SIZE:
            data = self.codec.give_output(READ_SIZE)
            if data:
                pieces.append(data)
        self.below.writelines(pieces)
        return 0

    cdef int drop_output(self) except -1:
        self.backlog.clear()
        self.backlog_first = self.backlog_offset = self.backlog_size = 0
        self.deferred = False
        try:
            self.codec.give_output()
        except MemoryError:
            pass                # it goes with the BIO
        return 0

    cdef Py_ssize_t output_size(self) except -1:
        return self.codec.outgoing.pending + self.backlog_size

    cdef int control_app_writing(self) except -1:
        """pause_writing() or resume_writing() as what waits passes the marks."""
        cdef Py_ssize_t size
        if (not self.below_writing_paused and not self.app_writing_paused
                and self.backlog_size < self.write_high):
            return 0            # all records are with the transport below
        size = self.output_size()
        if size >= self.write_high and not self.app_writing_paused:
            self.app_writing_paused = True
            self.call_flow_control("pause_writing")
        elif size <= self.write_low and self.app_writing_paused:
            self.app_writing_paused = False
            self.call_flow_control("resume_writing")
        return 0

    cdef int call_flow_control(self, str method) except -1:
        try:
            getattr(self.app, method)()
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as exc:
            self.loop.call_exception_handler({
                "message": f"protocol.{method}() failed", "exception": exc,
                "transport": self.transport, "protocol": self})
        return 0

    def pause_writing(self):
        """The transport below has too much to send."""
        assert not self.below_writing_paused
        self.below_writing_paused = True

    def resume_writing(self):
        """The transport below has room again."""
        assert self.below_writing_paused
        self.below_writing_paused = False
        self.send_records()


cdef object cancel_timer(timer):
    if timer is not None:
        timer.cancel()


cdef bint is_large(data) except -1:
    return memoryview(data).nbytes >= SEND_NOW_SIZE


cdef object checked_timeout(str name, value, double default):
    if value is None:
        return default
    if value <= 0:
        raise ValueError(f"{name} should be a positive number, got {value}")
    return value


def make_tls_protocol(SockLoop loop, app, context, waiter, server_side=False, server_hostname=None,
                      call_connection_made=True, handshake_timeout=None, shutdown_timeout=None):
    """The protocol for a transport below, and in `transport` the one above it."""
    cdef TlsProtocol tls = TlsProtocol.__new__(TlsProtocol, _BY_THE_LOOP)
    tls.handshake_timeout = checked_timeout(
        "ssl_handshake_timeout", handshake_timeout, constants.SSL_HANDSHAKE_TIMEOUT)
    tls.shutdown_timeout = checked_timeout(
        "ssl_shutdown_timeout", shutdown_timeout, constants.SSL_SHUTDOWN_TIMEOUT)
    if not context:
        if server_side:
            raise ValueError("Server side SSL needs a valid SSLContext")
        context = ssl.create_default_context()
        if not server_hostname:
            context.check_hostname = False
    tls.loop = loop
    tls.waiter = waiter
    tls.set_app(app)
    tls.app_state = APP_NEW if call_connection_made else APP_CONNECTED
    tls.server_side = server_side
    tls.extra = {"sslcontext": context}
    tls.codec.open(context, server_side, server_hostname)
    tls.read_high, tls.read_low = tls_limits(
        None, None, constants.FLOW_CONTROL_HIGH_WATER_SSL_READ)
    tls.write_high, tls.write_low = tls_limits(
        None, None, constants.FLOW_CONTROL_HIGH_WATER_SSL_WRITE)
    tls.transport = TlsTransport.__new__(TlsTransport, _BY_THE_LOOP)
    tls.transport.tls = tls
    tls.transport.closed = False
    return tls
