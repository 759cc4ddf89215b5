"""Single rooms of the engine against models of a few lines each. Needs the proving build."""

import asyncio
import collections
import socket

import figures
import pytest
from helpers import pattern
from hypothesis import strategies as st
from machine import explore

import uringloop
from uringloop import _core

pytestmark = [pytest.mark.timeout(1800), pytest.mark.skipif(
    not hasattr(_core, "OperationRoom"), reason="needs the proving build (make faults)")]
ROOM = "a room"
INT64 = (-(1 << 63), (1 << 63) - 1)


def steps(*verbs, most=40):
    """Programs of (verb, number); the number chooses among what there is."""
    step = st.tuples(st.sampled_from(verbs), st.integers(0, 1 << 16))
    # A list of lists, so that long programs are not rare.
    return st.lists(st.lists(step, max_size=most), max_size=8).map(lambda lists: sum(lists, []))


def choose(items, number):
    return items[number % len(items)]


# Operations and their answers


class Operations:
    def __init__(self):
        self.room = _core.OperationRoom()
        self.live = {}              # user_data -> operation
        self.idle = []
        self.ended = []             # user_data that are nobody's now
        self.queue = collections.deque()
        self.number = 0

    def do_begin(self, number):
        """As many as it takes: the table grows twice."""
        for _ in range(choose((1, 1, 1, 70), number)):
            operation = self.idle.pop() if self.idle else _core.RoomOperation()
            assert operation.is_idle
            self.room.begin(operation)
            name = operation.user_data
            assert name and name not in self.live and name not in self.ended
            self.live[name] = operation
        with pytest.raises(SystemError):
            self.room.begin(operation)

    def do_cancel(self, number):
        if self.live:
            operation = choose(list(self.live.values()), number)
            self.room.cancelling(operation)
            assert operation.is_cancelling and self.room.find(operation.user_data) is operation

    def do_end(self, number):
        if self.live:
            name = choose(list(self.live), number)
            operation = self.live.pop(name)
            self.room.end(operation)
            assert operation.is_idle and operation.user_data == 0
            self.idle.append(operation)
            self.ended.append(name)

    def do_push(self, number):
        names = [*self.live, *self.ended[-3:], 0]
        answers = []
        for _ in range(choose((1, 2, 300), number)):
            self.number += 1
            answers.append((choose(names, number + self.number), self.number - 5, self.number & 2))
        self.room.push(answers)
        self.queue.extend(answers)

    def do_pop(self, number):
        for _ in range(choose((1, 3, 200), number)):
            assert self.room.pop() == (self.queue.popleft() if self.queue else None)

    def do_take(self, number):
        """What is taken leaves an answer for nobody, which is not a completion, in its place."""
        names = [name for name in (*self.live, *self.ended[-3:]) if name]
        if not names:
            return
        name = choose(names, number)
        places = [place for place, answer in enumerate(self.queue) if answer[0] == name]
        expected = self.queue[places[0]] if places else None
        assert self.room.take(name) == expected
        if places:
            self.queue[places[0]] = (0, expected[1], 0xFFFFFFFF)

    def check(self):
        assert self.room.occupied == len(self.live)
        for name, operation in list(self.live.items())[-5:]:
            assert self.room.find(name) is operation
        for name in (0, 1 << 40, 0xFFFFFFFF, *self.ended[-5:]):
            assert self.room.find(name) is None


def play(model, program):
    for verb, number in program:
        getattr(model, "do_" + verb)(number)
        model.check()
    figures.count(ROOM, cases=1)


def test_an_answer_finds_its_operation_or_nobody(request):
    verbs = ("begin", "end", "push", "pop", "take", "cancel")
    explore(request, steps(*verbs), 100, lambda program: play(Operations(), program))


# Receive blocks


class Blocks:
    """Two receives that share four blocks: each byte is in one block, and blocks are where?"""

    SIZE = 64

    def __init__(self):
        self.room = _core.BufferRoom(8, 4, self.SIZE)
        self.pairs = [socket.socketpair() for _ in range(2)]
        self.content = [pattern(1 << 20, seed) for seed in range(2)]
        self.sent, self.got = [0, 0], [0, 0]
        self.operations = [_core.RoomOperation() for _ in range(2)]
        self.lent = []              # (block, content)
        self.kept = []              # (bytes handed over, what they were)
        self.blocks, self.handed_over = 4, 0
        for each, (ours, _) in zip(self.operations, self.pairs):
            self.room.receive(each, ours.fileno())

    def do_send(self, number):
        which, size = number & 1, 1 + (number >> 1) % 150
        start = self.sent[which]
        self.pairs[which][1].sendall(self.content[which][start:start + size])
        self.sent[which] += size

    def do_submit(self, number):
        for operation, result, block, more in self.room.submit():
            which = self.operations.index(operation)
            if block is not None:
                start = self.got[which]
                expected = self.content[which][start:start + result]
                self.got[which] += result
                assert block not in [other for other, _ in self.lent], "lent twice"
                assert self.room.lend(block, result) == expected
                self.lent.append((block, expected))
            elif result == -105:    # ENOBUFS
                assert len(self.lent) == self.blocks or self.may_be_unpublished
            if not more:
                self.room.receive(operation, self.pairs[which][0].fileno())
        self.may_be_unpublished = False

    may_be_unpublished = False

    def take_one(self, number):
        self.may_be_unpublished = True
        return self.lent.pop(number % len(self.lent))

    def do_give_back(self, number):
        if self.lent:
            self.room.give_back(self.take_one(number)[0])

    def do_copy(self, number):
        if self.lent:
            block, content = self.take_one(number)
            assert self.room.copy(block, len(content)) == content

    def do_hand_over(self, number):
        if self.lent:
            block, content = self.take_one(number)
            self.kept.append((self.room.hand_over(block, len(content)), content))
            self.handed_over += 1

    def do_grow(self, number):
        more = number % 3
        assert self.room.grow(more) == min(more, 8 - self.blocks)
        self.blocks = min(self.blocks + more, 8)
        self.may_be_unpublished = True

    def do_cancel(self, number):
        self.room.cancel(self.operations[number & 1])

    def check(self):
        assert self.room.facts == (self.blocks, len(self.lent), self.handed_over, 2)
        for message, content in self.kept:
            assert message == content, "a message changed after it was handed over"

    def finish(self):
        """Every block given back, all the rest comes."""
        for _ in range(10_000):
            if self.got == self.sent:
                break
            while self.lent:
                self.do_give_back(0)
            self.do_submit(0)
        assert self.got == self.sent
        self.check()
        figures.count(ROOM, bytes=sum(self.got))

    def close(self):
        self.room.close()
        for ours, peer in self.pairs:
            ours.close()
            peer.close()


def play_with_blocks(program):
    model = Blocks()
    try:
        play(model, program)
        model.finish()
    finally:
        model.close()


@pytest.mark.skipif(bool(uringloop.unavailable_reason()), reason="needs io_uring")
def test_each_byte_is_in_one_block_and_each_block_in_one_place(request):
    verbs = ("send", "submit", "give_back", "copy", "hand_over", "grow", "cancel")
    explore(request, steps(*verbs), 100, play_with_blocks)


# Timers


class Timers:
    DEADLINES = (0, 0, 1, 2, 3, 5, 8, -1, *INT64)

    def __init__(self):
        self.room = _core.TimerRoom()
        self.timers = []            # [deadline, number, handle], sorted
        self.number = 0

    def do_push(self, number):
        deadline = choose((*self.DEADLINES, number), number)
        self.number += 1
        self.timers.append((deadline, self.number, self.room.push(deadline)))
        self.timers.sort(key=lambda timer: timer[:2])

    def do_remove(self, number):
        if self.timers:
            handle = self.timers.pop(number % len(self.timers))[2]
            assert handle._scheduled
            self.room.remove(handle)
            assert not handle._scheduled

    def do_pop(self, number):
        if self.timers:
            handle = self.room.pop()
            assert handle is self.timers.pop(0)[2] and not handle._scheduled

    def do_clear(self, number):
        if number % 10 == 0:
            self.room.clear()
            self.timers.clear()

    def check(self):
        assert len(self.room) == len(self.timers)
        if self.timers:
            assert self.room.first_ns() == self.timers[0][0]


def test_timers_come_by_deadline_and_equal_ones_in_the_order_of_their_making(request):
    verbs = ("push", "push", "push", "pop", "remove", "clear")

    def run(program):
        model = Timers()
        play(model, program)
        while model.timers:
            model.do_pop(0)

    explore(request, steps(*verbs), 100, run)


# Ready handles


class Ready:
    def __init__(self):
        self.room = _core.ReadyRoom()
        self.handles = collections.deque()

    def do_push(self, number):
        for _ in range(choose((1, 2, 50), number)):
            self.handles.append(self.room.push())

    def do_pop(self, number):
        for _ in range(min(choose((1, 3, 60), number), len(self.handles))):
            assert self.room.pop() is self.handles.popleft()

    def do_clear(self, number):
        if number % 10 == 0:
            self.room.clear()
            self.handles.clear()

    def check(self):
        assert len(self.room) == len(self.handles)


def test_ready_handles_come_first_in_first_out(request):
    explore(request, steps("push", "push", "pop", "clear"), 100,
            lambda program: play(Ready(), program))


# Flow control


class Told(asyncio.Protocol):
    def __init__(self):
        self.calls = []

    def pause_writing(self):
        self.calls.append("pause")

    def resume_writing(self):
        self.calls.append("resume")


class AsyncioFlow(asyncio.transports._FlowControlMixin):
    """asyncio's own, over a number of bytes."""

    def __init__(self, protocol):
        self.size = 0
        self._protocol = protocol
        super().__init__(loop=object())

    def get_write_buffer_size(self):
        return self.size

    def append(self, size):
        self.size += size
        self._maybe_pause_protocol()

    def consume(self, size):
        self.size -= size
        self._maybe_resume_protocol()


class Flow:
    SIZES = (0, 1, 2, 99, 100, 101, 1 << 14, 1 << 16, (1 << 16) + 1)

    def __init__(self):
        self.protocols = Told(), Told()
        self.flows = _core.make_flow_room(self.protocols[0]), AsyncioFlow(self.protocols[1])

    def do_append(self, number):
        for flow in self.flows:
            flow.append(choose(self.SIZES, number))

    def do_consume(self, number):
        for flow in self.flows:
            flow.consume(min(choose(self.SIZES, number), flow.get_write_buffer_size()))

    def do_limits(self, number):
        high = choose((None, -1, *self.SIZES), number)
        low = choose((None, -1, *self.SIZES), number // 11)
        answers = []
        for flow in self.flows:
            try:
                answers.append(flow.set_write_buffer_limits(high, low))
            except ValueError as exc:
                answers.append(str(exc))
        assert answers[0] == answers[1]

    def check(self):
        ours, theirs = self.flows
        assert ours.get_write_buffer_limits() == theirs.get_write_buffer_limits()
        assert self.protocols[0].calls == self.protocols[1].calls


def test_flow_control_is_that_of_asyncio(request):
    explore(request, steps("append", "append", "consume", "limits"), 100,
            lambda program: play(Flow(), program))
