"""Progress on stderr, so that stdout holds the report alone."""

import sys


def progress(text: str) -> None:
    """Print one line at once."""
    print(text, file=sys.stderr, flush=True)
