"""DatagramTransport: asyncio's datagram transport, and where that is at fault, its repair.

Owns nothing of its own: socket, buffer and life cycle are asyncio's. What is repaired is in
docs/compatibility.md, "Where it differs from asyncio".
"""

import asyncio
import socket
import sys
from asyncio import constants, selector_events
from asyncio.log import logger
from typing import Any

# What a datagram counts in the buffer beside its payload: asyncio's figure since 3.13.
_HEADER_SIZE = 8 if sys.version_info >= (3, 13) else 0

Address = tuple[Any, ...] | str | bytes


class DatagramTransport(selector_events._SelectorDatagramTransport, asyncio.DatagramTransport):
    """Datagrams of one socket, sent and received one by one."""

    def __init__(self, loop: asyncio.AbstractEventLoop, sock: socket.socket,
                 protocol: asyncio.BaseProtocol, address: Address | None = None,
                 waiter: asyncio.Future[None] | None = None,
                 extra: dict[str, Any] | None = None) -> None:
        super().__init__(loop, sock, protocol, address, waiter, extra)
        # None when getpeername(2) failed; "" for a Unix socket connected to one without a name.
        self._has_peer = self._extra["peername"] is not None

    def sendto(self, data: bytes | bytearray | memoryview, addr: Address | None = None) -> None:
        """Send one datagram, empty ones too; buffer a copy of it when the socket is full.

        addr: where to; None on a connected endpoint. TypeError for data that is not bytes-like,
        ValueError for another address than that of the peer. Errors of the system call go to
        error_received(). After connection_lost() it does nothing.
        """
        if not isinstance(data, (bytes, bytearray, memoryview)):
            raise TypeError(f"data argument must be a bytes-like object, "
                            f"not {type(data).__name__!r}")
        if self._address and addr not in (None, self._address):
            raise ValueError(f"Invalid address: must be None or {self._address}")
        if self._address:
            addr = self._address    # with allow_broadcast the socket itself is not connected
        if self._sock is None or (self._conn_lost and self._address):
            self._count_lost()
            return
        if self._buffer:
            self._keep(data, addr)
        elif not self._try_to_send(data, addr):
            if self._conn_lost:
                self._count_lost()  # nobody would send what is kept now
                return
            self._loop._add_writer(self._sock_fd, self._sendto_ready)
            self._keep(data, addr)

    def _count_lost(self) -> None:
        if self._conn_lost >= constants.LOG_THRESHOLD_FOR_CONNLOST_WRITES:
            logger.warning("socket.send() raised exception.")
        self._conn_lost += 1

    def _keep(self, data: bytes | bytearray | memoryview, addr: Address | None) -> None:
        data = bytes(data)
        self._buffer.append((data, addr))
        self._buffer_size += _buffered_size(data)
        self._maybe_pause_protocol()

    def _try_to_send(self, data: bytes | bytearray | memoryview, addr: Address | None) -> bool:
        """False when the socket is full; True when the datagram is done with, sent or not."""
        try:
            if self._extra["peername"] or (addr is None and self._has_peer):
                self._sock.send(data)
            else:
                self._sock.sendto(data, addr)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as exc:
            self._protocol.error_received(exc)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as exc:
            self._fatal_error(exc, "Fatal write error on datagram transport")
        return True

    def _sendto_ready(self) -> None:
        while self._buffer:
            data, addr = self._buffer.popleft()
            self._buffer_size -= _buffered_size(data)
            if not self._try_to_send(data, addr):
                self._buffer.appendleft((data, addr))
                self._buffer_size += _buffered_size(data)
                break
        if not self._conn_lost:
            self._maybe_resume_protocol()   # may append to the buffer, close or abort
        if not self._buffer:
            self._loop._remove_writer(self._sock_fd)
            # With _conn_lost it is on its way already: the protocol closed an empty endpoint.
            if self._closing and not self._conn_lost:
                self._conn_lost += 1
                self._call_connection_lost(None)


def _buffered_size(data: bytes) -> int:
    # An empty datagram counts too, or a flood of them would never pause the protocol.
    return len(data) + _HEADER_SIZE or 8
