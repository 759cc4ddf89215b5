/* Faults for the real ring: requests are changed right before they are submitted.
 *
 * Compiled into the proving build only. A rule answers a request with a chosen result (a NOP that
 * carries it, IORING_NOP_INJECT_RESULT, Linux 6.10), makes a send shorter, or refuses the submit
 * itself. Everything else is the product's own path: the kernel posts the completions.
 */
#ifndef URINGLOOP_DISTURB_H
#define URINGLOOP_DISTURB_H

#define DISTURB_NOP_INJECT_RESULT 1u
#define DISTURB_RULES 16

enum disturb_kind {
	DISTURB_NOTHING,
	DISTURB_ANSWER,		/* value: the result */
	DISTURB_SHORTEN,	/* value: the most bytes of a SEND or SENDMSG */
	DISTURB_REFUSE,		/* value: what io_uring_submit() returns */
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
	if (sqe->opcode == IORING_OP_SENDMSG) {
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

#endif /* URINGLOOP_DISTURB_H */
