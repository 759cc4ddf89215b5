# Single rooms for tests with a model (tests/models/test_rooms.py).
#
# A driver shows one class of the product to Python: it holds it, calls it, and adds nothing.

cdef class RoomOperation(Operation):
    @property
    def user_data(self):
        return self.user_data

    @property
    def is_idle(self):
        return self.state == IDLE

    @property
    def is_cancelling(self):
        return self.state == CANCELLING


cdef class OperationRoom:
    """OperationTable and AnswerQueue."""
    cdef OperationTable table
    cdef AnswerQueue answers

    def __cinit__(self):
        self.table = OperationTable()
        self.answers = AnswerQueue()

    @property
    def occupied(self):
        return self.table.occupied

    def begin(self, RoomOperation operation):
        self.table.begin(operation)

    def cancelling(self, RoomOperation operation):
        self.table.cancelling(operation)

    def end(self, RoomOperation operation):
        self.table.end(operation)

    def find(self, uint64_t user_data):
        return self.table.find(user_data)

    def push(self, list answers):
        self.answers.reserve(len(answers))
        for user_data, result, flags in answers:
            self.answers.push(user_data, result, flags)

    def pop(self):
        cdef Answer answer
        if not self.answers.pop(&answer):
            return None
        return answer.user_data, answer.result, answer.flags

    def take(self, uint64_t user_data):
        cdef Answer answer
        if not self.answers.take(user_data, &answer):
            return None
        return answer.user_data, answer.result, answer.flags


cdef class BufferRoom:
    """BufferRing in a real Ring, with multishot receives on real sockets."""
    cdef Ring ring
    cdef OperationTable table
    cdef AnswerQueue answers

    def __init__(self, unsigned capacity, unsigned count, Py_ssize_t block_size):
        cdef int error
        self.table = OperationTable()
        self.answers = AnswerQueue()
        self.ring = Ring(self.table, self.answers)
        error = self.ring.open(8) or self.ring.open_buffers(capacity, count, block_size)
        if error:
            raise os_error(error)

    @property
    def facts(self):
        """(blocks, blocks lent, blocks handed over, requests in flight)"""
        return (self.ring.buffers.count, self.ring.buffers.lent, self.ring.buffers.handed_over,
                self.ring.in_flight)

    def receive(self, RoomOperation operation, int fd):
        cdef liburing.io_uring_sqe *sqe
        sqe = self.ring.start(operation, liburing.IORING_OP_RECV, fd, NULL, 0)
        sqe.flags = liburing.IOSQE_BUFFER_SELECT
        sqe.ioprio = liburing.IORING_RECV_MULTISHOT
        sqe.buf_group = BUFFER_GROUP

    def cancel(self, RoomOperation operation):
        self.ring.cancel(operation)

    def submit(self):
        """Show what came back to the kernel, submit, and take all answers: a list of (operation,
        result, block or None, whether more will come)."""
        cdef Answer answer
        cdef bint more
        taken = []
        self.ring.buffers.publish()
        self.ring.submit()
        liburing.io_uring_get_events(&self.ring.ring)
        self.ring.drain()
        while self.answers.pop(&answer):
            operation = self.table.find(answer.user_data)
            more = bool(answer.flags & liburing.IORING_CQE_F_MORE)
            block = answer.flags >> liburing.IORING_CQE_BUFFER_SHIFT if answer.result > 0 else None
            if not more:
                self.ring.finished(operation)
            taken.append((operation, answer.result, block, more))
        return taken

    def lend(self, unsigned block, Py_ssize_t size):
        """The content of a block at this moment."""
        return PyBytes_FromStringAndSize(self.ring.buffers.lend(block), size)

    def give_back(self, unsigned block):
        self.ring.buffers.give_back(block)

    def copy(self, unsigned block, Py_ssize_t size):
        return self.ring.buffers.copy(block, size)

    def hand_over(self, unsigned block, Py_ssize_t size):
        return self.ring.buffers.hand_over(block, size)

    def grow(self, unsigned more):
        return self.ring.buffers.grow(more)

    def close(self):
        self.ring.close()


cdef class TimerRoom:
    """TimerHeap."""
    cdef TimerHeap heap

    def __cinit__(self):
        self.heap = TimerHeap()

    def __len__(self):
        return self.heap.count

    def push(self, int64_t deadline_ns):
        handle = <TimerHandle>TimerHandle.__new__(TimerHandle)
        handle.deadline_ns = deadline_ns
        self.heap.push(handle)
        return handle

    def remove(self, TimerHandle handle):
        self.heap.remove(handle)

    def first_ns(self):
        return self.heap.first_ns()

    def pop(self):
        handle = self.heap.first()
        self.heap.remove(handle)
        return handle

    def clear(self):
        self.heap.clear()


cdef class ReadyRoom:
    """ReadyQueue."""
    cdef ReadyQueue queue

    def __cinit__(self):
        self.queue = ReadyQueue()

    def __len__(self):
        return self.queue.count

    def push(self):
        handle = <Handle>Handle.__new__(Handle)
        self.queue.push(handle)
        return handle

    def pop(self):
        return self.queue.pop()

    def clear(self):
        self.queue.clear()


cdef class FlowRoom(FlowControlTransport):
    """FlowControlTransport over a number of bytes."""
    cdef Py_ssize_t size

    cdef Py_ssize_t output_size(self) noexcept:
        return self.size

    cdef int send_early(self) except -1:
        return 0

    def get_write_buffer_size(self):
        return self.size

    def append(self, Py_ssize_t size):
        self.size += size
        self.maybe_pause_writing()

    def consume(self, Py_ssize_t size):
        self.size -= size
        self.maybe_resume_writing()


def make_flow_room(protocol):
    room = <FlowRoom>FlowRoom.__new__(FlowRoom, _BY_THE_LOOP)
    room.protocol = protocol
    room.set_write_buffer_limits()
    return room
