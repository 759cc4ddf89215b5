"""What the suites need on disk, all under build/: virtual environments, sdists, logs.

    build/ecosystem/    sdists as downloaded (pip checks the hashes) and the tests out of them
    build/conform/      venv-3.12/ and the like, path/uringloop (the working tree's), results, logs
"""

import functools
import os
import pathlib
import shutil
import socket
import subprocess
import tarfile
import tempfile

from .suite import OURS

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "conform"
SDISTS = ROOT / "build" / "ecosystem"
INSIDE = pathlib.Path(__file__).resolve().parent / "inside"
CONSTRAINTS = ROOT / "tests" / "ecosystem" / "constraints.txt"
PIP = ("-m", "pip", "-q", "--disable-pip-version-check")


class NotRun(Exception):
    """A suite cannot run here, and why."""


def run(*command, **options):
    """Runs a command; its output only when it fails, as NotRun."""
    done = subprocess.run([str(word) for word in command], text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, **options)
    if done.returncode:
        raise NotRun(f"{' '.join(str(word) for word in command)} failed:\n{done.stdout[-2000:]}")
    return done.stdout


def version_of(python):
    return run(python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])").strip()


class Environment:
    """The virtual environment of one Python, which gets what each suite requires."""

    def __init__(self, python):
        self.version = version_of(python)
        self.folder = BUILD / f"venv-{self.version}"
        self.python = self.folder / "bin" / "python"
        if not self.python.exists():
            run(python, "-m", "venv", self.folder)
        self.search_path = _uringloop_alone()

    def io_uring_refused(self):
        """Why there is no io_uring for this Python here, or ""."""
        code = "import uringloop; print(uringloop.unavailable_reason() or '')"
        return run(self.python, "-c", code, env=self._environ()).strip()

    def install(self, suite):
        """pytest and uvloop, and what the suite requires."""
        wanted = ["pytest", "uvloop", *suite.requires]
        if suite.project:
            wanted.append(f"{suite.project}=={suite.version}")
        stamp = self.folder / f"installed-{suite.name}"
        content = "\n".join([*wanted, CONSTRAINTS.read_text()])
        if not stamp.exists() or stamp.read_text() != content:
            run(self.python, *PIP, "install", "-c", CONSTRAINTS, *wanted)
            stamp.write_text(content)

    def folder_of(self, suite):
        """The folder that the suite's file patterns start from."""
        if suite.package:
            code = f"import {suite.package} as package; print(package.__path__[0])"
            try:
                return pathlib.Path(run(self.python, "-c", code).strip())
            except NotRun:
                raise NotRun(f"this Python {self.version} has no package {suite.package}")
        return _unpacked(suite, self.python)

    def environ(self, suite, loop):
        """The environment variables of the suite's processes."""
        environ = {**self._environ(), "CONFORM_LOOP": loop, **suite.environ}
        if loop in OURS:
            environ["URINGLOOP_BACKEND"] = loop
        return environ

    def _environ(self):
        kept = {name: value for name, value in os.environ.items()
                if not name.startswith(("PYTHON", "PYTEST", "URINGLOOP_", "MAKE"))}
        return {**kept, "PYTHONPATH": os.pathsep.join([str(INSIDE), str(self.search_path)]),
                "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1",
                "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "VIRTUAL_ENV": str(self.folder),
                "PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"}


@functools.cache
def with_localhost():
    """The words before a command that give it a localhost that is ::1 as well as 127.0.0.1.

    /etc/hosts of containers often lacks that; the command gets its own in a mount namespace, where
    we may. Otherwise nothing: the tests that need it fail on every loop.
    """
    try:
        socket.getaddrinfo("localhost", None, socket.AF_INET6)
        return ()
    except socket.gaierror:
        pass
    if not socket.has_dualstack_ipv6() or os.geteuid() or not shutil.which("unshare"):
        return ()
    hosts = BUILD / "hosts"
    hosts.write_text("127.0.0.1 localhost\n::1 localhost\n")
    words = ("unshare", "--mount", "sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"', hosts)
    return words if subprocess.run((*words, "true")).returncode == 0 else ()


def _uringloop_alone():
    """A folder for PYTHONPATH with the working tree's package, and nothing else of the tree."""
    folder = BUILD / "path"
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / "uringloop"
    if not link.exists():
        link.unlink(missing_ok=True)
        link.symlink_to(ROOT / "uringloop")
    return folder


def _unpacked(suite, python):
    """The tests of the suite's sdist, away from its sources: the installed package is tested."""
    folder = SDISTS / f"{suite.project}-{suite.version}"
    if folder.exists():
        return folder
    sdist = SDISTS / f"{folder.name}.tar.gz"
    if not sdist.exists():
        SDISTS.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            file.write(f"{suite.project}=={suite.version} --hash=sha256:{suite.sha256}\n")
            file.flush()
            run(python, *PIP, "download", "--no-deps", "--no-binary", suite.project,
                "--require-hashes", "-d", SDISTS, "-r", file.name)
    scratch = SDISTS / f"{folder.name}.part"
    with tarfile.open(sdist) as archive:
        wanted = [member for member in archive if _below(member.name, suite.unpack)]
        archive.extractall(scratch, members=wanted, filter="data")
    (scratch / folder.name).rename(folder)
    scratch.rmdir()
    return folder


def _below(name, tops):
    path = name.partition("/")[2]
    return any(path == top or path.startswith(top + "/") for top in tops)
