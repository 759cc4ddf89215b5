# ReadyQueue: handles to run, first in first out.
#
# A circular queue over a Python list, so that the collector sees the references (a loop dropped
# with callbacks pending can be freed) and neither push nor pop allocates. Other threads push while
# they hold the GIL; neither operation gives it up.

@cython.internal
@cython.final
cdef class ReadyQueue:
    cdef list places
    cdef Py_ssize_t head, count, capacity

    def __cinit__(self):
        self.capacity = 64
        self.places = [None] * self.capacity

    cdef int grow(self) except -1:
        cdef Py_ssize_t capacity = 2 * self.capacity, i
        cdef list larger = [None] * capacity
        cdef PyObject *handle
        # Making the list may have run the collector, and that a finalizer which came here too.
        if self.capacity >= capacity:
            return 0
        for i in range(self.count):
            # The two places swap their references.
            handle = <PyObject *>PyList_GET_ITEM(
                self.places, (self.head + i) & (self.capacity - 1))
            PyList_SET_ITEM(self.places, (self.head + i) & (self.capacity - 1), None)
            PyList_SET_ITEM(larger, i, <object>handle)
        self.places = larger
        self.head = 0
        self.capacity = capacity
        return 0

    cdef inline int push(self, Handle handle) except -1:
        cdef Py_ssize_t place
        while self.count == self.capacity:
            self.grow()
        place = (self.head + self.count) & (self.capacity - 1)
        Py_DECREF(<object>PyList_GET_ITEM(self.places, place))      # None
        Py_INCREF(handle)
        PyList_SET_ITEM(self.places, place, handle)
        self.count += 1
        return 0

    cdef inline Handle pop(self):
        """The oldest handle; the queue must not be empty."""
        cdef PyObject *taken = <PyObject *>PyList_GET_ITEM(self.places, self.head)
        Py_INCREF(None)
        PyList_SET_ITEM(self.places, self.head, None)
        self.head = (self.head + 1) & (self.capacity - 1)
        self.count -= 1
        handle = <Handle>taken
        Py_DECREF(handle)       # the list's reference; ours is the local variable
        return handle

    cdef int clear(self) except -1:
        while self.count:
            self.pop()
        return 0
