"""Running, stopping and closing loops at the wrong time; runners, policies and test frameworks.

Each scenario must say what it says on asyncio, warnings and log lines included; what happens at the
exit of the interpreter is compared with the output of child processes.
"""

import asyncio
import concurrent.futures
import socket
import sys
import threading

import pytest
from helpers import PY312, PY313, ticks
from transcripts import assert_as_asyncio, assert_child_as_asyncio

UVLOOP_LOOP = "https://github.com/MagicStack/uvloop/blob/v0.21.0/uvloop/loop.pyx"


def nothing(*args):
    pass


def run_once(loop):
    loop.call_soon(loop.stop)
    loop.run_forever()


# At the wrong time


@pytest.mark.uvloop_differs("has messages of its own", UVLOOP_LOOP)
def test_a_running_loop_refuses_to_run_and_to_close(loop_kind, ledger):
    def scenario(loop, say):
        async def main():
            say.error(loop.run_until_complete, loop.create_future())
            say.error(loop.close)
            other = asyncio.SelectorEventLoop()
            if not PY313:  # where it resets the state of the outer loop: gh-130145
                say.error(other.run_forever)
                say.error(other.run_until_complete, other.create_future())
            other.close()
            made = asyncio.sleep(0)
            say.error(asyncio.run, made)
            made.close()
            say(loop.is_running(), asyncio.get_running_loop() is loop)

        loop.run_until_complete(main())

    assert_as_asyncio(scenario, loop_kind)


@pytest.mark.uvloop_differs("has messages of its own", UVLOOP_LOOP)
def test_futures_that_do_not_fit(loop_kind, ledger):
    def scenario(loop, say):
        other = asyncio.SelectorEventLoop()
        say.error(loop.run_until_complete, other.create_future())
        for wrong in (None, 5, nothing, concurrent.futures.Future()):
            say.error(loop.run_until_complete, wrong)
        future = loop.create_future()
        loop.call_soon(loop.stop)
        say.error(loop.run_until_complete, future)
        future.set_exception(ZeroDivisionError("set"))
        say.error(loop.run_until_complete, future)
        cancelled = loop.create_future()
        cancelled.cancel("a word")
        say.error(loop.run_until_complete, cancelled)
        other.close()

    assert_as_asyncio(scenario, loop_kind)


def test_stop_at_every_time(loop_kind, ledger):
    def scenario(loop, say):
        loop.stop()
        loop.stop()
        loop.call_soon(say, "one iteration")
        loop.run_forever()
        loop.call_soon(lambda: (loop.stop(), loop.call_soon(loop.stop), say("stopping")))
        loop.run_forever()
        run_once(loop)
        loop.stop()
        say("not yet", loop.is_running())
        run_once(loop)
        loop.call_later(0, loop.stop)
        loop.run_forever()
        say(loop.is_running(), loop.is_closed())

    assert_as_asyncio(scenario, loop_kind)


USES = {
    "call_soon": lambda loop: loop.call_soon(nothing),
    "call_soon_threadsafe": lambda loop: loop.call_soon_threadsafe(nothing),
    "call_later": lambda loop: loop.call_later(0, nothing),
    "call_at": lambda loop: loop.call_at(0, nothing),
    "run_forever": lambda loop: loop.run_forever(),
    "run_in_executor": lambda loop: loop.run_in_executor(None, nothing),
    "add_reader": lambda loop: loop.add_reader(0, nothing),
    "add_writer": lambda loop: loop.add_writer(0, nothing),
    "remove_reader": lambda loop: loop.remove_reader(0),
    "remove_writer": lambda loop: loop.remove_writer(0),
    "add_signal_handler": lambda loop: loop.add_signal_handler(10, nothing),
    "remove_signal_handler": lambda loop: loop.remove_signal_handler(10),
    "create_future": lambda loop: loop.create_future().done(),
    "time": lambda loop: loop.time() > 0,
    "stop": lambda loop: loop.stop(),
    "close": lambda loop: loop.close(),
    "is_running": lambda loop: loop.is_running(),
    "is_closed": lambda loop: loop.is_closed(),
    "get_debug": lambda loop: loop.get_debug(),
    "set_debug": lambda loop: loop.set_debug(True),
    "call_exception_handler": lambda loop: loop.call_exception_handler({"message": "late"}),
    "set_exception_handler": lambda loop: loop.set_exception_handler(None),
    "set_task_factory": lambda loop: loop.set_task_factory(None),
    "repr": lambda loop: repr(loop),
}
COROUTINES = {
    "shutdown_asyncgens": lambda loop: loop.shutdown_asyncgens(),
    "shutdown_default_executor": lambda loop: loop.shutdown_default_executor(),
    "sock_recv": lambda loop: loop.sock_recv(socket.socket(), 1),
    "create_connection": lambda loop: loop.create_connection(asyncio.Protocol, "127.0.0.1", 1),
    "getaddrinfo": lambda loop: loop.getaddrinfo("127.0.0.1", 1),
}


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("name", USES)
@pytest.mark.uvloop_differs("other answers", UVLOOP_LOOP, run=False)
def test_a_closed_loops(loop_kind, ledger, name, debug):
    def scenario(loop, say):
        run_once(loop)
        loop.close()
        loop.set_debug(debug)
        say.error(USES[name], loop)

    assert_as_asyncio_closed(scenario, loop_kind)


@pytest.mark.parametrize("name", ["run_until_complete", "create_task", *COROUTINES])
@pytest.mark.uvloop_differs("other answers", UVLOOP_LOOP, run=False)
def test_coroutines_of_a_closed_loop(loop_kind, ledger, name):
    def scenario(loop, say):
        loop.close()
        made = COROUTINES.get(name, lambda loop: asyncio.sleep(0))(loop)
        if name in ("run_until_complete", "create_task"):
            say.error(getattr(loop, name), made)
        else:
            say.error(made.send, None)
        made.close()

    assert_as_asyncio_closed(scenario, loop_kind)


def assert_as_asyncio_closed(scenario, kind):
    assert_as_asyncio(scenario, kind, closes=True)


# Executors


class Inline(concurrent.futures.ThreadPoolExecutor):
    """Calls at once."""

    def submit(self, function, *args):
        future = concurrent.futures.Future()
        future.set_result(("inline", function(*args)))
        return future


@pytest.mark.uvloop_differs("takes any executor", UVLOOP_LOOP)
def test_executors(loop_kind, ledger):
    def scenario(loop, say):
        for wrong in (None, 5, concurrent.futures.Executor()):
            say.error(loop.set_default_executor, wrong)
        inline = Inline()

        async def main():
            say(await loop.run_in_executor(inline, len, "four"))
            loop.set_default_executor(inline)
            say(await loop.run_in_executor(None, len, "four"))
            say(await asyncio.to_thread(len, "four"))
            await loop.shutdown_default_executor()
            try:
                await loop.run_in_executor(None, nothing)
            except RuntimeError as exc:
                say(exc)

        loop.run_until_complete(main())

    assert_as_asyncio(scenario, loop_kind)


@pytest.mark.skipif(not PY312, reason="the timeout is of 3.12")
@pytest.mark.uvloop_differs("takes no timeout", UVLOOP_LOOP, run=False)
def test_shutting_the_executor_down_gives_up_after_a_timeout(loop_kind, ledger):
    def scenario(loop, say):
        async def main():
            # Early versions of 3.12 wait for the thread all the same.
            future = loop.run_in_executor(None, threading.Event().wait, 0.3)
            await ticks()
            await loop.shutdown_default_executor(0.01)
            say("shut down", await future)

        loop.run_until_complete(main())

    assert_as_asyncio(scenario, loop_kind)


# Async generators


def test_generators_used_after_the_shutdown_warn(loop_kind, ledger):
    async def generator():
        yield 1

    def scenario(loop, say):
        async def main():
            await loop.shutdown_asyncgens()
            async for item in generator():
                say(item)

        loop.run_until_complete(main())
        loop.run_until_complete(loop.shutdown_asyncgens())

    assert_as_asyncio(scenario, loop_kind)


@pytest.mark.parametrize("debug", [False, True])
def test_generators_that_are_left(loop_kind, ledger, debug):
    def scenario(loop, say):
        async def generator(name):
            try:
                yield name
            finally:
                await asyncio.sleep(0)
                say("closed", name)

        async def main():
            async for _ in generator("dropped"):
                break
            await ticks()
            kept = generator("kept")
            say(await anext(kept))
            return kept

        loop.set_debug(debug)
        kept = loop.run_until_complete(main())
        say("still open")
        loop.run_until_complete(loop.shutdown_asyncgens())
        say(kept.ag_frame is None)

    assert_as_asyncio(scenario, loop_kind)


# What a process says at its end

LEFT = {
    "nothing": "",
    "callbacks and timers": "loop.call_soon(print, 1); loop.call_later(9, print, 2)",
    "a task": "task = loop.create_task(asyncio.sleep(9), name='named')",
    "a task that ran": "task = loop.create_task(asyncio.sleep(9), name='named'); run()",
    "a task that nobody holds": "loop.create_task(asyncio.sleep(9), name='named'); run()",
    "a failed task": "task = loop.create_task(fail(), name='named'); run()",
    "a forgotten failed task": "loop.create_task(fail(), name='named'); run()",
    "a reader": "import socket; a, b = socket.socketpair(); loop.add_reader(a, print); run();"
                "a.close(); b.close()",
    "a server": "server = loop.run_until_complete("
                "loop.create_server(asyncio.Protocol, '127.0.0.1', 0)); run()",
    "an executor": "f = loop.run_in_executor(None, len, 'x'); run()",
    "a generator": "async def g():\n    yield 1\nasync def m():\n    global made\n    made = g()\n"
                   "    await anext(made)\nloop.run_until_complete(m())",
    "a coroutine": "made = fail()",
}
ENDS = {"closed": "loop.close()", "dropped": "del loop", "left open": ""}
HEAD = """
import logging
logging.basicConfig(format="%(name)s %(levelname)s %(message)s", level=logging.WARNING)
async def fail():
    raise ZeroDivisionError("failed")
def run():
    loop.run_until_complete(asyncio.sleep(0.001))
"""


@pytest.mark.parametrize("end, dev", [("closed", True), ("dropped", True), ("left open", False)])
@pytest.mark.parametrize("left", LEFT)
@pytest.mark.uvloop_differs("does not warn of unclosed loops, and debugs otherwise", UVLOOP_LOOP)
def test_a_process_ends_with(loop_kind, left, end, dev):
    own_noise = "$^"
    if loop_kind != "asyncio" and PY313 and end == "dropped":
        # Its loop fails to close when the interpreter is nearly gone, which leaves the self-pipe.
        own_noise = (r"Exception ignored in: <function BaseEv.*\nTraceback.*\nImportError.*\n?"
                     r"|<sys>:0: ResourceWarning: unclosed <socket.socket fd=N, family=1,.*\n?")
        if left == "a generator":
            pytest.skip("the loop that fails to close forgets the generator's end as well")
    assert_child_as_asyncio(loop_kind, f"{HEAD}{LEFT[left]}\n{ENDS[end]}\nprint('over')\n",
                            flags=("-X", "dev") if dev else (), but=own_noise)


# Runners and frameworks


@pytest.mark.parametrize("debug", [None, False, True])
def test_a_runner(loop_kind, debug):
    assert_child_as_asyncio(loop_kind, f"""
import contextvars, logging
logging.basicConfig(format="%(name)s %(levelname)s %(message)s", level=logging.WARNING)
loop.close()
variable = contextvars.ContextVar("variable", default="default")
async def main(value):
    print(variable.get(), asyncio.get_running_loop().get_debug())
    variable.set(value)
    asyncio.get_running_loop().create_task(asyncio.sleep(9), name="left")
    return value
async def fail():
    1 / 0
with asyncio.Runner(debug={debug}, loop_factory=lambda: helpers.make_loop(kind)) as runner:
    loop = runner.get_loop()
    print(runner.run(main(1)), runner.run(main(2)))
    print(runner.run(main(3), context=contextvars.copy_context()), runner.run(main(4)))
    print(runner.get_loop() is loop, loop.is_running(), loop.is_closed())
    try:
        runner.run(fail())
    except ZeroDivisionError as exc:
        print("raised", exc)
    for wrong in (5, None, lambda: 1):
        try:
            runner.run(wrong)
        except (TypeError, ValueError) as exc:
            print(type(exc).__name__, exc)
print(loop.is_closed())
for call in (runner.get_loop, lambda: runner.run(main(5))):
    try:
        call()
    except RuntimeError as exc:
        print(exc)
runner.close()
""")


INSTALLED = """
import asyncio, helpers, warnings, threading, logging
warnings.simplefilter("always")
loop.close()
if kind != "asyncio":
    class Policy(asyncio.DefaultEventLoopPolicy):
        def new_event_loop(self):
            return helpers.make_loop(kind)
    if kind in ("io_uring", "epoll"):
        import uringloop
        Policy = lambda: uringloop.EventLoopPolicy(uringloop.LoopOptions(backend=kind))
    asyncio.set_event_loop_policy(Policy())
def attempt(call):
    try:
        got = call()
        print(type(got).__mro__[-2].__name__, got)
        return got
    except RuntimeError as exc:
        print(type(exc).__name__, exc)
"""
GETTING = {
    "before any run": "attempt(asyncio.get_event_loop).close()",
    "after a run": """
async def main():
    print(asyncio.get_event_loop() is asyncio.get_running_loop())
asyncio.run(main())
attempt(asyncio.get_event_loop)
""",
    "in a thread": """
thread = threading.Thread(target=attempt, args=(asyncio.get_event_loop,))
thread.start()
thread.join()
""",
    "of the policy": """
attempt(asyncio.get_event_loop_policy().get_event_loop).close()
asyncio.set_event_loop(None)
attempt(asyncio.get_event_loop_policy().get_event_loop)
try:
    asyncio.set_event_loop(5)
except (TypeError, AssertionError) as exc:
    print(type(exc).__name__)
""",
    "new and set": """
loop = attempt(asyncio.new_event_loop)
asyncio.set_event_loop(loop)
print(asyncio.get_event_loop() is loop)
future = asyncio.ensure_future(asyncio.sleep(0, 5))
print(loop.run_until_complete(asyncio.wait_for(asyncio.gather(future), 5)))
loop.close()
attempt(asyncio.get_event_loop)
""",
    "futures without a loop": """
attempt(asyncio.Future)
made = asyncio.sleep(0)
attempt(lambda: asyncio.gather(made))
made.close()
""",
    "queues and locks": """
lock, queue, event = asyncio.Lock(), asyncio.Queue(1), asyncio.Event()
async def main():
    async with lock:
        await queue.put(1)
    event.set()
    await event.wait()
    return await queue.get()
print(asyncio.run(main()), asyncio.run(main(), debug=True))
""",
}


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="asyncio deprecates policies from 3.14 on")
@pytest.mark.parametrize("name", GETTING)
def test_getting_a_loop(loop_kind, name):
    assert_child_as_asyncio(loop_kind, INSTALLED + GETTING[name])


@pytest.mark.parametrize("switch", ["factory", "policy"])
def test_an_isolated_test_case(loop_kind, switch):
    if switch == "factory" and not PY313:
        pytest.skip("loop_factory is of 3.13")
    assert_child_as_asyncio(loop_kind, f"""{INSTALLED}
import io, unittest
class Case(unittest.IsolatedAsyncioTestCase):
    {"loop_factory = lambda self: helpers.make_loop(kind)" if switch == "factory" else ""}
    def setUp(self):
        print("setUp")
    async def asyncSetUp(self):
        self.loop = asyncio.get_running_loop()
        print("asyncSetUp", self.loop.get_debug())
        self.addAsyncCleanup(self.cleanup)
    async def cleanup(self):
        print("cleanup", asyncio.get_running_loop() is self.loop)
    async def asyncTearDown(self):
        print("asyncTearDown")
    async def test_loop(self):
        reader, writer = await asyncio.open_connection(sock=self.pair())
        writer.write(b"hello")
        await writer.drain()
        print(await asyncio.to_thread(self.peer.recv, 5))
        writer.close()
        await writer.wait_closed()
        self.peer.close()
    def pair(self):
        ours, self.peer = helpers.make_pair("unix")
        return ours
    async def test_failing(self):
        self.assertEqual(1, 2)
result = unittest.TextTestRunner(stream=io.StringIO()).run(
    unittest.defaultTestLoader.loadTestsFromTestCase(Case))
print(result.testsRun, len(result.failures), result.errors)
""")


PYTEST_ASYNCIO = """
import asyncio, helpers, pytest, warnings
kind = {kind!r}
warnings.simplefilter("ignore", DeprecationWarning)
class Policy(asyncio.DefaultEventLoopPolicy):
    def new_event_loop(self):
        return helpers.make_loop(kind)
@pytest.fixture
def event_loop_policy():
    return Policy()
@pytest.fixture
async def connection():
    ours, peer = helpers.make_pair("unix")
    reader, writer = await asyncio.open_connection(sock=ours)
    yield reader, writer, peer
    writer.close()
    await writer.wait_closed()
    peer.close()
@pytest.mark.asyncio
async def test_kind():
    assert type(asyncio.get_running_loop()).__module__.split(".")[0] == (
        "asyncio" if kind == "asyncio" else "uvloop" if kind == "uvloop" else "uringloop")
@pytest.mark.asyncio
async def test_echo(connection):
    reader, writer, peer = connection
    peer.sendall(b"line\\n")
    assert await reader.readline() == b"line\\n"
    writer.write(b"x")
    await writer.drain()
    assert await asyncio.to_thread(peer.recv, 1) == b"x"
"""


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="asyncio deprecates policies from 3.14 on")
def test_pytest_asyncio_with_a_policy(loop_kind, tmp_path):
    (tmp_path / "test_it.py").write_text(PYTEST_ASYNCIO.format(kind=loop_kind))
    assert_child_as_asyncio(loop_kind, f"""
loop.close()
import os, pytest
os.chdir({str(tmp_path)!r})
status = pytest.main(["-q", "-p", "no:cacheprovider", "-W", "error::ResourceWarning",
                      "-o", "asyncio_default_fixture_loop_scope=function"])
print("status", int(status))
""")
