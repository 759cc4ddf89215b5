"""Parts of the C API of Python that Cython's own cpython package does not declare."""

from cpython.object cimport PyObject


cdef extern from "Python.h":
    int _PyBytes_Resize(PyObject **bytes_object, Py_ssize_t size) except -1
    object PyContext_New()
    object PyContext_CopyCurrent()
    int PyContext_Enter(object context) except -1
    int PyContext_Exit(object context) except -1
    object PyObject_CallNoArgs(object function)
    object PyObject_CallOneArg(object function, object argument)
    object PyObject_Call(object function, object args, PyObject *kwargs)
    void *PyMem_RawRealloc(void *memory, size_t size) nogil
    void *PyMem_RawMalloc(size_t size) nogil
    void PyMem_RawFree(void *memory) nogil
    int PyErr_CheckSignals() except -1
    int PyGC_Disable()          # whether it was on; Python 3.10
    int PyGC_Enable()
