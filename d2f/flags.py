"""Flags: a command line as a dataclass, by tyro, and what commands share of it."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import sys
import textwrap
from collections.abc import Collection, Sequence
from dataclasses import MISSING, field, fields, is_dataclass, make_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar, get_args, get_type_hints

import tyro
from tyro._errors import on_parse_error
from tyro.conf import FlagCreatePairsOff, Positional, Suppress, arg

from d2f.command import program
from d2f.device import DEVICE
from d2f.errors import InputError, did_you_mean, not_one_of, repr_of
from d2f.models import names, resolve

Kind = TypeVar("Kind")
CONFIG = (tyro.conf.OmitArgPrefixes, tyro.conf.DisallowNone)
_HIDDEN, _POSITIONAL = get_args(Suppress[int])[1], get_args(Positional[int])[1]
Switch = Annotated[bool, FlagCreatePairsOff]
"""A flag that is off unless it is given, without a --no- form."""
Verbose = Annotated[
    Switch,
    arg(
        aliases=["-v"],
        help="show what the libraries underneath say, too",
    ),
]


def check_least(options: object, **least: float) -> None:
    """Raise InputError for an option below its least value; None is not given."""
    for name, bound in least.items():
        value = getattr(options, name)
        if value is not None and not value >= bound:
            flag = name.replace("_", "-")
            raise InputError(f"--{flag} must be at least {bound:g}, got {value}")


def family_names() -> list[str]:
    """List the model families, whose files import torch."""
    files = Path(__file__).with_name("families").glob("[a-z]*.py")
    return sorted(path.stem for path in files if path.stem != "family")


def check_family_name(name: str | None) -> None:
    """Raise InputError unless there is such a family; None is none."""
    if name not in (None, *family_names()):
        raise InputError(f"--family: {not_one_of(name, family_names())}")


def check_device_name(name: str | None) -> None:
    """Raise InputError for what is no device anywhere; None is none, what is here torch knows."""
    if name is not None and not re.fullmatch(DEVICE, name):
        raise InputError(f"--device: {not_one_of(name, ['cpu', 'cuda', 'mps', 'xpu', 'cuda:1'])}")


def check_model_name(name: str, flag: str = "--model") -> None:
    """Raise InputError unless a model may have this name; a hub is not asked."""
    owner, *rest = name.split("/")
    is_hub_name = len(rest) == 1 and rest[0] and owner not in ("", ".", "..", "~")
    folder = Path(resolve(name))
    if folder.is_dir() and not any(folder.glob("*.json")):
        raise InputError(f"{flag} {name}: expected a model folder with a config.json, found none")
    if not folder.is_dir() and not is_hub_name:
        raise InputError(
            f"{flag} {name}: no such folder or bundled model{did_you_mean(name, names())}; "
            f"expected a folder, a hub name as owner/name, or one of {', '.join(names())}"
        )


def parse(kind: type[Kind], arguments: Sequence[str] | None = None, *, usual: str) -> Kind:
    """Read a command line. Raises InputError, SystemExit after --help.

    kind: a dataclass of options. The strings under its fields are the help; each of its bases is a
        group of flags. It and its bases may have a `check()` that raises InputError; a base a
        `more(words)` that returns further flags of its group, as `make_dataclass` takes fields,
        of which those that were given are in the options' `given`, and an `about(words)`, the
        group's text in the help. `examples` begin the help.
    usual: the command's own form, such as `python -m decode.tune`.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    options, unknown = parse_known(kind, words, usual=usual)
    if unknown:
        flag = next((word for word in unknown if word.startswith("-")), unknown[0])
        flag = flag.partition("=")[0]
        names = [one.name for one in fields(kind)]  # type: ignore[arg-type]
        for base in kind.__bases__:
            names += [more[0] for more in base.more(words)] if hasattr(base, "more") else []
        known = [f"--{name.replace('_', '-')}" for name in names]
        hint = did_you_mean(flag, [*known, "--help", *(f"--no-{name[2:]}" for name in known)])
        raise InputError(f"unknown option {repr_of(flag)}{hint} (--help lists the options)")
    return options


def parse_known(
    kind: type[Kind], arguments: Sequence[str] | None = None, *, usual: str
) -> tuple[Kind, list[str]]:
    """Like `parse`, but also return the words that are no flags of this command."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    rest, values = _named_arguments(kind, words)
    about = inspect.cleandoc(kind.__doc__ or "")
    if examples := getattr(kind, "examples", ()):
        about = "\n".join(["examples:", *(f"  {line}" for line in examples), "", about])
    with on_parse_error(_refuse):
        found, unknown = tyro.cli(
            command_line(kind, words, without=values),
            args=rest,
            prog=program(usual),
            description=about,
            return_unknown_args=True,
            config=CONFIG,
        )
    for name, value in vars(found).items():
        values |= vars(value) if is_dataclass(value) else {name: value}
    known = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    given = {name: v for name, v in values.items() if name not in known and v is not None}
    options = kind(**{name: value for name, value in values.items() if name in known})
    if "given" in known:
        options.given = given  # type: ignore[attr-defined]
    if not unknown:  # what is unknown is said first
        for check in (
            *(getattr(base, "check", None) for base in kind.__bases__),
            vars(kind).get("check"),
        ):
            if callable(check):
                check(options)
    return options, unknown


def command_line(kind: type, words: Sequence[str], without: Collection[str] = ()) -> Any:
    """Make the dataclass that tyro reads a command line into: a nested one for each group."""
    own = vars(kind).get("__annotations__", {})
    flags: list[Any] = [flag for flag in _flags(kind) if flag[0] in own and flag[0] not in without]
    for base in filter(is_dataclass, kind.__bases__):
        title = base.__name__.removesuffix("Options").removeprefix("OneProcess")
        title = re.sub("(?<!^)(?=[A-Z])", "_", title).lower()
        of_group = [flag for flag in _flags(base) if flag[0] not in (*own, *without)]
        more = base.more(words) if hasattr(base, "more") else ()
        group = make_dataclass(title, [*of_group, *more], kw_only=True)
        group.__doc__ = base.about(words) if hasattr(base, "about") else ""
        flags.append((title, group))
    return make_dataclass(kind.__name__, flags, kw_only=True)


def _named_arguments(kind: type, words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Split words into the others and the values of arguments that are named as flags are, as
    --output DIR in place of DIR."""
    hints = get_type_hints(kind, include_extras=True)
    kinds = {n: get_args(hint)[0] for n, hint in hints.items() if _POSITIONAL in get_args(hint)}
    names = {f"--{name}": name for name, kind in kinds.items() if kind in (str, Path)}
    rest, values, left = [], {}, iter(words)
    for word in left:
        flag, equals, value = word.partition("=")
        if (name := names.get(flag)) is None:
            rest.append(word)
            continue
        said = value if equals else next(left, None)
        if said is None:
            raise InputError(f"{flag}: expected a value (--help lists the options)")
        values[name] = kinds[name](said)
    return rest, values


@functools.cache
def _flags(kind: type) -> list[tuple[str, Any, Any]]:
    """Return a dataclass's fields as `make_dataclass` takes them, with the strings under them as
    help; those of tyro's Suppress are left out."""
    hints = get_type_hints(kind, include_extras=True)
    found: list[tuple[str, Any, Any]] = []
    texts = _texts_under_fields(kind)
    for one in fields(kind):
        if _HIDDEN in get_args(hints[one.name]):
            continue
        # Do not repeat a default that is off or that the text states.
        said = one.default in (None, False, ()) or one.default is MISSING
        metavar = one.name.upper() if _POSITIONAL in get_args(hints[one.name]) else None
        about = arg(
            metavar=metavar, help=texts.get(one.name), help_behavior_hint="" if said else None
        )
        found.append((one.name, Annotated[hints[one.name], about], field(default=one.default)))
    return found


def _texts_under_fields(kind: type) -> dict[str, str]:
    found: dict[str, str] = {}
    for part in reversed(kind.__mro__[:-1]):
        body = ast.parse(textwrap.dedent(inspect.getsource(part))).body[0].body  # type: ignore[attr-defined]
        for line, after in pairwise(body):
            match line, after:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(value=ast.Constant(str(text))):
                    found[name] = " ".join(text.split())
    return found


def _refuse(event: Any) -> NoReturn:
    """Raise tyro's complaint about a command line as an InputError of one line."""
    said = type(event).__name__
    if said == "MissingArgs":
        flags = [_flag(missing.arg) for missing in event.missing_arguments]
        raise InputError(f"expected {', '.join(flags)} (--help lists the options)")
    argument = getattr(event, "argument", None)
    if said == "BadValue" and argument is not None:
        raise InputError(f"{_flag(argument)}: expected a value (--help lists the options)")
    if said == "InvalidChoice":
        choices = sorted(choice for choice in event.choices if choice != "None")
        raise InputError(f"{_flag(argument)}: {not_one_of(event.value, choices)}")
    if said == "InstantiationFailure" and argument is not None:
        came = re.search(r"""\[?("[^"]*"|'[^']*')\]?""", event.message)
        expected = _expected(str(argument.field.type_stripped))
        raise InputError(f"{_flag(argument)}: expected {expected}, got {came[1] if came else '?'}")
    raise InputError(getattr(event, "message", said))


def _flag(argument: Any) -> str:
    if argument.is_positional():
        return str(argument.field.intern_name.upper())
    return str(argument.lowered.name_or_flags[-1])


def _expected(annotation: str) -> str:
    number = "a whole number" if "int" in annotation else "a number"
    words = re.findall(r"Literal\[(.*?)\]", annotation)
    return " or ".join([number, *words])
