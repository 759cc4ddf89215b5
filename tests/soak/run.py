"""Run: one part of a scenario on one loop: its time, its dice, its counts, its faults."""

import asyncio
import collections
import random
import time

MANY_FAULTS = 20        # are enough to read


class NotRun(Exception):
    """The machine does not allow a scenario, and why."""


class Run:
    """What a scenario gets: `rng` is seeded; `left()` its time; `options` its sizes.

    counts: connections, messages, bytes, lost, timers and so on, added up over parts and processes.
    figures: {name: text} for the table. faults: texts; any fault fails the scenario.
    """

    def __init__(self, kind, seconds, seed, options=(), share=1.0):
        self.kind, self.seconds, self.seed, self.share = kind, seconds, seed, share
        self.unrest = 0                 # bytes that the allocator may keep, beyond the tolerance
        self.is_first = True            # nothing ran before: free memory is not ours
        self.options = dict(options)
        self.rng = random.Random(seed)
        self.counts = collections.Counter()
        self.figures = {}
        self.faults = []
        self.notes = []
        self._end = time.monotonic() + seconds
        self._keys = 0

    def left(self):
        """Seconds until the scenario is to come to its end; negative after."""
        return self._end - time.monotonic()

    def new_key(self):
        """The number of a connection, different for all of this process."""
        self._keys += 1
        return self._keys

    def count(self, what, number=1):
        self.counts[what] += number

    def fault(self, text):
        """Something is wrong: the check fails; the first of many are told."""
        self.counts["faults"] += 1
        if len(self.faults) < MANY_FAULTS:
            self.faults.append(text)

    def lost(self, number, text):
        """So many bytes, messages or calls never came."""
        self.counts["lost"] += number
        self.fault(f"lost: {text}")

    def note(self, text):
        """Something that the reader has to know, such as what could not be done here."""
        if text not in self.notes:
            self.notes.append(text)

    def handle_exception(self, loop, context):
        """The exception handler of the loop: nothing is expected there."""
        if (loop.get_debug() and isinstance(context.get("exception"), ConnectionError)
                and context["message"].startswith("Error on transport creation for incoming")):
            return      # a client that was gone before the handshake's end: told in debug mode
        self.fault(f"the exception handler was called: {context!r}"[:600])

    def as_json(self):
        return {"counts": dict(self.counts), "figures": self.figures, "faults": self.faults,
                "notes": self.notes}

    def add(self, other):
        """Adds what another process counted (its as_json())."""
        self.counts.update(other["counts"])
        self.figures.update(other["figures"])
        self.faults += other["faults"]
        for text in other["notes"]:
            self.note(text)


async def side_by_side(run, number, work):
    """Runs `await work()` again and again, `number` at once, until the time is over."""

    async def one():
        await work()
        while run.left() > 0:
            await work()

    async with asyncio.TaskGroup() as group:
        for _ in range(number):
            group.create_task(one())
