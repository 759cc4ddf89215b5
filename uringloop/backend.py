"""Which backend a loop gets, and why: io_uring where it works, epoll elsewhere, never silently."""

import errno
import functools
import logging
import os

try:
    from . import _core
except ImportError as exc:
    if not exc.name or not exc.name.startswith("uringloop"):
        raise
    raise ImportError(
        f"uringloop._core is not built for this Python in {os.path.dirname(__file__)}. In a source "
        "checkout, leave the folder to use an installed uringloop, or run: pip install -e .") \
        from exc
from .options import LoopOptions

logger = logging.getLogger("uringloop")


def available() -> bool:
    """Whether this process may use io_uring, found by trying it once."""
    return not unavailable_reason()


def unavailable_reason() -> str:
    """Why io_uring cannot be used here, with the way to change it; "" where it can."""
    error, step = _probe()
    return explain(error, step) if error else ""


# What may be different a moment later: the process can close descriptors and raise its limits.
_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_found: list[tuple[int, str]] = []


def _probe() -> tuple[int, str]:
    """(errno, step) of _core.probe_io_uring(), asked once unless the trouble may pass."""
    if _found:
        return _found[0]
    found = _core.probe_io_uring()
    if found[0] not in _PASSING:
        _found.append(found)
    return found


def explain(error: int, step: str) -> str:
    """A sentence for an errno of one step of setting the ring up (_core.probe_io_uring)."""
    if error == errno.ENOSYS:
        cause = ("the kernel has no io_uring system call, or a sandbox (gVisor, Podman's seccomp "
                 "profile) hides it")
    elif error in (errno.EPERM, errno.EACCES):
        cause = _explain_refusal()
    elif error == errno.ENOMEM:
        cause = ("the limit of locked memory (RLIMIT_MEMLOCK) is too low for a ring: raise it with "
                 "ulimit -l, LimitMEMLOCK= of systemd or --ulimit memlock of Docker")
    elif error in (errno.EMFILE, errno.ENFILE):
        cause = "no file descriptor is left for a ring: raise RLIMIT_NOFILE"
    elif error == errno.EINVAL:
        cause = (f"the kernel is too old: it refused the step {step!r}, which needs Linux 6.0 "
                 "(6.1 is recommended)")
    else:
        cause = f"the step {step!r} failed"
    return f"{cause} [{errno.errorcode.get(error, error)}: {os.strerror(error)}]"


def _explain_refusal() -> str:
    """Tell the sysctl of Linux 6.6 from seccomp and security modules, which answer alike."""
    try:
        with open("/proc/sys/kernel/io_uring_disabled") as sysctl:
            disabled = int(sysctl.read())
    except (OSError, ValueError):
        disabled = 0
    if disabled == 2:
        return "io_uring is switched off for everybody: sysctl kernel.io_uring_disabled=2"
    if disabled == 1 and os.geteuid() != 0:
        return ("io_uring is switched off for unprivileged processes: sysctl "
                "kernel.io_uring_disabled=1; join the group of kernel.io_uring_group")
    return ("a seccomp filter or a security module refuses io_uring, as Docker's default profile "
            "does: allow io_uring_setup, io_uring_enter and io_uring_register in the profile")


def choose(options: LoopOptions) -> tuple[str, str]:
    """(backend, reason) for effective options; OSError when io_uring is demanded in vain."""
    if options.backend == "epoll":
        return "epoll", "chosen by options or environment"
    error, step = _probe()
    if not error:
        return "io_uring", "this kernel offers all that is needed"
    return "epoll", fall_back(options, error, step)


def fall_back(options: LoopOptions, error: int, step: str) -> str:
    """The reason to report for using epoll, logged once; OSError if options forbid epoll."""
    reason = explain(error, step)
    if options.backend == "io_uring":
        raise OSError(error, f"io_uring cannot be used: {reason}. backend='auto' would use epoll")
    _log_once(reason)
    return reason


@functools.cache
def zerocopy_flags() -> int:
    """What _core.probe_zerocopy() found, which is asked once; a warning where it is nothing."""
    flags = _core.probe_zerocopy()
    if flags < 0:
        logger.warning("uringloop: send_zerocopy has no effect: the kernel has no zero-copy sends "
                       "(Linux 6.1)")
    return flags


@functools.cache
def _log_once(reason: str) -> None:
    logger.warning("uringloop: io_uring cannot be used, the loop runs on epoll: %s", reason)
