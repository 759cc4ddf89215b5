# SpareBytes: messages that nobody holds any more, for the next ones of their size.
#
# malloc's fastest lists end at 1 KiB, and Python's own allocator at 512 bytes: beyond, to make and
# to free a message costs more than to fill it. But most protocols let go of what they received
# before they return, and relays when it is sent; and peers repeat their sizes.
#
# Owner: nobody else. An object is kept, and used again, only while there is no other reference to
# it; what a message shows beyond its own bytes is nothing, as only the same size is used again.

cdef enum:
    SPARE_FROM = 513
    SPARES = 64                 # as many as messages may be on their way in one tick
    SPARE_MEMORY = 262144       # bytes in all


@cython.internal
@cython.final
cdef class SpareBytes:
    cdef list objects           # None beyond `count`
    cdef Py_ssize_t count
    cdef Py_ssize_t size        # of all of them: that of the last message

    def __cinit__(self):
        self.objects = [None] * SPARES

    cdef bytes message(self, const char *content, Py_ssize_t size):
        """A bytes object of this content."""
        cdef PyObject *spare
        if size != self.size:
            self.clear()
            self.size = size
        if not self.count:
            return PyBytes_FromStringAndSize(content, size)
        self.count -= 1
        spare = <PyObject *>PyList_GET_ITEM(self.objects, self.count)
        Py_INCREF(None)
        PyList_SET_ITEM(self.objects, self.count, None)
        message = <object>spare
        Py_DECREF(message)      # the list's reference; ours is the local variable
        if Py_REFCNT(message) != 1:
            return PyBytes_FromStringAndSize(content, size)     # a memory profiler looks at it
        memcpy(PyBytes_AS_STRING(message), content, size)
        forget_hash(message)
        return message

    cdef inline int take_back(self, message) noexcept:
        """The caller has what may be the last reference to a bytes object, and drops it next."""
        if (PyBytes_GET_SIZE(message) == self.size and Py_REFCNT(message) == 1
                and SPARE_FROM <= self.size <= SPARE_MEMORY // SPARES and self.count < SPARES):
            Py_DECREF(None)                 # which is in the place
            Py_INCREF(message)
            PyList_SET_ITEM(self.objects, self.count, message)
            self.count += 1
        return 0

    cdef int clear(self) except -1:
        while self.count:
            self.count -= 1
            self.objects[self.count] = None
        return 0
