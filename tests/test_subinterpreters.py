"""Subinterpreters: the engine lives in one interpreter of a process, and others are told so."""

import sys

import pytest
from helpers import run_child

KINDS = ("io_uring", "epoll")

OTHER = """
import sys
try:
    import _interpreters                        # 3.13
    def create(own_gil):
        return _interpreters.create("isolated" if own_gil else "legacy")
    run = _interpreters.exec
except ImportError:
    import _xxsubinterpreters as _interpreters
    def create(own_gil):
        return _interpreters.create(isolated=own_gil)
    run = _interpreters.run_string

USE = f'''
import sys
sys.path[:] = {sys.path!r}
try:
    import asyncio, uringloop
    options = uringloop.LoopOptions(backend={backend!r})
    print("there:", uringloop.run(asyncio.sleep(0, "ran"), options=options), flush=True)
except ImportError as exc:
    print("there:", exc, flush=True)
'''

def in_another(own_gil):
    interpreter = create(own_gil)
    failed = run(interpreter, USE)
    assert not failed, failed
    _interpreters.destroy(interpreter)
"""
OWN_GIL = "module uringloop._core does not support loading in subinterpreters"
SHARED_GIL = ("Interpreter change detected - this module can only be loaded into one interpreter "
              "per process.")


@pytest.mark.parametrize("own_gil", [False, True], ids=["shared GIL", "own GIL"])
def test_a_second_interpreter_is_refused_and_the_first_goes_on(loop_kind, own_gil):
    child = run_child(loop_kind, f"backend = {loop_kind!r}\n{OTHER}" + f"""
async def main():
    async with helpers.connected(helpers.Echo) as (_, protocol, peer):
        for number in range(3):
            in_another({own_gil})
            peer.sendall(b"%d" % number)
            print("here:", (await helpers.in_thread(peer.recv, 10)).decode())
loop.run_until_complete(main())
loop.run_until_complete(loop.shutdown_default_executor())
loop.close()
""")
    reason = OWN_GIL if own_gil and sys.version_info >= (3, 12) else SHARED_GIL
    lines = [line for number in range(3) for line in (f"there: {reason}", f"here: {number}")]
    assert (child.returncode, child.stdout.splitlines()) == (0, lines), child.stderr


def test_the_first_interpreter_that_imports_it_has_it(loop_kind):
    """Also when that is not the main one, and after it has ended."""
    child = run_child("asyncio", f"loop.close()\nbackend = {loop_kind!r}\n{OTHER}" + """
in_another(False)
try:
    import uringloop
except ImportError as exc:
    print("here:", exc)
""")
    lines = ["there: ran", f"here: {SHARED_GIL}"]
    assert (child.returncode, child.stdout.splitlines()) == (0, lines), child.stderr
