"""What the command lines have in common; imports no torch."""

from __future__ import annotations

import argparse
import errno
import functools
import hashlib
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn, ParamSpec, TypeGuard

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

import d2f
from d2f.checkpoint import base_of_adapter, folder_of
from d2f.command import CommandParser
from d2f.config import read_mapping, refuse_another_kind
from d2f.contract import Contract
from d2f.device import parse_device, parse_dtype, parse_threads
from d2f.errors import InputError, NonFiniteLogitsError, RankError, one_line, out_of_memory, repr_of
from d2f.model import DiffusionModel
from d2f.models import names, resolve
from d2f.quantize import check_quantize, slowness
from d2f.quiet import drop, unread_output
from d2f.rank_number import check_processes, rank
from d2f.shipped import DECODING, find_config
from d2f.tasks import DEFAULT_TASKS, Task, find_tasks, task_of_data
from d2f.tensor_parallel import check_parallel, own_part
from decode.decoders import DECODERS, Decoder, default_decoder, find_decoder
from decode.decoders.base import Option, common_options, default_grid, options_of, searchable

# What a command needs beyond the package's own requirements.


def require_matplotlib(otherwise: str | None = None) -> None:
    """Raise InputError if no figure can be drawn here. otherwise: the option that draws none."""
    if find_spec("matplotlib") is None:
        raise InputError(
            "figures need matplotlib, which is not installed: pip install 'd2f-toolkit[plot]'"
            + (f", or give {otherwise}" if otherwise else "")
        )


def require_scipy() -> None:
    """Raise InputError if nothing can be fitted here."""
    if find_spec("scipy") is None:
        raise InputError(
            "fits need scipy, which is not installed: pip install 'd2f-toolkit[ablation]'"
        )


def require_serve() -> None:
    """Raise InputError if the server cannot run here."""
    needed = ("fastapi", "uvicorn", "openai", "prometheus_client")
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        raise InputError(
            f"the server needs {', '.join(missing)}, not installed: "
            "pip install 'd2f-toolkit[serve]'"
        )


def require_ray() -> None:
    """Raise InputError if there can be no more than one process here."""
    if find_spec("ray") is None:
        raise InputError("Ray is not installed: pip install 'd2f-toolkit[ray]'")


DEFAULT_MODEL = "tiny-d2f"
Group = argparse.ArgumentParser | argparse._ArgumentGroup


class Parser(CommandParser):
    """Reports a bad command line as an InputError."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message} (--help lists the options)")


def add_verbose(parser: Group) -> None:
    """Add -v, which every command has: `d2f.quiet.quiet` takes it."""
    parser.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="show the notices, warnings and progress bars of the libraries underneath, too",
    )


_MODEL_FLAGS: dict[str, dict[str, Any]] = {
    "adapter": {"metavar": "NAME", "help": "LoRA adapter for it: folder or hub name"},
    "merge": {
        "action": argparse.BooleanOptionalAction,
        "help": "fold the adapter into the weights (default), or keep it beside them",
    },
    "family": {
        "metavar": "NAME",
        "help": "llada, dream, sdar, wedlm or causal (default: what the checkpoint says)",
    },
    "dtype": {
        "metavar": "TYPE",
        "help": "float32, bfloat16, float16 or auto, which is bfloat16 where that is fast: on a "
        "GPU, on a CPU with AMX or AVX512-BF16 (default: float32 on a CPU, bfloat16 elsewhere)",
    },
    "quantize": {
        "metavar": "NAME",
        "help": "weights in few bits: int8, int8-weight, int4-weight, nf4 or fp8 "
        "(docs/low-precision.md says which device has which)",
    },
    "device": {
        "metavar": "NAME",
        "help": "cpu, cuda, cuda:1, ... (default: cuda where there is one)",
    },
    "threads": {
        "type": lambda text: int(text) if text.isdecimal() else text,
        "metavar": "N|auto",
        "help": "of a forward on a CPU: N, or auto, the processors that this process may use, one "
        "where other programs keep them busy (default: auto, up to OMP_NUM_THREADS where that is "
        "set)",
    },
    "compile": {
        "action": "store_true",
        "help": "compile the model's forwards, by torch.compile or, in fp32 on a CPU, as one call "
        "of C++: takes some seconds at the start and a C++ compiler on a CPU, then each costs "
        "less; it needs a merged adapter",
    },
    "tensor-parallel": {
        "type": int,
        "default": 1,
        "metavar": "N",
        "help": "share the model among N processes, a GPU each: torchrun --nproc-per-node N -m "
        "COMMAND --tensor-parallel N (docs/several-gpus.md)",
    },
}


def add_model(
    group: Group, *more: str, default: str | None = DEFAULT_MODEL, several: str = ""
) -> None:
    """Add --model, --adapter, --dtype, --quantize, --device, --threads, and of --merge, --family,
    --compile, --tensor-parallel those that `more` names; the others have their defaults, so
    `load_model.load` takes every command's options. default: of --model, None where it must be
    given. several: said of a --model that may be given more than once; then it is a list, None
    where it was not given."""
    bundled = f"folder, hub name or bundled model ({', '.join(names()) or 'none is bundled'}"
    end = f"; default {default})" if default else ")"
    reading: dict[str, Any] = {"default": default, "required": default is None}
    if several:  # argparse would add to a default
        reading = {"action": "append"}
    group.add_argument("--model", metavar="NAME", help=bundled + end + several, **reading)
    for name, flag in _MODEL_FLAGS.items():
        if name in ("adapter", "dtype", "quantize", "device", "threads", *more):
            group.add_argument(f"--{name}", **flag)
    group.set_defaults(
        family=None, merge=True, compile=False, workers=1, address=None, tensor_parallel=1
    )


def check_model(options: argparse.Namespace) -> None:
    """Raise InputError where the flags of the model do not go together."""
    if not options.merge and options.adapter is None:
        raise InputError("--no-merge needs --adapter")
    if options.quantize is not None and not options.merge:
        raise InputError("--quantize needs a merged adapter, not --no-merge")
    if options.compile and not options.merge:
        raise InputError("--compile needs a merged adapter, not --no-merge")
    check_least(options, tensor_parallel=1)
    if options.tensor_parallel > 1:
        check_processes(options.tensor_parallel)
        for flag, given in (("--compile", options.compile), ("--no-merge", not options.merge)):
            if given:
                raise InputError(f"{flag} is not for --tensor-parallel")


def add_workers(group: Group) -> None:
    """Add --workers and --address; `check_workers` reads them."""
    group.add_argument(
        "--workers",
        type=int,
        default=1,
        metavar="N",
        help="processes that decode, each with the model and its share of the cores, or a GPU "
        "(default 1; more need the extra ray). What is decoded does not depend on it",
    )
    group.add_argument(
        "--address",
        metavar="HOST:PORT",
        help="Ray cluster for the --workers (default: RAY_ADDRESS, else one on this machine while "
        "the command runs)",
    )


def check_workers(options: argparse.Namespace) -> None:
    """Raise InputError unless there can be so many workers; with one there is no cluster."""
    check_least(options, workers=1)
    if options.workers == 1:
        if options.address is not None:
            raise InputError("--address is of a Ray cluster, for more --workers than 1")
        return
    if options.tensor_parallel > 1:
        raise InputError("--tensor-parallel is one model's processes: not with several --workers")
    require_ray()
    options.address = options.address or os.environ.get("RAY_ADDRESS")
    if ":" in (options.device or ""):
        raise InputError(
            f"--device {options.device}: each of several --workers has a GPU of its own: expected "
            "cuda, which CUDA_VISIBLE_DEVICES may narrow"
        )


def add_tasks(group: Group, more: str = "") -> None:
    """Add what names tasks; `chosen_tasks` reads it. more: said in the help of --tasks."""
    group.add_argument(
        "--tasks",
        metavar="NAMES",
        help="tasks, with commas: generated ones, task files (docs/evaluation.md) by path, or "
        "those that `d2f configs` lists under evaluation "
        f"(default {','.join(DEFAULT_TASKS)}){more}",
    )
    group.add_argument(
        "--data",
        metavar="FILE",
        help="a task of your own instead: a file of rows (JSONL, parquet) or a data set, whose "
        "columns are prompt, question or messages, and reference, answer or response",
    )
    group.add_argument(
        "--judge",
        metavar="NAME",
        help="who says what is right of --data: exact, numeric, choice, math, contains, or a "
        "function of your own as module:function",
    )
    group.add_argument(
        "--allow-code-execution",
        action="store_true",
        help="let the judge python run what the model writes, on this machine: in a process of its "
        "own, with limits, and without network where the system allows that",
    )


def chosen_tasks(options: argparse.Namespace) -> tuple[Task, ...]:
    """The tasks that a command line names. Raises InputError."""
    allowed = options.allow_code_execution
    if (options.data is None) != (options.judge is None):
        raise InputError("--data and --judge go together: expected both or neither")
    if options.data is None:
        names = DEFAULT_TASKS if options.tasks is None else options.tasks.split(",")
        try:
            return find_tasks(names, allow_code_execution=allowed)
        except InputError as error:
            raise InputError(f"--tasks: {error}") from error
    if options.tasks is not None:
        raise InputError("--data is a task of its own: leave out --tasks")
    return (task_of_data(options.data, options.judge, allow_code_execution=allowed),)


MOST_SAMPLES = 10_000  # answers a prompt


def check_samples(flag: str, count: int) -> None:
    """Raise InputError unless so many answers a prompt can be made."""
    if not 1 <= count <= MOST_SAMPLES:
        raise InputError(f"{flag} must lie in [1, {MOST_SAMPLES}], got {repr_of(count)}")


def check_least(options: argparse.Namespace, **least: int) -> None:
    """Raise InputError for an option below its least value; None is not given."""
    for name, bound in least.items():
        value = getattr(options, name)
        if value is not None and value < bound:
            flag = name.replace("_", "-")
            raise InputError(f"--{flag} must be at least {bound}, got {value}")


# The decoders' options as flags: one flag a name, its help made from all decoders that have it.

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
    return {"type": option.kind, "metavar": option.unit}


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


# Which decoder a run uses and with which options: the command line over a YAML file.


def option_names(decoder: type[Decoder]) -> list[str]:
    """The options that a decoder has."""
    return [field.name for field in fields(decoder)]


@dataclass(frozen=True)
class DecoderSettings:
    """The decoder's name, None where none was named, and the options that were given."""

    name: str | None
    given: dict[str, Any]

    def check(self, lengths: Iterable[int]) -> None:
        """Raise InputError where no model could be decoded with the options for responses of these
        lengths: the named decoder refuses them, or every one that some model has by default. It
        needs no model, so it comes before anything is read; `decoder` checks the one in use."""
        for length in lengths:
            refusals = []
            # One decoder that takes the options is enough: which one it is follows from the model.
            for kind in _defaults() if self.name is None else [find_decoder(self.name)]:
                try:
                    self._build(kind, length)
                except InputError as error:
                    refusals.append((kind, error))
                else:
                    break
            else:
                raise self._telling(refusals)

    def _telling(self, refusals: Sequence[tuple[type[Decoder], InputError]]) -> InputError:
        """The refusal that says most: that of a decoder which has all of the options; where such
        decoders say different things, what each says."""
        said: dict[str, str] = {}
        for kind, error in refusals:
            # A decoder without one of the options only says that, which the user may not have
            # meant.
            if set(self.given) <= set(option_names(kind)):
                said.setdefault(str(error), kind.name)
        if len(said) == 1:
            return InputError(next(iter(said)))
        if said:
            return InputError("; ".join(f"{name}: {text}" for text, name in said.items()))
        if self.name is not None:
            return refusals[0][1]
        having = [d.name for d in DECODERS.values() if set(self.given) <= set(option_names(d))]
        common = set.intersection(*(set(option_names(d)) for d in DECODERS.values()))
        given = ", ".join(name for name in self.given if name not in common)
        if not having:
            return InputError(f"no decoder has all of the options {given}")
        return InputError(
            f"no model is decoded with the options {given} by default: name a decoder that has "
            f"them, {' or '.join(having)}"
        )

    def decoder(self, model: DiffusionModel, length: int | None = None) -> Decoder:
        """The decoder of a prompt whose response has at most `length` tokens, by default as many
        as were given or as the decoder itself takes; every option resolved: the named one, else
        the one that suits the model. Raises InputError."""
        contract = model.contract
        kind = default_decoder(contract) if self.name is None else find_decoder(self.name)
        return self._build(kind, length, contract)

    def for_task(self, model: DiffusionModel, task: Task) -> Decoder:
        """The decoder of a task's problems: with its length where none was given, and its stop
        strings beside those that were. Raises InputError."""
        length = self.given.get("max_new_tokens") or task.response_length
        decoder = self.decoder(model, length)
        return replace(decoder, stop=(*task.stop, *decoder.stop))

    def _build(
        self, kind: type[Decoder], length: int | None, contract: Contract | None = None
    ) -> Decoder:
        known = option_names(kind)
        unknown = [name for name in self.given if name not in known]
        if unknown:
            taken = ", the default of this model," if self.name is None else ""
            named = one_line(", ".join(unknown))[:200]
            raise InputError(
                f"the decoder {kind.name}{taken} has no option {named}; it has {', '.join(known)}"
            )
        # Without a model what it was trained with is not known; the options are checked as they
        # are.
        values = self.given if contract is None else kind.with_model_defaults(self.given, contract)
        return kind(**values if length is None else values | {"max_new_tokens": length})


def _defaults() -> list[type[Decoder]]:
    """Those that a model may be decoded with where none is named."""
    # Those that say themselves for which models; `Decoder`'s own answer is always no.
    return [kind for kind in DECODERS.values() if "is_default_for" in vars(kind)]


def read_settings(options: argparse.Namespace) -> DecoderSettings:
    """The decoder settings of a command line. Raises InputError."""
    values = read_mapping(options.config) if options.config is not None else {}
    name, given = split(values, options.config, options.decoder)
    return DecoderSettings(options.decoder or name, given | given_options(options))


def split(
    values: dict[str, Any], where: str, decoder: str | None = None
) -> tuple[str | None, dict[str, Any]]:
    """The decoder's name, None where none is named, and the options in a mapping of both. decoder:
    the one that is named elsewhere.

    Raises InputError, naming where, for a key that no decoder has.
    """
    known = ["decoder", *_known_options()]
    refuse_another_kind(values, known, where, "options of a decoder")
    name = values.get("decoder")
    if "decoder" in values:
        try:
            known += option_names(find_decoder(name))
        except InputError as error:
            raise InputError(f"{where}: {error}") from error
    if decoder is not None:
        known += option_names(find_decoder(decoder))
    unknown = [f"{key}"[:60] for key in values if key not in known]
    if unknown:
        expected = ", ".join(dict.fromkeys(known))
        raise InputError(
            f"{where}: unknown key {one_line(', '.join(unknown))[:200]}; "
            f"expected some of {expected}"
        )
    return name, {key: value for key, value in values.items() if key != "decoder"}


def _known_options() -> list[str]:
    """The options of all decoders, each once."""
    return list(dict.fromkeys(name for d in DECODERS.values() for name in option_names(d)))


# The command line of `python -m decode.pipeline`; parsing it does not import torch.

DEFAULT_PROBLEMS = 2

_DESCRIPTION = """\
python -m decode.pipeline --tau-add 0.1

Decodes a few held-out problems with the bundled D2F model and shows the pipeline live in a
terminal: the state of each block, its tokens as they appear. For each problem it then says whether
the answer is right, visible tokens per second, forwards (calls of the model) and tokens per
forward. Where standard output is not a terminal it prints plain lines.
"""
_EPILOG = """\
exit status: 0 done; 1 the model gave NaN or infinite logits; 2 bad input, found before any work,
with nothing written; 130 interrupted, the output lines written so far stay.
"""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line as a namespace; a decoder option that was not given is not in it.

    Raises InputError for a bad command line, SystemExit after --help.
    """
    options = _parser(offered(arguments)).parse_args(arguments)
    if options.decoder is not None:
        find_decoder(options.decoder)
    prompts = options.prompt is not None or options.prompts_file is not None
    for name in ("tasks", "data", "problems"):
        if prompts and getattr(options, name) is not None:
            raise InputError(f"--{name} is for held-out problems, not for prompts of your own")
    if options.raw and not prompts:
        raise InputError("--raw needs --prompt or --prompts-file")
    check_model(options)
    check_least(options, batch_size=1)
    check_samples("--n", options.n)
    if options.pause is not None and not 0 <= options.pause <= 60:
        raise InputError(f"--pause must lie in [0, 60] seconds, got {options.pause}")
    if options.config is not None:
        options.config = str(find_config(options.config, *DECODING))
    return options


def _parser(kinds: list[Kind]) -> argparse.ArgumentParser:
    parser = Parser(
        "python -m decode.pipeline",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        usage=argparse.SUPPRESS,  # the description opens with it
        allow_abbrev=False,
    )
    model = parser.add_argument_group("model")
    add_model(model, "merge", "family", "compile", "tensor-parallel")
    _add_prompts(parser.add_argument_group("what to decode (default: held-out problems)"))
    decoder = parser.add_argument_group(
        "decoder", "An option that the chosen decoder does not have is an error."
    )
    tokens = parser.add_argument_group("choice of tokens (all decoders; default: greedy)")
    tokens.add_argument(
        "--n",
        type=int,
        default=1,
        metavar="N",
        help="answers a prompt, at least 1, each with a seed of its own; their ids are ID#1, ID#2, "
        "... (default 1)",
    )
    _add_running(parser.add_argument_group("running and output"))
    add_sampling(tokens, kinds)
    add_decoder(decoder, kinds)  # last, so that a clash is known for one with the command's own
    return parser


def _add_prompts(group: argparse._ArgumentGroup) -> None:
    one = group.add_mutually_exclusive_group()
    one.add_argument(
        "--prompt", metavar="TEXT", help="one user message, through the tokenizer's chat template"
    )
    one.add_argument(
        "--prompts-file",
        metavar="FILE",
        help="JSONL, - for standard input: a line has one of prompt (text), messages (role and "
        "content) or ids (token ids), and may have an id (default: its line number)",
    )
    group.add_argument(
        "--raw",
        action="store_true",
        help="take text prompts as they are, without the chat template",
    )
    add_tasks(group)
    group.add_argument(
        "--problems",
        type=int,
        metavar="N",
        help=f"held-out problems a task, at least 1 (default {DEFAULT_PROBLEMS})",
    )


def _add_running(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--batch-size",
        type=int,
        default=1,
        metavar="N",
        help="prompts decoded together, at least 1; the tokens do not depend on it (default 1)",
    )
    group.add_argument(
        "--output",
        metavar="FILE",
        help="JSONL: the run's settings, then a line a result as it comes; the same command again "
        "goes on where it stopped",
    )
    group.add_argument(
        "--trace",
        metavar="FILE",
        help="JSON of every forward: rows fed, block states, tokens, confidences",
    )
    group.add_argument(
        "--pause",
        type=float,
        metavar="SECONDS",
        help="how long each forward stays on the screen, in a terminal and one prompt at a time; "
        "not counted in any time (default: 0.05 at first, then less and less, 3 seconds over the "
        "whole run)",
    )
    group.add_argument(
        "--quiet", action="store_true", help="only the totals; with --prompt only the response"
    )
    add_verbose(group)


# The options of `decode.serve` for several replicas; docs/serving.md says what they do.

_NEED_REPLICAS = ("min_replicas", "target_requests", "replica_gpus", "ray_address")


def add_replicas(group: argparse._ArgumentGroup) -> None:
    """Add the options; `check_replicas` must see what they gave."""
    group.add_argument(
        "--replicas",
        type=int,
        metavar="N",
        help="processes that each hold the models and an engine of each; the cores are divided "
        "among them (default: no Ray, one engine in this process)",
    )
    group.add_argument(
        "--min-replicas",
        type=int,
        metavar="N",
        help="in place of --replicas: keep at least so many (default 1) ...",
    )
    group.add_argument(
        "--max-replicas",
        type=int,
        metavar="N",
        help="... and at most so many, by how many requests there are",
    )
    group.add_argument(
        "--target-requests",
        type=float,
        metavar="X",
        help="requests in flight, for each replica, that the number of replicas is kept to "
        "(default: --max-batch)",
    )
    group.add_argument(
        "--replica-gpus",
        type=int,
        metavar="N",
        help="GPUs of each replica (default: 1 where the device is cuda, else 0)",
    )
    group.add_argument(
        "--ray-address",
        metavar="HOST:PORT",
        help="of a running Ray cluster, or auto (default: Ray is started here, on 127.0.0.1)",
    )


def check_replicas(options: argparse.Namespace) -> None:
    """Raise InputError where the options do not go together. Then min_replicas and max_replicas
    are how many there may be, both None without replicas."""
    check_least(options, replicas=1, min_replicas=1, max_replicas=1, replica_gpus=0)
    if options.replicas is not None:
        if options.min_replicas is not None or options.max_replicas is not None:
            raise InputError("--replicas is a fixed number: leave out --min- and --max-replicas")
        if options.target_requests is not None:
            raise InputError("--target-requests needs --max-replicas, not --replicas")
        options.min_replicas = options.max_replicas = options.replicas
    if options.max_replicas is None:
        for name in _NEED_REPLICAS:
            if getattr(options, name) is not None:
                raise InputError(f"--{name.replace('_', '-')} needs --replicas or --max-replicas")
        return
    if options.tensor_parallel > 1:
        raise InputError("--tensor-parallel is not for replicas: each of them is one process")
    options.min_replicas = options.min_replicas or 1
    if options.min_replicas > options.max_replicas:
        raise InputError(
            f"--min-replicas {options.min_replicas} is more than --max-replicas "
            f"{options.max_replicas}"
        )
    target = options.target_requests
    if target is not None and not (math.isfinite(target) and target > 0):
        raise InputError(f"--target-requests must be a number above 0, got {target:g}")
    if options.device is not None and options.device.startswith("cuda:"):
        raise InputError(
            f"--device {options.device}: Ray gives each replica a GPU of its own, expected cuda"
        )


# The command line of `python -m decode.serve`; parsing it does not import torch.

KEY_VARIABLE = "D2F_API_KEY"
PUBLIC = ("/health", "/ready", "/metrics")
MOST_SECONDS = 1_000_000  # the system counts milliseconds in 32 bits
MOST_REQUESTS = 1_000_000
_HOST = re.compile(r"\*|[a-z0-9_-]+(\.[a-z0-9_-]+)*|\[[0-9a-f:.]+\]")
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s?#@]+")

_DESCRIPTION_SERVE_FLAGS = """\
python -m decode.serve --model tiny-d2f --tau-conf 0.95 --port 8000

Serves models through OpenAI's HTTP interface: /v1/completions and /v1/chat/completions, with
streams of settled text alone, and a page at / that shows the pipeline. A request may choose its
decoder and that decoder's options. docs/serving.md says more.
"""
_EPILOG_SERVE_FLAGS = """\
SIGTERM or Ctrl-C: no new requests, those that run finish within --drain-seconds; a second one
cancels them. exit status: 0 ended so; 2 bad input, found before a model is loaded where it can be.
"""


def parse_serve_flags(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line as a namespace; a decoder option that was not given is not in it. model:
    the models by the names that they are served under.

    Raises InputError for a bad command line, SystemExit after --help.
    """
    options = _parser_serve_flags(offered(arguments)).parse_args(arguments)
    options.model = named_models(options.model or [DEFAULT_MODEL])
    for flag in ("adapter", "family"):
        if getattr(options, flag) is not None and len(options.model) > 1:
            raise InputError(f"--{flag} is for one model, got {len(options.model)}")
    check_model(options)
    check_least(
        options, max_batch=1, slots=1, request_slots=1, max_waiting=0, max_model_len=2, max_body=1,
        max_unsent=1, max_choices=1, prefill_rows=1, port=0, drain_seconds=0,
    )  # fmt: skip
    for flag in ("body_timeout", "request_timeout", "send_timeout", "drain_seconds"):
        value = getattr(options, flag)
        name = flag.replace("_", "-")
        if not math.isfinite(value) or (value <= 0 and flag != "drain_seconds"):
            raise InputError(f"--{name} must be a number of seconds above 0, got {value:g}")
        if value > MOST_SECONDS:
            raise InputError(f"--{name} must be at most {MOST_SECONDS} seconds, got {value:g}")
    for flag in ("max_batch", "max_waiting"):
        if getattr(options, flag) > MOST_REQUESTS:
            name, value = flag.replace("_", "-"), getattr(options, flag)
            raise InputError(f"--{name} must be at most {MOST_REQUESTS}, got {value}")
    if options.port > 65535:
        raise InputError(f"--port must be at most 65535, got {options.port}")
    check_replicas(options)
    options.api_key = keys(options.api_key)
    options.public = _public(options.public)
    options.allowed_host = [_host(name) for name in options.allowed_host]
    for origin in options.cors_origin:
        if not _ORIGIN.fullmatch(origin):
            raise InputError(
                f"--cors-origin must be like https://a.example:8443 or *, got {origin!r}"
            )
    if options.decoder is not None:
        find_decoder(options.decoder)
    if options.allow_decoders is not None:
        options.allow_decoders = options.allow_decoders.split(",")
        for name in options.allow_decoders:
            find_decoder(name)
    if options.config is not None:
        options.config = str(find_config(options.config, *DECODING))
    return options


def named_models(given: Sequence[str]) -> dict[str, str]:
    """What each --model is, by the name that it is served under: ``ALIAS=NAME``, or a name that is
    both. Raises InputError."""
    found: dict[str, str] = {}
    for one in given:
        alias, equals, name = one.partition("=")
        if not equals or "/" in alias:  # a folder's name may have any sign
            alias = name = one
        if not alias or not name:
            raise InputError(f"--model must be NAME or ALIAS=NAME, got {one!r}")
        if alias in found:
            raise InputError(f"--model: two are called {alias}: give one as ALIAS=NAME")
        found[alias] = name
    return found


def of_model(options: argparse.Namespace, name: str) -> argparse.Namespace:
    """The options as `load_model` takes them, for one of the models."""
    return argparse.Namespace(**vars(options) | {"model": name})


def keys(given: Sequence[str] | None) -> tuple[str, ...]:
    """The keys of the command line, else those of the environment, where spaces stand between them.
    Raises InputError, which does not show them; also for a variable without a key, which was to
    close the server and would leave it open."""
    said = os.environ.get(KEY_VARIABLE)
    if given is None and said is not None and not said.split():
        raise InputError(f"{KEY_VARIABLE} is set and has no key: expected one, or no such variable")
    found = tuple((said or "").split() if given is None else given)
    if not all(key and key.isascii() and key.isprintable() and " " not in key for key in found):
        raise InputError("--api-key must be printable ASCII without spaces")
    return found


def _host(given: str) -> str:
    """A name of the server as requests give it, without case."""
    name = given.lower().removesuffix(".")
    if not _HOST.fullmatch(name):
        raise InputError(
            f"--allowed-host must be a name or address without port, as a.example or [::1], or *, "
            f"got {given!r}"
        )
    return name


def _public(text: str) -> tuple[str, ...]:
    found = tuple(text.split(",")) if text else ()
    if set(found) - set(PUBLIC):
        raise InputError(f"--public must be some of {','.join(PUBLIC)}, got {text!r}")
    return found


def _parser_serve_flags(kinds: list[Kind]) -> argparse.ArgumentParser:
    parser = Parser(
        "python -m decode.serve",
        description=_DESCRIPTION_SERVE_FLAGS,
        epilog=_EPILOG_SERVE_FLAGS,
        usage=argparse.SUPPRESS,  # the description opens with it
        allow_abbrev=False,
    )
    models = parser.add_argument_group("models")
    several = "; may be given several times; ALIAS=NAME serves it under another name"
    add_model(models, "merge", "family", "compile", "tensor-parallel", several=several)
    models.add_argument(
        "--max-model-len",
        type=int,
        metavar="N",
        help="most tokens of a prompt and its response (default: the model's context)",
    )
    decoder = parser.add_argument_group(
        "decoder",
        "What requests get that say nothing else; for a model that the decoder does not fit, its "
        "own default one.",
    )
    tokens = parser.add_argument_group("choice of tokens (all decoders; default: greedy)")
    _add_engine(parser.add_argument_group("engine (each model has its own)"))
    add_replicas(parser.add_argument_group("replicas (extra ray)"))
    _add_limits(parser.add_argument_group("limits"))
    _add_access(parser.add_argument_group("address and access"))
    _add_log(parser.add_argument_group("log, on standard error"))
    decoder.add_argument(
        "--allow-decoders",
        metavar="NAMES",
        help="decoders that requests may name, with commas between them (default: all that fit the "
        "model)",
    )
    add_sampling(tokens, kinds)
    add_decoder(decoder, kinds)
    return parser


def _add_engine(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--max-batch",
        type=int,
        default=16,
        metavar="N",
        help="most requests in a forward (default 16)",
    )
    group.add_argument(
        "--slots",
        type=int,
        metavar="N",
        help="slots of the cache, a position each (default: by batch, context and free memory)",
    )
    group.add_argument(
        "--request-slots",
        type=int,
        metavar="N",
        help="most slots that a request may need, and so rows that it feeds in a forward: prompt, "
        "response, and what its decoder drafts (default: about four times --max-model-len)",
    )
    group.add_argument(
        "--max-waiting",
        type=int,
        default=256,
        metavar="N",
        help="most that wait for room; more are refused with 429 (default 256)",
    )
    group.add_argument(
        "--prefill-rows",
        type=int,
        metavar="N",
        help="most rows of prompts in a forward, so that a long one does not hold up the others "
        "(default: as many whole ones as 4096 rows hold)",
    )
    group.add_argument(
        "--reuse-prefixes",
        action="store_true",
        help="copy the rows of a prompt that an earlier one began with, where that is exact",
    )


def _add_limits(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--max-choices",
        type=int,
        default=128,
        metavar="N",
        help="most answers to a request, prompts times n (default 128)",
    )
    group.add_argument(
        "--max-body",
        type=int,
        default=4_000_000,
        metavar="BYTES",
        help="of a request (default 4000000)",
    )
    group.add_argument(
        "--max-unsent",
        type=int,
        default=16_000_000,
        metavar="BYTES",
        help="of forwards that wait for a client that asked for events and does not read (default "
        "16000000)",
    )
    for name, default, text in (
        ("body", 30.0, "until the whole of a request must have come"),
        ("request", 600.0, "until its answer must be complete"),
        ("send", 30.0, "until a client must have taken what it was sent"),
    ):
        group.add_argument(
            f"--{name}-timeout",
            type=float,
            default=default,
            metavar="SECONDS",
            help=f"{text} (default {default:g})",
        )
    group.add_argument(
        "--drain-seconds",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="how long running requests may go on after SIGTERM (default 30)",
    )


def _add_access(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--host", default="127.0.0.1", help="address (default 127.0.0.1)")
    group.add_argument(
        "--port", type=int, default=8000, help="0 takes any that is free (default 8000)"
    )
    group.add_argument(
        "--api-key",
        action="append",
        metavar="KEY",
        help="a key that requests must bear, may be given several times; better in the environment "
        f"variable {KEY_VARIABLE}, which other users cannot see (default: none needed)",
    )
    group.add_argument(
        "--public",
        default="/health,/ready",
        metavar="PATHS",
        help=f"which of {','.join(PUBLIC)} need no key (default /health,/ready)",
    )
    group.add_argument(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a name that requests may call the server by, may be given several times, * for any "
        "(default: localhost and its addresses where it listens there alone, else any)",
    )
    group.add_argument(
        "--cors-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="another site whose pages may ask, may be given several times (default: none)",
    )


def _add_log(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--log-format", choices=("text", "json"), default="text", help="default text"
    )
    group.add_argument("--log-prompts", action="store_true", help="write prompts into the log, too")
    add_verbose(group)


# The end of a command: what went wrong is a line on standard error and an exit status.

DONE, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130
UNWRITABLE = (errno.EPIPE, errno.ENOSPC, errno.EIO)  # of standard output, where no file is named
SECONDS_TO_SPEAK = 60.0  # that the other ranks leave the first one to say what is wrong

Arguments = ParamSpec("Arguments")


def command(
    *bad_input: type[Exception], interrupted: str, goes_on_unread: bool = False
) -> Callable[[Callable[Arguments, int | None]], Callable[Arguments, int]]:
    """Makes a command's main of what does its work, which may return an exit status of its own.

    InputError, OutputError with it, and the errors of `bad_input` are 2, logits that are not
    finite, a rank that has ended and too little memory are 1, Ctrl-C is 130 and says
    `interrupted`. A reader of standard output who left is 1 without a word, a full disk there 1
    with one; goes_on_unread: they end nothing, since what the command makes is files. Of several
    ranks the first speaks for all.
    """

    bad: tuple[type[Exception], ...] = (InputError, *bad_input)
    caught: tuple[type[Exception], ...] = (OSError, *bad)

    def decorate(work: Callable[Arguments, int | None]) -> Callable[Arguments, int]:
        @functools.wraps(work)
        def main(*args: Arguments.args, **kwargs: Arguments.kwargs) -> int:
            try:
                with unread_output(goes_on=goes_on_unread):
                    status = work(*args, **kwargs) or DONE
                    sys.stdout.flush()  # at Python's end it would be a traceback
                    return status
            except caught as error:
                if _is_of_standard_output(error):
                    return _end_of_output(error)
                if not isinstance(error, bad):
                    raise
                if rank() > 0:  # the first rank says it: torchrun ends all when one has ended
                    time.sleep(SECONDS_TO_SPEAK)
                return say(f"error: {error}", BAD_INPUT)
            except (NonFiniteLogitsError, RankError) as error:
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


def _is_of_standard_output(error: Exception) -> TypeGuard[OSError]:
    return isinstance(error, OSError) and error.filename is None and error.errno in UNWRITABLE


def _end_of_output(error: OSError) -> int:
    drop(sys.stdout)
    if error.errno == errno.EPIPE:
        return FAILED
    return say(f"error: standard output: {error.strerror}", FAILED)


def say(message: str, status: int = DONE) -> int:
    """A message on standard error; the exit status given."""
    print(message, file=sys.stderr, flush=True)
    return status


# --tensor-parallel: the ranks behind the first follow it instead of doing the command's work.


def followed(options: argparse.Namespace, each: Iterable[argparse.Namespace] = ()) -> bool:
    """On a rank behind the first: load the models that it loads, in its order, follow it until it
    has ended, and say True. each: the options of each model, where there are several. Raises
    InputError, of which the first rank speaks, and RankError."""
    if options.tensor_parallel == 1 or rank() == 0:
        return False
    from d2f.leading import follow

    for one in each or [options]:
        check_options(one)
        load(one)
    follow()
    return True


# The command line of `python -m decode.batch`; parsing it does not import torch.

_DESCRIPTION_BATCH_FLAGS = """\
python -m decode.batch --model tiny-d2f --input prompts.jsonl --output answers

Answers every row of a file or data set: a folder with one file of the input's kind, in its order,
each row with its own fields and text, tokens, forwards and finish_reason. The same command again
goes on where it stopped. docs/batch.md says what a row may be and what the folder holds.
"""
_EPILOG_BATCH_FLAGS = """\
exit status: 0 done; 2 bad input, found before any work, or no row could be answered;
130 interrupted, what is answered stays and the same command goes on.
"""


def parse_batch_flags(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line as a namespace. Raises InputError, SystemExit after --help."""
    options = _parser_batch_flags(offered(arguments)).parse_args(arguments)
    check_model(options)
    check_least(options, batch_size=1)
    check_workers(options)
    if options.config is not None:
        options.config = str(find_config(options.config, *DECODING))
    return options


def _parser_batch_flags(kinds: list[Kind]) -> argparse.ArgumentParser:
    parser = Parser(
        "python -m decode.batch",
        description=_DESCRIPTION_BATCH_FLAGS,
        epilog=_EPILOG_BATCH_FLAGS,
        usage=argparse.SUPPRESS,  # the description opens with it
        allow_abbrev=False,
    )
    add_model(parser.add_argument_group("model"), "merge", "family", "compile", "tensor-parallel")
    _add_input(parser.add_argument_group("input"))
    decoder = parser.add_argument_group(
        "decoder", "An option that the chosen decoder does not have is an error."
    )
    tokens = parser.add_argument_group("choice of tokens (all decoders; default: greedy)")
    _add_running_batch_flags(parser.add_argument_group("running and output"))
    add_sampling(tokens, kinds)
    add_decoder(decoder, kinds)  # last, so that a clash is known for one with the command's own
    return parser


def _add_input(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--input",
        required=True,
        metavar="FILE",
        help="rows: JSONL, parquet (by its ending), or a data set, which is a folder of "
        "save_to_disk or a hub name",
    )
    group.add_argument("--split", metavar="NAME", help="of a data set (default train)")
    group.add_argument("--dataset-config", metavar="NAME", help="of a data set that has several")
    group.add_argument(
        "--column",
        metavar="NAME",
        help="what is asked: text, chat messages or token ids (default: the first of messages, "
        "prompt, question and ids that a row has)",
    )
    group.add_argument(
        "--raw",
        action="store_true",
        help="take text prompts as they are, without the chat template",
    )


def _add_running_batch_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--output",
        required=True,
        metavar="DIR",
        help="folder for the answers; one of another run is refused",
    )
    group.add_argument(
        "--batch-size",
        type=int,
        default=32,
        metavar="N",
        help="rows that each worker decodes together, at least 1; the tokens do not depend on it "
        "(default 32)",
    )
    add_workers(group)
    add_verbose(group)


# The command line of `python -m decode.evaluate`; parsing it does not import torch.

_DESCRIPTION_EVALUATION_FLAGS = """\
python -m decode.evaluate --model tiny-d2f --problems 500

Decodes problems of tasks with one model and one decoder, and says for each task: accuracy with its
95 % interval, forwards, visible tokens (before the first end token) and tokens per forward; of
several samples a problem pass@k and the majority vote too. The tasks are the tiny ones, task files,
or a file or data set of your own with a judge:

  --tasks gsm8k    --tasks my_task.yaml    --data problems.jsonl --judge numeric
"""
_EPILOG_EVALUATION_FLAGS = """\
exit status: 0 done; 1 the model gave NaN or infinite logits; 2 bad input, found before any work;
130 interrupted, the answers in --output stay and the same command goes on.
"""


def parse_evaluation_flags(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line as a namespace; `tasks` are `d2f.tasks.Task`, `pass_at` whole numbers.
    Raises InputError, SystemExit after --help."""
    options = _parser_evaluation_flags(offered(arguments)).parse_args(arguments)
    check_model(options)
    check_least(options, problems=1, batch_size=1, judge_jobs=1)
    check_workers(options)
    check_samples("--samples", options.samples)
    options.pass_at = _pass_at(options.pass_at, options.samples)
    options.tasks = chosen_tasks(options)
    if options.config is not None:
        options.config = str(find_config(options.config, *DECODING))
    return options


def _parser_evaluation_flags(kinds: list[Kind]) -> argparse.ArgumentParser:
    parser = Parser(
        "python -m decode.evaluate",
        description=_DESCRIPTION_EVALUATION_FLAGS,
        epilog=_EPILOG_EVALUATION_FLAGS,
        usage=argparse.SUPPRESS,  # the description opens with it
        allow_abbrev=False,
    )
    model = parser.add_argument_group("model")
    add_model(model, "merge", "family", "compile", "tensor-parallel")
    _add_problems(parser.add_argument_group("problems"))
    decoder = parser.add_argument_group(
        "decoder", "An option that the chosen decoder does not have is an error."
    )
    tokens = parser.add_argument_group("choice of tokens (all decoders; default: greedy)")
    _add_running_evaluation_flags(parser.add_argument_group("running and output"))
    add_sampling(tokens, kinds)
    add_decoder(decoder, kinds)  # last, so that a clash is known for one with the command's own
    return parser


def _add_problems(group: argparse._ArgumentGroup) -> None:
    add_tasks(group)
    group.add_argument(
        "--split",
        default="heldout",
        choices=("tuning", "heldout", "all"),
        help="which problems (default heldout); all: every row of a task's data, also those that "
        "tuning may see",
    )
    group.add_argument(
        "--problems",
        type=int,
        metavar="N",
        help="of each task, at least 1 (default: 500 generated ones, of data all that there are)",
    )
    group.add_argument(
        "--samples",
        type=int,
        default=1,
        metavar="N",
        help="answers a problem, each with a seed of its own: several need a --temperature "
        "(default 1)",
    )
    group.add_argument(
        "--pass-at",
        default="",
        metavar="LIST",
        help="1,10: the chance that one of so many samples is right, from --samples that are at "
        "least as many (the unbiased estimator of the HumanEval paper)",
    )


def _add_running_evaluation_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--batch-size",
        type=int,
        default=32,
        metavar="N",
        help="problems decoded together, at least 1; the tokens do not depend on it (default 32)",
    )
    add_workers(group)
    group.add_argument(
        "--output",
        metavar="DIR",
        help="folder for answers.jsonl (every answer as it comes; the same command again goes on "
        "where it stopped) and report.json",
    )
    group.add_argument("--json", type=Path, metavar="FILE", help="file for the numbers alone")
    group.add_argument(
        "--judge-jobs",
        type=int,
        metavar="N",
        help="processes of the judges python and math, each for a response, at least 1; the "
        "verdicts do not depend on it (default: a core each, 8 at most)",
    )
    add_verbose(group)


def _pass_at(text: str, samples: int) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")] if text else []
    except ValueError:
        found = [0]
    if len(set(found)) < len(found) or not all(1 <= k <= samples for k in found):
        raise InputError(
            f"--pass-at must be whole numbers from 1 to --samples {samples}, each once, as 1,10: "
            f"got {text!r}"
        )
    return found


# The command line of `python -m decode.tune`; parsing it does not import torch.

_DESCRIPTION_TUNING_FLAGS = """\
python -m decode.tune --tasks story --output runs/tune

Searches the settings of a decoder on the tuning split of a task, draws the frontier of accuracy
against tokens per second, chooses the fastest setting that is accurate enough, measures it on
held-out problems, and writes it as YAML for `python -m decode.pipeline --config`.
"""
_EPILOG_TUNING_FLAGS = """\
The same command again goes on where it stopped. docs/tuning.md says how it chooses.
exit status: 0 done; 1 the model gave NaN or infinite logits; 2 bad input, found before any work;
130 interrupted, what was measured stays.
"""
Number = int | float


def parse_tuning_flags(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line as a namespace; `tasks` is the list of tasks, `lists` the values by option
    that were given.

    Raises InputError for a bad command line, SystemExit after --help.
    """
    kinds = offered(arguments)
    options = _parser_tuning_flags(kinds).parse_args(arguments)
    check_workers(options)
    options.tasks = chosen_tasks(options)
    given = {name: getattr(options, name) for kind in kinds for name in searchable(kind)}
    options.lists = {name: values for name, values in given.items() if values is not None}
    if options.figures:
        require_matplotlib("--no-figures")
    return options


def _parser_tuning_flags(kinds: list[Kind]) -> argparse.ArgumentParser:
    parser = Parser(
        "python -m decode.tune",
        description=_DESCRIPTION_TUNING_FLAGS,
        epilog=_EPILOG_TUNING_FLAGS,
        usage=argparse.SUPPRESS,  # the description opens with it
        allow_abbrev=False,
    )
    group = parser.add_argument_group("model and tasks")
    add_model(group, "family", "compile")
    add_tasks(group, "; each is tuned on its own")
    settings = parser.add_argument_group(
        "settings to search",
        "Lists, with commas; every combination is a setting. An option that the decoder does not "
        "have is an error.",
    )
    _add_search(parser.add_argument_group("search and choice"))
    _add_output(parser.add_argument_group("final measurement and output"))
    _add_settings(settings, kinds)
    return parser


def _add_settings(group: argparse._ArgumentGroup, kinds: list[Kind]) -> None:
    about = f"default d2f; {summaries()}"
    group.add_argument("--decoder", default="d2f", metavar="NAME", help=about)
    for name, having in options_by_name(kinds).items():
        kinds_having = [(kind, option) for kind, option in having if name in searchable(kind)]
        if kinds_having:
            reads = _numbers(float if having[-1][1].kind is float else int)
            tried = [
                f"{kind.name} {','.join(f'{value:g}' for value in default_grid(kind)[name])}"
                for kind, _ in kinds_having
                if name in default_grid(kind)
            ]
            said = f"; searched by default: {'; '.join(tried)}" if tried else ""
            text = f"{help_of(kinds_having, len(kinds))}{said}"
            add_flag(group, kinds_having, text, type=reads, metavar="LIST")


def _add_search(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--search",
        default="halving",
        choices=("halving", "grid"),
        help="halving: all settings on few problems, the best on more (default); grid: all on all",
    )
    group.add_argument(
        "--problems",
        type=int,
        default=200,
        metavar="N",
        help="tuning problems at the last rung (default 200)",
    )
    group.add_argument(
        "--eta", type=int, default=3, metavar="N", help="halving: 1/N go on (default 3)"
    )
    group.add_argument(
        "--budget",
        type=float,
        metavar="SECONDS",
        help="of measuring in the search, over all runs into this output, shared equally by the "
        "tasks: after a first look at every setting, which it always takes, those that promise "
        "most go on, as many as there are seconds for (default: no limit)",
    )
    bound = group.add_mutually_exclusive_group()
    bound.add_argument(
        "--within",
        type=float,
        default=1.0,
        metavar="POINTS",
        help="choose the fastest setting within so many percentage points of the most accurate "
        "one (default 1)",
    )
    bound.add_argument(
        "--min-accuracy",
        type=float,
        metavar="SHARE",
        help="choose the fastest setting with at least this accuracy, in [0, 1]",
    )
    group.add_argument(
        "--batch-size",
        type=int,
        default=1,
        metavar="N",
        help="problems decoded together; speed is that of such batches (default 1)",
    )
    group.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of the problems and draws (default 0)"
    )


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--heldout",
        type=int,
        default=500,
        metavar="N",
        help="held-out problems of the final measurement (default 500)",
    )
    group.add_argument(
        "--repetitions",
        type=int,
        default=3,
        metavar="N",
        help="of the final measurement, for its timing (default 3)",
    )
    group.add_argument(
        "--output",
        required=True,
        metavar="DIR",
        help="folder for measurements.jsonl, the frontier, the report and a YAML a task",
    )
    group.add_argument(
        "--figures",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="draw frontier.png and frontier.svg, which needs matplotlib (default)",
    )
    add_workers(group)
    add_verbose(group)


def _numbers(kind: type[int] | type[float]) -> Callable[[str], list[Number]]:
    """Reads numbers with commas between them; none for an empty text, which is refused later."""

    def read(text: str) -> list[Number]:
        return [kind(part) for part in text.split(",")] if text.strip() else []

    read.__name__ = f"list of {kind.__name__}"
    return read


# Loading the model of a run, and the identity of its weights.


def check_options(options: argparse.Namespace) -> None:
    """Raise InputError for a model, dtype, device or quantisation that cannot be; nothing is loaded
    for it."""
    name = options.model
    owner, *rest = name.split("/")
    is_hub_name = len(rest) == 1 and rest[0] and owner not in ("", ".", "..", "~")
    if not os.path.isdir(resolve(name)) and not is_hub_name:
        raise InputError(
            f"--model {name}: no such folder, no bundled model ({', '.join(names()) or 'none'}), "
            "and no hub name, which is owner/name"
        )
    if options.dtype is not None:
        # Only whether it is a dtype at all; the device is not known to work yet.
        parse_dtype(options.dtype, torch.device("cpu"))
    try:
        parse_threads(options.threads)
    except InputError as error:
        raise InputError(f"--{error}") from error
    if options.address is not None:
        return  # its machines may have other devices than this one
    try:
        device = parse_device(options.device)
    except InputError as error:
        raise InputError(f"--{error}") from error
    if options.tensor_parallel > 1:
        check_parallel(options.tensor_parallel, device)
    if device.type == "meta":
        raise InputError("--device meta: no such device here: it holds shapes and no weights")
    if options.quantize is not None:
        try:
            check_quantize(options.quantize, device, parse_dtype(options.dtype, device))
        except InputError as error:
            raise InputError(f"--{error}") from error


def outline(
    name: str,
    adapter: str | None = None,
    family: str | None = None,
    tensor_parallel: int = 1,
) -> DiffusionModel:
    """A model without its weights, which are neither read nor fetched: contract (the adapter's
    where it has one), tokenizer, context. What a decoder and prompts are checked against before
    the weights are loaded. Raises InputError."""
    name = resolve(name)
    base = base_of_adapter(str(folder_of(name, weights=False)))
    if base is not None and adapter is None:
        name, adapter = base, name  # an adapter alone, on the base that it names
    model = d2f.load(name, family=family, device="meta", tensor_parallel=tensor_parallel)
    if adapter is not None:
        contract = Contract.load(folder_of(resolve(adapter), weights=False))
        model.contract = contract or model.contract
    return model


def load(options: argparse.Namespace) -> tuple[DiffusionModel, str]:
    """The model that the options name, its adapter merged and compiled if asked, and the hash of
    the weights before that (of quantised ones, after merging). Raises InputError."""
    model = d2f.load(
        options.model,
        adapter=options.adapter,
        family=options.family,
        dtype=options.dtype,
        device=options.device,
        quantize=options.quantize,
        progress=options.verbose,
        tensor_parallel=options.tensor_parallel,
        threads=options.threads,
    )
    if options.quantize is not None and (slow := slowness(options.quantize, model.device)):
        say(f"notice: {slow}")
    if model.is_adapted and options.adapter is None:
        options.adapter = options.model  # an adapter alone, on the base that it names
    # Before merging and compiling: with or without them it is the same identity.
    identity = weights_hash(model)
    if options.merge:
        model.merge_adapter()
    if options.compile:
        model.compile()
    return model, identity


def weights_hash(model: DiffusionModel) -> str:
    """Identity of loaded weights, adapter included: a hash over the name, shape and first, middle
    and last row of every tensor, or of the parts of them that this process has."""
    digest = hashlib.sha256()
    own = {name: own_part(tensor) for name, tensor in model.backbone.state_dict().items()}
    for name, tensor in sorted(stored_tensors(own)):
        rows = tensor.reshape(-1, tensor.shape[-1]) if tensor.ndim else tensor.reshape(1, 1)
        # Three rows of each tensor: all weights of an 8B model are gigabytes to hash.
        sample = rows[[0, len(rows) // 2, -1]].cpu().contiguous()  # [3, columns]
        digest.update(f"{name}{list(tensor.shape)}".encode())
        digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def stored_tensors(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor; for a quantised weight those that it is made of, values and scales."""
    for name, tensor in tensors.items():
        if is_traceable_wrapper_subclass(tensor):
            parts, _ = tensor.__tensor_flatten__()
            yield from ((f"{name}.{part}", getattr(tensor, part)) for part in parts)
        else:
            yield name, tensor
