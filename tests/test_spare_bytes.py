"""Messages that nobody holds are used again for others of their size; those of somebody, never."""

import asyncio
import os
import socket

import pytest
from datagrams import ANY_PORT, endpoint, udp_socket
from helpers import (
    Recorder,
    connected,
    in_thread,
    only_ours,
    pattern,
    two_transports,
    until,
)

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
    def __init__(self):
        super().__init__()
        self.places = set()

    def take(self, data):
        self.places.add(id(data))


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


async def test_a_message_that_is_dropped_is_used_again(loop, loop_kind):
    only_ours(loop_kind, "messages used again")
    kept = []
    async with connected(Dropping) as (_, protocol, peer):
        for number in range(COUNT):
            peer.sendall(pattern(SIZE, number))
            await until(lambda number=number: len(protocol.seen) == number + 1)
            # malloc would give these the place of the message, if it were free.
            kept += [bytes(SIZE) for _ in range(4)]
        assert len(protocol.places) <= 4


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


class DatagramHolder(asyncio.DatagramProtocol):
    """Drops, keeps and answers datagrams in turn."""

    def __init__(self):
        self.seen = []
        self.kept = {}
        self.lost_with = []

    def connection_made(self, transport):
        self.transport = transport

    def datagram_received(self, data, address):
        number = len(self.seen)
        self.seen.append(bytearray(data))
        if number % 4 == 1:
            self.kept[number] = data
        elif number % 4 == 2:
            self.kept[number] = memoryview(data)
        elif number % 4 == 3:
            self.transport.sendto(data, address)

    def connection_lost(self, exc):
        self.lost_with.append(exc)


@pytest.mark.parametrize("burst", [1, 25])
async def test_datagrams_that_are_dropped_kept_or_answered_are_each_their_own(loop, burst):
    with udp_socket() as peer:
        async with endpoint(loop, DatagramHolder, local_addr=ANY_PORT) as (transport, protocol):
            address = transport.get_extra_info("sockname")
            sent = [pattern(SIZE, number) for number in range(COUNT)]
            for start in range(0, COUNT, burst):
                for message in sent[start:start + burst]:
                    peer.sendto(message, address)
                await until(lambda end=start + burst: len(protocol.seen) == end)
            assert protocol.seen == sent
            assert [peer.recv(SIZE + 1) for _ in sent[3::4]] == sent[3::4]
            for number, data in protocol.kept.items():
                assert bytes(data) == sent[number]


async def test_datagrams_that_wait_for_room_stay_as_they_are(loop, tmp_path):
    """What a full socket keeps back is the transport's while the next datagram comes."""
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ours,
        udp_socket(os.fspath(tmp_path / "peer"), socket.AF_UNIX) as theirs,
        udp_socket() as peer,
    ):
        ours.connect(theirs.getsockname())
        ours.setblocking(False)
        async with endpoint(loop, DatagramHolder, sock=ours) as (there, _):

            class Relaying(DatagramHolder):
                def datagram_received(self, data, address):
                    self.seen.append(bytearray(data))
                    there.sendto(data)

            async with endpoint(loop, Relaying, local_addr=ANY_PORT) as (transport, protocol):
                address = transport.get_extra_info("sockname")
                sent = [pattern(SIZE, number) for number in range(4 * COUNT)]
                for number, message in enumerate(sent):
                    peer.sendto(message, address)
                    await until(lambda number=number: len(protocol.seen) > number)
                assert there.get_write_buffer_size()
                assert [await in_thread(theirs.recv, SIZE + 1) for _ in sent] == sent
