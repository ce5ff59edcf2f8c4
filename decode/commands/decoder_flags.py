"""The decoders' options as flags: one flag a name, its help made from all decoders that have it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from d2f.errors import InputError
from decode.decoders import DECODERS, Decoder, find_decoder
from decode.decoders.base import common_options
from decode.decoders.options import Option, options_of

Kind = type[Decoder]


def own_names(kinds: Iterable[Kind]) -> list[str]:
    """The options that not every decoder has."""
    common = common_options()
    return [name for name in options_by_name(kinds) if name not in common]


def options_by_name(kinds: Iterable[Kind]) -> dict[str, list[tuple[Kind, Option]]]:
    """Each option of some decoders, with every decoder that has it; those of one come together."""
    found: dict[str, list[tuple[Kind, Option]]] = {}
    for kind in kinds:
        for option in options_of(kind):
            found.setdefault(option.name, []).append((kind, option))
    return found


def help_of(having: Sequence[tuple[Kind, Option]], count: int) -> str:
    """What an option means, decoder by decoder where it means or is by default something else.
    count: how many decoders there are; one that all of them have names none."""
    meanings = dict.fromkeys(option.help for _, option in having)
    parts = []
    for meaning in meanings:
        same = [(kind, option) for kind, option in having if option.help == meaning]
        defaults: dict[str, list[str]] = {}
        for kind, option in same:
            defaults.setdefault(option.shown, []).append(kind.name)
        if len(defaults) == 1:
            shown = next(iter(defaults))
        else:
            shown = "; ".join(f"{', '.join(names)} {text}" for text, names in defaults.items())
        names = ", ".join(kind.name for kind, _ in same)
        prefix = "" if len(same) == count else f"{names}: "
        parts.append(f"{prefix}{meaning} (default: {shown})")
    return "; ".join(parts)


def add_flags(group: argparse._ArgumentGroup, kinds: Sequence[Kind], names: Iterable[str]) -> None:
    """A flag for each of these options of the decoders; one that is not given is absent from the
    namespace. To be called when the command's own flags are there. Raises InputError."""
    found = options_by_name(kinds)
    for name in names:
        text, reading = help_of(found[name], len(kinds)), _reading(found[name])
        # Absent and not None where it is not given, as None is a value of some options.
        add_flag(group, found[name], help=text, default=argparse.SUPPRESS, **reading)


def add_flag(
    group: argparse._ArgumentGroup, having: Sequence[tuple[Kind, Option]], help: str, **reading: Any
) -> None:
    """The flag of one option. Raises InputError where the command has one of that name."""
    kind, option = having[-1]
    flag = "--" + option.name.replace("_", "-")
    try:
        group.add_argument(flag, help=help.replace("%", "%%"), **reading)
    except argparse.ArgumentError as error:  # of the user's own decoder: ours have none
        raise InputError(
            f"the decoder {kind.name} cannot have an option {option.name}: {flag} is one of the "
            "command already"
        ) from error


def _reading(having: Sequence[tuple[Kind, Option]]) -> dict[str, Any]:
    """How argparse reads an option."""
    option = having[-1][1]  # where they disagree, that of the user's own decoder
    if option.kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if isinstance(option.kind, tuple):
        return {"choices": option.kind}
    if option.words:
        return {"type": _number_or_word(option), "metavar": "|".join((option.unit, *option.words))}
    return {"type": option.kind, "metavar": option.unit}


def _number_or_word(option: Option) -> Callable[[str], int | float | str]:
    assert not isinstance(option.kind, tuple)
    number = option.kind

    def read(text: str) -> int | float | str:
        if text in option.words:
            return text
        try:
            return number(text)
        except ValueError:
            known = " or ".join(("a number", *option.words))
            raise argparse.ArgumentTypeError(f"expected {known}, got {text!r}") from None

    return read


def add_decoder(group: argparse._ArgumentGroup, kinds: Sequence[Kind]) -> None:
    """--decoder, --config, and the options that not every decoder has; to be called last, so that a
    clash is known for one with the command's own. Raises InputError."""
    group.add_argument("--decoder", metavar="NAME", help=summaries())
    group.add_argument(
        "--config",
        metavar="FILE",
        help="YAML of decoder options (tau_add: 0.1, ..., and decoder: d2f), a file or a name that "
        "`d2f configs` lists under published or tuned; the command line overrides it",
    )
    add_flags(group, kinds, own_names(kinds))


def add_sampling(group: argparse._ArgumentGroup, kinds: Sequence[Kind]) -> None:
    """The options that every decoder has."""
    add_flags(group, kinds, common_options())
    group.add_argument(
        "--stop",
        action="append",
        default=argparse.SUPPRESS,
        metavar="TEXT",
        help="end the response before this text; may be given several times",
    )


def summaries() -> str:
    """What each decoder is, for --help."""
    lines = [f"{name}: {kind.summary}" for name, kind in DECODERS.items()]
    return "; ".join(lines) + "; module:Class: one of your own"


def offered(arguments: Sequence[str] | None) -> list[Kind]:
    """The decoders whose options a command line may have: those of the package, and one of the
    user's own that it names. Raises InputError where that one cannot be had."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    # A first look for --decoder alone: a decoder of the user's own brings flags of its own.
    parser.add_argument("--decoder")
    try:
        known, _ = parser.parse_known_args(sys.argv[1:] if arguments is None else list(arguments))
    except argparse.ArgumentError:  # the command's own parser says what is wrong
        return list(DECODERS.values())
    own = [find_decoder(known.decoder)] if ":" in (known.decoder or "") else []
    return [*DECODERS.values(), *own]


def given_options(options: argparse.Namespace) -> dict[str, Any]:
    """The decoder's options that a command line gave, by name."""
    named = getattr(options, "decoder", None)
    kinds = [*DECODERS.values(), *([find_decoder(named)] if named is not None else [])]
    names = [*options_by_name(kinds), "stop"]
    return {name: getattr(options, name) for name in names if hasattr(options, name)}
