"""CPython's own tests of asyncio, as installed with each Python, all of them.

They ask asyncio for a loop by its class (asyncio.SelectorEventLoop) or through the policy, so that
conform/inside/conform_inject.py is all they need. Many of their classes test parts that are
asyncio's own here too: those pass, and say that the engine does not disturb them.
"""

from conform.suite import Suite

SUITES = (
    Suite(
        name="stdlib",
        about="CPython's test.test_asyncio",
        package="test.test_asyncio",
        files=("test_*.py",),
        loops=("asyncio", "io_uring", "epoll"),     # uvloop's is no selector loop
        ini="",
        settings=("python_classes=", "python_functions="),      # unittest's only
        limit=90,
    ),
)
