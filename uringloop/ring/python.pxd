"""Parts of the C API of Python that Cython's own cpython package does not declare."""

from cpython.object cimport PyObject


cdef extern from "Python.h":
    int _PyBytes_Resize(PyObject **bytes_object, Py_ssize_t size) except -1
    object PyContext_New()
    object PyContext_Copy(object context)
    object PyContext_CopyCurrent()
    int PyContext_Enter(object context) except -1
    int PyContext_Exit(object context) except -1
    object PyObject_CallNoArgs(object function)
    object PyObject_CallOneArg(object function, object argument)
    int PyList_SetSlice(list objects, Py_ssize_t low, Py_ssize_t high, PyObject *others) except -1
    object PyObject_Call(object function, object args, PyObject *kwargs)
    # The same, for callers that look at the result: -1 or NULL, and the exception is set.
    int try_enter_context "PyContext_Enter"(object context) noexcept
    int try_exit_context "PyContext_Exit"(object context) noexcept
    PyObject *try_call_no_args "PyObject_CallNoArgs"(object function) noexcept
    PyObject *try_call_one_arg "PyObject_CallOneArg"(object function, object argument) noexcept
    PyObject *try_call "PyObject_Call"(object function, object args, PyObject *kwargs) noexcept
    void *PyMem_RawRealloc(void *memory, size_t size) nogil
    void *PyMem_RawMalloc(size_t size) nogil
    void PyMem_RawFree(void *memory) nogil
    int PyErr_CheckSignals() except -1
    int PySys_Audit(const char *event, const char *format, ...) except -1
    long PyLong_AsLongAndOverflow(object number, int *overflow) except? -1
    bint PyUnicode_IS_COMPACT_ASCII(object text)
    Py_ssize_t PyUnicode_GET_LENGTH(object text)
    const char *PyUnicode_DATA(object text)
    object PyUnicode_DecodeFSDefault(const char *text)
    int PyGC_Disable()          # whether it was on; Python 3.10
    int PyGC_Enable()
    void PyObject_GC_Track(object collected)
    void PyObject_GC_UnTrack(object collected)
    bint PyObject_GC_IsTracked(object collected)        # Python 3.9


cdef extern from *:
    """
    /* For a handler's sake: an exception that C code has set becomes one that was raised here. */
    static inline int uringloop_raise_what_is_set(void)
    {
        return -1;
    }

    /* The items of a list that nobody makes longer or shorter. */
    static inline PyObject **uringloop_list_items(PyObject *list)
    {
        return ((PyListObject *)list)->ob_item;
    }

    /* Whether a call of instance.name() would call that very function with that very instance. */
    static inline int uringloop_has_method(PyObject *instance, PyObject *name, PyObject *function)
    {
        PyObject *found = NULL;
        int same;
    #if PY_VERSION_HEX < 0x030D0000
        same = _PyObject_GetMethod(instance, name, &found);     /* 1: not bound to it yet */
        if (found == NULL) {
            return -1;
        }
        if (same) {
            same = found == function;
            Py_DECREF(found);
            return same;
        }
    #else
        found = PyObject_GetAttr(instance, name);
        if (found == NULL) {
            return -1;
        }
    #endif
        same = (PyMethod_Check(found) && PyMethod_GET_FUNCTION(found) == function
                && PyMethod_GET_SELF(found) == instance);
        Py_DECREF(found);
        return same;
    }

    /* For a bytes object whose content changes before anybody else sees it. */
    #pragma GCC diagnostic push
    #pragma GCC diagnostic ignored "-Wdeprecated-declarations"
    static inline void uringloop_forget_hash(PyObject *bytes)
    {
        ((PyBytesObject *)bytes)->ob_shash = -1;
    }
    #pragma GCC diagnostic pop
    """
    int raise_what_is_set "uringloop_raise_what_is_set"() except -1
    void forget_hash "uringloop_forget_hash"(message) noexcept
    bint has_method "uringloop_has_method"(object instance, str name, object function) except -1
    PyObject **list_items "uringloop_list_items"(list objects) noexcept
