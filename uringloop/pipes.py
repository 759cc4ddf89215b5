"""WritePipeTransport: asyncio's write end of a pipe, and where that is at fault, its repair.

Owns nothing of its own: the file, the buffer and the life cycle are asyncio's. What is repaired is
in docs/compatibility.md, "Where it differs from asyncio".
"""

import os
from asyncio import unix_events


class WritePipeTransport(unix_events._UnixWritePipeTransport):
    """Writes to a pipe, fifo, socket or terminal, and notices when the reader leaves."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Write what the pipe takes now; keep a copy of the rest."""
        if isinstance(data, memoryview) and not (data.c_contiguous and data.format == "B"
                                                 and data.ndim == 1):
            data = bytes(data)      # asyncio takes its items for bytes
        super().write(data)

    def _write_ready(self) -> None:
        if not self._buffer:
            return
        try:
            written = os.write(self._fileno, self._buffer)
        except (BlockingIOError, InterruptedError):
            return
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as exc:
            self._buffer.clear()
            self._conn_lost += 1
            self._loop._remove_writer(self._fileno)
            self._fatal_error(exc, "Fatal write error on pipe transport")
            return
        del self._buffer[:written]
        if not self._buffer:
            self._loop._remove_writer(self._fileno)
            self._maybe_resume_protocol()   # may write, close or abort
            if self._closing and not self._buffer:
                self._loop._remove_reader(self._fileno)
                self._call_connection_lost(None)

    def _close(self, exc: BaseException | None = None) -> None:
        if self._pipe is not None:
            super()._close(exc)

    def _call_connection_lost(self, exc: BaseException | None) -> None:
        # Several causes may have scheduled it: close(), abort(), the end of the reader.
        if self._pipe is not None:
            # asyncio watches from the next iteration on, also what connection_made() has closed.
            self._loop._remove_reader(self._fileno)
            super()._call_connection_lost(exc)
