/*
 * floor: an echo server without Python: the least that an event loop could cost.
 *
 *   floor epoll|io_uring [PATH]
 *
 * Listens on a TCP port that the operating system chooses, or on the Unix socket PATH, and writes
 * one line of JSON like serve.py. One thread; it runs until it is killed.
 *
 * epoll: level-triggered, recv(2) and send(2). io_uring: multishot accept and receive out of a
 * buffer ring, one send in flight per connection, all that completions ask for submitted with the
 * next wait (kernel 6.1). Which is the lower depends on the message: take the better one.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <liburing.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

enum {
    BACKLOG = 1024,
    DESCRIPTORS = 65536,  /* connections are found by descriptor */
    READ_BYTES = 256 * 1024,
    EVENTS = 256,
    BLOCKS = 256,  /* of the buffer ring: a power of two, at least the connections of a benchmark */
    BLOCK_BYTES = 16 * 1024,
    GROUP = 0,
    NONE = -1,
};

static bool is_tcp;

static void die(const char *what, int error)
{
    fprintf(stderr, "floor: %s: %s\n", what, strerror(error));
    exit(1);
}

static int listen_socket(const char *backend, const char *path)
{
    struct sockaddr_in tcp = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct sockaddr_un local = {.sun_family = AF_UNIX};
    socklen_t size = sizeof tcp;
    int fd = socket(is_tcp ? AF_INET : AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    int error;

    if (is_tcp) {
        error = bind(fd, (struct sockaddr *)&tcp, sizeof tcp);
    } else {
        snprintf(local.sun_path, sizeof local.sun_path, "%s", path);
        error = bind(fd, (struct sockaddr *)&local, sizeof local);
    }
    if (error != 0 || listen(fd, BACKLOG) != 0)
        die("listen", errno);
    if (is_tcp) {
        getsockname(fd, (struct sockaddr *)&tcp, &size);
        printf("{\"address\": [\"127.0.0.1\", %d], ", ntohs(tcp.sin_port));
    } else {
        printf("{\"address\": \"%s\", ", path);
    }
    printf("\"backend\": \"%s\", \"loop_class\": \"floor.c\", \"python\": \"no Python\", "
           "\"versions\": {}}\n", backend);
    fflush(stdout);
    return fd;
}

static void send_at_once(int fd)
{
    int one = 1;

    if (is_tcp)
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
}

/* ---- epoll ---- */

struct reader {
    char *rest;  /* what the socket did not take yet; nothing is received while it waits */
    size_t sent, size;
};

static struct reader readers[DESCRIPTORS];

static void epoll_watch(int epoll_fd, int operation, int fd, uint32_t events)
{
    struct epoll_event event = {.events = events, .data.fd = fd};

    if (epoll_ctl(epoll_fd, operation, fd, &event) != 0)
        die("epoll_ctl", errno);
}

static void epoll_accept(int epoll_fd, int listener)
{
    int fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);

    if (fd < 0 || fd >= DESCRIPTORS)
        die("accept", fd < 0 ? errno : EMFILE);
    send_at_once(fd);
    epoll_watch(epoll_fd, EPOLL_CTL_ADD, fd, EPOLLIN);
}

static void epoll_resume(int epoll_fd, int fd)
{
    struct reader *reader = &readers[fd];
    ssize_t count = send(fd, reader->rest + reader->sent, reader->size - reader->sent,
                         MSG_NOSIGNAL);

    reader->sent += count > 0 ? (size_t)count : 0;
    if (reader->sent < reader->size && (count >= 0 || errno == EAGAIN))
        return;
    free(reader->rest);
    reader->rest = NULL;
    epoll_watch(epoll_fd, EPOLL_CTL_MOD, fd, EPOLLIN);
}

static void epoll_echo(int epoll_fd, int fd)
{
    static char data[READ_BYTES];
    struct reader *reader = &readers[fd];
    ssize_t size = recv(fd, data, sizeof data, 0);
    ssize_t sent;

    if (size <= 0) {
        close(fd);
        return;
    }
    sent = send(fd, data, (size_t)size, MSG_NOSIGNAL);
    if (sent == size)
        return;
    reader->sent = 0;
    reader->size = (size_t)(size - (sent > 0 ? sent : 0));
    reader->rest = malloc(reader->size);
    if (reader->rest == NULL)
        die("malloc", ENOMEM);
    memcpy(reader->rest, data + (size - (ssize_t)reader->size), reader->size);
    epoll_watch(epoll_fd, EPOLL_CTL_MOD, fd, EPOLLOUT);
}

static void serve_epoll(int listener)
{
    struct epoll_event events[EVENTS];
    int epoll_fd = epoll_create1(EPOLL_CLOEXEC);

    epoll_watch(epoll_fd, EPOLL_CTL_ADD, listener, EPOLLIN);
    for (;;) {
        int count = epoll_wait(epoll_fd, events, EVENTS, -1);
        for (int i = 0; i < count; i++) {
            int fd = events[i].data.fd;
            if (fd == listener)
                epoll_accept(epoll_fd, listener);
            else if (readers[fd].rest != NULL)
                epoll_resume(epoll_fd, fd);
            else
                epoll_echo(epoll_fd, fd);
        }
    }
}

/* ---- io_uring ---- */

enum kind { ACCEPT, RECEIVE, SEND };

/* A connection sends its blocks in the order they came: first..last, linked by next_block. */
struct sender {
    int first, last;
    bool starved;  /* its receive ended because the buffer ring was empty */
    bool closed;
};

static struct io_uring ring;
static struct io_uring_buf_ring *buffers;
static char *blocks;
static int next_block[BLOCKS];
static int block_size[BLOCKS];
static struct sender senders[DESCRIPTORS];
static int starved;

static struct io_uring_sqe *next_sqe(void)
{
    struct io_uring_sqe *sqe = io_uring_get_sqe(&ring);

    if (sqe == NULL) {
        io_uring_submit(&ring);
        sqe = io_uring_get_sqe(&ring);
    }
    return sqe;
}

/* After the prep function: those of liburing before 2.2 clear user_data. */
static void tag(struct io_uring_sqe *sqe, enum kind kind, int fd)
{
    io_uring_sqe_set_data64(sqe, (uint64_t)kind << 32 | (uint32_t)fd);
}

static void ring_accept(int listener)
{
    struct io_uring_sqe *sqe = next_sqe();

    io_uring_prep_multishot_accept(sqe, listener, NULL, NULL, SOCK_CLOEXEC);
    tag(sqe, ACCEPT, listener);
}

static void ring_receive(int fd)
{
    struct io_uring_sqe *sqe = next_sqe();

    io_uring_prep_recv_multishot(sqe, fd, NULL, 0, 0);
    sqe->flags |= IOSQE_BUFFER_SELECT;
    sqe->buf_group = GROUP;
    tag(sqe, RECEIVE, fd);
}

static void ring_send_first(int fd)
{
    struct io_uring_sqe *sqe = next_sqe();
    int block = senders[fd].first;

    io_uring_prep_send(sqe, fd, blocks + (size_t)block * BLOCK_BYTES, (size_t)block_size[block],
                       MSG_WAITALL | MSG_NOSIGNAL);
    tag(sqe, SEND, fd);
}

static void give_back(int block)
{
    io_uring_buf_ring_add(buffers, blocks + (size_t)block * BLOCK_BYTES, BLOCK_BYTES,
                          (unsigned short)block, io_uring_buf_ring_mask(BLOCKS), 0);
    io_uring_buf_ring_advance(buffers, 1);
}

static void ring_received(int fd, const struct io_uring_cqe *cqe)
{
    struct sender *sender = &senders[fd];
    int block;

    if (cqe->res == -ENOBUFS) {
        sender->starved = true;
        starved++;
        return;
    }
    if (cqe->res <= 0) {
        sender->closed = true;
        if (sender->first == NONE)
            close(fd);
        return;
    }
    block = (int)(cqe->flags >> IORING_CQE_BUFFER_SHIFT);
    block_size[block] = cqe->res;
    next_block[block] = NONE;
    if (sender->first == NONE) {
        sender->first = sender->last = block;
        ring_send_first(fd);
    } else {
        next_block[sender->last] = block;
        sender->last = block;
    }
    if (!(cqe->flags & IORING_CQE_F_MORE))
        ring_receive(fd);
}

/* Blocks are free again: start the receives that ran dry. */
static void feed_starved(void)
{
    for (int fd = 0; fd < DESCRIPTORS && starved > 0; fd++) {
        if (senders[fd].starved) {
            senders[fd].starved = false;
            starved--;
            ring_receive(fd);
        }
    }
}

static void ring_sent(int fd)
{
    struct sender *sender = &senders[fd];
    int block = sender->first;

    sender->first = next_block[block];
    give_back(block);
    if (sender->first != NONE)
        ring_send_first(fd);
    else if (sender->closed)
        close(fd);
}

static void ring_complete(const struct io_uring_cqe *cqe)
{
    int fd = (int)(uint32_t)cqe->user_data;

    switch ((enum kind)(cqe->user_data >> 32)) {
    case ACCEPT:
        if (cqe->res < 0 || cqe->res >= DESCRIPTORS)
            die("accept", cqe->res < 0 ? -cqe->res : EMFILE);
        send_at_once(cqe->res);
        senders[cqe->res] = (struct sender){.first = NONE};
        ring_receive(cqe->res);
        if (!(cqe->flags & IORING_CQE_F_MORE))
            ring_accept(fd);
        break;
    case RECEIVE: ring_received(fd, cqe); break;
    case SEND: ring_sent(fd); break;
    }
}

static void open_ring(void)
{
    struct io_uring_params params = {
        .flags = IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN | IORING_SETUP_CQSIZE,
        .cq_entries = 4096,
    };
    struct io_uring_buf_reg group = {.ring_entries = BLOCKS, .bgid = GROUP};
    void *memory;
    int error = io_uring_queue_init_params(1024, &ring, &params);

    if (error != 0)
        die("io_uring_setup (kernel 6.1 or later, and permission)", -error);
    blocks = aligned_alloc(4096, (size_t)BLOCKS * BLOCK_BYTES);
    memory = aligned_alloc(4096, BLOCKS * sizeof(struct io_uring_buf));
    if (blocks == NULL || memory == NULL)
        die("aligned_alloc", ENOMEM);
    buffers = memory;
    io_uring_buf_ring_init(buffers);
    group.ring_addr = (uint64_t)(uintptr_t)memory;
    error = io_uring_register_buf_ring(&ring, &group, 0);
    if (error != 0)
        die("register a buffer ring", -error);
    for (int block = 0; block < BLOCKS; block++)
        give_back(block);
}

static void serve_ring(int listener)
{
    ring_accept(listener);
    for (;;) {
        struct io_uring_cqe *cqe;
        unsigned head, count = 0;
        int error = io_uring_submit_and_wait(&ring, 1);

        if (error < 0 && error != -EINTR)
            die("io_uring_enter", -error);
        io_uring_for_each_cqe(&ring, head, cqe) {
            ring_complete(cqe);
            count++;
        }
        io_uring_cq_advance(&ring, count);
        if (starved > 0)
            feed_starved();
    }
}

int main(int argc, char **argv)
{
    bool epoll = argc > 1 && strcmp(argv[1], "epoll") == 0;

    if (argc < 2 || argc > 3 || (!epoll && strcmp(argv[1], "io_uring") != 0)) {
        fputs("usage: floor epoll|io_uring [PATH]\n", stderr);
        return 2;
    }
    is_tcp = argc == 2;
    if (!epoll)
        open_ring();
    int listener = listen_socket(argv[1], argv[argc - 1]);
    if (epoll)
        serve_epoll(listener);
    else
        serve_ring(listener);
    return 0;
}
