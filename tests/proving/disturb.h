/* Faults for the real ring: requests are changed right before they are submitted.
 *
 * Compiled into the proving build only. A rule answers a request with a chosen result (a NOP that
 * carries it, IORING_NOP_INJECT_RESULT, Linux 6.10), makes a send shorter, spoils it (EINVAL, of a
 * zero-copy send with its notification), or refuses the submit itself. Everything else is the product's own path: the kernel posts the completions.
 */
#ifndef URINGLOOP_DISTURB_H
#define URINGLOOP_DISTURB_H

#include <Python.h>
#include <dlfcn.h>
#include <execinfo.h>
#include <liburing.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>

#define DISTURB_NOP_INJECT_RESULT 1u
#define DISTURB_RULES 16

enum disturb_kind {
	DISTURB_NOTHING,
	DISTURB_ANSWER,		/* value: the result */
	DISTURB_SHORTEN,	/* value: the most bytes of a SEND, SENDMSG, or one of their _ZC */
	DISTURB_REFUSE,		/* value: what io_uring_submit() returns */
	DISTURB_SPOIL,		/* value: a flag in ioprio that the kernel does not know */
};

struct disturb_rule {
	enum disturb_kind kind;
	uint8_t opcode;
	int32_t value;
	uint32_t skip;		/* so many requests pass first */
	uint32_t times;		/* how many are disturbed before the rule is spent */
	uint32_t one_in;	/* and of those that come, one in so many, by chance */
	uint64_t done;
};

static struct disturb_rule disturb_rules[DISTURB_RULES];
static unsigned disturb_rule_count;
static uint64_t disturb_state = 88172645463325252u;

static inline uint32_t disturb_random(void)
{
	disturb_state ^= disturb_state << 13;
	disturb_state ^= disturb_state >> 7;
	disturb_state ^= disturb_state << 17;
	return (uint32_t)(disturb_state >> 32);
}

static inline int disturb_applies(struct disturb_rule *rule)
{
	if (!rule->times)
		return 0;
	if (rule->skip) {
		rule->skip--;
		return 0;
	}
	if (rule->one_in > 1 && disturb_random() % rule->one_in)
		return 0;
	rule->times--;
	rule->done++;
	return 1;
}

static inline void disturb_answer(struct io_uring_sqe *sqe, int32_t value)
{
	uint64_t user_data = sqe->user_data;

	memset(sqe, 0, sizeof(*sqe));
	sqe->opcode = IORING_OP_NOP;
	sqe->fd = -1;
	sqe->user_data = user_data;
	sqe->len = (uint32_t)value;
	sqe->rw_flags = (int)DISTURB_NOP_INJECT_RESULT;		/* the field nop_flags */
}

static inline void disturb_shorten(struct io_uring_sqe *sqe, uint32_t most)
{
	if (sqe->opcode == IORING_OP_SENDMSG || sqe->opcode == IORING_OP_SENDMSG_ZC) {
		struct msghdr *message = (struct msghdr *)(uintptr_t)sqe->addr;

		message->msg_iovlen = 1;
		if (message->msg_iov->iov_len > most)
			message->msg_iov->iov_len = most;
	} else if (sqe->len > most) {
		sqe->len = most;
	}
}

static inline void disturb_request(struct io_uring_sqe *sqe)
{
	unsigned i;

	for (i = 0; i < disturb_rule_count; i++) {
		struct disturb_rule *rule = &disturb_rules[i];

		if (rule->kind == DISTURB_REFUSE || rule->opcode != sqe->opcode ||
		    !disturb_applies(rule))
			continue;
		if (rule->kind == DISTURB_ANSWER)
			disturb_answer(sqe, rule->value);
		else if (rule->kind == DISTURB_SPOIL)
			sqe->ioprio |= (uint16_t)rule->value;
		else
			disturb_shorten(sqe, (uint32_t)rule->value);
		return;
	}
}

static inline int disturb_submit(struct io_uring *ring)
{
	/* What an earlier, refused submit has shown the kernel is out of reach. */
	unsigned at, mask = *ring->sq.kring_mask, i;

	for (i = 0; i < disturb_rule_count; i++)
		if (disturb_rules[i].kind == DISTURB_REFUSE && disturb_applies(&disturb_rules[i]))
			return disturb_rules[i].value;
	for (at = ring->sq.sqe_head; at != ring->sq.sqe_tail; at++)
		disturb_request(&ring->sq.sqes[at & mask]);
	return io_uring_submit(ring);
}

/* Allocations of Python's that fail, but only those that the engine makes: on the stack, its code
 * comes before the interpreter's loop and before any other library. Python's own code would not
 * survive it (_testcapi.set_nomemory() crashes asyncio).
 */
#define DISTURB_DEPTH 24

static PyMemAllocatorEx disturb_allocators[3];
static int disturb_memory_on;
static uint64_t disturb_allocations, disturb_fail_from, disturb_fail_until;
static void *disturb_own_base, *disturb_python_base;

/* Python code; and tracebacks: the code that Cython makes of `except` crashes without one. */
static int disturb_is_exempt(const char *name)
{
	return name && (strstr(name, "EvalFrame") || !strcmp(name, "PyTraceBack_Here") ||
			!strcmp(name, "PyCode_NewEmpty") || !strcmp(name, "PyFrame_New") ||
			strstr(name, "PyUnicode_FromFormat"));
}

static int disturb_is_engines(void)
{
	static __thread int inside;
	void *frames[DISTURB_DEPTH];
	Dl_info where;
	int count, i, found = 0;

	if (inside)		/* backtrace() may allocate once */
		return 0;
	inside = 1;
	count = backtrace(frames, DISTURB_DEPTH);
	/* The first two of ours are this function and the hook that calls it; AddressSanitizer's
	 * own backtrace() stands above them.
	 */
	for (i = 0; i < count; i++)
		if (dladdr(frames[i], &where) && where.dli_fbase == disturb_own_base)
			break;
	for (i += 2; i < count; i++) {
		if (!dladdr(frames[i], &where))
			break;
		if (where.dli_fbase == disturb_own_base) {
			found = 1;
			break;
		}
		if (where.dli_fbase != disturb_python_base || disturb_is_exempt(where.dli_sname))
			break;
	}
	inside = 0;
	return found;
}

static int disturb_fails(void)
{
	uint64_t number;

	if (!disturb_memory_on || !disturb_is_engines())
		return 0;
	number = disturb_allocations++;
	return number >= disturb_fail_from && number < disturb_fail_until;
}

static __attribute__((noinline)) void *disturb_malloc(void *context, size_t size)
{
	PyMemAllocatorEx *real = context;

	return disturb_fails() ? NULL : real->malloc(real->ctx, size);
}

static __attribute__((noinline)) void *disturb_calloc(void *context, size_t count, size_t size)
{
	PyMemAllocatorEx *real = context;

	return disturb_fails() ? NULL : real->calloc(real->ctx, count, size);
}

static __attribute__((noinline)) void *disturb_realloc(void *context, void *memory, size_t size)
{
	PyMemAllocatorEx *real = context;

	return disturb_fails() ? NULL : real->realloc(real->ctx, memory, size);
}

static void disturb_free(void *context, void *memory)
{
	PyMemAllocatorEx *real = context;

	real->free(real->ctx, memory);
}

static void disturb_memory_begin(uint64_t from, uint64_t until)
{
	static const PyMemAllocatorDomain domains[3] = {
		PYMEM_DOMAIN_RAW, PYMEM_DOMAIN_MEM, PYMEM_DOMAIN_OBJ };
	Dl_info where;
	int i;

	if (!disturb_own_base) {
		dladdr((void *)disturb_memory_begin, &where);
		disturb_own_base = where.dli_fbase;
		dladdr((void *)PyObject_Malloc, &where);
		disturb_python_base = where.dli_fbase;
		for (i = 0; i < 3; i++) {
			PyMemAllocatorEx hook = { &disturb_allocators[i], disturb_malloc,
						  disturb_calloc, disturb_realloc, disturb_free };

			PyMem_GetAllocator(domains[i], &disturb_allocators[i]);
			PyMem_SetAllocator(domains[i], &hook);
		}
	}
	disturb_allocations = 0;
	disturb_fail_from = from;
	disturb_fail_until = until;
	disturb_memory_on = 1;
}

static uint64_t disturb_memory_end(void)
{
	disturb_memory_on = 0;
	return disturb_allocations;
}

#endif /* URINGLOOP_DISTURB_H */
