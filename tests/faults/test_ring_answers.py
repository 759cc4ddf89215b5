"""What the ring may answer to each request: the transient answers lose nothing at all, the fatal
ones end the connection that they are about, with their error, and no other."""

import asyncio
import errno
import random

import figures
import pytest
from workload import Workload

import uringloop
from uringloop import _core

pytestmark = pytest.mark.skipif(
    not hasattr(_core, "disturb_answer") or bool(uringloop.unavailable_reason()),
    reason="needs the proving build (make faults) and io_uring")
KINDS = ("io_uring",)

OPCODES = ("RECV", "SEND", "SENDMSG", "ACCEPT", "POLL_ADD", "ASYNC_CANCEL")
ERRORS = (
    "EINTR", "EAGAIN", "ECANCELED", "ENOBUFS", "ENOMEM", "ECONNRESET", "EPIPE", "ETIMEDOUT",
    "EHOSTUNREACH", "ENETDOWN", "ENETUNREACH", "EBADF", "EINVAL", "EIO", "EFAULT",
    "ECONNABORTED", "EMFILE", "ENFILE", "EALREADY", "ENOENT", "EOPNOTSUPP", "ENOTCONN",
    "ENOTSOCK", "EPERM", "EPROTO", "ECONNREFUSED", "EOVERFLOW", "ETIME")
RETRIED = {"EINTR", "EAGAIN", "ECANCELED"}
TINY = {"ring_entries": 2, "recv_buffers": 4, "recv_buffer_size": 256}


# The fewest requests of a kind that the workload makes; one of an accept serves many connections.
REQUESTS = {"ACCEPT": 1, "POLL_ADD": 3, "SENDMSG": 2}
ONE_IN = {"RECV": 20, "SEND": 8, "SENDMSG": 2}


def is_transient(opcode, error):
    """Whether an answer may cost nothing but another request."""
    if opcode in ("ACCEPT", "POLL_ADD", "ASYNC_CANCEL"):
        return True         # what they are for stays in the backlog, or is found by the call
    return error in RETRIED or (opcode == "RECV" and error == "ENOBUFS")


@pytest.fixture
def storm(loop_kind, contexts, errors, monkeypatch):
    """Runs the workload under the rules that are set; counts, and checks what never may be."""
    monkeypatch.setattr(asyncio.constants, "ACCEPT_RETRY_DELAY", 0.01)

    def run(rules, **options):
        loop = uringloop.new_event_loop(uringloop.LoopOptions(backend="io_uring", **options))
        loop.set_exception_handler(lambda loop, context: errors.append(context))
        try:
            outcome = loop.run_until_complete(asyncio.wait_for(
                disturbed(loop, rules), 30))
            assert loop.stats().buffers_lent == 0
        finally:
            faults = _core.disturb_nothing()
            loop.close()
        assert loop.stats().in_flight == loop.stats().operations == 0
        figures.count("io_uring", cases=1, faults=faults, connections=outcome.connections,
                      bytes=outcome.bytes)
        return outcome, faults

    async def disturbed(loop, rules):
        work = Workload(loop, contexts=contexts)
        for rule, arguments, chances in rules:
            rule(*arguments, **chances)
        return await work.run()

    return run


def names_the_error(outcome, number):
    """Whether somebody was told why; who serves TLS hears nothing before the handshake is over."""
    return number in outcome.errnos() or all("tls" in name for name, _ in outcome.failed)


def all_complete(outcome):
    return not outcome.failed and not outcome.errors


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("opcode", OPCODES)
def test_an_answer_is_transient_or_ends_its_own_connection(storm, opcode, error, errors, loop_kind):
    number = getattr(errno, error)
    chance = random.Random(f"{opcode} {error}")
    for _ in range(figures.repeats(1)):
        skip = chance.randrange(REQUESTS.get(opcode, 12))
        outcome, faults = storm([(_core.disturb_answer, (opcode, -number), {"skip": skip})])
        assert faults == 1
        if is_transient(opcode, error):
            assert all_complete(outcome)
            continue
        assert len(outcome.failed) <= faults
        assert names_the_error(outcome, number)
    assert opcode == "ACCEPT" or not errors
    for context in errors:
        assert context["exception"].errno == number


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("opcode", OPCODES)
def test_storms_of_transient_answers_lose_nothing(storm, opcode, error, errors, loop_kind):
    if not is_transient(opcode, error):
        pytest.skip("it ends connections")
    for seed in range(figures.repeats(1)):
        _core.disturb_seed(seed)
        rule = (_core.disturb_answer, (opcode, -getattr(errno, error)),
                {"times": 5} if opcode == "ACCEPT" else {"times": 100_000, "one_in": 2})
        outcome, faults = storm([rule])
        assert faults
        assert all_complete(outcome)
    assert opcode == "ACCEPT" or not errors


@pytest.mark.parametrize("error", ["ECONNRESET", "EPIPE", "ETIMEDOUT", "EHOSTUNREACH", "ENOMEM",
                                   "EIO", "EBADF"])
@pytest.mark.parametrize("opcode", ["RECV", "SEND", "SENDMSG"])
def test_storms_of_fatal_answers_end_no_other_connection(storm, opcode, error, loop_kind):
    number = getattr(errno, error)
    for seed in range(figures.repeats(2)):
        _core.disturb_seed(seed)
        rule = (_core.disturb_answer, (opcode, -number),
                {"times": 100_000, "one_in": ONE_IN[opcode]})
        outcome, faults = storm([rule])
        assert len(outcome.failed) <= faults
        assert names_the_error(outcome, number)


@pytest.mark.parametrize("tiny", [False, True], ids=["usual", "tiny"])
@pytest.mark.parametrize("most", [1, 2, 3, 7, 100, 1000, 4097])
def test_short_sends_lose_nothing(storm, most, tiny, loop_kind, errors):
    for seed in range(figures.repeats(1)):
        _core.disturb_seed(seed)
        often = {"times": 100_000, "one_in": 2}
        outcome, _ = storm([(_core.disturb_shorten, ("SEND", most), often),
                            (_core.disturb_shorten, ("SENDMSG", most), often)],
                           **(TINY if tiny else {}))
        assert all_complete(outcome)
    assert not errors


def test_sends_of_nothing_are_made_again(storm, loop_kind, errors):
    often = {"times": 100_000, "one_in": 2}
    outcome, _ = storm([(_core.disturb_answer, ("SEND", 0), often),
                        (_core.disturb_answer, ("SENDMSG", 0), often)])
    assert all_complete(outcome)
    assert not errors


@pytest.mark.parametrize("readahead", [False, True], ids=["usual", "readahead"])
def test_everything_at_once_on_a_tiny_ring_loses_nothing(storm, readahead, errors, loop_kind):
    for seed in range(figures.repeats(3)):
        _core.disturb_seed(seed)
        rules = [(_core.disturb_answer, (opcode, -getattr(errno, error)),
                  {"times": 100_000, "one_in": 12})
                 for opcode in ("RECV", "SEND", "SENDMSG") for error in sorted(RETRIED)]
        rules += [(_core.disturb_answer, ("RECV", -errno.ENOBUFS), {"times": 999, "one_in": 9}),
                  (_core.disturb_answer, ("POLL_ADD", -errno.ENOMEM), {"times": 999, "one_in": 9}),
                  (_core.disturb_answer, ("ASYNC_CANCEL", -errno.EALREADY),
                   {"times": 999, "one_in": 2}),
                  (_core.disturb_shorten, ("SEND", 5), {"times": 9999, "one_in": 3}),
                  (_core.disturb_refuse, (-errno.EAGAIN,), {"times": 9999, "one_in": 3})]
        outcome, _ = storm(rules, sock_readahead=readahead, **TINY)
        assert all_complete(outcome)
    assert not errors


# Zero-copy sends (the option send_zerocopy)

ZEROCOPY = ("SEND_ZC", "SENDMSG_ZC")
OFTEN = {"times": 100_000, "one_in": 2}


def storm_of(rule, *arguments, **chances):
    """The rule for both kinds of zero-copy sends."""
    return [(rule, (opcode, *arguments), chances or OFTEN) for opcode in ZEROCOPY]


@pytest.mark.parametrize("tiny", [False, True], ids=["usual", "tiny"])
@pytest.mark.parametrize(
    "error", ["EINTR", "EAGAIN", "ECANCELED", "ENOMEM", "ENOBUFS", "EOPNOTSUPP", "EINVAL"])
def test_zero_copy_sends_that_are_refused_are_made_again(storm, error, tiny, errors, loop_kind):
    for seed in range(figures.repeats(2)):
        _core.disturb_seed(seed)
        outcome, faults = storm(storm_of(_core.disturb_answer, -getattr(errno, error)),
                                send_zerocopy=4096, **(TINY if tiny else {}))
        assert faults
        assert all_complete(outcome)
    assert not errors


@pytest.mark.parametrize("error", ["ECONNRESET", "EPIPE", "ETIMEDOUT", "EIO", "EBADF", "EFAULT"])
def test_zero_copy_sends_that_fail_end_no_other_connection(storm, error, loop_kind):
    number = getattr(errno, error)
    for seed in range(figures.repeats(2)):
        _core.disturb_seed(seed)
        outcome, faults = storm(storm_of(_core.disturb_answer, -number, times=3, one_in=4),
                                send_zerocopy=4096)
        assert 0 < len(outcome.failed) <= faults
        assert names_the_error(outcome, number)


@pytest.mark.parametrize("most", [1, 100, 4095, 5000])
def test_short_zero_copy_sends_lose_nothing(storm, most, loop_kind, errors):
    for seed in range(figures.repeats(1)):
        _core.disturb_seed(seed)
        outcome, faults = storm(storm_of(_core.disturb_shorten, most), send_zerocopy=4096)
        assert faults
        assert all_complete(outcome)
    assert not errors


@pytest.mark.parametrize("tiny", [False, True], ids=["usual", "tiny"])
def test_the_kernel_refuses_zero_copy_sends_and_notifies(storm, tiny, loop_kind, errors):
    """The error has F_MORE here, and the notification follows."""
    for seed in range(figures.repeats(3)):
        _core.disturb_seed(seed)
        outcome, faults = storm(storm_of(_core.disturb_spoil), send_zerocopy=4096,
                                **(TINY if tiny else {}))
        assert faults
        assert all_complete(outcome)
    assert not errors


def test_zero_copy_sends_that_the_kernel_does_not_accept_are_made_again(storm, loop_kind, errors):
    for seed in range(figures.repeats(2)):
        _core.disturb_seed(seed)
        outcome, faults = storm(
            [(_core.disturb_refuse, (-errno.EAGAIN,), {"times": 9999, "one_in": 3})],
            send_zerocopy=4096, **TINY)
        assert faults
        assert all_complete(outcome)
    assert not errors
