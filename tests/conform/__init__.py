"""Runs test suites that others wrote on asyncio, uvloop and both backends of uringloop.

Knows no suite: those are in ../stdlib and ../ecosystem, with their lists of expected differences.

    suite.py         what describes a suite
    environment.py   virtual environments, downloads: all under build/
    process.py       one test file in processes of its own: hangs and crashes become results
    results.py       results of a suite on one loop, kept as JSON; the lists; what differs
    report.py        the table and the list of differences
    plan.py          which files run where, side by side, and what runs again
    __main__.py      the command line
    inside/          what is loaded into the processes of the tests
"""
