# Watched: an operation on a descriptor that its user may close at any time.
#
# A request in flight holds its file, so a socket that is closed under it would stay open for its
# peer. SockLoop looks at the watched operations in turn, some in each tick and more before the loop
# blocks. Transports own their descriptors and need no looking at.

cdef class SockLoop(LoopCore)


@cython.internal
cdef class Watched(Operation):
    cdef Py_ssize_t place       # in loop.watched; -1: not watched
    cdef bint is_unarmed        # it wants a request before the next submit
    cdef Watched next_unarmed

    cdef int look(self) except -1:
        """End the request if the socket was closed. Calls no protocol and no task."""
        raise NotImplementedError

    cdef int arm(self) except -1:
        """Make the request. Called right before the submit."""
        raise NotImplementedError
