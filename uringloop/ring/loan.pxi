# Loan: the memory of a zero-copy send, from its result to its notification.
#
# Owner: the Operation of the send until its result, then the table. A loan holds neither a
# descriptor nor a transport: a connection may end, and the ring be closed, while it is out. What is
# out is bounded by what the kernel accepts into a socket (SO_SNDBUF), and, for an unprivileged
# user, by RLIMIT_MEMLOCK for all of them.

cdef enum:
    ZEROCOPY_COPIED = -0x80000000       # IORING_NOTIF_USAGE_ZC_COPIED, as a signed result


@cython.internal
@cython.final
cdef class Loan(Operation):
    cdef Ring ring
    cdef object memory          # bytes, or a list of them

    cdef int complete(self, int32_t result, uint32_t flags) except -1:
        self.memory = None
        self.ring.loans -= 1
        if result == ZEROCOPY_COPIED:
            self.ring.zerocopy_copied += 1
        return 0

    cdef int discard(self, int32_t result, uint32_t flags) except -1:
        return self.complete(result, flags)

    cdef void leak(self) noexcept:
        """No notification will be seen: the kernel may read the memory for ever."""
        Py_INCREF(self.memory)
        self.memory = None
        self.ring.loans -= 1
