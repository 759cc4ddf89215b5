"""Forks of a process whose loop runs: the parent loses nothing, children have loops of their own;
multiprocessing and process pools with each start method, daemons, signals, pidfds.

What a child may do with its parent's loop is in test_teardown.py.
"""

import asyncio
import os
import signal
import socket
import threading

import pytest
from helpers import (
    PY312,
    Echo,
    Recorder,
    assert_same,
    connected,
    in_thread,
    make_loop,
    pattern,
    read_exactly,
    run_child,
    ticks,
    until,
)

AT_FORK = "https://github.com/python/cpython/issues/66285"
SHARED = "https://github.com/python/cpython/issues/66197"

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


def answer(kind, question):
    """Runs in the children: a loop of their own carries bytes there and back."""
    async def main():
        async with connected(Echo) as (_, _, peer):
            await in_thread(peer.sendall, question)
            return await in_thread(read_exactly, peer, len(question))

    loop = make_loop(kind)
    asyncio._set_running_loop(None)     # before 3.12 a forked thread has its parent's
    try:
        return loop.run_until_complete(main())
    finally:
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


def answer_into(connection, kind, question):
    connection.send(answer(kind, question))
    connection.close()


def fork(function, *arguments):
    """Runs a function in a child; its process id."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            function(*arguments)
            status = 0
        finally:
            os._exit(status)
    return pid


async def status_of(pid):
    return os.waitstatus_to_exitcode((await in_thread(os.waitpid, pid, 0))[1])


# Forks by hand


async def test_a_child_makes_a_loop_of_its_own(loop, loop_kind):
    def child():
        assert answer(loop_kind, b"question") == b"question"

    async with connected(Echo) as (_, _, peer):
        for number in range(3):
            pid = fork(child)
            peer.sendall(b"%d" % number)
            assert await in_thread(peer.recv, 10) == b"%d" % number
            assert await status_of(pid) == 0


async def test_forks_of_other_threads_lose_no_byte(loop):
    data = pattern(16 << 20)
    stop = threading.Event()
    statuses = []

    def fork_often():
        while not stop.is_set():
            pid = fork(int)
            statuses.append(os.waitpid(pid, 0)[1])

    async with connected(Echo) as (_, _, peer):
        forking = threading.Thread(target=fork_often)
        forking.start()
        try:
            sending = asyncio.ensure_future(in_thread(peer.sendall, data))
            received = await in_thread(read_exactly, peer, len(data))
            await sending
            await until(lambda: len(statuses) >= 5)
        finally:
            stop.set()
            await in_thread(forking.join)
        assert_same(received, data)
    assert set(statuses) == {0}


shared = pytest.mark.asyncio_differs("the child uses the parent's epoll", SHARED, run=False)


@pytest.mark.parametrize("leave", ["_exit", pytest.param("exit", marks=shared),
                                   pytest.param("exception", marks=shared)])
def test_what_a_parent_has_not_sent_yet_is_sent_once(loop_kind, leave):
    """However the child ends, with or without finalizers and the flushing of what it inherited."""
    child = run_child(loop_kind, f"""
import os, sys, helpers
LEAVE = {leave!r}
data = helpers.pattern(8 << 20)
async def main():
    ours, peer = helpers.make_pair(small=True)
    transport, protocol = await loop.create_connection(helpers.Recorder, sock=ours)
    transport.write(data)
    await helpers.ticks()
    pid = os.fork()
    if pid == 0:
        transport.write(b"from the child")
        if LEAVE == "_exit":
            os._exit(0)
        if LEAVE == "exit":
            sys.exit(0)
        raise KeyboardInterrupt
    _, status = await helpers.in_thread(os.waitpid, pid, 0)
    print(os.waitstatus_to_exitcode(status))
    reading = asyncio.ensure_future(helpers.in_thread(helpers.read_to_end, peer))
    transport.close()
    helpers.assert_same(await reading, data)
    await protocol.lost()
    peer.close()
    print("once", flush=True)
parent = os.getpid()
try:
    loop.run_until_complete(main())
finally:
    if os.getpid() != parent:
        # Python itself ends the child; what it says is not for the parent's output.
        os.dup2(os.open("/dev/null", os.O_WRONLY), 2)
loop.close()
""")
    status = -signal.SIGINT if leave == "exception" else 0
    assert (child.returncode, child.stdout) == (0, f"{status}\nonce\n"), child.stderr


async def test_a_daemon_has_a_loop_of_its_own(loop, loop_kind):
    reading, writing = os.pipe()

    def grandchild():
        os.write(writing, answer(loop_kind, b"from the daemon"))

    def child():
        os.setsid()
        fork(grandchild)

    transport, protocol = await loop.connect_read_pipe(Recorder, os.fdopen(reading, "rb", 0))
    pid = fork(child)
    os.close(writing)
    assert await status_of(pid) == 0
    assert await protocol.lost() is None
    assert protocol.data == b"from the daemon"


@pytest.mark.asyncio_differs("shares the self-pipe before 3.12", AT_FORK, when=not PY312)
@pytest.mark.uvloop_differs("shares the self-pipe before 3.12", AT_FORK, when=not PY312)
async def test_a_signal_of_the_child_is_not_the_parents(loop):
    seen = []
    loop.add_signal_handler(signal.SIGUSR1, seen.append, "x")

    def child():
        os.kill(os.getpid(), signal.SIGUSR1)

    for _ in range(3):
        assert await status_of(fork(child)) == 0
    await ticks(50)
    assert seen == []
    os.kill(os.getpid(), signal.SIGUSR1)
    await until(lambda: seen)
    loop.remove_signal_handler(signal.SIGUSR1)


async def test_a_pidfd_tells_of_the_end_of_a_child(loop):
    reading, writing = os.pipe()
    pid = fork(os.read, reading, 1)
    try:
        pidfd = os.pidfd_open(pid)
    except OSError as exc:
        os.write(writing, b"x")
        os.waitpid(pid, 0)
        pytest.skip(f"no pidfd here: {exc}")
    ended = loop.create_future()

    def reap():
        loop.remove_reader(pidfd)
        ended.set_result(os.waitid(os.P_PIDFD, pidfd, os.WEXITED).si_status)

    loop.add_reader(pidfd, reap)
    await ticks(20)
    assert not ended.done()
    os.write(writing, b"x")
    assert await ended == 0
    for fd in (pidfd, reading, writing):
        os.close(fd)


async def test_a_child_that_stays_keeps_no_parents_timer_and_no_readiness(loop):
    """The child sleeps with copies of all descriptors; the parent goes on and ends its own."""
    reading, writing = os.pipe()
    left, right = socket.socketpair()
    left.setblocking(False)
    seen = []
    loop.add_reader(left, lambda: seen.append(left.recv(10)))
    pid = fork(os.read, reading, 1)
    loop.remove_reader(left)
    left.close()
    right.send(b"for nobody")
    await ticks(20)
    assert seen == []
    again, peer = socket.socketpair()
    again.setblocking(False)
    loop.add_reader(again, lambda: seen.append(again.recv(10)))
    peer.send(b"fresh")
    await until(lambda: seen)
    assert seen == [b"fresh"]
    loop.remove_reader(again)
    os.write(writing, b"x")
    assert await status_of(pid) == 0
    for fd in (reading, writing):
        os.close(fd)
    for sock in (again, peer, right):
        sock.close()


# multiprocessing

METHODS = ["fork", "forkserver", "spawn"]

PROCESS = """
import multiprocessing, warnings, helpers, test_fork
warnings.simplefilter("ignore", DeprecationWarning)
async def main():
    context = multiprocessing.get_context(METHOD)
    async with helpers.connected(helpers.Echo) as (_, _, peer):
        for number in range(2):
            ours, theirs = context.Pipe()
            process = context.Process(target=test_fork.answer_into, args=(theirs, kind, b"hello"))
            process.start()
            peer.sendall(b"%d" % number)
            print((await helpers.in_thread(peer.recv, 10)).decode(),
                  await helpers.in_thread(ours.recv))
            await helpers.in_thread(process.join)
            print(process.exitcode)
loop.run_until_complete(main())
loop.run_until_complete(loop.shutdown_default_executor())
loop.close()
"""


@pytest.mark.parametrize("method", METHODS)
def test_multiprocessing_from_a_running_loop(loop_kind, method):
    child = run_child(loop_kind, f"METHOD = {method!r}\n{PROCESS}", limit=60)
    assert child.stdout == "0 b'hello'\n0\n1 b'hello'\n0\n", child.stderr
    assert child.returncode == 0, child.stderr


POOL = """
import concurrent.futures, multiprocessing, warnings, helpers, test_fork
warnings.simplefilter("ignore", DeprecationWarning)
async def main():
    context = multiprocessing.get_context(METHOD)
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as pool:
        async with helpers.connected(helpers.Echo) as (_, _, peer):
            calls = [loop.run_in_executor(pool, test_fork.answer, kind, b"%d" % number)
                     for number in range(6)]
            peer.sendall(b"meanwhile")
            print(await helpers.in_thread(peer.recv, 10))
            print(b"".join(await asyncio.gather(*calls)))
loop.run_until_complete(main())
loop.run_until_complete(loop.shutdown_default_executor())
loop.close()
"""


@pytest.mark.parametrize("method", METHODS)
def test_a_process_pool_under_a_running_loop(loop_kind, method):
    child = run_child(loop_kind, f"METHOD = {method!r}\n{POOL}", limit=60)
    assert child.stdout == "b'meanwhile'\nb'012345'\n", child.stderr
    assert child.returncode == 0, child.stderr
