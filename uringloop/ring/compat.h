/* Names an older liburing or libc lacks, and the few helpers that must be C.
 *
 * Everything here is static inline or static: the header belongs to the one extension module.
 */
#ifndef URINGLOOP_COMPAT_H
#define URINGLOOP_COMPAT_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>
#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#include <liburing.h>

#ifndef IORING_RECV_MULTISHOT
#error "uringloop needs liburing 2.3 or newer (multishot receive); found an older liburing.h"
#endif

/* Zero-copy sends whose notification says whether the kernel has copied, Linux 6.2. */
#ifndef IORING_SEND_ZC_REPORT_USAGE
#define IORING_SEND_ZC_REPORT_USAGE (1U << 3)
#endif

/* epoll_pwait2(2), Linux 5.11. The number is the same on every architecture but alpha. */
#ifndef SYS_epoll_pwait2
#define SYS_epoll_pwait2 441
#endif

/* Cython knows errno as a value only. */
static inline void uringloop_set_errno(int error)
{
	errno = error;
}

static inline int64_t uringloop_monotonic_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Waits with the clock's full resolution. timeout_ns < 0 waits for ever.
 * Returns the number of events, or -errno; -ENOSYS where the kernel lacks the call.
 */
static inline int uringloop_epoll_pwait2(int epoll_fd, struct epoll_event *events,
					 int count, int64_t timeout_ns)
{
	struct __kernel_timespec timeout;
	long ready;

	timeout.tv_sec = timeout_ns / 1000000000;
	timeout.tv_nsec = timeout_ns % 1000000000;
	ready = syscall(SYS_epoll_pwait2, epoll_fd, events, count,
			timeout_ns < 0 ? NULL : &timeout, NULL, 0);
	return ready < 0 ? -errno : (int)ready;
}

/* Fills a whole SQE: a field left over from the slot's last use would be read by the kernel. */
static inline void uringloop_prepare(struct io_uring_sqe *sqe, uint8_t opcode, int fd,
				     const void *address, uint32_t length,
				     uint64_t user_data)
{
	memset(sqe, 0, sizeof(*sqe));
	sqe->opcode = opcode;
	sqe->fd = fd;
	sqe->addr = (uint64_t)(uintptr_t)address;
	sqe->len = length;
	sqe->user_data = user_data;
}

/* The SQE at a place of the queue, of those that the kernel has not accepted. */
static inline struct io_uring_sqe *uringloop_queued(const struct io_uring *ring, unsigned place)
{
	unsigned at = IO_URING_READ_ONCE(*ring->sq.khead) + place;

	return &ring->sq.sqes[at & *ring->sq.kring_mask];
}

/* Forgets what is queued. Without SQPOLL the kernel reads the tail in io_uring_enter only. */
static inline void uringloop_unqueue(struct io_uring *ring)
{
	unsigned head = IO_URING_READ_ONCE(*ring->sq.khead);

	ring->sq.sqe_head = ring->sq.sqe_tail = head;
	IO_URING_WRITE_ONCE(*ring->sq.ktail, head);
}

static inline void uringloop_pause_ns(long nanoseconds)
{
	struct timespec pause = { 0, nanoseconds };

	nanosleep(&pause, NULL);
}

/* What poll32_events takes: the kernel reads its halves swapped on big-endian machines. */
static inline uint32_t uringloop_poll_events(uint32_t events)
{
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
	return events << 16 | events >> 16;
#else
	return events;
#endif
}

/* True when completions wait as task work for the next kernel entry (COOP_TASKRUN). */
static inline int uringloop_taskrun_pending(const struct io_uring *ring)
{
	return (IO_URING_READ_ONCE(*ring->sq.kflags) & IORING_SQ_TASKRUN) != 0;
}

/* True when completions are posted, wait as task work, or overflowed. */
static inline int uringloop_has_news(const struct io_uring *ring)
{
	unsigned waits = IORING_SQ_TASKRUN | IORING_SQ_CQ_OVERFLOW;

	return io_uring_cq_ready(ring) || (IO_URING_READ_ONCE(*ring->sq.kflags) & waits);
}

/* For threads that look at memory without the GIL. */
static inline int uringloop_is_set(const int *flag)
{
	return __atomic_load_n(flag, __ATOMIC_ACQUIRE);
}

static inline void uringloop_relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
	__builtin_ia32_pause();
#elif defined(__aarch64__)
	__asm__ volatile("yield" ::: "memory");
#endif
}

/* tests/proving puts faults in between. */
#ifdef URINGLOOP_PROVING
#include "disturb.h"
#define uringloop_submit disturb_submit
#else
#define uringloop_submit io_uring_submit
#endif

/* Counts forks in the child, fork(2) called from C included. A ring is shared memory: a child
 * that submits does so on its parent's ring, so every ring remembers the count of its creation.
 */
static unsigned uringloop_fork_count;

static void uringloop_forked(void)
{
	uringloop_fork_count++;
}

static inline int uringloop_watch_forks(void)
{
	return pthread_atfork(NULL, NULL, uringloop_forked);
}

#endif /* URINGLOOP_COMPAT_H */
