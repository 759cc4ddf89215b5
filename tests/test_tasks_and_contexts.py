"""Tasks, time limits and contextvars: the same answers in the same contexts as on asyncio."""

import asyncio
import contextlib
import contextvars
import os
import signal
import socket

import pytest
from helpers import PY312, make_loop, make_pair, ticks, until
from transcripts import assert_as_asyncio

UVLOOP_LOOP = "https://github.com/MagicStack/uvloop/blob/v0.21.0/uvloop/loop.pyx"
variable = contextvars.ContextVar("variable", default="default")


def context_of(value):
    context = contextvars.copy_context()
    context.run(variable.set, value)
    return context


async def answer(value=None):
    await asyncio.sleep(0)
    return value, variable.get()


# Contexts


@pytest.mark.uvloop_differs("runs due timers before what was ready", UVLOOP_LOOP)
def test_which_context_callbacks_run_in(loop_kind, ledger):
    def scenario(loop, say):
        def tell(name):
            say(name, variable.get())
            variable.set(f"set by {name}")

        def schedule():
            variable.set("of schedule")
            loop.call_soon(tell, "call_soon")
            loop.call_soon_threadsafe(tell, "threadsafe")
            loop.call_later(0, tell, "call_later")
            loop.call_at(0, tell, "call_at")
            future = loop.create_future()
            future.add_done_callback(lambda _: tell("done callback"))
            future.set_result(None)
            variable.set("later")

        schedule_context = contextvars.copy_context()
        schedule_context.run(schedule)
        shared = context_of("shared")
        for name in ("first", "second"):
            loop.call_soon(tell, name, context=shared)
        loop.run_until_complete(asyncio.sleep(0.01))
        say(schedule_context[variable], shared[variable], variable.get())

    assert_as_asyncio(scenario, loop_kind)


@pytest.mark.uvloop_differs("runs signal handlers in other contexts", UVLOOP_LOOP, run=False)
def test_which_context_watching_callbacks_run_in(loop_kind, ledger):
    def scenario(loop, say):
        def tell(remove, *args):
            remove(*args)
            say(variable.get())
            variable.set("changed")

        ours, peer = make_pair("unix")
        with ours, peer:
            peer.send(b"x")
            context_of("reader").run(loop.add_reader, ours, tell, loop.remove_reader, ours)
            loop.run_until_complete(until(lambda: len(say) == 1))
            context_of("writer").run(loop.add_writer, ours, tell, loop.remove_writer, ours)
            loop.run_until_complete(until(lambda: len(say) == 2))
        context_of("signal").run(
            loop.add_signal_handler, signal.SIGUSR1, tell, loop.remove_signal_handler,
            signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR1)
        loop.run_until_complete(until(lambda: len(say) == 3))

    assert_as_asyncio(scenario, loop_kind)


class Telling(asyncio.Protocol):
    """Says the context of each call, and sets the variable there."""

    def __init__(self, say, name, keep_open=True):
        self.say = say
        self.keep_open = keep_open
        self.name = name
        self.lost = False

    def tell(self, method):
        self.say(self.name, method, variable.get())
        variable.set(f"set by {method}")

    def connection_made(self, transport):
        self.transport = transport
        self.tell("connection_made")

    def data_received(self, data):
        self.tell("data_received")

    def eof_received(self):
        self.tell("eof_received")
        return self.keep_open

    def pause_writing(self):
        self.tell("pause_writing")

    def resume_writing(self):
        self.tell("resume_writing")

    def connection_lost(self, exc):
        self.tell("connection_lost")
        self.lost = True


@pytest.mark.parametrize("ending", ["close", "abort", "reset"])
@pytest.mark.uvloop_differs("runs protocols in other contexts", UVLOOP_LOOP, run=False)
def test_which_context_a_clients_protocol_runs_in(loop_kind, ledger, ending):
    async def main(loop, say):
        variable.set("of main")
        ours, peer = make_pair()
        with ours, peer:
            protocol = Telling(say, "client")
            transport, _ = await loop.create_connection(lambda: protocol, sock=ours)
            variable.set("after connecting")
            for part in (b"one", b"two"):
                count = len(say)
                peer.sendall(part)
                await until(lambda: len(say) > count)  # noqa: B023
            context_of("paused").run(transport.pause_reading)
            context_of("resumed").run(transport.resume_reading)
            peer.sendall(b"three")
            await until(lambda: len(say) == 4)
            if ending == "reset":
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                peer.close()
            else:
                peer.shutdown(socket.SHUT_WR)
                await until(lambda: len(say) == 5)
                context_of("ending").run(getattr(transport, ending))
            await until(lambda: protocol.lost)
            say(variable.get())
            await ticks()

    assert_as_asyncio(lambda loop, say: loop.run_until_complete(main(loop, say)), loop_kind)


def read_all(sock):
    with contextlib.suppress(BlockingIOError):
        while sock.recv(1_000_000):
            pass
    return True


@pytest.mark.uvloop_differs("runs protocols in other contexts", UVLOOP_LOOP, run=False)
def test_which_context_flow_control_runs_in(loop_kind, ledger):
    async def main(loop, say):
        ours, peer = make_pair(small=True)
        with ours, peer:
            peer.setblocking(False)
            protocol = Telling(say, "writer")
            transport, _ = await loop.create_connection(lambda: protocol, sock=ours)
            variable.set("after connecting")
            context_of("first write").run(transport.write, b"x" * 150_000)
            context_of("second write").run(transport.write, b"x" * 10)
            await ticks()
            # How much is left when it resumes depends on the kernel; a new wait begins after all.
            await until(lambda: read_all(peer) and not transport.get_write_buffer_size())
            context_of("third write").run(transport.write, b"x" * 150_000)
            context_of("close").run(transport.close)
            await until(lambda: read_all(peer) and protocol.lost)
            await ticks()

    assert_as_asyncio(lambda loop, say: loop.run_until_complete(main(loop, say)), loop_kind)


class WritesWhenResumed(Telling):
    def resume_writing(self):
        super().resume_writing()
        if self.name == "writer":
            self.name = "again"
            context_of("second write").run(self.transport.write, b"x" * 800_000)


@pytest.mark.uvloop_differs("runs protocols in other contexts", UVLOOP_LOOP, run=False)
def test_the_context_of_flow_control_lasts_until_all_is_sent(loop_kind, ledger):
    async def main(loop, say):
        ours, peer = make_pair("unix")
        with ours, peer:
            peer.setblocking(False)
            protocol = WritesWhenResumed(say, "writer")
            transport, _ = await loop.create_connection(lambda: protocol, sock=ours)
            transport.set_write_buffer_limits(high=300_000, low=200_000)
            context_of("first write").run(transport.write, b"x" * 800_000)
            await until(lambda: read_all(peer) and not transport.get_write_buffer_size())
            context_of("abort").run(transport.abort)
            await until(lambda: protocol.lost)
            await ticks()

    assert_as_asyncio(lambda loop, say: loop.run_until_complete(main(loop, say)), loop_kind)


@pytest.mark.uvloop_differs("runs protocols in other contexts", UVLOOP_LOOP, run=False)
def test_which_context_a_servers_protocols_run_in(loop_kind, ledger):
    async def main(loop, say):
        def factory():
            say("factory", variable.get())
            variable.set("set by factory")
            return Telling(say, "server", keep_open=False)

        variable.set("of the server")
        server = await loop.create_server(factory, "127.0.0.1", 0)
        variable.set("after listening")
        for number in range(2):
            with socket.create_connection(server.sockets[0].getsockname()) as client:
                client.sendall(b"x")
                await until(lambda: len(say) == 5 * number + 3)  # noqa: B023
            await until(lambda: len(say) == 5 * number + 5)  # noqa: B023
        server.close()
        await ticks()

    assert_as_asyncio(lambda loop, say: loop.run_until_complete(main(loop, say)), loop_kind)


# Tasks


def test_arguments_of_create_task(loop_kind, ledger):
    def scenario(loop, say):
        async def main():
            task = loop.create_task(answer(1), name="named", context=context_of("given"))
            say(task.get_name(), await task)
            say(loop.create_task(answer(2), name=5).get_name())
            task = asyncio.create_task(answer(3), name=None, context=context_of("other"))
            say(await task, len(asyncio.all_tasks()), asyncio.current_task() is not None)
            for wrong in (None, 5, answer):
                say.error(loop.create_task, wrong)

        loop.run_until_complete(main())
        say(asyncio.all_tasks(loop))

    assert_as_asyncio(scenario, loop_kind)


def test_arguments_that_create_task_refuses(loop_kind, ledger):
    """The words of the refusal are those of the method's signature, which varies."""
    async def nothing():
        pass

    with contextlib.closing(make_loop(loop_kind)) as loop:
        for wrong in ({"loop": loop}, {"loop": loop, "name": "named"}, {"unknown": 1},
                      {"name": "named", "unknown": None}):
            coroutine = nothing()
            with pytest.raises(TypeError):
                loop.create_task(coroutine, **wrong)
            coroutine.close()
        assert not asyncio.all_tasks(loop)


@pytest.mark.uvloop_differs("has its own references to the classes", UVLOOP_LOOP)
def test_what_a_program_puts_in_the_place_of_asyncios_classes_is_used(loop_kind, ledger,
                                                                       monkeypatch):
    def scenario(loop, say):
        class Future(asyncio.Future):
            pass

        class Task(asyncio.Task):
            pass

        say(type(loop.create_future()), type(loop.create_task(answer())))
        loop.run_until_complete(asyncio.sleep(0.01))
        monkeypatch.setattr(asyncio.futures, "Future", Future)
        monkeypatch.setattr(asyncio.tasks, "Task", Task)
        say(type(loop.create_future()).__qualname__, type(loop.create_task(answer())).__qualname__)
        say(type(loop.create_task(answer(), name="named")).__qualname__)
        loop.run_until_complete(asyncio.sleep(0.01))
        monkeypatch.undo()
        say(type(loop.create_future()), loop.create_future()._loop is loop)

    assert_as_asyncio(scenario, loop_kind)


def test_futures_and_tasks_of_a_closed_loop(loop_kind):
    loop = make_loop(loop_kind)
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    assert loop.create_future().get_loop() is loop
    coroutine = answer()
    for options in ({}, {"name": "named"}):
        with pytest.raises(RuntimeError, match="Event loop is closed"):
            loop.create_task(coroutine, **options)
    coroutine.close()


@pytest.mark.uvloop_differs("calls factories in its own way", UVLOOP_LOOP)
def test_task_factories(loop_kind, ledger):
    def scenario(loop, say):
        def factory(loop, coro, **options):
            say(coro.__name__, sorted(options))
            return asyncio.Task(coro, loop=loop, **options)

        def old(loop, coro):
            return asyncio.Task(coro, loop=loop)

        for wrong in (5, "text"):
            say.error(loop.set_task_factory, wrong)
        loop.set_task_factory(factory)
        say(loop.run_until_complete(answer(1)))

        async def main():
            say(await asyncio.create_task(answer(2)))
            say(await loop.create_task(answer(3), name="named", context=context_of("given")))
            async with asyncio.TaskGroup() as group:
                task = group.create_task(answer(4), name="in a group")
            say(task.get_name(), task.result())
            loop.set_task_factory(old)
            made = answer(5)
            say.error(lambda: loop.create_task(made, context=context_of("given")))
            made.close()
            say(await loop.create_task(answer(6)))

        loop.run_until_complete(main())
        loop.set_task_factory(None)
        say(loop.get_task_factory())

    assert_as_asyncio(scenario, loop_kind)


@pytest.mark.skipif(not PY312, reason="eager tasks are of 3.12")
@pytest.mark.uvloop_differs("passes other arguments to the factory", UVLOOP_LOOP)
def test_eager_tasks(loop_kind, ledger):
    def scenario(loop, say):
        async def at_once(value):
            say("began", asyncio.current_task().get_name())
            return value

        async def waits(future):
            say("waits", asyncio.current_task().get_name())
            return await future

        async def main():
            task = asyncio.create_task(at_once(1), name="first")
            say("made", task.done(), asyncio.current_task().get_name())
            future = loop.create_future()
            waiting = asyncio.create_task(waits(future), name="second")
            say(waiting.done())
            loop.call_soon(future.set_result, "result")
            say(await waiting, await task)
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(at_once(number)) for number in range(3)]
                say([task.done() for task in tasks])
            eager = asyncio.Task(at_once(5), loop=loop, name="third", eager_start=True)
            say(eager.done(), await eager)

        loop.set_task_factory(asyncio.eager_task_factory)
        loop.run_until_complete(loop.create_task(main(), name="main"))

    assert_as_asyncio(scenario, loop_kind)


# Time limits and groups


def test_time_limits(loop_kind, ledger):
    def scenario(loop, say):
        async def main():
            for limit in (0, -1, 0.01):
                try:
                    async with asyncio.timeout(limit):
                        await asyncio.sleep(20)
                except TimeoutError as exc:
                    say("timeout", limit, exc)
            async with asyncio.timeout(None) as scope:
                say(scope.when(), scope.expired())
                scope.reschedule(loop.time() + 20)
            try:
                async with asyncio.timeout_at(loop.time() + 0.01) as scope:
                    await asyncio.sleep(20)
            except TimeoutError:
                say("timeout_at", scope.expired())
            for limit in (0, 0.01, None, 20):
                try:
                    say("wait_for", limit, await asyncio.wait_for(
                        answer(limit) if limit in (None, 20) else asyncio.sleep(20), limit))
                except TimeoutError as exc:
                    say("wait_for", limit, exc)
            done, pending = await asyncio.wait(
                [loop.create_task(answer(1)), task := loop.create_task(asyncio.sleep(20))],
                timeout=0.01)
            say(len(done), len(pending))
            task.cancel()
            for result in asyncio.as_completed([answer(1)], timeout=20):
                say(await result)

        loop.run_until_complete(main())

    assert_as_asyncio(scenario, loop_kind)


def test_task_groups(loop_kind, ledger):
    def scenario(loop, say):
        async def fail(error):
            await asyncio.sleep(0)
            raise error

        async def endless(name):
            try:
                await loop.create_future()
            finally:
                say("cancelled", name)

        async def main():
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(endless("one"))
                    group.create_task(fail(ZeroDivisionError("first")))
                    group.create_task(fail(KeyError("second")))
            except* ZeroDivisionError as found:
                say(found.exceptions)
            except* KeyError as found:
                say(found.exceptions)
            try:
                async with asyncio.timeout(0.01), asyncio.TaskGroup() as group:
                    group.create_task(endless("two"))
            except TimeoutError:
                say("timeout")
            results = await asyncio.gather(
                answer(1), fail(LookupError("gathered")), return_exceptions=True)
            say(results)
            runner = asyncio.create_task(endless("three"))
            await ticks()
            runner.cancel("a word")
            try:
                await runner
            except asyncio.CancelledError as exc:
                say(exc.args)
            shielded = asyncio.shield(inner := asyncio.create_task(answer("inner")))
            shielded.cancel()
            say(await inner)

        loop.run_until_complete(main())

    assert_as_asyncio(scenario, loop_kind)
