"""Datagram endpoints when much is to be done at once: bursts, fairness, callbacks that change
something in the middle of a burst, senders by the hundred, sockets of other kinds, and sockets
that change hands."""

import asyncio
import contextlib
import contextvars
import os
import socket
import struct
import threading

import pytest
from datagrams import ANY_PORT, Datagrams, drain, endpoint, udp_socket
from helpers import (
    LIMIT,
    Echo,
    in_thread,
    only_ours,
    pattern,
    repeats,
    reuse,
    run_child,
    ticks,
    until,
)
from references import BY_OUR_HANDS, LIBUV_POLL

UVLOOP_UDP = "https://github.com/MagicStack/uvloop/blob/v0.21.0/uvloop/handles/udp.pyx"
BURST = 200             # the kernel has room for as many small ones


def send_burst(address, count=BURST):
    with udp_socket() as peer:
        for number in range(count):
            peer.sendto(b"%d" % number, address)


def numbers(protocol):
    return [int(data) for data in protocol.messages()]


# Bursts


async def test_a_burst_that_waits_arrives_in_order(loop):
    async with endpoint(loop, local_addr=ANY_PORT) as (transport, protocol):
        for rounds in range(1, 6):
            send_burst(transport.get_extra_info("sockname"))
            await until(lambda rounds=rounds: len(protocol.received) == rounds * BURST)
        assert numbers(protocol) == [*range(BURST)] * 5


async def test_a_burst_of_many_sizes_arrives_whole(loop):
    sizes = [1, 4095, 4096, 8192, 16_384, 16_385, 7, 30_000, 65_507, 2]
    sent = [pattern(size, number) for number, size in enumerate(sizes)]
    async with endpoint(loop, lambda: Datagrams(True), local_addr=ANY_PORT) as (transport, got):
        with udp_socket() as peer:
            for _ in range(3):
                received = []
                for part in (sent[:6], sent[6:8], sent[8:]):    # the kernel has no room for all
                    for data in part:
                        peer.sendto(data, transport.get_extra_info("sockname"))
                    received += await in_thread(drain, peer, len(part))
                assert received == sent
        assert got.messages() == sent * 3


async def test_no_burst_keeps_callbacks_waiting(loop):
    """Between two iterations there are a few datagrams, not all."""
    iteration = 0

    def count():
        nonlocal iteration
        iteration += 1
        handles[0] = loop.call_soon(count)

    class Noting(Datagrams):
        def datagram_received(self, data, address):
            super().datagram_received(data, address)
            seen.append(iteration)

    seen, handles = [], [loop.call_soon(count)]
    async with endpoint(loop, Noting, local_addr=ANY_PORT) as (transport, protocol):
        send_burst(transport.get_extra_info("sockname"))
        await until(lambda: len(protocol.received) == BURST)
    handles[0].cancel()
    assert max(seen.count(number) for number in seen) <= 32


async def test_a_flood_of_datagrams_starves_no_connection(loop):
    flooding = True

    def flood(address):
        with udp_socket() as peer:
            while flooding:
                peer.sendto(b"flood", address)

    server = await loop.create_server(Echo, "127.0.0.1", 0)
    async with endpoint(loop, local_addr=ANY_PORT) as (transport, protocol):
        thread = threading.Thread(target=flood, args=[transport.get_extra_info("sockname")])
        thread.start()
        try:
            await until(lambda: len(protocol.received) > 100)
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            for number in range(50):
                writer.write(b"%3d" % number)
                assert await reader.readexactly(3) == b"%3d" % number
                await asyncio.sleep(0.001)
            before = len(protocol.received)
            await until(lambda: len(protocol.received) > before + 100)
            writer.close()
            await writer.wait_closed()
        finally:
            flooding = False
            await in_thread(thread.join)
    server.close()
    await server.wait_closed()


# In the middle of a burst


class Acting(Datagrams):
    """Does something once, when the third datagram comes."""

    action = None

    def datagram_received(self, data, address):
        super().datagram_received(data, address)
        if len(self.received) == 3 and self.action:
            action, self.action = self.action, None
            action()


async def test_reading_may_pause_in_the_middle_of_a_burst(loop):
    async with endpoint(loop, Acting, local_addr=ANY_PORT) as (transport, protocol):
        if not hasattr(transport, "pause_reading"):
            pytest.skip("this loop's datagram transports cannot pause")
        protocol.action = transport.pause_reading
        send_burst(transport.get_extra_info("sockname"), 20)
        await until(lambda: len(protocol.received) == 3)
        await ticks(20)
        assert numbers(protocol) == [0, 1, 2]
        assert not transport.is_reading()
        transport.resume_reading()
        await until(lambda: len(protocol.received) == 20)
        assert numbers(protocol) == [*range(20)]


async def test_the_protocol_may_change_in_the_middle_of_a_burst(loop):
    async with endpoint(loop, Acting, local_addr=ANY_PORT) as (transport, protocol):
        second = Datagrams()
        protocol.action = lambda: transport.set_protocol(second)
        send_burst(transport.get_extra_info("sockname"), 20)
        await until(lambda: len(second.received) == 17)
        assert numbers(protocol) + numbers(second) == [*range(20)]
        transport.set_protocol(protocol)


@pytest.mark.uvloop_differs("empties the socket first", UVLOOP_UDP)
def test_the_loop_may_stop_in_the_middle_of_a_burst(loop):
    transport, protocol = loop.run_until_complete(
        loop.create_datagram_endpoint(Acting, local_addr=ANY_PORT))
    protocol.action = loop.stop
    send_burst(transport.get_extra_info("sockname"), 20)
    loop.run_forever()
    assert numbers(protocol) == [0, 1, 2]
    loop.run_until_complete(until(lambda: len(protocol.received) == 20))
    assert numbers(protocol) == [*range(20)]
    transport.close()
    loop.run_until_complete(ticks())


async def test_callbacks_run_in_the_context_of_the_endpoint(loop, tmp_path):
    variable = contextvars.ContextVar("variable", default="none")
    seen = []

    class Noting(Datagrams):
        def connection_made(self, transport):
            super().connection_made(transport)
            seen.append(("made", variable.get()))

        def datagram_received(self, data, address):
            super().datagram_received(data, address)
            seen.append(("received", variable.get()))
            variable.set("changed by a callback")

    variable.set("endpoint")
    async with endpoint(loop, Noting, local_addr=ANY_PORT) as (transport, protocol):
        variable.set("later")
        send_burst(transport.get_extra_info("sockname"), 2)
        await until(lambda: len(protocol.received) == 2)
        assert seen == [("made", "endpoint"), ("received", "endpoint"),
                        ("received", "changed by a callback")]
        assert variable.get() == "later"


# Sending at once


async def test_a_datagram_is_sent_before_sendto_returns(loop):
    with udp_socket() as peer:
        peer.setblocking(False)
        async with endpoint(loop, local_addr=ANY_PORT) as (transport, _):
            for data in (b"1", bytearray(b"2"), memoryview(b"3")):
                transport.sendto(data, peer.getsockname())
                assert peer.recv(10) == bytes(data)


def test_a_datagram_is_sent_while_the_loop_does_not_run(loop):
    with udp_socket() as peer:
        transport, _ = loop.run_until_complete(
            loop.create_datagram_endpoint(Datagrams, remote_addr=peer.getsockname()))
        transport.sendto(b"x")
        assert peer.recv(10) == b"x"
        transport.close()
        loop.run_until_complete(ticks())


async def test_an_error_is_told_before_sendto_returns(loop, loop_kind):
    if loop_kind == "uvloop":
        pytest.skip("tells later")
    async with endpoint(loop, local_addr=ANY_PORT) as (transport, protocol):
        transport.sendto(bytes(70_000), ("127.0.0.1", 9))
        assert [type(error) for error in protocol.errors] == [OSError]


# Many senders


@pytest.mark.parametrize("family, host", [
    (socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")], ids=["IPv4", "IPv6"])
async def test_every_sender_gets_its_own_answer(loop, family, host):
    with contextlib.ExitStack() as stack:
        try:
            peers = [stack.enter_context(udp_socket((host, 0), family)) for _ in range(150)]
        except OSError as exc:
            pytest.skip(f"no such addresses here: {exc}")
        async with endpoint(loop, lambda: Datagrams(True), local_addr=(host, 0)) as (
                transport, protocol):
            address = transport.get_extra_info("sockname")
            for rounds in range(3):
                for number, peer in enumerate(peers):
                    peer.sendto(b"%d %d" % (rounds, number), address)
                for number, peer in enumerate(peers):
                    assert await in_thread(peer.recv, 100) == b"%d %d" % (rounds, number)
            sources = [source for _, source in protocol.received]
            assert sources == [peer.getsockname() for peer in peers] * 3


async def test_an_answer_may_come_later_and_to_an_equal_address(loop):
    with udp_socket() as first, udp_socket() as second:
        async with endpoint(loop, local_addr=ANY_PORT) as (transport, protocol):
            for peer in (first, second):
                peer.sendto(b"x", transport.get_extra_info("sockname"))
            await until(lambda: len(protocol.received) == 2)
            for _ in range(2):
                for _, source in protocol.received:
                    transport.sendto(b"the same", source)
                    transport.sendto(b"equal", (str(source[0]), int(source[1])))
            for peer in (first, second):
                assert await in_thread(drain, peer, 4) == [b"the same", b"equal"] * 2
        assert [source for _, source in protocol.received] == [
            first.getsockname(), second.getsockname()]


@pytest.mark.uvloop_differs("wants IP addresses", UVLOOP_UDP)
async def test_a_host_name_is_looked_up_for_each_datagram(loop):
    with udp_socket() as peer:
        async with endpoint(loop, local_addr=ANY_PORT) as (transport, _):
            transport.sendto(b"x", ("localhost", peer.getsockname()[1]))
            assert await in_thread(peer.recv, 10) == b"x"


@pytest.mark.uvloop_differs("raises out of sendto()", UVLOOP_UDP)
@pytest.mark.parametrize("address, error", [
    (("127.0.0.1", 1 << 16), OverflowError), (("127.0.0.1", -1), OverflowError),
    (("127.0.0.1", 1 << 80), OverflowError), (("127.0.0.1", "9"), TypeError),
    (("127.0.0.1",), TypeError), (("127.0.0.1", 9, 0), TypeError), (["127.0.0.1", 9], TypeError),
    ("127.0.0.1", TypeError), ((None, 9), TypeError), (("127.0.0.1\0", 9), TypeError),
], ids=str)
async def test_what_is_no_address_ends_the_endpoint(loop, errors, address, error):
    transport, protocol = await loop.create_datagram_endpoint(Datagrams, local_addr=ANY_PORT)
    transport.sendto(b"x", address)
    await until(lambda: protocol.lost_with)
    assert [type(exc) for exc in protocol.lost_with] == [error]
    assert [type(context["exception"]) for context in errors] == [error]
    assert errors[0]["message"] == "Fatal write error on datagram transport"
    assert (errors[0]["transport"], errors[0]["protocol"]) == (transport, protocol)


# Sockets of other kinds


class Counting(socket.socket):
    """A socket whose methods are its own."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.calls = []

    def recvfrom(self, *arguments):
        self.calls.append("recvfrom")
        return super().recvfrom(*arguments)

    def sendto(self, *arguments):
        self.calls.append("sendto")
        return super().sendto(*arguments)


@pytest.mark.uvloop_differs("uses the descriptor", UVLOOP_UDP)
async def test_the_methods_of_a_subclass_of_socket_are_called(loop):
    ours = Counting(socket.AF_INET, socket.SOCK_DGRAM)
    ours.bind(ANY_PORT)
    with udp_socket() as peer:
        async with endpoint(loop, lambda: Datagrams(True), sock=ours) as (_, protocol):
            peer.sendto(b"x", ours.getsockname())
            assert await in_thread(peer.recv, 10) == b"x"
            await until(lambda: protocol.received)
            assert protocol.received == [(b"x", peer.getsockname())]
            assert set(ours.calls) == {"recvfrom", "sendto"}


async def test_a_netlink_socket_has_addresses_of_its_own(loop, loop_kind):
    if loop_kind == "uvloop":
        pytest.skip("libuv knows IP addresses only")
    ours = socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, 0)
    ours.bind((0, 0))
    async with endpoint(loop, sock=ours) as (transport, protocol):
        # nlmsghdr and rtgenmsg of RTM_GETLINK; NLM_F_REQUEST | NLM_F_DUMP
        transport.sendto(struct.pack("IHHIIB3x", 20, 18, 0x301, 5, 0, 0), (0, 0))
        await until(lambda: protocol.received)
        data, source = protocol.received[0]
        assert source == (0, 0)
        assert struct.unpack_from("I", data, 8) == (5,)


async def test_a_unix_sender_is_told_by_its_name_and_answered(loop, loop_kind, tmp_path):
    if loop_kind == "uvloop":
        pytest.skip("libuv knows IP addresses only")
    names = [os.fspath(tmp_path / "a"), "\0" + os.fspath(tmp_path), os.fspath(tmp_path / "\xe4b")]
    options = {"local_addr": os.fspath(tmp_path / "server"), "family": socket.AF_UNIX}
    async with endpoint(loop, lambda: Datagrams(True), **options) as (_, protocol):
        for number, name in enumerate(names):
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as peer:
                peer.bind(name)
                peer.settimeout(LIMIT)
                peer.sendto(b"%d" % number, os.fspath(tmp_path / "server"))
                assert await in_thread(peer.recv, 10) == b"%d" % number
                assert protocol.received[-1] == (b"%d" % number, peer.getsockname())


def test_sending_to_an_address_is_an_audit_event(loop_kind):
    if loop_kind == "uvloop":
        pytest.skip("makes no audit events")
    child = run_child(loop_kind, """
import sys
from datagrams import ANY_PORT, Datagrams, udp_socket
seen = []

def hook(event, arguments):
    if event == "socket.sendto":
        seen.append(arguments[1])
        if arguments[1] == ("127.0.0.1", 9):
            raise PermissionError("not there")

async def main(peer):
    transport, protocol = await loop.create_datagram_endpoint(Datagrams, local_addr=ANY_PORT)
    sys.addaudithook(hook)
    transport.sendto(b"x", peer.getsockname())
    assert seen == [peer.getsockname()], seen
    assert peer.recv(10) == b"x"
    transport.sendto(b"x", ("127.0.0.1", 9))
    assert [str(error) for error in protocol.errors] == ["not there"], protocol.errors
    transport.close()
    await asyncio.sleep(0.01)

with udp_socket() as peer:
    loop.run_until_complete(main(peer))
loop.close()
""")
    assert child.returncode == 0, child.stderr


# Sockets that change hands


@pytest.mark.uvloop_differs("libuv aborts the process", LIBUV_POLL, run=False)
@pytest.mark.asyncio_differs("the number is the new owner's", BY_OUR_HANDS, run=False)
@pytest.mark.parametrize("last", ["abort", "close"])
async def test_a_number_used_again_under_an_endpoint(loop, last):
    for _ in repeats(3):
        with udp_socket() as peer:
            ours = udp_socket()
            address, number = ours.getsockname(), ours.fileno()
            transport, protocol = await loop.create_datagram_endpoint(Datagrams, sock=ours)
            os.close(number)
            new, new_peer = reuse(number)
            with new, new_peer:
                await ticks()
                new_peer.send(b"for the new owner")
                peer.sendto(b"for the old one", address)
                transport.sendto(b"from the old one", peer.getsockname())
                transport.pause_reading()
                with contextlib.suppress(OSError):
                    transport.resume_reading()
                await ticks(20)
                getattr(transport, last)()
                await until(lambda protocol=protocol: protocol.lost_with)
                await ticks(20)
                assert [error.errno for error in protocol.errors] == [9]
                assert protocol.received == []
                assert new.recv(100) == b"for the new owner"
                new.send(b"answer")
                assert new_peer.recv(100) == b"answer"
                new_peer.setblocking(False)
                with pytest.raises(BlockingIOError):
                    new_peer.recv(100)


async def test_a_socket_closed_under_a_full_endpoint(loop, loop_kind, tmp_path):
    """What is buffered can never leave, and the protocol hears of it."""
    only_ours(loop_kind, "asyncio's connection_lost() never comes")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as peer:
        peer.bind(os.fspath(tmp_path / "peer"))
        ours = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        ours.connect(os.fspath(tmp_path / "peer"))
        ours.setblocking(False)
        transport, protocol = await loop.create_datagram_endpoint(Datagrams, sock=ours)
        while not transport.get_write_buffer_size():
            transport.sendto(bytes(1000))
        ours.close()
        transport.close()
        await until(lambda: protocol.lost_with)
        assert [exc.errno for exc in protocol.lost_with] == [9]
        assert transport.get_write_buffer_size() == 0


async def test_a_child_process_takes_nothing_from_its_parents_endpoint(loop, loop_kind):
    only_ours(loop_kind, "its loop goes on in the child")
    async with endpoint(loop, local_addr=ANY_PORT) as (transport, protocol):
        await ticks()
        child = os.fork()
        if child == 0:
            try:
                transport.sendto(b"from the child", transport.get_extra_info("sockname"))
                transport.close()
            finally:
                os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        send_burst(transport.get_extra_info("sockname"), 20)
        await until(lambda: len(protocol.received) == 21)
        assert protocol.messages() == [b"from the child", *(b"%d" % n for n in range(20))]
