"""Files and folders that are whole or as they were: written beside their place, then renamed.

What is written first has a name that cannot be known before and is made exclusively, so a link that
someone put there is not followed. It is `NAME.HEX.writing`; what a killed command left of it is
removed by the next one that writes there. A place is written by one command at a time
(`d2f/files.py`); of two that meet nevertheless one fails, and the place is whole.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import secrets
import shlex
import shutil
import socket
import stat
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from safetensors import SafetensorError

from d2f.errors import OutputError


def write_beside(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all. Raises OutputError."""
    with writing(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def writing(path: Path) -> Iterator[BinaryIO]:
    """A file to write to that takes the place of `path` when all is on disk.

    Raises OutputError where that fails, or where `path` is a link or no file; whatever is raised,
    `path` is as it was.
    """
    with _explained(path):
        beside = _beside(path, stat.S_ISREG, "a file")
        try:
            with beside.open("xb") as file:  # x: fails where anything has that name, links too
                yield file
                # Before the rename: after a power cut the name must not lead to data that is not
                # on disk.
                file.flush()
                os.fsync(file.fileno())
            beside.replace(path)
        except BaseException:  # a Ctrl-C too leaves nothing beside
            beside.unlink(missing_ok=True)
            raise


@contextmanager
def writing_folder(place: Path) -> Iterator[Path]:
    """An empty folder beside `place` that replaces it, if the body ends well.

    Raises OutputError where the disk fails, or where `place` is a link or no folder; whatever is
    raised, `place` is as it was. A kill in the moment between two renames leaves the old folder
    beside its place; the next call puts it back.
    """
    with _explained(place):
        beside = _beside(place, stat.S_ISDIR, "a folder")
        beside.mkdir()
        try:
            yield beside
            if place.exists():
                _exchange(beside, place)
            else:
                beside.rename(place)
        except BaseException:
            shutil.rmtree(beside, ignore_errors=True)
            raise


def put_back(place: Path) -> None:
    """Give a folder its name again that a kill left beside its place (`writing_folder`)."""
    for left in _leftovers(place, "replaced"):
        if place.exists():  # both renames were done, only the removal was not
            shutil.rmtree(left, ignore_errors=True)
        else:  # the kill came between them
            left.rename(place)


class GrowingFile:
    """A text file at `path` that grows by whole lines. Raises OutputError, also for a link."""

    def __init__(self, path: Path):
        self.path = path
        # APPEND: what another handle wrote meanwhile is not overwritten. NOFOLLOW: no planted link.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            self._descriptor = os.open(path, flags, 0o666)
        except OSError as error:
            raise OutputError(
                f"{path} could not be opened for writing: {_reason(error)}"
            ) from error

    def write(self, lines: str, *, sync: bool = False) -> None:
        """Add lines: all of them, or none. sync: they are on disk before this returns."""
        rest = memoryview(lines.encode())
        before = os.fstat(self._descriptor).st_size
        try:
            while rest:  # a write may take a part only, as on a disk that is nearly full
                rest = rest[os.write(self._descriptor, rest) :]
            if sync:
                os.fsync(self._descriptor)
        except OSError as error:
            with suppress(OSError):  # a half line that stays is dropped by who reads it
                os.ftruncate(self._descriptor, before)
            raise OutputError(
                f"{self.path} could not be written: {_reason(error)}; what it had before is kept"
            ) from error

    def close(self) -> None:
        os.close(self._descriptor)

    def __enter__(self) -> GrowingFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def new_file(path: Path) -> BinaryIO:
    """An empty file in place of what is at `path`, in a folder made if it is missing, to be read
    while it is written. Raises OutputError."""
    make_folder(path.parent)
    try:
        path.unlink(missing_ok=True)
        return path.open("xb")
    except OSError as error:
        raise OutputError(f"{path} could not be opened: {_reason(error)}") from error


def make_folder(folder: Path) -> None:
    """Make a folder, and those above it, where there is none. Raises OutputError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"the folder {folder} cannot be made: {_reason(error)}") from error


def _beside(path: Path, is_kind: Callable[[int], bool], kind: str) -> Path:
    """A name for what is written first, with what killed commands left removed."""
    put_back(path)
    for left in _leftovers(path, "writing"):
        if left.is_dir() and not left.is_symlink():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)
    with suppress(FileNotFoundError):  # nothing there yet
        mode = path.lstat().st_mode  # of a link itself, not of what it leads to
        if not is_kind(mode):
            found = "a link" if stat.S_ISLNK(mode) else "something else"
            raise OutputError(f"{path} could not be written: expected {kind} there, found {found}")
    return path.with_name(f"{path.name}.{secrets.token_hex(8)}.writing")


def _leftovers(path: Path, suffix: str) -> list[Path]:
    """What killed commands left beside `path`: names that only this module gives."""
    pattern = re.compile(re.escape(path.name) + rf"\.[0-9a-f]{{16}}\.{suffix}")
    return [path.with_name(n) for n in os.listdir(path.parent) if pattern.fullmatch(n)]


def _exchange(beside: Path, place: Path) -> None:
    """Put the new folder in the place of the old one. A rename replaces no folder that holds
    something, so it takes two, and `put_back` repairs a kill between them."""
    old = place.with_name(f"{place.name}.{secrets.token_hex(8)}.replaced")
    place.rename(old)
    try:
        beside.rename(place)
    except BaseException:
        old.rename(place)
        raise
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Let an error of the disk be an OutputError."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        # safetensors wraps the disk's errors; its others are of the tensors, and the caller's.
        if isinstance(error, SafetensorError) and "I/O error" not in str(error):
            raise
        there = "what was there before is untouched" if path.exists() else "nothing is there"
        raise OutputError(f"{path} could not be written: {_reason(error)}; {there}") from error


def _reason(error: Exception) -> str:
    return str((isinstance(error, OSError) and error.strerror) or error)


# One command at a time in an output: the second one is told who is there.
#
# The lock is the kernel's (`flock` on a file): it is gone with the process that held it, however
# that
# died, so no lock ever has to be cleared by hand. The file says who holds it and is removed at the
# end; one that a killed command left locks nothing.

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


# Errors of writing (a full disk, a folder that cannot be written) that say what there still is.


@contextmanager
def says_what_is_kept(place: Path, kept: str) -> Iterator[None]:
    """Around the writing of `place`: its errors become OutputError that names what could not be
    written, why, and in `kept` what there still is. Nothing else that may fail belongs inside."""
    try:
        yield
    except OutputError as error:
        raise OutputError(f"{error}; {kept}") from error
    except (OSError, SafetensorError) as error:
        what = getattr(error, "filename", None) or place
        reason = getattr(error, "strerror", None) or error
        raise OutputError(f"{what} could not be written: {reason}; {kept}") from error
