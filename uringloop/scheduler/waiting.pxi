# Waiting: how the loop looks for work before it lets itself be put to sleep.
#
# Owner: the LoopCore. A thread that sleeps in epoll_wait loses the GIL and takes tens of
# microseconds to come back. Two looks may come before, each for as long as it pays:
#   - A quick look, without giving the GIL up, when the wait before found something at once: more
#     than one descriptor is busy. After QUICK_LOOKS of them the loop gives the GIL up once.
#   - With LoopOptions(busy_poll=seconds), looking again and again for that long without the GIL,
#     while recent waits were shorter. What was not worth it is tried again in SPIN_AGAIN waits, as
#     sleeping itself makes waits longer.

cdef enum:
    QUICK_WAIT_NS = 2000
    QUICK_LOOKS = 16
    SPIN_AGAIN = 64


@cython.internal
@cython.final
cdef class Waiting:
    cdef int64_t spin_ns        # the option busy_poll
    cdef int64_t recent_ns      # of the last waits: a moving average
    cdef int quick_looks        # that may still be made at a stretch
    cdef int waits_without      # since the loop last spun
    cdef uint64_t spins, spins_paid

    cdef inline bint looks_quickly(self) noexcept:
        self.quick_looks -= 1
        return self.quick_looks >= 0

    cdef inline bint spins_now(self) noexcept:
        if not self.spin_ns:
            return False
        self.waits_without += 1
        return self.recent_ns < self.spin_ns or self.waits_without >= SPIN_AGAIN

    cdef inline void found_nothing(self) noexcept:
        self.quick_looks = 0

    cdef inline void slept(self, int64_t elapsed_ns) noexcept:
        """The loop has blocked that long."""
        self.quick_looks = QUICK_LOOKS if elapsed_ns < QUICK_WAIT_NS else 0
        self.learn(elapsed_ns)

    cdef inline void learn(self, int64_t elapsed_ns) noexcept:
        # One night without traffic is forgotten as fast as one slow answer.
        self.recent_ns += (min(elapsed_ns, 4 * self.spin_ns) - self.recent_ns) // 4

    cdef bint spin(self, Poller poller, liburing.io_uring *ring, int64_t now,
                   int64_t limit_ns) except -1:
        """Look until something is to be done, which the caller takes. Returns whether there is."""
        cdef bint found
        self.spins += 1
        self.waits_without = 0
        poller.waiting = True
        with nogil:
            found = self.look(poller, ring, now + limit_ns)
        poller.waiting = False
        if found:
            self.spins_paid += 1
            self.learn(liburing.monotonic_ns() - now)
        return found

    cdef bint look(self, Poller poller, liburing.io_uring *ring, int64_t until_ns) noexcept nogil:
        # Descriptors can only be seen by a system call; all else is in memory.
        cdef bint asks_epoll = ring is NULL or poller.watched > 0
        while True:
            if ring is not NULL and liburing.has_news(ring):
                return True
            if asks_epoll:
                # What it reports it reports again.
                if liburing.epoll_wait(poller.epoll_fd, poller.events, EVENTS_PER_WAIT, 0) != 0:
                    return True
            elif liburing.is_set(&poller.woken):
                return True
            if liburing.monotonic_ns() >= until_ns:
                return False
            liburing.relax()
