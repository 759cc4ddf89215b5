"""Messages that nobody holds are used again for others of their size; those of somebody, never."""

import pytest
from helpers import Recorder, connected, pattern, two_transports, until

SIZE = 1024
COUNT = 100


class Holder(Recorder):
    """What is done with each message is a sub-class's; `seen` is what they were when they came."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def data_received(self, data):
        self.seen.append(bytearray(data))
        self.take(data)


class Dropping(Holder):
    def take(self, data):
        pass


class KeepingSome(Holder):
    def __init__(self):
        super().__init__()
        self.kept = {}

    def take(self, data):
        number = len(self.seen) - 1
        if number % 3 == 0:
            self.kept[number] = data
        elif number % 3 == 1:
            self.kept[number] = memoryview(data)


async def one_by_one(protocol, peer, size=SIZE):
    """COUNT messages, each sent when the one before has come."""
    sent = [pattern(size, number) for number in range(COUNT)]
    for number, message in enumerate(sent):
        peer.sendall(message)
        await until(lambda number=number: sum(map(len, protocol.seen)) == size * (number + 1))
    assert b"".join(protocol.seen) == b"".join(sent)


@pytest.mark.parametrize("size", [512, 513, SIZE, 4096, 4097])
async def test_messages_that_are_dropped_are_followed_by_the_right_ones(loop, size):
    async with connected(Dropping) as (_, protocol, peer):
        await one_by_one(protocol, peer, size)


async def test_messages_and_views_that_are_kept_stay_as_they_are(loop):
    async with connected(KeepingSome) as (_, protocol, peer):
        await one_by_one(protocol, peer)
        for number, data in protocol.kept.items():
            assert bytes(data) == protocol.seen[number]


async def test_the_hash_of_each_message_is_its_own(loop):
    class Hashing(Holder):
        def take(self, data):
            assert hash(data) == hash(bytes(self.seen[-1]))

    async with connected(Hashing) as (_, protocol, peer):
        await one_by_one(protocol, peer)


async def test_messages_that_are_on_their_way_to_another_connection_stay_as_they_are(loop):
    """A relay: what is written is the kernel's or the sender's while the next message comes."""
    async with two_transports() as (there, _, _, back):

        class Relaying(Holder):
            def take(self, data):
                there.write(data)

        async with connected(Relaying) as (_, protocol, peer):
            await one_by_one(protocol, peer)
            assert await back.received(SIZE * COUNT) == b"".join(protocol.seen)
