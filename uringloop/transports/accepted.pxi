# Accepted: a TCP connection as the kernel gave it: a descriptor and two addresses.
#
# Most protocols never ask for more, so the socket object, and the tuples that get_extra_info()
# tells, are made when somebody does. The addresses are taken at once: a peer that has gone has none
# any more, and a closed descriptor knows neither.
#
# Owner of the descriptor: the listener until there is a transport, then the transport.

cdef struct Accepted:
    int fd
    int family              # of the listening socket, as is the protocol
    int protocol
    liburing.sockaddr_in6 local, remote     # or a sockaddr_in; family 0: not known


cdef int ask_addresses(Accepted *conn, const liburing.sockaddr_in6 *remote) noexcept:
    """What accept(2) told of the peer, if it told; the kernel is asked for the rest."""
    cdef unsigned size = sizeof(conn.local)
    if liburing.getsockname(conn.fd, &conn.local, &size) < 0:
        conn.local.sin6_family = 0
    if remote is not NULL:
        conn.remote = remote[0]
        return 0
    size = sizeof(conn.remote)
    if liburing.getpeername(conn.fd, &conn.remote, &size) < 0:
        conn.remote.sin6_family = 0         # the peer has gone already
    return 0


cdef object accepted_socket(int fd, family, kind, protocol):
    """The socket object of an accepted descriptor that is open. It owns the descriptor."""
    sock = socket.socket(family, kind, protocol, fileno=fd)
    try:
        sock.setblocking(False)     # it is; the socket object does not know
    except BaseException:
        sock.detach()
        raise
    return sock


cdef object closed_socket_object(const Accepted *conn):
    """What is left of the socket object when the descriptor is closed."""
    try:
        sock = socket.socket(conn.family, liburing.SOCK_STREAM, conn.protocol)
    except OSError:             # no room for a descriptor
        sock = socket.socket.__new__(socket.socket)
        sock._io_refs = 0
    sock.close()
    return sock
