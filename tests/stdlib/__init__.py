"""CPython's test.test_asyncio on uringloop: suites.py, expected.txt (see ecosystem/README.md)."""
