"""What the tests of timeouts share: protocols that note when they were told what."""

import asyncio
import contextlib
import gc
import time

from helpers import (
    BufferedRecorder,
    Lifetime,
    Recorder,
)

import uringloop

SHORT = 0.03  # seconds: a timeout that is to run out
LONG = 3600
STEP = 0.003  # seconds between the steps of what keeps a connection alive
RESOLUTION = 2 * time.get_clock_info("monotonic").resolution  # 2: floats are rounded
NO_DATA = f"no data received for {SHORT} s"
NOT_SENT = f"no data could be sent for {SHORT} s"
PLENTY = bytes(8 << 20)  # more than any pair of socket buffers holds


class Clocked(Lifetime):
    """Notes when it was told what, by its loop's clock."""

    def __init__(self):
        super().__init__()
        self.received_at = self.lost_at = None

    def now(self):
        return asyncio.get_running_loop().time()

    def connection_lost(self, exc):
        self.lost_at = self.now()
        super().connection_lost(exc)


class Receiving(Clocked, Recorder):
    def data_received(self, data):
        super().data_received(data)
        self.received_at = self.now()


class Buffering(Clocked, BufferedRecorder):
    def buffer_updated(self, nbytes):
        super().buffer_updated(nbytes)
        self.received_at = self.now()


class Asked(Receiving):
    """Answers read_timed_out() and write_timed_out() as a function says."""

    def __init__(self, answer):
        super().__init__()
        self.answer = answer
        self.asked_at = []

    def read_timed_out(self):
        self.asked_at.append(self.now())
        self.calls.append("read_timed_out")
        return self.answer(self)

    def write_timed_out(self):
        self.asked_at.append(self.now())
        self.calls.append("write_timed_out")
        return self.answer(self)


def asked(answer):
    return lambda: Asked(answer)


def assert_timed_out(protocol, text, since):
    """It ended with that error, and not earlier than SHORT after that time."""
    assert [type(exc) for exc in protocol.lost_with] == [TimeoutError]
    assert str(protocol.lost_with[0]) == text
    assert protocol.lost_at - since + RESOLUTION >= SHORT


def timers(loop):
    """The handles of timeouts in the loop's heap."""
    return [found for found in gc.get_objects()
            if type(found) is uringloop._core.TimerHandle and found._scheduled
            and found._loop is loop and found._callback.__name__ == "_ran_out"]


@contextlib.contextmanager
def stepping(loop, function, *args):
    """Calls the function every few milliseconds, in the loop, so that both stall together."""
    handle = None

    def step():
        nonlocal handle
        handle = loop.call_later(STEP, step)
        function(*args)

    step()
    yield
    handle.cancel()


async def a_while(loop, periods=3):
    """Longer than SHORT, by the loop's clock."""
    await asyncio.sleep(periods * SHORT)
