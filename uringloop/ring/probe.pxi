# What this kernel offers, found by trying, never by version: RHEL 9's "5.14" carries code of 6.2,
# and gVisor's io_uring sets up but does not complete.

def probe_io_uring():
    """Try what the engine needs. Returns (0, "") or (errno, the step that failed).

    Steps: "setup" (io_uring_setup with the flags of Ring.open), "opcodes" (REGISTER_PROBE),
    "buffers" (a registered buffer ring, Linux 5.19), "multishot" (a multishot receive on a socket
    pair that delivers, Linux 6.0), "cancel" (a synchronous cancel, Linux 6.0).
    """
    cdef Ring ring = Ring.__new__(Ring, OperationTable(), AnswerQueue())
    cdef int error = ring.open(8)
    cdef int pair[2]
    if error:
        return error, "setup"
    try:
        if not _opcodes_known(&ring.ring):
            return EINVAL, "opcodes"
        error = ring.open_buffers(4, 4, 64)
        if error:
            return error, "buffers"
        if liburing.socketpair(liburing.AF_UNIX, liburing.SOCK_STREAM, 0, pair) < 0:
            return errno, "multishot"
        try:
            return _try_multishot(ring, pair[0], pair[1])
        finally:
            close_fd(pair[0])
            close_fd(pair[1])
    finally:
        ring.close()


def probe_zerocopy():
    """What a zero-copy send may have as its ioprio: IORING_SEND_ZC_REPORT_USAGE from Linux 6.2 on,
    0 before it; -1 where the kernel has no such sends (Linux 6.1)."""
    cdef Ring ring = Ring.__new__(Ring, OperationTable(), AnswerQueue())
    cdef int pair[2]
    if ring.open(8):
        return -1
    try:
        if liburing.socketpair(liburing.AF_UNIX, liburing.SOCK_STREAM, 0, pair) < 0:
            return -1
        try:
            for flags in (liburing.IORING_SEND_ZC_REPORT_USAGE, 0):
                if (_try_zerocopy(ring, pair[0], liburing.IORING_OP_SEND_ZC, flags)
                        and _try_zerocopy(ring, pair[0], liburing.IORING_OP_SENDMSG_ZC, flags)):
                    return flags
        finally:
            close_fd(pair[0])
            close_fd(pair[1])
    finally:
        ring.close()
    return -1


cdef bint _try_zerocopy(Ring ring, int fd, uint8_t opcode, uint16_t flags) except -1:
    """Whether the kernel understands the request: then a Unix socket is the one to refuse it."""
    cdef Operation operation = Operation.__new__(Operation)
    cdef liburing.io_uring_sqe *sqe
    cdef liburing.msghdr nothing
    cdef Answer answer
    cdef bint known = True
    memset(&nothing, 0, sizeof(nothing))
    sqe = ring.start(operation, opcode, fd, &nothing, opcode == liburing.IORING_OP_SENDMSG_ZC)
    sqe.ioprio = flags
    ring.submit_all()
    liburing.io_uring_get_events(&ring.ring)
    ring.drain()
    while ring.answers.pop(&answer):
        if answer.flags & liburing.IORING_CQE_F_NOTIF == 0:
            known = answer.result >= 0 or answer.result == -EOPNOTSUPP
        ring.answered(operation, answer.flags)
    return known and operation.state == IDLE


cdef bint _opcodes_known(liburing.io_uring *ring) noexcept:
    cdef liburing.io_uring_probe *known = liburing.io_uring_get_probe_ring(ring)
    cdef bint complete
    if known is NULL:
        return False
    complete = (liburing.io_uring_opcode_supported(known, liburing.IORING_OP_SENDMSG)
                and liburing.io_uring_opcode_supported(known, liburing.IORING_OP_ACCEPT)
                and liburing.io_uring_opcode_supported(known, liburing.IORING_OP_POLL_ADD)
                and liburing.io_uring_opcode_supported(known, liburing.IORING_OP_ASYNC_CANCEL)
                and liburing.io_uring_opcode_supported(known, liburing.IORING_OP_SEND)
                and liburing.io_uring_opcode_supported(known, liburing.IORING_OP_RECV))
    liburing.io_uring_free_probe(known)
    return complete


cdef object _try_multishot(Ring ring, int reader, int writer):
    """Two messages must arrive by one request, and a cancel must end it."""
    cdef Operation operation = Operation.__new__(Operation)
    cdef liburing.io_uring_sqe *sqe
    cdef Answer answer
    cdef int i, messages = 0
    sqe = ring.start(operation, liburing.IORING_OP_RECV, reader, NULL, 0)
    sqe.flags = liburing.IOSQE_BUFFER_SELECT
    sqe.ioprio = liburing.IORING_RECV_MULTISHOT
    sqe.buf_group = BUFFER_GROUP
    ring.submit_all()
    for i in range(2):
        if liburing.send(writer, b"probe", 5, liburing.MSG_NOSIGNAL) != 5:
            return errno, "multishot"
        liburing.io_uring_get_events(&ring.ring)
        ring.drain()
        while ring.answers.pop(&answer):
            if not answer.flags & liburing.IORING_CQE_F_MORE:
                ring.finished(operation)
                return (-answer.result if answer.result < 0 else EINVAL), "multishot"
            messages += answer.result == 5
    if messages != 2:
        return EINVAL, "multishot"
    ring.cancel_now(operation)
    liburing.io_uring_get_events(&ring.ring)
    ring.drain()
    while ring.answers.pop(&answer):
        if not answer.flags & liburing.IORING_CQE_F_MORE:
            ring.finished(operation)
    if operation.state != IDLE:
        return EINVAL, "cancel"
    return 0, ""
