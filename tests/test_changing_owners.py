"""Numbers that change hands at random, under transports, calls and watchers: every word that goes
either way names its connection and its place."""

import asyncio
import os
import random
import socket
import struct

import pytest
from helpers import (
    make_pair,
    only_ours,
    repeats,
    ticks,
    until,
)
from references import UVLOOP_POLL


class Conversation:
    """One connection: all words that go either way carry its number and count."""

    WORD = struct.Struct(">II")

    def __init__(self, number, family):
        self.number = number
        self.ours, self.peer = make_pair(family)
        self.peer.setblocking(False)
        self.sent = {"ours": 0, "peer": 0}
        self.got = {"ours": bytearray(), "peer": bytearray()}

    def words(self, side, count):
        first = self.sent[side]
        self.sent[side] += count
        return b"".join(self.WORD.pack(self.number, index) for index in range(first, first + count))

    def take(self, side, data):
        """Check what one side received: nothing but the next words of this connection."""
        self.got[side] += data
        size = self.WORD.size
        assert len(self.got[side]) <= size * self.sent["peer" if side == "ours" else "ours"]
        start = (len(self.got[side]) - len(data)) // size * size
        for offset in range(start, len(self.got[side]) - size + 1, size):
            expected = (self.number, offset // size)
            assert self.WORD.unpack_from(self.got[side], offset) == expected

    def peer_reads(self):
        try:
            while data := self.peer.recv(1 << 16):
                self.take("peer", data)
        except (BlockingIOError, ConnectionResetError):
            pass

    def all_arrived(self, side):
        other = "peer" if side == "ours" else "ours"
        return len(self.got[side]) == self.WORD.size * self.sent[other]


class TransportConversation(Conversation, asyncio.Protocol):
    rude = False

    async def open(self, loop):
        self.is_lost = False
        self.transport, _ = await loop.create_connection(lambda: self, sock=self.ours)

    def data_received(self, data):
        self.take("ours", data)

    def connection_lost(self, exc):
        self.is_lost = True

    def send(self, count):
        if not self.is_lost and not self.transport.is_closing():
            self.transport.write(self.words("ours", count))

    async def close(self, chance):
        how = chance.choice(["close", "abort", "peer", "dup", "under" if self.rude else "close"])
        if how == "peer":
            self.peer_reads()
            self.peer.close()
        elif how == "under":
            self.ours.close()       # the transport goes on
            self.send(3)
        elif how == "dup":
            with socket.socket(fileno=os.dup(self.transport.get_extra_info("socket").fileno())):
                self.transport.abort()
                await ticks(2)
        self.transport.abort() if how in ("abort", "peer", "dup") else self.transport.close()
        await until(lambda: self.is_lost)
        self.ours.close()
        if how in ("close", "under"):
            await until(lambda: self.peer_reads() or self.all_arrived("peer"))
        self.peer.close()


class CallConversation(Conversation):
    rude = False

    async def open(self, loop):
        self.loop = loop
        self.task = loop.create_task(self.receive())
        self.sending = []

    async def receive(self):
        while data := await self.loop.sock_recv(self.ours, 1000):
            self.take("ours", data)

    def send(self, count):
        if self.ours.fileno() >= 0 and not self.task.done():
            self.sending.append(self.loop.create_task(
                self.loop.sock_sendall(self.ours, self.words("ours", count))))

    async def close(self, chance):
        how = chance.choice(["close", "detach", "peer", "cancel"] if self.rude else ["cancel"])
        if self.sending:
            await asyncio.wait(self.sending)    # with calls displaced nothing would be whole
        if how == "close":
            self.ours.close()
        elif how == "detach":
            os.close(self.ours.detach())
        elif how == "peer":
            self.peer_reads()
            self.peer.close()
        if how == "cancel":
            self.task.cancel()
            await asyncio.wait([self.task])
            await until(lambda: self.peer_reads() or self.all_arrived("peer"))
        self.ours.close()
        self.peer.close()

    async def finish(self):
        """The task ends, and not because the wrong words came."""
        self.task.cancel()
        await asyncio.wait([self.task, *self.sending])
        if not self.task.cancelled():
            assert not isinstance(self.task.exception(), AssertionError), self.task.exception()


class RudeTransportConversation(TransportConversation):
    rude = True


class RudeCallConversation(CallConversation):
    rude = True


class ReaderConversation(Conversation):
    async def open(self, loop):
        self.loop = loop
        loop.add_reader(self.ours, self.read)

    def read(self):
        try:
            data = self.ours.recv(1 << 16)
        except (BlockingIOError, ConnectionResetError):
            return
        self.take("ours", data)
        if not data:
            self.loop.remove_reader(self.ours)

    def send(self, count):
        try:
            self.ours.send(self.words("ours", count))
        except (BlockingIOError, BrokenPipeError, ConnectionResetError):
            self.sent["ours"] -= count

    async def close(self, chance):
        self.loop.remove_reader(self.ours)
        self.ours.close()
        self.peer_reads()
        self.peer.close()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("manners", ["polite", "rude"])
@pytest.mark.uvloop_differs("displaced calls wait for ever", UVLOOP_POLL, run=False)
async def test_numbers_change_hands_at_random(loop, loop_kind, manners, seed):
    """2000 steps; every word that is received says whose it is."""
    if manners == "rude":
        only_ours(loop_kind, "asyncio's map of descriptors is stale")
    chance = random.Random(seed)
    kinds = [ReaderConversation, TransportConversation, CallConversation]
    if manners == "rude":
        kinds[1:] = [RudeTransportConversation, RudeCallConversation]
    alive, calls = [], []
    for number in repeats(2000):
        step = chance.random()
        if step < 0.15 and len(alive) < 12 or not alive:
            made = chance.choice(kinds)(number, chance.choice(["tcp", "unix"]))
            await made.open(loop)
            alive.append(made)
            if isinstance(made, CallConversation):
                calls.append(made)
        elif step < 0.30:
            await alive.pop(chance.randrange(len(alive))).close(chance)
        elif step < 0.55:
            chance.choice(alive).send(chance.choice([1, 2, 100]))
        elif step < 0.80:
            one = chance.choice(alive)
            one.peer.send(one.words("peer", chance.choice([1, 2, 100])))
        else:
            await ticks(chance.randrange(3))
        for one in alive:
            one.peer_reads()
    for one in alive:
        await one.close(chance)
    for one in calls:
        await one.finish()
