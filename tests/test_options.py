"""LoopOptions, the environment that overrides them, and the public names."""

import asyncio
import subprocess
import sys

import pytest

import uringloop
from uringloop.options import effective_options

POLICY_WARNS = sys.version_info >= (3, 14)


@pytest.mark.parametrize(("field", "value", "error"), [
    ("backend", "kqueue", ValueError),
    ("backend", None, ValueError),
    ("ring_entries", 0, ValueError),
    ("ring_entries", 3, ValueError),
    ("ring_entries", 65536, ValueError),
    ("ring_entries", "256", TypeError),
    ("ring_entries", True, TypeError),
    ("recv_buffers", 2, ValueError),
    ("recv_buffers", 2.0, TypeError),
    ("recv_buffer_size", 63, ValueError),
    ("recv_buffer_size", 65537, ValueError),
    ("send_zerocopy", 4095, ValueError),
    ("send_zerocopy", True, TypeError),
    ("send_zerocopy", "16384", TypeError),
    ("busy_poll", -0.001, ValueError),
    ("busy_poll", 0.011, ValueError),
    ("busy_poll", float("nan"), ValueError),
    ("busy_poll", "0.001", TypeError),
    ("busy_poll", True, TypeError),
    ("busy_poll", None, TypeError),
])
def test_a_bad_value_names_its_field(field, value, error):
    with pytest.raises(error, match=field):
        uringloop.LoopOptions(**{field: value})


def test_options_are_frozen_and_keyword_only():
    with pytest.raises(AttributeError):
        uringloop.LoopOptions().backend = "epoll"
    with pytest.raises(TypeError):
        uringloop.LoopOptions("epoll")


def test_only_options_are_accepted():
    with pytest.raises(TypeError, match="LoopOptions"):
        uringloop.new_event_loop({"backend": "epoll"})


def test_the_environment_overrides_the_program():
    environ = {"URINGLOOP_BACKEND": "epoll",
               "URINGLOOP_OPTIONS": "ring_entries=64, recv_buffers=8, busy_poll=2e-5"}
    options = effective_options(uringloop.LoopOptions(ring_entries=512), environ)
    assert options == uringloop.LoopOptions(backend="epoll", ring_entries=64, recv_buffers=8,
                                             busy_poll=0.00002)


@pytest.mark.parametrize(("environ", "words"), [
    ({"URINGLOOP_BACKEND": "fast"}, "URINGLOOP_BACKEND.*backend must be one of"),
    ({"URINGLOOP_OPTIONS": "rings=3"}, "no option 'rings'; there are backend"),
    ({"URINGLOOP_OPTIONS": "send_zerocopy=yes"}, "send_zerocopy must be an int"),
    ({"URINGLOOP_OPTIONS": "ring_entries"}, "expected name=value"),
    ({"URINGLOOP_OPTIONS": "ring_entries=many"}, "ring_entries must be an int"),
    ({"URINGLOOP_OPTIONS": "busy_poll=soon"}, "busy_poll must be a float, not 'soon'"),
    ({"URINGLOOP_OPTIONS": "busy_poll=1"}, "busy_poll must be from 0 to 0.01 seconds"),
    ({"URINGLOOP_OPTIONS": "busy_poll=nan"}, "busy_poll must be from 0 to 0.01 seconds"),
    ({"URINGLOOP_OPTIONS": "ring_entries=3"}, "ring_entries must be a power of two"),
])
def test_a_bad_environment_is_refused_by_name(environ, words):
    with pytest.raises(ValueError, match=words):
        effective_options(None, environ)


@pytest.mark.parametrize(("text", "value"), [("16384", 16384), ("none", None)])
def test_zero_copy_sends_are_switched_by_the_environment(text, value):
    options = effective_options(uringloop.LoopOptions(send_zerocopy=5000),
                                {"URINGLOOP_OPTIONS": f"send_zerocopy={text}"})
    assert options.send_zerocopy == value


def test_an_empty_environment_changes_nothing():
    assert effective_options(None, {"URINGLOOP_OPTIONS": "", "URINGLOOP_BACKEND": ""}) \
        == uringloop.LoopOptions()


def test_every_public_name_exists():
    assert dir(uringloop) == sorted(uringloop.__all__)
    names = [name for name in uringloop.__all__
             if not (POLICY_WARNS and name in ("EventLoopPolicy", "install"))]
    assert all(getattr(uringloop, name) is not None for name in names)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = uringloop.nothing


def test_run_gives_the_result_and_refuses_to_nest():
    async def main():
        assert isinstance(asyncio.get_running_loop(), uringloop.Loop)
        assert isinstance(asyncio.get_running_loop(), asyncio.SelectorEventLoop)
        nested = asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="running event loop"):
            uringloop.run(nested)
        nested.close()
        return 42

    assert uringloop.run(main()) == 42
    assert uringloop.run(main(), debug=True,
                         options=uringloop.LoopOptions(backend="epoll")) == 42


def run_python(source, *flags):
    return subprocess.run([sys.executable, *flags, "-c", source], capture_output=True, text=True,
                          timeout=60)


@pytest.mark.skipif(POLICY_WARNS, reason="asyncio deprecates policies from 3.14 on")
@pytest.mark.parametrize("switch", [
    "uringloop.install()",
    "asyncio.set_event_loop_policy(uringloop.EventLoopPolicy())",
])
def test_the_policy_makes_asyncio_run_use_it(switch):
    child = run_python("import asyncio, uringloop\n" + switch + """
async def main():
    print(type(asyncio.get_running_loop()).__name__)
    process = await asyncio.create_subprocess_exec("true")
    print(await process.wait())
asyncio.run(main())
""", "-W", "error")
    assert (child.returncode, child.stdout.split()) == (0, ["Loop", "0"]), child.stderr


@pytest.mark.skipif(not POLICY_WARNS, reason="asyncio deprecates policies from 3.14 on")
def test_the_policy_warns_where_asyncio_does():
    child = run_python("import uringloop; uringloop.install()", "-W", "error")
    assert "DeprecationWarning" in child.stderr


def test_importing_uringloop_warns_of_nothing():
    child = run_python("import uringloop", "-W", "error")
    assert (child.returncode, child.stderr) == (0, "")
