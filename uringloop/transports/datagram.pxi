# DatagramTransport: whole messages of one socket, UDP or Unix, on both backends in the same way.
#
# A datagram is sent when sendto() is called and received when its turn has come: the socket is
# readable, and recvfrom(2) takes one datagram after the other, a few for each turn. So an error is
# known at once, an order is that of the calls, no block of memory is too short for a datagram, and
# what a protocol does not want (it pauses, closes, stops the loop) is still in the socket. Requests
# on the ring, multishot or not, were measured and are slower (docs/architecture.md).
#
# The system calls are made here where they do exactly what the methods of socket.socket would do;
# elsewhere those are called. Users may close the socket under its transport: no close() is held up,
# and whether the number still names the socket is looked at once in each iteration.

cdef enum:
    # How many datagrams of one socket are received before others have their turn.
    DATAGRAMS_PER_TURN = 16
    # The system call is left to the method of the socket object.
    BY_METHOD = -1


# What a datagram counts in the buffer beside its payload: asyncio's figure since 3.13.
_DATAGRAM_HEADER_SIZE = 8 if sys.version_info >= (3, 13) else 0


class DatagramTransportType(transports._FlowControlMixin, asyncio.Transport,
                            asyncio.DatagramTransport):
    """What datagram transports answer isinstance() with: asyncio's are both kinds of transports."""

    __slots__ = ()


@cython.internal
@cython.final
cdef class DatagramWatch(Operation):
    """That one side of the socket is ready."""
    cdef DatagramTransport transport
    cdef bint is_output

    cdef object owner(self):
        return self.transport

    cdef int complete(self, int32_t result, uint32_t flags) except -1:
        cdef DatagramTransport transport = self.transport
        context = transport.writing_context if self.is_output else transport.reading_context
        context = enter_context(context)
        try:
            return transport.send_buffered() if self.is_output else transport.receive()
        finally:
            PyContext_Exit(context)


@cython.final
cdef class DatagramTransport(FlowControlTransport):
    cdef DatagramWatch input, output
    cdef object address         # of the peer as it was given, also where it is not connected
    cdef object buffer          # deque of (bytes, address)
    cdef Py_ssize_t buffer_size
    cdef object reading_context
    cdef bint reading_paused
    cdef bint has_peer          # the socket is connected,
    cdef bint has_named_peer    # to one that has a name
    cdef bint is_direct         # the system calls are made here
    cdef int family
    cdef uint64_t looked_in     # the number of the iteration
    cdef KnownSenders senders
    cdef SocketName source_name         # of the last datagram
    cdef unsigned source_size
    cdef object source
    cdef dict __dict__          # tests and tools replace sendto() and the like on one transport

    max_size = SCRATCH_SIZE
    # Not for datagrams, says NotImplementedError.
    write = asyncio.Transport.write
    writelines = asyncio.Transport.writelines
    write_eof = asyncio.Transport.write_eof
    can_write_eof = asyncio.Transport.can_write_eof

    @property
    def __class__(self):
        return DatagramTransportType

    @property
    def _address(self):
        return self.address

    @property
    def _buffer(self):
        return self.buffer

    @property
    def _buffer_size(self):
        return self.buffer_size

    @property
    def _paused(self):
        return self.reading_paused

    def set_protocol(self, protocol):
        """Switch to another protocol; what arrives next goes to it."""
        self.protocol = protocol

    # --- input -------------------------------------------------------------------------------

    cdef bint awaits_input(self) noexcept:
        return self.input.state != IDLE

    def _start_reading(self):
        if not self.is_reading():
            return
        try:
            self.start_receiving()
        except (OSError, MemoryError) as exc:
            self.fatal_error(exc, "Fatal read error on datagram transport")

    def is_reading(self):
        """Whether datagrams are delivered as they arrive."""
        return not self.closing and not self.reading_paused

    def pause_reading(self):
        """Deliver nothing until resume_reading(); what arrives stays in the socket."""
        if not self.is_reading():
            return
        self.reading_paused = True
        self.stop_receiving()
        if self.loop._debug:
            asyncio_logger.debug("%r pauses reading", self)

    def resume_reading(self):
        """Deliver datagrams again."""
        if self.closing or not self.reading_paused:
            return
        self.start_receiving()
        self.reading_paused = False
        if self.loop._debug:
            asyncio_logger.debug("%r resumes reading", self)

    cdef int start_receiving(self) except -1:
        self.loop.check_open()
        if not self.owns_descriptor():
            raise os_error(EBADF)
        self.reading_context = PyContext_CopyCurrent()
        if self.input.state == IDLE:
            self.loop.poller.watch_input(self.fd, self.input)
        return 0

    cdef int stop_receiving(self) except -1:
        return self.loop.poller.unwatch_input(self.fd, self.input)

    cdef int receive(self) except -1:
        """The socket is readable: receive what is there, but let others have their turn."""
        cdef int turn
        if not self.owns_descriptor():
            self.stop_receiving()
            self.protocol.error_received(os_error(EBADF))
            return 0
        self.looked_in = self.loop.counters.ticks
        for turn in range(DATAGRAMS_PER_TURN):
            if not (self.receive_one() if self.is_direct else self.receive_by_method()):
                break
            if self.input.state == IDLE or self.loop._stopping or self.loop.dead:
                break
        return 0

    cdef bint receive_one(self) except -1:
        """Receive and deliver a datagram. Returns whether there may be another."""
        cdef ssize_t size
        cdef int error = 0
        cdef unsigned name_size = sizeof(self.source_name)
        data = None
        if self.is_detached():
            return self.receive_failed(EBADF)
        try:
            space = scratch_of(self.loop)
            size = liburing.recvfrom(self.fd, PyBytes_AS_STRING(space), SCRATCH_SIZE,
                                     liburing.MSG_DONTWAIT, &self.source_name.any, &name_size)
            error = errno
            if size >= 0:
                source = self.find_source(name_size)
                data = self.loop.spares.message(PyBytes_AS_STRING(space), size)
                self.loop.counters.messages_copied += 1
                self.loop.counters.bytes_received += size
                self.protocol.datagram_received(data, source)
                self.loop.spares.take_back(data)
                return True
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as exc:
            return self.failed_to_deliver(data, exc)
        return self.receive_failed(error)

    cdef object find_source(self, unsigned name_size):
        self.source = None      # if it fails, the name is another than that of the source
        self.source_size = name_size
        if self.family == liburing.AF_UNIX:
            self.source = address_of(&self.source_name, name_size)
        else:
            if self.senders is None:
                self.senders = KnownSenders()
            self.source = self.senders.find(&self.source_name, name_size)
        return self.source

    cdef bint receive_failed(self, int error) except -1:
        if error != EAGAIN and error != EINTR:
            self.protocol.error_received(os_error(error))
        return False

    cdef bint receive_by_method(self) except -1:
        """receive_one() by a method of the socket object."""
        data = None
        try:
            data, source = self.sock.recvfrom(SCRATCH_SIZE)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as exc:
            failure = exc
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as exc:
            return self.failed_to_deliver(None, exc)
        if data is None:
            self.protocol.error_received(failure)
            return False
        try:
            self.protocol.datagram_received(data, source)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as exc:
            return self.failed_to_deliver(data, exc)
        return True

    cdef bint failed_to_deliver(self, data, exc) except -1:
        """Without data, it is the reading that failed."""
        if data is None:
            self.fatal_error(exc, "Fatal read error on datagram transport")
            return False
        self.loop.call_exception_handler({
            "message": "Exception in callback protocol.datagram_received()", "exception": exc,
            "transport": self, "protocol": self.protocol})
        return True

    # --- output ------------------------------------------------------------------------------

    cdef bint awaits_output(self) noexcept:
        return self.output.state != IDLE

    cdef Py_ssize_t output_size(self) noexcept:
        return self.buffer_size

    cdef int send_early(self) except -1:
        return 0                # what could be sent is sent

    def get_write_buffer_size(self):
        """Bytes of the datagrams that wait for room in the socket."""
        return self.buffer_size

    def sendto(self, data, addr=None):
        """Send one datagram, empty ones too; buffer a copy of it when the socket is full.

        addr: where to; None on a connected endpoint. TypeError for data that is not bytes-like,
        ValueError for another address than that of the peer. Errors of the system call go to
        error_received(). After connection_lost() it does nothing.
        """
        if not isinstance(data, (bytes, bytearray, memoryview)):
            raise TypeError("data argument must be a bytes-like object, "
                            f"not {type(data).__name__!r}")
        if self.address is not None:
            if addr is not None and addr != self.address:
                raise ValueError(f"Invalid address: must be None or {self.address}")
            addr = self.address     # with allow_broadcast the socket itself is not connected
        if self.sock is None or (self.lost and self.address is not None):
            self.count_late()
        elif self.buffer_size:
            self.keep(data, addr)
        elif not self.try_to_send(data, addr):
            if self.lost:
                self.count_late()   # nobody would send what is kept now
            else:
                self.wait_for_room()
                self.keep(data, addr)

    cdef int count_late(self) except -1:
        """A datagram that comes after the end: asyncio drops it, and warns in the end."""
        if self.lost >= _TOO_LATE_WARNINGS:
            asyncio_logger.warning("socket.send() raised exception.")
        self.lost += 1
        return 0

    cdef int wait_for_room(self) except -1:
        self.loop.check_open()
        self.writing_context = PyContext_CopyCurrent()
        if self.output.state == IDLE and not self.loop.dead:
            self.loop.poller.watch_output(self.fd, self.output)
        return 0

    cdef int keep(self, data, addr) except -1:
        content = bytes(data)
        self.buffer.append((content, addr))
        self.buffer_size += buffered_size(content)
        return self.maybe_pause_writing()

    cdef bint try_to_send(self, data, addr) except -1:
        """False when the socket is full; True when the datagram is done with, sent or not."""
        cdef int error
        try:
            error = self.send_directly(data, addr) if self.is_direct else BY_METHOD
            if error == BY_METHOD:
                error = self.send_by_method(data, addr)
            if error == 0:
                return True
            if error == EAGAIN:
                return False
            failure = os_error(error)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as exc:
            failure = exc
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as exc:
            self.fatal_error(exc, "Fatal write error on datagram transport")
            return True
        self.protocol.error_received(failure)
        return True

    cdef int send_by_method(self, data, addr) except -2:
        if self.has_named_peer or (addr is None and self.has_peer):
            self.sock.send(data)
        else:
            self.sock.sendto(data, addr)
        return 0

    cdef int send_directly(self, data, addr) except -2:
        """Returns 0, a positive errno, or BY_METHOD."""
        cdef SocketName name
        cdef SocketName *target = NULL
        cdef unsigned size = 0
        cdef Py_buffer view
        cdef int error
        if not self.has_named_peer and not (addr is None and self.has_peer):
            if addr is None:
                return BY_METHOD
            if addr is self.source:         # an answer
                target, size = &self.source_name, self.source_size
            else:
                target, size = &name, name_of(addr, self.family, &name)
            if size == 0:
                return BY_METHOD
            PySys_Audit("socket.sendto", "OO", <PyObject *>self.sock, <PyObject *>addr)
        if not self.owns_number():
            return EBADF
        if type(data) is bytes:
            return self.send_content(PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data), target, size)
        PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
        error = self.send_content(<const char *>view.buf, view.len, target, size)
        PyBuffer_Release(&view)
        return error

    cdef int send_content(self, const char *content, Py_ssize_t length, SocketName *target,
                          unsigned size) noexcept:
        cdef ssize_t sent = liburing.sendto(
            self.fd, content, length, SEND_FLAGS, &target.any if target is not NULL else NULL, size)
        if sent < 0:
            # Handlers of signals are run by the method.
            return errno if errno != EINTR else BY_METHOD
        self.loop.counters.bytes_sent += sent
        return 0

    cdef inline bint owns_number(self) noexcept:
        """owns_descriptor(), asked once in each iteration."""
        cdef uint64_t tick = self.loop.counters.ticks
        if tick == self.looked_in and self.loop.ticking:
            return not self.is_detached()
        if not self.owns_descriptor():
            return False
        self.looked_in = tick
        return True

    cdef int send_buffered(self) except -1:
        """The socket has room."""
        while self.buffer:
            content, addr = self.buffer.popleft()
            self.buffer_size -= buffered_size(content)
            if not self.try_to_send(content, addr):
                self.buffer.appendleft((content, addr))
                self.buffer_size += buffered_size(content)
                break
        if not self.lost:
            self.maybe_resume_writing()     # may append to the buffer, close or abort
        if not self.buffer:
            self.stop_sending()
            # If it is lost, it is on its way already: the protocol closed an empty endpoint.
            if self.closing and not self.lost:
                self.lost += 1
                self._call_connection_lost(None)
        return 0

    cdef int stop_sending(self) except -1:
        self.writing_context = None
        return self.loop.poller.unwatch_output(self.fd, self.output)

    cdef int drop_output(self) except -1:
        self.buffer.clear()
        self.buffer_size = 0
        return self.stop_sending()

    # --- the end -----------------------------------------------------------------------------

    def close(self):
        """Send what is buffered, then close; connection_lost(None) follows."""
        if self.closing:
            return
        self.closing = True
        self.stop_receiving()
        if not self.buffer:
            self.lose_connection(None)
        elif not self.owns_descriptor():
            self.force_close(os_error(EBADF))       # nothing would tell that there is room

    cdef int flush(self) except -1:
        return self.tell_of_loss() if self.must_be_told else 0

    cdef int end_requests(self) except -1:
        self.stop_receiving()
        return self.stop_sending()

    cdef bint is_idle(self) noexcept:
        return self.input.state == IDLE and self.output.state == IDLE

    cdef int release(self) except -1:
        alive = self            # the two below may hold the last references
        Transport.release(self)
        self.forget()
        return 0

    cdef int give_up(self) except -1:
        Transport.give_up(self)
        self.forget()
        return 0

    cdef void forget(self) noexcept:
        """No cycle is left for the collector."""
        self.input.transport = self.output.transport = None
        self.reading_context = self.writing_context = None


cdef Py_ssize_t buffered_size(bytes content) except -1:
    # An empty datagram counts too, or a flood of them would never pause the protocol.
    return PyBytes_GET_SIZE(content) + <Py_ssize_t>_DATAGRAM_HEADER_SIZE or 8


def make_datagram_transport(SockLoop loop, sock, protocol, address=None, waiter=None, extra=None):
    """Make a transport as asyncio does: connection_made, then reading, then the waiter, each in
    the next iteration."""
    cdef DatagramTransport transport = DatagramTransport.__new__(DatagramTransport, _BY_THE_LOOP)
    transport.input = DatagramWatch.__new__(DatagramWatch)
    transport.output = DatagramWatch.__new__(DatagramWatch)
    transport.output.is_output = True
    transport.input.transport = transport.output.transport = transport
    transport.buffer = collections.deque()
    transport.address = address or None
    transport.high_water = 64 * 1024
    transport.low_water = 16 * 1024
    transport.protocol = protocol
    try:
        transport.own(loop, sock, {} if extra is None else dict(extra), None)
        # None when getpeername(2) failed; "" for a Unix socket connected to one without a name.
        transport.has_peer = transport.extra["peername"] is not None
        transport.has_named_peer = bool(transport.extra["peername"])
        if type(sock) is _SOCKET:
            transport.family = sock.family
            transport.is_direct = transport.family in (
                liburing.AF_INET, liburing.AF_INET6, liburing.AF_UNIX)
        transport.schedule_start(waiter)
    except BaseException:
        transport.give_up()
        raise
    return transport
