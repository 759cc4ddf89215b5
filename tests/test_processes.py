"""Subprocesses: their pipes, exit status and signals, spawn failures, what a child inherits,
cancellation, closing, watchers."""

import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import warnings

import pytest
from helpers import PY312, PY313, assert_same, open_fds, pattern, run_child, ticks, until

PIPE = subprocess.PIPE
AMBIENT = set(open_fds().values())      # what every child may inherit, before there is a loop
UVLOOP_PROCESS = "https://github.com/MagicStack/uvloop/blob/v0.21.0/uvloop/handles/process.pyx"
UVLOOP_CLOEXEC = "https://github.com/MagicStack/uvloop/issues/40"
UVLOOP_LEAK = "https://github.com/MagicStack/uvloop/issues/185"
UVLOOP_STREAM = "https://github.com/MagicStack/uvloop/blob/v0.21.0/uvloop/handles/stream.pyx"
GRANDCHILD = "https://github.com/python/cpython/issues/119710"
CANCELLED = "https://github.com/python/cpython/issues/125502"
STATUS = "https://github.com/python/cpython/issues/88050"
LOOP_CLOSED = "https://github.com/python/cpython/issues/114177"


@contextlib.contextmanager
def child_watcher(make, loop=None):
    """A child watcher of the policy; there are none any more in Python 3.14."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        before = asyncio.get_child_watcher()
        watcher = make()
        watcher.attach_loop(loop)
        asyncio.set_child_watcher(watcher)
    try:
        yield
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            watcher.close()
            asyncio.set_child_watcher(before)


@pytest.fixture
def watched(loop):
    """A loop that can wait for children (before 3.12 asyncio needs a watcher for that)."""
    with contextlib.nullcontext() if PY312 else child_watcher(asyncio.ThreadedChildWatcher):
        yield loop


class Protocol(asyncio.SubprocessProtocol):
    """Records the calls in order."""

    def __init__(self):
        self.calls = []
        self.data = {1: b"", 2: b""}

    def connection_made(self, transport):
        self.calls.append("connection_made")

    def pipe_data_received(self, fd, data):
        self.data[fd] += data

    def pipe_connection_lost(self, fd, exc):
        self.calls.append(("pipe_connection_lost", fd, exc))

    def process_exited(self):
        self.calls.append("process_exited")

    def connection_lost(self, exc):
        self.calls.append(("connection_lost", exc))

    async def lost(self):
        await until(lambda: ("connection_lost", None) in self.calls)


def python(code):
    return sys.executable, "-c", code


def reaped(pid):
    """Whether somebody has waited for the child."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


# Data


async def test_a_subprocess_answers_through_its_pipes(loop, watched):
    upper = "import sys; sys.stdout.write(sys.stdin.read().upper())"
    process = await asyncio.create_subprocess_exec(*python(upper), stdin=PIPE, stdout=PIPE)
    assert await process.communicate(b"hello") == (b"HELLO", None)
    assert process.returncode == 0


async def test_megabytes_pass_through_a_subprocess(loop, watched):
    data = pattern(20 << 20)
    process = await asyncio.create_subprocess_exec("cat", stdin=PIPE, stdout=PIPE)
    output, _ = await process.communicate(data)
    assert_same(output, data)
    assert process.returncode == 0


async def test_streams_of_a_subprocess_have_back_pressure(loop, watched):
    """Nobody reads: neither side may buffer without bounds."""
    process = await asyncio.create_subprocess_exec(
        "cat", stdin=PIPE, stdout=PIPE, limit=10_000)
    chunk = pattern(50_000)
    count = 0
    while True:
        process.stdin.write(chunk)
        count += 1
        try:
            await asyncio.wait_for(process.stdin.drain(), 0.2)
        except TimeoutError:
            break
        assert count < 100
    assert len(process.stdout._buffer) < 1 << 20
    received = bytearray()
    closing = False
    while data := await process.stdout.read(30_000):
        received += data
        if not closing:
            closing = True
            process.stdin.close()
    assert_same(received, chunk * count)
    assert await process.wait() == 0


async def test_a_subprocess_is_read_by_lines(loop, watched):
    process = await asyncio.create_subprocess_exec("seq", "20000", stdout=PIPE)
    lines = [int(line) async for line in process.stdout]
    assert lines == list(range(1, 20001))
    assert await process.wait() == 0


async def test_a_shell_command_gives_its_output_and_exit_status(loop, watched):
    process = await asyncio.create_subprocess_shell(
        "echo out; echo err >&2; exit 3", stdout=PIPE, stderr=PIPE)
    assert await process.communicate() == (b"out\n", b"err\n")
    assert process.returncode == 3


async def test_the_error_output_may_go_where_the_output_goes(loop, watched):
    command = "for i in 1 2 3 4 5; do echo out $i; echo err $i >&2; done"
    process = await asyncio.create_subprocess_shell(
        command, stdout=PIPE, stderr=subprocess.STDOUT)
    output, errors = await process.communicate()
    assert output == b"".join(b"out %d\nerr %d\n" % (number, number) for number in range(1, 6))
    assert errors is None


async def test_a_subprocess_takes_files_of_the_users_own(loop, watched, tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(pattern(300_000))
    with source.open("rb") as stdin, target.open("wb") as stdout:
        process = await asyncio.create_subprocess_exec(
            "cat", stdin=stdin, stdout=stdout, stderr=subprocess.DEVNULL)
        assert await process.wait() == 0
    assert_same(target.read_bytes(), source.read_bytes())


async def test_environment_and_folder_of_a_subprocess(loop, watched, tmp_path):
    process = await asyncio.create_subprocess_shell(
        "pwd; echo $COLOUR", stdout=PIPE, cwd=tmp_path, env={**os.environ, "COLOUR": "red"})
    output, _ = await process.communicate()
    assert output.decode().splitlines() == [os.fspath(tmp_path.resolve()), "red"]


@pytest.mark.uvloop_differs("raises RuntimeError", UVLOOP_STREAM)
async def test_a_child_that_does_not_read_its_input_is_no_error(loop, watched):
    for _ in range(5):
        process = await asyncio.create_subprocess_shell("exit 7", stdin=PIPE, stdout=PIPE)
        assert await process.communicate(bytes(400_000)) == (b"", None)
        assert process.returncode == 7


async def test_empty_input_is_an_end_of_input(loop, watched):
    process = await asyncio.create_subprocess_exec("cat", stdin=PIPE, stdout=PIPE)
    assert await process.communicate(b"") == (b"", None)


async def test_fifty_subprocesses_run_at_once(loop, watched):
    async def echo(number):
        process = await asyncio.create_subprocess_exec(
            "cat", stdin=PIPE, stdout=PIPE, stderr=PIPE)
        output, _ = await process.communicate(b"%d" % number)
        return output, process.returncode

    outputs = await asyncio.gather(*map(echo, range(50)))
    assert outputs == [(b"%d" % number, 0) for number in range(50)]


@pytest.mark.uvloop_differs("may lose a pipe after the connection", UVLOOP_PROCESS)
async def test_a_subprocess_protocol_gets_all_its_calls(loop, watched):
    transport, protocol = await loop.subprocess_exec(
        Protocol, "sh", "-c", "echo hello; echo oops >&2; exit 4", stdin=None)
    assert transport.get_pid() > 0
    assert transport.get_pipe_transport(0) is None
    assert transport.get_pipe_transport(1) is not None
    await protocol.lost()
    assert transport.get_returncode() == 4
    transport.close()
    assert protocol.data == {1: b"hello\n", 2: b"oops\n"}
    assert protocol.calls[0] == "connection_made"
    assert protocol.calls[-1] == ("connection_lost", None)
    assert sorted(map(str, protocol.calls[1:-1])) == sorted(map(str, [
        ("pipe_connection_lost", 1, None), ("pipe_connection_lost", 2, None), "process_exited"]))


# Exit status and signals


@pytest.mark.parametrize("method", ["kill", "terminate", "send_signal"])
async def test_the_status_names_the_signal_that_ended_a_child(loop, watched, method):
    process = await asyncio.create_subprocess_exec("sleep", "60")
    arguments = (signal.SIGUSR1,) if method == "send_signal" else ()
    getattr(process, method)(*arguments)
    numbers = {"kill": signal.SIGKILL, "terminate": signal.SIGTERM, "send_signal": signal.SIGUSR1}
    assert await process.wait() == -numbers[method]
    assert process.returncode == -numbers[method]
    assert reaped(process.pid)


async def test_several_tasks_may_wait(loop, watched):
    process = await asyncio.create_subprocess_exec("cat", stdin=PIPE)
    waiting = [asyncio.ensure_future(process.wait()) for _ in range(5)]
    await ticks()
    waiting.pop().cancel()
    await ticks()
    assert process.returncode is None
    process.stdin.close()
    assert await asyncio.gather(*waiting) == [0] * 4
    assert await process.wait() == 0


@pytest.mark.asyncio_differs("waits for the pipes too", GRANDCHILD)
async def test_wait_is_for_the_child_and_not_for_who_holds_its_pipes(loop, watched):
    """A grandchild keeps the child's output open."""
    reading, writing = os.pipe()
    try:
        process = await asyncio.create_subprocess_shell(
            f"cat /proc/self/fd/{reading} & exit 5", stdout=PIPE, pass_fds=(reading,))
        waiting = asyncio.ensure_future(process.wait())
        await until(lambda: process.returncode is not None)
        await ticks(20)
        assert waiting.done() and waiting.result() == 5
        assert not process.stdout.at_eof()
        os.write(writing, b"from the grandchild")
    finally:
        os.close(writing)
        os.close(reading)
    assert await process.stdout.read() == b"from the grandchild"


def block_until_exit(pid):
    """Holds the loop until the child has ended: a zombie that the loop does not know of."""
    with contextlib.suppress(ChildProcessError):    # a watcher's thread was faster
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


@pytest.mark.asyncio_differs("reaps it and loses the status", STATUS, when=not PY313)
@pytest.mark.parametrize("method", ["kill", "terminate"])
async def test_a_signal_to_a_child_that_has_ended_keeps_its_status(loop, watched, method):
    process = await asyncio.create_subprocess_shell("read line; exit 3", stdin=PIPE)
    process.stdin.write(b"go\n")
    block_until_exit(process.pid)
    getattr(process, method)()
    assert await process.wait() == 3


@pytest.mark.asyncio_differs("reaps it and loses the status", STATUS)
async def test_closing_a_child_that_has_ended_keeps_its_status(loop, watched):
    transport, protocol = await loop.subprocess_exec(
        Protocol, "sh", "-c", "read line; exit 3", stdout=None, stderr=None)
    transport.get_pipe_transport(0).write(b"go\n")
    block_until_exit(transport.get_pid())
    transport.close()
    await protocol.lost()
    assert transport.get_returncode() == 3


async def test_a_signal_after_the_end_is_a_process_lookup_error(loop, watched):
    process = await asyncio.create_subprocess_exec("true")
    assert await process.wait() == 0
    await ticks(20)
    for method, *arguments in (("kill",), ("terminate",), ("send_signal", signal.SIGUSR1)):
        with pytest.raises(ProcessLookupError):
            getattr(process, method)(*arguments)


@pytest.mark.uvloop_differs("closes later", UVLOOP_PROCESS)
async def test_closing_the_transport_kills_the_child(loop, watched):
    transport, protocol = await loop.subprocess_exec(Protocol, "sleep", "60")
    assert transport.get_returncode() is None
    transport.close()
    transport.close()
    assert transport.is_closing()
    await protocol.lost()
    assert transport.get_returncode() == -signal.SIGKILL
    assert protocol.calls.count("process_exited") == 1
    assert protocol.calls[-1] == ("connection_lost", None)
    assert reaped(transport.get_pid())


# Cancellation


async def test_cancelled_reads_and_waits_leave_the_child_alone(loop, watched):
    process = await asyncio.create_subprocess_exec("cat", stdin=PIPE, stdout=PIPE)
    reading = asyncio.ensure_future(process.stdout.readline())
    waiting = asyncio.ensure_future(process.wait())
    await ticks(20)
    reading.cancel()
    waiting.cancel()
    await asyncio.wait([reading, waiting])
    assert process.returncode is None
    assert await process.communicate(b"hello") == (b"hello", None)
    assert process.returncode == 0


async def test_a_child_whose_communicate_was_cancelled_can_be_killed(loop, watched):
    process = await asyncio.create_subprocess_exec("sleep", "60", stdin=PIPE, stdout=PIPE)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await process.communicate(bytes(1 << 20))
    assert process.returncode is None
    process.kill()
    assert await process.wait() == -signal.SIGKILL


@pytest.mark.uvloop_differs("leaks descriptors", UVLOOP_LEAK, run=False)
async def test_a_cancelled_creation_leaves_neither_child_nor_descriptor(loop, watched):
    before = open_fds()
    for rounds in range(12):
        creating = asyncio.ensure_future(asyncio.create_subprocess_exec(
            "sleep", "60", stdin=PIPE, stdout=PIPE, stderr=PIPE))
        await ticks(rounds)
        creating.cancel()
        await asyncio.wait([creating])
        if not creating.cancelled():
            process = creating.result()
            process.kill()
            await process.wait()
        del creating
    await until(lambda: len(open_fds()) <= len(before))


@pytest.mark.asyncio_differs("waits for ever", CANCELLED, run=False)
@pytest.mark.uvloop_differs("leaks descriptors and hangs", UVLOOP_LEAK, run=False)
async def test_a_creation_whose_inner_task_is_cancelled_ends(loop, watched):
    """As when asyncio.run() cancels all tasks at the end."""
    before = open_fds()
    for rounds in range(12):
        creating = asyncio.ensure_future(asyncio.create_subprocess_exec(
            "sleep", "60", stdin=PIPE, stdout=PIPE, stderr=PIPE))
        await ticks(rounds)
        everything = asyncio.all_tasks() - {asyncio.current_task()}
        for task in everything:
            task.cancel()
        await asyncio.wait([creating])
        if not creating.cancelled():
            process = creating.result()
            process.kill()
            await process.wait()
        await until(lambda: len(open_fds()) <= len(before))


# Failures


@pytest.mark.parametrize("failure", ["ENOENT", "EACCES", "folder"])
@pytest.mark.uvloop_differs("leaks descriptors", UVLOOP_LEAK, run=False)
async def test_a_failed_spawn_leaves_nothing_behind(loop, watched, tmp_path, failure):
    file = tmp_path / "file"
    file.write_text("no program")
    program, options, error = {
        "ENOENT": ("/nonexistent/program", {}, FileNotFoundError),
        "EACCES": (os.fspath(file), {}, PermissionError),
        "folder": ("true", {"cwd": "/nonexistent/folder"}, FileNotFoundError),
    }[failure]
    await (await asyncio.create_subprocess_exec("true")).wait()
    await ticks(20)
    before, tasks = open_fds(), asyncio.all_tasks()
    for _ in range(10):
        with pytest.raises(error):
            await asyncio.create_subprocess_exec(
                program, stdin=PIPE, stdout=PIPE, stderr=PIPE, **options)
    gc.collect()
    await until(lambda: len(open_fds()) <= len(before))
    assert asyncio.all_tasks() == tasks
    process = await asyncio.create_subprocess_exec("true")
    assert await process.wait() == 0


@pytest.mark.parametrize("options", [{"universal_newlines": True}, {"shell": True},
                                     {"bufsize": 1}, {"text": True}, {"encoding": "utf-8"},
                                     {"errors": "strict"}], ids=lambda options: list(options)[0])
async def test_options_that_asyncio_does_not_support_are_value_errors(loop, watched, options):
    with pytest.raises(ValueError):
        await asyncio.create_subprocess_exec("true", **options)


@pytest.mark.uvloop_differs("raises TypeError", UVLOOP_PROCESS)
async def test_a_shell_command_must_be_text(loop, watched):
    with pytest.raises(ValueError):
        await asyncio.create_subprocess_shell(["true"])


# What a child inherits

LIST_FDS = """
import os
for name in os.listdir("/proc/self/fd"):
    try:
        print(name, os.readlink("/proc/self/fd/" + name))
    except OSError:
        pass        # the list's own
"""


@pytest.mark.uvloop_differs("hands its own descriptors on", UVLOOP_CLOEXEC, run=False)
@pytest.mark.parametrize("close_fds", [True, False], ids=["close_fds", "open fds"])
async def test_a_child_inherits_nothing_of_the_loop(loop, watched, close_fds):
    loop.add_signal_handler(signal.SIGUSR1, print)
    server = await loop.create_server(asyncio.Protocol, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    other = await asyncio.create_subprocess_exec("cat", stdin=PIPE, stdout=PIPE)
    process = await asyncio.create_subprocess_exec(
        *python(LIST_FDS), stdin=subprocess.DEVNULL, stdout=PIPE, close_fds=close_fds)
    output, _ = await process.communicate()
    found = dict(line.split(" ", 1) for line in output.decode().splitlines())
    extra = {fd: name for fd, name in found.items() if int(fd) > 2}
    if close_fds:
        assert extra == {}
    assert set(extra.values()) <= AMBIENT
    other.stdin.close()
    assert await other.wait() == 0
    writer.close()
    server.close()
    loop.remove_signal_handler(signal.SIGUSR1)
    await ticks(20)


async def test_pass_fds_are_inherited(loop, watched):
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as incoming:
        process = await asyncio.create_subprocess_exec(
            *python(f"import os; os.write({writing}, b'hello')"), pass_fds=(writing,))
        os.close(writing)
        assert await process.wait() == 0
        assert incoming.read() == b"hello"


async def test_code_may_run_in_the_child_before_exec(loop, watched):
    process = await asyncio.create_subprocess_exec(
        "sh", "-c", "echo $PPID", stdout=PIPE, preexec_fn=os.setsid, start_new_session=False)
    output, _ = await process.communicate()
    assert int(output) == os.getpid()


# Watchers, threads, the end of the loop


def test_a_loop_in_another_thread_runs_subprocesses(new_loop):
    with contextlib.nullcontext() if PY312 else child_watcher(asyncio.ThreadedChildWatcher):
        results = []

        async def main():
            process = await asyncio.create_subprocess_exec("cat", stdin=PIPE, stdout=PIPE)
            output, _ = await process.communicate(b"hello")
            return output, process.returncode

        loop = new_loop()
        thread = threading.Thread(target=lambda: results.append(loop.run_until_complete(main())))
        thread.start()
        thread.join()
        assert results == [(b"hello", 0)]


@pytest.mark.uvloop_differs("has a watcher of its own", UVLOOP_PROCESS, run=False)
@pytest.mark.filterwarnings("ignore:.*ChildWatcher.*:DeprecationWarning")
@pytest.mark.parametrize("name", ["SafeChildWatcher", "FastChildWatcher", "MultiLoopChildWatcher",
                                  "ThreadedChildWatcher", "PidfdChildWatcher"])
async def test_each_child_watcher_of_asyncio(loop, name):
    before = signal.getsignal(signal.SIGCHLD)
    with child_watcher(getattr(asyncio, name), loop):
        async def run(status):
            process = await asyncio.create_subprocess_exec(
                "sh", "-c", f"cat; exit {status}", stdin=PIPE, stdout=PIPE)
            output, _ = await process.communicate(b"%d" % status)
            return output, process.returncode

        # One by one: the handler of MultiLoopChildWatcher may interrupt itself.
        for status in range(5):
            assert await run(status) == (b"%d" % status, status)
    assert signal.getsignal(signal.SIGCHLD) in (before, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, before)


@pytest.mark.uvloop_differs("has a watcher of its own", UVLOOP_PROCESS)
@pytest.mark.skipif(sys.version_info >= (3, 14), reason="there are no child watchers any more")
async def test_an_inactive_child_watcher_is_a_runtime_error(loop):
    def make():
        watcher = asyncio.ThreadedChildWatcher()
        watcher.is_active = lambda: False
        return watcher

    with child_watcher(make), pytest.raises(RuntimeError, match="not activated"):
        await asyncio.create_subprocess_exec("true")


@pytest.mark.uvloop_differs("has a watcher of its own", UVLOOP_PROCESS)
@pytest.mark.skipif(sys.version_info >= (3, 14), reason="there are no child watchers any more")
@pytest.mark.parametrize("owner", ["class", "instance", "module"])
async def test_what_was_put_in_place_of_get_child_watcher_is_asked(loop, owner, monkeypatch):
    asked = []
    policy = asyncio.get_event_loop_policy()
    with child_watcher(asyncio.ThreadedChildWatcher):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            watcher = asyncio.get_child_watcher()

        def get_child_watcher(*policies):
            asked.append(policies)
            return watcher

        if owner == "class":
            derived = type("Policy", (type(policy),), {"get_child_watcher": get_child_watcher})
            monkeypatch.setattr(policy, "__class__", derived)
        elif owner == "instance":
            monkeypatch.setattr(policy, "get_child_watcher", get_child_watcher)
        else:
            monkeypatch.setattr(asyncio, "get_child_watcher", get_child_watcher)
            monkeypatch.setattr(asyncio.events, "get_child_watcher", get_child_watcher)
        process = await asyncio.create_subprocess_exec("true")
        assert await process.wait() == 0
        monkeypatch.undo()
    assert asked == [(policy,) if owner == "class" else ()]


@pytest.mark.skipif(not PY312, reason="the thread of the child watcher keeps the transport")
@pytest.mark.asyncio_differs("cannot close it any more", LOOP_CLOSED, run=False)
@pytest.mark.uvloop_differs("lets it run", UVLOOP_PROCESS, run=False)
def test_a_child_that_outlives_its_loop_is_killed_quietly(loop_kind):
    child = run_child(loop_kind, """
import gc, os
async def main():
    process = await asyncio.create_subprocess_exec("sleep", "60", stdin=-1, stdout=-1)
    return process.pid
pid = loop.run_until_complete(main())
loop.close()
gc.collect()
try:
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
except ChildProcessError:
    print(-9)       # Popen's finalizer was faster
""")
    assert (child.returncode, child.stdout) == (0, "-9\n"), child.stderr
    assert "Traceback" not in child.stderr, child.stderr


@pytest.mark.uvloop_differs("has none", UVLOOP_PROCESS)
async def test_the_popen_object_is_there(loop, watched):
    transport, protocol = await loop.subprocess_exec(Protocol, "true")
    assert transport.get_extra_info("subprocess").pid == transport.get_pid()
    await protocol.lost()
    transport.close()
