"""Fixtures of the differential tests: the same script on asyncio, uvloop and both backends.

Owns the life of every loop a test gets, and the checks made when it ends: nothing reached
the exception handler that the test did not ask for, and no file descriptor was left behind.
"""

import asyncio
import atexit
import functools
import gc
import inspect
import signal
import sys
import time
import warnings

import figures
import leaks
import pytest
from helpers import (
    LOOP_KINDS,
    make_certificate,
    make_contexts,
    make_loop,
    open_fds,
    why_not,
)

TEST_LIMIT = 40.0  # seconds; a guard against hangs, below pytest's own time-out


def pytest_addoption(parser):
    parser.addoption(
        "--kinds",
        default=",".join(LOOP_KINDS),
        help="comma separated loop kinds to test (default: all of them)",
    )


def pytest_configure(config):
    # A shell's background job ignores SIGINT: tests that send it would wait for ever.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for peer in ("asyncio", "uvloop"):
        config.addinivalue_line(
            "markers",
            f"{peer}_differs(reason, reference, when=True, run=True): {peer} is known to "
            "fail this test; reference is a public issue or document that says so",
        )


def pytest_generate_tests(metafunc):
    if "loop_kind" in metafunc.fixturenames:
        kinds = metafunc.config.getoption("--kinds").split(",")
        unknown = set(kinds) - set(LOOP_KINDS)
        if unknown:
            raise pytest.UsageError(f"--kinds: unknown {sorted(unknown)}, not in {LOOP_KINDS}")
        # A module about the engine itself names the kinds it is about.
        wanted = getattr(metafunc.module, "KINDS", LOOP_KINDS)
        kinds = [kind for kind in kinds if kind in wanted]
        metafunc.parametrize("loop_kind", kinds, indirect=True)


def _kind_of(item):
    callspec = getattr(item, "callspec", None)
    return callspec.params.get("loop_kind") if callspec else None


def pytest_collection_modifyitems(items):
    for item in items:
        kind = _kind_of(item)
        if kind in ("asyncio", "uvloop"):
            # pytest takes the first that is true: those that must not run come first.
            marks = list(item.iter_markers(f"{kind}_differs"))
            for mark in sorted(marks, key=lambda mark: mark.kwargs.get("run", True)):
                _expect_failure(item, kind, *mark.args, **mark.kwargs)
        if kind == "uvloop":
            # Under -W error its close() never ends where this warning is raised.
            item.add_marker(pytest.mark.filterwarnings("ignore:unclosed resource:ResourceWarning"))


WATCH = pytest.StashKey[leaks.Watch]()


def pytest_collection_finish(session):
    session.config.stash[WATCH] = leaks.Watch()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    # The traceback of a failure holds what its frames hold.
    item.stash[_FAILED] = item.stash.get(_FAILED, False) or call.excinfo is not None
    return report


_FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item):
    """After all fixtures: no object of the engine is alive."""
    yield
    item.funcargs.clear()
    failed = item.stash.get(_FAILED, False)
    if _kind_of(item) in ("asyncio", "uvloop"):
        if failed:
            _drop_what_a_peer_left()
        return
    left = item.config.stash[WATCH].look(0.0 if failed else 5.0)
    if left and not failed:
        figures.note(figures.LEAKED, sum(left.values()))
        pytest.fail(f"engine objects that are still alive: {left}")


def _drop_what_a_peer_left():
    """What a known failure of a peer leaves open must not be the next test's error."""
    sys.last_exc = sys.last_value = sys.last_traceback = None    # pytest keeps the failure there
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


def pytest_sessionfinish(session):
    if leaks.sanitizer() and session.testscollected and not session.config.option.collectonly:
        atexit.register(leaks.ask_sanitizer)


def pytest_terminal_summary(terminalreporter, config):
    watch = config.stash.get(WATCH, None)
    if watch is not None and watch.looks:
        left = sum(watch.left.values())
        terminalreporter.write_line(
            f"engine objects left: {left} {dict(watch.left) or ''} (looked {watch.looks} times)")
    for line in figures.lines():
        terminalreporter.write_line(line)


def _expect_failure(item, kind, reason, reference, when=True, run=True):
    if when:
        text = f"{kind}: {reason} ({reference})"
        item.add_marker(pytest.mark.xfail(reason=text, strict=False, run=run))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Runs `async def` tests on their own `loop` fixture."""
    function = pyfuncitem.obj
    if not inspect.iscoroutinefunction(function):
        return None
    arguments = {
        name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames
    }

    async def bounded():
        async with asyncio.timeout(TEST_LIMIT):
            await function(**arguments)

    pyfuncitem.funcargs["loop"].run_until_complete(bounded())
    return True


class Ledger:
    """What the loops of one test reported to their exception handlers."""

    def __init__(self):
        self.contexts = []
        self.asked_for = False

    def handler(self, loop, context):
        self.contexts.append(context)


@functools.cache
def _why_not(kind):
    reason = why_not(kind)
    if kind == "uvloop" and not reason:
        make_loop(kind).close()  # libuv makes a pipe once per process and keeps it
    return reason


@pytest.fixture
def loop_kind(request):
    """'asyncio', 'uvloop', 'io_uring' or 'epoll'; skips with the reason why one cannot run."""
    reason = _why_not(request.param)
    if reason:
        pytest.skip(reason)
    figures.ours = request.param not in ("asyncio", "uvloop")
    return request.param


@pytest.fixture
def ledger(loop_kind):
    """Checks at the end that no loop reported an error and no descriptor leaked."""
    ledger = Ledger()
    before = open_fds()
    yield ledger
    _assert_no_leak(before)
    if ledger.contexts and not ledger.asked_for:
        pytest.fail(f"the exception handler was called: {ledger.contexts!r}")


def _assert_no_leak(before):
    deadline = time.monotonic() + 5
    while True:
        left = {fd: name for fd, name in open_fds().items() if fd not in before}
        if not left:
            return
        if time.monotonic() > deadline:
            figures.note(figures.LEAKED, len(left))
            pytest.fail(f"file descriptors leaked: {left}")
        gc.collect()
        time.sleep(0.01)


@pytest.fixture
def errors(ledger):
    """The contexts given to the exception handler; a test that takes it checks them itself."""
    ledger.asked_for = True
    return ledger.contexts


@pytest.fixture
def loop_options():
    """LoopOptions of our loops in a test; a file, class or test overrides it."""
    return {}


@pytest.fixture
def new_loop(loop_kind, ledger, loop_options):
    """A factory of loops of this kind; each is closed at the end of the test."""
    made = []

    def factory():
        loop = make_loop(loop_kind, **loop_options)
        loop.set_exception_handler(ledger.handler)
        made.append(loop)
        return loop

    yield factory
    for loop in made:
        _shut(loop)
        _assert_nothing_in_hand(loop)
    made.clear()


def _assert_nothing_in_hand(loop):
    if hasattr(loop, "stats"):
        left = leaks.left_by_loop(loop.stats())
        assert not left, f"a closed loop still has {left}"


def _shut(loop):
    if loop.is_closed():
        return
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.wait(tasks, timeout=10))
    for _ in range(3):  # let connection_lost and the closing of sockets happen
        loop.call_soon(loop.stop)
        loop.run_forever()
    loop.close()


@pytest.fixture
def loop(new_loop):
    """A new loop of `loop_kind`, set as the current event loop."""
    loop = new_loop()
    asyncio.set_event_loop(loop)
    yield loop
    _shut(loop)
    asyncio.set_event_loop(None)


@pytest.fixture(scope="session")
def certificate(tmp_path_factory):
    """(certificate file, key file) of 'localhost', made once by the openssl command."""
    try:
        return make_certificate(tmp_path_factory.mktemp("tls"))
    except FileNotFoundError:
        pytest.skip("the openssl command is not installed")


@pytest.fixture
def contexts(certificate):
    """(server's, client's) SSL contexts."""
    return make_contexts(certificate)
