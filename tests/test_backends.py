"""Where io_uring is refused the same loop runs on epoll, says so once, and tells why."""

import errno
import json
import os
import subprocess
import sys
import textwrap

import pytest
from helpers import search_path

import uringloop
from uringloop import backend

REFUSE = "import ctypes, errno, os, sys\nimport refuse_io_uring\n"

ECHO = """
async def main():
    async def serve(reader, writer):
        writer.write(await reader.read(100))
        writer.close()
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    writer.write(b"hello")
    answer = await reader.read()
    writer.close()
    server.close()
    return answer
"""


def run_child(source, **environment):
    """Run a script with tests/ on its path; returns what it printed as JSON, and its stderr."""
    environment = {**os.environ, "PYTHONPATH": search_path(), "URINGLOOP_BACKEND": "",
                   **environment}
    child = subprocess.run([sys.executable, "-P", "-c", textwrap.dedent(source)], env=environment,
                           capture_output=True, text=True, timeout=60)
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout), child.stderr


@pytest.mark.parametrize("name", ["EPERM", "ENOSYS"])
def test_a_refused_ring_falls_back_with_its_cause(name):
    (kind, reason, answer, known), logged = run_child(REFUSE + f"""
refuse_io_uring.refuse_io_uring(errno.{name})
import asyncio, json, uringloop
{ECHO}
loops = [uringloop.new_event_loop() for _ in range(3)]
answers = [loop.run_until_complete(main()) for loop in loops]
print(json.dumps([loops[0].backend, loops[0].backend_reason, answers[2].decode(),
                  uringloop.available()]))
for loop in loops:
    loop.close()
""")
    assert (kind, answer, known) == ("epoll", "hello", False)
    assert name in reason
    words = {"EPERM": ("seccomp", "io_uring_disabled"), "ENOSYS": ("no io_uring system call",)}
    assert any(word in reason for word in words[name])
    assert logged.count("io_uring cannot be used, the loop runs on epoll") == 1


def test_demanding_a_refused_ring_raises_with_cause_and_fix():
    (number, text), _ = run_child(REFUSE + """
refuse_io_uring.refuse_io_uring()
import json, uringloop
try:
    uringloop.new_event_loop(uringloop.LoopOptions(backend="io_uring"))
except OSError as exc:
    print(json.dumps([exc.errno, str(exc)]))
""")
    assert number == errno.EPERM
    assert "backend='auto' would use epoll" in text


def test_a_filter_installed_after_the_probe_still_falls_back():
    (kind, answer), logged = run_child(REFUSE + f"""
import asyncio, json, uringloop
{ECHO}
uringloop.available()
loop = uringloop.new_event_loop()
refuse_io_uring.refuse_io_uring()
answer = loop.run_until_complete(main())
print(json.dumps([loop.backend, answer.decode()]))
loop.close()
""")
    assert (kind, answer) == ("epoll", "hello")


@pytest.mark.skipif(not uringloop.available(), reason="io_uring is not available here")
def test_a_filter_installed_while_running_is_a_clear_error():
    (number, text), _ = run_child(REFUSE + """
import asyncio, json, socket, uringloop
loop = uringloop.new_event_loop()
async def main():
    a, b = socket.socketpair()
    await loop.create_connection(asyncio.Protocol, sock=a)
    refuse_io_uring.refuse(426, 426, errno.EPERM)
    await loop.create_connection(asyncio.Protocol, sock=b)
    await asyncio.sleep(1)
try:
    loop.run_until_complete(main())
except OSError as exc:
    print(json.dumps([exc.errno, str(exc)]), flush=True)
    os._exit(0)
""")
    assert number == errno.EPERM
    assert "io_uring_enter failed while the loop was running" in text


@pytest.mark.skipif(not uringloop.available(), reason="io_uring is not available here")
@pytest.mark.parametrize("limit", [0, 65536])
def test_little_locked_memory_shrinks_the_ring_or_falls_back(limit):
    (kinds, reasons), _ = run_child(f"""
import asyncio, json, os, resource, uringloop
{ECHO}
uringloop.available()
resource.setrlimit(resource.RLIMIT_MEMLOCK, ({limit}, {limit}))
if os.getuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
loops = [uringloop.new_event_loop() for _ in range(4)]
assert all(loop.run_until_complete(main()) == b"hello" for loop in loops)
print(json.dumps([[loop.backend for loop in loops], [loop.backend_reason for loop in loops]]))
for loop in loops:
    loop.close()
""")
    assert all(kind == "io_uring" or "RLIMIT_MEMLOCK" in reason
               for kind, reason in zip(kinds, reasons))
    if limit == 0:
        assert "epoll" in kinds


def test_the_environment_switches_io_uring_off():
    (kind, reason), logged = run_child("""
import json, uringloop
loop = uringloop.new_event_loop(uringloop.LoopOptions(backend="io_uring"))
print(json.dumps([loop.backend, loop.backend_reason]))
loop.close()
""", URINGLOOP_BACKEND="epoll")
    assert (kind, reason, logged) == ("epoll", "chosen by options or environment", "")


@pytest.mark.parametrize(("error", "step", "words"), [
    (errno.ENOSYS, "setup", "no io_uring system call"),
    (errno.ENOMEM, "setup", "RLIMIT_MEMLOCK"),
    (errno.EMFILE, "setup", "RLIMIT_NOFILE"),
    (errno.EINVAL, "multishot", "too old: it refused the step 'multishot'"),
    (errno.EIO, "buffers", "the step 'buffers' failed"),
])
def test_causes_are_told_apart(error, step, words):
    text = backend.explain(error, step)
    assert words in text
    assert errno.errorcode[error] in text


def test_available_and_its_reason_agree():
    assert uringloop.available() is (uringloop.unavailable_reason() == "")
