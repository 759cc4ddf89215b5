"""Transcripts: what a scenario says on a loop, compared with what it says on asyncio's.

A scenario is a function of (loop, say). Whatever it says, and what asyncio's logger says meanwhile,
is normalised: addresses, descriptors, ports, durations and the names of the loops' own classes.
"""

import asyncio
import contextlib
import difflib
import functools
import logging
import re
import warnings

from helpers import make_loop, run_child

SUBSTITUTIONS = [(re.compile(pattern), text) for pattern, text in (
    (r"0x[0-9a-f]+", "0x"),
    (r"\bfd=-?\d+", "fd=N"),
    (r"\b(Task|Thread|asyncio)[-_]\d+", r"\1-N"),
    (r"\('127\.0\.0\.1', \d+\)", "ADDRESS"),
    (r"\d+\.\d+( seconds|s\b| ms)", r"T\1"),
    (r"(when=|delay=)\d+(\.\d+)?(e[-+]\d+)?", r"\1T"),
    (r"<(Loop backend=\w+|_UnixSelectorEventLoop|uvloop\.Loop)\b", "<LOOP"),
    (r"\b(uringloop\.loop\.Loop|asyncio\.unix_events\._UnixSelectorEventLoop|uvloop\.Loop)\b",
     "LOOP"),
    (r"<(StreamTransport|_SelectorSocketTransport|TCPTransport|UnixTransport)\b", "<TRANSPORT"),
    (r"\b(Transport|_SelectorTransport|_SelectorSocketTransport)\._", "TRANSPORT._"),
    (r"coro=<(\w+\(\)) [^>]*>", r"coro=<\1>"),  # the collector may have closed it first
    (r" created at \S+:\d+", " created at LINE"),  # the engine has no frames
    (r"\[<FrameSummary .*?>\]", "[FRAMES]"),
    (r"<[^<>]*\.\.\.[^<>]*(<[^<>]*>)?>*", "<CUT>"),  # reprlib cuts names of other lengths elsewhere
)]


FRAME = re.compile(r' *File "([^"]*)", line \d+, in ([^\n]+)\n?((?:    .*\n?)*)')


def _frame(found):
    """A frame of a scenario stays by the name of its function; libraries' own frames differ."""
    return f"  in {found[2]}\n" if re.search(r"tests/test_\w+\.py$", found[1]) else ""


def normalised(text):
    text = FRAME.sub(_frame, text)
    for pattern, replacement in SUBSTITUTIONS:
        text = pattern.sub(replacement, text)
    return text


class Say(list):
    """The transcript: call it to add a line."""

    def __call__(self, *values):
        self.append(normalised(" ".join(map(str, values))))

    def error(self, function, *args, **kwargs):
        """Calls the function and says what it raised, or what it returned."""
        try:
            answer = function(*args, **kwargs)
        except BaseException as exc:
            self(f"{type(exc).__name__}: {exc}")
        else:
            self("returned", answer)

    def context(self, loop, context):
        """An exception handler that says all of the context."""
        self("context", *(f"{key}={describe(value)};" for key, value in sorted(context.items())))


def describe(value):
    """A value of a context, so that it is the same on every loop."""
    if isinstance(value, BaseException):
        return f"{type(value).__name__}({value})"
    if isinstance(value, str):
        return value
    if isinstance(value, asyncio.BaseTransport):
        return "a transport"
    if isinstance(value, (list, tuple)):
        return f"a {type(value).__name__} of {type(value[0]).__name__}"
    return f"a {value.__class__.__name__}"


class _LogLines(logging.Handler):
    def __init__(self, say):
        super().__init__(logging.INFO)
        self.say = say

    def emit(self, record):
        cause = f" ({record.exc_info[0].__name__})" if record.exc_info else ""
        self.say("log", record.levelname, record.getMessage() + cause)


@contextlib.contextmanager
def logged(say):
    """Says what asyncio logs."""
    logger = logging.getLogger("asyncio")
    handler = _LogLines(say)
    before, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = before


def transcript(scenario, kind, closes=False):
    """What the scenario says on a new loop of this kind; `closes`: it closes the loop itself."""
    say = Say()
    loop = make_loop(kind)
    with logged(say), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            loop.set_debug(False)
            scenario(loop, say)
            for _ in range(0 if closes else 3):  # connection_lost, and the closing of sockets
                loop.call_soon(loop.stop)
                loop.run_forever()
        finally:
            loop.close()
    for warning in caught:
        say("warning", warning.category.__name__, warning.message)
    return list(say)


def assert_as_asyncio(scenario, kind, closes=False):
    """The scenario says the same on a loop of this kind and on asyncio's."""
    expected = transcript(scenario, "asyncio", closes)
    assert expected, "the scenario says nothing"
    assert_equal(transcript(scenario, kind, closes), expected)


def assert_equal(lines, expected):
    if lines != expected:
        difference = difflib.unified_diff(expected, lines, "asyncio", "this loop", lineterm="")
        raise AssertionError("\n".join(["not as asyncio:", *difference]))


# Children


@functools.cache
def child_output(kind, source, flags=(), environment=()):
    """The lines that a child prints: exit status, output and errors, normalised."""
    child = run_child(kind, source, flags=flags, environment=dict(environment))
    return [f"status {child.returncode}", *normalised(child.stdout).splitlines(),
            *normalised(child.stderr).splitlines()]


def assert_child_as_asyncio(kind, source, *, flags=(), environment=(), but="$^"):
    """A child prints the same on a loop of this kind and on asyncio's, which may add `but`."""
    expected = child_output("asyncio", source, flags, environment)
    expected = re.sub(but, "", "\n".join(expected)).splitlines()
    assert_equal(child_output(kind, source, flags, environment), expected)
