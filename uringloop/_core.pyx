# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
# cython: nonecheck=False, cdivision=True, auto_pickle=False, freethreading_compatible=False
"""The engine of uringloop: a contents page, floor by floor. No logic here.

A floor may use what stands above it on this page and nothing below; tests/test_layers.py checks.
"""

cimport cython
from cpython.buffer cimport (PyBUF_FULL_RO, PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_FillInfo,
                             PyBuffer_IsContiguous, PyBuffer_Release, PyObject_GetBuffer)
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.bytearray cimport (PyByteArray_AS_STRING, PyByteArray_GET_SIZE,
                                PyByteArray_Resize)
from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE, PyList_SET_ITEM
from cpython.object cimport PyObject
from cpython.pythread cimport PyThread_get_thread_ident
from cpython.ref cimport Py_DECREF, Py_INCREF, Py_REFCNT, Py_XDECREF
from cpython.tuple cimport PyTuple_GET_ITEM, PyTuple_GET_SIZE
from libc.errno cimport (EAGAIN, EALREADY, EBADF, EBUSY, ECONNABORTED, ECONNRESET, EEXIST, EINTR,
                         EINVAL, EMFILE, ENFILE, ENOBUFS, ENOENT, ENOMEM, ENOSYS, ENOTCONN,
                         ENOTSOCK, EOPNOTSUPP, EOVERFLOW, EPERM, EPIPE, ETIME, errno)
from libc.limits cimport INT_MAX
from libc.math cimport ceil
from libc.stdint cimport (INT64_MAX, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t,
                          uintptr_t)
from libc.stdlib cimport free
from libc.string cimport memcmp, memcpy, memset, strlen
from posix.stdlib cimport posix_memalign
from posix.unistd cimport _SC_PAGESIZE, sysconf
from posix.unistd cimport close as close_fd, read as read_fd, write as write_fd

cimport uringloop.ring.liburing as liburing
cimport uringloop.transports.awaitable as awaitable
from uringloop.ring.liburing cimport ECANCELED, PY_SSIZE_T_MAX, accept4, set_errno
from uringloop.ring.python cimport (
    PyContext_Copy, PyContext_CopyCurrent, PyContext_Enter, PyContext_Exit, PyContext_New,
    PyErr_CheckSignals, PyGC_Disable, PyGC_Enable, PyList_SetSlice, PyLong_AsLongAndOverflow,
    PyMem_RawFree, PyMem_RawMalloc, PyMem_RawRealloc, PyObject_Call, PyObject_CallNoArgs,
    PyObject_CallOneArg, PyObject_GC_IsTracked, PyObject_GC_Track, PyObject_GC_UnTrack,
    PySys_Audit, PyUnicode_DATA, PyUnicode_DecodeFSDefault, PyUnicode_GET_LENGTH,
    PyUnicode_IS_COMPACT_ASCII, _PyBytes_Resize, forget_hash, has_method, list_items,
    raise_what_is_set, try_call, try_call_no_args, try_call_one_arg, try_enter_context,
    try_exit_context)

import asyncio
import collections
import inspect
import os
import socket
import ssl
import sys
import warnings
import weakref
from asyncio import (base_events, constants, format_helpers, futures, selector_events, tasks,
                     transports, trsock)
from asyncio.log import logger as asyncio_logger

# FLOOR 1: the kernel
include "ring/operation.pxi"
include "ring/spare_bytes.pxi"
include "ring/buffer_ring.pxi"
include "ring/ring.pxi"
include "ring/loan.pxi"
include "ring/probe.pxi"

# FLOOR 2: time and callbacks
include "scheduler/handle.pxi"
include "scheduler/ready_queue.pxi"
include "scheduler/timer_heap.pxi"
include "scheduler/poller.pxi"
include "scheduler/callbacks.pxi"
include "scheduler/waiting.pxi"
include "scheduler/stats.pxi"
include "scheduler/loop_core.pxi"

# FLOOR 3: bytes for protocols
include "transports/watched.pxi"
include "transports/addresses.pxi"
include "transports/accepted.pxi"
include "transports/transport.pxi"
include "transports/flow_control.pxi"
include "transports/timeouts.pxi"
include "transports/stream_reader.pxi"
include "transports/receive.pxi"
include "transports/send.pxi"
include "transports/stream.pxi"
include "transports/datagram.pxi"
include "transports/tls_records.pxi"
include "transports/tls_codec.pxi"
include "transports/tls.pxi"
include "transports/tls_transport.pxi"
include "transports/listener.pxi"
include "transports/stash.pxi"
include "transports/sock_call.pxi"
include "transports/read_ahead.pxi"
include "transports/sock_queue.pxi"
include "transports/sock.pxi"
