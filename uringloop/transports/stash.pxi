# Stash: what was received for sock_* calls that could not take it any more.
#
# A call that is cancelled while its data is on the way leaves it here, for the next call on the
# same socket or a transport made from it. "The same socket" is what the kernel says (SO_COOKIE,
# unique for the life of the machine): the socket object may have been detached or duplicated, and
# its number used again.

@cython.internal
@cython.final
cdef class Stash:
    cdef dict entries           # cookie -> deque of bytes, at most one OSError at the end
    cdef readonly Py_ssize_t count
    cdef Py_ssize_t sweep_at    # when there are so many, those of closed sockets are dropped

    def __cinit__(self):
        self.entries = {}
        self.sweep_at = 64

    cdef int put(self, cookie, item) except -1:
        """Keep bytes or an OSError for the next reader; nobody reads a closed socket (None)."""
        if cookie is None:
            return 0
        entry = self.entries.get(cookie)
        if entry is None:
            if self.count >= self.sweep_at:
                self.sweep()
            entry = self.entries[cookie] = collections.deque()
            self.count += 1
        entry.append(item)
        return 0

    cdef object take(self, int fd, Py_ssize_t limit):
        """Up to `limit` bytes, or None. Raises an error that was kept."""
        cookie = cookie_of(fd)
        entry = self.entries.get(cookie)
        if entry is None or limit <= 0:
            return None
        item = entry.popleft()
        if isinstance(item, bytes) and len(item) > limit:
            entry.appendleft(item[limit:])
            item = item[:limit]
        if not entry:
            self.drop(cookie)
        if isinstance(item, OSError):
            raise item
        return item

    cdef object take_all(self, int fd):
        """Everything kept for a socket: a list of bytes, at most one OSError at its end."""
        cookie = cookie_of(fd)
        entry = self.entries.get(cookie)
        if entry is None:
            return []
        self.drop(cookie)
        return list(entry)

    cdef int drop(self, cookie) except -1:
        del self.entries[cookie]
        self.count -= 1
        return 0

    cdef int sweep(self) except -1:
        """Forget the sockets that this process has open no more."""
        alive = {cookie_of(int(name)) for name in os.listdir("/proc/self/fd")}
        for cookie in [cookie for cookie in self.entries if cookie not in alive]:
            self.drop(cookie)
        self.sweep_at = max(64, 2 * self.count)
        return 0

    cdef int clear(self) except -1:
        self.entries.clear()
        self.count = 0
        return 0


cdef object cookie_of(int fd):
    """SO_COOKIE (Linux 4.12), or None for what is no open socket."""
    cdef uint64_t cookie
    cdef unsigned size = sizeof(cookie)
    if fd < 0 or liburing.getsockopt(fd, liburing.SOL_SOCKET, liburing.SO_COOKIE, &cookie,
                                     &size) < 0:
        return None
    return cookie
