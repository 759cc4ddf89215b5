# SocketCall: what loop.sock_recv() and the like return, one awaitable for one call.
#
# To a caller it is a coroutine: lazy, awaited once, to be given to create_task(). While it waits it
# is also the future that its task waits for: it yields itself and calls the task back, so that
# neither a Future nor a Handle is made for a call. A call is owned by whoever awaits it and, while
# it waits, by its SocketQueue.
#
# States: new -> (waiting ->) ready -> finished, or cancelled. What was received for a call that
# cannot take it any more goes to the loop's Stash.

cdef enum CallKind:
    RECV
    RECV_INTO
    RECVFROM
    RECVFROM_INTO
    ACCEPT
    SENDALL
    SENDTO
    CONNECT


cdef enum CallState:
    NEW
    WAITING
    READY               # the result or error is there, and not fetched yet
    FINISHED
    CANCELLED


_CALL_NAMES = ("sock_recv", "sock_recv_into", "sock_recvfrom", "sock_recvfrom_into", "sock_accept",
               "sock_sendall", "sock_sendto", "sock_connect")
_STATE_NAMES = ("new", "waiting", "ready", "finished", "cancelled")


@cython.binding(False)
@cython.freelist(256)
@cython.final
cdef class SocketCall:
    cdef SockLoop loop
    cdef SocketQueue queue      # while it waits
    cdef object sock
    cdef object argument        # the number of bytes, the buffer, the data, or CONNECT's address
    cdef object option          # SENDTO's address; RECVFROM_INTO's number of bytes
    cdef Py_ssize_t limit       # most bytes of one recv(2); 0 where the method is called
    cdef Py_ssize_t sent
    cdef object value, error
    cdef object callback, context       # of the task that waits
    cdef object cancel_message
    cdef CallKind kind
    cdef CallState state
    cdef bint direct            # recv(2) and send(2) do: the socket's methods are not overridden
    cdef bint holds_socket      # a close() of the socket waits until the send is submitted
    cdef bint is_made           # by the loop, and not by __new__()
    cdef bint blocking          # asyncio's mark of a future that is awaited

    def __init__(self):
        raise TypeError("socket calls are made by the event loop")

    def __dealloc__(self):
        # As the interpreter warns of its own coroutines. (A __del__() would run once only for an
        # object that the freelist hands out again.)
        if self.state == NEW and self.is_made:
            warnings.warn(f"coroutine 'Loop.{_CALL_NAMES[self.kind]}' was never awaited",
                          RuntimeWarning)

    @property
    def __name__(self):
        return _CALL_NAMES[self.kind]

    @property
    def __qualname__(self):
        return f"Loop.{_CALL_NAMES[self.kind]}"

    def __repr__(self):
        return f"<{self.__qualname__} {_STATE_NAMES[self.state]} {self.sock!r}>"

    # --- the coroutine -----------------------------------------------------------------------

    def __await__(self):
        return self

    def __next__(self):
        # The slot itself is in awaitable.h; with this one, the class has it.
        return self.send(None)

    def send(self, argument):
        """Go on: as of a coroutine."""
        if not self.advance():
            return self
        value, self.value = self.value, None
        raise StopIteration(value)

    def throw(self, kind, value=None, traceback=None):
        """Raise an exception where the call waits, which ends it: as of a coroutine."""
        if self.state == FINISHED:
            raise RuntimeError("cannot reuse already awaited coroutine")
        self.abandon()
        if value is None:
            value = kind() if isinstance(kind, type) else kind
        elif not isinstance(value, BaseException):
            value = kind(value)
        if traceback is not None:
            value = value.with_traceback(traceback)
        raise value

    def close(self):
        """End the call: as of a coroutine."""
        self.abandon()

    cdef bint advance(self) except -1:
        """Start, or fetch the result. Returns whether the call has ended."""
        if self.state == NEW:
            return self.begin()
        if self.state == WAITING:
            raise RuntimeError("coroutine is being awaited already")
        if self.state != READY:
            raise RuntimeError("cannot reuse already awaited coroutine")
        self.finish()
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        return True

    cdef int finish(self) except -1:
        """Hold nothing longer than a finished coroutine would."""
        self.state = FINISHED
        self.sock = self.argument = self.option = None
        return 0

    cdef bint begin(self) except -1:
        cdef SocketQueue queue
        if not self.is_made:
            raise TypeError("socket calls are made by the event loop")
        self.state = FINISHED       # unless it turns out that it has to wait
        if type(self.sock) is not _SOCKET:
            base_events._check_ssl_socket(self.sock)
        if self.loop._debug and self.sock.gettimeout() != 0:
            raise ValueError("the socket must be non-blocking")
        queue = self.loop.queue_of(awaitable.socket_fd(self.sock), self.kind >= SENDALL)
        if self.kind == RECVFROM_INTO and not self.option:
            self.option = len(self.argument)
        if self.kind <= RECV_INTO:
            self.limit = self.stream_limit()
            if self.loop.reads_ahead and self.limit and queue is not None:
                queue.read_ahead(self.sock)
        if queue is None or queue.should_try(self):
            if self.attempt(queue):
                self.finish()
                return True
        if queue is None:
            raise os_error(EBADF)
        self.loop.check_open()
        self.loop.check_not_owned(queue.fd)
        if self.kind == SENDALL and type(self.argument) is not bytes:
            # As asyncio: while the call waits, a bytearray cannot be resized under `sent`.
            self.argument = memoryview(self.argument)
        self.state = WAITING
        self.blocking = True
        try:
            if self.kind == SENDALL and queue.head is None and queue.can_batch(self):
                self.sock._io_refs += 1     # as a file made of the socket does
                self.holds_socket = True
            queue.add(self)
        except BaseException:
            self.let_socket_go()
            self.finish()
            raise
        return False

    cdef Py_ssize_t stream_limit(self) except -1:
        """Most bytes of one recv(2); 0 where that would not do exactly what the method does."""
        if not self.direct or awaitable.socket_type(self.sock) != liburing.SOCK_STREAM:
            return 0
        return min(self.room(), READ_SIZE) if self.kind == RECV else self.room()

    cdef Py_ssize_t room(self) except -1:
        """The most bytes that an input call takes; 0 where the socket's method has to say it."""
        cdef Py_buffer view
        cdef Py_ssize_t size, wanted
        if self.kind == RECV or self.kind == RECVFROM:
            return size_or_zero(self.argument)
        try:
            PyObject_GetBuffer(self.argument, &view, PyBUF_WRITABLE)
        except (TypeError, BufferError, ValueError):
            return 0
        size = view.len             # the release may run code of the user
        PyBuffer_Release(&view)
        if self.kind == RECV_INTO or not self.option:
            return size
        wanted = size_or_zero(self.option)
        return wanted if wanted <= size else 0

    cdef int abandon(self) except -1:
        """Nobody wants the result; what was received for it stays for the next call."""
        cdef CallState state = self.state
        self.state = FINISHED
        if state == WAITING:
            self.leave_queue()
        self.keep_value()
        self.callback = self.context = self.error = None
        return self.finish()

    cdef int let_socket_go(self) except -1:
        if self.holds_socket:
            self.holds_socket = False
            self.sock._decref_socketios()
        return 0

    cdef int leave_queue(self) except -1:
        self.let_socket_go()
        queue, self.queue = self.queue, None
        if queue is not None:           # else the loop is closed
            (<SocketQueue>queue).remove(self)
        return 0

    cdef int keep_value(self) except -1:
        """Give back a result that nobody fetches."""
        value, self.value = self.value, None
        if value is None:
            return 0
        if self.kind == RECVFROM or self.kind == RECVFROM_INTO:
            if awaitable.socket_type(self.sock) != liburing.SOCK_STREAM:
                return 0                # a datagram, and asyncio's loss too
            value = value[0]
        if self.kind == ACCEPT:
            value[0].close()
        elif self.kind == RECV or self.kind == RECVFROM:
            self.loop.stash.put_back(self.cookie(), value)
        elif self.kind == RECV_INTO or self.kind == RECVFROM_INTO:
            with memoryview(self.argument).cast("B") as view:
                self.loop.stash.put_back(self.cookie(), bytes(view[:value]))
        return 0

    cdef object cookie(self):
        """The socket's cookie, or None if it is closed."""
        return cookie_of(awaitable.socket_fd(self.sock))

    # --- the future ----------------------------------------------------------------------------

    @property
    def _asyncio_future_blocking(self):
        # None says that it is no future: to all but the task that awaits it, it is a coroutine.
        if self.state != WAITING or self.callback is not None:
            return None
        return self.blocking

    @_asyncio_future_blocking.setter
    def _asyncio_future_blocking(self, bint blocking):
        self.blocking = blocking

    @property
    def _loop(self):
        # Without a get_loop(), which asyncio would prefer, this is one look-up and no call.
        return self.loop

    def add_done_callback(self, callback, *, context=None):
        """Called by the task that awaits: there is only one."""
        self.callback = callback
        self.context = PyContext_CopyCurrent() if context is None else context

    def done(self):
        """Whether the call waits no longer."""
        return self.state > WAITING

    def cancelled(self):
        """Whether the task that awaits it was cancelled."""
        return self.state == CANCELLED

    def result(self):
        """Called by the task that is called back: the result itself is fetched by send()."""
        if self.state == CANCELLED:
            message, self.cancel_message = self.cancel_message, None
            raise (asyncio.CancelledError() if message is None
                   else asyncio.CancelledError(message))

    def cancel(self, msg=None):
        """End the waiting: what is received meanwhile stays for the next call on the socket."""
        if self.state != WAITING:
            return False
        self.state = CANCELLED
        self.cancel_message = msg
        self.leave_queue()
        self.call_back_later()
        return True

    cdef int call_back_later(self) except -1:
        callback, context = self.callback, self.context
        self.callback = self.context = None
        if callback is not None:
            self.loop.call_soon(callback, self, context=context)
        return 0

    cdef int fail_later(self, exc) except -1:
        """End the waiting with an error, or None, where no code of the user may run."""
        self.state = READY
        self.error = exc
        return self.call_back_later()

    cdef int call_back(self) except -1:
        """The result is there: let the task fetch it, now."""
        callback, context = self.callback, self.context
        self.state = READY
        self.callback = self.context = None
        if callback is None:
            return 0
        # A real Future, the same for all: the task asks for no more than that it is done, and asks
        # another kind of object by a look-up that no cache knows.
        try:
            future = self.loop.done_future()
        except MemoryError:
            future = self
        context = enter_context(context)
        try:
            PyObject_CallOneArg(callback, future)
        finally:
            PyContext_Exit(context)
        return 0

    # --- what each kind does ---------------------------------------------------------------------

    cdef bint attempt(self, SocketQueue queue) except -1:
        """Try it without waiting. Returns whether it is done; raises what the system call raises.

        Off the fast paths Python's own socket method is called, so that results and errors are
        asyncio's.
        """
        if self.kind <= RECVFROM_INTO and queue is not None and queue.may_have_bytes():
            if self.room() > 0:         # else the method says what is wrong
                if self.take_from_stash():
                    return True
                if queue.reads_ahead_of(self.sock):
                    return queue.ahead.serve(self)
        if self.kind == SENDALL and self.direct:
            return self.send_rest()
        if self.limit:
            return self.receive(queue)
        try:
            self.value = self.call_method()
        except (BlockingIOError, InterruptedError):
            # A call for no bytes was not tried above, and is not to wait for what is there.
            return (self.kind <= RECVFROM_INTO and len(self.loop.stash.entries) > 0
                    and self.take_from_stash())
        return self.kind != SENDALL or self.count_sent()

    cdef object call_method(self):
        if self.kind == RECV:
            return self.sock.recv(self.argument)
        if self.kind == RECV_INTO:
            return self.sock.recv_into(self.argument)
        if self.kind == RECVFROM:
            return self.sock.recvfrom(self.argument)
        if self.kind == RECVFROM_INTO:
            return self.sock.recvfrom_into(self.argument, self.option)
        if self.kind == SENDALL:
            return self.sock.send(memoryview(self.argument).cast("B")[self.sent:])
        if self.kind == SENDTO:
            return self.sock.sendto(self.argument, self.option)
        if self.kind == ACCEPT:
            connection, address = self.sock.accept()
            connection.setblocking(False)
            return connection, address
        return check_connected(self.sock, self.argument)

    cdef bint count_sent(self) except -1:
        self.sent += self.value
        self.value = None
        return self.sent == memoryview(self.argument).nbytes

    cdef bint send_rest(self) except -1:
        cdef Py_buffer view
        cdef ssize_t sent
        cdef int error
        cdef Py_ssize_t left
        PyObject_GetBuffer(self.argument, &view, PyBUF_SIMPLE)
        left = max(0, view.len - self.sent)     # a buffer made in Python may have another size now
        sent = liburing.send(awaitable.socket_fd(self.sock), <char *>view.buf + self.sent, left,
                             liburing.MSG_NOSIGNAL | liburing.MSG_DONTWAIT)
        error = errno
        PyBuffer_Release(&view)
        if sent < 0:
            if error == EAGAIN or error == EINTR:
                return False
            raise os_error(error)
        self.loop.counters.bytes_sent += sent
        self.sent += sent
        return sent == left

    cdef bint receive(self, SocketQueue queue) except -1:
        """recv(2) for RECV and RECV_INTO on stream sockets."""
        cdef Py_buffer view
        cdef Py_ssize_t limit = self.limit
        cdef ssize_t size
        cdef int fd, error
        cdef object space = None
        cdef PyObject *block
        if self.kind == RECV_INTO:
            PyObject_GetBuffer(self.argument, &view, PyBUF_WRITABLE)
            limit = view.len
            # Only now: getting the buffer may have closed the socket.
            fd = awaitable.socket_fd(self.sock)
            size = liburing.recv(fd, view.buf, limit, liburing.MSG_DONTWAIT)
            error = errno
            PyBuffer_Release(&view)
        else:
            # A block that stays hot, and a copy out of it; no copy where messages are large.
            if queue is not None and queue.large:
                space = PyBytes_FromStringAndSize(NULL, limit)
            else:
                space = scratch_of(self.loop)
            fd = awaitable.socket_fd(self.sock)
            size = liburing.recv(fd, PyBytes_AS_STRING(space), limit, liburing.MSG_DONTWAIT)
            error = errno
        if size < 0:
            if error == EAGAIN or error == EINTR:
                return False
            raise os_error(error)
        self.loop.counters.bytes_received += size
        if queue is not None:
            queue.learn(size, limit)
        if space is None:
            self.value = size
        elif space is self.loop.scratch:
            self.value = PyBytes_FromStringAndSize(PyBytes_AS_STRING(space), size)
        else:
            block = <PyObject *>space
            Py_INCREF(space)
            space = None                # shrink() wants the only reference
            self.value = shrink(block, size)
        return True

    cdef Py_ssize_t take(self, const char *content, Py_ssize_t size) except -1:
        """Take what was received for this call, as its result. Returns for how much it has room."""
        cdef Py_buffer view
        if self.kind == RECV or self.kind == RECVFROM:
            size = min(size, <Py_ssize_t>self.argument)
            value = PyBytes_FromStringAndSize(content, size)
        else:
            PyObject_GetBuffer(self.argument, &view, PyBUF_WRITABLE)
            size = min(size, view.len)
            if self.kind == RECVFROM_INTO and self.option:
                size = min(size, <Py_ssize_t>self.option)
            if size:
                memcpy(view.buf, content, size)
            PyBuffer_Release(&view)
            value = size
        if self.kind == RECVFROM or self.kind == RECVFROM_INTO:
            value = (value, None)       # of a stream: nobody is named
        self.value = value
        return size

    cdef Py_ssize_t offer(self, const char *content, Py_ssize_t size) except -1:
        """take(), whose errors are the call's: a buffer may be another than when the call began."""
        try:
            return self.take(content, size)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as exc:
            self.error = exc
        return 0

    cdef bint take_from_stash(self) except -1:
        """What was received for an earlier call on this socket comes first."""
        cookie = self.cookie()
        cdef bytes data = self.loop.stash.take(cookie, self.room())
        cdef Py_ssize_t taken = 0
        if data is None:
            return False
        try:
            taken = self.take(PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data))
        finally:
            self.loop.stash.put_back(cookie, data[taken:])
        return True


cdef Py_ssize_t size_or_zero(value) except -1:
    """A positive int as it is; 0 for all else. An int's sub-class is not asked what it is."""
    if type(value) is not int:
        if not isinstance(value, int):
            return 0
        value = int.__index__(value)
    return value if 0 < value <= PY_SSIZE_T_MAX else 0


cdef object check_connected(sock, address):
    """What asyncio does when a connect(2) that had to wait has ended."""
    error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if error:
        raise OSError(error, f"Connect call failed {address}")


cdef int advance_call(PyObject *call, PyObject **value) except -1:
    """SocketCall.advance() for awaitable.h: 0 to wait, 1 with a new reference to the result."""
    cdef SocketCall self = <SocketCall>call
    if not self.advance():
        return 0
    result = self.value
    self.value = None
    Py_INCREF(result)
    value[0] = <PyObject *>result
    return 1


awaitable.make_awaitable(<PyObject *>SocketCall, advance_call)
