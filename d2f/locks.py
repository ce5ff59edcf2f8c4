"""One command at a time in an output: the second one is told who is there.

The lock is the kernel's (`flock` on a file): it is gone with the process that held it, however that
died, so no lock ever has to be cleared by hand. The file says who holds it and is removed at the
end; one that a killed command left locks nothing.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shlex
import socket
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from d2f.errors import OutputError
from d2f.files import make_folder

NAME = ".lock"  # of the lock file in a folder
_NO_LOCKS = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS, errno.EINVAL}
_SHOWN = 200  # characters of the other command


@contextmanager
def locked(folder: Path) -> Iterator[Path]:
    """Hold an output folder, which is made if it is missing. If it was made here and nothing was
    written to it, it is removed again.

    Raises OutputError where another command holds it, or where no lock can be written.
    """
    made = not folder.exists()
    make_folder(folder)
    try:
        with _held(folder / NAME, folder):
            yield folder
    finally:
        if made:
            with suppress(OSError):  # it is not empty
                folder.rmdir()


@contextmanager
def locked_file(path: Path) -> Iterator[None]:
    """Hold an output file, by a lock beside it. Raises OutputError as `locked`."""
    with _held(path.with_name(path.name + NAME), path):
        yield


@contextmanager
def _held(lock: Path, output: Path) -> Iterator[None]:
    descriptor = _take(lock, output)
    try:
        with suppress(OSError):  # a full disk: it is locked, though it does not say by whom
            os.ftruncate(descriptor, 0)
            os.write(descriptor, _about_us())
        yield
    finally:
        # While it is held: after closing, it could be the next holder's file that is removed. Who
        # opened this one in between notices in `_take`, by samestat.
        lock.unlink(missing_ok=True)
        os.close(descriptor)


def _take(lock: Path, output: Path) -> int:
    """The descriptor of the lock file, locked. Where its file system has no locks, it warns and
    gives the descriptor unlocked."""
    while True:
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(lock, flags, 0o666)
        except OSError as error:
            raise OutputError(f"{output} cannot be locked ({lock}): {error.strerror}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _holder(descriptor)
            os.close(descriptor)
            raise OutputError(
                f"{output} is being written by {holder}: wait for it, or give another output"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                os.close(descriptor)
                raise OutputError(f"{output} cannot be locked: {error.strerror}") from error
            warnings.warn(
                f"{output}: its file system has no locks ({error.strerror}); see to it that no "
                "other command writes there",
                stacklevel=6,
            )
            return descriptor
        with suppress(FileNotFoundError):  # else its holder removed it before we had it: again
            if os.path.samestat(os.fstat(descriptor), os.lstat(lock)):
                return descriptor
        os.close(descriptor)


def _about_us() -> bytes:
    command = shlex.join(sys.orig_argv)
    since = time.strftime("%Y-%m-%d %H:%M:%S %z")
    about = {"pid": os.getpid(), "host": socket.gethostname(), "command": command, "since": since}
    return json.dumps(about).encode() + b"\n"


def _holder(descriptor: int) -> str:
    """Who wrote the lock file, as far as it says so: it is locked before it is written."""
    try:
        about = json.loads(os.pread(descriptor, 1 << 16, 0))
        command = " ".join(about["command"].split())
        shown = command if len(command) <= _SHOWN else command[:_SHOWN] + " ..."
        return f"process {about['pid']} on {about['host']} since {about['since']} ({shown})"
    except (ValueError, KeyError, TypeError, OSError):
        return "another command"
