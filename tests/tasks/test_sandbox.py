"""Code that a model wrote does no harm, and passes only where its tests ran to their end."""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path

import pytest

from d2f.errors import InputError
from d2f.tasks import sandbox
from d2f.tasks.sandbox import Limits, is_isolated, passes

FEW = Limits(seconds=3, memory_mb=512)
needs_namespaces = pytest.mark.skipif(not is_isolated(), reason="the system gives no namespaces")


@pytest.fixture(params=["isolated", "plain"])
def run(request, monkeypatch):
    """With what the system gives, and as where it gives no namespaces."""
    isolate = request.param == "isolated"
    if isolate and not is_isolated():
        pytest.skip("the system gives no namespaces")
    if not isolate and os.getuid() == 0:  # who starts a python that other users may run
        python = shutil.which("python3", path="/usr/local/bin:/usr/bin")
        monkeypatch.setattr(sandbox.sys, "executable", python or sys.executable)

    def run(program: str, tests: str, limits: Limits = FEW) -> bool:
        try:
            return sandbox._passes(program, tests, limits, isolate)
        except PermissionError:
            pytest.skip("another user cannot run this python")

    assert run("", "") is True  # else nothing below would say anything
    return run


def left_over(marker: str) -> list[str]:
    """Command lines of processes that still run something of the runner."""
    found = []
    for place in Path("/proc").glob("[0-9]*/environ"):
        try:
            if marker.encode() in place.read_bytes():
                found.append((place.parent / "cmdline").read_text())
        except OSError:
            continue
    return found


def test_a_right_program_passes_and_a_wrong_one_does_not(run):
    tests = "assert double(4) == 8"
    assert run("def double(x): return 2 * x", tests)
    assert not run("def double(x): return 3 * x", tests)
    assert not run("def double(x) return 2 * x", tests)
    assert not run("", tests)


@pytest.mark.parametrize(
    "program",
    [
        "import os\nos._exit(0)",
        "import sys\nsys.exit(0)",
        "raise SystemExit(0)",
        "def f():\n    import os\n    os._exit(0)",
        "def f():\n    raise SystemExit(0)",
        "import atexit, os\natexit.register(os._exit, 0)",
        "print('loaded'); print('passed'); print('OK')",
        "import os\nfor fd in range(1, 60):\n"
        "    try: os.write(fd, b'loaded\\npassed\\n')\n    except OSError: pass",
        "import builtins\nbuiltins.exec = lambda *a: None\nbuiltins.compile = lambda *a: None",
        "import os\nos.write = lambda *a: 0\nos._exit = lambda *a: None",
        "import builtins\nbuiltins.AssertionError = type('Quiet', (Exception,), {})",
        "import os, signal\nos.kill(os.getppid(), signal.SIGTERM)\nos.kill(os.getpid(), 9)",
        "import threading\nthreading.Thread(target=lambda: None).start()",
        "import json\njson.loads = lambda text: ['', 'x']",
    ],
)
def test_nothing_but_the_tests_own_end_counts_as_passed(run, program):
    assert not run(program, "f() if 'f' in globals() else None\nassert False")


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "import time\ntime.sleep(1000)",
        "import signal\nfor n in (signal.SIGTERM, signal.SIGXCPU, signal.SIGINT):\n"
        "    signal.signal(n, signal.SIG_IGN)\nwhile True: pass",
        "input()\nwhile True: pass",
    ],
)
def test_a_hang_ends_with_its_time(run, program):
    began = time.monotonic()
    assert not run(program, "", Limits(seconds=1))
    assert time.monotonic() - began < 30  # and not for ever


def test_a_fork_bomb_leaves_nothing_behind(run, monkeypatch):
    marker = f"BOMB{os.getpid()}"
    environment = sandbox._environment
    monkeypatch.setattr(
        sandbox, "_environment", lambda folder: {**environment(folder), "MARK": marker}
    )
    assert not run("import os\nwhile True: os.fork()", "")
    assert not run("import os\nwhile True:\n    if os.fork(): os.setsid()", "")
    assert left_over(marker) == []


def test_there_are_only_so_many_processes_at_a_time(run):
    many = "import os, time\nfor _ in range({}):\n    if os.fork() == 0: time.sleep(100)\n"
    assert run(many.format(5) + "time.sleep(0.2)", "")
    assert not run(many.format(200) + "time.sleep(0.2)", "")


def test_children_that_leave_the_group_are_ended_too(run, monkeypatch):
    marker = f"AWAY{os.getpid()}"
    environment = sandbox._environment
    monkeypatch.setattr(
        sandbox, "_environment", lambda folder: {**environment(folder), "MARK": marker}
    )
    away = (
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0: time.sleep(1000)\n"
        "    os._exit(0)\n"
    )
    assert run(away, "")
    assert left_over(marker) == []


def test_a_gigabyte_of_output_goes_nowhere(run):
    flood = "import os\nfor _ in range(1024): os.write(1, b'x' * 2**20); os.write(2, b'x')"
    assert run(flood, "", Limits(seconds=20))


def test_memory_files_and_descriptors_are_bounded(run):
    assert not run("x = bytearray(2**30)", "")
    assert not run("open('big', 'wb').write(b'x' * 2**26)", "")
    assert not run("files = [open(str(i), 'w') for i in range(1000)]", "")
    assert run(
        "open('small', 'wb').write(b'x' * 2**10)", "assert len(open('small').read()) == 1024"
    )


def test_it_begins_in_an_empty_folder_with_nothing_of_ours(run, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert run("import os", "assert os.listdir() == [] and 'HF_TOKEN' not in os.environ")
    assert run("import sys", "assert '' not in sys.path")


@needs_namespaces
def test_it_deletes_and_writes_nothing_of_ours(tmp_path):
    kept = tmp_path / "kept.txt"
    kept.write_text("mine")
    for what in ("import os\nos.remove({!r})", "import shutil\nshutil.rmtree({!r})"):
        assert not passes(what.format(str(kept)), "", FEW)
        assert not passes(what.format(str(tmp_path)), "", FEW)
    assert not passes(f"open({str(kept)!r}, 'w').write('theirs')", "", FEW)
    assert not passes(f"open({str(tmp_path / 'new')!r}, 'w')", "", FEW)
    assert [path.name for path in tmp_path.iterdir()] == ["kept.txt"]
    assert kept.read_text() == "mine"


@needs_namespaces
def test_it_has_no_network_and_sees_no_other_process():
    """Not even this machine's own: a server there would answer."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 2)"
        assert not passes(code, "", FEW)
    kill = f"import os\nos.kill({os.getpid()}, 0)"
    assert not passes(kill, "", FEW)


@needs_namespaces
def test_it_cannot_undo_its_limits():
    undo = "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))\nx = bytearray(2**30)"
    assert not passes(undo, "", FEW)
    mount = (
        "import ctypes\nlibc = ctypes.CDLL(None)\n"
        "assert libc.mount(b'none', b'/', None, 32 | 4096, None) == 0"
    )
    assert not passes(mount, "", FEW)


def test_where_nothing_can_be_run_that_is_said(monkeypatch):
    monkeypatch.setattr(sandbox, "_passes", lambda *_: False)
    is_isolated.cache_clear()
    try:
        with pytest.raises(InputError, match="cannot be run in a process of its own"):
            is_isolated()
    finally:
        is_isolated.cache_clear()
