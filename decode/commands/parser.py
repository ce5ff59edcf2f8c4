"""What the command lines have in common; imports no torch."""

from __future__ import annotations

import argparse
import os
from typing import Any, NoReturn

from d2f.command import CommandParser
from d2f.errors import InputError, repr_of
from d2f.models import names
from d2f.rank_number import check_processes
from d2f.tasks import DEFAULT_TASKS, Task, find_tasks, task_of_data
from decode.reporting.extras import require_ray

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
        "help": "of a forward on a CPU: N, or auto, which measures what is fastest as it runs, up "
        "to the processors that this process may use (default: auto, up to OMP_NUM_THREADS where "
        "that is set)",
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
