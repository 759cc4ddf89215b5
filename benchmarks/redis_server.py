"""A server of a little of Redis's protocol (RESP 2): PING, SET and GET, on asyncio.Protocol.

What redis-benchmark needs and no more; the values live as long as the process. Requests that came
in one piece are answered in one write.
"""

import asyncio

from benchmarks.echo_servers import BACKLOG, EchoConfig, bound_socket


class Malformed(ValueError):
    """Bytes that are no request."""


def parse_request(data: bytes, position: int) -> tuple[list[bytes], int] | None:
    """The words of the request at `position` and where it ends; None when it isn't complete.

    A request is an array of bulk strings, or a line of words. Raises Malformed.
    """
    end = data.find(b"\r\n", position)
    if end < 0:
        return None
    if data[position : position + 1] != b"*":
        return data[position:end].split(), end + 2
    words, count, position = [], length_at(data, position, end), end + 2
    for _ in range(count):
        end = data.find(b"\r\n", position)
        if end < 0:
            return None
        if data[position : position + 1] != b"$":
            raise Malformed("expected a bulk string")
        start = end + 2
        position = start + length_at(data, position, end) + 2
        if len(data) < position:
            return None
        words.append(data[start : position - 2])
    return words, position


def length_at(data: bytes, position: int, end: int) -> int:
    """The number behind a type's first byte. Raises Malformed."""
    digits = data[position + 1 : end]
    if not digits.isdigit() or len(digits) > 9:
        raise Malformed("expected a length")
    return int(digits)


def bulk(value: bytes | None) -> bytes:
    """A value as a reply; None for the absence of one."""
    return b"$-1\r\n" if value is None else b"$%d\r\n%b\r\n" % (len(value), value)


class RedisProtocol(asyncio.Protocol):
    """One client's connection; `values` is shared by all."""

    def __init__(self, values: dict[bytes, bytes]) -> None:
        self._values = values
        self._rest = b""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        data = self._rest + data if self._rest else data
        replies, position = [], 0
        try:
            while request := parse_request(data, position):
                words, position = request
                replies.append(self._answer(words))
        except Malformed as error:
            self._transport.write(b"".join(replies) + b"-ERR Protocol error: %b\r\n"
                                  % str(error).encode())  # fmt: skip
            self._transport.close()
            return
        self._rest = data[position:]
        if replies:
            self._transport.write(b"".join(replies))

    def _answer(self, words: list[bytes]) -> bytes:
        name = words[0].upper() if words else b""
        if name == b"GET" and len(words) == 2:
            return bulk(self._values.get(words[1]))
        if name == b"SET" and len(words) == 3:
            self._values[words[1]] = words[2]
            return b"+OK\r\n"
        if name == b"PING" and len(words) == 1:
            return b"+PONG\r\n"
        if name == b"CONFIG":  # redis-benchmark asks for two settings, to print them
            return b"*0\r\n"
        return b"-ERR unknown command\r\n"


async def start_redis() -> tuple[object, object]:
    """Start the server; returns ([host, port], what has to be kept alive)."""
    values: dict[bytes, bytes] = {}
    listener = bound_socket(EchoConfig("protocol", "tcp", 0))
    address = listener.getsockname()
    server = await asyncio.get_running_loop().create_server(
        lambda: RedisProtocol(values), sock=listener, backlog=BACKLOG
    )
    return address, (server, listener)
