"""d2f configs [NAME]

Lists the configurations that ship with the package, by the names that --config takes. With a name
it prints the path of that one, e.g. for `accelerate launch --config_file "$(d2f configs ddp)"`.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from d2f.command import CommandParser
from d2f.errors import InputError
from d2f.quiet import unread_output

HERE = Path(__file__).resolve().parent
# What a command's --config takes by name: folders of the configurations.
TRAINING = ("training",)
DECODING = ("published", "tuned")
COMPARISON = ("comparison",)
ABLATIONS = ("ablations",)
EVALUATION = ("evaluation",)


def root() -> Path:
    """The folder of the configurations: in the package where it was installed from a wheel, beside
    it in a checkout."""
    inside = HERE / "configs"
    return inside if inside.is_dir() else HERE.parent / "configs"


def shipped(*folders: str) -> dict[str, Path]:
    """The configurations in these folders, by name; without a folder all of them."""
    paths = [path for path in root().glob("*/*.yaml") if not folders or path.parent.name in folders]
    return {path.stem: path for path in sorted(paths, key=lambda p: (p.parent.name, p.stem))}


def find_config(given: str | Path, *folders: str) -> Path:
    """The file that a user means: an existing path, else a configuration of these folders by its
    name, with or without ``.yaml``. Raises InputError, which lists what there is, the closest
    first."""
    if os.path.exists(given) and not os.path.isdir(given):
        return Path(given)
    text, known = str(given), shipped(*folders)
    name = text.removesuffix(".yaml")
    if name in known:
        return known[name]
    raise InputError(f"{text}: cannot be read: {_instead(text, known)}")


def _instead(text: str, known: dict[str, Path]) -> str:
    """What is wrong with it, and what to give instead."""
    wrong = "a folder" if os.path.isdir(text) else "no such file"
    stem = Path(text).stem
    if stem in known:
        return f"{wrong}; the package's own is found by its name, {stem} ({known[stem]})"
    close = difflib.get_close_matches(stem, known, n=len(known) or 1, cutoff=0.5)
    names = ", ".join([*close, *(name for name in known if name not in close)])
    other = shipped().get(stem)
    of_another = f" (one of {other.parent.name} has)" if other is not None else ""
    return f"{wrong}, and no configuration has this name here{of_another}; there are {names}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit status."""
    parser = CommandParser("d2f configs", description=__doc__)
    parser.add_argument("name", nargs="?", help="print the path of this one")
    name = parser.parse_args(arguments).name
    with unread_output():
        return _show(name)


def _show(name: str | None) -> int:
    if name is None:
        for folder in dict.fromkeys(path.parent.name for path in shipped().values()):
            print(f"{folder + ':':<12} {', '.join(shipped(folder))}")
        return 0
    try:
        print(find_config(name))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
