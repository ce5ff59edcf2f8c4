"""Run code that a model wrote: in processes of its own, with limits, away from the rest.

    this process      a temporary folder, two pipes, the verdict
      supervisor        namespaces, limits, ends all that is left    python -I sandbox.py supervise
        solution          loads the program, then runs its tests     python -I sandbox.py solve

It holds against what models write by accident or to be clever: endless loops, fork bombs, floods of
output, `os._exit(0)`, deleted files. It is no prison for an attacker: code that knows this harness
can look for the pipe of the verdict in its own process, and code that changes what the tests
compare with (an `__eq__` that is always true, a patched builtin) passes them.

The module needs nothing but the standard library, as both processes run it as a file.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
import types
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

GRACE_SECONDS = 2.0  # for the interpreters to start and end, beside the solution's own time
LOOK_SECONDS = 0.01  # between two looks at the solution
LONGEST_LINE = 100

# From linux/sched.h: new user, network, process, IPC and mount namespaces.
NEW_NAMESPACES = 0x10000000 | 0x40000000 | 0x20000000 | 0x08000000 | 0x00020000
# From sys/mount.h, linux/mount.h and sys/prctl.h.
MOUNT_SETATTR, RECURSIVE, AT_FDCWD = 442, 0x8000, -100
READ_ONLY, NO_SUID, NO_DEVICES, PRIVATE, BIND = 1, 2, 4, 1 << 18, 4096
DIES_WITH_PARENT, TAKES_ORPHANS, NO_NEW_PRIVILEGES = 1, 36, 38
NOBODY = 65534

libc = ctypes.CDLL(None, use_errno=True)


class MountAttributes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "user")]


@dataclass(frozen=True)
class Limits:
    """Limits of one program.

    seconds: wall time, and processor time. memory_mb: address space of a process. file_mb: a file,
    and with namespaces all that it writes. processes: with threads, at a time.
    """

    seconds: int = 10
    memory_mb: int = 1024
    file_mb: int = 16
    processes: int = 32
    open_files: int = 64


def passes(program: str, tests: str, limits: Limits) -> bool:
    """Load the program and run the tests to their end, in a process of its own within the limits.

    Raises InputError where none can be started here.
    """
    return _passes(program, tests, limits, isolate=is_isolated())


@cache
def is_isolated() -> bool:
    """Find out if the system has namespaces: no network, and nothing to write to but a folder in
    memory. Raises InputError where a program cannot be run in a process of its own."""
    for isolate in (True, False):
        # The probe is a program that passes, and needs more than the interpreter's own modules.
        with suppress(OSError):
            if _passes("import random, json, fractions", "random.random()", Limits(), isolate):
                return isolate
    from d2f.errors import InputError

    who = f"as another user than root, who must be able to run {sys.executable}"
    raise InputError(
        "code cannot be run in a process of its own here: expected namespaces, or that "
        f"python can be started {who if os.getuid() == 0 else 'with limits'}"
    )


def protection() -> str:
    """Say what holds back the programs that are run here."""
    held = "a process of its own, with limits of time, memory, files and processes"
    if is_isolated():
        return f"{held}, without network, and with nothing to write to but a folder in memory"
    return (
        f"{held}; this system gives no namespaces, so it is NOT cut off from the network nor from "
        "the files of the user that it runs as"
    )


def _passes(program: str, tests: str, limits: Limits, isolate: bool) -> bool:
    with tempfile.TemporaryDirectory(prefix="d2f-", ignore_cleanup_errors=True) as folder:
        user = _another_user() if not isolate and os.getuid() == 0 else None
        if user is not None:
            os.chown(folder, user, user)
        result, theirs = os.pipe()
        settings = {
            **asdict(limits),
            "isolate": isolate,
            "counts": True,
            "result": theirs,
            "python": sys.executable,
        }
        try:
            supervisor = subprocess.Popen(
                [sys.executable, "-I", __file__, "supervise", json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,  # a gigabyte of output goes nowhere
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs],
                cwd=folder,
                env=_environment(folder),
                start_new_session=True,
                user=user,
                group=user,
                extra_groups=None if user is None else [],
            )
        except BaseException:
            os.close(result)
            raise
        finally:
            os.close(theirs)
        deadline = time.monotonic() + limits.seconds + GRACE_SECONDS
        try:
            passed = _talk(supervisor, result, program, tests, deadline)
            # It ends when all that the program has started has ended.
            with suppress(subprocess.TimeoutExpired):
                supervisor.wait(max(0.0, deadline - time.monotonic()))
            return passed
        finally:
            os.close(result)
            with suppress(ProcessLookupError):
                os.killpg(supervisor.pid, signal.SIGKILL)
            with suppress(BrokenPipeError):
                supervisor.communicate()


def _talk(
    supervisor: subprocess.Popen[bytes], result: int, program: str, tests: str, deadline: float
) -> bool:
    """Hand over the program, then, once it is loaded, the tests with a nonce.

    The nonce comes back when they ran to their end; a program cannot have known it before.
    """
    nonce = secrets.token_hex(16)
    assert supervisor.stdin is not None
    try:
        supervisor.stdin.write(json.dumps(program).encode() + b"\n")
        supervisor.stdin.flush()
        if _line(result, deadline) != b"loaded":
            return False
        supervisor.stdin.write(json.dumps([tests, nonce]).encode() + b"\n")
        supervisor.stdin.flush()
    except BrokenPipeError:  # it has ended
        return False
    return _line(result, deadline) == nonce.encode()


def _line(pipe: int, deadline: float) -> bytes:
    """Read a line of a pipe, until the deadline."""
    line = b""
    while not line.endswith(b"\n") and len(line) < LONGEST_LINE:
        ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
        byte = os.read(pipe, 1) if ready else b""
        if not byte:
            return b""
        line += byte
    return line.removesuffix(b"\n")


def _another_user() -> int:
    """Choose a user id that nobody has, so that its processes are this program's alone."""
    return 2**30 + secrets.randbelow(2**29)


def _environment(folder: str) -> dict[str, str]:
    """Make an environment with nothing of ours, which may hold keys and tokens."""
    return {
        "PATH": os.defpath,
        "HOME": folder,
        "TMPDIR": folder,
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }


def _supervise(settings: dict[str, Any]) -> None:
    """Take from the solution what the system lets be taken, start it with limits, and end all that
    it started when it is done or its time is over."""
    _process_control(DIES_WITH_PARENT, signal.SIGKILL)
    if settings["isolate"]:
        _isolate(settings)
    else:
        _process_control(TAKES_ORPHANS, 1)
    child = os.fork()
    if child == 0:
        _become_solution(settings)
    os.close(0)
    os.close(settings["result"])
    _watch(child, settings)


def _isolate(settings: dict[str, Any]) -> None:
    """Go on as the first process of namespaces without network, where nothing can be written but
    a folder in memory, and whose processes all end with this one."""
    user, group = os.getuid(), os.getgid()
    _call("unshare", NEW_NAMESPACES)
    # As nobody within: what is started has no capabilities there, with which it could undo this.
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{NOBODY} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{NOBODY} {group} 1")
    first = os.fork()
    if first:
        os.close(0)
        os.close(settings["result"])
        _, status = os.waitpid(first, 0)
        os._exit(os.waitstatus_to_exitcode(status) and 1)
    _process_control(DIES_WITH_PARENT, signal.SIGKILL)
    kept = (b"/dev/null", b"/dev/urandom")
    for device in kept:
        _call("mount", device, device, None, BIND, None)
    _mount_attributes(b"/", READ_ONLY | NO_SUID | NO_DEVICES, 0, RECURSIVE)
    for device in kept:
        _mount_attributes(device, 0, READ_ONLY | NO_DEVICES)
    folder, size = os.getcwd().encode(), f"size={settings['file_mb']}m,mode=700".encode()
    _call("mount", b"tmpfs", folder, b"tmpfs", NO_SUID | NO_DEVICES, size)
    os.chdir(folder)
    try:
        _call("mount", b"proc", b"/proc", b"proc", 14, None)  # the processes within, to be counted
    except OSError:
        # Root alone is not held by RLIMIT_NPROC; without the count nothing would hold it.
        if user == 0:
            raise
        settings["counts"] = False


def _become_solution(settings: dict[str, Any]) -> NoReturn:
    os.setsid()
    mega = 2**20
    # Within namespaces only what runs there counts, else all of this user's threads do.
    there = 0 if settings["isolate"] else _threads(os.getuid())
    limits = {
        resource.RLIMIT_CPU: settings["seconds"],
        resource.RLIMIT_AS: settings["memory_mb"] * mega,
        resource.RLIMIT_FSIZE: settings["file_mb"] * mega,
        resource.RLIMIT_NOFILE: settings["open_files"],
        resource.RLIMIT_NPROC: there + settings["processes"],
        resource.RLIMIT_CORE: 0,
    }
    for kind, value in limits.items():
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))
    _process_control(NO_NEW_PRIVILEGES, 1)
    os.nice(5)  # whoever floods the machine must not keep the supervisor from running
    python, result = settings["python"], str(settings["result"])
    os.execv(python, [python, "-I", __file__, "solve", result])


def _watch(child: int, settings: dict[str, Any]) -> None:
    """Wait for the solution's end, for that of its time, or for too many processes; then end all
    of them."""
    deadline = time.monotonic() + settings["seconds"]
    while time.monotonic() < deadline and not _reap(child):
        if settings["isolate"] and settings["counts"] and _processes() > settings["processes"]:
            break
        time.sleep(LOOK_SECONDS)
    if settings["isolate"]:
        os._exit(0)  # the kernel kills what is left in the namespace with its first process
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    while left := _children():  # those that left the group; orphans become children of this one
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(-1, 0)


def _reap(child: int) -> bool:
    """Reap ended children, orphans too; return True once the solution has ended."""
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG)[0]) != 0:
            if ended == child:
                return True
        return False
    return True


def _processes() -> int:
    """Count the processes in /proc, without this one."""
    return sum(name.isdecimal() for name in os.listdir("/proc")) - 1


def _threads(user: int) -> int:
    """Count a user's threads as RLIMIT_NPROC does; 0 where they cannot be seen."""
    found = 0
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # gone since
            if place.stat().st_uid == user:
                found += len(os.listdir(place / "task"))
    return found


def _children() -> list[int]:
    place = Path(f"/proc/self/task/{os.getpid()}/children")
    return [int(pid) for pid in place.read_text().split()] if place.exists() else []


def _process_control(option: int, value: int) -> None:
    if sys.platform == "linux":
        libc.prctl(option, value, 0, 0, 0)


def _mount_attributes(place: bytes, on: int, off: int, flags: int = 0) -> None:
    attributes = MountAttributes(on, off, PRIVATE, 0)
    size = ctypes.sizeof(attributes)
    _call("syscall", MOUNT_SETATTR, AT_FDCWD, place, flags, ctypes.byref(attributes), size)


def _call(name: str, *arguments: Any) -> None:
    """Call a function of the C library. Raises OSError."""
    if getattr(libc, name)(*arguments) == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _solve(result: int) -> None:
    """Load the program and run its tests, as the process that a solution runs in.

    Standard input has two lines of JSON, the program and then ``[tests, nonce]``; the second one is
    only written when the first has been loaded and the pipe `result` said so. The nonce, which only
    code that ran all of the tests gets to, goes to `result`.
    """
    channel = os.fdopen(os.dup(0), "rb")
    # `input()` of a solution must not take the tests.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    # Taken before the solution is there, which may put others in their place.
    build, run, write, leave, read = compile, exec, os.write, os._exit, json.loads
    module = types.ModuleType("solution")
    sys.modules["solution"] = module  # dataclasses and pickle look there
    run(build(read(channel.readline()), "solution", "exec"), module.__dict__)
    write(result, b"loaded\n")
    tests, nonce = read(channel.readline())
    run(build(tests, "tests", "exec"), module.__dict__)
    write(result, nonce.encode() + b"\n")
    leave(0)


if __name__ == "__main__":
    if sys.argv[1] == "supervise":
        _supervise(json.loads(sys.argv[2]))
    else:
        _solve(int(sys.argv[2]))
