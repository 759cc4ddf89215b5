"""The building's rules (docs/architecture.md): floors, no hidden globals, short lines, short
functions. Cython does not enforce the order of includes, so this does."""

import io
import pathlib
import re
import tokenize

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "uringloop"
FLOORS = ("ring", "scheduler", "transports")
ROOMS = sorted(path for floor in FLOORS for path in (PACKAGE / floor).glob("*.pxi"))
SOURCES = sorted({*ROOMS, *PACKAGE.glob("*.py"), *PACKAGE.glob("*.pyx"),
                  *PACKAGE.glob("*/*.pxd"), *(ROOT / "tests").rglob("*.py"),
                  *(ROOT / "benchmarks").glob("*.py"), ROOT / "setup.py"})

CLASS = re.compile(r"^(?:cdef )?class (\w+)", re.MULTILINE)
FUNCTION = re.compile(r"^( *)(?:async def|def|cdef(?! class)|cpdef) .*\(", re.MULTILINE)


def name(path):
    return path.relative_to(ROOT).as_posix()


def code_of(path):
    """The text without comments and strings, which may name whom they like."""
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    kept = (token.string for token in tokens
            if token.type not in (tokenize.COMMENT, tokenize.STRING))
    return " ".join(kept)


def classes_of(floor):
    return {found for path in (PACKAGE / floor).glob("*.pxi")
            for found in CLASS.findall(path.read_text())}


@pytest.mark.parametrize("room", ROOMS, ids=name)
def test_no_room_names_a_class_of_a_higher_floor(room):
    floor = FLOORS.index(room.parent.name)
    above = set().union(*(classes_of(higher) for higher in FLOORS[floor + 1:]))
    words = set(re.findall(r"\w+", code_of(room)))
    assert not words & above


def test_the_contents_page_includes_every_room_once_and_in_floor_order():
    page = (PACKAGE / "_core.pyx").read_text()
    included = re.findall(r'^include "([^"]+)"', page, re.MULTILINE)
    assert sorted(included) == [path.relative_to(PACKAGE).as_posix() for path in ROOMS]
    floors = [FLOORS.index(path.split("/")[0]) for path in included]
    assert floors == sorted(floors)


def test_the_contents_page_has_no_logic():
    page = (PACKAGE / "_core.pyx").read_text()
    assert not re.search(r"^\s*(def|cdef (?!extern)|class)\b", page, re.MULTILINE)


@pytest.mark.parametrize("room", ROOMS, ids=name)
def test_no_room_has_a_global_variable_in_c(room):
    assert not re.search(r"^cdef (?!class|enum|struct|inline|extern)[\w ]+ \w+( =.*)?$",
                         room.read_text(), re.MULTILINE)


@pytest.mark.parametrize("room", ROOMS, ids=name)
def test_a_room_opens_with_what_it_owns(room):
    first = room.read_text().splitlines()[:3]
    assert all(line.startswith("#") for line in first[:2])


@pytest.mark.parametrize("source", SOURCES, ids=name)
def test_lines_have_at_most_100_columns(source):
    long = [number for number, line in enumerate(source.read_text().splitlines(), 1)
            if len(line) > 100]
    assert not long


def function_lengths(text):
    """(name line, number of lines) of every function, by indentation."""
    lines = text.splitlines()
    for number, line in enumerate(lines):
        found = FUNCTION.match(line)
        if not found or line.rstrip().endswith(")"):
            continue
        indent = len(found.group(1))
        end = number + 1
        last = number
        while end < len(lines):
            stripped = lines[end].strip()
            if stripped and not lines[end].startswith(" " * (indent + 1)) and stripped != ")":
                break
            if stripped:
                last = end
            end += 1
        yield line.strip(), last - number + 1


@pytest.mark.parametrize("source", SOURCES, ids=name)
def test_functions_have_at_most_70_lines(source):
    long = {line: length for line, length in function_lengths(source.read_text()) if length > 70}
    assert not long
