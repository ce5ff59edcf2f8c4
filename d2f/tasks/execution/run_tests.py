"""Whether a program passes its tests, found out where it can do no harm."""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from d2f.errors import InputError

HERE = Path(__file__).parent
GRACE_SECONDS = 2.0  # for the interpreters to start and end, beside the solution's own time
LONGEST_LINE = 100


@dataclass(frozen=True)
class Limits:
    """Of one program. seconds: of wall time, and of processor time. memory_mb: address space of a
    process. file_mb: of a file, and where namespaces hold it of all that it writes. processes:
    with threads, at a time."""

    seconds: int = 10
    memory_mb: int = 1024
    file_mb: int = 16
    processes: int = 32
    open_files: int = 64


def passes(program: str, tests: str, limits: Limits) -> bool:
    """Whether the program can be loaded and the tests run to their end with it, in a process of
    its own and within the limits. Raises InputError where none can be had here."""
    return _passes(program, tests, limits, isolate=is_isolated())


@cache
def is_isolated() -> bool:
    """Whether the system has namespaces for it, without network and with nothing to write to but a
    folder in memory. Raises InputError where a program cannot be run in a process of its own."""
    for isolate in (True, False):
        # The probe is a program that passes, and needs more than the interpreter's own modules.
        with suppress(OSError):
            if _passes("import random, json, fractions", "random.random()", Limits(), isolate):
                return isolate
    who = f"as another user than root, who must be able to run {sys.executable}"
    raise InputError(
        "code cannot be run in a process of its own here: expected namespaces, or that "
        f"python can be started {who if os.getuid() == 0 else 'with limits'}"
    )


def protection() -> str:
    """What holds back the programs that are run here, in words."""
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
            "runner": str(HERE / "runner.py"),
        }
        try:
            supervisor = subprocess.Popen(
                [sys.executable, "-I", HERE / "supervisor.py", json.dumps(settings)],
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
    """Hand over the program, then, when it says that it is loaded, the tests with a nonce: that it
    comes back says that they ran to their end. A program cannot have known it before."""
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
    """The next line of a pipe, cut where it is too long, at its end, and at the deadline."""
    line = b""
    while not line.endswith(b"\n") and len(line) < LONGEST_LINE:
        ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
        byte = os.read(pipe, 1) if ready else b""
        if not byte:
            return b""
        line += byte
    return line.removesuffix(b"\n")


def _another_user() -> int:
    """A user that nobody is, so that its processes are this program's alone."""
    return 2**30 + secrets.randbelow(2**29)


def _environment(folder: str) -> dict[str, str]:
    """Nothing of ours: an environment holds keys and tokens."""
    return {
        "PATH": os.defpath,
        "HOME": folder,
        "TMPDIR": folder,
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
