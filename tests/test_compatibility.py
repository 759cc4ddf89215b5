"""docs/compatibility.md says whose code runs; here it is compared with the code.

    python tests/test_compatibility.py            print the document as it should be
    python tests/test_compatibility.py --write    write it: code columns anew, notes as they are

A method that the document lacks is appended to its table, and one that no longer exists is kept for
a human to delete: the tests name both.
"""

import asyncio
import contextlib
import functools
import importlib
import os
import pathlib
import re
import socket
import ssl
import sys
from asyncio import sslproto

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # for the command; pytest finds the package by itself

import uringloop  # noqa: E402
from uringloop import _core  # noqa: E402

DOCUMENT = ROOT / "docs" / "compatibility.md"
FILES = [*sorted((ROOT / "uringloop").glob("*/*.pxi")), *sorted((ROOT / "uringloop").glob("*.py"))]
SUPPORTED = ("3.11", "3.12", "3.13")
RUNNING = f"{sys.version_info.major}.{sys.version_info.minor}"
NO_SUCH_METHOD = "-"
INTERFACES = {"stream": asyncio.Transport, "TLS": asyncio.Transport,
              "datagram": asyncio.DatagramTransport, "subprocess": asyncio.SubprocessTransport}
ROW = re.compile(r"^\| `(?P<name>\w+)(?:\(\))?`(?: since (?P<since>[\d.]+))? \|")


# What the code says


def public(*classes):
    """The names that the classes define themselves, in the order of their definition."""
    return list(dict.fromkeys(
        name for cls in classes for name in vars(cls) if not name.startswith("_")))


@functools.cache
def methods_of_rooms():
    """{(class or "", method): room} of the engine; "" for what is indented under no class."""
    found = {}
    for room in FILES:
        owner = ""
        for line in room.read_text().splitlines():
            opening = re.match(r"(?:cdef )?class (\w+)", line)
            method = re.match(r"\s+(?:async )?(?:cp)?def (?:\w+ )*(\w+)\(", line)
            if opening:
                owner = opening.group(1)
            elif method:
                found.setdefault((owner, method.group(1)), room.name)
    return found


def code_of(kind, name):
    """Where the code that runs is: "asyncio", "loop.py", or a room of the engine."""
    interface, actual = kind
    if not hasattr(interface, name):
        return NO_SUCH_METHOD
    owner = next(cls for cls in actual.__mro__ if name in vars(cls))
    if owner.__module__ == _core.__name__:
        rooms = methods_of_rooms()
        return f"`{rooms.get((owner.__name__, name)) or rooms['', name]}`"
    if owner.__module__.split(".")[0] == uringloop.__name__:
        return f"`{owner.__module__.split('.')[-1]}.py`"
    assert owner.__module__.split(".")[0] == "asyncio", owner
    return "asyncio"


async def make_transports(stack):
    """{kind: its transport} of a uringloop loop, of every kind there is."""
    loop = asyncio.get_running_loop()
    made = {}
    left, right = map(stack.enter_context, socket.socketpair())
    for sock in (left, right):
        sock.setblocking(False)
    made["stream"], _ = await loop.create_connection(asyncio.Protocol, sock=left)
    made["TLS"] = loop._make_ssl_transport(right, asyncio.Protocol(), ssl.create_default_context(),
                                           server_hostname="nobody")
    made["datagram"], _ = await loop.create_datagram_endpoint(
        asyncio.DatagramProtocol, local_addr=("127.0.0.1", 0))
    readable, writable = map(stack.enter_context, socket.socketpair())
    made["read pipe"], _ = await loop.connect_read_pipe(asyncio.Protocol, readable)
    made["write pipe"], _ = await loop.connect_write_pipe(asyncio.Protocol, writable)
    made["subprocess"], _ = await loop.subprocess_exec(
        asyncio.SubprocessProtocol, "true", stdin=None, stdout=None, stderr=None)
    await made["subprocess"]._wait()
    return made


@functools.cache
def transport_types():
    """{kind: the class of its transports} on a uringloop loop."""

    async def main():
        with contextlib.ExitStack() as stack:
            made = await make_transports(stack)
            # Not isinstance(): the engine's transports claim to be asyncio's.
            types = {kind: type(transport) for kind, transport in made.items()}
            for transport in made.values():
                getattr(transport, "abort", transport.close)()
            made.clear()
            for _ in range(5):
                await asyncio.sleep(0)
            return types

    return uringloop.run(main())


def tables():
    """{heading: (names in order, {column: (the interface, the class that implements it)})}"""
    kinds = transport_types()
    loop = asyncio.SelectorEventLoop
    return {
        "Event loop": (public(asyncio.AbstractEventLoop, *loop.__mro__[:-1]),
                       {"code": (loop, uringloop.Loop)}),
        "Transports": (public(*(cls for kind in INTERFACES.values() for cls in kind.__mro__[:-1])),
                       {kind: (cls, kinds[kind]) for kind, cls in INTERFACES.items()}),
        "Server": (public(asyncio.AbstractServer, asyncio.Server),
                   {"code": (asyncio.Server, asyncio.Server)}),
        "Handles": (public(asyncio.Handle, asyncio.TimerHandle),
                    {"code": (asyncio.TimerHandle, _core.TimerHandle)}),
    }


# What the document says


def cells_of(line):
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def section(text, heading):
    """The lines under a heading, as (number, line)."""
    lines = list(enumerate(text.splitlines()))
    start = next(number for number, line in lines if re.fullmatch(f"##+ {heading}", line))
    end = next((n for n, line in lines[start + 1:] if line.startswith("#")), len(lines))
    return lines[start + 1:end]


def rows_of(text, heading):
    """[(name, since or "3.11", {column: cell})] of the table under a heading."""
    lines = [line for _, line in section(text, heading) if line.startswith("|")]
    columns = cells_of(lines[0])
    return [(found["name"], found["since"] or SUPPORTED[0], dict(zip(columns, cells_of(line))))
            for line in lines[2:] if (found := ROW.match(line))]


def with_code_columns(text):
    """The document with the code columns as the running Python's code has them."""
    lines = text.splitlines()
    for heading, (names, kinds) in tables().items():
        body = [(number, line) for number, line in section(text, heading) if line.startswith("|")]
        columns = cells_of(body[0][1])
        missing = dict.fromkeys(names)
        for number, line in body[2:]:
            found = ROW.match(line)
            if found and found["name"] in missing:
                del missing[found["name"]]
                cells = dict(zip(columns, cells_of(line)))
                cells |= {column: code_of(kind, found["name"]) for column, kind in kinds.items()}
                lines[number] = "| " + " | ".join(cells.values()) + " |"
        for name in missing:
            codes = [code_of(kind, name) for kind in kinds.values()]
            lines[body[-1][0]] += f"\n| `{name}()` | " + " | ".join([*codes, "TODO |"])
    return "\n".join(re.sub(r" +\|", " |", line) for line in lines) + "\n"


@pytest.fixture(scope="module")
def document():
    return DOCUMENT.read_text()


@pytest.mark.parametrize("heading", ["Event loop", "Transports", "Server", "Handles"])
def test_every_method_has_one_row_with_the_code_that_runs(document, heading):
    names, columns = tables()[heading]
    rows = rows_of(document, heading)
    here = [name for name, since, _ in rows if version(since) <= version(RUNNING)]
    assert sorted(here) == sorted(names), "a method has no row, two rows, or is gone"
    later = [name for name, since, _ in rows if version(since) > version(RUNNING)]
    assert not set(later) & set(names), "a method is older than its row says"
    assert {since for _, since, _ in rows} <= set(SUPPORTED)
    for name, _, cells in rows:
        if name in here:
            actual = {column: code_of(kind, name) for column, kind in columns.items()}
            assert {column: cells[column] for column in actual} == actual, name


def version(text):
    return tuple(map(int, text.split(".")))


def test_the_transports_said_to_be_asyncios_are():
    kinds = transport_types()
    modules = {kind: kinds[kind].__module__ for kind in ("read pipe", "write pipe")}
    assert modules == {"read pipe": "asyncio.unix_events", "write pipe": "uringloop.pipes"}


def test_what_regenerates_the_table_keeps_the_document(document):
    assert with_code_columns(document) == document


def test_a_missing_row_is_appended(document):
    shorter = "\n".join(
        line for line in document.splitlines() if not line.startswith("| `call_soon()`"))
    (added,) = set(with_code_columns(shorter).splitlines()) - set(document.splitlines())
    assert added == "| `call_soon()` | `callbacks.pxi` | TODO |"


def test_links_inside_the_document_lead_somewhere(document):
    anchors = {re.sub(r"[^\w -]", "", line.lstrip("# ")).lower().replace(" ", "-")
               for line in document.splitlines() if line.startswith("#")}
    links = set(re.findall(r"\]\(#([^)]+)\)|^\[\w+\]: #(.+)$", document, re.MULTILINE))
    links = {link for pair in links for link in pair if link}
    assert links <= anchors


# Private parts

# Of classes that asyncio knows nothing of.
OURS = {("_loop", "loop.py"), ("_loop", "sock_call.pxi")}


async def make_owners(stack):
    """{name in the column "of": an object of asyncio that has the attributes}"""
    loop = asyncio.get_running_loop()
    left, right = map(stack.enter_context, socket.socketpair())
    left.setblocking(False)
    transport, _ = await loop.create_connection(asyncio.Protocol, sock=left)
    stack.callback(transport.abort)
    server = await loop.create_server(asyncio.Protocol, "127.0.0.1", 0)
    stack.callback(server.close)
    reader = asyncio.StreamReader()
    tls = sslproto.SSLProtocol(loop, asyncio.Protocol(), ssl.create_default_context(), None)
    stack.callback(tls._app_transport.abort)
    datagrams, _ = await loop.create_datagram_endpoint(
        asyncio.DatagramProtocol, local_addr=("127.0.0.1", 0))
    stack.callback(datagrams.abort)
    reading, writing = os.pipe()
    stack.callback(os.close, reading)
    pipe, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, os.fdopen(writing, "wb", 0))
    stack.callback(pipe.abort)
    process, _ = await loop.subprocess_exec(asyncio.SubprocessProtocol, "true", stdin=None,
                                            stdout=None, stderr=None)
    await process._wait()
    stack.callback(process.close)
    return {
        "loop": loop, "selector": loop._selector, "transport": transport, "server": server,
        "handle": loop.call_soon(int), "timer": loop.call_later(0, int), "reader": reader,
        "reader protocol": asyncio.StreamReaderProtocol(reader), "socket": right,
        "TLS transport": tls._app_transport, "ssl object": tls._sslobj,
        "datagram transport": datagrams, "write pipe": pipe, "subprocess transport": process,
        "future": loop.create_future(),
    }


MODULES = ("asyncio", "asyncio.base_events", "asyncio.constants", "asyncio.events",
           "asyncio.format_helpers", "asyncio.futures", "asyncio.selector_events",
           "asyncio.sslproto", "asyncio.transports", "asyncio.trsock", "asyncio.unix_events")


def private_parts():
    """{owner: set of attributes that it has}"""

    async def main():
        with contextlib.ExitStack() as stack:
            owners = await make_owners(stack)
            names = {owner: set(dir(value)) for owner, value in owners.items()}
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return names

    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        names = runner.run(main())
    return names | {module: set(dir(importlib.import_module(module))) for module in MODULES}


def listed_parts(text):
    """{(owner, attribute, file)} of the document's list."""
    lines = [line for _, line in section(text, "Private parts of asyncio that are used")
             if line.startswith("|")]
    return {(owner, attribute, name) for owner, attributes, where, _ in map(cells_of, lines[2:])
            for attribute in re.findall(r"`(\w+)`", attributes) for name in where.split(", ")}


def test_every_private_part_exists_and_is_used(document):
    exist = private_parts()
    text = {path.name: path.read_text() for path in FILES}
    listed = listed_parts(document)
    gone = {part for part in listed if part[1] not in exist[part[0]]}
    assert not gone, "this Python has not what the document lists"
    unused = {part for part in listed if not re.search(rf"\b{part[1]}\b", text[part[2]])}
    assert not unused


def test_every_private_part_in_the_code_is_listed(document):
    exist = private_parts()
    listed = listed_parts(document)
    by_file = {(attribute, name) for _, attribute, name in listed}
    objects = set().union(*(names for owner, names in exist.items() if owner not in MODULES))
    unlisted = set()
    for path in FILES:
        code = re.sub(r'"[^"\n]*"|#.*', "", path.read_text())
        words = {word for word in re.findall(r"(?<!\w)_[a-z]\w*", code) if word in objects}
        unlisted |= {(word, path.name) for word in words} - by_file - OURS
        for module, word in re.findall(r"\b(asyncio|[a-z_]+)\.(\w+)\b", code):
            full = module if module == "asyncio" else f"asyncio.{module}"
            private = full != "asyncio" or word.startswith("_")
            if full in MODULES and private and word in exist[full]:
                unlisted |= {(full, word, path.name)} - listed
    assert not unlisted


if __name__ == "__main__":
    result = with_code_columns(DOCUMENT.read_text())
    if sys.argv[1:] == ["--write"]:
        DOCUMENT.write_text(result)
    else:
        sys.stdout.write(result)
