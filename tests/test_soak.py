"""The soak run (soak/): each scenario for a moment, and what is planted is found."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import types

import pytest
import soak
from helpers import WITH_ASAN
from soak import chaos, echo, exchange, report, worker
from soak.content import PERIOD, ContentFault, Stream
from soak.run import Run
from soak.scenarios import SCENARIOS

KINDS = ("io_uring", "epoll")
SECONDS = 0.2
SIZES = {"connections": 200, "rounds": 1, "fairness": float("inf")}     # ratios are for soak alone


def short(kind, scenario, tolerance=None, **options):
    config = {"kind": kind, "scenario": scenario, "seconds": SECONDS, "seed": 1,
              "options": {**SIZES, **options}}
    return worker.measure(config, tolerance)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_moment_of_each_scenario_finds_nothing(scenario, loop_kind, ledger):
    result = short(loop_kind, scenario)
    if result["not_run"]:
        pytest.skip(result["not_run"])
    assert not result["faults"]
    assert scenario in result["figures"]
    assert result["counts"]["messages"] or result["counts"]["connections"]


def test_the_number_of_connections_of_churn_can_be_exact(loop_kind, ledger):
    result = short(loop_kind, "churn", churn=300)
    assert not result["faults"]
    assert result["counts"]["connections"] == 300


# What is planted is found


@pytest.fixture
def planted(monkeypatch, loop_kind, ledger):
    """planted(scenario) runs an `async def scenario(run)`; its faults as one text."""

    def run(scenario, **options):
        module = types.SimpleNamespace(run=scenario)
        monkeypatch.setitem(sys.modules, "soak.scenarios.planted", module)
        monkeypatch.setattr("soak.leaks.SETTLE", 1.5)
        result = short(loop_kind, "planted", **options)
        text, fine = report.text_of([result])
        assert fine is not bool(result["faults"])
        assert "FAILED: planted" in text or fine
        return "\n".join(result["faults"])

    return run


def test_a_descriptor_that_stays_open_is_found(planted):
    left = []

    async def scenario(run):
        left.append(socket.socket())

    assert "'fds': 1" in planted(scenario)
    for sock in left:
        sock.close()


@pytest.mark.skipif(WITH_ASAN, reason="AddressSanitizer's own memory is told from ours by nothing")
def test_memory_that_is_kept_is_found(planted):
    left = []

    async def scenario(run):
        left.append(b"x" * (32 << 20))

    assert "leaked: memory grew by 3" in planted(scenario, tolerance=8 << 20)


def test_a_transport_that_is_kept_is_found(planted):
    left = []

    async def scenario(run):
        loop = asyncio.get_running_loop()
        ours, peer = socket.socketpair()
        transport, _ = await loop.create_connection(asyncio.Protocol, sock=ours)
        transport.close()
        peer.close()
        left.append(transport)

    assert "'StreamTransport': 1" in planted(scenario)


def test_a_call_of_the_exception_handler_is_found(planted):
    async def scenario(run):
        asyncio.get_running_loop().call_exception_handler({"message": "planted"})

    assert "'message': 'planted'" in planted(scenario)


def test_a_scenario_that_does_not_end_is_found(planted, monkeypatch):
    monkeypatch.setattr(worker, "PATIENCE", 0)

    async def scenario(run):
        await asyncio.get_running_loop().create_future()

    assert "hung" in planted(scenario)


def test_an_echo_that_loses_a_byte_is_found(planted):
    class Lossy(echo.EchoServer):
        def data_received(self, data):
            super().data_received(data)
            if self.stream.position == 1000:
                self.transport.close()

    async def scenario(run):
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Lossy(run), "127.0.0.1", 0)
        _, client = await loop.create_connection(
            lambda: echo.EchoClient(run, 1), *server.sockets[0].getsockname())
        await client.ask(1000)
        client.outgoing.position += 1
        await client.closed
        server.close()

    assert "lost: EchoClient 1: 1 bytes" in planted(scenario)


@pytest.mark.parametrize("manner", exchange.WHOLE)
def test_a_server_that_sends_too_little_is_found(planted, manner):
    class Miserly(exchange.Server):
        def send(self, size):
            super().send(size // 2)
            self.cut = True
            self.transport.close()

    async def scenario(run):
        loop = asyncio.get_running_loop()
        book = exchange.Book(run)
        server = await loop.create_server(lambda: Miserly(book), "127.0.0.1", 0)
        address = server.sockets[0].getsockname()
        await book.talk(lambda factory: loop.create_connection(factory, *address), manner,
                        (1000, 200_000))
        await book.all_closed()
        server.close()

    assert f"lost: Client 1 ({exchange.NAMES[manner]})" in planted(scenario)


# The parts


@pytest.mark.parametrize("change", ["loss", "repetition", "swap"])
def test_a_stream_notices_what_is_not_in_its_place(change):
    data = Stream(7).take(100_000)
    at = 50_000
    wrong = {"loss": data[:at] + data[at + 4:], "repetition": data[:at] + data[at - 4:],
             "swap": data[:at] + data[at + 4:at + 8] + data[at:at + 4] + data[at + 8:]}[change]
    with pytest.raises(ContentFault, match="at offset 5000"):
        Stream(7).verify(wrong)
    Stream(7).verify(data)


def test_a_stream_goes_on_over_its_period():
    whole, pieces = Stream(3), Stream(3)
    size = 2 * PERIOD + 5
    data = b"".join(whole.take(min(100_000, size - at)) for at in range(0, size, 100_000))
    for at in range(0, size, 12_345):
        pieces.verify(data[at:at + 12_345])
    assert pieces.position == size


def test_the_dice_of_a_run_repeat_with_its_seed():
    first, second = Run("epoll", 1, "5/x"), Run("epoll", 1, "5/x")
    assert [first.rng.random() for _ in range(9)] == [second.rng.random() for _ in range(9)]
    fates = [chaos.fate("5/x", key) for key in range(1000)]
    assert fates == [chaos.fate("5/x", key) for key in range(1000)]
    assert 200 < sum(end is not None for end in fates) < 400


@pytest.mark.parametrize(("scenarios", "status"), [("timers", 0), ("nonsense", 2)])
def test_the_command_line_tells_by_its_exit_status(scenarios, status, tmp_path):
    search = os.pathsep.join([os.fspath(soak.TESTS), *filter(None, sys.path)])
    words = ["--minutes", "0.01", "--kinds", "epoll", "--scenarios", scenarios, "--seed", "5",
             "--json", os.fspath(tmp_path / "soak.json")]
    done = subprocess.run([sys.executable, "-m", "soak", *words], capture_output=True, text=True,
                          cwd=soak.ROOT, env={**os.environ, "PYTHONPATH": search}, timeout=50)
    assert done.returncode == status, done.stderr
    if status == 0:
        assert "seed 5" in done.stdout and "nothing lost, nothing leaked" in done.stdout
        results = json.loads((tmp_path / "soak.json").read_text())["results"]
        assert [result["scenario"] for result in results] == ["timers"]
