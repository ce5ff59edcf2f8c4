"""The configurations that ship with the package, and `d2f configs`, which lists them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from d2f.command import command
from d2f.errors import InputError, did_you_mean
from d2f.flags import parse

HERE = Path(__file__).resolve().parent
# The folders in which a command's --config finds a name.
TRAINING = ("training",)
DECODING = ("published", "tuned")
COMPARISON = ("comparison",)
ABLATIONS = ("ablations",)
EVALUATION = ("evaluation",)


def root() -> Path:
    """Return the folder of the configurations: in the package where it was installed from a wheel,
    beside it in a checkout."""
    inside = HERE / "configs"
    return inside if inside.is_dir() else HERE.parent / "configs"


def shipped(*folders: str) -> dict[str, Path]:
    """Find the configurations in these folders, by name; without a folder all of them."""
    paths = [path for path in root().glob("*/*.yaml") if not folders or path.parent.name in folders]
    return {path.stem: path for path in sorted(paths, key=lambda p: (p.parent.name, p.stem))}


def find_config(given: str | Path, *folders: str) -> Path:
    """Return the file that a user means: an existing path, else a configuration of these folders by
    its name, with or without ``.yaml``. Raises InputError, which names the closest."""
    if os.path.exists(given) and not os.path.isdir(given):
        return Path(given)
    text, known = str(given), shipped(*folders)
    name = text.removesuffix(".yaml")
    if name in known:
        return known[name]
    stem = Path(text).stem
    other = shipped().get(stem)
    hint = did_you_mean(stem, known)
    if other is not None:
        hint = f"; {stem} is one of {other.parent.name}, {other}"
    wrong = "a folder" if os.path.isdir(text) else "no such file"
    raise InputError(
        f"{text}: cannot be read: {wrong}, and no configuration has this name here{hint}; there "
        f"are {', '.join(known)}"
    )


@dataclass(kw_only=True)
class Options:
    """List the configurations that ship with the package, by the names that --config takes. With a
    name print the path of that one, as for accelerate launch --config_file "$(d2f configs ddp)".
    """

    examples = ("d2f configs", "d2f configs tiny-d2f")

    name: Positional[str | None] = None
    """print the path of this one"""


@command(interrupted="interrupted")
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and return its exit status."""
    name = parse(Options, arguments, usual="python -m d2f.shipped").name
    if name is not None:
        print(find_config(name))
        return
    for folder in dict.fromkeys(path.parent.name for path in shipped().values()):
        print(f"{folder + ':':<12} {', '.join(shipped(folder))}")
