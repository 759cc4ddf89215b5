# Stash: what was received for sock_* calls that could not take it any more.
#
# A call that is cancelled while its data is on the way leaves it here, for the next call on the
# same socket or a transport made from it. "The same socket" is what the kernel says (SO_COOKIE,
# unique until the machine restarts): the socket object may have been detached or duplicated, its
# number used again, and the loop closed: one stash serves all loops of the process.

cdef enum:
    SWEEP_SIZE = 64


@cython.internal
@cython.final
cdef class Stash:
    cdef dict entries           # cookie -> deque of bytes, at most one exception at the end
    cdef Py_ssize_t sweep_at    # when there are so many, those of closed sockets are dropped

    def __cinit__(self):
        self.entries = {}
        self.sweep_at = SWEEP_SIZE

    cdef object entry(self, cookie):
        entry = self.entries.get(cookie)
        if entry is None:
            if len(self.entries) >= self.sweep_at:
                self.sweep()
            entry = self.entries[cookie] = collections.deque()
        return entry

    cdef int put(self, cookie, item) except -1:
        """Keep bytes or an exception for the next reader; nobody reads a closed socket (None)."""
        if cookie is not None:
            self.entry(cookie).append(item)
        return 0

    cdef int put_back(self, cookie, bytes data) except -1:
        """Keep bytes that come before all that is kept."""
        if cookie is not None and data:
            self.entry(cookie).appendleft(data)
        return 0

    cdef bint has(self, cookie) except -1:
        """Whether something is kept for a socket."""
        return len(self.entries) > 0 and cookie in self.entries

    cdef object take(self, cookie, Py_ssize_t limit):
        """Up to `limit` bytes, or None. Raises an error that was kept."""
        entry = self.entries.get(cookie)
        if entry is None:
            return None
        item = entry[0]
        if isinstance(item, bytes) and len(item) > limit:
            rest, item = item[limit:], item[:limit]
            entry[0] = rest
            return item
        entry.popleft()
        if not entry:
            del self.entries[cookie]
        if not isinstance(item, bytes):
            raise item
        return item

    cdef list take_all(self, cookie):
        """Everything kept for a socket: bytes, at most one OSError at the end."""
        return list(self.entries.pop(cookie, ()))

    cdef int clear(self) except -1:
        self.entries.clear()
        self.sweep_at = SWEEP_SIZE
        return 0

    cdef int sweep(self) except -1:
        """Forget the sockets that this process has open no more."""
        # Other threads run during listdir(): what they stash for new sockets stays.
        known = set(self.entries)
        try:
            alive = {cookie_of(int(name)) for name in os.listdir("/proc/self/fd")}
        except OSError:
            alive = known                   # no /proc here: keep all
        for cookie in known - alive:
            self.entries.pop(cookie, None)
        self.sweep_at = max(SWEEP_SIZE, 2 * len(self.entries))
        return 0


cdef uint64_t socket_cookie(int fd) noexcept:
    """SO_COOKIE (Linux 4.12), or 0 for what is no open socket."""
    cdef uint64_t cookie
    cdef unsigned size = sizeof(cookie)
    if fd < 0 or liburing.getsockopt(fd, liburing.SOL_SOCKET, liburing.SO_COOKIE, &cookie,
                                     &size) < 0:
        return 0
    return cookie


cdef bint still_names(int fd, uint64_t cookie) noexcept:
    """Whether a descriptor names the socket it did; assumed where the kernel cannot tell."""
    cdef uint64_t found = socket_cookie(fd)
    return found == cookie or cookie == 0 or (
        found == 0 and fd >= 0 and errno != EBADF and errno != ENOTSOCK)


cdef object cookie_of(int fd):
    """SO_COOKIE, or None for what is no open socket."""
    cdef uint64_t cookie = socket_cookie(fd)
    return cookie if cookie else None


_STASH = Stash()


def forget_stash():
    """In a forked child: what was received is the parent's."""
    (<Stash>_STASH).clear()
