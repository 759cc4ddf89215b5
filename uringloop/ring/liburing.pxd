"""Extern declarations: liburing, and the helpers of compat.h. No logic."""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t


cdef extern from "ring/compat.h" nogil:
    struct io_uring_sqe:
        uint8_t opcode
        uint8_t flags
        uint16_t ioprio
        int32_t fd
        uint64_t addr
        uint32_t len
        uint32_t msg_flags
        uint32_t accept_flags
        uint32_t cancel_flags
        uint32_t poll32_events
        uint64_t user_data
        uint16_t buf_group

    struct io_uring_cqe:
        uint64_t user_data
        int32_t res
        uint32_t flags

    struct io_uring_sq:
        unsigned *kflags

    struct io_uring_cq:
        unsigned *khead
        unsigned *ktail
        unsigned *koverflow
        io_uring_cqe *cqes
        unsigned ring_mask
        unsigned ring_entries

    struct io_uring:
        io_uring_sq sq
        io_uring_cq cq
        int ring_fd

    struct io_uring_params:
        uint32_t cq_entries
        uint32_t flags

    struct io_uring_buf_ring:
        pass

    struct io_uring_buf:
        pass

    struct io_uring_buf_reg:
        uint64_t ring_addr
        uint32_t ring_entries
        uint16_t bgid

    struct __kernel_timespec:
        int64_t tv_sec
        long long tv_nsec

    struct io_uring_sync_cancel_reg:
        uint64_t addr
        int32_t fd
        uint32_t flags
        __kernel_timespec timeout

    struct io_uring_probe:
        pass

    enum:
        IORING_SETUP_CQSIZE
        IORING_SETUP_CLAMP
        IORING_SETUP_SUBMIT_ALL
        IORING_SETUP_COOP_TASKRUN
        IORING_SETUP_TASKRUN_FLAG
        IORING_OP_SENDMSG
        IORING_OP_POLL_ADD
        IORING_OP_ACCEPT
        IORING_OP_ASYNC_CANCEL
        IORING_OP_SEND
        IORING_OP_RECV
        IORING_OP_SEND_ZC
        IORING_OP_SENDMSG_ZC
        IORING_RECV_MULTISHOT
        IORING_SEND_ZC_REPORT_USAGE
        IORING_ACCEPT_MULTISHOT
        IORING_ASYNC_CANCEL_ALL
        IORING_ASYNC_CANCEL_ANY
        IOSQE_BUFFER_SELECT
        IOSQE_CQE_SKIP_SUCCESS
        IORING_CQE_F_BUFFER
        IORING_CQE_F_MORE
        IORING_CQE_F_NOTIF
        IORING_CQE_BUFFER_SHIFT

    int io_uring_queue_init_params(unsigned entries, io_uring *ring, io_uring_params *params)
    void io_uring_queue_exit(io_uring *ring)
    int io_uring_get_events(io_uring *ring)
    int io_uring_wait_cqe_timeout(io_uring *ring, io_uring_cqe **cqe, __kernel_timespec *timeout)
    io_uring_sqe *io_uring_get_sqe(io_uring *ring)
    unsigned io_uring_sq_ready(const io_uring *ring)
    unsigned io_uring_cq_ready(const io_uring *ring)
    bint io_uring_cq_has_overflow(const io_uring *ring)
    void io_uring_cq_advance(io_uring *ring, unsigned count)
    int io_uring_register_buf_ring(io_uring *ring, io_uring_buf_reg *reg, unsigned flags)
    int io_uring_unregister_buf_ring(io_uring *ring, int group)
    int io_uring_register_sync_cancel(io_uring *ring, io_uring_sync_cancel_reg *reg)
    io_uring_probe *io_uring_get_probe_ring(io_uring *ring)
    void io_uring_free_probe(io_uring_probe *probe)
    int io_uring_opcode_supported(const io_uring_probe *probe, int opcode)
    void io_uring_buf_ring_init(io_uring_buf_ring *ring)
    int io_uring_buf_ring_mask(uint32_t entries)
    void io_uring_buf_ring_add(io_uring_buf_ring *ring, void *address, unsigned length,
                               unsigned short block, int mask, int offset)
    void io_uring_buf_ring_advance(io_uring_buf_ring *ring, int count)

    int64_t monotonic_ns "uringloop_monotonic_ns"()
    void prepare "uringloop_prepare"(io_uring_sqe *sqe, uint8_t opcode, int fd,
                                     const void *address, uint32_t length, uint64_t user_data)
    int submit "uringloop_submit"(io_uring *ring)
    int io_uring_submit(io_uring *ring)
    io_uring_sqe *queued "uringloop_queued"(const io_uring *ring, unsigned place)
    void unqueue "uringloop_unqueue"(io_uring *ring)
    void pause_ns "uringloop_pause_ns"(long nanoseconds)
    uint32_t poll_events "uringloop_poll_events"(uint32_t events)
    bint taskrun_pending "uringloop_taskrun_pending"(const io_uring *ring)
    bint has_news "uringloop_has_news"(const io_uring *ring)
    bint is_set "uringloop_is_set"(const bint *flag)
    void relax "uringloop_relax"()
    Py_ssize_t PY_SSIZE_T_MAX
    int ECANCELED
    void set_errno "uringloop_set_errno"(int error)
    unsigned fork_count "uringloop_fork_count"
    int watch_forks "uringloop_watch_forks"()

    ctypedef union epoll_data_t:
        uint64_t u64

    struct epoll_event:
        uint32_t events
        epoll_data_t data

    enum:
        POLLIN
        POLLOUT
        EPOLL_CTL_ADD
        EPOLL_CTL_DEL
        EPOLL_CTL_MOD
        EPOLL_CLOEXEC
        EPOLLIN
        EPOLLOUT

    int epoll_create1(int flags)
    int epoll_ctl(int epoll_fd, int operation, int fd, epoll_event *event)
    int epoll_wait(int epoll_fd, epoll_event *events, int count, int timeout_ms)
    int epoll_pwait2 "uringloop_epoll_pwait2"(int epoll_fd, epoll_event *events, int count,
                                              int64_t timeout_ns)


cdef extern from "<sys/eventfd.h>" nogil:
    enum:
        EFD_CLOEXEC
        EFD_NONBLOCK

    int eventfd(unsigned initial, int flags)


cdef extern from "<sys/uio.h>" nogil:
    struct iovec:
        void *iov_base
        size_t iov_len


cdef extern from "<sys/socket.h>" nogil:
    struct msghdr:
        void *msg_name
        unsigned msg_namelen
        iovec *msg_iov
        size_t msg_iovlen
        void *msg_control
        size_t msg_controllen
        int msg_flags

    struct sockaddr:
        pass

    struct sockaddr_storage:
        unsigned short ss_family

    enum:
        AF_INET
        AF_INET6
        AF_UNIX
        SOCK_STREAM
        SOCK_NONBLOCK
        SOCK_CLOEXEC
        SHUT_WR
        SHUT_RDWR
        MSG_NOSIGNAL
        MSG_WAITALL
        MSG_DONTWAIT
        SOL_SOCKET
        SO_COOKIE

    int accept4(int fd, void *address, void *address_size, int flags)
    ssize_t send(int fd, const void *data, size_t length, int flags)
    ssize_t sendmsg(int fd, const msghdr *message, int flags)
    ssize_t sendto(int fd, const void *data, size_t length, int flags, const sockaddr *address,
                   unsigned address_size)
    ssize_t recv(int fd, void *data, size_t length, int flags)
    ssize_t recvfrom(int fd, void *data, size_t length, int flags, sockaddr *address,
                     unsigned *address_size)
    int shutdown(int fd, int how)
    int socketpair(int domain, int kind, int protocol, int fds[2])
    int getsockopt(int fd, int level, int option, void *value, unsigned *length)
    int setsockopt(int fd, int level, int option, const void *value, unsigned length)
    int getsockname(int fd, void *address, unsigned *size)
    int getpeername(int fd, void *address, unsigned *size)


cdef extern from "<netinet/tcp.h>" nogil:
    enum:
        TCP_NODELAY


cdef extern from "<netinet/in.h>" nogil:
    enum:
        IPPROTO_TCP
        INET6_ADDRSTRLEN

    struct in_addr:
        pass

    struct in6_addr:
        pass

    struct sockaddr_in:
        unsigned short sin_family
        uint16_t sin_port
        in_addr sin_addr

    struct sockaddr_in6:
        unsigned short sin6_family
        uint16_t sin6_port
        uint32_t sin6_flowinfo
        in6_addr sin6_addr
        uint32_t sin6_scope_id


cdef extern from "<arpa/inet.h>" nogil:
    uint16_t htons(uint16_t number)
    uint16_t ntohs(uint16_t number)
    uint32_t htonl(uint32_t number)
    uint32_t ntohl(uint32_t number)
    const char *inet_ntop(int family, const void *address, char *text, unsigned size)
    int inet_pton(int family, const char *text, void *address)


cdef extern from "<sys/un.h>" nogil:
    struct sockaddr_un:
        char sun_path[108]
