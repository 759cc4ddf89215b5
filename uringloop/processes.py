"""SubprocessTransport: asyncio's subprocess transport, and where that is at fault, its repair.

Owns nothing of its own: the process, its pipes and the life cycle are asyncio's; the child watcher
reaps. What is repaired is in docs/compatibility.md, "Where it differs from asyncio".
"""

import asyncio
import contextlib
import os
import sys
import warnings
from asyncio import unix_events
from asyncio.log import logger
from collections.abc import Iterator
from typing import Any


class SubprocessTransport(unix_events._UnixSubprocessTransport):
    """A child process and the transports of its pipes."""

    # Set when the child watcher has waited for the child, maybe in another thread: its number may
    # be that of another process from then on.
    _is_reaped = False
    _is_connecting = False

    _closed: bool
    _exit_waiters: list[asyncio.Future[int]]

    def send_signal(self, signal: int) -> None:
        """Send a signal; nothing happens when the child has ended, but was not waited for."""
        self._check_proc()
        if not self._has_ended():
            self._proc.send_signal(signal)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._check_proc()
        if not self._has_ended():
            self._proc.terminate()

    def kill(self) -> None:
        """Send SIGKILL."""
        self._check_proc()
        if not self._has_ended():
            self._proc.kill()

    def _has_ended(self) -> bool:
        # Popen.send_signal() would find out by waiting, and leave no status to the watcher.
        if self._is_reaped or self._proc.returncode is not None:
            return True
        try:
            return os.waitid(os.P_PID, self._proc.pid,
                             os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True     # somebody else has waited for it

    def close(self) -> None:
        """Close the pipes and kill the child if it still runs; connection_lost() follows."""
        if self._closed:
            return
        self._closed = True
        if self._loop is not None and not self._loop.is_closed():
            for proto in self._pipes.values():
                if proto is not None:
                    proto.pipe.close()
        if self._proc is not None and self._returncode is None:
            if self._loop.get_debug():
                logger.warning("Close running child process: kill %r", self)
            try:
                self.kill()
            except PermissionError:
                pass    # it runs with another user's rights

    async def _connect_pipes(self, waiter: asyncio.Future[None] | None) -> None:
        self._is_connecting = True
        await super()._connect_pipes(waiter)
        if self._pending_calls is not None:
            self._close_unconnected()   # it was cancelled

    def _close_unconnected(self) -> None:
        """Close the pipes that did not become transports: they shall not wait for the collector."""
        for fd, file in enumerate((self._proc.stdin, self._proc.stdout, self._proc.stderr)):
            if file is not None and self._pipes.get(fd) is None:
                # After the connection_lost() of a transport that was being made of it.
                self._loop.call_soon(file.close)

    def _process_exited(self, returncode: int) -> None:
        if self._proc.returncode is not None:
            returncode = self._proc.returncode      # the user polled the Popen object
        super()._process_exited(returncode)
        if not self._is_connecting:
            self._close_unconnected()   # the task was cancelled before its first step
        # A grandchild may hold the pipes open for as long as it likes.
        waiters, self._exit_waiters = self._exit_waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(self._returncode)


@contextlib.contextmanager
def child_watcher(loop: asyncio.AbstractEventLoop) -> Iterator[Any]:
    """Who waits for children: the policy's watcher, from Python 3.14 on the loop's own.

    RuntimeError, as in asyncio, if it is not active.
    """
    if sys.version_info >= (3, 14):
        yield loop._watcher
        return
    watcher = _known_watcher()
    if watcher is None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            watcher = asyncio.get_child_watcher()
    with watcher as entered:
        if sys.version_info < (3, 12):
            watcher = entered
        if not watcher.is_active():
            raise RuntimeError("asyncio.get_child_watcher() is not activated, "
                               "subprocess support is not installed.")
        yield watcher


if sys.version_info < (3, 14):
    _get_child_watcher = asyncio.get_child_watcher
    _policys_get_child_watcher = unix_events._UnixDefaultEventLoopPolicy.get_child_watcher

    def _known_watcher() -> Any:
        """What asyncio.get_child_watcher() would return; None if it has to be called.

        It warns that it will go, and to silence that costs more than all else that it does.
        """
        if asyncio.get_child_watcher is not _get_child_watcher:
            return None
        policy = asyncio.get_event_loop_policy()
        method = getattr(policy.get_child_watcher, "__func__", None)
        return policy._watcher if method is _policys_get_child_watcher else None
