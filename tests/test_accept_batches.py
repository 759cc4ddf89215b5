"""Connections that are accepted together, by code that interrupts the loop between two of them."""

import asyncio
import contextlib
import gc
import socket

import pytest
from helpers import Recorder, ticks, until

KINDS = ("io_uring", "epoll")       # the factory runs where they accept, asyncio's in a task

EXCEPTIONS = (SystemExit, KeyboardInterrupt)


def listen(loop, factory, clients):
    """A server, and the sockets of clients that wait to be accepted."""
    loop.set_debug(False)       # debug mode has another way through
    server = loop.run_until_complete(loop.create_server(factory, "127.0.0.1", 0))
    address = server.sockets[0].getsockname()
    return server, [socket.create_connection(address, timeout=20) for _ in range(clients)]


@pytest.mark.parametrize("exception", EXCEPTIONS)
def test_an_interrupted_factory_costs_one_connection_of_many(loop, exception):
    made, interrupted = [], []

    def factory():
        if len(made) == 30 and not interrupted:
            interrupted.append(True)
            raise exception
        made.append(Recorder())
        return made[-1]

    server, clients = listen(loop, factory, 40)
    with pytest.raises(exception):
        loop.run_until_complete(until(lambda: len(made) == 40))
    assert len(made) == 30
    loop.run_until_complete(until(lambda: len(made) == 39))
    loop.run_until_complete(ticks(3))
    for client in clients:
        client.close()
    loop.run_until_complete(until(lambda: all(protocol.lost_with for protocol in made)))
    server.close()
    loop.run_until_complete(ticks(3))


@pytest.mark.parametrize("exception", EXCEPTIONS)
def test_a_loop_that_is_closed_between_two_connections_closes_those_it_has_accepted(
        loop, exception):
    def factory():
        raise exception

    server, clients = listen(loop, factory, 4)
    with pytest.raises(exception):
        loop.run_until_complete(asyncio.sleep(20))
    server.close()
    loop.close()
    del server
    gc.collect()
    for client in clients:
        with client, contextlib.suppress(ConnectionError):
            assert client.recv(1) == b""


@pytest.mark.parametrize("closed", [False, True])
def test_a_nested_iteration_in_a_factory_serves_the_others_once(loop, closed):
    made = []

    def factory():
        made.append(Recorder())
        if len(made) == 3:
            if closed:
                server.close()
            loop._run_once()
        return made[-1]

    server, clients = listen(loop, factory, 70)
    loop.run_until_complete(until(lambda: len(made) >= (3 if closed else 70)))
    loop.run_until_complete(ticks(5))
    for client in clients:
        client.close()
    loop.run_until_complete(ticks(5))
    assert len(made) <= 70
    loop.run_until_complete(until(
        lambda: all(protocol.lost_with for protocol in made if protocol.transport)))
    server.close()
    loop.run_until_complete(ticks(3))
