"""Command lines: dataclasses as flags, exit statuses, and `d2f`, one name before every command.

Each command is a module with a `main`, imported when it is asked for; `python -m MODULE` is the
same command.
"""

from __future__ import annotations

import ast
import functools
import inspect
import os
import re
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, field, fields, is_dataclass, make_dataclass
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from typing import Annotated, Any, NoReturn, ParamSpec, TypeVar, get_args, get_type_hints

import d2f
from d2f.errors import (
    InputError,
    NonFiniteLogitsError,
    RankError,
    did_you_mean,
    out_of_memory,
    repr_of,
)
from d2f.rank_number import rank

DONE, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130  # exit statuses
SECONDS_TO_SPEAK = 60.0  # the other ranks leave the first one so long to say what is wrong
COMMANDS = {  # name: its module, and what it does
    "decode": ("decode.pipeline", "decode held-out problems or prompts, and show it live"),
    "batch": ("decode.batch", "answer every row of a file or data set"),
    "evaluate": ("decode.evaluate", "accuracy and forwards of a model on held-out problems"),
    "compare": ("decode.compare.__main__", "measure decoders beside vLLM, an endpoint, transformers"),
    "serve": ("decode.serve", "serve models through OpenAI's HTTP interface"),
    "tune": ("decode.tune", "search a decoder's settings for a model and a task"),
    "lm-eval": ("decode.lm_eval", "score models on the tasks of lm-evaluation-harness"),
    "train": ("distill.train", "train or distil a model"),
    "convert": ("distill.convert", "bring a model into another form"),
    "data": ("distill.data.__main__", "show what a training run will see"),
    "rollouts": ("distill.rollouts", "collect a decoder's right answers to train on"),
    "configs": ("d2f.shipped", "list the configurations that --config takes by name"),
}
Kind = TypeVar("Kind")
Arguments = ParamSpec("Arguments")

_called_as: str | None = None


def program(usual: str) -> str:
    """Return how the running command was called: `d2f NAME`, or `usual`, its own form."""
    return _called_as or usual


def main(arguments: Sequence[str] | None = None) -> int | None:
    """Run the command that the first argument names; return its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given in ([], ["-h"], ["--help"]):
        width = max(map(len, COMMANDS))
        print("usage: d2f COMMAND [options]\n")
        print("Decode, distil and measure diffusion language models.\n\ncommands:")
        for name, (_, does) in COMMANDS.items():
            print(f"  {name:<{width}}  {does}")
        print("\nd2f COMMAND --help lists the options of a command; d2f --version.")
        return DONE if given else BAD_INPUT
    if given == ["--version"]:
        print(f"d2f-toolkit {d2f.__version__}")
        return DONE
    name = given[0]
    if name not in COMMANDS:
        hint = did_you_mean(name, COMMANDS)
        return say(f"error: no command {repr_of(name)}{hint} (d2f --help lists them)", BAD_INPUT)
    # Before the import: a user's decode.py in the working folder would be run in its place.
    try:
        require("decode", "distill", "triton_kernels")
    except HiddenPackageError as error:
        return say(f"error: {error}", BAD_INPUT)
    global _called_as
    _called_as = f"d2f {name}"
    sys.argv[1:] = given[1:]  # a command reads its own arguments there, as under python -m
    status: int | None = import_module(COMMANDS[name][0]).main()
    return status


# A user's file of the same name can hide one of the toolkit's packages.


class HiddenPackageError(ImportError):
    """Python finds something else by the name of one of the toolkit's packages."""


def require(*names: str) -> None:
    """Raise HiddenPackageError where Python would import something else by one of these names."""
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    for name in names:
        spec = find_spec(name)
        if spec is None:
            continue
        found, own = [*(spec.submodule_search_locations or ()), spec.origin][0], f"{here}/{name}"
        if os.path.realpath(str(found)) != os.path.realpath(own):
            raise HiddenPackageError(
                f"{found} hides the package {name} of d2f-toolkit ({own}): rename it, or call the "
                "command d2f, which does not look in the working folder"
            )


# A command line as a dataclass, by tyro.


def parse(
    kind: type[Kind],
    arguments: Sequence[str] | None = None,
    *,
    usual: str,
    more: Mapping[Any, Sequence[Any]] | None = None,
) -> Kind:
    """Read a command line. Raises InputError, SystemExit after --help.

    kind: a dataclass of options. The strings under its fields are the help; each of its bases is a
        group of flags, and may have a `check()` that raises InputError.
    usual: the command's own form, such as `python -m decode.tune`.
    more: further flags of a group, as `make_dataclass` takes fields; those that were given are in
        the options' `given`.
    """
    options, unknown = parse_known(kind, arguments, usual=usual, more=more)
    _refuse_unknown(unknown, kind, more)
    return options


def parse_known(
    kind: type[Kind],
    arguments: Sequence[str] | None = None,
    *,
    usual: str,
    more: Mapping[Any, Sequence[Any]] | None = None,
) -> tuple[Kind, list[str]]:
    """Like `parse`, but also return the arguments that are no flags of this command."""
    import tyro
    from tyro._errors import on_parse_error

    bases = [base for base in kind.__bases__ if is_dataclass(base)]
    own = vars(kind).get("__annotations__", {})
    flags: list[Any] = [flag for flag in _flags(kind) if flag[0] in own]  # type: ignore[arg-type]
    for base in bases:
        title = re.sub("(?<!^)(?=[A-Z])", "_", base.__name__.removesuffix("Options")).lower()
        of_group = [flag for flag in _flags(base) if flag[0] not in own]
        group = make_dataclass(title, [*of_group, *(more or {}).get(base, ())], kw_only=True)
        group.__doc__ = base.__doc__
        flags.append((title, group))
    whole: Any = make_dataclass(kind.__name__, flags, kw_only=True)
    with on_parse_error(_refuse):
        found, unknown = tyro.cli(
            whole,
            args=list(sys.argv[1:] if arguments is None else arguments),
            prog=program(usual),
            description=inspect.cleandoc(kind.__doc__ or ""),
            return_unknown_args=True,
            config=(tyro.conf.OmitArgPrefixes, tyro.conf.DisallowNone),
        )
    values: dict[str, Any] = {}
    for name, value in vars(found).items():
        values |= vars(value) if is_dataclass(value) else {name: value}
    known = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    given = {name: v for name, v in values.items() if name not in known and v is not None}
    options = kind(**{name: value for name, value in values.items() if name in known})
    if more:
        options.given = given  # type: ignore[attr-defined]
    if not unknown:  # what is unknown is said first
        for part in (*bases, kind):
            if callable(vars(part).get("check")):
                part.check(options)  # type: ignore[attr-defined]
    return options, unknown


@functools.cache
def _flags(kind: type) -> list[tuple[str, Any, Any]]:
    """Return a dataclass's fields as `make_dataclass` takes them, with the strings under them as
    help; those of tyro's Suppress are left out."""
    from tyro.conf import Suppress, arg

    hidden = get_args(Suppress[int])[1]
    hints = get_type_hints(kind, include_extras=True)
    found: list[tuple[str, Any, Any]] = []
    texts = _texts_under_fields(kind)
    for one in fields(kind):
        if hidden in get_args(hints[one.name]):
            continue
        # What is off, or said in the text, needs no second word.
        said = one.default in (None, False, ()) or one.default is MISSING
        about = arg(help=texts.get(one.name), help_behavior_hint="" if said else None)
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


def _refuse_unknown(
    unknown: Sequence[str], kind: type, more: Mapping[Any, Sequence[Any]] | None
) -> None:
    if not unknown:
        return
    flag = next((word for word in unknown if word.startswith("-")), unknown[0]).partition("=")[0]
    names = [field.name for field in fields(kind)]
    names += [field[0] for added in (more or {}).values() for field in added]
    known = [f"--{name.replace('_', '-')}" for name in names]
    hint = did_you_mean(flag, [*known, "--help", *(f"--no-{flag[2:]}" for flag in known)])
    raise InputError(f"unknown option {repr_of(flag)}{hint} (--help lists the options)")


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
        hint, expected = did_you_mean(event.value, choices), ", ".join(choices)
        raise InputError(
            f"{_flag(argument)}: expected one of {expected}, got {repr_of(event.value)}{hint}"
        )
    if said == "InstantiationFailure" and argument is not None:
        came = re.search(r"""\[?("[^"]*"|'[^']*')\]?""", event.message)
        expected = _expected(str(argument.field.type_stripped))
        raise InputError(f"{_flag(argument)}: expected {expected}, got {came[1] if came else '?'}")
    raise InputError(getattr(event, "message", said))


def _flag(argument: Any) -> str:
    flags = argument.lowered.name_or_flags or (argument.field.intern_name.upper(),)
    return str(flags[-1])


def _expected(annotation: str) -> str:
    number = "a whole number" if "int" in annotation else "a number"
    words = re.findall(r"Literal\[(.*?)\]", annotation)
    return " or ".join([number, *words])


# The end of a command: what went wrong is a line on standard error and an exit status.


def command(
    *bad_input: type[Exception], interrupted: str
) -> Callable[[Callable[Arguments, int | None]], Callable[Arguments, int]]:
    """Make a command's main of the function that does its work.

    InputError and the errors of `bad_input` end it with 2; logits that are not finite, a rank that
    has ended, too little memory and a full disk with 1; Ctrl-C with 130 and the line `interrupted`.
    A reader of standard output who left ends it without a word.
    """

    bad: tuple[type[Exception], ...] = (InputError, *bad_input)

    def decorate(work: Callable[Arguments, int | None]) -> Callable[Arguments, int]:
        @functools.wraps(work)
        def main(*args: Arguments.args, **kwargs: Arguments.kwargs) -> int:
            try:
                status = work(*args, **kwargs) or DONE
                print(end="", flush=True)  # at Python's end a failure would be a traceback
                return status
            except bad as error:
                if rank() > 0:  # the first rank says it: torchrun ends all when one has ended
                    time.sleep(SECONDS_TO_SPEAK)
                return say(f"error: {error}", BAD_INPUT)
            except BrokenPipeError:
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                return FAILED
            except (NonFiniteLogitsError, RankError, OSError) as error:
                return say(f"error: {error}", FAILED)
            except KeyboardInterrupt:
                return say(interrupted, INTERRUPTED)
            except Exception as error:
                said = out_of_memory(error)
                if said is None:
                    raise
                return say(f"error: {said}", FAILED)

        return main

    return decorate


def say(message: str, status: int = DONE) -> int:
    """Print a message on standard error; return the exit status given."""
    print(message, file=sys.stderr, flush=True)
    return status
