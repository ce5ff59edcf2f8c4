"""A task file that builds on another one, by its key `like`.

    sums.yaml                             hard-sums.yaml                read as
    data: sums.jsonl                      like: sums.yaml               data: sums.jsonl
    splits: {tuning: 0.5, heldout: 0.5}   splits: {heldout: 1.0,        splits: {heldout: 1.0}
    stop: ["Question:"]                            tuning: null}        judge: {name: numeric,
    judge: {name: numeric}                judge: {tolerance: 0.5}               tolerance: 0.5}
                                          stop: null

A mapping's keys go over those of the other's mapping, any other value takes the other's place, and
null takes a key away. A judge of another name has none of the options, and a name is not inherited.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from d2f.configuration import read_mapping
from d2f.errors import InputError, one_line, repr_of
from d2f.shipped import EVALUATION, shipped
from d2f.tasks.task_file import TaskFile


def read_task_file(path: Path) -> dict[str, Any]:
    """The keys of a task file with those that it inherits; what it leaves open is not checked yet.
    Files that another folder's task names keep their place. Raises InputError."""
    return _read(path, ())


def _read(path: Path, above: tuple[Path, ...]) -> dict[str, Any]:
    """above: the files that come to this one by their `like`."""
    values = read_mapping(path)
    other = values.pop("like", None)
    if above or other is not None:
        # Said of the file that has it, not of the one that inherits it.
        unknown = [key for key in values if key not in TaskFile.model_fields]
        if unknown:
            raise InputError(f"{path}: {one_line(str(unknown[0]))[:60]}: there is no such key")
        if isinstance(values.get("judge"), str):
            values["judge"] = {"name": values["judge"]}
    if other is None:
        return values
    found = _find(other, path)
    chain = (*above, path)
    if found.resolve() in [one.resolve() for one in chain]:
        names = " -> ".join(map(str, [*chain, found]))
        raise InputError(f"{path}: like: task files build on one another in a circle: {names}")
    below = _moved(_read(found, chain), found.parent, path.parent)
    below.pop("name", None)
    return _over(below, values)


def _find(other: Any, path: Path) -> Path:
    """A task file by its path from the one that names it, or by the name that it ships under."""
    known = shipped(*EVALUATION)
    if isinstance(other, str) and other:
        beside = path.parent / other
        if os.path.isfile(beside):  # unlike Path's, of any name
            return beside
        if other in known:
            return known[other]
    raise InputError(
        f"{path}: like: expected another task file, by its path from this one or by a name among "
        f"{', '.join(known)}, got {repr_of(other)}"
    )


def _over(below: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Values over those of `below`."""
    merged = dict(below)
    for key, value in values.items():
        there = below.get(key)
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, dict) and isinstance(there, dict) and not _other_judge(value, there):
            merged[key] = _over(there, value)
        else:
            merged[key] = value
    return merged


def _other_judge(value: dict[str, Any], there: dict[str, Any]) -> bool:
    """Whether these are the options of another judge, which has none of the first one's."""
    return "name" in value and value["name"] != there.get("name")


def _moved(values: dict[str, Any], folder: Path, to: Path) -> dict[str, Any]:
    """With files that lie beside a task file by their paths from another folder."""
    data, splits = values.get("data"), values.get("splits")
    if not isinstance(data, str) or not os.path.exists(folder / data):
        return values  # a data set of the hub
    moved: dict[str, Any] = {"data": os.path.relpath(folder / data, to)}
    if isinstance(splits, dict) and os.path.isfile(folder / data):
        files = {
            k: v for k, v in splits.items() if isinstance(v, str) and os.path.isfile(folder / v)
        }
        there = {split: os.path.relpath(folder / file, to) for split, file in files.items()}
        moved |= {"splits": splits | there}
    return values | moved
