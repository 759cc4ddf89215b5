"""What `python -m benchmarks micro` measures: one operation of a loop each, without network.

A case is entered once in the measured process, which gives a function that does so many repeats;
what it needs for that (pipes, threads) is set up outside of what is measured.
"""

import asyncio
import os
import shutil
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

Repeat = Callable[[int], Awaitable[object]]
"""Does an operation so many times."""

BATCH = 1000
CHILDREN = 100
PIPES = 100
QUEUE_LENGTH = 10
TIMEOUT_SECONDS = 60.0


@dataclass(frozen=True)
class MicroCase:
    """One operation: `what` says it in words, `operations` is how many one repeat does."""

    name: str
    what: str
    enter: Callable[[], AbstractAsyncContextManager[Repeat]]
    operations: int = 1


CASES: dict[str, MicroCase] = {}


def case(name: str, what: str, operations: int = 1) -> Callable[[Repeat], Repeat]:
    """Register a coroutine function as a case that needs no setup."""

    def register(repeat: Repeat) -> Repeat:
        @asynccontextmanager
        async def enter() -> AsyncIterator[Repeat]:
            yield repeat

        CASES[name] = MicroCase(name, what, enter, operations)
        return repeat

    return register


def nothing() -> None:
    """The callback of every case: what it costs is the loop's part."""


async def nothing_async() -> None:
    """The coroutine of every case."""


@case("call_soon-chain", "a callback that schedules the next one")
async def call_soon_chain(repeats: int) -> None:
    loop = asyncio.get_running_loop()
    done = loop.create_future()

    def step() -> None:
        nonlocal repeats
        repeats -= 1
        if repeats:
            loop.call_soon(step)
        else:
            done.set_result(None)

    loop.call_soon(step)
    await done


@case("call_soon-batch", f"a callback out of {BATCH} scheduled at once", BATCH)
async def call_soon_batch(repeats: int) -> None:
    call_soon = asyncio.get_running_loop().call_soon
    for _ in range(repeats):
        for _ in range(BATCH):
            call_soon(nothing)
        await asyncio.sleep(0)


@case("call_later-cancel", f"call_later() in {TIMEOUT_SECONDS:g} s and cancel()", BATCH)
async def call_later_cancel(repeats: int) -> None:
    call_later = asyncio.get_running_loop().call_later
    for _ in range(repeats):
        for _ in range(BATCH):
            call_later(TIMEOUT_SECONDS, nothing).cancel()
        await asyncio.sleep(0)  # where a loop tidies its timers up


@case("task-step", "sleep(0) in a task")
async def task_step(repeats: int) -> None:
    for _ in range(repeats):
        await asyncio.sleep(0)


@case("future-wakeup", "create_future(), call_soon(set_result), await")
async def future_wakeup(repeats: int) -> None:
    loop = asyncio.get_running_loop()
    for _ in range(repeats):
        future = loop.create_future()
        loop.call_soon(future.set_result, None)
        await future


@case("create_task", "create_task() of an empty coroutine, await")
async def create_task(repeats: int) -> None:
    loop = asyncio.get_running_loop()
    for _ in range(repeats):
        await loop.create_task(nothing_async())


@case("gather", f"one of {CHILDREN} empty coroutines in gather()", CHILDREN)
async def gather(repeats: int) -> None:
    for _ in range(repeats):
        await asyncio.gather(*(nothing_async() for _ in range(CHILDREN)))


@case("wait_for", f"wait_for(sleep(0), {TIMEOUT_SECONDS:g})")
async def wait_for(repeats: int) -> None:
    for _ in range(repeats):
        await asyncio.wait_for(asyncio.sleep(0), TIMEOUT_SECONDS)


@case("queue", f"an item through asyncio.Queue({QUEUE_LENGTH}), between two tasks")
async def queue(repeats: int) -> None:
    items: asyncio.Queue[int] = asyncio.Queue(QUEUE_LENGTH)

    async def produce() -> None:
        for number in range(repeats):
            await items.put(number)

    producer = asyncio.get_running_loop().create_task(produce())
    for _ in range(repeats):
        await items.get()
    await producer


@case("executor", "run_in_executor() of an empty function, await")
async def executor(repeats: int) -> None:
    loop = asyncio.get_running_loop()
    for _ in range(repeats):
        await loop.run_in_executor(None, nothing)


@case("call_soon_threadsafe", "a callback scheduled by another thread that does nothing else")
async def call_soon_threadsafe(repeats: int) -> None:
    loop = asyncio.get_running_loop()
    done = loop.create_future()
    left = repeats

    def called() -> None:
        nonlocal left
        left -= 1
        if not left:
            done.set_result(None)

    def schedule() -> None:
        for _ in range(repeats):
            loop.call_soon_threadsafe(called)

    thread = threading.Thread(target=schedule)
    thread.start()
    await done
    thread.join()


@case("subprocess", "create_subprocess_exec('true'), wait()")
async def subprocess(repeats: int) -> None:
    program = shutil.which("true")
    assert program is not None
    for _ in range(repeats):
        process = await asyncio.create_subprocess_exec(program)
        assert await process.wait() == 0


class PipeRing:
    """Pipes in a ring: who reads a byte from one writes it to the next, so all stay readable."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._left = 0
        self._pipes = [os.pipe() for _ in range(PIPES)]
        for number, (reading, _) in enumerate(self._pipes):
            following = self._pipes[(number + 1) % PIPES][1]
            loop.add_reader(reading, self._readable, reading, following)

    def close(self) -> None:
        """Take the pipes off the loop and close them."""
        for reading, writing in self._pipes:
            self._loop.remove_reader(reading)
            os.close(reading)
            os.close(writing)

    async def repeat(self, repeats: int) -> None:
        """Handle `repeats` events; the last byte of each pipe is swallowed."""
        self._left = repeats
        self._in_flight = PIPES
        self._done = self._loop.create_future()
        for _, writing in self._pipes:
            os.write(writing, b"x")
        await self._done

    def _readable(self, reading: int, following: int) -> None:
        os.read(reading, 1)
        self._left -= 1
        if self._left >= PIPES:
            os.write(following, b"x")
        else:
            self._in_flight -= 1
            if not self._in_flight:
                self._done.set_result(None)


@asynccontextmanager
async def pipe_events() -> AsyncIterator[Repeat]:
    """Enter the case of the pipes: one repeat is so many events that none is out of step."""
    ring = PipeRing(asyncio.get_running_loop())
    try:
        yield lambda repeats: ring.repeat(repeats * PIPES)
    finally:
        ring.close()


CASES["pipe-events"] = MicroCase(
    "pipe-events",
    f"add_reader() on {PIPES} pipes: a byte read from one, and written to the next",
    pipe_events,
    PIPES,
)
