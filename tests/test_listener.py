"""Servers: listening, closing, bursts, running out of descriptors."""

import asyncio
import contextlib
import errno
import gc
import json
import os
import socket

import pytest
from helpers import (
    PY312,
    PY313,
    Echo,
    Recorder,
    has_ended,
    in_thread,
    read_exactly,
    read_to_end,
    run_child,
    serving,
    ticks,
    until,
)

UVLOOP_SERVER = "https://github.com/MagicStack/uvloop/blob/v0.21.0/uvloop/server.pyx"
UVLOOP_STREAM = "https://github.com/MagicStack/uvloop/blob/v0.21.0/uvloop/handles/streamserver.pyx"


def connect(address, family=socket.AF_INET):
    """A blocking client socket."""
    sock = socket.socket(family)
    sock.settimeout(20)
    try:
        sock.connect(address)
    except OSError:
        sock.close()
        raise
    return sock


class Keeper:
    """A protocol factory that keeps what it made."""

    def __init__(self, protocol=Recorder):
        self.protocol = protocol
        self.made = []

    def __call__(self):
        self.made.append(self.protocol())
        return self.made[-1]


# Serving


async def test_a_server_lists_its_listening_sockets(loop):
    async with serving(Recorder) as (server, address):
        (sock,) = server.sockets
        assert isinstance(sock.fileno(), int)
        assert sock.family == socket.AF_INET
        assert address[0] == "127.0.0.1" and address[1] > 0
        assert server.get_loop() is loop
        assert server.is_serving() is True


async def test_a_server_accepts_and_names_both_ends(loop):
    keeper = Keeper()
    async with serving(keeper) as (_, address):
        with await in_thread(connect, address) as client:
            await until(lambda: keeper.made and keeper.made[0].transport)
            transport = keeper.made[0].transport
            assert transport.get_extra_info("sockname") == address
            assert transport.get_extra_info("peername") == client.getsockname()
        assert await keeper.made[0].lost() is None


async def test_accepted_sockets_do_not_block_and_are_not_inherited(loop):
    keeper = Keeper()
    async with serving(keeper) as (_, address):
        with await in_thread(connect, address):
            await until(lambda: keeper.made and keeper.made[0].transport)
            fd = keeper.made[0].transport.get_extra_info("socket").fileno()
            assert os.get_blocking(fd) is False
            assert os.get_inheritable(fd) is False


async def test_a_server_made_idle_serves_after_start_serving(loop):
    async with serving(Echo, start_serving=False) as (server, address):
        assert server.is_serving() is False
        with pytest.raises(ConnectionRefusedError):
            await in_thread(connect, address)
        await server.start_serving()
        await server.start_serving()
        assert server.is_serving() is True
        with await in_thread(connect, address) as client:
            client.sendall(b"x")
            assert await in_thread(read_exactly, client, 1) == b"x"


async def test_serve_forever_ends_with_its_cancellation_and_closes(loop):
    server = await loop.create_server(Recorder, "127.0.0.1", 0, start_serving=False)
    task = asyncio.ensure_future(server.serve_forever())
    await until(server.is_serving)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert server.is_serving() is False


async def test_a_second_serve_forever_is_a_runtime_error(loop):
    async with serving(Recorder) as (server, _):
        task = asyncio.ensure_future(server.serve_forever())
        await ticks()
        with pytest.raises(RuntimeError):
            await server.serve_forever()
        task.cancel()
        await asyncio.wait([task])


async def test_serve_forever_of_a_closed_server_is_a_runtime_error(loop):
    server = await loop.create_server(Recorder, "127.0.0.1", 0)
    server.close()
    with pytest.raises(RuntimeError, match="is closed"):
        await server.serve_forever()


async def test_async_with_closes_the_server(loop):
    server = await loop.create_server(Recorder, "127.0.0.1", 0)
    async with server as entered:
        assert entered is server
        assert server.is_serving()
    assert not server.is_serving()
    assert tuple(server.sockets) == ()


async def test_an_address_in_use_is_an_os_error(loop):
    async with serving(Recorder) as (_, address):
        with pytest.raises(OSError) as caught:
            await loop.create_server(Recorder, *address)
        assert caught.value.errno == errno.EADDRINUSE


async def test_a_server_takes_a_listening_socket(loop):
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    server = await loop.create_server(Echo, sock=sock)
    with await in_thread(connect, sock.getsockname()) as client:
        client.sendall(b"x")
        assert await in_thread(read_exactly, client, 1) == b"x"
    server.close()


async def test_start_server_runs_the_callback_as_a_task(loop):
    async def serve(reader, writer):
        writer.write((await reader.readline()).upper())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    with await in_thread(connect, server.sockets[0].getsockname()) as client:
        client.sendall(b"hello\n")
        assert await in_thread(read_to_end, client) == b"HELLO\n"
    server.close()


# Closing


async def test_a_closed_server_refuses_new_connections_at_once(loop):
    server = await loop.create_server(Recorder, "127.0.0.1", 0)
    address = server.sockets[0].getsockname()
    await ticks()
    server.close()
    await ticks(2)
    with pytest.raises(ConnectionRefusedError):
        connect(address)
    assert server.is_serving() is False
    assert tuple(server.sockets) == ()


async def test_closing_a_server_again_does_nothing(loop):
    server = await loop.create_server(Recorder, "127.0.0.1", 0)
    server.close()
    server.close()
    await server.wait_closed()
    server.close()


async def test_closing_a_server_keeps_its_connections(loop):
    keeper = Keeper(Echo)
    async with serving(keeper) as (server, address):
        with await in_thread(connect, address) as client:
            await until(lambda: keeper.made and keeper.made[0].transport)
            server.close()
            await ticks()
            client.sendall(b"still here")
            assert await in_thread(read_exactly, client, 10) == b"still here"
        await keeper.made[0].lost()


async def test_a_closed_port_may_be_used_again(loop):
    async with serving(Recorder) as (server, address):
        server.close()
        await server.wait_closed()
    other = await loop.create_server(Recorder, *address)
    other.close()


async def test_wait_closed_without_connections_returns(loop):
    server = await loop.create_server(Recorder, "127.0.0.1", 0)
    server.close()
    await server.wait_closed()


@pytest.mark.skipif(not PY312, reason="older versions do not wait: gh-79033")
@pytest.mark.uvloop_differs("does not wait for them", UVLOOP_SERVER, run=False)
async def test_wait_closed_waits_for_the_connections(loop):
    keeper = Keeper()
    async with serving(keeper) as (server, address):
        client = await in_thread(connect, address)
        await until(lambda: keeper.made and keeper.made[0].transport)
        server.close()
        waiting = asyncio.ensure_future(server.wait_closed())
        await ticks(20)
        assert not waiting.done()
        client.close()
        await waiting
        await keeper.made[0].lost()


@pytest.mark.skipif(PY312, reason="newer versions wait: gh-79033")
@pytest.mark.uvloop_differs("may wait for them", UVLOOP_SERVER)
async def test_wait_closed_of_a_closed_server_returns_at_once(loop):
    keeper = Keeper()
    async with serving(keeper) as (server, address):
        with await in_thread(connect, address):
            await until(lambda: keeper.made and keeper.made[0].transport)
            server.close()
            await server.wait_closed()
        await keeper.made[0].lost()


@pytest.mark.skipif(not PY313, reason="new in 3.13")
@pytest.mark.uvloop_differs("does not have it", UVLOOP_SERVER)
@pytest.mark.parametrize("method", ["close_clients", "abort_clients"])
async def test_close_clients_ends_the_connections(loop, method):
    keeper = Keeper()
    async with serving(keeper) as (server, address):
        with contextlib.ExitStack() as clients:
            for _ in range(3):
                clients.enter_context(await in_thread(connect, address))
            await until(lambda: len(keeper.made) == 3 and all(p.transport for p in keeper.made))
            server.close()
            getattr(server, method)()
            for protocol in keeper.made:
                assert await protocol.lost() is None
            await server.wait_closed()


# The protocol factory


@pytest.mark.uvloop_differs("does not serve the next connection", UVLOOP_STREAM, run=False)
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")  # asyncio leaves it behind
@pytest.mark.parametrize("debug", [False, True])
async def test_an_exception_out_of_the_factory_is_reported_in_debug_mode(loop, debug):
    texts, tried = [], []

    def factory():
        tried.append(1)
        if not good:
            raise ZeroDivisionError("factory")
        return Echo()

    def report(loop, context):
        texts.append((context["message"], str(context["exception"])))

    good = False
    loop.set_debug(debug)
    loop.slow_callback_duration = 100
    loop.set_exception_handler(report)
    async with serving(factory) as (_, address):
        (await in_thread(connect, address)).close()
        await until(lambda: tried)
        good = True
        with await in_thread(connect, address) as client:
            client.sendall(b"x")
            assert await in_thread(read_exactly, client, 1) == b"x"
        await ticks()
    loop.set_debug(False)
    expected = ("Error on transport creation for incoming connection", "factory")
    assert texts == ([expected] if debug else [])


GARBAGE = "https://github.com/python/cpython/blob/v3.12.1/Lib/asyncio/selector_events.py#L213"


@pytest.mark.asyncio_differs("leaves it to the garbage collector", GARBAGE, run=False)
@pytest.mark.uvloop_differs("keeps the connection open", UVLOOP_STREAM, run=False)
async def test_a_connection_whose_factory_failed_is_closed_at_once(loop, errors):
    def factory():
        raise ZeroDivisionError("factory")

    loop.set_debug(True)
    loop.slow_callback_duration = 100
    async with serving(factory) as (_, address):
        with await in_thread(connect, address) as client:
            assert await in_thread(has_ended, client)
    loop.set_debug(False)


# Many connections


async def test_200_connections_in_a_burst_are_all_accepted(loop):
    keeper = Keeper(Echo)
    async with serving(keeper, backlog=256) as (_, address):
        clients = []
        for _ in range(200):
            client = socket.socket()
            client.setblocking(False)
            client.connect_ex(address)
            clients.append(client)
        await until(lambda: len(keeper.made) == 200)
        for number, client in enumerate(clients):
            client.settimeout(20)
            client.sendall(b"%3d" % number)
        for number, client in enumerate(clients):
            assert await in_thread(read_exactly, client, 3) == b"%3d" % number
            client.close()
        for protocol in keeper.made:
            await protocol.lost()


async def test_clients_that_left_before_the_accept_do_no_harm(loop):
    keeper = Keeper(Echo)
    async with serving(keeper) as (_, address):
        for _ in range(20):
            connect(address).close()
        with await in_thread(connect, address) as client:
            client.sendall(b"x")
            assert await in_thread(read_exactly, client, 1) == b"x"
        await until(lambda: all(protocol.lost_with for protocol in keeper.made))


async def test_closing_the_server_with_connections_waiting_loses_no_descriptor(loop):
    keeper = Keeper()
    server = await loop.create_server(keeper, "127.0.0.1", 0)
    clients = [connect(server.sockets[0].getsockname()) for _ in range(20)]
    server.close()
    await ticks(20)
    for client in clients:
        client.close()
    await until(lambda: all(protocol.lost_with for protocol in keeper.made))


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_the_loop_closes_with_a_server_and_its_connections(loop, errors):
    keeper = Keeper()

    async def main():
        server = await loop.create_server(keeper, "127.0.0.1", 0)
        client = await in_thread(connect, server.sockets[0].getsockname())
        await until(lambda: keeper.made and keeper.made[0].transport)
        return server, client

    server, client = loop.run_until_complete(main())
    loop.close()
    keeper.made.clear()
    del server, keeper
    client.close()
    gc.collect()


STARVED = """
import json, resource, socket, os, time
errors, made = [], []
loop.set_exception_handler(lambda loop, context: errors.append(context["message"]))

class Protocol(asyncio.Protocol):
    def connection_made(self, transport):
        made.append(transport)

def take_all_descriptors():
    taken = []
    try:
        while True:
            taken.append(os.dup(0))
    except OSError:
        return taken

async def main():
    # Lowered first: io_uring notes the limit when the accept is submitted.
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, 4096))
    server = await loop.create_server(Protocol, "127.0.0.1", 0, backlog=5)
    address = server.sockets[0].getsockname()
    await helpers.ticks()
    clients = [socket.socket() for _ in range(6)]
    taken = take_all_descriptors()
    for client in clients:
        client.settimeout(20)
        client.connect(address)
    await helpers.until(lambda: errors)
    busy, wall = time.process_time(), time.monotonic()
    await asyncio.sleep(0.5)
    busy, wall = time.process_time() - busy, time.monotonic() - wall
    starved = len(made)
    for fd in taken:
        os.close(fd)
    await helpers.until(lambda: len(made) == 6)
    print(json.dumps({"starved": starved, "made": len(made), "errors": len(errors),
                      "spins": busy > wall / 2, "message": errors[0]}))
    for transport in made:
        transport.abort()
    server.close()
    await helpers.ticks()

loop.run_until_complete(main())
loop.close()
"""


@pytest.mark.uvloop_differs(
    "libuv accepts and closes the connections it has no descriptors for",
    "https://github.com/libuv/libuv/blob/v1.x/src/unix/stream.c",
    run=False,
)
def test_without_descriptors_the_loop_waits_and_accepts_later(loop_kind):
    child = run_child(loop_kind, STARVED, limit=45)
    assert child.returncode == 0, child.stderr
    report = json.loads(child.stdout)
    assert report["starved"] == 0
    assert report["made"] == 6
    assert report["spins"] is False
    assert report["errors"] <= 50
    assert report["message"] == "socket.accept() out of system resource"


# Unix sockets and shared ports


async def test_a_server_on_a_unix_path(loop, tmp_path):
    path = str(tmp_path / "socket")
    server = await loop.create_unix_server(Echo, path)
    assert server.sockets[0].getsockname() == path
    with await in_thread(connect, path, socket.AF_UNIX) as client:
        client.sendall(b"x")
        assert await in_thread(read_exactly, client, 1) == b"x"
    server.close()
    await server.wait_closed()


@pytest.mark.skipif(not PY313, reason="the path stays before 3.13")
@pytest.mark.uvloop_differs("removes it in its own way", UVLOOP_SERVER)
async def test_closing_a_unix_server_removes_its_path(loop, tmp_path):
    path = tmp_path / "socket"
    server = await loop.create_unix_server(Echo, str(path))
    assert path.exists()
    server.close()
    await until(lambda: not path.exists())


async def test_a_stale_unix_path_is_replaced(loop, tmp_path):
    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(path)
    server = await loop.create_unix_server(Echo, path)
    with await in_thread(connect, path, socket.AF_UNIX) as client:
        client.sendall(b"x")
        assert await in_thread(read_exactly, client, 1) == b"x"
    server.close()


async def test_a_path_that_is_a_file_is_address_in_use(loop, tmp_path):
    path = tmp_path / "file"
    path.write_text("not a socket")
    with pytest.raises(OSError) as caught:
        await loop.create_unix_server(Echo, str(path))
    assert caught.value.errno == errno.EADDRINUSE


@pytest.mark.uvloop_differs(
    "create_unix_connection() cuts the name at its first byte",
    "https://github.com/MagicStack/uvloop/blob/v0.21.0/uvloop/handles/pipe.pyx",
)
async def test_a_server_on_an_abstract_name(loop):
    name = f"\0uringloop-test-{os.getpid()}-{id(loop)}"
    server = await loop.create_unix_server(Echo, name)
    with await in_thread(connect, name, socket.AF_UNIX) as client:
        client.sendall(b"x")
        assert await in_thread(read_exactly, client, 1) == b"x"
    transport, protocol = await loop.create_unix_connection(Recorder, name)
    transport.write(b"y")
    assert await protocol.received(1) == b"y"
    transport.close()
    await protocol.lost()
    server.close()


async def test_two_servers_share_a_port_with_reuse_port(loop):
    keepers = [Keeper(Echo), Keeper(Echo)]
    first = await loop.create_server(keepers[0], "127.0.0.1", 0, reuse_port=True)
    address = first.sockets[0].getsockname()
    second = await loop.create_server(keepers[1], *address, reuse_port=True)
    for number in range(40):
        with await in_thread(connect, address) as client:
            client.sendall(b"%2d" % number)
            assert await in_thread(read_exactly, client, 2) == b"%2d" % number
    assert sum(len(keeper.made) for keeper in keepers) == 40
    assert all(keeper.made for keeper in keepers)
    first.close()
    second.close()
    await until(lambda: all(p.lost_with for keeper in keepers for p in keeper.made))


async def test_a_server_on_two_hosts_listens_on_both(loop):
    server = await loop.create_server(Echo, ["127.0.0.1", "127.0.0.2"], 0)
    names = [sock.getsockname() for sock in server.sockets]
    assert sorted(host for host, _ in names) == ["127.0.0.1", "127.0.0.2"]
    for name in names:
        with await in_thread(connect, name) as client:
            client.sendall(b"x")
            assert await in_thread(read_exactly, client, 1) == b"x"
    server.close()


@pytest.mark.asyncio_differs(
    "its server cannot be closed after its socket was",
    "https://docs.python.org/3/library/selectors.html#selectors.BaseSelector.unregister")
async def test_a_listening_socket_that_the_user_closed_accepts_no_more(loop):
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    address = listener.getsockname()
    keeper = Keeper()
    server = await loop.create_server(keeper, sock=listener)
    listener.close()
    server.close()
    await ticks()

    def try_to_connect():
        with socket.socket() as sock:
            sock.settimeout(20)
            sock.connect(address)
            return sock.recv(1)

    with pytest.raises(ConnectionError):
        await in_thread(try_to_connect)
    assert keeper.made == []


async def test_accepted_sockets_know_that_they_do_not_block(loop):
    keeper = Keeper()
    server = await loop.create_server(keeper, "127.0.0.1", 0)
    with await in_thread(connect, server.sockets[0].getsockname()):
        await until(lambda: keeper.made and keeper.made[0].transport)
        assert keeper.made[0].transport.get_extra_info("socket").gettimeout() == 0
        keeper.made[0].transport.abort()
        await ticks()
    server.close()


@pytest.mark.asyncio_differs("refuses, but Server.close() raises ValueError then",
                             "https://docs.python.org/3/library/selectors.html: unregister()")
@pytest.mark.uvloop_differs("has a duplicate of the socket", UVLOOP_SERVER)
async def test_a_listening_socket_closed_under_its_server_refuses(loop):
    for _ in range(20):
        listener = socket.create_server(("127.0.0.1", 0))
        server = await loop.create_server(Recorder, sock=listener)
        address = listener.getsockname()
        client = await in_thread(connect, address)
        listener.close()
        await ticks(20)     # a loop that never sleeps looks, too
        with pytest.raises(ConnectionRefusedError):
            await in_thread(lambda address=address: connect(address).close())
        client.close()
        server.close()
