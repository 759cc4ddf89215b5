# TLS records: what can be said of a stream of ciphertext without its key.
#
# _ssl says that it wants more input by an exception, which costs more than decrypting a small
# message. So the records that came whole are counted, and _ssl is asked no more often than that.
#
# Owner: the TlsProtocol that shows it every byte, from the first on.

cdef enum:
    HEADER_SIZE = 5
    APPLICATION_DATA = 23
    # RFC 8446, 5.2, and RFC 5246, 6.2.3; what is above the first is left to _ssl to judge.
    LARGEST_RECORD = 16384 + 256
    LARGEST_TLS12_RECORD = 16384 + 2048


@cython.internal
@cython.final
cdef class RecordCounter:
    cdef Py_ssize_t whole       # records of which no byte is missing; an upper limit
    cdef Py_ssize_t size        # bytes of these, headers included
    cdef bint unknown           # this is not a stream of records: nothing can be said
    cdef Py_ssize_t missing     # bytes of the record that is under way
    cdef Py_ssize_t record_size
    cdef int header_filled
    cdef unsigned char header[HEADER_SIZE]

    cdef void add(self, const char *content, Py_ssize_t size) noexcept:
        """Look at what comes next in the stream."""
        cdef Py_ssize_t taken
        while size > 0 and not self.unknown:
            if self.missing:
                taken = min(size, self.missing)
                self.missing -= taken
                if not self.missing:
                    self.whole += 1
                    self.size += self.record_size
            else:
                taken = min(size, HEADER_SIZE - self.header_filled)
                memcpy(&self.header[self.header_filled], content, taken)
                self.header_filled += <int>taken
                if self.header_filled == HEADER_SIZE:
                    self.begin()
            content += taken
            size -= taken
        if self.unknown or (self.missing and self.may_be_refused()):
            self.whole += 1         # not whole, but _ssl may have something to say about it

    cdef void begin(self) noexcept:
        """The header is complete."""
        self.header_filled = 0
        self.missing = self.header[3] << 8 | self.header[4]
        self.record_size = HEADER_SIZE + self.missing
        if not (20 <= self.header[0] <= 24 and self.header[1] == 3
                and 0 < self.missing <= LARGEST_TLS12_RECORD):
            self.unknown = True

    cdef bint may_be_refused(self) noexcept:
        """Whether the header alone may be an error."""
        return (self.header[0] != APPLICATION_DATA or self.header[1] != 3 or self.header[2] != 3
                or self.record_size > HEADER_SIZE + LARGEST_RECORD)

    cdef void take_one(self) noexcept:
        """Data of a record was decrypted."""
        if self.whole > 0 and not self.unknown:
            self.whole -= 1
            if self.whole == 0:
                self.size = 0

    cdef void take_all(self) noexcept:
        """There was nothing more to be decrypted."""
        self.whole = self.size = 0
