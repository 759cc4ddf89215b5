# TimerHeap: timers by deadline, equal deadlines in the order of their creation.
#
# A binary heap whose keys lie together in C memory; each handle knows its index, so a cancelled
# timer leaves at once and holds no memory (most timers are timeouts, and most are cancelled). The
# handles lie in a Python list, so that the collector sees them; it has room for all keys, and is
# never made shorter, so that taking a timer out cannot fail.

cdef struct TimerKey:
    int64_t deadline_ns
    uint64_t sequence


@cython.internal
@cython.final
cdef class TimerHeap:
    cdef TimerKey *keys
    cdef list handles
    cdef Py_ssize_t count, capacity
    cdef uint64_t next_sequence

    def __cinit__(self):
        self.handles = []

    def __dealloc__(self):
        PyMem_RawFree(self.keys)

    cdef inline int64_t first_ns(self) noexcept:
        """The nearest deadline; the heap must not be empty."""
        return self.keys[0].deadline_ns

    cdef int grow(self) except -1:
        cdef Py_ssize_t capacity = max(64, 2 * self.capacity)
        cdef list more = [None] * (capacity - PyList_GET_SIZE(self.handles))
        cdef TimerKey *keys
        # Making the list may have run the collector, and that a finalizer which came here too.
        if self.capacity >= capacity:
            return 0
        keys = <TimerKey *>PyMem_RawRealloc(self.keys, capacity * sizeof(TimerKey))
        if keys is NULL:
            raise MemoryError()
        self.keys = keys
        self.handles.extend(more)
        self.capacity = capacity
        return 0

    cdef int push(self, TimerHandle handle) except -1:
        cdef TimerKey key
        while self.count == self.capacity:
            self.grow()
        Py_DECREF(<object>PyList_GET_ITEM(self.handles, self.count))        # None
        Py_INCREF(handle)
        PyList_SET_ITEM(self.handles, self.count, handle)
        key.deadline_ns = handle.deadline_ns
        key.sequence = self.next_sequence
        self.next_sequence += 1
        handle.heap = self
        self.count += 1
        self.rise(self.count - 1, key, <PyObject *>handle)
        return 0

    cdef int remove(self, TimerHandle handle) except -1:
        """Take a handle out, wherever it is."""
        cdef Py_ssize_t index = handle.heap_index
        cdef TimerKey key
        cdef PyObject *last
        self.count -= 1
        handle.heap_index = -1
        if index != self.count:
            key = self.keys[self.count]
            last = <PyObject *>PyList_GET_ITEM(self.handles, self.count)
            # The two places swap their references; the one at the end is then dropped.
            PyList_SET_ITEM(self.handles, self.count, handle)
            if index and before(key, self.keys[(index - 1) // 2]):
                self.rise(index, key, last)
            else:
                self.sink(index, key, last)
        self.handles[self.count] = None
        return 0

    cdef TimerHandle first(self):
        """The timer with the nearest deadline; the heap must not be empty."""
        return <TimerHandle>PyList_GET_ITEM(self.handles, 0)

    cdef inline void put(self, Py_ssize_t index, TimerKey key, PyObject *handle) noexcept:
        self.keys[index] = key
        PyList_SET_ITEM(self.handles, index, <object>handle)
        (<TimerHandle>handle).heap_index = index

    cdef void rise(self, Py_ssize_t index, TimerKey key, PyObject *handle) noexcept:
        cdef Py_ssize_t parent
        while index:
            parent = (index - 1) // 2
            if not before(key, self.keys[parent]):
                break
            self.put(index, self.keys[parent],
                     <PyObject *>PyList_GET_ITEM(self.handles, parent))
            index = parent
        self.put(index, key, handle)

    cdef void sink(self, Py_ssize_t index, TimerKey key, PyObject *handle) noexcept:
        cdef Py_ssize_t child = 2 * index + 1
        while child < self.count:
            if child + 1 < self.count and before(self.keys[child + 1], self.keys[child]):
                child += 1
            if not before(self.keys[child], key):
                break
            self.put(index, self.keys[child], <PyObject *>PyList_GET_ITEM(self.handles, child))
            index = child
            child = 2 * index + 1
        self.put(index, key, handle)

    cdef int clear(self) except -1:
        cdef TimerHandle handle
        while self.count:
            handle = self.first()
            self.remove(handle)
        return 0


cdef inline bint before(TimerKey a, TimerKey b) noexcept:
    return a.deadline_ns < b.deadline_ns or (
        a.deadline_ns == b.deadline_ns and a.sequence < b.sequence)
