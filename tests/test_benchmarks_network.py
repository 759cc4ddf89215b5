"""The benchmarks of servers (benchmarks/): each command for a moment, and what is wrong is noticed.

Figures are only asked to be there: how large they are is what the benchmarks themselves are for.
"""

import contextlib
import json
import os
import pathlib
import re
import shutil
import socket
import sys
import threading

import pytest

# At the end of the path: a build that is tested instead of the one in place comes first.
sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent))

from benchmarks import http_measure, idle, loops, pingpong, redis, scaling, syscalls  # noqa: E402
from benchmarks.__main__ import COMMANDS  # noqa: E402
from benchmarks.certificate import server_context  # noqa: E402
from benchmarks.echo_servers import MODES  # noqa: E402
from benchmarks.load_process import LoadConfig, load_command, run_load, tls_command  # noqa: E402
from benchmarks.options import parse_cpus, parse_size  # noqa: E402
from benchmarks.pingpong_worker import Game, Pinger  # noqa: E402
from benchmarks.proc_status import parse_status, read_status  # noqa: E402
from benchmarks.processes import Placement, ProcessFailed  # noqa: E402
from benchmarks.programs import compile_program  # noqa: E402
from benchmarks.redis_client import check_replies, missing_reason, parse_report  # noqa: E402
from benchmarks.redis_server import Malformed, RedisProtocol, parse_request  # noqa: E402
from benchmarks.rounds import exit_status, run_rounds  # noqa: E402
from benchmarks.server_process import ServerFailed  # noqa: E402
from benchmarks.summary import round_order  # noqa: E402

KINDS = ("asyncio", "io_uring", "epoll")
NAMES = {"asyncio": "asyncio", "io_uring": "uringloop", "epoll": "uringloop-epoll"}
WINDOW = ["--rounds", "1", "--seconds", "0.1", "--warmup", "0.05"]
LOAD = LoadConfig(connections=3, size=1024, warmup=0.05, seconds=0.1)

needs_compiler = pytest.mark.skipif(not shutil.which("cc"), reason="there is no C compiler")
needs_openssl = pytest.mark.skipif(not shutil.which("openssl"), reason="there is no openssl")
needs_redis = pytest.mark.skipif(missing_reason() is not None, reason="no redis-benchmark")


@pytest.fixture
def run(tmp_path, loop_kind, ledger):
    """run(command, *options) measures this kind of loop; the JSON report."""

    def run_command(command, *options, names=NAMES[loop_kind]):
        path = tmp_path / "report.json"
        status = COMMANDS[command](["--loops", names, "--json", str(path), *options])
        report = json.loads(path.read_text())
        assert status == 0, report
        return report

    return run_command


def assert_measured(row):
    assert row["rate"] > 0 and row["server_cpu_us"] > 0
    assert 0 < row["p50_us"] <= row["p99_us"]
    assert not row["errors"]


# Each command


@needs_compiler
@pytest.mark.parametrize("mode", [
    pytest.param(mode, marks=needs_openssl if mode == "tls" else ()) for mode in MODES
])
def test_every_mode_of_echo_is_measured(run, mode):
    cell, = run("echo", "--mode", mode, "--connections", "3", *WINDOW)["cells"]
    row, = cell["rows"]
    assert_measured(row)
    assert all(sample["server_peak_rss_kib"] > 0 for sample in cell["samples"])


@needs_compiler
@pytest.mark.parametrize("mode", ["protocol", "churn"])
def test_echo_is_measured_over_unix_sockets(run, mode):
    options = ["--mode", mode, "--transport", "unix", "--connections", "3"]
    cell, = run("echo", *options, *WINDOW)["cells"]
    assert_measured(cell["rows"][0])


@needs_compiler
@pytest.mark.skipif(syscalls.missing_reason() is not None, reason="strace cannot trace")
def test_system_calls_are_counted(run):
    cell, = run("echo", "--syscalls", "--connections", "3", "--seconds", "0.1")["cells"]
    row, = cell["rows"]
    assert row["messages"] > 0 and sum(row["calls"].values()) > 0


@pytest.mark.parametrize("app", ["aiohttp", "uvicorn"])
def test_http_is_measured(loop_kind, ledger, monkeypatch, app):
    monkeypatch.setattr("benchmarks.wrk.available", lambda: False)
    monkeypatch.setattr(http_measure, "WARMUP_SECONDS", 0.1)
    demo = http_measure.Demo(rounds=1, seconds=0.2, app=app)
    result = http_measure.measure(demo, NAMES[loop_kind])
    assert result.messages > 0 and result.server_cpu_seconds > 0 and not result.errors


@pytest.mark.parametrize("tls", [[], pytest.param(["--tls"], marks=needs_openssl)])
def test_ping_pong_is_measured(run, tls):
    report = run("pingpong", "--pairs", "3", "--bytes", "100k", *tls, *WINDOW)
    row, = report["games"][0]["rows"]
    assert_measured(row)
    assert pingpong.Game(3, 1024**2).mib_per_second(10) == 20


@needs_compiler
def test_scaling_measures_speed_and_memory(run, monkeypatch):
    monkeypatch.setattr(scaling, "MEMORY_CONNECTIONS", 20)
    monkeypatch.setattr(idle, "SETTLE_SECONDS", 0.0)
    report = run("scaling", "--connections", "2,50", *WINDOW)
    assert [speed["cell"]["connections"] for speed in report["speed"]] == [2, 50]
    for speed in report["speed"]:
        assert_measured(speed["rows"][0])
    assert [memory["mode"] for memory in report["memory"]] == ["protocol", "streams"]
    for memory in report["memory"]:
        result, = memory["results"]
        assert result["connections"] == 50 and result["rss_kib"] > 0


@needs_redis
def test_redis_is_measured(run, monkeypatch):
    monkeypatch.setattr(redis, "TRACED_REQUESTS", 1000)
    loads = run("redis", "--requests", "1000", "--rounds", "1", "--command", "get")["loads"]
    speeds = [load for load in loads if "rows" in load]
    assert [load["load"]["pipeline"] for load in speeds] == [1, 16]
    for load in speeds:
        assert_measured(load["rows"][0])
    for load in loads:
        assert "rows" in load or sum(load["syscalls"][0]["calls"].values()) > 0


@needs_compiler
def test_an_idle_server_does_not_wake_up(run, monkeypatch):
    monkeypatch.setattr(idle, "SETTLE_SECONDS", 0.5)
    part, = run("idle", "--connections", "5", "--seconds", "0.5")["idle"]
    result, = part["results"].values()
    assert result["rss_kib"] > 0
    assert result["wakeups"] == 0


@needs_compiler
def test_a_loop_that_is_not_installed_keeps_its_row(run, loop_kind, capsys):
    cell, = run("echo", *WINDOW, names=f"nowhere:loop,{NAMES[loop_kind]}")["cells"]
    assert list(cell["failures"]) == ["nowhere:loop"]
    assert re.search("nowhere:loop +absent: No module named 'nowhere'", capsys.readouterr().out)
    assert len(cell["rows"]) == 1


# What is wrong is noticed


def flip(data):
    """The same bytes but for the last."""
    return data[:-1] + bytes([data[-1] ^ 1])


def echo_badly(connection):
    with contextlib.suppress(OSError), connection:
        while data := connection.recv(65536):
            connection.sendall(flip(data))


@contextlib.contextmanager
def bad_server(serve, context=None):
    """A TCP server on a port, in threads of its own; `serve` gets each connection."""
    threads = []

    def accept():
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                threads.append(threading.Thread(target=begin, args=(connection,)))
                threads[-1].start()

    def begin(connection):
        with contextlib.suppress(OSError):
            if context is not None:
                connection = context.wrap_socket(connection, server_side=True)
        serve(connection)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        acceptor = threading.Thread(target=accept)
        acceptor.start()
        try:
            yield list(listener.getsockname())
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            acceptor.join()
            for thread in threads:
                thread.join()


def configured(mode, certificate=""):
    return LoadConfig(3, 1024, 0.05, 0.1, mode, certificate)


@needs_compiler
@pytest.mark.parametrize("mode", ["protocol", "churn"])
def test_wrong_bytes_end_the_load(mode):
    with bad_server(echo_badly) as address:
        command = load_command(compile_program("load"), address, configured(mode), 1)
        with pytest.raises(ProcessFailed, match="other bytes than it was sent"):
            run_load(command, Placement(), LOAD.timeout)


def test_wrong_bytes_end_the_load_over_tls(certificate):
    with bad_server(echo_badly, server_context(certificate[0])) as address:
        command = tls_command(address, configured("tls", certificate[0]), 1)
        with pytest.raises(ProcessFailed, match="other bytes than it was sent"):
            run_load(command, Placement(), LOAD.timeout)


@needs_compiler
def test_a_server_that_closes_without_an_echo_ends_the_load():
    def take_and_close(connection):
        with connection:
            connection.recv(LOAD.size, socket.MSG_WAITALL)

    with bad_server(take_and_close) as address:
        command = load_command(compile_program("load"), address, configured("churn"), 1)
        with pytest.raises(ProcessFailed, match="closed a connection"):
            run_load(command, Placement(), LOAD.timeout)


@contextlib.contextmanager
def datagram_server(answer):
    """A UDP server whose replies `answer(data, sender)` makes; None for none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver:
        receiver.bind(("127.0.0.1", 0))

        def serve():
            while True:
                data, sender = receiver.recvfrom(65536)
                if not data:
                    return
                if reply := answer(data, sender):
                    receiver.sendto(reply, sender)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield list(receiver.getsockname())
        finally:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as last:
                last.sendto(b"", receiver.getsockname())
            thread.join()


def load_datagrams(address):
    command = load_command(compile_program("load"), address, configured("udp"), 1)
    return run_load(command, Placement(), LOAD.timeout)


@needs_compiler
def test_wrong_datagrams_end_the_load():
    with datagram_server(lambda data, sender: flip(data)) as address:
        with pytest.raises(ProcessFailed, match="other bytes than it was sent"):
            load_datagrams(address)


@needs_compiler
def test_datagrams_that_are_lost_are_sent_again_and_counted():
    seen = set()

    def answer_the_second_time(data, sender):
        if (data, sender) in seen:
            return data
        seen.add((data, sender))

    with datagram_server(answer_the_second_time) as address:
        result = load_datagrams(address)
    assert result.messages > 0
    assert result.errors["resent"] >= result.messages


@pytest.mark.parametrize("replies", [b"+PONG\r\n+OK\r\n$3\r\nVXX\r\n", b"+PONG\r\n"])
def test_wrong_replies_of_a_redis_server_are_noticed(replies):
    def serve(connection):
        with connection:
            connection.recv(4096)
            connection.sendall(replies)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(4096):
                pass

    with bad_server(serve) as address:
        with pytest.raises(ProcessFailed, match="were answered"):
            check_replies(address[1])


@pytest.mark.parametrize(("chunks", "reason"), [
    ([b"abc", b"dex"], "others"), ([b"abcdef", b"g"], "more")])
def test_wrong_bytes_end_a_game_of_ping_pong(chunks, reason):
    game = Game(6)
    game.message = b"abcdef"
    game.verify = reason == "others"
    said = []
    game.fail = said.append
    game.deadline = 0.0
    pinger = Pinger(game)
    for chunk in chunks:
        pinger.data_received(chunk)
    assert len(said) == 1 and reason in said[0]


def test_a_loop_that_fails_is_not_measured_again():
    asked = []

    def measure(name):
        asked.append(name)
        raise ServerFailed("gone", absent=name == "a") if name == "a" else ProcessFailed("down")

    outcome = run_rounds(["a", "b"], 3, measure)
    assert sorted(asked) == ["a", "b"]
    assert outcome.failures == {"a": "absent: gone", "b": "failed: down"}
    assert not outcome.rows(["a", "b"])
    assert exit_status([outcome.as_json()]) == 1
    del outcome.failures["b"]
    assert exit_status([outcome.as_json()]) == 0


@pytest.mark.parametrize("arguments", [
    ["echo", "--mode", "udp", "--transport", "unix"],
    ["echo", "--mode", "udp", "--size", "4"],
    ["echo", "--size", "1g"],
    ["scaling", "--connections", "0"],
    ["pingpong", "--bytes", "many"],
    ["idle", "--mode", "sock"],
    ["redis", "--pipeline", "-1"],
    ["http", "--app", "flask"],
    ["http", "--loops", "floor-epoll"],
    ["echo", "--json", "/nowhere/at/all.json"],
])
def test_what_cannot_work_is_refused_before_it_starts(arguments, capsys):
    with pytest.raises(SystemExit) as ending:
        COMMANDS[arguments[0]](arguments[1:])
    assert ending.value.code == 2
    assert "error:" in capsys.readouterr().err


# Parsing


def test_sizes_and_cpus():
    assert [parse_size(word) for word in ("1", "10k", "2M")] == [1, 10240, 2 * 1024**2]
    for word in ("", "k", "0", "-1", "1.5k", "65m"):
        with pytest.raises(ValueError):
            parse_size(word)
    with pytest.raises(Exception, match="expected SERVER,CLIENT"):
        parse_cpus("0")


@pytest.mark.parametrize("name", ["uvloop-mmap", "aiofastnet-mmap", "rloop", "floor-epoll"])
def test_peers_are_known_by_name(name):
    assert loops.parse_name(name).name == name


def test_a_suffix_makes_the_allocator_keep_large_blocks():
    kept = loops.parse_name("uringloop-mmap").environment()
    assert "MALLOC_MMAP_THRESHOLD_" in kept
    assert kept["URINGLOOP_BACKEND"] == "io_uring"
    assert loops.parse_name("uvloop").environment() == {}


def test_rounds_change_the_order():
    names = ["a", "b", "c"]
    orders = [round_order(names, number) for number in range(3)]
    assert all(sorted(order) == names for order in orders)
    assert len({tuple(order) for order in orders}) == 3


def test_redis_requests_may_end_anywhere():
    stream = b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$4\r\nv\r\nw\r\nPING\r\n*2\r\n$3\r\nget\r\n$1\r\nk\r\n"
    for cut in range(len(stream) + 1):
        protocol, written = RedisProtocol({}), []
        protocol._transport = type("Transport", (), {"write": staticmethod(written.append)})
        protocol.data_received(stream[:cut])
        protocol.data_received(stream[cut:])
        assert b"".join(written) == b"+OK\r\n+PONG\r\n$4\r\nv\r\nw\r\n"


@pytest.mark.parametrize("data", [b"*x\r\n", b"*1\r\n+OK\r\n", b"*1\r\n$-1\r\n", b"*1\r\n$\r\n"])
def test_malformed_redis_requests(data):
    with pytest.raises(Malformed):
        parse_request(data, 0)


def test_the_report_of_redis_benchmark():
    head = '"test","rps","avg_latency_ms","min_latency_ms","p50_latency_ms","p95_latency_ms",' \
           '"p99_latency_ms","max_latency_ms"\n'
    row = '"GET","5000.00","1","0.1","0.5","1.5","2.5","3"\n'
    result = parse_report(head + row, 1000, 0.1, 0.2)
    assert (result.rate, result.p50_us, result.p99_us) == (5000, 500, 2500)
    assert result.server_cpu_us == pytest.approx(200)
    for text in ("", head, f'{head}"GET","0.00","1","0","0","0","0","0"\n', "ERR"):
        with pytest.raises(ProcessFailed):
            parse_report(text, 1000, 0.1, 0.2)


def test_the_status_of_a_process():
    text = "Name:\tpython\nVmRSS:\t   1234 kB\nvoluntary_ctxt_switches:\t7\nSigQ:\t0/95\n"
    assert parse_status(text) == {"VmRSS": 1234, "voluntary_ctxt_switches": 7}
    status = read_status(os.getpid())
    assert 0 < status.rss_kib <= status.peak_rss_kib
    with pytest.raises(ProcessFailed):
        read_status(2**22 + 1)
