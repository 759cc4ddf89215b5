"""Timers and callbacks from other threads: none early, none lost, none twice."""

import asyncio
import threading
import time

AT_ONCE = 20_000            # timers that wait
LONGEST_DELAY = 0.5         # seconds
THREADS = 2
BATCH = 200                 # callbacks a thread asks for at once


class Book:
    """What was asked for and what came."""

    def __init__(self, run, loop):
        self.run, self.loop = run, loop
        self.asked = self.fired = self.cancelled = 0
        self.early = self.after_cancel = 0
        self.latest = 0.0
        self.waiting = {}               # number: handle

    def ask(self):
        """One more timer, by call_later or call_at."""
        rng, number = self.run.rng, self.asked
        self.asked += 1
        delay = rng.choice((0.0, rng.uniform(0, 0.01), rng.uniform(0, LONGEST_DELAY)))
        due = self.loop.time() + delay
        if rng.random() < 0.5:
            self.waiting[number] = self.loop.call_at(due, self.fire, number, due)
        else:
            self.waiting[number] = self.loop.call_later(delay, self.fire, number, due)

    def fire(self, number, due):
        late = self.loop.time() - due
        self.early += late < 0
        self.latest = max(self.latest, late)
        self.after_cancel += self.waiting.pop(number, None) is None
        self.fired += 1

    def cancel(self, share):
        """Cancels some of those that wait, by chance."""
        for number in self.run.rng.sample(sorted(self.waiting), int(share * len(self.waiting))):
            self.waiting.pop(number).cancel()
            self.cancelled += 1


class Caller(threading.Thread):
    """Calls call_soon_threadsafe, in order."""

    def __init__(self, run, loop):
        super().__init__()
        self.run_, self.loop = run, loop
        self.sent = self.received = 0
        self.stopping = threading.Event()

    def run(self):
        while not self.stopping.is_set():
            for _ in range(BATCH):
                self.loop.call_soon_threadsafe(self.called, self.sent)
                self.sent += 1
            time.sleep(0.001)

    def called(self, number):
        if number != self.received:
            self.run_.fault(f"call_soon_threadsafe: callback {number} in place of "
                            f"{self.received}")
        self.received += 1


async def run(run):
    loop = asyncio.get_running_loop()
    book = Book(run, loop)
    callers = [Caller(run, loop) for _ in range(THREADS)]
    for caller in callers:
        caller.start()
    try:
        while run.left() > 0:
            for _ in range(min(AT_ONCE - len(book.waiting), 2_000)):
                book.ask()
            if run.rng.random() < 0.3:
                book.cancel(run.rng.uniform(0, 0.3))
            await asyncio.sleep(run.rng.choice((0, 0, 0.001, 0.01)))
    finally:
        for caller in callers:
            caller.stopping.set()
        for caller in callers:
            await asyncio.to_thread(caller.join)
    await _the_rest(book, callers)
    sent = sum(caller.sent for caller in callers)
    run.count("messages", book.fired + sent)
    run.figures["timers"] = (f"{book.asked:,} timers: {book.fired:,} fired, {book.cancelled:,} "
                             f"cancelled, latest {book.latest * 1e3:.0f} ms; "
                             f"{sent:,} calls from threads")


async def _the_rest(book, callers):
    run = book.run
    for _ in range(200):
        if not book.waiting and all(caller.sent == caller.received for caller in callers):
            break
        await asyncio.sleep(0.05)
    if book.asked != book.fired + book.cancelled:
        run.lost(len(book.waiting), f"{len(book.waiting)} timers of {book.asked}")
    for caller in callers:
        if caller.sent != caller.received:
            run.lost(caller.sent - caller.received, f"callbacks from a thread: {caller.received} "
                     f"of {caller.sent} came")
    if book.early:
        run.fault(f"{book.early} of {book.fired} timers came early")
    if book.after_cancel:
        run.fault(f"{book.after_cancel} timers came although cancelled, or twice")
