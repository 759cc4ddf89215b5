# Addresses: between the kernel's names of sockets and what the socket module makes of them.
#
# Here are the plain forms only. What is unknown here, the methods of socket.socket are asked for:
# host names, scopes, other families, and all that is an error.
#
# Owner of the known senders: the transport. To make the tuple of an address costs as much as to
# copy a kilobyte, and most datagrams come from somebody who has sent before.

cdef enum:
    # A power of two: 10 KiB for an endpoint that has received. An address has two places, so of 16
    # senders at random ports three seldom want the same two.
    KNOWN_SENDERS = 256
    SENDER_BITS = 8


cdef union SocketName:
    liburing.sockaddr_storage storage
    liburing.sockaddr any
    liburing.sockaddr_in inet
    liburing.sockaddr_in6 inet6
    liburing.sockaddr_un local
    uint64_t words[3]
    char content[128]


cdef struct KnownSender:
    unsigned size
    char content[28]            # sockaddr_in6


@cython.internal
@cython.final
cdef class KnownSenders:
    """The addresses of IP sockets that datagrams came from lately, by their names."""
    cdef KnownSender names[KNOWN_SENDERS]
    cdef list addresses

    def __cinit__(self):
        self.addresses = [None] * KNOWN_SENDERS

    cdef object find(self, SocketName *name, unsigned size):
        """The address that a name stands for: the same object as before, or a new one."""
        cdef uint64_t mixed = name.words[0] ^ name.words[1]
        cdef Py_ssize_t place, other
        if size > sizeof(liburing.sockaddr_in):
            mixed ^= name.words[2]
        place = (mixed * <uint64_t>0x9E3779B97F4A7C15) >> (64 - SENDER_BITS)
        other = place ^ 1
        if self.is_at(place, name, size):
            return <object>PyList_GET_ITEM(self.addresses, place)
        if self.is_at(other, name, size):
            return <object>PyList_GET_ITEM(self.addresses, other)
        address = address_of(name, size)
        if size <= sizeof(self.names[place].content):
            self.names[other] = self.names[place]
            self.addresses[other] = self.addresses[place]
            self.names[place].size = size
            memcpy(self.names[place].content, name.content, size)
            self.addresses[place] = address
        return address

    cdef inline bint is_at(self, Py_ssize_t place, SocketName *name, unsigned size) noexcept:
        return (self.names[place].size == size
                and memcmp(self.names[place].content, name.content, size) == 0)


cdef object internet_address(const liburing.sockaddr_in6 *ipv6):
    """The address of an IP socket as the socket module tells it; None for another family."""
    cdef const liburing.sockaddr_in *ipv4 = <const liburing.sockaddr_in *>ipv6
    cdef char[liburing.INET6_ADDRSTRLEN] text
    if ipv6.sin6_family == liburing.AF_INET:
        liburing.inet_ntop(liburing.AF_INET, &ipv4.sin_addr, text, sizeof(text))
        return (<const char *>text).decode("ascii"), liburing.ntohs(ipv4.sin_port)
    if ipv6.sin6_family == liburing.AF_INET6:
        liburing.inet_ntop(liburing.AF_INET6, &ipv6.sin6_addr, text, sizeof(text))
        return ((<const char *>text).decode("ascii"), liburing.ntohs(ipv6.sin6_port),
                liburing.ntohl(ipv6.sin6_flowinfo), ipv6.sin6_scope_id)
    return None


cdef object address_of(SocketName *name, unsigned size):
    """The address as recvfrom() of the socket module gives it, of an IP or Unix socket."""
    if size == 0:
        return None             # a Unix socket without a name
    if name.storage.ss_family in (liburing.AF_INET, liburing.AF_INET6):
        return internet_address(&name.inet6)
    size -= sizeof(name.storage.ss_family)
    if size and not name.local.sun_path[0]:
        return PyBytes_FromStringAndSize(name.local.sun_path, size)      # an abstract name
    name.content[sizeof(name.storage.ss_family) + size] = 0
    return PyUnicode_DecodeFSDefault(name.local.sun_path)


cdef unsigned name_of(address, int family, SocketName *name) except? 0:
    """Make the name of an IP address. Returns its size, 0 where the address is not plain."""
    cdef int64_t port, flow = 0, scope = 0
    cdef Py_ssize_t count
    if type(address) is not tuple:
        return 0
    count = PyTuple_GET_SIZE(address)
    if count < 2 or count > (2 if family == liburing.AF_INET else 4):
        return 0
    host = <object>PyTuple_GET_ITEM(address, 0)
    if type(host) is not str or not PyUnicode_IS_COMPACT_ASCII(host):
        return 0
    port = plain_number(<object>PyTuple_GET_ITEM(address, 1), 0xFFFF)
    if count > 2:
        flow = plain_number(<object>PyTuple_GET_ITEM(address, 2), 0xFFFFF)
    if count > 3:
        scope = plain_number(<object>PyTuple_GET_ITEM(address, 3), 0xFFFFFFFF)
    if port < 0 or flow < 0 or scope < 0:
        return 0
    text = PyUnicode_DATA(host)
    if <Py_ssize_t>strlen(text) != PyUnicode_GET_LENGTH(host):
        return 0
    memset(name, 0, sizeof(liburing.sockaddr_in6))
    name.storage.ss_family = family
    if family == liburing.AF_INET:
        name.inet.sin_port = liburing.htons(<uint16_t>port)
        if liburing.inet_pton(family, text, &name.inet.sin_addr) == 1:
            return sizeof(liburing.sockaddr_in)
    elif family == liburing.AF_INET6:
        name.inet6.sin6_port = liburing.htons(<uint16_t>port)
        name.inet6.sin6_flowinfo = liburing.htonl(<uint32_t>flow)
        name.inet6.sin6_scope_id = <uint32_t>scope
        if liburing.inet_pton(family, text, &name.inet6.sin6_addr) == 1:
            return sizeof(liburing.sockaddr_in6)
    return 0


cdef int64_t plain_number(value, int64_t limit) except? -1:
    """An int from 0 to the limit; -1 for all else."""
    cdef int overflow = 0
    cdef int64_t number
    if type(value) is not int:
        return -1
    number = PyLong_AsLongAndOverflow(value, &overflow)
    return number if not overflow and 0 <= number <= limit else -1
