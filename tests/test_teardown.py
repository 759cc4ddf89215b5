"""The end of loops: close with everything in flight, the collector, fork, threads, leaks."""

import asyncio
import contextlib
import gc
import os
import socket
import threading
import weakref

import pytest
from helpers import (
    WITH_ASAN,
    Recorder,
    in_child,
    make_loop,
    make_pair,
    open_fds,
    run_child,
    until,
)

KINDS = ("io_uring", "epoll")


def resident_kib():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024


async def connect(loop, factory=Recorder):
    ours, peer = make_pair()
    transport, protocol = await loop.create_connection(factory, sock=ours)
    await asyncio.sleep(0)
    return transport, protocol, peer


async def everything_in_flight(loop):
    """Receives, a stuck send, an accept, readers, timers, callbacks and tasks."""
    connections = [await connect(loop) for _ in range(5)]
    connections[0][0].write(b"x" * (8 << 20))
    connections[1][0].pause_reading()
    connections[2][2].sendall(b"data that nobody will see")
    connections[3][0].close()
    server = await loop.create_server(Recorder, "127.0.0.1", 0)
    waiting = socket.create_connection(server.sockets[0].getsockname())
    left, right = socket.socketpair()
    loop.add_reader(left, print)
    loop.call_later(3600, print)
    loop.call_soon(print)
    return connections, server, waiting, left, right


def close_peers(connections, sockets):
    for _, _, peer in connections:
        peer.close()
    for sock in sockets:
        sock.close()


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_close_with_everything_in_flight(loop_kind):
    make_loop(loop_kind).close()
    before = open_fds()
    for _ in range(20):
        loop = make_loop(loop_kind)
        connections, server, *sockets = loop.run_until_complete(everything_in_flight(loop))
        loop.close()
        assert loop.stats().in_flight == 0
        assert loop.stats().operations == 0
        close_peers(connections, sockets)
        del connections, server, sockets
        gc.collect()
    assert {fd: name for fd, name in open_fds().items() if fd not in before} == {}


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_loop_dropped_with_everything_in_flight_is_freed(loop_kind):
    before = open_fds()
    for _ in range(5):
        loop = make_loop(loop_kind)
        connections, server, *sockets = loop.run_until_complete(everything_in_flight(loop))
        close_peers(connections, sockets)
        gone = weakref.ref(loop)
        del loop, connections, server, sockets
        for _ in range(3):
            gc.collect()
        assert gone() is None
    assert {fd: name for fd, name in open_fds().items() if fd not in before} == {}


def test_hundreds_of_loops_leak_neither_descriptors_nor_memory(loop_kind):
    async def main(loop):
        transport, protocol, peer = await connect(loop)
        peer.sendall(b"hello")
        await until(lambda: protocol.data == b"hello")
        transport.write(b"answer")
        transport.close()
        await protocol.lost()
        peer.close()

    def rounds(count):
        for _ in range(count):
            loop = make_loop(loop_kind)
            loop.run_until_complete(main(loop))
            loop.close()
        gc.collect()

    rounds(50)
    fds, memory = open_fds(), resident_kib()
    rounds(300)
    assert len(open_fds()) <= len(fds)
    assert WITH_ASAN or resident_kib() - memory < 20_000


def test_messages_outlive_the_loop(loop_kind):
    kept = []

    class Keeper(Recorder):
        def data_received(self, data):
            super().data_received(data)
            kept.append(data)

    loop = make_loop(loop_kind)

    async def main():
        transport, protocol, peer = await connect(loop, Keeper)
        peer.sendall(b"k" * 12_000)
        await until(lambda: len(protocol.data) == 12_000)
        transport.abort()
        await protocol.lost()
        peer.close()

    loop.run_until_complete(main())
    loop.close()
    del loop
    gc.collect()
    assert b"".join(kept) == b"k" * 12_000


def test_a_forked_child_cannot_use_the_loop_and_does_not_hurt_it(loop_kind):
    loop = make_loop(loop_kind)

    async def main():
        transport, protocol, peer = await connect(loop)

        def child():
            transport.write(b"from the child")
            try:
                loop._run_once()
            except RuntimeError as exc:
                assert "belongs to the parent process" in str(exc)
            else:
                raise AssertionError("the child ran its parent's loop")
            other = make_loop(loop_kind)
            asyncio._set_running_loop(None)
            assert other.run_until_complete(asyncio.sleep(0, "mine")) == "mine"
            other.close()

        for number in range(5):
            assert in_child(child) == 0
            peer.sendall(b"%d" % number)
            await until(lambda: len(protocol.data) == number + 1)
        transport.write(b"from the parent")
        peer.settimeout(20)
        await asyncio.sleep(0)
        answer = b""
        while not answer.endswith(b"parent"):
            answer += peer.recv(100)
        transport.abort()
        await protocol.lost()
        peer.close()

    loop.run_until_complete(main())
    loop.close()


def test_a_child_may_close_or_drop_its_parents_loop(loop_kind):
    loop = make_loop(loop_kind)
    transport, protocol, peer = loop.run_until_complete(connect(loop))

    def child():
        loop.close()
        gc.collect()

    assert in_child(child) == 0

    async def main():
        peer.sendall(b"still here")
        await until(lambda: protocol.data == b"still here")
        transport.abort()
        await protocol.lost()

    loop.run_until_complete(main())
    loop.close()
    peer.close()


@pytest.mark.parametrize("action", ["close", "abort", "pause_reading", "write_eof", "write",
                                    "resume_reading", "get_write_buffer_size"])
def test_a_child_may_touch_inherited_transports(loop_kind, action):
    loop = make_loop(loop_kind)

    async def main():
        transport, protocol, peer = await connect(loop)
        transport.write(b"x")

        def child():
            asyncio._set_running_loop(None)
            arguments = (b"from the child",) if action == "write" else ()
            with contextlib.suppress(RuntimeError):
                getattr(transport, action)(*arguments)
            gc.collect()

        assert in_child(child) == 0
        peer.sendall(b"still here")
        await until(lambda: protocol.data == b"still here")
        transport.abort()
        await protocol.lost()
        peer.close()

    loop.run_until_complete(main())
    loop.close()


def test_a_child_that_returns_into_the_loop_gets_an_error(loop_kind):
    child = run_child(loop_kind, """
import os
async def main():
    if os.fork() == 0:
        return "child"
    return os.waitstatus_to_exitcode(os.wait()[1])
try:
    result = loop.run_until_complete(main())
except RuntimeError as exc:
    os._exit(7 if "belongs to the parent process" in str(exc) else 8)
print(result)
loop.close()
""")
    assert (child.returncode, child.stdout) == (0, "7\n"), child.stderr


def test_a_loop_that_never_ran_can_be_used_by_a_forked_child(loop_kind):
    loop = make_loop(loop_kind)

    def use():
        async def main():
            transport, protocol, peer = await connect(loop)
            peer.sendall(b"x")
            await until(lambda: protocol.data == b"x")
            transport.abort()
            await protocol.lost()
            peer.close()
        loop.run_until_complete(main())

    assert in_child(use) == 0
    use()
    loop.close()


def test_the_rings_descriptors_are_not_inherited(loop_kind):
    loop = make_loop(loop_kind)
    loop.run_until_complete(asyncio.sleep(0))
    for fd, name in open_fds().items():
        if "io_uring" in name or "eventpoll" in name or "eventfd" in name:
            assert not os.get_inheritable(fd), name
    loop.close()


def test_a_loop_made_here_runs_in_another_thread(loop_kind):
    loop = make_loop(loop_kind)
    results = []

    async def main():
        transport, protocol, peer = await connect(loop)
        peer.sendall(b"x")
        await until(lambda: protocol.data == b"x")
        transport.abort()
        await protocol.lost()
        peer.close()
        return "done"

    thread = threading.Thread(target=lambda: results.append(loop.run_until_complete(main())))
    thread.start()
    thread.join()
    assert results == ["done"]
    loop.close()


def test_a_loop_moves_from_thread_to_thread_with_its_connections(loop_kind):
    loop = make_loop(loop_kind)
    transport, protocol, peer = loop.run_until_complete(connect(loop))
    slow, _, slow_peer = loop.run_until_complete(connect(loop))
    sent = bytes(4 << 20)
    slow.write(sent)
    server = loop.run_until_complete(loop.create_server(Recorder, "127.0.0.1", 0))

    async def step(number):
        peer.sendall(b"%d" % number)
        await until(lambda: len(protocol.data) == number + 1)
        with socket.create_connection(server.sockets[0].getsockname()):
            pass

    failures = []

    def run_step(number):
        try:
            loop.run_until_complete(step(number))
        except BaseException as exc:
            failures.append(exc)

    for number in range(6):
        if number % 3 == 2:
            run_step(number)
        else:
            thread = threading.Thread(target=run_step, args=(number,))
            thread.start()
            thread.join()
    assert failures == []
    assert protocol.data == b"012345"
    received = bytearray()

    async def drain():
        while len(received) < len(sent):
            received.extend(await loop.run_in_executor(None, slow_peer.recv, 1 << 18))
        server.close()
        for left in (transport, slow):
            left.abort()
        await protocol.lost()
        await loop.shutdown_default_executor()

    loop.run_until_complete(drain())
    assert received == sent
    loop.close()
    peer.close()
    slow_peer.close()


def test_one_loop_per_thread_in_many_threads(loop_kind):
    failures = []

    def work():
        try:
            loop = make_loop(loop_kind)
            for _ in range(3):
                transport, protocol, peer = loop.run_until_complete(connect(loop))
                peer.sendall(b"x")
                loop.run_until_complete(until(lambda: protocol.data == b"x"))
                transport.abort()
                loop.run_until_complete(protocol.lost())
                peer.close()
            loop.close()
        except BaseException as exc:
            failures.append(exc)

    threads = [threading.Thread(target=work) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_the_interpreter_ends_with_a_running_loop_in_a_thread(loop_kind):
    child = run_child(loop_kind, """
import threading, helpers
async def main():
    ours, peer = helpers.make_pair()
    await loop.create_connection(asyncio.Protocol, sock=ours)
    started.set()
    await asyncio.sleep(3600)
started = threading.Event()
threading.Thread(target=lambda: loop.run_until_complete(main()), daemon=True).start()
started.wait()
print("over")
""")
    assert (child.returncode, child.stdout) == (0, "over\n"), child.stderr


def test_the_interpreter_ends_with_an_open_loop(loop_kind):
    child = run_child(loop_kind, """
import helpers
async def main():
    ours, peer = helpers.make_pair()
    transport, _ = await loop.create_connection(asyncio.Protocol, sock=ours)
    transport.write(b"x" * (8 << 20))
    return transport, peer
kept = loop.run_until_complete(main())
print("over")
""")
    assert (child.returncode, child.stdout) == (0, "over\n"), child.stderr


def test_what_was_written_leaves_before_run_returns(loop_kind):
    loop = make_loop(loop_kind)
    transport, protocol, peer = loop.run_until_complete(connect(loop))

    async def main():
        transport.write(b"last words")

    loop.run_until_complete(main())
    peer.settimeout(10)
    assert peer.recv(100) == b"last words"
    with contextlib.closing(loop):
        transport.abort()
        loop.run_until_complete(protocol.lost())
    peer.close()


def test_a_closed_connection_leaves_no_cycle(loop_kind):
    loop = make_loop(loop_kind)

    async def once():
        transport, protocol, peer = await connect(loop)
        gone.append(weakref.ref(transport))
        transport.close()
        await protocol.lost()
        protocol.transport = None
        peer.close()

    gone = []
    gc.disable()
    try:
        for _ in range(10):
            loop.run_until_complete(once())
        loop.run_until_complete(asyncio.sleep(0.01))
        assert [reference() for reference in gone] == [None] * 10
    finally:
        gc.enable()
    loop.close()


def test_a_closed_loop_is_freed_without_the_collector(loop_kind):
    gc.disable()
    try:
        loop = make_loop(loop_kind)
        loop.run_until_complete(asyncio.sleep(0))
        loop.create_future()
        loop.close()
        loop.create_future()
        reference = weakref.ref(loop)
        del loop
        assert reference() is None
    finally:
        gc.enable()


def test_an_aborted_connection_ends_with_the_loop(loop_kind):
    """The last answer may come only when the loop is closed; the descriptor must not stay."""
    loop = make_loop(loop_kind)
    transport, protocol, peer = loop.run_until_complete(connect(loop))
    transport.abort()
    loop.call_soon(loop.stop)
    loop.run_forever()
    loop.close()
    peer.settimeout(20)
    assert peer.recv(1) == b""
    peer.close()


def test_a_large_write_between_two_runs_goes_on_in_the_second(loop_kind):
    loop = make_loop(loop_kind)
    transport, protocol, peer = loop.run_until_complete(connect(loop))
    transport.write(bytes(4 << 20))
    received = []

    def read():
        while sum(received) < 4 << 20:
            received.append(len(peer.recv(1 << 18)))
        loop.call_soon_threadsafe(loop.stop)

    thread = threading.Thread(target=read)
    thread.start()
    loop.run_forever()      # nothing but the writing is left to do
    thread.join()
    assert sum(received) == 4 << 20
    transport.abort()
    loop.run_until_complete(protocol.lost())
    loop.close()
    peer.close()


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_what_a_closed_loop_will_not_do_is_refused(loop_kind):
    """Not taken and never sent; nor is data waited for."""
    loop = make_loop(loop_kind)
    transport, _, peer = loop.run_until_complete(connect(loop))
    transport.pause_reading()
    loop.close()
    with peer:
        transport.write(b"x")       # has not to wait for room
        assert peer.recv(10) == b"x"
        with pytest.raises(RuntimeError, match="Event loop is closed"):
            transport.write(b"x" * (8 << 20))
        with pytest.raises(RuntimeError, match="Event loop is closed"):
            transport.writelines([b"x", b"y" * (8 << 20)])
        with pytest.raises(RuntimeError, match="Event loop is closed"):
            transport.resume_reading()


def test_an_unclosed_transport_at_exit_makes_no_noise_but_the_warning(loop_kind):
    child = run_child(loop_kind, """
import helpers
async def main():
    ours, peer = helpers.make_pair()
    return await loop.create_connection(asyncio.Protocol, sock=ours), peer
kept = loop.run_until_complete(main())
loop.close()
""")
    assert child.returncode == 0
    assert "Error" not in child.stderr and "Traceback" not in child.stderr, child.stderr


def test_a_transport_finalized_before_its_loop(loop_kind):
    """The collector may choose this order: nothing in flight may lose its memory."""
    loop = make_loop(loop_kind)
    transport, protocol, peer = loop.run_until_complete(connect(loop))
    transport.write(bytes(8 << 20))
    with pytest.warns(ResourceWarning, match="unclosed transport"):
        transport.__del__()
    peer.sendall(b"for nobody")

    async def main():
        while transport._sock is not None:
            await asyncio.sleep(0)
        received = set()
        with contextlib.suppress(ConnectionError):
            while data := peer.recv(1 << 18):
                received |= set(data)
        assert received <= {0}

    peer.settimeout(20)
    loop.run_until_complete(main())
    assert protocol.lost_with == [] and not protocol.data
    loop.close()
    assert loop.stats().operations == 0
    peer.close()
