# ReadyQueue: handles to run, first in first out.
#
# A circular queue over a Python list, so that the collector sees the references (a loop dropped
# with callbacks pending can be freed) and neither push nor pop allocates. Its items are reached by
# their address, which changes in grow() only. Other threads push while they hold the GIL; neither
# operation gives it up.

@cython.internal
@cython.final
cdef class ReadyQueue:
    cdef list places
    cdef PyObject **items       # of `places`
    cdef Py_ssize_t head, count, capacity

    def __cinit__(self):
        self.capacity = 64
        self.places = [None] * self.capacity
        self.items = list_items(self.places)

    cdef int grow(self) except -1:
        cdef Py_ssize_t capacity = 2 * self.capacity, i
        cdef list larger = [None] * capacity
        cdef PyObject **items = list_items(larger)
        # Making the list may have run the collector, and that a finalizer which came here too.
        if self.capacity >= capacity:
            return 0
        for i in range(self.count):
            # The two places swap their references.
            items[i] = self.items[(self.head + i) & (self.capacity - 1)]
            self.items[(self.head + i) & (self.capacity - 1)] = <PyObject *>None
        self.places = larger
        self.items = items
        self.head = 0
        self.capacity = capacity
        return 0

    cdef inline int push(self, Handle handle) except -1:
        cdef Py_ssize_t place
        while self.count == self.capacity:
            self.grow()
        place = (self.head + self.count) & (self.capacity - 1)
        Py_DECREF(None)                 # which is in the place
        Py_INCREF(handle)
        self.items[place] = <PyObject *>handle
        self.count += 1
        return 0

    cdef inline Handle pop(self):
        """The oldest handle; the queue must not be empty."""
        cdef PyObject *taken = self.items[self.head]
        Py_INCREF(None)
        self.items[self.head] = <PyObject *>None
        self.head = (self.head + 1) & (self.capacity - 1)
        self.count -= 1
        handle = <Handle>taken
        Py_DECREF(handle)       # the list's reference; ours is the local variable
        return handle

    cdef void show_all(self) noexcept:
        """To the collector: the loop stops, and may become garbage with what waits here."""
        cdef Py_ssize_t i
        for i in range(self.count):
            (<Handle>self.items[(self.head + i) & (self.capacity - 1)]).show()

    cdef int clear(self) except -1:
        self.show_all()
        while self.count:
            self.pop()
        return 0
