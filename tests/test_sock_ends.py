"""loop.sock_* calls that end otherwise than by their result: cancelled, their socket closed, reused
or given to a transport, their loop closed, their task interrupted.

A cancelled call loses nothing, and a closed socket ends its calls: promises of this loop only.
"""

import asyncio
import errno
import gc
import os
import resource
import socket
import warnings
import weakref

import pytest
from helpers import (
    LIMIT,
    Recorder,
    end,
    in_thread,
    make_pair,
    only_ours,
    pattern,
    read_exactly,
    reset,
    run_child,
    run_once,
    socket_pair,
    ticks,
    waiting,
)

# Cancelling


@pytest.mark.asyncio_differs("a cancellation that comes after the data loses it",
                             "https://github.com/python/cpython/issues/86296")
@pytest.mark.uvloop_differs("a cancellation that comes after the data loses it",
                            "https://github.com/MagicStack/uvloop/issues/169", run=False)
@pytest.mark.parametrize("into", [False, True])
@pytest.mark.parametrize("looks", range(4))
async def test_cancelling_loses_no_byte(loop, into, looks):
    """Data and cancellation in every order, 300 times."""
    with socket_pair() as (ours, peer):
        got, sent = bytearray(), bytearray()
        buffer = bytearray(100)
        for i in range(300):
            call = loop.sock_recv_into(ours, buffer) if into else loop.sock_recv(ours, 100)
            task = loop.create_task(call)
            await ticks(looks)
            if i % 2:
                message = b"%d;" % i
                peer.sendall(message)
                sent += message
            if i % 4 > 1:
                await ticks(1)
            task.cancel()
            try:
                result = await task
                got += memoryview(buffer)[:result] if into else result
            except asyncio.CancelledError:
                pass
        while len(got) < len(sent):
            got += await asyncio.wait_for(loop.sock_recv(ours, 7), LIMIT)
        assert got == sent


async def stash(loop, ours, peer, data):
    """Let data be received for a call that is cancelled before it is told (io_uring)."""
    task = await waiting(loop, loop.sock_recv(ours, 1000))
    peer.sendall(data)
    os.stat(".")                    # a system call: the kernel completes the receive
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_what_came_for_a_cancelled_call_goes_to_the_next(loop, loop_kind):
    only_ours(loop_kind, "stash")
    with socket_pair() as (ours, peer):
        await stash(loop, ours, peer, b"0123456789")
        peer.sendall(b"abc")
        assert await loop.sock_recv(ours, 4) == b"0123"
        buffer = bytearray(3)
        assert await loop.sock_recv_into(ours, buffer) == 3 and buffer == b"456"
        assert await loop.sock_recvfrom(ours, 2) == (b"78", None)
        assert await loop.sock_recvfrom_into(ours, buffer, 1) == (1, None) and buffer == b"956"
        assert await loop.sock_recv(ours, 100) == b"abc"


async def test_what_came_for_a_cancelled_call_goes_to_those_that_wait(loop, loop_kind):
    only_ours(loop_kind, "order")
    with socket_pair() as (ours, peer):
        first = loop.create_task(loop.sock_recv(ours, 100))
        second = loop.create_task(loop.sock_recv(ours, 4))
        third = loop.create_task(loop.sock_recv(ours, 100))
        await ticks()
        peer.sendall(b"0123456789")
        os.stat(".")
        first.cancel()
        assert await second == b"0123"
        assert await third == b"456789"
        assert first.cancelled()


async def test_a_new_call_makes_none_overtake_what_came_for_a_cancelled_call(loop, loop_kind):
    only_ours(loop_kind, "calls wait in order")
    with socket_pair() as (ours, peer):
        first, second = [await waiting(loop, loop.sock_recv(ours, 10)) for _ in range(2)]
        peer.sendall(pattern(30))
        loop.call_soon(first.cancel)
        third = loop.create_task(loop.sock_recv(ours, 10))
        assert await second == pattern(30)[:10]
        assert await third == pattern(30)[10:20]


async def test_what_came_for_a_cancelled_call_goes_to_a_transport(loop, loop_kind):
    only_ours(loop_kind, "stash")
    with socket_pair() as (ours, peer):
        await stash(loop, ours, peer, b"early ")
        transport, protocol = await loop.create_connection(Recorder, sock=ours)
        peer.sendall(b"late")
        assert await protocol.received(10) == b"early late"
        end(transport)
        await protocol.lost()


@pytest.mark.parametrize("how", ["detach", "dup"])
async def test_what_came_for_a_cancelled_call_stays_with_the_socket(loop, loop_kind, how):
    only_ours(loop_kind, "stash")
    with socket_pair() as (ours, peer):
        await stash(loop, ours, peer, b"kept")
        if how == "detach":
            other = socket.socket(fileno=ours.detach())
        else:
            other = ours.dup()
        other.setblocking(False)
        with other:
            assert await loop.sock_recv(other, 10) == b"kept"


async def test_a_number_used_again_gets_nothing_of_the_old_socket(loop, loop_kind):
    only_ours(loop_kind, "stash")
    for _ in range(100):
        with socket_pair() as (ours, peer):
            await stash(loop, ours, peer, b"old")
            number = ours.fileno()
            ours.close()
            with socket_pair() as (new, new_peer):
                if new.fileno() != number:
                    new, new_peer = new_peer, new
                new.setblocking(False)
                new_peer.sendall(b"new")
                assert await loop.sock_recv(new, 10) == b"new"


async def test_a_call_for_no_bytes_does_not_wait_for_what_is_stashed(loop, loop_kind):
    only_ours(loop_kind, "stash")
    with socket_pair() as (ours, peer):
        await stash(loop, ours, peer, b"0123456789")
        assert await loop.sock_recvfrom(ours, 0) == (b"", None)
        assert await loop.sock_recvfrom_into(ours, bytearray()) == (0, None)
        assert await loop.sock_recv(ours, 100) == b"0123456789"


async def test_a_loop_sleeps_while_a_call_waits_on_a_number_used_again(loop, loop_kind):
    """os.dup2() behind the socket object's back: what is stashed is not for the new socket."""
    only_ours(loop_kind, "stash")
    with socket_pair() as (ours, peer), socket_pair() as (new, new_peer):
        await stash(loop, ours, peer, b"old")
        os.dup2(new.fileno(), ours.fileno())
        call = await waiting(loop, loop.sock_recv(ours, 10))
        before = loop.stats().ticks
        await asyncio.sleep(0.05)
        assert loop.stats().ticks - before < 20
        new_peer.sendall(b"new")
        assert await call == b"new"


async def test_timeouts_by_the_hundred(loop):
    with socket_pair() as (ours, peer):
        for i in range(200):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0 if i % 2 else 0.0001):
                    await loop.sock_recv(ours, 10)
        peer.sendall(b"x")
        assert await loop.sock_recv(ours, 10) == b"x"


async def test_cancelling_with_a_message(loop):
    with socket_pair() as (ours, _):
        task = await waiting(loop, loop.sock_recv(ours, 10))
        task.cancel("enough")
        with pytest.raises(asyncio.CancelledError, match="enough"):
            await task


# Sockets that are closed under a call


CALLS = {
    "recv": lambda loop, sock: loop.sock_recv(sock, 10),
    "recv_into": lambda loop, sock: loop.sock_recv_into(sock, bytearray(10)),
    "recvfrom": lambda loop, sock: loop.sock_recvfrom(sock, 10),
    "sendall": lambda loop, sock: loop.sock_sendall(sock, b"x" * (16 << 20)),
}


@pytest.mark.parametrize("call", CALLS)
async def test_a_socket_closed_under_a_call(loop, loop_kind, call):
    only_ours(loop_kind, "asyncio's call waits for ever")
    with socket_pair(small=True) as (ours, peer):
        task = await waiting(loop, CALLS[call](loop, ours))
        ours.close()
        with pytest.raises(OSError, match=f"sock_{call}") as caught:
            await task
        assert caught.value.errno == errno.EBADF
        while await in_thread(peer.recv, 1 << 20):
            pass                    # the end of the stream, because nothing holds the socket


async def test_many_sockets_closed_under_calls(loop, loop_kind):
    only_ours(loop_kind, "asyncio's call waits for ever")
    pairs = [make_pair("unix") for _ in range(900)]
    tasks = [loop.create_task(loop.sock_recv(ours, 10)) for ours, _ in pairs]
    await ticks()
    for ours, _ in pairs[::3]:
        ours.close()
    for task in tasks[::3]:
        with pytest.raises(OSError):
            await task
    for (_, peer), task in zip(pairs, tasks, strict=True):
        if not task.done():
            peer.send(b"x")
            assert await task == b"x"
    # Nothing is left to look after: the loop sleeps.
    await asyncio.sleep(0.01)
    before = loop.stats().ticks
    await asyncio.sleep(0.2)
    assert loop.stats().ticks - before < 20
    for ours, peer in pairs:
        ours.close()
        peer.close()


async def test_the_loop_sleeps_while_many_calls_wait(loop, loop_kind):
    only_ours(loop_kind, "own counters")
    pairs = [make_pair("unix") for _ in range(900)]
    tasks = [loop.create_task(loop.sock_recv(ours, 10)) for ours, _ in pairs]
    await asyncio.sleep(0.05)
    before = loop.stats().ticks
    await asyncio.sleep(0.3)
    assert loop.stats().ticks - before < 20
    for task, (ours, peer) in zip(tasks, pairs, strict=True):
        task.cancel()
        ours.close()
        peer.close()
    await asyncio.wait(tasks)


async def test_a_listening_socket_closed_under_accept(loop, loop_kind):
    only_ours(loop_kind, "asyncio's call waits for ever")
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    address = listener.getsockname()
    task = await waiting(loop, loop.sock_accept(listener))
    listener.close()
    with pytest.raises(OSError, match="sock_accept"):
        await task
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)


async def test_a_number_that_names_another_socket_at_once(loop, loop_kind):
    """Closed and used again before the loop looks: neither gets what is the other's."""
    only_ours(loop_kind, "asyncio's call waits for ever")
    for i in range(200):
        with socket_pair() as (ours, peer):
            task = loop.create_task(loop.sock_recv(ours, 10))
            await ticks(i % 3)
            number = ours.fileno()
            ours.close()
            new, new_peer = make_pair()
            if new.fileno() != number:
                new, new_peer = new_peer, new
                new.setblocking(False)
            assert new.fileno() == number
            with new, new_peer:
                new_peer.sendall(b"new")
                assert await loop.sock_recv(new, 10) == b"new"
                with pytest.raises(OSError):
                    await task
                peer.settimeout(LIMIT)
                assert peer.recv(1) == b""


async def test_a_closed_socket_is_refused(loop):
    with socket_pair() as (ours, _):
        ours.close()
        for call in (loop.sock_recv(ours, 1), loop.sock_recv_into(ours, bytearray(1)),
                     loop.sock_sendall(ours, b"x"), loop.sock_recvfrom(ours, 1),
                     loop.sock_accept(ours), loop.sock_connect(ours, ("127.0.0.1", 1))):
            with pytest.raises((OSError, ValueError, NotImplementedError)):
                await call


async def test_a_socket_dropped_under_a_call(loop, loop_kind):
    only_ours(loop_kind, "calls hold their socket")
    ours, peer = make_pair()
    with peer:
        task = await waiting(loop, loop.sock_recv(ours, 10))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            del ours
            gc.collect()
            peer.sendall(b"still there")
            assert await task == b"still ther"
            del task
            gc.collect()
            await ticks()


# Calls that are ended by what happens on the way


async def test_the_error_of_a_cancelled_call_goes_to_the_one_behind_it(loop, loop_kind):
    only_ours(loop_kind, "order")
    with socket_pair() as (ours, peer):
        first = loop.create_task(loop.sock_recv(ours, 10))
        second = loop.create_task(loop.sock_recv(ours, 10))
        await ticks()
        reset(peer)
        os.stat(".")
        assert first.cancel()
        with pytest.raises(ConnectionResetError):
            await second
        assert first.cancelled()


@pytest.mark.parametrize("method", ["sock_recv", "sock_recvfrom"])
async def test_calls_cancelled_together_keep_the_order_of_the_bytes(loop, loop_kind, method):
    only_ours(loop_kind, "order")
    with socket_pair() as (ours, peer):
        calls = [loop.sock_recv(ours, 10), *(getattr(loop, method)(ours, 4) for _ in range(3))]
        tasks = [loop.create_task(call) for call in calls]
        await ticks()
        peer.sendall(b"0123456789")
        os.stat(".")
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert await loop.sock_recv(ours, 20) == b"0123456789"


async def test_a_buffer_released_before_the_end_of_the_stream(loop):
    with socket_pair() as (ours, peer):
        view = memoryview(bytearray(10))
        task = await waiting(loop, loop.sock_recv_into(ours, view))
        view.release()
        peer.close()
        with pytest.raises((TypeError, ValueError)):
            await task


class Cancelling(socket.socket):
    task = None

    def recv(self, size):
        data = super().recv(size)
        self.task.cancel()
        return data


async def test_a_receive_that_cancels_its_own_call(loop, loop_kind):
    only_ours(loop_kind, "asyncio reports InvalidStateError")
    with socket_pair() as (ours, peer):
        with Cancelling(fileno=ours.detach()) as sock:
            sock.setblocking(False)
            sock.task = await waiting(loop, loop.sock_recv(sock, 10))
            peer.sendall(b"kept")
            with pytest.raises(asyncio.CancelledError):
                await sock.task
            other = sock.dup()
        with other:
            other.setblocking(False)
            assert await loop.sock_recv(other, 10) == b"kept"


def test_calls_that_outlive_their_loop(loop_kind):
    only_ours(loop_kind, "child process")
    done = run_child(loop_kind, """
import gc, socket, warnings
for how in ("cancel", "close", "collect"):
    loop = helpers.make_loop(kind)
    pairs = [socket.socketpair() for _ in range(5)]
    for a, b in pairs:
        a.setblocking(False)
    tasks = [loop.create_task(loop.sock_recv(a, 10)) for a, b in pairs]
    tasks += [loop.create_task(loop.sock_recv(a, 10)) for a, b in pairs]
    loop.run_until_complete(asyncio.sleep(0.01))
    coroutines = [task.get_coro() for task in tasks]
    for task in tasks:
        task._log_destroy_pending = False
    loop.close()
    if how == "cancel":
        for task in tasks:
            try:
                task.cancel()
            except RuntimeError as error:
                assert "closed" in str(error)
    elif how == "close":
        for coroutine in coroutines:
            coroutine.close()
    del loop, tasks, task, coroutines
    coroutine = None
    gc.collect()
    for a, b in pairs:
        a.close(), b.close()
print("fine")
""")
    assert (done.stdout, done.returncode) == ("fine\n", 0), done.stderr


async def test_a_transport_takes_the_socket_of_a_waiting_call(loop, loop_kind):
    only_ours(loop_kind, "asyncio's call waits for ever")
    with socket_pair() as (ours, peer):
        task = await waiting(loop, loop.sock_recv(ours, 10))
        transport, protocol = await loop.create_connection(Recorder, sock=ours)
        peer.sendall(b"for the transport")
        assert await protocol.received(17) == b"for the transport"
        with pytest.raises(RuntimeError, match="sock_recv"):
            await task
        end(transport)
        await protocol.lost()


async def test_a_call_that_is_awaited_twice_at_once(loop, loop_kind):
    only_ours(loop_kind, "the first waits for ever")
    with socket_pair() as (ours, peer):
        call = loop.sock_recv(ours, 10)
        first = await waiting(loop, call)
        with pytest.raises(RuntimeError, match="awaited already|already awaited"):
            await asyncio.ensure_future(call)
        peer.sendall(b"x")
        assert await first == b"x"


async def test_a_finished_call_refuses_everything(loop):
    with socket_pair() as (ours, peer):
        peer.sendall(b"x")
        call = loop.sock_recv(ours, 10)
        assert await call == b"x"
        with pytest.raises(RuntimeError, match="cannot reuse already awaited coroutine"):
            call.throw(ZeroDivisionError())
        call.close()


async def test_calls_count_in_the_statistics(loop, loop_kind):
    only_ours(loop_kind, "own counters")
    with socket_pair() as (ours, peer):
        before = loop.stats()
        await loop.sock_sendall(ours, b"x" * 300)
        peer.sendall(b"y" * 200)
        await loop.sock_recv(ours, 200)
        after = loop.stats()
        assert after.bytes_sent - before.bytes_sent == 300
        assert after.bytes_received - before.bytes_received == 200


def test_what_came_for_a_call_when_its_loop_was_closed(new_loop, loop_kind):
    only_ours(loop_kind, "stash")
    with socket_pair() as (ours, peer):
        loop = new_loop()
        task = loop.create_task(loop.sock_recv(ours, 4))
        run_once(loop)
        run_once(loop)
        peer.sendall(b"0123456789")
        os.stat(".")
        task._log_destroy_pending = False
        loop.close()
        other = new_loop()
        got = b""
        while len(got) < 10:
            got += other.run_until_complete(other.sock_recv(ours, 7))
        assert got == b"0123456789"


async def test_a_socket_detached_under_a_call_whose_bytes_have_come(loop, loop_kind):
    only_ours(loop_kind, "asyncio's call waits for ever")
    with socket_pair() as (ours, peer):
        first = await waiting(loop, loop.sock_recv(ours, 10))
        peer.sendall(b"same")
        with socket.socket(fileno=ours.detach()) as other:
            other.setblocking(False)
            second = loop.create_task(loop.sock_recv(other, 10))
            peer.sendall(b" more")
            results = await asyncio.gather(first, second, return_exceptions=True)
            got = b"".join(result for result in results if isinstance(result, bytes))
            if got == b"same":
                got += await loop.sock_recv(other, 10)
            assert got == b"same more"


async def test_add_reader_displaces_no_call_for_good(loop, loop_kind):
    only_ours(loop_kind, "order")
    with socket_pair() as (ours, peer):
        first = await waiting(loop, loop.sock_recv(ours, 1))
        loop.add_reader(ours, print)
        loop.remove_reader(ours)
        second = loop.create_task(loop.sock_recv(ours, 1))
        await ticks()
        peer.sendall(b"ab")
        assert (await first, await second) == (b"a", b"b")


async def test_what_was_learned_of_a_socket_is_not_held_against_the_next(loop, loop_kind):
    only_ours(loop_kind, "own heuristics")
    for _ in range(20):
        with socket_pair() as (ours, peer):
            peer.sendall(b"x")
            assert await loop.sock_recv(ours, 10) == b"x"
            ours.close()
            with socket.create_server(("127.0.0.1", 0)) as listener:
                listener.setblocking(False)
                with pytest.raises(OSError, match="not connected"):
                    await loop.sock_recv(listener, 10)


async def test_a_send_that_waits_goes_before_those_of_a_transport(loop):
    with socket_pair() as (ours, peer):
        task = loop.create_task(loop.sock_sendall(ours, b"first "))
        await asyncio.sleep(0)
        transport, protocol = await loop.create_connection(Recorder, sock=ours)
        transport.write(b"second")
        assert await in_thread(read_exactly, peer, 12) == b"first second"
        await task
        end(transport)
        await protocol.lost()


@pytest.mark.uvloop_differs("the ResourceWarning comes later", "its own sockets", run=False)
async def test_a_finished_call_holds_nothing(loop):
    class Data(bytearray):
        pass

    ours, peer = make_pair()
    with peer:
        data = Data(b"x")
        reference = weakref.ref(data)
        calls = [loop.sock_sendall(ours, data), loop.sock_recv(ours, 10)]
        await calls[0]
        peer.sendall(b"y")
        assert await calls[1] == b"y"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            del data, ours
            gc.collect()
        assert reference() is None
        assert await in_thread(peer.recv, 10) == b"x"
        assert await in_thread(peer.recv, 10) == b""


async def test_a_number_that_dup2_gives_to_another_socket(loop, loop_kind):
    only_ours(loop_kind, "stash")
    with socket_pair() as (ours, peer), socket_pair() as (new, new_peer):
        task = await waiting(loop, loop.sock_recv(ours, 100))
        peer.sendall(b"old")
        os.dup2(new.fileno(), ours.fileno())
        task.cancel()
        await asyncio.wait([task])
        new_peer.sendall(b"new")
        assert await loop.sock_recv(ours, 100) == b"new"


async def test_a_stash_of_many_sockets_out_of_descriptors(loop, loop_kind):
    only_ours(loop_kind, "stash")
    pairs = [make_pair("unix") for _ in range(70)]
    tasks = [loop.create_task(loop.sock_recv(ours, 10)) for ours, _ in pairs]
    await ticks()
    for i, (_, peer) in enumerate(pairs):
        peer.sendall(b"%d" % i)
    os.stat(".")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (8, limits[1]))
    try:
        for task in tasks:
            task.cancel()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    await asyncio.wait(tasks)
    for i, (ours, peer) in enumerate(pairs):
        assert await loop.sock_recv(ours, 10) == b"%d" % i
        ours.close()
        peer.close()


async def test_a_socket_closed_in_the_iteration_of_its_last_send(loop):
    """What was sent arrives, before the end."""
    for _ in range(20):
        ours, peer = make_pair()
        with peer:
            task = loop.create_task(loop.sock_sendall(ours, b"last words"))
            loop.call_soon(ours.close)
            await task
            assert await in_thread(read_exactly, peer, 100) == b"last words"
            assert ours.fileno() == -1


async def test_a_send_that_is_cancelled_lets_its_socket_be_closed(loop):
    ours, peer = make_pair(small=True)
    with peer:
        while True:
            try:
                ours.send(b"-" * 1000)
            except BlockingIOError:
                break
        for looks in range(3):
            task = loop.create_task(loop.sock_sendall(ours, b"x"))
            await ticks(looks)
            task.cancel()
            await asyncio.wait([task])
        ours.close()
        assert ours.fileno() == -1
        assert set(await in_thread(read_exactly, peer, 1 << 24)) == {ord("-")}


async def test_a_transport_takes_the_socket_of_a_send_that_fails(loop, loop_kind):
    only_ours(loop_kind, "asyncio's call waits for ever")
    with socket_pair(small=True) as (ours, peer):
        task = await waiting(loop, loop.sock_sendall(ours, pattern(3_000_000)))
        reset(peer)
        transport, protocol = await loop.create_connection(Recorder, sock=ours)
        with pytest.raises((ConnectionError, RuntimeError)):
            await asyncio.wait_for(task, LIMIT)
        end(transport)
        await protocol.lost()
