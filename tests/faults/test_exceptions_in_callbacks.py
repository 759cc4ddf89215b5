"""An exception out of a callback, at every position: KeyboardInterrupt and SystemExit leave
run_forever(), and the next run goes on as if nothing had happened; any other ends its connection
at most. connection_lost() comes exactly once in each case."""

import asyncio
import gc

import figures
import pytest
from helpers import assert_same, make_pair, pattern
from workload import BufferedClient, BufferedEcho, Client, Echo, Workload

KINDS = ("asyncio", "io_uring", "epoll")       # uvloop, run again, stands still
SIZE = 200_000
PROTOCOLS = {"data_received": (Client, Echo), "get_buffer": (BufferedClient, BufferedEcho),
             "buffer_updated": (BufferedClient, BufferedEcho)}


class Custom(BaseException):
    pass


class Bomb:
    """Raises once, when it is touched for the nth time."""

    def __init__(self, error, number):
        self.error, self.left = error, number
        self.raised = False

    def touch(self):
        self.left -= 1
        if self.left == 0:
            self.raised = True
            raise self.error


def armed(protocol, position, bomb):
    """The class, whose method raises when its work is done."""
    method = getattr(protocol, position)

    def raising(self, *args):
        result = method(self, *args)
        bomb.touch()
        return result

    return type(f"Armed{protocol.__name__}", (protocol,), {position: raising})


async def connect(work, client, echo):
    """Pairs of transports; the clients."""
    clients = []
    for seed in range(3):
        ours, peer = make_pair("tcp" if seed % 2 else "unix", small=True)
        peer.setblocking(False)
        await work.loop.create_connection(lambda: echo(work), sock=peer)
        _, protocol = await work.loop.create_connection(
            lambda seed=seed: client(work, seed, bytearray()), sock=ours)
        clients.append(protocol)
    return clients


def run_to_the_end(loop, work, main, stoppers):
    """Run again after each KeyboardInterrupt or SystemExit; the clients."""
    task = loop.create_task(main)
    while True:
        try:
            clients = loop.run_until_complete(asyncio.shield(task))
            break
        except stoppers:
            pass
    everybody = asyncio.gather(*(client.ended for client in clients))

    async def wait():
        await everybody
        while work.lost < work.made:
            await asyncio.sleep(0.001)

    waiting = loop.create_task(asyncio.wait_for(wait(), 30))
    while True:
        try:
            loop.run_until_complete(asyncio.shield(waiting))
            return clients
        except stoppers:
            pass


POSITIONS = ("connection_made", "data_received", "get_buffer", "buffer_updated", "eof_received",
             "pause_writing", "resume_writing", "connection_lost")


@pytest.mark.parametrize("number", [1, 4])
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_what_leaves_run_forever_loses_nothing(new_loop, loop_kind, position, error, number):
    loop = new_loop()
    bomb = Bomb(error, number)
    client, echo = (armed(kind, position, bomb)
                    for kind in PROTOCOLS.get(position, (Client, Echo)))
    work = Workload(loop, size=SIZE)
    clients = run_to_the_end(loop, work, connect(work, client, echo), error)
    for seed, protocol in enumerate(clients):
        assert_same(protocol.got, pattern(SIZE, seed))
    assert work.made == work.lost == 6
    assert not work.outcome.errors
    figures.count(loop_kind, cases=1, faults=int(bomb.raised), connections=3, bytes=3 * SIZE)


@pytest.mark.parametrize("number", [1, 4])
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("error", [ValueError, Custom, GeneratorExit, asyncio.CancelledError])
def test_other_exceptions_end_no_other_connection(new_loop, loop_kind, errors, position, error,
                                                  number):
    loop = new_loop()
    bomb = Bomb(error("out of a callback"), number)
    client, echo = (armed(kind, position, bomb)
                    for kind in PROTOCOLS.get(position, (Client, Echo)))
    work = Workload(loop, size=SIZE)
    clients = run_to_the_end(loop, work, connect(work, client, echo), ())
    complete = 0
    for seed, protocol in enumerate(clients):
        assert_same(protocol.got, pattern(SIZE, seed)[:len(protocol.got)])
        complete += len(protocol.got) == SIZE
    assert complete >= 2
    assert work.made == work.lost == 6
    assert len(errors) == bomb.raised
    figures.count(loop_kind, cases=1, faults=int(bomb.raised), connections=3,
                  bytes=sum(len(protocol.got) for protocol in clients))
    del clients
    gc.collect()


@pytest.mark.parametrize("where", ["call_soon", "call_later", "reader", "future", "handler"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_callbacks_of_the_loop_that_raise_lose_no_other(new_loop, loop_kind, errors, where, error):
    """A hundred callbacks, some of which leave the loop: each runs once."""
    loop = new_loop()
    ran = []

    def callback(number, *rest):
        ran.append(number)
        if number % 10 == 3:
            raise error

    def handler(loop, context):
        callback(int(str(context["exception"])))

    def fail(number):
        raise ValueError(number)

    if where == "handler":
        loop.set_exception_handler(handler)
    pairs = [make_pair("unix") for _ in range(100)] if where == "reader" else []
    futures = [loop.create_future() for _ in range(100)]
    for number in range(100):
        if where == "call_soon":
            loop.call_soon(callback, number)
        elif where == "call_later":
            loop.call_later(0.001, callback, number)
        elif where == "handler":
            loop.call_soon(fail, number)
        elif where == "future":
            futures[number].add_done_callback(
                lambda future, number=number: callback(number))
            futures[number].set_result(None)
        else:
            ours, peer = pairs[number]
            loop.add_reader(ours, lambda ours=ours, number=number: (
                loop.remove_reader(ours), callback(number)))
            peer.send(b"x")
    stops = 0
    for _ in range(1000):
        try:
            loop.call_later(0.002, loop.stop)
            loop.run_forever()
        except error:
            stops += 1
        if len(ran) == 100:
            break
    assert sorted(ran) == list(range(100))
    assert stops == 10
    for pair in pairs:
        for sock in pair:
            sock.close()
    figures.count(loop_kind, cases=1, faults=10)
