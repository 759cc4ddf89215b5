"""Progress on stderr, so that stdout holds the report alone."""

import sys
import time

_WIDTH = 24


def progress(text: str) -> None:
    """Print one line at once."""
    print(text, file=sys.stderr, flush=True)


class ProgressBar:
    """Work done of so much, and the time left by what has been done; redrawn on a terminal.

    Where stderr is none, a line is printed for each new `text` instead.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._start = time.monotonic()
        self._printed = ""
        self._drawn = False

    def advance(self, text: str, detail: str = "", by: int = 1) -> None:
        """Count work as done; `detail` is shown on a terminal alone."""
        self._done += by
        self.show(text, detail)

    def show(self, text: str, detail: str = "") -> None:
        """Show what goes on now."""
        line = f"{self.bar()}  {text}"
        if sys.stderr.isatty():
            print(f"\r\x1b[K{line}  {detail}", end="", file=sys.stderr, flush=True)
            self._drawn = True
        elif text != self._printed:
            progress(line)
            self._printed = text

    def clear(self) -> None:
        """Make room for other lines."""
        if self._drawn:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            self._drawn = False

    def bar(self) -> str:
        """The bar itself: `[#####.....] 12/57, 3:20 left`."""
        filled = _WIDTH * self._done // max(1, self._total)
        left = "?:??"
        if self._done:
            taken = time.monotonic() - self._start
            minutes, seconds = divmod(round(taken * (self._total / self._done - 1)), 60)
            left = f"{minutes}:{seconds:02}"
        dots = "#" * filled + "." * (_WIDTH - filled)
        return f"[{dots}] {self._done}/{self._total}, {left} left"
