# What tests call to disturb the ring (disturb.h). Rules are the process's, as is the chance.

DISTURBABLE = {
    "SEND": liburing.IORING_OP_SEND, "SENDMSG": liburing.IORING_OP_SENDMSG,
    "SEND_ZC": liburing.IORING_OP_SEND_ZC, "SENDMSG_ZC": liburing.IORING_OP_SENDMSG_ZC,
    "RECV": liburing.IORING_OP_RECV, "ACCEPT": liburing.IORING_OP_ACCEPT,
    "POLL_ADD": liburing.IORING_OP_POLL_ADD, "ASYNC_CANCEL": liburing.IORING_OP_ASYNC_CANCEL,
}


cdef int add_rule(disturb.disturb_kind kind, uint8_t opcode, int32_t value, skip, times,
                  one_in) except -1:
    cdef disturb.disturb_rule *rule
    if disturb.disturb_rule_count == <unsigned>disturb.DISTURB_RULES:
        raise ValueError("too many rules")
    rule = &disturb.disturb_rules[disturb.disturb_rule_count]
    rule.kind = kind
    rule.opcode = opcode
    rule.value = value
    rule.skip = skip
    rule.times = times
    rule.one_in = one_in
    rule.done = 0
    disturb.disturb_rule_count += 1
    return 0


def disturb_answer(str opcode, int result, *, skip=0, times=1, one_in=1):
    """The kernel answers requests of this kind with `result`, without looking at them."""
    add_rule(disturb.DISTURB_ANSWER, DISTURBABLE[opcode], result, skip, times, one_in)


def disturb_shorten(str opcode, int most, *, skip=0, times=1, one_in=1):
    """A SEND, SENDMSG or one of their _ZC is made for at most so many bytes."""
    if not opcode.startswith("SEND"):
        raise ValueError("only sends can be made shorter")
    add_rule(disturb.DISTURB_SHORTEN, DISTURBABLE[opcode], most, skip, times, one_in)


def disturb_spoil(str opcode, *, skip=0, times=1, one_in=1):
    """The kernel itself refuses a request, as it does for a flag that it does not know: EINVAL."""
    add_rule(disturb.DISTURB_SPOIL, DISTURBABLE[opcode], 1 << 9, skip, times, one_in)


def disturb_refuse(int result, *, skip=0, times=1, one_in=1):
    """io_uring_submit() returns `result` (a negative errno) and submits nothing."""
    add_rule(disturb.DISTURB_REFUSE, 0, result, skip, times, one_in)


def disturb_seed(seed):
    """Begin the chance anew."""
    disturb.disturb_state = 2 * <uint64_t>seed + 88172645463325253u


def disturbed():
    """How often each rule was applied, in the order of their making."""
    return [disturb.disturb_rules[i].done for i in range(disturb.disturb_rule_count)]


def disturb_nothing():
    """Forget all rules. Returns how often they were applied in all."""
    count = sum(disturbed())
    disturb.disturb_rule_count = 0
    return count


def disturb_memory(first, count=1):
    """Let `count` of the engine's allocations of Python memory fail, beginning with that one."""
    disturb.disturb_memory_begin(first, first + count)


def undisturbed_memory():
    """No allocation fails any more. Returns how many the engine has made or tried to."""
    return disturb.disturb_memory_end()
