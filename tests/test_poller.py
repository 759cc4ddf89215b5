"""add_reader and add_writer: what wakes, what is refused, what happens to reused descriptors."""

import asyncio
import gc
import os
import socket
import tempfile
import weakref

import pytest
from helpers import Recorder, connected, run_once, ticks, until
from references import STALE, UVLOOP_POLL

UVLOOP_LOOP = "https://github.com/MagicStack/uvloop/blob/v0.21.0/uvloop/loop.pyx"


def nothing():
    pass


@pytest.fixture
def pair(ledger):
    """Two connected non-blocking sockets."""
    left, right = socket.socketpair()
    left.setblocking(False)
    right.setblocking(False)
    with left, right:
        yield left, right


async def settle():
    """Time enough for a callback that must not come."""
    for _ in range(5):
        await asyncio.sleep(0.001)


# Readiness


@pytest.mark.parametrize("as_number", [False, True], ids=["object", "number"])
async def test_a_reader_is_called_when_there_is_data(loop, pair, as_number):
    left, right = pair
    seen = []
    target = left.fileno() if as_number else left
    loop.add_reader(target, lambda *arguments: seen.append((left.recv(10), *arguments)), 1, 2)
    await settle()
    assert seen == []
    right.send(b"x")
    await until(lambda: seen)
    assert seen == [(b"x", 1, 2)]
    loop.remove_reader(target)


@pytest.mark.parametrize("as_number", [False, True], ids=["object", "number"])
async def test_a_writer_is_called_when_there_is_room(loop, pair, as_number):
    left, _ = pair
    seen = []
    target = left.fileno() if as_number else left
    loop.add_writer(target, seen.append, "x")
    await until(lambda: seen)
    loop.remove_writer(target)


async def test_readiness_is_level_triggered(loop, pair):
    left, right = pair
    seen = []
    loop.add_reader(left, lambda: seen.append(left.recv(1)))
    right.send(b"abc")
    await until(lambda: len(seen) == 3)
    await settle()
    assert seen == [b"a", b"b", b"c"]
    loop.remove_reader(left)


async def test_a_reader_that_does_not_read_is_called_again(loop, pair):
    left, right = pair
    seen = []
    loop.add_reader(left, seen.append, "x")
    right.send(b"x")
    await until(lambda: len(seen) > 10)
    loop.remove_reader(left)
    count = len(seen)
    await settle()
    assert len(seen) == count


async def test_both_directions_of_one_descriptor_are_independent(loop, pair):
    left, right = pair
    reads, writes = [], []
    loop.add_reader(left, lambda: reads.append(left.recv(10)))
    loop.add_writer(left, writes.append, "w")
    await until(lambda: writes)
    loop.remove_writer(left)
    count = len(writes)
    right.send(b"x")
    await until(lambda: reads)
    assert len(writes) == count
    loop.add_writer(left, writes.append, "w")
    loop.remove_reader(left)
    right.send(b"y")
    await until(lambda: len(writes) > count)
    assert reads == [b"x"]
    loop.remove_writer(left)


async def test_a_new_callback_replaces_the_old_one(loop, pair):
    left, right = pair
    seen = []
    loop.add_reader(left, seen.append, "old")
    loop.add_reader(left, lambda: seen.append(left.recv(10)))
    right.send(b"new")
    await until(lambda: seen)
    assert seen == [b"new"]
    loop.remove_reader(left)


@pytest.mark.uvloop_differs("gives None", UVLOOP_LOOP)
async def test_removing_tells_whether_there_was_anything(loop, pair):
    left, _ = pair
    assert loop.remove_reader(left) is False
    assert loop.remove_writer(left) is False
    loop.add_reader(left, nothing)
    assert loop.remove_writer(left) is False
    assert loop.remove_reader(left) is True
    assert loop.remove_reader(left) is False


async def test_adding_gives_none(loop, pair):
    left, _ = pair
    assert loop.add_reader(left, nothing) is None
    assert loop.add_writer(left, nothing) is None
    loop.remove_reader(left)
    loop.remove_writer(left)


async def test_a_callback_may_remove_the_other_of_the_same_iteration(loop):
    pairs = [socket.socketpair() for _ in range(2)]
    seen = []

    def first_come(number):
        seen.append(number)
        for left, _ in pairs:
            loop.remove_reader(left)

    for number, (left, right) in enumerate(pairs):
        right.send(b"x")
        loop.add_reader(left, first_come, number)
    await until(lambda: seen)
    await settle()
    assert len(seen) == 1
    for left, right in pairs:
        left.close()
        right.close()


async def test_a_reader_may_remove_itself_and_add_a_writer(loop, pair):
    left, right = pair
    seen = []

    def reading():
        seen.append(left.recv(10))
        loop.remove_reader(left)
        loop.add_writer(left, writing)

    def writing():
        left.send(b"answer")
        loop.remove_writer(left)
        seen.append("written")

    loop.add_reader(left, reading)
    right.send(b"question")
    await until(lambda: len(seen) == 2)
    assert right.recv(10) == b"answer"
    assert seen == [b"question", "written"]


async def test_an_exception_out_of_a_reader_is_reported_and_it_stays(loop, pair, errors):
    left, right = pair
    seen = []

    def failing():
        seen.append(left.recv(1))
        raise ZeroDivisionError("reader")

    loop.add_reader(left, failing)
    right.send(b"ab")
    await until(lambda: len(seen) == 2 and len(errors) == 2)
    assert {str(context["exception"]) for context in errors} == {"reader"}
    assert all("handle" in context for context in errors)
    loop.remove_reader(left)


def test_a_reader_added_before_the_loop_runs_is_called(loop, pair):
    left, right = pair
    seen = []
    loop.add_reader(left, lambda: seen.append(left.recv(10)))
    right.send(b"x")
    loop.run_until_complete(until(lambda: seen))
    loop.remove_reader(left)
    assert seen == [b"x"]


async def test_a_busy_loop_still_polls(loop, pair):
    left, right = pair
    seen = []
    loop.add_reader(left, lambda: seen.append(left.recv(10)))
    right.send(b"x")
    for _ in range(100_000):
        if seen:
            break
        await asyncio.sleep(0)
    assert seen == [b"x"]
    loop.remove_reader(left)


# Ends and errors


async def test_a_closed_pipe_wakes_its_reader(loop):
    reading, writing = os.pipe()
    seen = []
    loop.add_reader(reading, lambda: seen.append(os.read(reading, 10)))
    os.close(writing)
    await until(lambda: seen)
    loop.remove_reader(reading)
    os.close(reading)
    assert seen[0] == b""


async def test_a_hang_up_wakes_reader_and_writer(loop, pair):
    left, right = pair
    reads, writes = [], []
    right.close()
    loop.add_reader(left, reads.append, "r")
    loop.add_writer(left, writes.append, "w")
    await until(lambda: reads and writes)
    loop.remove_reader(left)
    loop.remove_writer(left)


async def test_a_pipe_without_a_reader_wakes_its_writer(loop):
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    while True:
        try:
            os.write(writing, bytes(65536))
        except BlockingIOError:
            break
    seen = []
    loop.add_writer(writing, seen.append, "x")
    await settle()
    assert seen == []
    os.close(reading)
    await until(lambda: seen)
    loop.remove_writer(writing)
    os.close(writing)


@pytest.mark.parametrize("method", ["add_reader", "add_writer"])
def test_a_regular_file_is_a_permission_error(loop, method):
    with tempfile.TemporaryFile() as file, pytest.raises(PermissionError):
        getattr(loop, method)(file, nothing)


@pytest.mark.parametrize("method", ["add_reader", "add_writer"])
def test_a_closed_descriptor_is_an_os_error(loop, method):
    reading, writing = os.pipe()
    os.close(reading)
    os.close(writing)
    with pytest.raises(OSError):
        getattr(loop, method)(reading, nothing)


METHODS = ["add_reader", "add_writer", "remove_reader", "remove_writer"]


@pytest.mark.parametrize("wrong", ["text", None, object(), 1.5], ids=lambda w: type(w).__name__)
@pytest.mark.parametrize("method", METHODS)
def test_what_is_no_file_is_a_value_error(loop, method, wrong):
    arguments = [nothing] if method.startswith("add") else []
    with pytest.raises(ValueError):
        getattr(loop, method)(wrong, *arguments)


@pytest.mark.parametrize("method", ["add_reader", "add_writer"])
def test_a_negative_descriptor_is_a_value_error(loop, method):
    with pytest.raises(ValueError):
        getattr(loop, method)(-1, nothing)


def test_a_closed_socket_object_cannot_be_added(loop):
    sock = socket.socket()
    sock.close()
    with pytest.raises((ValueError, OSError)):
        loop.add_reader(sock, nothing)


@pytest.mark.parametrize("method", METHODS)
async def test_the_descriptor_of_a_transport_is_refused(loop, method):
    async with connected() as (transport, _, _):
        fd = transport.get_extra_info("socket").fileno()
        arguments = [nothing] if method.startswith("add") else []
        with pytest.raises(RuntimeError, match="is used by transport"):
            getattr(loop, method)(fd, *arguments)


async def test_the_descriptor_of_a_closed_transport_may_be_added(loop, pair):
    async with connected() as (transport, protocol, _):
        fd = transport.get_extra_info("socket").fileno()
        transport.close()
        await protocol.lost()
        await until(lambda: _is_closed(fd))
        left, right = pair
        os.dup2(left.fileno(), fd)
        seen = []
        loop.add_reader(fd, seen.append, "x")
        right.send(b"x")
        await until(lambda: seen)
        loop.remove_reader(fd)
        os.close(fd)


def _is_closed(fd):
    try:
        os.fstat(fd)
    except OSError:
        return True
    return False


# Descriptors that come and go


@pytest.mark.asyncio_differs("its map of descriptors is stale", STALE)
@pytest.mark.uvloop_differs("its poll handle is stale", UVLOOP_POLL)
async def test_a_number_reused_without_remove_reader_works_for_the_new_file(loop):
    seen = []
    first, other = socket.socketpair()
    number = first.fileno()
    loop.add_reader(number, seen.append, "stale")
    await ticks()
    first.close()
    other.close()
    second, peer = socket.socketpair()
    if second.fileno() != number:
        os.dup2(second.fileno(), number)
    loop.add_reader(number, lambda: seen.append(os.read(number, 10)))
    peer.send(b"fresh")
    try:
        await until(lambda: seen, 1)
        assert seen == [b"fresh"]
    finally:
        loop.remove_reader(number)
        if second.fileno() != number:
            os.close(number)
        second.close()
        peer.close()


async def test_a_number_reused_after_remove_reader_works_for_the_new_file(loop):
    for round_ in range(20):
        left, right = socket.socketpair()
        seen = []
        loop.add_reader(left, lambda left=left, seen=seen: seen.append(left.recv(10)))
        right.send(b"%d" % round_)
        await until(lambda seen=seen: seen)
        loop.remove_reader(left)
        left.close()
        right.close()
        assert seen == [b"%d" % round_]


@pytest.mark.uvloop_differs("gives None", UVLOOP_LOOP)
async def test_removing_after_the_file_was_closed_works(loop):
    left, right = socket.socketpair()
    number = left.fileno()
    loop.add_reader(number, nothing)
    await ticks()
    left.close()
    right.close()
    assert loop.remove_reader(number) is True
    assert loop.remove_reader(number) is False


async def test_a_dup_of_a_descriptor_is_watched_on_its_own(loop, pair):
    left, right = pair
    copy = os.dup(left.fileno())
    seen = []
    loop.add_reader(left, seen.append, "original")
    loop.add_reader(copy, seen.append, "copy")
    right.send(b"x")
    await until(lambda: {"original", "copy"} <= set(seen))
    loop.remove_reader(left)
    await ticks()
    seen.clear()
    await until(lambda: seen)
    assert set(seen) == {"copy"}
    loop.remove_reader(copy)
    os.close(copy)


async def test_a_dup_outlives_the_original(loop):
    left, right = socket.socketpair()
    copy = os.dup(left.fileno())
    seen = []
    loop.add_reader(left, nothing)
    loop.add_reader(copy, lambda: seen.append(os.read(copy, 10)))
    loop.remove_reader(left)
    left.close()
    right.send(b"x")
    await until(lambda: seen)
    assert seen == [b"x"]
    loop.remove_reader(copy)
    os.close(copy)
    right.close()


async def test_200_descriptors_are_watched_at_once(loop):
    pairs = [socket.socketpair() for _ in range(200)]
    seen = {}

    def reading(number):
        seen[number] = pairs[number][0].recv(10)

    for number, (left, _) in enumerate(pairs):
        loop.add_reader(left, reading, number)
    for number, (_, right) in enumerate(pairs):
        right.send(b"%d" % number)
    await until(lambda: len(seen) == 200)
    assert seen == {number: b"%d" % number for number in range(200)}
    for left, right in pairs:
        loop.remove_reader(left)
        left.close()
        right.close()


def test_the_loop_closes_with_readers_left(loop, pair):
    left, right = pair
    loop.add_reader(left, nothing)
    run_once(loop)
    loop.close()
    right.send(b"x")
    assert left.recv(1) == b"x"


async def test_a_stream_works_beside_a_reader(loop, pair):
    left, right = pair
    seen = []
    loop.add_reader(left, lambda: seen.append(left.recv(10)))
    async with connected(Recorder) as (_, protocol, peer):
        for number in range(50):
            peer.send(b"x")
            right.send(b"y")
            await until(lambda n=number: len(protocol.data) == n + 1 and len(seen) == n + 1)
    loop.remove_reader(left)


@pytest.mark.uvloop_differs(
    "knows descriptors by number only, and returns nothing",
    "https://github.com/MagicStack/uvloop/blob/v0.21.0/uvloop/loop.pyx")
def test_a_closed_file_object_can_still_be_removed(loop):
    left, right = socket.socketpair()
    with right:
        loop.add_reader(left, print)
        left.close()
        assert loop.remove_reader(left) is True


def test_readiness_shows_within_few_iterations(loop):
    """Callbacks that keep coming do not hide a descriptor: asyncio looks in every iteration."""
    left, right = socket.socketpair()
    left.setblocking(False)
    seen = []
    loop.add_reader(left, lambda: seen.append(left.recv(10)))

    async def main():
        for _ in range(5):
            await asyncio.sleep(0)
        right.send(b"x")
        for _ in range(5):
            await asyncio.sleep(0)
        assert seen == [b"x"]

    loop.run_until_complete(main())
    loop.remove_reader(left)
    left.close()
    right.close()


@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")  # uvloop drops one
def test_a_file_that_is_refused_is_not_kept(loop):
    with tempfile.TemporaryFile() as file:
        reference = weakref.ref(file)
        with pytest.raises(PermissionError):
            loop.add_reader(file, print)
    del file
    assert reference() is None
    gc.collect()


def test_the_selector_is_asked_by_number_and_by_object(loop, pair):
    left, _ = pair
    if not isinstance(loop, asyncio.SelectorEventLoop):
        pytest.skip("only selector loops have a _selector")
    with pytest.raises(KeyError):
        loop._selector.get_key(left)
    loop.add_reader(left, nothing)
    assert loop._selector.get_key(left).fd == left.fileno()
    assert loop._selector.get_key(left) == loop._selector.get_key(left.fileno())
    loop.remove_reader(left)
