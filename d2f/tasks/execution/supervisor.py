"""python -I supervisor.py SETTINGS

The process between ours and the solution's: takes what the system lets it take from the solution,
starts it with limits, and ends all that it started when it is done or its time is over. SETTINGS is
JSON; exit status 1 where it could not be had. Standard library only, as any interpreter may run it.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

# Of linux/sched.h, sys/mount.h, linux/mount.h and sys/prctl.h.
NEW_NAMESPACES = (
    0x10000000 | 0x40000000 | 0x20000000 | 0x08000000 | 0x00020000
)  # user net pid ipc fs
MOUNT_SETATTR, RECURSIVE, AT_FDCWD = 442, 0x8000, -100
READ_ONLY, NO_SUID, NO_DEVICES, PRIVATE = 1, 2, 4, 1 << 18
BIND = 4096
DIES_WITH_PARENT, TAKES_ORPHANS, NO_NEW_PRIVILEGES = 1, 36, 38
NOBODY = 65534
LOOK_SECONDS = 0.01

libc = ctypes.CDLL(None, use_errno=True)


class MountAttributes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "user")]


def main() -> None:
    settings = json.loads(sys.argv[1])
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


def _become_solution(settings: dict[str, Any]) -> None:
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
    python, result = settings["python"], settings["result"]
    os.execv(python, [python, "-I", settings["runner"], str(result)])


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
    """Whether the child has ended; its orphans that have are taken away too."""
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG)[0]) != 0:
            if ended == child:
                return True
        return False
    return True


def _processes() -> int:
    """Processes in /proc, without this one."""
    return sum(name.isdecimal() for name in os.listdir("/proc")) - 1


def _threads(user: int) -> int:
    """Threads that a user has, as RLIMIT_NPROC counts them; 0 where they cannot be seen."""
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
    """A function of the C library. Raises OSError."""
    if getattr(libc, name)(*arguments) == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


if __name__ == "__main__":
    main()
