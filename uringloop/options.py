"""LoopOptions: everything about a loop that can be chosen."""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any, Literal, NoReturn

# What URINGLOOP_OPTIONS may say for a bool.
_TRUTH = {"true": True, "false": False, "1": True, "0": False, "yes": True, "no": False}
BACKENDS = ("auto", "io_uring", "epoll")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopOptions:
    """Choices for one loop; each has a default that suits servers of any size.

    backend: "auto" uses io_uring where the kernel offers it and epoll elsewhere; "io_uring" raises
        OSError with the cause instead of falling back; "epoll" never touches io_uring.
    ring_entries: length of the submission queue, 2 to 8192, a power of two. A full queue is
        submitted early, so this is no limit on anything. The completion queue is eight times as
        long. 64 bytes of locked memory each, and 128 for the completions.
    recv_buffers: the most receive blocks the pool may grow to, 4 to 32768, a power of two. The pool
        starts with 64 (or fewer, if this is less) and grows when more connections than that are
        readable at once. When it is full, the others receive by readiness, which is faster than
        blocks that the CPU's cache has no room for.
    recv_buffer_size: bytes of one receive block, 64 to 65536. A message that fills a block moves
        its connection to the receive mode for large messages.
    sock_readahead: the loop owns the read side of each stream socket given to sock_recv() or
        sock_recv_into(): it goes on receiving between calls (up to 64 KiB are held), so that such
        a socket must not be read from directly, duplicated or handed to another process. The
        fastest way; off by default, and without effect on epoll.
    send_zerocopy: writes of `bytes` of at least this size (4096 or more) to a TCP transport are
        sent without a copy into the kernel (Linux 6.1), where the socket and RLIMIT_MEMLOCK allow
        it; other buffers are copied, or sent at once. They wait for the end of the iteration, and
        their memory is kept until the peer has acknowledged them; while any is kept, an os.exec*()
        in the loop's thread cannot go on or be killed. Pays on real network cards; over loopback
        the kernel copies all the same, and needs more time. Off by default (None), and without
        effect on epoll.
    busy_poll: seconds, 0 to 0.01, for which the loop looks for work without sleeping before it
        blocks, as long as recent waits were shorter. It saves the time in which a thread wakes up,
        and burns a CPU for that: worth it, with 0.00002 or so, where one request at a time is to be
        answered as fast as possible and no other thread or process wants the CPU. Python's signal
        handlers may run that much later. Off by default.

    ValueError names a field that is out of range, TypeError one of the wrong type.
    """

    backend: Literal["auto", "io_uring", "epoll"] = "auto"
    ring_entries: int = 256
    recv_buffers: int = 256
    recv_buffer_size: int = 16384
    sock_readahead: bool = False
    send_zerocopy: int | None = None
    busy_poll: float = 0.0

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, not {self.backend!r}")
        self._check("ring_entries", 2, 8192, power_of_two=True)
        self._check("recv_buffers", 4, 32768, power_of_two=True)
        self._check("recv_buffer_size", 64, 65536)
        if not isinstance(self.sock_readahead, bool):
            raise TypeError("sock_readahead must be a bool, "
                            f"not {type(self.sock_readahead).__name__}")
        if self.send_zerocopy is not None:
            self._check("send_zerocopy", 4096, 1 << 30)
        self._check_seconds("busy_poll", 0.01)

    def _check_seconds(self, name: str, high: float) -> None:
        value = getattr(self, name)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise TypeError(f"{name} must be a float, not {type(value).__name__}")
        if not 0 <= value <= high:      # NaN is not
            raise ValueError(f"{name} must be from 0 to {high} seconds, not {value!r}")

    def _check(self, name: str, low: int, high: int, power_of_two: bool = False) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name} must be an int, not {type(value).__name__}")
        number = int(value)     # a sub-class is not asked what it is
        if not low <= number <= high or (power_of_two and number & (number - 1)):
            kind = "a power of two" if power_of_two else "an int"
            raise ValueError(f"{name} must be {kind} from {low} to {high}, not {value!r}")


def checked(options: LoopOptions | None) -> LoopOptions:
    """The options, or the defaults for None; TypeError for anything else."""
    if options is None:
        return LoopOptions()
    if not isinstance(options, LoopOptions):
        raise TypeError(f"options must be a LoopOptions, not {type(options).__name__}")
    return options


def effective_options(options: LoopOptions | None = None,
                      environ: Mapping[str, str] = os.environ) -> LoopOptions:
    """The options given, overridden by URINGLOOP_OPTIONS ("name=value,...") and URINGLOOP_BACKEND.

    The environment wins, so that an operator can switch io_uring off without touching the program.
    """
    options = checked(options)
    changes: dict[str, Any] = {}
    for item in filter(None, environ.get("URINGLOOP_OPTIONS", "").split(",")):
        name, separator, value = (part.strip() for part in item.partition("="))
        changes[name] = _parse(name, value) if separator else _refuse(item)
    if environ.get("URINGLOOP_BACKEND"):
        changes["backend"] = environ["URINGLOOP_BACKEND"]
    try:
        return dataclasses.replace(options, **changes) if changes else options
    except (TypeError, ValueError) as exc:
        raise type(exc)(f"environment variable URINGLOOP_OPTIONS or URINGLOOP_BACKEND: {exc}") \
            from None


def _parse(name: str, value: str) -> Any:
    known = {field.name: field.type for field in dataclasses.fields(LoopOptions)}
    if name not in known:
        raise ValueError(f"environment variable URINGLOOP_OPTIONS: no option {name!r}; "
                         f"there are {', '.join(known)}")
    if name == "backend":
        return value
    if known[name] is bool:
        if value.lower() in _TRUTH:
            return _TRUTH[value.lower()]
        raise ValueError(f"environment variable URINGLOOP_OPTIONS: {name} must be one of "
                         f"{', '.join(_TRUTH)}, not {value!r}")
    if name == "send_zerocopy" and value.lower() == "none":
        return None
    kind = float if known[name] is float else int
    try:
        return kind(value)
    except ValueError:
        raise ValueError(f"environment variable URINGLOOP_OPTIONS: {name} must be "
                         f"{'a float' if kind is float else 'an int'}, not {value!r}") from None


def _refuse(item: str) -> NoReturn:
    raise ValueError(f"environment variable URINGLOOP_OPTIONS: expected name=value, not {item!r}")
