"""A pytest plugin for uvloop's own tests: they take asyncio's side where they tell loops apart.

conform_inject has put the loop under test in the place of uvloop's. The tests of the class
UVTestCase run on it as those of AIOTestCase do, and so do the programs that they start. For
uvloop's own column all is as it was, without the tests for asyncio.
"""

import conform_inject
from uvloop import _testbase

EXPRESSIONS = {"asyncio": "asyncio.SelectorEventLoop()",
               "io_uring": "__import__('uringloop').new_event_loop()",
               "epoll": "__import__('uringloop').new_event_loop()"}

if conform_inject.KIND != "uvloop":
    _testbase.UVTestCase.implementation = "asyncio"
    _testbase.BaseTestCase.is_asyncio_loop = lambda self: True


def pytest_collection_modifyitems(items):
    if conform_inject.KIND == "uvloop":
        items[:] = [item for item in items if not issubclass(item.cls, _testbase.AIOTestCase)]
    for item in items:
        if hasattr(item.cls, "NEW_LOOP") and conform_inject.KIND in EXPRESSIONS:
            item.cls.NEW_LOOP = EXPRESSIONS[conform_inject.KIND]
