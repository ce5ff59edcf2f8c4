"""Code that a model wrote passes only where its tests ran to their end, stays within its limits,
and reaches nothing: neither with bubblewrap nor with our own namespaces."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from d2f.errors import InputError
from d2f.tasks import sandbox
from d2f.tasks.sandbox import Limits, isolation, passes, protection

FEW = Limits(seconds=3, memory_mb=512)


def working(way: str):
    """The way, where it is there: else nothing that fails below would say anything."""
    run = partial(sandbox._passes, limits=FEW, way=way)
    try:
        there = run("", "")
    except OSError:
        there = False
    return run if there else pytest.skip(f"{way}: not possible here")


@pytest.fixture(params=["bwrap", "own"])
def isolated(request):
    return working(request.param)


@pytest.fixture(params=["isolated", "none"])
def run(request, monkeypatch):
    if request.param == "isolated":
        return partial(passes, limits=FEW)
    if os.getuid() == 0:  # who starts a python that other users may run
        python = shutil.which("python3", path="/usr/local/bin:/usr/bin")
        monkeypatch.setattr(sandbox.sys, "executable", python or sys.executable)
    return working("none")


def test_a_right_program_passes_and_a_wrong_one_does_not(run):
    tests = "assert double(4) == 8"
    assert run("def double(x): return 2 * x", tests)
    assert not run("def double(x): return 3 * x", tests)
    assert not run("def double(x) return 2 * x", tests)


CHEATS = [
    "def f():\n    import os\n    os._exit(0)",
    "raise SystemExit(0)",
    "import atexit, os\natexit.register(os._exit, 0)",
    "import os\nfor fd in range(1, 60):\n"
    "    try: os.write(fd, b'loaded\\npassed\\n')\n    except OSError: pass",
    "import builtins\nbuiltins.exec = lambda *a: None\nbuiltins.compile = lambda *a: None",
    "import os\nos.write = lambda *a: 0\nos._exit = lambda *a: None",
    "import builtins\nbuiltins.AssertionError = type('Quiet', (Exception,), {})",
    "import os, signal\nos.kill(os.getppid(), signal.SIGTERM)\nos.kill(os.getpid(), 9)",
    "import json\njson.loads = lambda text: ['', 'x']",
]


def test_nothing_but_the_tests_own_end_counts_as_passed():
    tests = "f() if 'f' in globals() else None\nassert False"
    assert [program for program in CHEATS if passes(program, tests, FEW)] == []


STUBBORN = (
    "import signal\nfor n in (signal.SIGTERM, signal.SIGXCPU, signal.SIGINT):\n"
    "    signal.signal(n, signal.SIG_IGN)\ninput()\nwhile True: pass"
)


def test_a_hang_ends_with_its_time(run):
    began = time.monotonic()
    with ThreadPoolExecutor(2) as threads:
        hang = partial(run, tests="", limits=Limits(seconds=1))
        assert list(threads.map(hang, ["import time\ntime.sleep(1000)", STUBBORN])) == [False] * 2
    assert time.monotonic() - began < 30  # and not for ever


AWAY = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0: time.sleep(1000)
    os._exit(0)
"""
BOMB = "import os\nwhile True:\n    if os.fork(): os.setsid()"


@pytest.fixture
def left(monkeypatch):
    """List the processes that programs started and that are still there."""
    marker = f"MARK{os.getpid()}"
    environment = sandbox._environment
    monkeypatch.setattr(sandbox, "_environment", lambda home: environment(home) | {"M": marker})

    def still_there() -> list[Path]:
        found = []
        for place in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                found += [place] * (marker.encode() in place.read_bytes())
        return found

    return still_there


@pytest.mark.parametrize(("program", "passed"), [(AWAY, True), (BOMB, False)], ids=["away", "bomb"])
def test_nothing_that_it_started_is_left(run, left, program, passed):
    assert run(program, "") is passed
    assert left() == []


def test_nothing_is_left_of_what_a_late_supervisor_had_no_time_to_end(left, monkeypatch):
    """On a flooded machine our own deadline comes first, and what is killed takes time to end."""
    monkeypatch.setattr(sandbox, "GRACE_SECONDS", -1.5)
    heavy = "import os, time\nfor _ in range(7): os.fork()\nx = bytearray(2**20)\ntime.sleep(100)"
    limits = Limits(seconds=3, memory_mb=2**20, processes=2**20)
    assert not passes(heavy, "", limits)
    assert left() == []


def test_output_memory_files_and_descriptors_are_bounded(run):
    flood = "import os\nfor _ in range(256): os.write(1, b'x' * 2**20); os.write(2, b'x')"
    assert run(flood, "", limits=Limits(seconds=20))
    assert not run("x = bytearray(2**30)", "")
    assert not run("open('big', 'wb').write(b'x' * 2**26)", "")
    assert not run("files = [open(str(i), 'w') for i in range(1000)]", "")
    assert run("open('small', 'w').write('x' * 2**10)", "assert len(open('small').read()) == 1024")


def test_it_begins_in_an_empty_folder_with_nothing_of_ours(run, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    tests = "assert os.listdir() == [] and 'HF_TOKEN' not in os.environ and '' not in sys.path"
    assert run("import os, sys", tests)


MANY = "import os, time\nfor _ in range({}):\n    if os.fork() == 0: {}; time.sleep(100)\n"


def test_processes_and_their_memory_are_bounded_together(isolated):
    assert isolated(MANY.format(5, "pass") + "time.sleep(0.1)", "")
    assert not isolated(MANY.format(200, "pass") + "time.sleep(2)", "")
    assert not isolated(MANY.format(8, "x = bytearray(2**27)") + "time.sleep(2)", "")


C = "import ctypes, os, sys\nlibc = ctypes.CDLL(None, use_errno=True)\n"
ESCAPES = {  # tests that hold where nothing is reached
    "folders": "assert not any(map(os.path.exists, ({empty}, {home!r}, {folder!r}, {here!r})))",
    "unix socket": "import socket\nconnect = socket.socket(socket.AF_UNIX).connect\n"
    "for where in ({socket!r}, '/var/run/docker.sock'): refused(connect, where)",
    "pipe": "refused(os.open, {fifo!r}, os.O_WRONLY | os.O_NONBLOCK)",
    "network": "import socket\nrefused(socket.create_connection, ('127.0.0.1', {port}), 2)",
    "other processes": "refused(os.kill, {pid}, 0)\n"
    "assert max(int(name) for name in os.listdir('/proc') if name.isdecimal()) < 20",
    "another folder": "for top, names, _ in os.walk('/'):\n"
    "    names[:] = names if top.count('/') < 3 and top != '/proc' else []\n"
    "    if not top.startswith('/box'): refused(open, top + '/new', 'w')",
    "a program of ours": "refused(open, sys.executable, 'ab'), refused(os.remove, {module!r})",
    "kernel settings": "refused(open, '/proc/sys/kernel/hostname', 'w')",
    "devices": "assert sorted(os.listdir('/dev')) == ['null', 'random', 'urandom', 'zero']",
    "limits": "import resource\n"
    "refused(resource.setrlimit, resource.RLIMIT_AS, (-1, -1))\nrefused(bytearray, 2**30)",
    "mounts": "fails(libc.mount, b'none', b'/', None, 32 | 4096, None)\n"
    "fails(libc.mount, b'none', b'/box', b'tmpfs', 0, None)\nfails(libc.umount2, b'/box', 2)",
    "namespaces": "fails(libc.unshare, 0x10000000)\nfails(libc.unshare, 0x00020000)\n"
    "if os.uname().machine == 'x86_64': fails(libc.syscall, 56, 0x10000000 | 17, 0, 0, 0, 0)",
    "memory that no process shows": "fails(libc.shmget, 0, 2**20, 0o1600)\n"
    "fails(libc.msgget, 0, 0o1600)\nrefused(os.memfd_create, 'x')",
    "the first process": "refused(open, '/proc/1/mem', 'r+b')\nrefused(open, '/proc/1/environ')",
}
HELPERS = """
def refused(act, *given):
    try: act(*given)
    except (OSError, ValueError, MemoryError): return
    raise AssertionError(act, given)
def fails(act, *given): assert act(*given) == -1, given
"""


def test_it_reaches_nothing(isolated, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    os.mkfifo(tmp_path / "fifo")
    reader = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    monkeypatch.chdir(tmp_path)  # a socket's name is short
    with socket.socket(socket.AF_UNIX) as local, socket.create_server(("127.0.0.1", 0)) as server:
        local.bind("local")
        local.listen()
        values = {
            "home": str(Path.home() / ".bashrc"), "folder": str(tmp_path), "here": __file__,
            "socket": str(tmp_path / "local"), "fifo": str(tmp_path / "fifo"), "pid": os.getpid(),
            "port": server.getsockname()[1], "module": sandbox.__file__,
        }  # fmt: skip
        # But for those that lead to this interpreter, which may lie in somebody's home.
        folders = ("/run", "/tmp", "/home", "/var", "/etc/passwd", "/sys")
        leading = {str(p) for at in (sys.prefix, sys.base_prefix) for p in Path(at).parents}
        values["empty"] = ", ".join(repr(f) for f in folders if f not in leading)
        tests = {name: text.format(**values) for name, text in ESCAPES.items()}
        if not isolated(C + HELPERS, "\n".join(tests.values())):  # then which one?
            wrong = [name for name, text in tests.items() if not isolated(C + HELPERS, text)]
            pytest.fail(f"not held: {wrong}")
        assert not isolated(C + HELPERS, "refused(open, 'mine', 'w')")
    os.close(reader)


def test_where_nothing_holds_it_back_it_is_refused(monkeypatch):
    monkeypatch.setattr(sandbox, "_passes", lambda *given: given[-1] == "none")
    isolation.cache_clear()
    try:
        with pytest.raises(InputError, match=r"cannot be kept from the network .*--unsafe"):
            protection(False)
        assert "it is NOT cut off from the network" in protection(True)
        monkeypatch.setattr(sandbox, "_passes", lambda *_: False)
        isolation.cache_clear()
        with pytest.raises(InputError, match="another user than root"):
            passes("", "", FEW, unsafe=True)
    finally:
        isolation.cache_clear()
