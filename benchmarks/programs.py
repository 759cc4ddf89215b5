"""The C programs of this package, compiled into build/benchmarks/ when they are first needed."""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

from benchmarks.processes import ROOT

_CACHE = ROOT / "build" / "benchmarks"
_COMPILE_SECONDS = 60.0


class CompileFailed(Exception):
    """A program can't be built here."""


def compile_program(name: str, libraries: tuple[str, ...] = ()) -> Path:
    """The binary of `name`.c, kept under a hash of its source.

    Raises CompileFailed, with the compiler's own words when it ran.
    """
    source = Path(__file__).with_name(f"{name}.c")
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:12]
    binary = _CACHE / f"{name}-{digest}"
    if binary.exists():
        return binary
    compiler = os.environ.get("CC", "cc")
    if shutil.which(compiler) is None:
        raise CompileFailed(f"no C compiler {compiler!r}: install one, or name it in CC")
    partial = binary.with_suffix(f".{os.getpid()}")
    command = [compiler, "-O2", "-o", str(partial), str(source)]
    command += [f"-l{library}" for library in libraries]
    try:
        _CACHE.mkdir(parents=True, exist_ok=True)
        outcome = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_SECONDS)
        if outcome.returncode != 0:
            raise CompileFailed(f"{' '.join(command)}:\n{outcome.stderr}")
        partial.replace(binary)  # atomic: a run beside this one never sees half a program
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompileFailed(str(error)) from error
    finally:
        partial.unlink(missing_ok=True)
    return binary
