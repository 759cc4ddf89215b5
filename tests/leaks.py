"""What of the engine is alive: nothing may be, once a test has let go of its loops.

Counts by the real type, because `__class__` of handles and transports answers with asyncio's. The
one class that the collector does not know (it holds no references) is AnswerQueue; every loop has
one, so a loop that is counted stands for it, and LeakSanitizer finds its memory (make asan).
"""

import collections
import ctypes
import gc
import os
import subprocess
import sys
import time

# Made at import, for the life of the process.
PERMANENT = {"ReaderFeed", "Stash"}


def alive():
    """{type name: how many} of engine objects, and of Python objects made of its classes."""
    found = collections.Counter()
    for thing in gc.get_objects():
        if any(kind.__module__ == "uringloop._core" for kind in type(thing).__mro__[:-1]):
            found[type(thing).__name__] += 1
    for name in PERMANENT:
        if found[name] == 1:
            del found[name]
    return +found


def left_by_loop(stats):
    """What a closed loop still has in hand, by its own counters."""
    names = ("in_flight", "operations", "buffers_lent")
    return {name: getattr(stats, name) for name in names if getattr(stats, name)}


class Watch:
    """Says after each test what it has left, and counts what was looked at.

    Everything that is alive after a look is frozen: the next collection and count are of what one
    test has made, or a look per test would cost the more the longer the session is.
    """

    def __init__(self):
        self.looks = 0
        self.left = collections.Counter()       # in the whole session
        gc.collect()
        gc.freeze()

    def look(self, patience=5.0):
        """{type name: how many} of the objects that appeared since the last look and stay.

        A thread that has just called a loop may have a handle in its hand still.
        """
        self.looks += 1
        deadline = time.monotonic() + patience
        while True:
            gc.collect()
            new = alive()
            if not new or time.monotonic() > deadline:
                break
            time.sleep(0.01)
        self.left += new
        gc.freeze()
        return dict(new)


# Memory that nothing points to: LeakSanitizer, in a session that runs on a build with ASAN and with
# ASAN_OPTIONS=detect_leaks=1:leak_check_at_exit=0 (make asan). Asked while the interpreter is
# alive, because at its exit it leaves much behind on purpose; and when pytest's frames are gone,
# because the sanitizer does not see what only a frame of Python holds.

_ASK = "__lsan_do_recoverable_leak_check"


def sanitizer():
    """LeakSanitizer's function, or None in a session without it."""
    if "detect_leaks=1" not in os.environ.get("ASAN_OPTIONS", ""):
        return None
    return getattr(ctypes.CDLL(None), _ASK, None)


def why_no_sanitizer():
    """Why LeakSanitizer cannot look at this machine's processes (it traces them), or None."""
    command = [sys.executable, "-c", f"import ctypes; ctypes.CDLL(None).{_ASK}()"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode:
        return (done.stderr.strip() or "no reason given").splitlines()[-1]
    return None


def ask_sanitizer():
    """Ends the process with 1 if there is a leak."""
    gc.collect()
    refused = why_no_sanitizer()
    if refused:
        print(f"LeakSanitizer cannot look here: {refused}", flush=True)
    elif sanitizer()():
        print("LeakSanitizer found leaks: see above", flush=True)
        os._exit(1)
    else:
        print("LeakSanitizer found no leak", flush=True)
