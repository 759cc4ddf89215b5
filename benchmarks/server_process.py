"""A server process as the benchmark sees it: started, described, stopped."""

import json
import sys
from dataclasses import dataclass, field

from benchmarks.echo_servers import EchoConfig
from benchmarks.loops import LoopSpec
from benchmarks.processes import ManagedProcess, Placement, ProcessFailed
from benchmarks.programs import CompileFailed, compile_program

START_SECONDS = 20.0


class ServerFailed(Exception):
    """A server didn't start or ended early; `absent` says that its loop isn't installed.

    The reason is kept on one line, as a cell of a table needs it.
    """

    def __init__(self, reason: str, absent: bool = False) -> None:
        super().__init__(" ".join(reason.split()))
        self.absent = absent


@dataclass(frozen=True)
class ServerConfig:
    """What to serve with which interpreter: `app` is `echo`, which `echo` describes, or the name
    of another application that serve.py knows.
    """

    spec: LoopSpec
    echo: EchoConfig | None
    placement: Placement = Placement()
    python: str = sys.executable
    traced: bool = False
    app: str = "echo"

    def command(self) -> list[str]:
        """The command line of the server process. Raises ServerFailed if it can't be built."""
        if not self.spec.factory:
            return floor_command(self.spec, self.echo)
        config = {
            "loop": self.spec.name,
            "app": self.app,
            "echo": None if self.echo is None else vars(self.echo),
            "traced": self.traced,
        }
        return [self.python, "-m", "benchmarks.serve", json.dumps(config)]


def floor_command(spec: LoopSpec, echo: EchoConfig | None) -> list[str]:
    """The command line of floor.c, which echoes streams of bytes. Raises ServerFailed."""
    if echo is None or echo.mode in ("tls", "udp"):
        raise ServerFailed("floor.c echoes plain TCP and Unix streams only", absent=True)
    try:
        binary = compile_program("floor", libraries=("uring",))
    except CompileFailed as error:
        raise ServerFailed(f"cannot compile: {error}") from error
    path = [echo.path] if echo.transport == "unix" else []
    return [str(binary), str(spec.backend), *path]


@dataclass
class Server:
    """A running server: `address` is [host, port] or a path, `info` what it says of itself."""

    process: ManagedProcess
    address: list | str
    info: dict = field(default_factory=dict)

    @property
    def pid(self) -> int:
        """The process id of the server."""
        return self.process.pid

    @property
    def port(self) -> int:
        """The TCP port on 127.0.0.1 of a server that has one."""
        return int(self.address[1])

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, exc_type: type | None, error: BaseException | None, trace: object) -> None:
        try:
            # A client that lost its connections knows less than the server's own last words.
            failed = isinstance(error, (ProcessFailed, ServerFailed))
            if failed and self.process.has_ended(within=0.5):
                reason = f"the server ended under load: {self.process.ending()}"
                raise ServerFailed(reason) from error
        finally:
            self.process.stop()


def start_server(config: ServerConfig, timeout: float = START_SECONDS) -> Server:
    """Start a server and wait until it listens. Raises ServerFailed within `timeout` seconds."""
    process = ManagedProcess(config.command(), config.placement, config.spec.environment())
    try:
        info = json.loads(process.read_line(timeout))
        if "failed" in info:
            raise ServerFailed(info["failed"], info["absent"])
        return Server(process, info.pop("address"), info)
    except BaseException as error:
        process.stop()
        if isinstance(error, (ProcessFailed, ValueError)):
            raise ServerFailed(f"the server did not start: {error}") from error
        raise


@dataclass
class Availability:
    """Loops that start, with what they say of themselves, and the reasons of the others."""

    info: dict[str, dict] = field(default_factory=dict)
    failures: dict[str, ServerFailed] = field(default_factory=dict)


def probe(configs: list[ServerConfig]) -> Availability:
    """Start and stop each server once, so that a missing loop is known before the first round."""
    found = Availability()
    for config in configs:
        try:
            with start_server(config) as server:
                found.info[config.spec.name] = server.info
        except ServerFailed as error:
            found.failures[config.spec.name] = error
    return found


def failure_text(error: ServerFailed | ProcessFailed) -> str:
    """How a table tells of a loop that wasn't measured."""
    absent = isinstance(error, ServerFailed) and error.absent
    return f"{'absent' if absent else 'failed'}: {error}"
