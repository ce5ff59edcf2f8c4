"""Write files and folders whole or not at all, and hold an output for one command at a time.

What is written first has a name of its own beside its place (``NAME.writing``) and is renamed when
it is on disk. The next write to the same place takes over what a killed command left there.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from d2f.errors import OutputError


def write_beside(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all. Raises OutputError."""
    with writing(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def writing(path: Path) -> Iterator[BinaryIO]:
    """Open a file that takes the place of `path` when the body has ended and all is on disk.

    Raises OutputError where the disk fails; whatever is raised, `path` is as it was.
    """
    with says_what_is_kept(path):
        path = path.resolve()  # a link stays one
        beside = path.with_name(f"{path.name}.writing")
        try:
            with beside.open("wb") as file:
                yield file
                # After a power cut the name must not lead to data that is not on disk.
                file.flush()
                os.fsync(file.fileno())
            beside.replace(path)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise


@contextmanager
def writing_folder(place: Path) -> Iterator[Path]:
    """Make an empty folder that takes the place of `place` when the body has ended.

    Raises OutputError where the disk fails; whatever is raised, `place` is as it was. A kill
    between the two renames leaves the old folder beside its place: `put_back` undoes that.
    """
    with says_what_is_kept(place):
        place = place.resolve()  # a link stays one
        put_back(place)
        beside = place.with_name(f"{place.name}.writing")
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir()
        try:
            yield beside
            if place.exists():
                place.rename(_replaced(place))
            beside.rename(place)
        except BaseException:
            shutil.rmtree(beside, ignore_errors=True)
            put_back(place)
            raise
        shutil.rmtree(_replaced(place), ignore_errors=True)


def put_back(place: Path) -> None:
    """Restore a folder that a kill left beside its place (`writing_folder`)."""
    old = _replaced(place)
    if place.exists():  # both renames were done, only the removal was not
        shutil.rmtree(old, ignore_errors=True)
    elif old.exists():
        old.rename(place)


def _replaced(place: Path) -> Path:
    return place.with_name(f"{place.name}.replaced")


class GrowingFile:
    """Append whole lines to a text file. Raises OutputError."""

    def __init__(self, path: Path):
        self.path = path
        with says_what_is_kept(path):
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)

    def write(self, lines: str, *, sync: bool = False) -> None:
        """Add lines, all of them or none. sync: they are on disk before this returns."""
        rest = memoryview(lines.encode())
        before = os.fstat(self._descriptor).st_size
        with says_what_is_kept(self.path, "what it had before is kept"):
            try:
                while rest:  # on a disk that is nearly full a write may take only a part
                    rest = rest[os.write(self._descriptor, rest) :]
                if sync:
                    os.fsync(self._descriptor)
            except OSError:
                with suppress(OSError):
                    os.ftruncate(self._descriptor, before)
                raise

    def close(self) -> None:
        os.close(self._descriptor)

    def __enter__(self) -> GrowingFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def make_folder(folder: Path) -> None:
    """Make a folder and those above it. Raises OutputError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"the folder {folder} cannot be made: {error.strerror}") from error


@contextmanager
def locked(folder: Path) -> Iterator[Path]:
    """Hold an output folder, made if it is missing; one made here that stays empty is removed.

    Raises OutputError where another command holds it.
    """
    made = not folder.exists()
    make_folder(folder)
    try:
        with _held(folder / ".lock", folder):
            yield folder
    finally:
        if made:
            with suppress(OSError):  # it is not empty
                folder.rmdir()


@contextmanager
def locked_file(path: Path) -> Iterator[None]:
    """Hold an output file by a lock beside it. Raises OutputError where another command has it."""
    with _held(path.with_name(path.name + ".lock"), path):
        yield


@contextmanager
def _held(lock: Path, output: Path) -> Iterator[None]:
    from filelock import FileLock, Timeout

    held = FileLock(lock, timeout=0)
    try:
        held.acquire()
    except Timeout:
        raise OutputError(
            f"{output} is being written by another command: wait for it, or give another output"
        ) from None
    except OSError as error:
        raise OutputError(f"{output} cannot be locked: {error}") from error
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)  # while it is held: filelock takes no unlinked file
        held.release()


@contextmanager
def says_what_is_kept(place: Path, kept: str | None = None) -> Iterator[None]:
    """Turn errors of the disk into OutputError that names what could not be written, why, and
    what there still is (`kept`; default: whether `place` is there)."""
    from safetensors import SafetensorError

    try:
        yield
    except OutputError as error:
        if kept is None:
            raise
        raise OutputError(f"{error}; {kept}") from error
    except (OSError, SafetensorError) as error:
        # safetensors wraps the disk's errors; its others are of the tensors, and the caller's.
        if isinstance(error, SafetensorError) and "I/O error" not in str(error):
            raise
        what = place if kept is None else getattr(error, "filename", None) or place
        there = "what was there before is untouched" if place.exists() else "nothing is there"
        reason = getattr(error, "strerror", None) or error
        raise OutputError(f"{what} could not be written: {reason}; {kept or there}") from error
