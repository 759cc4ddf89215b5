"""Servers that a suite needs: each test file gets its own, on a free port."""

import contextlib
import shutil
import socket
import subprocess
import tempfile
import time

LIMIT = 30.0    # seconds for a server to answer


def no_redis_server():
    """The reason why there is none, or "" (tools/install-redis installs it)."""
    return "" if shutil.which("redis-server") else "no redis-server (apt-get install redis-server)"


@contextlib.contextmanager
def redis_server():
    """Pytest's arguments for redis-py's tests."""
    port = _free_port()
    with tempfile.TemporaryDirectory(prefix="conform-redis-") as folder:
        command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "",
                   "--appendonly", "no", "--dir", folder, "--enable-debug-command", "yes"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
            try:
                _wait_for(server, port)
                yield ("--redis-url", f"redis://127.0.0.1:{port}/0")
            finally:
                server.terminate()


def _free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def _wait_for(server, port):
    deadline = time.monotonic() + LIMIT
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"redis-server on port {port} does not answer")
            time.sleep(0.05)
