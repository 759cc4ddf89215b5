# TlsCodec: plaintext into records and back, by a pair of memory BIOs and an SSLObject.
#
# What a transport receives goes into the incoming BIO, and comes out of one or more SSL_read, as
# many as there are whole records; what is written goes into SSL_write, and comes out of the other
# BIO. It knows no protocol and no transport; the connection's states are the TlsProtocol's.
#
# Owner: the TlsProtocol.

_TRY_AGAIN = (ssl.SSLWantReadError, ssl.SSLSyscallError)


@cython.internal
@cython.final
cdef class Window:
    """A buffer object over memory that one function of _ssl is to read or to fill, once."""
    cdef void *start
    cdef Py_ssize_t size

    cdef inline void show(self, const char *start, Py_ssize_t size) noexcept:
        self.start = <void *>start
        self.size = size

    def __getbuffer__(self, Py_buffer *view, int flags):
        PyBuffer_FillInfo(view, self, self.start, self.size, 0, flags)
        # Whoever finds this object later finds nothing in it.
        self.start = NULL
        self.size = 0


@cython.internal
@cython.final
cdef class TlsCodec:
    cdef object incoming, outgoing, sslobj
    cdef object take_input, give_output, read_method, write_method      # bound methods of _ssl
    cdef bint is_direct         # these are of _ssl itself, not of a sub-class of SSLObject
    cdef Window window
    cdef RecordCounter records
    cdef bint has_rest          # the last SSL_read filled its room: there may be more of the record
    cdef bint peer_closed       # close_notify was read

    def __cinit__(self):
        self.window = Window.__new__(Window)
        self.records = RecordCounter.__new__(RecordCounter)

    cdef int open(self, context, bint server_side, server_hostname) except -1:
        self.incoming = ssl.MemoryBIO()
        self.outgoing = ssl.MemoryBIO()
        self.sslobj = context.wrap_bio(
            self.incoming, self.outgoing, server_side=server_side,
            server_hostname=server_hostname if server_hostname and not server_side else None)
        self.take_input = self.incoming.write
        self.give_output = self.outgoing.read
        self.is_direct = is_plain(self.sslobj)
        methods = self.sslobj._sslobj if self.is_direct else self.sslobj
        self.read_method = methods.read
        self.write_method = methods.write
        return 0

    cdef int let_go(self) except -1:
        """The connection is lost, and nobody asks about it any more."""
        self.sslobj = self.read_method = self.write_method = None
        return 0

    cdef int add_input(self, const char *content, Py_ssize_t size) except -1:
        self.window.show(content, size)
        self.take_input(self.window)
        self.records.add(content, size)
        return 0

    cdef bint has_input(self) noexcept:
        """Whether SSL_read may give data, or an error."""
        return self.records.whole > 0 or self.has_rest

    cdef Py_ssize_t input_size(self) except -1:
        return self.incoming.pending

    cdef Py_ssize_t room_wanted(self) except -1:
        """Room enough for what can be decrypted; READ_SIZE if it may be more."""
        cdef Py_ssize_t room = self.records.size
        if self.records.unknown:
            room = self.input_size()
        if self.has_rest or self.records.unknown or not room:
            room += LARGEST_RECORD
        return min(room, READ_SIZE)

    cdef Py_ssize_t decrypt(self, char *space, Py_ssize_t room) except -1:
        """Decrypt into the room as much as there is. Returns the bytes."""
        cdef Py_ssize_t filled = 0, count
        while filled < room and self.has_input():
            try:
                count = self.read(space + filled, room - filled)
            except _TRY_AGAIN:
                self.records.take_all()
                self.has_rest = False
                break
            if count == 0:
                self.peer_closed = True
                self.records.take_all()
                self.has_rest = False
                break
            filled += count
            self.has_rest = filled == room
            if not self.has_rest:
                self.records.take_one()
        return filled

    cdef inline Py_ssize_t read(self, char *space, Py_ssize_t room) except -1:
        """One SSL_read."""
        cdef bytes data
        if self.is_direct:
            self.window.show(space, room)
            return self.read_method(room, self.window)
        data = snapshot_of(self.read_method(room))
        if PyBytes_GET_SIZE(data) > room:
            raise ValueError(f"{type(self.sslobj).__name__}.read({room}) returned "
                             f"{PyBytes_GET_SIZE(data)} bytes")
        memcpy(space, PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data))
        return PyBytes_GET_SIZE(data)

    cdef Py_ssize_t encrypt(self, const char *content, Py_ssize_t size) except -1:
        """Make records of it. Returns the bytes taken: less if TLS has to read something before."""
        cdef Py_ssize_t done = 0
        try:
            while done < size:
                done += self.write(content + done, size - done)
        except _TRY_AGAIN:
            pass
        return done

    cdef inline Py_ssize_t write(self, const char *content, Py_ssize_t size) except -1:
        """One SSL_write."""
        cdef Py_ssize_t taken
        if self.is_direct:
            self.window.show(content, size)
            return self.write_method(self.window)
        taken = self.write_method(PyBytes_FromStringAndSize(content, size))
        if not 0 < taken <= size:
            raise ValueError(f"{type(self.sslobj).__name__}.write() took {taken} of {size} bytes")
        return taken


# An SSLObject's methods call those of the same name of _ssl and nothing more, as long as these are
# its methods and have these names in them.
_READ, _WRITE = ssl.SSLObject.read, ssl.SSLObject.write
_METHODS_ARE_KNOWN = (
    names_in(_READ) == ("_sslobj", "read") and names_in(_WRITE) == ("_sslobj", "write"))


cdef bint is_plain(sslobj) except -1:
    """Whether nobody sees it if _ssl is called directly."""
    cls = type(sslobj)
    return (_METHODS_ARE_KNOWN and cls is ssl.SSLObject and cls.read is _READ
            and cls.write is _WRITE)
