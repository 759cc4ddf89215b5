# ReaderFeed: received data into an asyncio.StreamReader, without its three Python frames and the
# bytes object in between.
#
# It appends to the reader's buffer and wakes the waiter, as StreamReaderProtocol.data_received()
# and StreamReader.feed_data() do. That is right only while these two are what they were:
# sub-classes, patched classes and patched instances are recognised at each message, and a Python
# whose functions use other names than the ones below (their co_names) turns this room off.
# Everything but the plain case is left to asyncio's code.

@cython.internal
@cython.final
cdef class ReaderFeed:
    cdef object protocol_type, reader_type, data_received, feed_data, wakeup_waiter
    cdef bint is_known

    def __cinit__(self):
        self.protocol_type = asyncio.StreamReaderProtocol
        self.reader_type = asyncio.StreamReader
        self.data_received = self.protocol_type.data_received
        self.feed_data = self.reader_type.feed_data
        self.wakeup_waiter = self.reader_type._wakeup_waiter
        self.is_known = (
            names_in(self.data_received) == ("_stream_reader", "feed_data")
            and names_in(self.protocol_type._stream_reader.fget) == ("_stream_reader_wr",)
            and names_in(self.feed_data) == (
                "_eof", "_buffer", "extend", "_wakeup_waiter", "_transport", "_paused", "len",
                "_limit", "pause_reading", "NotImplementedError")
            and names_in(self.wakeup_waiter) == ("_waiter", "cancelled", "set_result"))

    cdef bint serves(self, protocol) except -1:
        """Whether it is worth trying for this protocol."""
        return self.is_known and type(protocol) is self.protocol_type

    cdef bint feed(self, protocol, const char *content, Py_ssize_t size) except -1:
        """Append to the protocol's reader and wake who waits; False to leave it to asyncio."""
        cdef Py_ssize_t filled
        if not has_method(protocol, "data_received", self.data_received):
            return False
        reference = protocol._stream_reader_wr
        reader = PyObject_CallNoArgs(reference) if reference is not None else None
        if type(reader) is not self.reader_type:
            return False
        if not has_method(reader, "feed_data", self.feed_data):
            return False
        if not has_method(reader, "_wakeup_waiter", self.wakeup_waiter):
            return False
        buffer = reader._buffer
        if type(buffer) is not bytearray or reader._eof is not False:
            return False
        filled = PyByteArray_GET_SIZE(buffer)
        if exceeds_twice(filled + size, reader._limit):
            return False        # asyncio pauses the transport then
        PyByteArray_Resize(buffer, filled + size)
        memcpy(PyByteArray_AS_STRING(buffer) + filled, content, size)
        waiter = reader._waiter
        if waiter is not None:
            reader._waiter = None
            if not waiter.cancelled():
                waiter.set_result(None)
        return True


cdef inline bint exceeds_twice(Py_ssize_t size, limit) except -1:
    """size > 2 * limit"""
    cdef int overflow
    cdef long number
    if type(limit) is int:
        number = PyLong_AsLongAndOverflow(limit, &overflow)
        if not overflow and 0 <= number <= PY_SSIZE_T_MAX // 2:
            return size > 2 * number
    return size > 2 * limit


cdef tuple names_in(function):
    """The names that a Python function uses; none for what is not one."""
    return getattr(getattr(function, "__code__", None), "co_names", ())


_READER_FEED = ReaderFeed()
