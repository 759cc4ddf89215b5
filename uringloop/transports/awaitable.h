/* The slots of SocketCall that end an await.
 *
 * A value is returned by a StopIteration. Raised in Cython it would get a traceback entry with a
 * frame for each call, which costs more than all the rest of the call; here it gets none.
 */
#ifndef URINGLOOP_AWAITABLE_H
#define URINGLOOP_AWAITABLE_H

#include <Python.h>

/* Goes on with a call. 0: it waits, and is itself what is yielded; 1: *value is its result, a new
 * reference; -1: an exception is set. */
typedef int (*uringloop_advance)(PyObject *call, PyObject **value);

static uringloop_advance uringloop_advance_call;

static PySendResult uringloop_send(PyObject *call, PyObject *argument, PyObject **value)
{
	int state = uringloop_advance_call(call, value);

	(void)argument;		/* a call has no use for what is sent to it */
	if (state == 0) {
		*value = Py_NewRef(call);
		return PYGEN_NEXT;
	}
	if (state < 0)
		*value = NULL;
	return state < 0 ? PYGEN_ERROR : PYGEN_RETURN;
}

static PyObject *uringloop_next(PyObject *call)
{
	PyObject *value, *stop;

	switch (uringloop_send(call, Py_None, &value)) {
	case PYGEN_NEXT:
		return value;
	case PYGEN_ERROR:
		return NULL;
	default:
		break;
	}
	if (value != Py_None) {		/* a bare NULL ends an iteration with None */
		stop = PyObject_CallOneArg(PyExc_StopIteration, value);
		if (stop) {
			PyErr_SetObject(PyExc_StopIteration, stop);
			Py_DECREF(stop);
		}
	}
	Py_DECREF(value);
	return NULL;
}

static inline void uringloop_make_awaitable(PyObject *class, uringloop_advance advance)
{
	PyTypeObject *type = (PyTypeObject *)class;

	uringloop_advance_call = advance;
	type->tp_iternext = uringloop_next;
	type->tp_as_async->am_send = uringloop_send;
	PyType_Modified(type);
}

/* The head of _socket.socket's instances, the same in all Pythons since 2.3: what fileno(), family
 * and type return, without three calls and two enum members. Compared with those at import.
 */
struct uringloop_socket {
	PyObject_HEAD
	int fd;
	int family;
	int type;
};

static inline int uringloop_socket_fd(PyObject *sock)
{
	return ((struct uringloop_socket *)sock)->fd;
}

static inline int uringloop_socket_type(PyObject *sock)
{
	return ((struct uringloop_socket *)sock)->type;
}

#endif /* URINGLOOP_AWAITABLE_H */
