"""Extern declarations of awaitable.h. No logic."""

from cpython.object cimport PyObject


cdef extern from "transports/awaitable.h":
    ctypedef int (*advance_function)(PyObject *call, PyObject **value) except -1

    void make_awaitable "uringloop_make_awaitable"(PyObject *type, advance_function advance)
    int socket_fd "uringloop_socket_fd"(object sock)
    int socket_type "uringloop_socket_type"(object sock)
