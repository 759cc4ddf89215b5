# Operation: one request in flight, and the only meaning of user_data.
#
# Owner: whoever made the Operation. While the kernel (or the poller) may still answer, the table
# below holds one more reference, so the memory that a request names outlives the request.
#
# user_data = generation << 32 | slot. The generation changes whenever a slot is vacated, so an
# answer that comes late (a completion for a request that ended, readiness of a descriptor that was
# given up) finds nobody. user_data 0 belongs to nobody: requests whose answer does not matter.
#
# States: idle -> submitted -> (cancelling) -> idle. Every transition is in this file.
#
# A zero-copy send is answered twice: by its result, and, if that has F_MORE, by a notification when
# the kernel needs the memory no longer, which no cancel hastens. With the result the operation is
# idle; its loan takes its place in the table, and keeps the memory until the notification.

cdef enum OperationState:
    IDLE = 0
    SUBMITTED = 1
    CANCELLING = 2


# Flags of an answer that comes from the poller; the kernel never sets all 32 bits.
cdef enum:
    READINESS = 0xFFFFFFFF


cdef inline bint is_retry(int32_t result) noexcept:
    """Whether an answer says: nothing was lost, ask again (the data is still in the socket).

    ECANCELED comes unasked when the thread that submitted the request ends.
    """
    return result == -ECANCELED or result == -EINTR or result == -EAGAIN


@cython.internal
cdef class Operation:
    """One request: subclasses say what its answer means."""
    cdef uint64_t user_data
    cdef OperationState state
    cdef Operation loan         # of a zero-copy send in flight; else None

    cdef int complete(self, int32_t result, uint32_t flags) except -1:
        """Take an answer: a CQE's result and flags, or (events, READINESS) from the poller."""
        raise NotImplementedError

    cdef object owner(self):
        """Whom a log line names for this request."""
        return self

    cdef int discard(self, int32_t result, uint32_t flags) except -1:
        """Take an answer that nobody waits for, while the loop is torn down: free what it owns."""
        return 0


cdef struct Slot:
    uint32_t generation
    uint32_t next_vacant


# The collector must not clear it: it may hold memory that the kernel still reads.
@cython.internal
@cython.final
@cython.no_gc_clear
cdef class OperationTable:
    """All operations that may still be answered, by user_data."""
    cdef list operations
    cdef Slot *slots
    cdef uint32_t capacity
    cdef uint32_t first_vacant
    cdef readonly Py_ssize_t occupied

    def __cinit__(self):
        self.operations = [None]
        self.slots = <Slot *>PyMem_RawMalloc(sizeof(Slot))
        if self.slots is NULL:
            raise MemoryError()
        self.slots[0].generation = 0
        self.slots[0].next_vacant = 0
        self.capacity = 1
        self.first_vacant = 0

    def __dealloc__(self):
        PyMem_RawFree(self.slots)

    cdef int grow(self) except -1:
        cdef uint32_t size = max(64, 2 * self.capacity), slot
        cdef list more = [None] * (size - self.capacity)
        cdef Slot *slots
        # Making the list may have run the collector, and that a finalizer which came here too.
        if self.capacity >= size:
            return 0
        slots = <Slot *>PyMem_RawRealloc(self.slots, size * sizeof(Slot))
        if slots is NULL:
            raise MemoryError()
        self.slots = slots
        self.operations.extend(more)
        for slot in range(self.capacity, size):
            slots[slot].generation = 1
            slots[slot].next_vacant = slot + 1 if slot + 1 < size else 0
        self.first_vacant = self.capacity
        self.capacity = size
        return 0

    cdef int begin(self, Operation operation) except -1:
        """idle -> submitted: the operation gets its user_data and one more reference."""
        cdef uint32_t slot
        if operation.state != IDLE:
            raise SystemError("operation is in flight already")
        while self.first_vacant == 0:
            self.grow()
        slot = self.first_vacant
        self.first_vacant = self.slots[slot].next_vacant
        self.operations[slot] = operation
        self.occupied += 1
        operation.user_data = (<uint64_t>self.slots[slot].generation << 32) | slot
        operation.state = SUBMITTED
        return 0

    cdef void cancelling(self, Operation operation) noexcept:
        """submitted -> cancelling: its last answer is on the way."""
        operation.state = CANCELLING

    cdef int end(self, Operation operation) except -1:
        """-> idle: no further answer can come; the reference is dropped."""
        cdef uint32_t slot = <uint32_t>operation.user_data
        self.slots[slot].generation += 1
        self.slots[slot].next_vacant = self.first_vacant
        self.first_vacant = slot
        self.occupied -= 1
        operation.user_data = 0
        operation.state = IDLE
        if operation.loan is not None:
            operation.loan = None
        self.operations[slot] = None
        return 0

    cdef int pass_on(self, Operation operation) except -1:
        """-> idle, by the result of a zero-copy send: its loan is submitted in its place."""
        cdef Operation loan = operation.loan
        loan.user_data = operation.user_data
        loan.state = SUBMITTED
        operation.user_data = 0
        operation.state = IDLE
        operation.loan = None
        self.operations[<uint32_t>loan.user_data] = loan
        return 0

    cdef Operation find(self, uint64_t user_data):
        """The operation that an answer is for, or None when it has ended."""
        cdef uint32_t slot = <uint32_t>user_data
        if slot == 0 or slot >= self.capacity:
            return None
        if self.slots[slot].generation != <uint32_t>(user_data >> 32):
            return None
        return <Operation>self.operations[slot]


cdef struct Answer:
    uint64_t user_data
    int32_t result
    uint32_t flags


@cython.internal
@cython.final
cdef class AnswerQueue:
    """Answers taken from the kernel and not yet dispatched, first in first out.

    The queue stands between draining and dispatching: a callback that runs while the completion
    queue is read could submit, close or run the loop again under the reader's feet, and one that
    raises KeyboardInterrupt would lose the answers behind it.
    """
    cdef Answer *answers
    cdef Py_ssize_t head, tail, capacity

    def __dealloc__(self):
        PyMem_RawFree(self.answers)

    cdef int reserve(self, Py_ssize_t count) except -1:
        """Make room for that many answers, so that pushing them cannot fail half-way."""
        cdef Answer *answers
        cdef Py_ssize_t capacity = self.capacity
        if self.head == self.tail:
            self.head = self.tail = 0
        if self.tail + count <= capacity:
            return 0
        while self.tail + count > capacity:
            capacity = max(256, 2 * capacity)
        answers = <Answer *>PyMem_RawRealloc(self.answers, capacity * sizeof(Answer))
        if answers is NULL:
            raise MemoryError()
        self.answers = answers
        self.capacity = capacity
        return 0

    cdef inline void push(self, uint64_t user_data, int32_t result, uint32_t flags) noexcept:
        """Append an answer; room for it must be reserved."""
        self.answers[self.tail].user_data = user_data
        self.answers[self.tail].result = result
        self.answers[self.tail].flags = flags
        self.tail += 1

    cdef bint pop(self, Answer *answer) noexcept:
        if self.head == self.tail:
            return False
        answer[0] = self.answers[self.head]
        self.head += 1
        return True

    cdef bint take(self, uint64_t user_data, Answer *answer) noexcept:
        """Pop the first answer for one operation, out of its turn."""
        cdef Py_ssize_t i
        for i in range(self.head, self.tail):
            if self.answers[i].user_data == user_data:
                answer[0] = self.answers[i]
                # What stays is an answer for nobody, and no completion that anybody counts.
                self.answers[i].user_data = 0
                self.answers[i].flags = READINESS
                return True
        return False
