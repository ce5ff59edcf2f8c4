"""Run code that a model wrote, with limits and away from everything else.

    this process    two pipes, the verdict
      supervise     in namespaces of its own: bounds processes and memory, ends all that is left
        solve       loads the program, then runs its tests

bubblewrap makes the namespaces where it is installed, else `_enter` does: no network, no process
of others, and a tree of system libraries, this Python and its packages that cannot be written to,
beside one folder in memory. Where neither is possible nothing is run, unless told ("unsafe").

It holds against what models write, by accident or to be clever. An answer can still find its
verdict in its own process: the pipe that it goes to, or an `__eq__` that is always true.

The module needs nothing but the standard library, as the other processes run it as a file.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import re
import resource
import secrets
import select
import shutil
import signal
import struct
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
END_SECONDS = 10.0  # for what was killed to be gone, on a machine that it has flooded
LOOK_SECONDS = 0.01  # between two looks at the solution
LONGEST_LINE = 100
NOBODY = "65534"
FOLDER = "/box"  # where the program runs, and all that it can write to
SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/nix/store", "/etc/alternatives", "/etc/ld.so.cache")
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")

# From linux/sched.h: new user, network, process, IPC and mount namespaces; and any namespace.
NEW_NAMESPACES = 0x10000000 | 0x40000000 | 0x20000000 | 0x08000000 | 0x00020000
ANY_NAMESPACE = 0x7E020080
# From sys/mount.h, linux/mount.h and sys/prctl.h.
READ_ONLY, NO_SUID, NO_DEVICES, BIND, RECURSIVE, PRIVATE, DETACH = 1, 2, 4, 4096, 16384, 1 << 18, 2
MOUNT_SETATTR, AT_RECURSIVE, AT_FDCWD = 442, 0x8000, -100
DIES_WITH_PARENT, DUMPABLE, SECCOMP, TAKES_ORPHANS, NO_NEW_PRIVILEGES = 1, 4, 22, 36, 38
# By machine: its audit number, clone, and calls that are denied, as they take memory that no
# process shows or make namespaces: shmget, msgget, unshare, memfd_create, io_uring, memfd_secret.
CALLS = {
    "x86_64": (0xC000003E, 56, (29, 68, 272, 319, 425, 447)),
    "aarch64": (0xC00000B7, 220, (194, 186, 97, 279, 425, 447)),
}
CLONE3 = 435

libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Limits:
    """Limits of one program.

    seconds: wall time, and processor time. memory_mb: address space of a process, and memory of all
    of them together. file_mb: a file, and all that is written. processes: at a time.
    """

    seconds: int = 10
    memory_mb: int = 1024
    file_mb: int = 16
    processes: int = 32
    open_files: int = 64


def passes(program: str, tests: str, limits: Limits, *, unsafe: bool = False) -> bool:
    """Load the program and run the tests to their end, in a process of its own within the limits.

    unsafe: also where it cannot be kept from network and files. Raises InputError.
    """
    return _passes(program, tests, limits, isolation(unsafe))


def protection(unsafe: bool) -> str:
    """Say what holds back the programs that are run here. Raises InputError."""
    if isolation(unsafe) == "none":
        return (
            "a process of its own, with limits of time, memory and files; it is NOT cut off from "
            "the network nor from the files of the user that it runs as"
        )
    return (
        "a process of its own, with limits of time, memory, files and processes, without network, "
        "and with nothing to write to but a folder in memory"
    )


@cache
def isolation(unsafe: bool) -> str:
    """Find out how programs are isolated here: by bwrap, by own namespaces, or by none."""
    for way in ("bwrap", "own", *(("none",) if unsafe else ())):
        # The probe is a program that passes, and needs more than the interpreter's own modules.
        with suppress(OSError):
            if _passes("import random, json, fractions", "random.random()", Limits(), way):
                return way
    from d2f.errors import InputError

    wanted = f"that another user than root may run {sys.executable}"
    raise InputError(
        "code cannot be kept from the network and the files here: expected bubblewrap (bwrap) or "
        + (wanted if unsafe else "user namespaces; --unsafe runs it with limits alone")
    )


def _passes(program: str, tests: str, limits: Limits, way: str) -> bool:
    with tempfile.TemporaryDirectory(prefix="d2f-", ignore_cleanup_errors=True) as folder:
        # A user id that nobody has: its processes are this program's alone.
        other = 2**30 + secrets.randbelow(2**29) if way == "none" and not os.getuid() else None
        if other is not None:
            os.chown(folder, other, other)
        result, theirs = os.pipe()
        settings = asdict(limits) | {"way": way, "result": theirs, "tree": _tree()}
        command = [sys.executable, "-I", __file__, "enter", json.dumps(settings)]
        if way == "bwrap":
            command = [*_bubblewrap(limits), *command]
        home = folder if way == "none" else FOLDER
        try:
            supervisor = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,  # a gigabyte of output goes nowhere
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs],
                cwd=folder,
                env=_environment(home),
                start_new_session=True,
                user=other,
                group=other,
                extra_groups=None if other is None else [],
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
            with suppress(ProcessLookupError):
                os.killpg(supervisor.pid, signal.SIGKILL)
            with suppress(BrokenPipeError):
                supervisor.communicate()
            _wait_for_its_end(result)
            os.close(result)


def _environment(home: str) -> dict[str, str]:
    """Make an environment with nothing of ours, which may hold keys and tokens."""
    one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return {"PATH": os.defpath, "LANG": "C.UTF-8", "HOME": home, "TMPDIR": home, **one_thread}


def _tree() -> list[str]:
    """List what a program may read, parents first."""
    packages = [path for path in sys.path if path.endswith("-packages")]
    paths = {*SYSTEM, sys.base_prefix, sys.prefix, *packages, __file__}
    return [path for path in sorted(paths) if os.path.exists(path)]


def _bubblewrap(limits: Limits) -> list[str]:
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise FileNotFoundError("bwrap")
    readable = [word for path in _tree() for word in ("--ro-bind", path, path)]
    devices = [word for path in DEVICES for word in ("--dev-bind", path, path)]
    space = ["--size", str(limits.file_mb * 2**20), "--tmpfs", FOLDER, "--chdir", FOLDER]
    return [bwrap, "--unshare-all", "--die-with-parent", "--as-pid-1", "--cap-drop", "ALL",
            "--uid", NOBODY, "--gid", NOBODY, *readable, *devices, "--proc", "/proc", *space,
            "--remount-ro", "/proc", "--remount-ro", "/"]  # fmt: skip


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
        if _line(result, deadline) != b"loaded\n":
            return False
        supervisor.stdin.write(json.dumps([tests, nonce]).encode() + b"\n")
        supervisor.stdin.flush()
    except BrokenPipeError:  # it has ended
        return False
    return _line(result, deadline) == nonce.encode() + b"\n"


def _line(pipe: int, deadline: float) -> bytes:
    """Read a line of a pipe, until the deadline."""
    line = b""
    while not line.endswith(b"\n") and len(line) < LONGEST_LINE:
        ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
        byte = os.read(pipe, 1) if ready else b""
        if not byte:
            return b""
        line += byte
    return line


def _wait_for_its_end(pipe: int) -> None:
    """Wait until no process holds the other end: those that are killed are still there a moment."""
    deadline = time.monotonic() + END_SECONDS
    while (left := deadline - time.monotonic()) > 0:
        if select.select([pipe], [], [], left)[0] and not os.read(pipe, 4096):
            return


# In the namespaces.


def _enter(settings: dict[str, Any]) -> None:
    """Go on as the first process of namespaces that see the tree alone, as bwrap does."""
    user, group = os.getuid(), os.getgid()
    _call("unshare", NEW_NAMESPACES)
    # Run as nobody: without capabilities in the namespace it cannot undo any of this.
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
    root = os.getcwd()
    _mount("none", "/", RECURSIVE | PRIVATE)
    _mount("tmpfs", root, NO_SUID | NO_DEVICES, "tmpfs")
    os.chdir(root)  # the folder under the new mount is another one
    for path in (*settings["tree"], *DEVICES):
        place = root + path
        os.makedirs(place if os.path.isdir(path) else os.path.dirname(place), exist_ok=True)
        if not os.path.exists(place):
            Path(place).touch()
        _mount(path, place, BIND | RECURSIVE)
        _protect(place, READ_ONLY | NO_SUID | (0 if path in DEVICES else NO_DEVICES))
    for folder in ("/proc", FOLDER):
        os.mkdir(root + folder)
    _mount("proc", f"{root}/proc", NO_SUID | NO_DEVICES, "proc")
    _protect(f"{root}/proc", READ_ONLY)  # root could write the kernel's settings
    size = f"size={settings['file_mb']}m,mode=700"
    _mount("tmpfs", root + FOLDER, NO_SUID | NO_DEVICES, "tmpfs", size)
    _call("pivot_root", b".", b".")  # the old root lies on the new one, and is taken off
    _call("umount2", b".", DETACH)
    _protect("/", READ_ONLY, recursive=False)
    os.chdir(FOLDER)


def _supervise(settings: dict[str, Any]) -> None:
    """Start the solution with limits, and end all that it started when it is done or beyond one."""
    _process_control(DIES_WITH_PARENT, signal.SIGKILL)
    _process_control(TAKES_ORPHANS, 1)
    _process_control(DUMPABLE, 0)  # the solution must not write to this one's memory
    child = os.fork()
    if child == 0:
        _become_solution(settings)
    os.close(0)
    os.close(settings["result"])
    isolated = settings["way"] != "none"
    deadline = time.monotonic() + settings["seconds"]
    while time.monotonic() < deadline and not _reap(child):
        if isolated:
            count, kilobytes = _use()
            if count > settings["processes"] or kilobytes > settings["memory_mb"] * 1024:
                break
        time.sleep(LOOK_SECONDS)
    if isolated:
        os._exit(0)  # the kernel kills what is left in the namespace with its first process
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    # Those that left the group; orphans become children of this process.
    while left := children.read_text().split() if children.exists() else []:
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(int(pid), signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(-1, 0)


def _become_solution(settings: dict[str, Any]) -> NoReturn:
    os.setsid()
    mega = 2**20
    limits = {
        resource.RLIMIT_CPU: settings["seconds"],
        resource.RLIMIT_AS: settings["memory_mb"] * mega,
        resource.RLIMIT_FSIZE: settings["file_mb"] * mega,
        resource.RLIMIT_NOFILE: settings["open_files"],
        resource.RLIMIT_CORE: 0,
    }
    if settings["way"] != "none" or os.getuid() >= 2**30:  # else all of this user's would count
        limits[resource.RLIMIT_NPROC] = settings["processes"]
    for kind, value in limits.items():
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))
    _process_control(NO_NEW_PRIVILEGES, 1)
    if settings["way"] != "none":
        _deny_calls()
    os.nice(5)  # whoever floods the machine must not keep the supervisor from running
    python = sys.executable
    os.execv(python, [python, "-I", __file__, "solve", str(settings["result"])])


def _deny_calls() -> None:
    """Install a seccomp filter that refuses CALLS, new namespaces and another machine's numbers."""
    machine, clone, denied = CALLS[platform.machine()]
    load, equal, at_least, any_bit, give = 0x20, 0x15, 0x35, 0x45, 0x06  # linux/bpf_common.h
    kill, allow, refuse = 0x80000000, 0x7FFF0000, 0x00050000  # linux/seccomp.h
    steps = [  # (operation, steps to skip if so, if not, operand); offsets in seccomp_data
        (load, 0, 0, 4), (equal, 1, 0, machine), (give, 0, 0, kill),
        (load, 0, 0, 0), (at_least, 0, 1, 0x40000000), (give, 0, 0, kill),
        (equal, 0, 1, CLONE3), (give, 0, 0, refuse | errno.ENOSYS),  # libc takes clone instead
        *(step for number in denied
          for step in ((equal, 0, 1, number), (give, 0, 0, refuse | errno.EPERM))),
        (equal, 0, 3, clone), (load, 0, 0, 16), (any_bit, 0, 1, ANY_NAMESPACE),
        (give, 0, 0, refuse | errno.EPERM), (give, 0, 0, allow),
    ]  # fmt: skip
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(struct.pack("HP", len(steps), ctypes.addressof(code)))
    if libc.prctl(SECCOMP, 2, program, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "seccomp")


def _reap(child: int) -> bool:
    """Reap ended children, orphans too; return True once the solution has ended."""
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG)[0]) != 0:
            if ended == child:
                return True
        return False
    return True


def _use() -> tuple[int, int]:
    """Count the processes in /proc without this one, and the kilobytes that they have together."""
    count = kilobytes = 0
    for place in Path("/proc").glob("[0-9]*"):
        if int(place.name) != os.getpid():
            with suppress(OSError):  # ended since
                status = (place / "status").read_text()
                kilobytes += sum(map(int, re.findall(r"^Vm(?:RSS|Swap):\s*(\d+)", status, re.M)))
                count += 1
    return count, kilobytes


def _process_control(option: int, value: int) -> None:
    if sys.platform == "linux":
        libc.prctl(option, value, 0, 0, 0)


def _mount(source: str, place: str, flags: int, kind: str = "", options: str = "") -> None:
    words = [word.encode() or None for word in (source, place, kind, options)]
    _call("mount", *words[:3], flags, words[3])


def _protect(place: str, flags: int, recursive: bool = True) -> None:
    """Set flags of a mount, in place of MS_REMOUNT, which knows no recursion."""
    attributes = (ctypes.c_uint64 * 4)(flags)
    _call("syscall", MOUNT_SETATTR, AT_FDCWD, place.encode(), AT_RECURSIVE * recursive,
          attributes, ctypes.sizeof(attributes))  # fmt: skip


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
    if sys.argv[1] == "solve":
        _solve(int(sys.argv[2]))
    else:
        given = json.loads(sys.argv[2])
        if given["way"] == "own":
            _enter(given)
        _supervise(given)
