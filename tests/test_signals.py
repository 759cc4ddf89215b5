"""Signals: handlers of the loop and of Python, an idle and a busy loop, what is refused,
KeyboardInterrupt and SystemExit out of callbacks, the Runner, the user's wake-up descriptor."""

import asyncio
import os
import signal
import socket
import threading

import pytest
from helpers import (
    PY312,
    Recorder,
    connected,
    in_thread,
    run_child,
    run_once,
    ticks,
    until,
)

UVLOOP_LOOP = "https://github.com/MagicStack/uvloop/blob/v0.21.0/uvloop/loop.pyx"


def send(number):
    os.kill(os.getpid(), number)


@pytest.fixture(autouse=True)
def dispositions():
    """Signals are the process's: each test leaves them as they were."""
    numbers = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGCHLD, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


# Handlers of the loop


async def test_a_signal_handler_is_called_with_its_arguments(loop):
    seen = []
    loop.add_signal_handler(signal.SIGUSR1, lambda *args: seen.append(args), 1, 2)
    send(signal.SIGUSR1)
    await until(lambda: seen)
    assert seen == [(1, 2)]
    assert loop.remove_signal_handler(signal.SIGUSR1) is True
    assert loop.remove_signal_handler(signal.SIGUSR1) is False


async def test_a_signal_wakes_an_idle_loop(loop):
    future = loop.create_future()
    loop.add_signal_handler(signal.SIGUSR1, future.set_result, "woken")
    timer = threading.Thread(target=send, args=(signal.SIGUSR1,))
    timer.start()
    assert await future == "woken"
    timer.join()
    loop.remove_signal_handler(signal.SIGUSR1)


async def test_a_signal_that_another_thread_takes_wakes_an_idle_loop(loop):
    """The kernel gives a signal to any thread; only the wake-up descriptor reaches the loop."""
    for _ in range(10):
        future = loop.create_future()
        loop.add_signal_handler(signal.SIGUSR1, future.set_result, "woken")
        thread = threading.Thread(
            target=lambda: signal.pthread_kill(threading.get_ident(), signal.SIGUSR1))
        thread.start()
        assert await future == "woken"
        thread.join()
    loop.remove_signal_handler(signal.SIGUSR1)


async def test_a_busy_loop_calls_signal_handlers(loop):
    seen = []
    loop.add_signal_handler(signal.SIGUSR1, seen.append, "x")

    def spin():
        if len(seen) < 3:
            loop.call_soon(spin)

    spin()
    for number in range(1, 4):
        send(signal.SIGUSR1)
        for _ in range(100_000):
            if len(seen) == number:
                break
            await asyncio.sleep(0)
        assert len(seen) == number
    loop.remove_signal_handler(signal.SIGUSR1)


async def test_no_signal_is_lost_among_many(loop):
    seen = []
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
        loop.add_signal_handler(number, seen.append, number)
    for count in range(1, 51):
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
            send(number)
        await until(lambda count=count: len(seen) == 3 * count)
    assert {seen.count(number) for number in seen} == {50}
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
        assert loop.remove_signal_handler(number)


async def test_a_new_signal_handler_replaces_the_old_one(loop):
    seen = []
    loop.add_signal_handler(signal.SIGUSR1, seen.append, "old")
    loop.add_signal_handler(signal.SIGUSR1, seen.append, "new")
    send(signal.SIGUSR1)
    await until(lambda: seen)
    assert seen == ["new"]
    loop.remove_signal_handler(signal.SIGUSR1)


async def test_a_signal_handler_runs_in_no_task_and_in_its_context(loop):
    seen = []
    loop.add_signal_handler(signal.SIGUSR1, lambda: seen.append(asyncio.current_task()))
    send(signal.SIGUSR1)
    await until(lambda: seen)
    assert seen == [None]
    loop.remove_signal_handler(signal.SIGUSR1)


async def test_an_exception_out_of_a_signal_handler_is_reported(loop, errors):
    loop.add_signal_handler(signal.SIGUSR1, divmod, 1, 0)
    for count in (1, 2):
        send(signal.SIGUSR1)
        await until(lambda count=count: len(errors) == count)
    assert {type(context["exception"]) for context in errors} == {ZeroDivisionError}
    loop.remove_signal_handler(signal.SIGUSR1)


async def test_a_signal_handler_may_remove_itself(loop):
    seen = []

    def once():
        seen.append(loop.remove_signal_handler(signal.SIGUSR1))
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)

    loop.add_signal_handler(signal.SIGUSR1, once)
    send(signal.SIGUSR1)
    await until(lambda: seen)
    send(signal.SIGUSR1)
    await ticks(20)
    assert seen == [True]


async def test_removing_a_handler_restores_the_default(loop):
    loop.add_signal_handler(signal.SIGUSR1, print)
    loop.add_signal_handler(signal.SIGINT, print)
    loop.remove_signal_handler(signal.SIGUSR1)
    loop.remove_signal_handler(signal.SIGINT)
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler


@pytest.mark.uvloop_differs("leaves its own handler behind", UVLOOP_LOOP)
def test_closing_the_loop_removes_its_signal_handlers(loop):
    loop.add_signal_handler(signal.SIGUSR1, print)
    run_once(loop)
    loop.close()
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL


@pytest.mark.uvloop_differs("has no child watcher of asyncio's", UVLOOP_LOOP)
async def test_a_handler_of_sigchld_does_not_disturb_subprocesses(loop):
    if not PY312:
        pytest.skip("before 3.12 the policy's watcher belongs to other tests")
    seen = []
    loop.add_signal_handler(signal.SIGCHLD, seen.append, "child")
    process = await asyncio.create_subprocess_exec("sh", "-c", "exit 3")
    assert await process.wait() == 3
    await until(lambda: seen)
    loop.remove_signal_handler(signal.SIGCHLD)


# What is refused


@pytest.mark.parametrize("number, error", [
    (0, ValueError), (-1, ValueError), (signal.NSIG + 1, ValueError), (100_000, ValueError),
    ("SIGUSR1", TypeError), (None, TypeError), (signal.SIGKILL, RuntimeError),
    (signal.SIGSTOP, RuntimeError)], ids=str)
def test_impossible_signals_are_refused(loop, number, error):
    with pytest.raises(error):
        loop.add_signal_handler(number, print)
    if error is not RuntimeError:
        with pytest.raises(error):
            loop.remove_signal_handler(number)


def test_a_coroutine_is_no_signal_handler(loop):
    async def handler():
        pass

    coroutine = handler()
    for wrong in (handler, coroutine):
        with pytest.raises(TypeError, match="coroutines"):
            loop.add_signal_handler(signal.SIGUSR1, wrong)
    coroutine.close()


def test_a_closed_loop_takes_no_signal_handler(loop):
    loop.close()
    with pytest.raises(RuntimeError, match="closed"):
        loop.add_signal_handler(signal.SIGUSR1, print)


@pytest.mark.uvloop_differs("doesn't look at the thread here", UVLOOP_LOOP)
def test_only_the_main_thread_adds_signal_handlers(new_loop):
    loop, seen = new_loop(), []

    async def main():
        try:
            loop.add_signal_handler(signal.SIGUSR1, print)
        except (RuntimeError, ValueError) as exc:
            seen.append((type(exc), "main thread" in str(exc)))

    thread = threading.Thread(target=lambda: loop.run_until_complete(main()))
    thread.start()
    thread.join()
    assert seen == [(RuntimeError, True)]
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL


# Handlers of Python, and the user's wake-up descriptor


async def test_a_python_signal_handler_runs_while_the_loop_is_idle(loop):
    seen = []
    signal.signal(signal.SIGUSR2, lambda number, frame: seen.append(number))
    thread = threading.Thread(target=send, args=(signal.SIGUSR2,))
    thread.start()
    await until(lambda: seen)
    thread.join()
    assert seen == [signal.SIGUSR2]


async def test_a_python_signal_handler_may_wake_the_loop(loop):
    future = loop.create_future()
    signal.signal(signal.SIGUSR2,
                  lambda number, frame: loop.call_soon_threadsafe(future.set_result, number))
    thread = threading.Thread(target=send, args=(signal.SIGUSR2,))
    thread.start()
    assert await future == signal.SIGUSR2
    thread.join()


async def test_the_users_wakeup_descriptor_is_left_alone(loop):
    left, right = socket.socketpair()
    left.setblocking(False)
    right.setblocking(False)
    signal.signal(signal.SIGUSR2, lambda number, frame: None)
    before = signal.set_wakeup_fd(left.fileno())
    try:
        send(signal.SIGUSR2)
        assert await asyncio.wait_for(loop.sock_recv(right, 10), 20) == bytes([signal.SIGUSR2])
    finally:
        assert signal.set_wakeup_fd(before) == left.fileno()
    left.close()
    right.close()


def test_a_loop_without_handlers_closes_without_touching_the_wakeup_descriptor(new_loop):
    left, right = socket.socketpair()
    left.setblocking(False)
    loop = new_loop()
    run_once(loop)
    before = signal.set_wakeup_fd(left.fileno())
    run_once(loop)
    loop.close()
    assert signal.set_wakeup_fd(before) == left.fileno()
    left.close()
    right.close()


async def test_the_last_handler_gives_the_wakeup_descriptor_back(loop):
    loop.add_signal_handler(signal.SIGUSR1, print)
    loop.add_signal_handler(signal.SIGUSR2, print)
    loop.remove_signal_handler(signal.SIGUSR1)
    loop.remove_signal_handler(signal.SIGUSR2)
    before = signal.set_wakeup_fd(-1)
    assert before == -1 or type(loop).__module__.startswith("uvloop")


# KeyboardInterrupt and SystemExit


def raiser(error):
    def function(*arguments):
        raise error

    return function


async def answer():
    await asyncio.sleep(0.001)
    return "again"


STOPPERS = [KeyboardInterrupt, SystemExit]


@pytest.mark.parametrize("error", STOPPERS)
@pytest.mark.parametrize("method", ["call_soon", "call_later", "call_soon_threadsafe"])
def test_a_callback_may_stop_the_loop(loop, error, method):
    seen = []
    arguments = (0.001,) if method == "call_later" else ()
    getattr(loop, method)(*arguments, raiser(error))
    loop.call_soon(seen.append, "still there")
    with pytest.raises(error):
        loop.run_forever()
    assert not loop.is_running()
    assert loop.run_until_complete(answer()) == "again"
    assert seen == ["still there"]


@pytest.mark.parametrize("error", STOPPERS)
def test_a_task_may_stop_the_loop(loop, error):
    async def failing():
        await asyncio.sleep(0)
        raise error

    with pytest.raises(error):
        loop.run_until_complete(failing())
    assert loop.run_until_complete(answer()) == "again"


@pytest.mark.parametrize("error", STOPPERS)
def test_a_reader_may_stop_the_loop(loop, error):
    left, right = socket.socketpair()
    left.setblocking(False)
    right.send(b"x")
    loop.add_reader(left, raiser(error))
    with pytest.raises(error):
        loop.run_forever()
    loop.remove_reader(left)
    assert loop.run_until_complete(answer()) == "again"
    left.close()
    right.close()


@pytest.mark.uvloop_differs("wraps or swallows it", UVLOOP_LOOP)
@pytest.mark.parametrize("error", STOPPERS)
@pytest.mark.parametrize("method", ["connection_made", "data_received", "eof_received",
                                    "connection_lost"])
def test_a_protocol_may_stop_the_loop_which_loses_nothing(loop, error, method):
    armed = []

    class Stopping(Recorder):
        pass

    def stop_in(self, *arguments):
        result = getattr(Recorder, method)(self, *arguments)
        if armed:
            raise armed.pop()
        return result

    setattr(Stopping, method, stop_in)

    async def main():
        async with connected(Stopping) as (_, protocol, peer):
            async with connected(Recorder) as (_, other, other_peer):
                armed.append(error())
                other_peer.sendall(b"of the other")
                peer.sendall(b"data")
                if method in ("eof_received", "connection_lost"):
                    peer.shutdown(socket.SHUT_WR)
                if method == "connection_made":
                    async with connected(Stopping):
                        pass
                await other.received(12)
                await protocol.received(4)
                return bytes(other.data), bytes(protocol.data)

    task = loop.create_task(main())
    with pytest.raises(error):
        loop.run_until_complete(task)
    assert loop.run_until_complete(asyncio.wait_for(task, 20)) == (b"of the other", b"data")
    assert loop.run_until_complete(answer()) == "again"


@pytest.mark.uvloop_differs("swallows it", UVLOOP_LOOP, run=False)
@pytest.mark.parametrize("error", STOPPERS)
def test_a_datagram_protocol_may_stop_the_loop(loop, error):
    armed = [error]

    class Stopping(asyncio.DatagramProtocol):
        received = []

        def datagram_received(self, data, address):
            self.received.append(data)
            if armed:
                raise armed.pop()

    ours, peer = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    ours.setblocking(False)
    transport, protocol = loop.run_until_complete(
        loop.create_datagram_endpoint(Stopping, sock=ours))
    peer.send(b"first")
    peer.send(b"second")
    with pytest.raises(error):
        loop.run_forever()
    loop.run_until_complete(until(lambda: len(protocol.received) == 2))
    assert protocol.received == [b"first", b"second"]
    transport.close()
    peer.close()
    loop.run_until_complete(ticks())


@pytest.mark.uvloop_differs("swallows it", UVLOOP_LOOP, run=False)
@pytest.mark.parametrize("error", STOPPERS)
def test_the_protocol_of_a_pipe_may_stop_the_loop(loop, error):
    armed = [error]

    class Stopping(Recorder):
        def data_received(self, data):
            super().data_received(data)
            if armed:
                raise armed.pop()

    reading, writing = os.pipe()
    transport, protocol = loop.run_until_complete(
        loop.connect_read_pipe(Stopping, os.fdopen(reading, "rb", 0)))
    os.write(writing, b"first")
    with pytest.raises(error):
        loop.run_forever()
    os.write(writing, b"second")
    os.close(writing)
    assert loop.run_until_complete(protocol.lost()) is None
    assert protocol.data == b"firstsecond"


INTERRUPTED = """
import os, signal, threading
def interrupt():
    os.kill(os.getpid(), signal.SIGINT)
async def answer():
    return "again"
loop.call_soon(lambda: threading.Thread(target=interrupt).start())
try:
    loop.run_forever()
except KeyboardInterrupt:
    print("interrupted", loop.is_running(), loop.run_until_complete(answer()))
loop.close()
"""


def test_sigint_interrupts_an_idle_loop_that_can_be_used_again(loop_kind):
    child = run_child(loop_kind, INTERRUPTED)
    assert (child.returncode, child.stdout) == (0, "interrupted False again\n"), child.stderr


BUSY = """
import os, signal
def spin(count):
    if count == 1000:
        os.kill(os.getpid(), signal.SIGINT)
    loop.call_soon(spin, count + 1)
async def answer():
    return "again"
spin(0)
try:
    loop.run_forever()
except KeyboardInterrupt:
    print("interrupted", loop.is_running(), loop.run_until_complete(answer()))
loop.close()
"""


def test_sigint_interrupts_a_busy_loop(loop_kind):
    child = run_child(loop_kind, BUSY)
    assert (child.returncode, child.stdout) == (0, "interrupted False again\n"), child.stderr


RUNNER = """
import os, signal
async def main():
    try:
        loop = asyncio.get_running_loop()
        loop.call_soon(os.kill, os.getpid(), signal.SIGINT)
        await asyncio.sleep(20)
    except asyncio.CancelledError:
        print("cancelled")
        raise
loop.close()
try:
    with asyncio.Runner(loop_factory=lambda: helpers.make_loop(kind)) as runner:
        runner.run(main())
except KeyboardInterrupt:
    print("interrupted")
"""


def test_sigint_cancels_the_main_task_of_a_runner(loop_kind):
    child = run_child(loop_kind, RUNNER)
    assert (child.returncode, child.stdout) == (0, "cancelled\ninterrupted\n"), child.stderr


IDLE_RUNNER = """
import os, signal, threading
async def main():
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        await asyncio.get_running_loop().create_future()
    finally:
        print("cancelled")
loop.close()
with asyncio.Runner(loop_factory=lambda: helpers.make_loop(kind)) as runner:
    for _ in range(2):
        try:
            runner.run(main())
        except KeyboardInterrupt:
            print("interrupted")
    print(runner.run(asyncio.sleep(0.001, "again")))
"""


def test_sigint_wakes_an_idle_runner_that_can_be_used_again(loop_kind):
    child = run_child(loop_kind, IDLE_RUNNER)
    expected = 2 * "cancelled\ninterrupted\n" + "again\n"
    assert (child.returncode, child.stdout) == (0, expected), child.stderr


STUBBORN = """
import os, signal
async def main():
    loop = asyncio.get_running_loop()
    loop.call_soon(os.kill, os.getpid(), signal.SIGINT)
    try:
        await asyncio.sleep(20)
    except asyncio.CancelledError:
        print("not yet")
        loop.call_soon(os.kill, os.getpid(), signal.SIGINT)
        await asyncio.sleep(20)
loop.close()
try:
    with asyncio.Runner(loop_factory=lambda: helpers.make_loop(kind)) as runner:
        runner.run(main())
except KeyboardInterrupt:
    print("interrupted")
"""


def test_a_second_sigint_interrupts_a_task_that_ignores_the_first(loop_kind):
    child = run_child(loop_kind, STUBBORN)
    assert (child.returncode, child.stdout) == (0, "not yet\ninterrupted\n"), child.stderr


async def test_signals_do_not_interrupt_the_calls_of_other_threads(loop):
    """SA_RESTART: a thread that waits in a system call goes on waiting."""
    seen = []
    loop.add_signal_handler(signal.SIGUSR1, seen.append, "x")
    left, right = socket.socketpair()
    with left, right:
        receiving = asyncio.ensure_future(in_thread(left.recv, 10))
        for number in range(1, 20):
            send(signal.SIGUSR1)
            await until(lambda number=number: len(seen) == number)
        right.send(b"data")
        assert await receiving == b"data"
    loop.remove_signal_handler(signal.SIGUSR1)
