"""aiohttp and uvicorn on the loop, under wrk: no error, memory flat.

URINGLOOP_HTTP_SECONDS (default 3) is how long each is loaded.
"""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest
from helpers import LIMIT, why_not

KINDS = ("io_uring", "epoll")
SECONDS = int(os.environ.get("URINGLOOP_HTTP_SECONDS", "3"))
GROWTH_LIMIT_KIB = 8 * 1024

AIOHTTP = """
import sys
import uringloop
from aiohttp import web

async def index(request):
    return web.Response(text="hello " * 20)

uringloop.install()
app = web.Application()
app.router.add_get("/", index)
web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None, access_log=None)
"""

UVICORN_APP = """
async def app(scope, receive, send):
    if scope["type"] != "http":
        return
    await send({"type": "http.response.start", "status": 200,
                "headers": [(b"content-type", b"text/plain")]})
    await send({"type": "http.response.body", "body": b"hello " * 20})
"""


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def command_of(server, port, folder):
    if server == "aiohttp":
        pytest.importorskip("aiohttp")
        return [sys.executable, "-W", "ignore::DeprecationWarning", "-c", AIOHTTP, str(port)]
    pytest.importorskip("uvicorn")
    (folder / "hello_app.py").write_text(UVICORN_APP)
    return [sys.executable, "-m", "uvicorn", "hello_app:app", "--app-dir", str(folder), "--port",
            str(port), "--loop", "uringloop:new_event_loop", "--log-level", "warning",
            "--no-access-log"]


@contextlib.contextmanager
def running(command, port, kind):
    environment = {**os.environ, "URINGLOOP_BACKEND": kind}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        wait_until_served(process, port)
        yield process
        assert process.poll() is None, process.stderr.read()
    finally:
        process.send_signal(signal.SIGINT)
        try:
            _, errors = process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            process.kill()
            _, errors = process.communicate()
            errors += "\nthe server did not end on SIGINT"
    lines = [line for line in errors.splitlines() if "Error" in line or "did not end" in line]
    assert not lines, errors


def wait_until_served(process, port):
    deadline = time.monotonic() + LIMIT
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5) as answer:
                assert answer.read() == b"hello " * 20
                return
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"the server does not answer: {process.stderr.read()}")
            time.sleep(0.05)


def load(port, seconds):
    """Run wrk with 64 connections; (requests, what it says of errors)."""
    done = subprocess.run(
        ["wrk", "-t1", "-c64", f"-d{seconds}s", f"http://127.0.0.1:{port}/"],
        capture_output=True, text=True, timeout=seconds + LIMIT, check=True)
    requests = int(re.search(r"(\d+) requests in", done.stdout).group(1))
    errors = re.findall(r"^\s*(?:Socket errors|Non-2xx).*", done.stdout, re.MULTILINE)
    return requests, errors


def resident_kib(process):
    with open(f"/proc/{process.pid}/status") as status:
        return int(re.search(r"VmRSS:\s+(\d+)", status.read()).group(1))


@pytest.mark.timeout(SECONDS * 2 + 120)
@pytest.mark.parametrize("server", ["aiohttp", "uvicorn"])
def test_it_serves_under_load_without_an_error_and_with_flat_memory(loop_kind, server, tmp_path):
    assert not why_not(loop_kind)
    if not shutil.which("wrk"):
        pytest.skip("wrk is not installed")
    port = free_port()
    with running(command_of(server, port, tmp_path), port, loop_kind) as process:
        load(port, 1)
        before = resident_kib(process)
        requests, errors = load(port, SECONDS)
        grown = resident_kib(process) - before
    print(f"{server} on {loop_kind}: {requests} requests in {SECONDS} s, {grown} KiB grown")
    assert errors == []
    assert requests > 0
    if "libasan" not in os.environ.get("LD_PRELOAD", ""):     # its quarantine grows
        assert grown < GROWTH_LIMIT_KIB
