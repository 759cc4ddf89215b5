# Poller: epoll over the descriptors of add_reader/add_writer, the ring fd and the wake-up eventfd.
#
# Facts about epoll (epoll(7)) and what we do about them:
#   - A registration belongs to the open file, not to the number. After close() it is gone unless a
#     dup keeps the file open, and the number may name another file: MOD answers ENOENT, ADD answers
#     EEXIST. Both are retried the other way round, and ENOENT drops the callbacks of the old owner.
#   - EPOLLHUP and EPOLLERR are reported unasked; both sides are woken, as asyncio's selector does.
#   - Regular files answer EPERM, which becomes PermissionError.
#   - An interrupted wait may have let completions be posted (docs/kernel.md): the
#     caller looks at the ring after every wait.
#
# Two kinds of watchers, at most one per descriptor and direction: a Handle (a Python callback that
# becomes ready) or an Operation (engine code, told through the answer queue).

cdef enum:
    EVENTS_PER_WAIT = 256
    # Values of epoll_data that no descriptor has.
    RING_EVENT = -1
    WAKE_EVENT = -2


cdef struct Watch:
    uint32_t mask           # as registered with epoll; 0: not registered
    uint64_t read_operation
    uint64_t write_operation
    PyObject *owner         # borrowed: the transport that owns the descriptor


@cython.internal
@cython.final
cdef class Poller:
    cdef OperationTable operations
    cdef AnswerQueue answers
    cdef ReadyQueue ready
    cdef int epoll_fd, wake_fd
    cdef int ring_fd
    cdef bint has_pwait2
    # True from before the GIL is released for a wait until after it was taken again: a thread that
    # holds the GIL and sees it must wake the loop, and only the first of them has to.
    cdef bint waiting, woken
    cdef Watch *watches
    cdef list readers, writers
    cdef dict file_objects      # by descriptor, for those that were watched by object
    cdef Py_ssize_t watched     # descriptors registered with epoll, the engine's own not counted
    cdef Py_ssize_t capacity
    cdef liburing.epoll_event events[EVENTS_PER_WAIT]

    def __cinit__(self, OperationTable operations, AnswerQueue answers, ReadyQueue ready):
        self.operations = operations
        self.answers = answers
        self.ready = ready
        self.epoll_fd = self.wake_fd = self.ring_fd = -1
        self.has_pwait2 = True
        self.readers = []
        self.writers = []
        self.file_objects = {}

    def __dealloc__(self):
        if self.epoll_fd >= 0:
            close_fd(self.epoll_fd)
        if self.wake_fd >= 0:
            close_fd(self.wake_fd)
        PyMem_RawFree(self.watches)

    cdef int open(self) except -1:
        if self.epoll_fd >= 0:
            return 0
        self.epoll_fd = liburing.epoll_create1(liburing.EPOLL_CLOEXEC)
        if self.epoll_fd < 0:
            raise os_error(errno, "epoll_create1")
        self.wake_fd = liburing.eventfd(0, liburing.EFD_CLOEXEC | liburing.EFD_NONBLOCK)
        if self.wake_fd < 0:
            error = errno
            close_fd(self.epoll_fd)
            self.epoll_fd = -1
            raise os_error(error, "eventfd")
        error = self.control(liburing.EPOLL_CTL_ADD, self.wake_fd, liburing.EPOLLIN, WAKE_EVENT)
        if error:
            self.abandon()
            raise os_error(error, "epoll_ctl")
        return 0

    cdef int reopen(self) except -1:
        """In a forked child that goes on with an idle loop: stop sharing epoll with the parent."""
        cdef int fd
        if self.epoll_fd < 0:
            return 0
        self.abandon()
        self.waiting = self.woken = False
        self.open()
        for fd in range(<int>self.capacity):
            if self.watches[fd].mask:
                self.control(liburing.EPOLL_CTL_ADD, fd, self.watches[fd].mask, fd)
        return 0

    cdef int control(self, int operation, int fd, uint32_t mask, int64_t data) noexcept:
        """epoll_ctl(2). Returns 0 or a positive errno."""
        cdef liburing.epoll_event event
        event.events = mask
        event.data.u64 = <uint64_t>data
        if liburing.epoll_ctl(self.epoll_fd, operation, fd, &event) < 0:
            return errno
        return 0

    cdef int watch_ring(self, int ring_fd) except -1:
        cdef int error = self.control(liburing.EPOLL_CTL_ADD, ring_fd, liburing.EPOLLIN, RING_EVENT)
        if error:
            raise os_error(error, "epoll_ctl")
        self.ring_fd = ring_fd
        return 0

    cdef int unwatch_ring(self) noexcept:
        """To be called before the ring is closed: the registration outlives close() if a forked
        child holds the descriptor."""
        if self.ring_fd >= 0:
            self.control(liburing.EPOLL_CTL_DEL, self.ring_fd, 0, 0)
            self.ring_fd = -1
        return 0

    cdef int make_room(self, int fd) except -1:
        cdef Py_ssize_t capacity = max(64, 2 * self.capacity)
        cdef Watch *watches
        cdef list more
        while capacity <= fd:
            capacity *= 2
        more = [None] * (capacity - self.capacity)
        # Making the list may have run the collector, and that a finalizer which came here too.
        if self.capacity + len(more) != capacity:
            return self.make_room(fd) if fd >= self.capacity else 0
        watches = <Watch *>PyMem_RawRealloc(self.watches, capacity * sizeof(Watch))
        if watches is NULL:
            raise MemoryError()
        memset(&watches[self.capacity], 0, (capacity - self.capacity) * sizeof(Watch))
        self.watches = watches
        self.readers.extend(more)
        self.writers.extend(more)
        self.capacity = capacity
        return 0

    cdef int add(self, int fd, uint32_t side) except -1:
        """Register one side (EPOLLIN or EPOLLOUT); OSError when epoll refuses.

        Always a system call, also when the side is registered already: the number may have been
        closed and name another file now, which only the kernel can tell.
        """
        cdef uint32_t mask
        cdef int error
        self.open()
        mask = side
        if fd < self.capacity:
            mask |= self.watches[fd].mask
        if mask != side or (fd < self.capacity and self.watches[fd].mask):
            error = self.control(liburing.EPOLL_CTL_MOD, fd, mask, fd)
            if error == ENOENT:
                self.drop_reader(fd)
                self.drop_writer(fd)
                # Removing the closed object would remove what watches the new file.
                self.file_objects.pop(fd, None)
                mask = side
                self.watches[fd].mask = 0
                self.watched -= 1
                error = self.control(liburing.EPOLL_CTL_ADD, fd, mask, fd)
        else:
            error = self.control(liburing.EPOLL_CTL_ADD, fd, mask, fd)
            if error == EEXIST:
                error = self.control(liburing.EPOLL_CTL_MOD, fd, mask, fd)
        if error:
            raise os_error(error)
        if fd >= self.capacity:
            # Only now: epoll has said that the number names something.
            try:
                self.make_room(fd)
            except MemoryError:
                self.control(liburing.EPOLL_CTL_DEL, fd, 0, 0)
                raise
        if self.watches[fd].mask == 0:
            self.watched += 1
        self.watches[fd].mask = mask
        return 0

    cdef int remove(self, int fd, uint32_t side) noexcept:
        cdef uint32_t mask = self.watches[fd].mask & ~side
        if mask == self.watches[fd].mask:
            return 0
        # ENOENT and EBADF: the file was closed, and the registration went with it.
        self.control(liburing.EPOLL_CTL_MOD if mask else liburing.EPOLL_CTL_DEL, fd, mask, fd)
        self.watches[fd].mask = mask
        if mask == 0:
            self.watched -= 1
        return 0

    cdef bint drop_reader(self, int fd) except -1:
        """Forget who watches for input. Returns whether somebody did."""
        return self.replace_reader(fd, None)

    cdef bint replace_reader(self, int fd, Handle successor) except -1:
        """The successor first: letting go of the one before may run code of the user."""
        cdef Watch *watch = &self.watches[fd]
        cdef Handle handle = self.readers[fd]
        cdef Operation operation
        self.readers[fd] = successor
        if watch.read_operation:
            operation = self.operations.find(watch.read_operation)
            watch.read_operation = 0
            if operation is not None:
                self.operations.end(operation)
            return True
        if handle is not None:
            handle.withdraw()
            return True
        return False

    cdef bint drop_writer(self, int fd) except -1:
        """Forget who watches for output. Returns whether somebody did."""
        return self.replace_writer(fd, None)

    cdef bint replace_writer(self, int fd, Handle successor) except -1:
        """The successor first: letting go of the one before may run code of the user."""
        cdef Watch *watch = &self.watches[fd]
        cdef Handle handle = self.writers[fd]
        cdef Operation operation
        self.writers[fd] = successor
        if watch.write_operation:
            operation = self.operations.find(watch.write_operation)
            watch.write_operation = 0
            if operation is not None:
                self.operations.end(operation)
            return True
        if handle is not None:
            handle.withdraw()
            return True
        return False

    cdef int set_reader(self, int fd, Handle handle) except -1:
        self.add(fd, liburing.EPOLLIN)
        self.replace_reader(fd, handle)
        return 0

    cdef int set_writer(self, int fd, Handle handle) except -1:
        self.add(fd, liburing.EPOLLOUT)
        self.replace_writer(fd, handle)
        return 0

    cdef int begin(self, Operation operation, int fd, uint32_t side) except -1:
        # In this order: readiness that nobody is told of would wake the loop for ever.
        self.operations.begin(operation)
        try:
            self.add(fd, side)
        except BaseException:
            self.operations.end(operation)
            raise
        return 0

    cdef int watch_input(self, int fd, Operation operation) except -1:
        """Tell the operation (events, READINESS) whenever the descriptor is readable."""
        self.begin(operation, fd, liburing.EPOLLIN)
        self.drop_reader(fd)
        self.watches[fd].read_operation = operation.user_data
        return 0

    cdef int watch_output(self, int fd, Operation operation) except -1:
        """Tell the operation (events, READINESS) whenever the descriptor is writable."""
        self.begin(operation, fd, liburing.EPOLLOUT)
        self.drop_writer(fd)
        self.watches[fd].write_operation = operation.user_data
        return 0

    cdef int unwatch_input(self, int fd, Operation operation) except -1:
        """Tell the operation nothing more; it is idle then."""
        if operation.state == IDLE:
            return 0
        if fd < self.capacity and self.watches[fd].read_operation == operation.user_data:
            self.clear_reader(fd)
        else:
            self.operations.end(operation)      # the number names another file meanwhile
        return 0

    cdef int unwatch_output(self, int fd, Operation operation) except -1:
        """Tell the operation nothing more; it is idle then."""
        if operation.state == IDLE:
            return 0
        if fd < self.capacity and self.watches[fd].write_operation == operation.user_data:
            self.clear_writer(fd)
        else:
            self.operations.end(operation)      # the number names another file meanwhile
        return 0

    cdef bint clear_reader(self, int fd) except -1:
        if fd < 0 or fd >= self.capacity:
            return False
        self.remove(fd, liburing.EPOLLIN)
        return self.drop_reader(fd)

    cdef bint clear_writer(self, int fd) except -1:
        if fd < 0 or fd >= self.capacity:
            return False
        self.remove(fd, liburing.EPOLLOUT)
        return self.drop_writer(fd)

    cdef int remember_file(self, int number, fd) except -1:
        """Know a watched file object again: it may be closed by the time it is removed."""
        if not isinstance(fd, int):
            self.file_objects[number] = fd
        return 0

    cdef int forget_file(self, int number) except -1:
        if self.file_objects and 0 <= number < self.capacity:
            if not self.watches[number].mask:
                self.file_objects.pop(number, None)
        return 0

    cdef int find_descriptor(self, fd) except -2:
        """The number to remove: that of a closed file object is remembered, as in selectors."""
        cdef object number = descriptor_number(fd)
        if number >= 0:
            return number if number <= INT_MAX else -1
        for known, file_object in self.file_objects.items():
            if file_object is fd:
                return known
        return -1           # asyncio raises here: Server.close() fails if its socket was closed

    cdef int own(self, int fd, object owner) except -1:
        """The descriptor belongs to a transport, which disowns it before it is freed."""
        if fd >= self.capacity:
            self.make_room(fd)
        self.watches[fd].owner = <PyObject *>owner
        return 0

    cdef int disown(self, int fd, object owner) noexcept:
        if 0 <= fd < self.capacity and self.watches[fd].owner is <PyObject *>owner:
            self.watches[fd].owner = NULL
        return 0

    cdef object owner(self, int fd):
        if 0 <= fd < self.capacity and self.watches[fd].owner is not NULL:
            return <object>self.watches[fd].owner
        return None

    cdef int wake(self) noexcept:
        """Make a waiting loop return. Any thread that holds the GIL, and signal handlers."""
        cdef uint64_t one = 1
        if self.waiting and not self.woken:
            self.woken = True
            # Cannot fail: the counter is far from its limit, and the descriptor is open.
            write_fd(self.wake_fd, &one, sizeof(one))
        return 0

    cdef int wait(self, int64_t timeout_ns) except -1:
        """One epoll_wait; queues what happened. Returns 1 when it was interrupted, else 0.

        timeout_ns 0 keeps the GIL (the call does not sleep); negative waits for ever.
        """
        cdef int count, i
        self.open()
        if timeout_ns == 0:
            count = liburing.epoll_wait(self.epoll_fd, self.events, EVENTS_PER_WAIT, 0)
            if count < 0:
                count = -errno
        else:
            self.waiting = True
            with nogil:
                count = self.block(timeout_ns)
            self.waiting = False
        if count < 0:
            if count != -EINTR:
                raise os_error(-count, "epoll_wait")
            return 1
        self.answers.reserve(2 * count)
        for i in range(count):
            self.take(<int64_t>self.events[i].data.u64, self.events[i].events)
        return 0

    cdef int block(self, int64_t timeout_ns) noexcept nogil:
        cdef int count
        if self.has_pwait2 or timeout_ns < 0:
            count = liburing.epoll_pwait2(self.epoll_fd, self.events, EVENTS_PER_WAIT, timeout_ns)
            if count != -ENOSYS and count != -EPERM:
                return count
            self.has_pwait2 = False     # before Linux 5.11, or an old seccomp profile
        if timeout_ns < 0:
            count = liburing.epoll_wait(self.epoll_fd, self.events, EVENTS_PER_WAIT, -1)
        else:
            # Rounded up: a timer must not find that the loop woke too early and spin.
            count = liburing.epoll_wait(
                self.epoll_fd, self.events, EVENTS_PER_WAIT,
                <int>min((timeout_ns + 999999) // 1000000, 86400000))
        return -errno if count < 0 else count

    cdef int take(self, int64_t data, uint32_t events) except -1:
        cdef uint64_t count
        cdef Watch *watch
        cdef Handle handle
        if data == RING_EVENT:
            return 0            # the caller looks at the ring after every wait
        if data == WAKE_EVENT:
            self.woken = False
            read_fd(self.wake_fd, &count, sizeof(count))
            return 0
        watch = &self.watches[data]
        if events & ~<uint32_t>liburing.EPOLLOUT:
            if watch.read_operation:
                self.answers.push(watch.read_operation, <int32_t>events, READINESS)
            else:
                handle = self.readers[data]
                if handle is not None:
                    self.ready.push(handle)
                    watch = &self.watches[data]     # the push may have run the collector
        if events & ~<uint32_t>liburing.EPOLLIN:
            if watch.write_operation:
                self.answers.push(watch.write_operation, <int32_t>events, READINESS)
            else:
                handle = self.writers[data]
                if handle is not None:
                    self.ready.push(handle)
        return 0

    cdef int abandon(self) noexcept:
        """In a forked child: close the descriptors; the parent's epoll instance stays as it is."""
        if self.epoll_fd >= 0:
            close_fd(self.epoll_fd)
            close_fd(self.wake_fd)
            self.epoll_fd = self.wake_fd = self.ring_fd = -1
        return 0

    cdef int close(self) except -1:
        """Forget all watchers and close the descriptors."""
        cdef int fd
        for fd in range(<int>self.capacity):
            self.drop_reader(fd)
            self.drop_writer(fd)
            self.watches[fd].mask = 0
        self.file_objects.clear()
        self.watched = 0
        self.abandon()
        return 0


cdef object descriptor_number(fd):
    """The number of a descriptor or file object, an int of any size; -1 for one that is closed."""
    number = fd
    if not isinstance(number, int):
        try:
            number = int(fd.fileno())
        except (AttributeError, TypeError, ValueError):
            raise ValueError(f"Invalid file object: {fd!r}") from None
    # A sub-class is not asked what it is.
    return number if type(number) is int else int.__index__(number)


cdef int descriptor_of(fd) except -1:
    """The number of a descriptor or open file object; errors as selectors and epoll raise them."""
    cdef object number = descriptor_number(fd)
    if number < 0:
        raise ValueError(f"Invalid file descriptor: {fd!r}")
    if number > INT_MAX:
        raise OverflowError("file descriptor is greater than maximum")
    return number
