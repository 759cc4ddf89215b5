"""Whole connections against a model of a byte stream: random programs of both ends, in all ways a
loop can be run. No byte is lost, repeated or misplaced, every callback comes in its order, and
nothing is left behind.

A program is a list of turns. A turn makes its steps, inside a callback of the loop or outside, and
then runs the loop. Step ("when", callback, action) has the next such callback do the action.
"""

import pytest
from connection import Connection
from hypothesis import strategies as st
from machine import WAYS, Machine, counted, explore, play

# uvloop differs in small ways that no model of asyncio forgives: it is not reading before the first
# iteration, say.
KINDS = ("asyncio", "io_uring", "epoll")
SIZES = (1, 2, 63, 64, 65, 130, 1000, 8191, 8192, 16383, 16384, 20_000, 65_536, 70_000, 200_000)
KINDS_OF_PROTOCOL = ("plain", "buffered", "reader")

WRITES = [("write", size, kind) for kind in ("bytes", "bytearray", "memoryview") for size in SIZES]
WRITES += [("writelines", sizes, times) for sizes, times in (
    ((1, 2), 1), ((0, 64), 1), ((16_384, 1), 1), ((30_000, 40_000, 5), 1), ((3,), 1100),
    ((300_000, 1), 1))]
FLOW = [("pause",), ("resume",)] * 4 + [("size",)] * 2
FLOW += [("limits", *pair) for pair in ((0, 0), (1, 0), (100, 50), (None, None), (10_000, None))]
READER = [("read", size) for size in (1, 100, 5000)] * 3 + [("drain",)] * 6
READER += [("cancel", which) for which in range(3)] * 2
HABITS = [("habit", habit) for habit in ("stutter", "echo", None)] * 3
SWITCHES = [("switch", kind) for kind in KINDS_OF_PROTOCOL] * 2
ENDS = [("write_eof",), ("close",), ("abort",)]
PEER = [("peer_send", size) for size in SIZES] * 2
PEER += [("peer_burst", size, times) for size in (1, 64, 200, 20_000) for times in (2, 3, 7)]
PEER += [("peer_recv", size) for size in (1, 100, 5000, 1 << 20)] * 4
PEER_ENDS = [("peer_shut",), ("peer_close",), ("peer_reset",)]
OWN = WRITES + FLOW + SWITCHES + ENDS
ACTIONS = WRITES + PEER + FLOW + READER + HABITS + SWITCHES + ENDS + PEER_ENDS


def reactions():
    found = []
    for callback in ("data_received", "eof_received", "pause_writing", "resume_writing",
                     "connection_made", "connection_lost", "get_buffer"):
        actions = list(OWN)
        if callback == "get_buffer":
            actions = [action for action in OWN if action[0] != "switch"]
        actions += [("raise",)] * 6
        if callback in ("data_received", "eof_received"):
            actions += [("interrupt",)] * 6
        found += [("when", callback, action) for action in actions]
    return found


CONNECTIONS = [(family, small, protocol, keep_open)
               for family in ("tcp", "unix") for small in (False, True)
               for protocol in KINDS_OF_PROTOCOL for keep_open in (True, False)]
OPTIONS = [
    {},
    {"ring_entries": 2, "recv_buffers": 4, "recv_buffer_size": 64},
    {"ring_entries": 8, "recv_buffers": 4, "recv_buffer_size": 300},
    {"send_zerocopy": 4096},
]
connection = st.integers(0, 2)
action = st.tuples(connection, st.sampled_from(ACTIONS))
step = action | action | action | st.tuples(connection, st.sampled_from(reactions()))
turn = st.tuples(st.sampled_from(WAYS), st.booleans(), st.lists(step, max_size=12))
program = st.tuples(
    st.sampled_from(OPTIONS), st.lists(st.sampled_from(CONNECTIONS), min_size=1, max_size=3),
    st.lists(turn, max_size=12))


def end(machine, connections):
    """Everything arrives; then everything ends."""
    for each in connections:
        each.habit = None
        for reactions_left in each.reactions.values():
            reactions_left.clear()
    machine.run_until(Connection.settle, connections)
    for each in connections:
        each.do_close()
    machine.run_until(Connection.is_over, connections)
    for each in connections:
        for task in each.tasks:
            task.cancel()
        each.give_up()
    machine.finish()


def run(kind, options, kinds_of_connections, turns):
    machine = Machine(kind, options)
    connections = []
    with counted(kind, machine, connections):
        for number, how in enumerate(kinds_of_connections):
            connections.append(Connection(machine, number, *how))
        play(machine, connections, turns)
        end(machine, connections)


@pytest.mark.timeout(1800)
def test_no_byte_is_lost_and_every_callback_comes_in_its_order(request, loop_kind):
    explore(request, program, 150, lambda program: run(loop_kind, *program))
