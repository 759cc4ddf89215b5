# BufferRing: the blocks that the kernel receives into.
#
# A block is the payload of a bytes object. The kernel borrows blocks from the ring; a completion
# lends one to us until it is given back (small message: its content was copied) or handed over
# (large message: the bytes object itself becomes the message and a fresh block takes its place).
# A handed-over block never returns to the ring, so nobody who keeps a message can starve others.
#
# All blocks have one size: Linux 6.1 shrinks a multishot receive to the smallest block it has seen.

cdef enum:
    BUFFER_GROUP = 0


cdef bytes shrink(PyObject *block, Py_ssize_t size):
    """The first bytes of a block that nobody else has; takes the reference over."""
    if PyBytes_GET_SIZE(<object>block) != size:
        _PyBytes_Resize(&block, size)       # on failure it frees the object itself
    taken = <bytes>block
    Py_DECREF(taken)
    return taken


# The collector must not clear it: only close() knows whether the kernel still writes here.
@cython.internal
@cython.final
@cython.no_gc_clear
cdef class BufferRing:
    cdef liburing.io_uring_buf_ring *entries
    cdef liburing.io_uring *ring
    cdef list blocks
    cdef unsigned capacity
    cdef unsigned count
    cdef int unpublished
    cdef readonly Py_ssize_t lent
    cdef Py_ssize_t block_size
    cdef uint64_t handed_over

    def __dealloc__(self):
        free(self.entries)

    cdef int open(self, liburing.io_uring *ring, unsigned capacity, unsigned count,
                  Py_ssize_t block_size) except -1:
        """Register the group and fill it. Returns 0 or the kernel's positive errno."""
        cdef liburing.io_uring_buf_reg registration
        cdef void *memory
        cdef int error
        error = posix_memalign(&memory, <size_t>sysconf(_SC_PAGESIZE),
                               capacity * sizeof(liburing.io_uring_buf))
        if error:
            raise MemoryError()
        self.entries = <liburing.io_uring_buf_ring *>memory
        memset(memory, 0, capacity * sizeof(liburing.io_uring_buf))
        memset(&registration, 0, sizeof(registration))
        registration.ring_addr = <uint64_t><uintptr_t>memory
        registration.ring_entries = capacity
        registration.bgid = BUFFER_GROUP
        error = liburing.io_uring_register_buf_ring(ring, &registration, 0)
        if error < 0:
            return -error
        liburing.io_uring_buf_ring_init(self.entries)
        self.ring = ring
        self.capacity = capacity
        self.block_size = block_size
        self.blocks = []
        self.grow(min(count, capacity))
        return 0

    cdef unsigned grow(self, unsigned more) except? 0:
        """Add up to `more` blocks; the kernel sees them at the next publish(). Returns how many."""
        cdef unsigned i
        more = min(more, self.capacity - self.count)
        for i in range(more):
            self.blocks.append(PyBytes_FromStringAndSize(NULL, self.block_size))
            self.count += 1
            self.offer(self.count - 1)
        return more

    cdef void offer(self, unsigned block) noexcept:
        cdef char *address = PyBytes_AS_STRING(<object>PyList_GET_ITEM(self.blocks, block))
        liburing.io_uring_buf_ring_add(
            self.entries, address, <unsigned>self.block_size, <unsigned short>block,
            liburing.io_uring_buf_ring_mask(self.capacity), self.unpublished)
        self.unpublished += 1

    cdef void publish(self) noexcept:
        """Show the blocks that came back to the kernel: one store for all of them."""
        if self.unpublished:
            liburing.io_uring_buf_ring_advance(self.entries, self.unpublished)
            self.unpublished = 0

    cdef const char *lend(self, unsigned block) noexcept:
        """The content of a block that a completion named; to be given back or handed over."""
        self.lent += 1
        return PyBytes_AS_STRING(<object>PyList_GET_ITEM(self.blocks, block))

    cdef void give_back(self, unsigned block) noexcept:
        self.lent -= 1
        self.offer(block)

    cdef bytes copy(self, unsigned block, Py_ssize_t size):
        """The content of a lent block in a bytes object of its own; gives the block back."""
        try:
            return PyBytes_FromStringAndSize(
                PyBytes_AS_STRING(<object>PyList_GET_ITEM(self.blocks, block)), size)
        finally:
            self.give_back(block)

    cdef bytes hand_over(self, unsigned block, Py_ssize_t size):
        """Turn a lent block into the message itself, without a copy."""
        cdef object fresh
        cdef PyObject *message
        if Py_REFCNT(<object>PyList_GET_ITEM(self.blocks, block)) != 1:
            return self.copy(block, size)       # a memory profiler looks at it
        try:
            fresh = PyBytes_FromStringAndSize(NULL, self.block_size)
        except MemoryError:
            self.give_back(block)
            raise
        message = <PyObject *>PyList_GET_ITEM(self.blocks, block)
        # The list's reference moves to us: _PyBytes_Resize wants the only one there is.
        Py_INCREF(fresh)
        PyList_SET_ITEM(self.blocks, block, fresh)
        self.give_back(block)
        self.handed_over += 1
        return shrink(message, size)

    cdef void close(self, bint leak) noexcept:
        """Take the group back; `leak` when the kernel may still write into the blocks."""
        if self.ring is NULL:
            return
        liburing.io_uring_unregister_buf_ring(self.ring, BUFFER_GROUP)
        self.ring = NULL
        if leak:
            Py_INCREF(self.blocks)
            self.entries = NULL
