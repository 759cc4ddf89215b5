"""SSLProtocol: asyncio's TLS over the engine's transports, with the ends that it leaves loose.

Owns nothing of the connection: the plain transport's protocol is the SSLProtocol, and the
application's protocol talks to the transport that the SSLProtocol makes.
"""

import asyncio
import ssl
import weakref
from asyncio import sslproto
from collections.abc import Callable
from typing import Any


class SSLProtocol(sslproto.SSLProtocol):
    """asyncio's, fit for any buffer of a BufferedProtocol and for connections that are in use."""

    # Of asyncio's class, and unknown to typeshed.
    _app_protocol_buffer_updated: Callable[[int], object]
    _app_protocol_get_buffer: Callable[[int], Any]
    _conn_lost: int
    _incoming: ssl.MemoryBIO

    def _set_app_protocol(self, app_protocol: asyncio.BaseProtocol) -> None:
        super()._set_app_protocol(app_protocol)
        if self._app_protocol_is_buffer:
            view = _View(app_protocol)
            self._app_protocol_get_buffer = view.get_buffer
            self._app_protocol_buffer_updated = view.buffer_updated

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the handshake, unless the connection was lost before."""
        if not self._conn_lost:
            super().connection_made(transport)

    def take_over(self, plain: Any) -> None:
        """Become the protocol of a plain transport that is paused, and own what is under way.

        Bytes that a server's StreamReader has already are the beginning of the peer's handshake
        (gh-142352). A client's are not: no server speaks first in TLS.
        """
        self._ssl_writing_paused = getattr(plain, "_protocol_paused", False)
        # Whom the plain transport told to pause waits to be told to resume.
        self._app_writing_paused = (
            self._ssl_writing_paused and plain.get_protocol() is self._app_protocol)
        if self._server_side and isinstance(self._app_protocol, asyncio.StreamReaderProtocol):
            self._take_input(self._app_protocol)
        plain.set_protocol(self)

    def _take_input(self, protocol: Any) -> None:
        reader = protocol._stream_reader
        if reader is not None and reader._buffer:
            self._incoming.write(reader._buffer)
            reader._buffer.clear()
            reader._paused = False      # as the transport, from now on


class _View:
    """The buffer of a BufferedProtocol, as a view while it is filled.

    asyncio fills the rest of a buffer by a slice of it, and a slice of a bytearray is a copy
    (gh-156275). buffer_updated() finds no view: the protocol may resize its bytearray.
    """

    def __init__(self, protocol: Any) -> None:
        self._protocol = protocol
        self._lent: weakref.ref[memoryview] | None = None

    def get_buffer(self, sizehint: int) -> memoryview:
        view = memoryview(self._protocol.get_buffer(sizehint))
        if view.nbytes:
            view = view.cast("B")
        self._lent = weakref.ref(view)
        return view

    def buffer_updated(self, nbytes: int) -> None:
        view = self._lent() if self._lent is not None else None
        if view is not None:
            view.release()
        self._protocol.buffer_updated(nbytes)


def checked_for_tls(transport: Any, sslcontext: Any) -> Any:
    """The transport, if start_tls() can use both; TypeError otherwise."""
    if not isinstance(sslcontext, ssl.SSLContext):
        raise TypeError("sslcontext is expected to be an instance of ssl.SSLContext, "
                        f"got {sslcontext!r}")
    if not getattr(transport, "_start_tls_compatible", False):
        raise TypeError(f"transport {transport!r} is not supported by start_tls()")
    return transport
