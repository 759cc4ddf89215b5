"""What the models share: streams whose bytes tell their place, running a loop in all ways."""

import contextlib
import logging
import os
import threading
import time

import figures
from helpers import LIMIT, assert_same, make_loop, pattern, run_once
from hypothesis import HealthCheck, given, settings

STREAM_LIMIT = 4 << 20
CONTENTS = tuple(pattern(STREAM_LIMIT, seed) for seed in range(6))

# How a turn runs the loop after its steps.
WAYS = ("once", "few", "quiet", "not", "thread")


class Planned(Exception):
    """Raised by a callback because the program says so."""


class Stream:
    """One direction of one connection: its bytes tell which it is, and where they belong."""

    def __init__(self, number):
        self.content = CONTENTS[number]
        self.sent = 0       # handed to the sending side
        self.got = 0        # delivered at the other

    def next(self, size):
        """The next bytes to send, counted as sent."""
        start = self.sent
        self.sent = min(start + size, STREAM_LIMIT)
        return self.content[start:self.sent]

    def check(self, data):
        """Every byte once and in order; counts them as delivered."""
        start, self.got = self.got, self.got + len(data)
        assert_same(data, self.content[start:self.got])
        assert self.got <= self.sent, f"{self.got} bytes delivered of {self.sent} sent"


class Machine:
    """One loop and what the callbacks of its connections reported; runs it in all ways."""

    patience = LIMIT

    def __init__(self, kind, options):
        self.kind = kind
        self.ours = kind in ("io_uring", "epoll")
        self.activity = 0           # raised by every callback
        self.raised = []            # what callbacks raised, and the exception handler shall see
        self.contexts = []
        self.failures = []          # assertions that failed in callbacks
        self.fds = len(os.listdir("/proc/self/fd"))
        self.loop = make_loop(kind, **options)
        self.loop.set_exception_handler(lambda loop, context: self.contexts.append(context))

    def fail(self, message):
        """Note what is wrong; raised out of the loop, where nothing may swallow it."""
        self.failures.append(message)

    def run(self, way):
        if way == "once":
            self.iterate()
        elif way == "few":
            for _ in range(3):
                self.iterate()
        elif way == "quiet":
            self.run_until_quiet()
        elif way == "thread":
            thread = threading.Thread(target=self.run_until_quiet)
            thread.start()
            thread.join(LIMIT)
            assert not thread.is_alive(), "the loop hangs in its thread"
        self.check_failures()

    def iterate(self):
        """One iteration, out of which a KeyboardInterrupt may come that the program asked for."""
        try:
            run_once(self.loop)
        except KeyboardInterrupt:
            self.activity += 1

    def run_until_quiet(self):
        idle = 0
        for _ in range(20):
            before = self.activity
            self.iterate()
            idle = idle + 1 if self.activity == before else 0
            if idle == 3:
                break

    def run_until(self, condition, connections):
        """Iterate until it holds for all; what never comes is a failure."""
        limit = time.monotonic() + Machine.patience
        for count in range(1 << 30):
            self.iterate()
            self.check_failures()
            if all([condition(each) for each in connections]):
                return
            if count > 20:
                if time.monotonic() > limit:
                    Machine.patience = 0.2      # the failure is found; now it is made shorter
                    raise AssertionError(f"what was to come never came: {connections}")
                time.sleep(0.0005)

    def check_failures(self):
        assert not self.failures, self.failures[0]

    def finish(self):
        """Nothing is left: in the kernel, in the engine, in the exception handler."""
        for _ in range(3):
            self.iterate()
        if self.ours:
            # Of what a thread sent that has ended, a worker of the kernel's gives the memory back.
            self.run_until(lambda loop: not loop.stats().zerocopy_pending, [self.loop])
            stats = self.loop.stats()
            left = stats.in_flight, stats.operations, stats.buffers_lent
            assert left == (0, 0, 0), f"(in_flight, operations, buffers_lent) are {left}"
        self.loop.close()
        self.check_failures()
        seen = [context.get("exception") for context in self.contexts]
        assert seen == self.raised, f"the exception handler: {self.contexts}"
        left = len(os.listdir("/proc/self/fd")) - self.fds
        # Fewer: what an example that failed had left is collected meanwhile.
        assert left <= 0, f"{left} descriptors are left"

    def abandon(self):
        """After a failure: end what would disturb the next example."""
        if not self.loop.is_closed():
            self.loop.close()


def perform(ends, steps):
    """Do each step's action at its end."""
    for number, action in steps:
        # An interrupt that the program asked for, where it came out of a call of the end's own.
        with contextlib.suppress(KeyboardInterrupt):
            ends[number % len(ends)].do(action)


def play(machine, ends, turns):
    """Make the steps of each turn, inside a callback of the loop or outside, and run the loop."""
    for way, inside, steps in turns:
        if inside and way != "not":
            machine.loop.call_soon(perform, ends, steps)
        else:
            perform(ends, steps)
        machine.run(way)


@contextlib.contextmanager
def counted(kind, machine, ends):
    """Around the play of a program: lets go of everything after a failure too, and counts."""
    try:
        yield
    finally:
        for each in ends:
            each.give_up()
        machine.abandon()
    figures.count(kind, cases=1, connections=len(ends),
                  bytes=sum(each.input.got + each.output.got for each in ends))


def explore(request, strategy, usual, run):
    """Show `run` as many programs of the strategy as wanted; reproducible unless seeded."""
    shown, found = 0, []
    Machine.patience = LIMIT
    chosen = request.config.getoption("--hypothesis-seed", None)

    @settings(max_examples=figures.examples(usual), deadline=None, database=None,
              derandomize=chosen is None, report_multiple_bugs=False,
              suppress_health_check=list(HealthCheck))
    @given(strategy)
    def example(program):
        nonlocal shown
        shown += 1
        try:
            run(program)
        except BaseException as exc:
            found.append(shown)
            exc.add_note(f"(found by example {found[0]}, made shorter in {shown - found[0]} steps)")
            raise

    logger = logging.getLogger("asyncio")       # writes to lost connections are many
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        example()
    finally:
        logger.setLevel(level)
