"""Builds the extension uringloop._core on the system's liburing; the rest is in pyproject.toml.

URINGLOOP_SANITIZE=1 builds with AddressSanitizer and UndefinedBehaviorSanitizer,
URINGLOOP_PROVING=1 with the handles that tests/faults and tests/models need.
"""

import glob
import os
import platform
import shlex
import subprocess
import sys

from Cython.Build import cythonize
from setuptools import Extension, setup

LIBURING = "2.3"
NO_LIBURING = f"""
uringloop needs the headers of liburing {LIBURING} or newer, and pkg-config to find them. Install
  Debian, Ubuntu:  apt-get install liburing-dev pkg-config
  Fedora, RHEL:    dnf install liburing-devel pkgconf-pkg-config
  Alpine:          apk add liburing-dev pkgconf
({{reason}})
"""


def liburing_flags(kind):
    """What pkg-config says for liburing, `kind` being --cflags or --libs, as a list."""
    command = ["pkg-config", kind, f"liburing >= {LIBURING}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except FileNotFoundError:
        sys.exit(NO_LIBURING.format(reason="pkg-config was not found"))
    except subprocess.CalledProcessError as exc:
        found = subprocess.run(["pkg-config", "--modversion", "liburing"], capture_output=True,
                               text=True).stdout.strip()
        reason = f"found liburing {found}: too old" if found else (exc.stderr.strip() or exc)
        sys.exit(NO_LIBURING.format(reason=reason))
    return shlex.split(done.stdout)


if platform.system() != "Linux":
    sys.exit("uringloop runs on Linux only: io_uring is a Linux interface")

compile_flags = ["-O2", "-fno-strict-aliasing", "-Wall"]
link_flags = []
if os.environ.get("URINGLOOP_SANITIZE"):
    sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined",
                  "-fno-omit-frame-pointer", "-g"]
    compile_flags += sanitizers
    link_flags += sanitizers

# sdist and metadata need no liburing.
building = any(word.startswith(("build", "bdist", "install", "develop", "editable"))
               for word in sys.argv[1:])

proving = bool(os.environ.get("URINGLOOP_PROVING"))

core = Extension(
    "uringloop._core",
    ["tests/proving/_core.pyx" if proving else "uringloop/_core.pyx"],
    include_dirs=["uringloop", "tests/proving"] if proving else ["uringloop"],
    # Without the C line Cython looks tracebacks up by the line alone, whatever the room.
    define_macros=[("CYTHON_CLINE_IN_TRACEBACK", "1")]
    + ([("URINGLOOP_PROVING", "1")] if proving else []),
    extra_compile_args=compile_flags + (liburing_flags("--cflags") if building else []),
    extra_link_args=link_flags + (liburing_flags("--libs") if building else []),
    depends=[name for folder in ("uringloop/*", "tests/proving") for pattern in ("pxi", "pxd", "h")
             for name in glob.glob(f"{folder}/*.{pattern}")],
)

setup(ext_modules=cythonize([core], include_path=core.include_dirs) if building else [core])
