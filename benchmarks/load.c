/*
 * load: a closed-loop echo client, lean enough that the server is what gets measured.
 *
 *   load --tcp PORT | --unix PATH | --udp PORT  --connections N --size BYTES
 *        --warmup S --seconds S [--churn] [--server-pid PID] [--hold]
 *
 * Every connection has one message in flight: send BYTES, wait for as many back, again. One
 * thread, one level-triggered epoll. There are two phases, a warm-up and the measured window;
 * each starts a message on every connection and ends when the last reply is in, so the server's
 * CPU time around a phase belongs to exactly the messages counted in it. The warm-up compares
 * the bytes that come back, the window their number.
 *
 * With --churn a message is a connection: connect, send, receive the echo, shut down, wait for the
 * server to close as well. The side that closes first keeps the pair of addresses in TIME_WAIT for
 * a minute, so each connection comes from another address of 127.0.0.0/8 and no port runs out.
 *
 * With --udp a message is a datagram with its number in the first 8 bytes. One that isn't answered
 * within RESEND_MS is sent again and counted; the answer to an earlier one is ignored.
 *
 * With --hold it prints "ready" after the warm-up, waits for a line on stdin, and keeps the
 * connections open after the result until stdin ends: room for a tracer around the window.
 *
 * Result, one line of JSON: messages, seconds, p50_us, p99_us, client_cpu_seconds, and
 * server_cpu_seconds (user + system, all threads) with --server-pid, and errors, an object: the
 * datagrams sent again. Any other error goes to stderr and ends the program, status 1.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <netinet/tcp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum {
    RECEIVE_BYTES = 256 * 1024,
    EVENTS = 256,
    STALL_MS = 10000,   /* no reply for so long: the server hangs */
    RESEND_MS = 100,    /* a datagram not answered by then is lost: a reply takes less than 1 ms */
    HEADER_BYTES = 8,   /* a datagram's number */
    DATAGRAM_BYTES = 65507,
    SOURCES = 60000,    /* addresses that connections come from in turn */
    SUB_BUCKETS = 128,  /* per power of two: latencies are kept to 0.8 % */
    BUCKETS = 64 * SUB_BUCKETS,
};

enum transport { NONE, TCP, UNIX, UDP };

struct options {
    enum transport transport;
    int port;
    const char *path;
    bool churn;
    int connections;
    size_t size;
    double warmup, seconds;
    pid_t server_pid;
    bool hold;
};

struct connection {
    int fd;
    bool active;       /* a message is in flight */
    bool waits_to_send;
    size_t sent, received;
    uint64_t started_ns;
    uint64_t datagram;  /* the number of the one in flight */
    uint64_t sent_ns;   /* when it was sent, the last time */
};

struct phase {
    bool verify;
    uint64_t deadline_ns;
    uint64_t messages, resent;
    int active;
    uint64_t histogram[BUCKETS];
};

static struct options options = {.connections = 1, .size = 1024, .warmup = 0.5, .seconds = 1.0};
static struct connection *connections;
static struct phase phase;
static unsigned char *message;
static unsigned char reply[RECEIVE_BYTES];
static int epoll_fd;

static void die(const char *format, ...)
{
    va_list arguments;

    va_start(arguments, format);
    fputs("load: ", stderr);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    exit(1);
}

static uint64_t clock_ns(clockid_t clock)
{
    struct timespec time;

    if (clock_gettime(clock, &time) != 0)
        die("clock_gettime: %s (has the server ended?)", strerror(errno));
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

/* CPU time of the server, all its threads; 0 when no process was named. */
static uint64_t server_cpu_ns(void)
{
    clockid_t clock;
    int error;

    if (options.server_pid == 0)
        return 0;
    error = clock_getcpuclockid(options.server_pid, &clock);
    if (error != 0)
        die("no CPU clock of process %d: %s", (int)options.server_pid, strerror(error));
    return clock_ns(clock);
}

/* A latency's place in a histogram that is linear inside each power of two. */
static unsigned bucket_of(uint64_t ns)
{
    unsigned shift;

    if (ns < SUB_BUCKETS)
        return (unsigned)ns;
    shift = (unsigned)(63 - __builtin_clzll(ns)) - 7;
    return shift * SUB_BUCKETS + (unsigned)(ns >> shift);
}

/* The lowest latency, in ns, that falls into a bucket. */
static uint64_t bucket_floor(unsigned bucket)
{
    unsigned shift;

    if (bucket < 2 * SUB_BUCKETS)
        return bucket;
    shift = bucket / SUB_BUCKETS - 1;
    return (uint64_t)(bucket - shift * SUB_BUCKETS) << shift;
}

static double percentile_us(double share)
{
    uint64_t wanted = (uint64_t)(share * (double)phase.messages);
    uint64_t seen = 0;
    unsigned bucket;

    for (bucket = 0; bucket < BUCKETS - 1; bucket++) {
        seen += phase.histogram[bucket];
        if (seen > wanted)
            break;
    }
    return (double)bucket_floor(bucket) / 1e3;
}

/* A socket of the chosen kind; connections that come and go have addresses of their own. */
static int make_socket(void)
{
    struct sockaddr_in source = {.sin_family = AF_INET};
    static uint32_t sources;
    int type = options.transport == UDP ? SOCK_DGRAM : SOCK_STREAM;
    int fd = socket(options.transport == UNIX ? AF_UNIX : AF_INET, type | SOCK_CLOEXEC, 0);
    int one = 1;

    if (fd < 0)
        die("socket: %s", strerror(errno));
    if (options.transport == TCP)
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (options.transport == TCP && options.churn) {
        source.sin_addr.s_addr = htonl(INADDR_LOOPBACK + 1 + sources++ % SOURCES);
        setsockopt(fd, IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &one, sizeof one);
        if (bind(fd, (struct sockaddr *)&source, sizeof source) != 0)
            die("bind: %s", strerror(errno));
    }
    /* Before connect(2), where a connection is a message; otherwise it may block. */
    if (options.churn)
        fcntl(fd, F_SETFL, O_NONBLOCK);
    return fd;
}

static int connect_socket(void)
{
    struct sockaddr_in inet = {.sin_family = AF_INET, .sin_port = htons((uint16_t)options.port),
                               .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct sockaddr_un local = {.sun_family = AF_UNIX};
    int fd = make_socket(), error;

    if (options.transport == UNIX) {
        if (strlen(options.path) >= sizeof local.sun_path)
            die("the path of the Unix socket is too long: %s", options.path);
        strcpy(local.sun_path, options.path);
        error = connect(fd, (struct sockaddr *)&local, sizeof local);
    } else {
        error = connect(fd, (struct sockaddr *)&inet, sizeof inet);
    }
    if (error != 0 && errno != EINPROGRESS)
        die("connect: %s", strerror(errno));
    fcntl(fd, F_SETFL, O_NONBLOCK);
    return fd;
}

static void open_connection(struct connection *connection)
{
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = connection};

    connection->fd = connect_socket();
    connection->waits_to_send = false;
    if (epoll_ctl(epoll_fd, EPOLL_CTL_ADD, connection->fd, &event) != 0)
        die("epoll_ctl: %s", strerror(errno));
}

/* Ask for EPOLLOUT only while a send is cut short: in the common case epoll_ctl is never called. */
static void watch(struct connection *connection, bool waits_to_send)
{
    struct epoll_event event = {.data.ptr = connection};

    if (connection->waits_to_send == waits_to_send)
        return;
    connection->waits_to_send = waits_to_send;
    event.events = waits_to_send ? EPOLLIN | EPOLLOUT : EPOLLIN;
    if (epoll_ctl(epoll_fd, EPOLL_CTL_MOD, connection->fd, &event) != 0)
        die("epoll_ctl: %s", strerror(errno));
}

static void push(struct connection *connection)
{
    while (connection->sent < options.size) {
        ssize_t count = send(connection->fd, message + connection->sent,
                             options.size - connection->sent, MSG_NOSIGNAL);
        if (count < 0 && errno == EINTR)
            continue;
        if (count < 0 && errno == EAGAIN)
            break;
        if (count < 0)
            die("send: %s", strerror(errno));
        connection->sent += (size_t)count;
    }
    watch(connection, connection->sent < options.size);
}

static void send_datagram(struct connection *connection, uint64_t now_ns)
{
    struct iovec parts[] = {{&connection->datagram, HEADER_BYTES},
                            {message + HEADER_BYTES, options.size - HEADER_BYTES}};
    struct msghdr header = {.msg_iov = parts, .msg_iovlen = 2};

    /* EAGAIN is a datagram lost before it left: it is sent again like any other. */
    if (sendmsg(connection->fd, &header, 0) < 0 && errno != EAGAIN && errno != EINTR)
        die("sendmsg: %s", strerror(errno));
    connection->sent_ns = now_ns;
}

static void start_message(struct connection *connection, uint64_t now_ns)
{
    connection->sent = 0;
    connection->received = 0;
    connection->started_ns = now_ns;
    if (options.churn)
        open_connection(connection);
    if (options.transport == UDP) {
        connection->datagram++;
        send_datagram(connection, now_ns);
    } else {
        push(connection);
    }
}

static void finish_message(struct connection *connection)
{
    uint64_t now_ns = clock_ns(CLOCK_MONOTONIC);

    phase.histogram[bucket_of(now_ns - connection->started_ns)]++;
    phase.messages++;
    if (now_ns < phase.deadline_ns) {
        start_message(connection, now_ns);
    } else {
        connection->active = false;
        phase.active--;
    }
}

static void pull_datagram(struct connection *connection, size_t count)
{
    uint64_t number;

    if (count != options.size)
        die("the server sent %zu bytes back, not %zu", count, options.size);
    memcpy(&number, reply, HEADER_BYTES);
    if (number > connection->datagram)
        die("the server answered what it was not sent");
    if (number < connection->datagram || !connection->active)
        return;
    if (phase.verify && memcmp(reply + HEADER_BYTES, message + HEADER_BYTES,
                               count - HEADER_BYTES) != 0)
        die("the server sent other bytes than it was sent");
    finish_message(connection);
}

/* Datagrams without an answer, once more. */
static void send_again(void)
{
    uint64_t now_ns = clock_ns(CLOCK_MONOTONIC);

    for (int i = 0; i < options.connections; i++) {
        struct connection *connection = &connections[i];
        if (!connection->active || now_ns - connection->sent_ns < RESEND_MS * 1000000ull)
            continue;
        if (now_ns - connection->started_ns > STALL_MS * 1000000ull)
            die("no reply within %d s, however often it was asked", STALL_MS / 1000);
        phase.resent++;
        send_datagram(connection, now_ns);
    }
}

/* The echo is complete, and so is the connection when the server has closed it as well. */
static void close_connection(struct connection *connection)
{
    if (connection->received < options.size)
        die("the server closed a connection");
    close(connection->fd);
    finish_message(connection);
}

static void pull(struct connection *connection)
{
    ssize_t count = recv(connection->fd, reply, sizeof reply, 0);

    if (count < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (count < 0)
        die("recv: %s", strerror(errno));
    if (options.transport == UDP) {
        pull_datagram(connection, (size_t)count);
        return;
    }
    if (count == 0 && options.churn) {
        close_connection(connection);
        return;
    }
    if (count == 0)
        die("the server closed a connection");
    if (!connection->active || connection->received + (size_t)count > connection->sent)
        die("the server sent more bytes than it was sent");
    if (phase.verify && memcmp(reply, message + connection->received, (size_t)count) != 0)
        die("the server sent other bytes than it was sent");
    connection->received += (size_t)count;
    if (connection->received < options.size)
        return;
    if (!options.churn)
        finish_message(connection);
    else if (shutdown(connection->fd, SHUT_WR) != 0)
        die("shutdown: %s", strerror(errno));
}

static void run_phase(double seconds, bool verify)
{
    struct epoll_event events[EVENTS];
    uint64_t now_ns = clock_ns(CLOCK_MONOTONIC);

    memset(&phase, 0, sizeof phase);
    phase.verify = verify;
    phase.deadline_ns = now_ns + (uint64_t)(seconds * 1e9);
    phase.active = options.connections;
    for (int i = 0; i < options.connections; i++) {
        connections[i].active = true;
        start_message(&connections[i], clock_ns(CLOCK_MONOTONIC));
    }
    while (phase.active > 0) {
        bool datagrams = options.transport == UDP;
        int count = epoll_wait(epoll_fd, events, EVENTS, datagrams ? RESEND_MS : STALL_MS);
        if (count < 0 && errno != EINTR)
            die("epoll_wait: %s", strerror(errno));
        if (datagrams)
            send_again();
        else if (count == 0)
            die("no reply within %d s: %d of %d connections wait", STALL_MS / 1000,
                phase.active, options.connections);
        for (int i = 0; i < count; i++) {
            struct connection *connection = events[i].data.ptr;
            if (events[i].events & EPOLLOUT)
                push(connection);
            if (events[i].events & ~(uint32_t)EPOLLOUT)
                pull(connection);
        }
    }
}

static void open_connections(void)
{
    connections = calloc((size_t)options.connections, sizeof *connections);
    message = malloc(options.size);
    epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    if (connections == NULL || message == NULL || epoll_fd < 0)
        die("out of memory or descriptors");
    /* Bytes that tell their place, so that a misplaced or stale block is noticed. */
    for (size_t i = 0; i < options.size; i++)
        message[i] = (unsigned char)(i * 31 + (i >> 8) * 7 + (i >> 16));
    for (int i = 0; i < options.connections && !options.churn; i++)
        open_connection(&connections[i]);
}

static void measure(void)
{
    uint64_t server_ns = server_cpu_ns();
    uint64_t client_ns = clock_ns(CLOCK_PROCESS_CPUTIME_ID);
    uint64_t start_ns = clock_ns(CLOCK_MONOTONIC);
    double seconds;

    run_phase(options.seconds, false);
    seconds = (double)(clock_ns(CLOCK_MONOTONIC) - start_ns) / 1e9;
    client_ns = clock_ns(CLOCK_PROCESS_CPUTIME_ID) - client_ns;
    server_ns = server_cpu_ns() - server_ns;
    printf("{\"messages\": %llu, \"seconds\": %.6f, \"p50_us\": %.2f, \"p99_us\": %.2f, "
           "\"client_cpu_seconds\": %.6f, \"server_cpu_seconds\": %.6f, \"errors\": {",
           (unsigned long long)phase.messages, seconds, percentile_us(0.50), percentile_us(0.99),
           (double)client_ns / 1e9, (double)server_ns / 1e9);
    if (phase.resent != 0)
        printf("\"resent\": %llu", (unsigned long long)phase.resent);
    puts("}}");
    fflush(stdout);
}

static double number(const char *name, const char *text, double least, double most)
{
    char *end;
    double value = strtod(text, &end);

    if (*text == '\0' || *end != '\0' || !(value >= least && value <= most))
        die("--%s wants a number from %g to %g, not '%s'", name, least, most, text);
    return value;
}

static void use_port(enum transport transport, const char *name)
{
    options.transport = transport;
    options.port = (int)number(name, optarg, 1, 65535);
}

static void parse_options(int argc, char **argv)
{
    static const struct option names[] = {
        {"tcp", required_argument, NULL, 't'},     {"unix", required_argument, NULL, 'u'},
        {"udp", required_argument, NULL, 'g'},     {"churn", no_argument, NULL, 'o'},
        {"connections", required_argument, NULL, 'c'}, {"size", required_argument, NULL, 's'},
        {"warmup", required_argument, NULL, 'w'},  {"seconds", required_argument, NULL, 'd'},
        {"server-pid", required_argument, NULL, 'p'}, {"hold", no_argument, NULL, 'h'}, {0},
    };
    int letter;

    while ((letter = getopt_long(argc, argv, "", names, NULL)) != -1) {
        switch (letter) {
        case 't': use_port(TCP, "tcp"); break;
        case 'g': use_port(UDP, "udp"); break;
        case 'u': options.transport = UNIX, options.path = optarg; break;
        case 'o': options.churn = true; break;
        case 'c': options.connections = (int)number("connections", optarg, 1, 1e6); break;
        case 's': options.size = (size_t)number("size", optarg, 1, 1 << 30); break;
        case 'w': options.warmup = number("warmup", optarg, 0, 3600); break;
        case 'd': options.seconds = number("seconds", optarg, 0.01, 3600); break;
        case 'p': options.server_pid = (pid_t)number("server-pid", optarg, 1, 1 << 30); break;
        case 'h': options.hold = true; break;
        default: exit(1);
        }
    }
    if (options.transport == NONE || (options.port != 0 && options.path != NULL) || optind != argc)
        die("give one of --tcp PORT, --unix PATH and --udp PORT, and nothing else");
    if (options.transport == UDP && (options.churn || options.size < HEADER_BYTES
                                     || options.size > DATAGRAM_BYTES))
        die("a datagram has %d to %d bytes and no connection", HEADER_BYTES, DATAGRAM_BYTES);
}

int main(int argc, char **argv)
{
    char line[16];

    parse_options(argc, argv);
    open_connections();
    run_phase(options.warmup, true);
    if (options.hold) {
        puts("ready");
        fflush(stdout);
        if (fgets(line, sizeof line, stdin) == NULL)
            return 1;
    }
    measure();
    while (options.hold && fgets(line, sizeof line, stdin) != NULL)
        ;
    return 0;
}
