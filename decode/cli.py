"""Options that command lines share, the decoder that they ask for, and the model; without torch."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Suppress, UseAppendAction, arg

from d2f.command import require_extra, say
from d2f.config import read_mapping
from d2f.contract import FILE_NAME, Contract
from d2f.device import check_processes, rank
from d2f.errors import InputError, did_you_mean, repr_of
from d2f.flags import (
    Switch,
    Verbose,
    check_device_name,
    check_family_name,
    check_least,
    check_model_name,
)
from d2f.models import resolve
from d2f.shipped import DECODING, find_config
from d2f.tasks import DEFAULT_TASKS, Task, find_tasks, task_of_data
from d2f.tasks.judges import CodeExecution
from decode.decoders import DECODERS, Decoder, default_decoder, find_decoder
from decode.decoders.base import Option, options_of

if TYPE_CHECKING:
    from d2f.model import DiffusionModel
    from d2f.parts import Outline

DEFAULT_MODEL = "tiny-d2f"
MOST_SAMPLES = 10_000  # answers a prompt
DECODER = "default: what suits the model"
Kind = type[Decoder]
DType = Literal["auto", "float32", "fp32", "bfloat16", "bf16", "float16", "fp16"]
Quantization = Literal["int8", "int8-weight", "int4-weight", "nf4", "fp8"]


# Extras: what a command needs beyond the package's own requirements.


def require_matplotlib(otherwise: str = "") -> None:
    """Raise InputError if no figure can be drawn here. otherwise: the option that draws none."""
    require_extra("plot", "a figure", "matplotlib", otherwise=otherwise and f", or {otherwise}")


# Groups of flags. A command's options are a dataclass that inherits the groups that it has.


@dataclass(kw_only=True)
class ModelOptions:
    """Choose the model and how it is loaded."""

    model: Annotated[str, arg(metavar="NAME")] = DEFAULT_MODEL
    """folder, hub name or bundled model (`d2f info` lists them)"""
    adapter: Annotated[str | None, arg(metavar="NAME")] = None
    """LoRA adapter for it: folder or hub name"""
    merge: bool = True
    """fold the adapter into the weights"""
    family: Annotated[str | None, arg(metavar="NAME")] = None
    """llada, dream, sdar, wedlm, causal (default: its own)"""
    mask_id: Annotated[int | None, arg(metavar="ID")] = None
    """the mask token's id (default: the checkpoint's)"""
    end_ids: Annotated[str | None, arg(metavar="ID,ID")] = None
    """that end an answer (default: the checkpoint's)"""
    dtype: Annotated[DType | None, arg(metavar="NAME")] = None
    """float32, bfloat16, float16 or auto: what is fast (default: float32 on a CPU, else
    bfloat16)"""
    quantize: Annotated[Quantization | None, arg(metavar="NAME")] = None
    """to int8, int8-weight, int4-weight, nf4 or fp8"""
    device: Annotated[str | None, arg(metavar="NAME")] = None
    """cpu, cuda, cuda:1 (default: a GPU if there is one)"""
    threads: Annotated[int | Literal["auto"] | None, arg(metavar="N|auto")] = None
    """of a CPU (default: auto, up to OMP_NUM_THREADS)"""
    compile: Switch = False
    """compile the forwards: slower to start, then faster"""
    tensor_parallel: Annotated[int, arg(metavar="N")] = 1
    """processes of torchrun that share it"""
    verbose: Verbose = False

    described: Suppress[Any] = field(default=None, compare=False, repr=False)
    # What `checked_outline` read of the checkpoint, which `load` need not read again.

    @property
    def overrides(self) -> dict[str, Any]:
        """Return what `d2f.load` is given beside the checkpoint. Raises InputError."""
        ends = [] if self.end_ids is None else self.end_ids.split(",")
        if not all(end.strip().isdecimal() for end in ends):
            raise InputError(f"--end-ids must be whole numbers, as 2,13: got {self.end_ids!r}")
        return {
            "adapter": self.adapter,
            "family": self.family,
            "mask_id": self.mask_id,
            "end_ids": [int(end) for end in ends] or None,
        }

    def check(self) -> None:
        """Raise InputError for a model that cannot be, or flags that do not go together."""
        _ = self.overrides
        check_model_name(self.model)
        if self.adapter is not None:
            check_model_name(self.adapter, "--adapter")
        check_least(self, tensor_parallel=1, mask_id=0)
        check_family_name(self.family)
        check_device_name(self.device)
        if isinstance(self.threads, int):
            check_least(self, threads=1)
        apart, shared = not self.merge, self.tensor_parallel > 1
        for what, is_so in {
            "--no-merge without --adapter": apart and self.adapter is None,
            "--quantize with --no-merge": apart and self.quantize is not None,
            "--compile with --no-merge": apart and self.compile,
            "--no-merge with --tensor-parallel": apart and shared,
            "--compile with --tensor-parallel": self.compile and shared,
        }.items():
            if is_so:
                raise InputError(f"{what} is not possible")
        if shared:
            check_processes(self.tensor_parallel)


@dataclass(kw_only=True)
class OneProcessModel(ModelOptions):
    """Choose the model and how it is loaded."""

    tensor_parallel: Suppress[int] = 1


@dataclass(kw_only=True)
class WorkerOptions:
    """Choose the processes that decode."""

    workers: Annotated[int, arg(metavar="N")] = 1
    """processes (more need the extra ray)"""
    address: Annotated[str | None, arg(metavar="HOST:PORT")] = None
    """Ray cluster of the --workers (default: RAY_ADDRESS, else this machine)"""

    if TYPE_CHECKING:  # of the model's options, which every command with workers has
        tensor_parallel: int
        device: str | None

    def check(self) -> None:
        """Raise InputError unless there can be so many workers; with one there is no cluster."""
        check_least(self, workers=1)
        if self.workers == 1:
            if self.address is not None:
                raise InputError("--address is of a Ray cluster, for more --workers than 1")
            return
        require_ray()
        self.address = self.address or os.environ.get("RAY_ADDRESS")
        if self.tensor_parallel > 1:
            raise InputError("--tensor-parallel is not for several --workers")
        if ":" in (self.device or ""):
            raise InputError(
                f"--device {self.device}: several --workers have a GPU each: expected cuda, which "
                "CUDA_VISIBLE_DEVICES may narrow"
            )


@dataclass(kw_only=True)
class BatchOptions:
    """Size the batches."""

    batch_size: Annotated[int, arg(metavar="N")] = 32
    """prompts decoded together"""
    max_rows: Annotated[int | None, arg(metavar="N")] = None
    """speculate up to so many rows (default: by device)"""

    def check(self) -> None:
        """Raise InputError for a value out of range."""
        check_least(self, batch_size=1, max_rows=1)


@dataclass(kw_only=True)
class TaskOptions:
    """Choose the problems."""

    tasks: Annotated[str | None, arg(metavar="NAMES")] = None
    """with commas: tasks, task files, or those of `d2f configs`; `d2f info MODEL` says what a
    bundled model is good at (default: story,countdown,sudoku)"""
    data: Annotated[str | None, arg(metavar="FILE")] = None
    """problems of your own: JSONL, parquet or a data set"""
    judge: Annotated[str | None, arg(metavar="NAME")] = None
    """of --data: exact, numeric, choice, math, contains or module:function"""
    data_files: Annotated[str | None, arg(metavar="SPLIT=FILE")] = None
    """local files in place of the data set of --tasks"""
    allow_code_execution: Switch = False
    """run code that the model writes, in a sandbox"""
    unsafe: Switch = False
    """also where the sandbox leaves it network or files"""

    @cached_property
    def chosen(self) -> tuple[Task, ...]:
        """The tasks that the flags name. Raises InputError."""
        allowed: CodeExecution = "unsafe" if self.unsafe else self.allow_code_execution
        if (self.data is None) != (self.judge is None):
            raise InputError("--data and --judge go together: expected both or neither")
        pairs = [] if self.data_files is None else self.data_files.split(",")
        files = dict(pair.partition("=")[::2] for pair in pairs)
        if len(files) < len(pairs) or not all(map(all, files.items())):
            raise InputError(
                "--data-files must be as test=PATH,train=PATH, each split once, got "
                f"{repr_of(self.data_files)}"
            )
        if self.data is None:
            names = DEFAULT_TASKS if self.tasks is None else self.tasks.split(",")
            try:
                return find_tasks(names, allow_code_execution=allowed, data_files=files)
            except InputError as error:
                raise InputError(f"--tasks: {error}") from error
        if self.tasks is not None or files:
            raise InputError("--data is a task of its own: leave out --tasks and --data-files")
        assert self.judge is not None
        return (task_of_data(self.data, self.judge, allow_code_execution=allowed),)


@dataclass(kw_only=True)
class DecoderOptions:
    """Choose the decoder and its options: one that it does not have is an error."""

    decoder: Annotated[str | None, arg(metavar="NAME")] = None
    """one of these (default: what suits the model)"""
    config: Annotated[str | None, arg(metavar="FILE")] = None
    """YAML of its options, or a name of `d2f configs`"""
    stop: Annotated[tuple[str, ...], UseAppendAction, arg(metavar="TEXT")] = ()
    """end the response before it; may be given again"""
    given: Suppress[dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def more(cls, words: Sequence[str]) -> list[Any]:
        """Make a flag of each option of a decoder."""
        return [decoder_flag(option, words) for option in decoder_options(words)]

    @classmethod
    def about(cls, words: Sequence[str]) -> str:
        """Describe the decoder that the words name, else all."""
        if (named := decoder_named(words)) is not None:
            return f"{named}: {find_decoder(named).summary}"
        lines = [f"- {name}: {kind.summary}" for name, kind in DECODERS.items()]
        return "\n".join(
            ["--decoder NAME --help shows one's options; module:Class is one of yours:", *lines]
        )

    def check(self) -> None:
        """Raise InputError for a decoder or configuration that is not there."""
        if self.decoder is not None:
            find_decoder(self.decoder)
        if self.config is not None:
            self.config = str(find_config(self.config, *DECODING))
        if self.stop:
            self.given["stop"] = self.stop


def require_ray() -> None:
    """Raise InputError if there can be no more than one process here."""
    require_extra("ray", "more than one process", "ray")


def check_samples(flag: str, count: int) -> None:
    """Raise InputError unless so many answers a prompt can be made."""
    if not 1 <= count <= MOST_SAMPLES:
        raise InputError(f"{flag} must lie in [1, {MOST_SAMPLES}], got {repr_of(count)}")


def decoder_options(words: Sequence[str], default: str | None = None) -> list[Option]:
    """List the decoders' options that a command line may have, one a name, those that all decoders
    have last: of all decoders, and of one of the user's own that the words name. --help is about
    the named decoder, or the default one, alone. Raises InputError."""
    named = decoder_named(words) or default
    kinds = [*DECODERS.values(), *([] if named is None else [find_decoder(named)])]
    found = {option.name: option for kind in kinds for option in options_of(kind)}
    every = set.intersection(*({option.name for option in options_of(kind)} for kind in kinds))
    if asks_help(words):
        own = every if named is None else {option.name for option in options_of(kinds[-1])}
        found = {name: option for name, option in found.items() if name in own}
    return sorted(found.values(), key=lambda option: option.name in every)


def decoder_named(words: Sequence[str]) -> str | None:
    """Return what the words of a command line name after --decoder, None for nothing."""
    named = [after for word, after in pairwise(words) if word == "--decoder"]
    named += [word.partition("=")[2] for word in words if word.startswith("--decoder=")]
    return named[-1] if named else None


def asks_help(words: Sequence[str]) -> bool:
    return bool({"-h", "--help"} & {*words})


def decoder_flag(option: Option, words: Sequence[str] = ()) -> tuple[str, Any, Any]:
    """Make a field for `make_dataclass` of an option, None where it is not given."""
    said, metavar = f"{option.help} (default: {option.shown})", option.unit
    kind: Any = option.kind
    if isinstance(kind, tuple):
        said, kind, metavar = f"{', '.join(kind)}: {said}", Literal[kind], "NAME"
    about = arg(metavar=None if kind is bool else metavar, help=said, help_behavior_hint="")
    if kind is bool and asks_help(words):  # of --x and --no-x what changes something
        return option.name, Annotated[Switch, about], field(default=option.default)
    return option.name, Annotated[kind | None, about], None


# The decoder of a run and its options: the command line comes before a YAML file.


@dataclass(frozen=True)
class DecoderSettings:
    """The decoder's name, None where none was named, and the options that were given."""

    name: str | None
    given: dict[str, Any]

    def check(self, lengths: Iterable[int], model: ModelOptions | None = None) -> None:
        """Raise InputError where responses of these lengths, or of the one that was given, could
        not be decoded with the options. It comes before torch is loaded: where the model's contract
        is not at hand, some decoder must take them."""
        contract = None if model is None else _peek(model.adapter or model.model)
        if self.name is not None:
            kinds = [find_decoder(self.name)]
        elif contract is not None:
            kinds = [default_decoder(contract)]
        else:
            kinds = [kind for kind in DECODERS.values() if {*self.given} <= {*option_names(kind)}]
        if not kinds:
            raise InputError(f"no decoder has all of the options {', '.join(self.given)}")
        lengths = [self.given["max_new_tokens"]] if "max_new_tokens" in self.given else [*lengths]
        faults = []
        for kind in kinds:
            try:
                for length in lengths:
                    self._build(kind, length, contract)
                return
            except InputError as error:
                faults.append(error)
        raise faults[0]

    def decoder(self, model: DiffusionModel, length: int | None = None) -> Decoder:
        """Return the decoder that was named, else the model's default one, with every option
        resolved. length: of the longest response, in tokens. Raises InputError."""
        contract = model.contract
        kind = default_decoder(contract) if self.name is None else find_decoder(self.name)
        return self._build(kind, length, contract)

    def for_task(self, model: DiffusionModel, task: Task) -> Decoder:
        """Return the decoder of a task's problems: with its length where none was given, and its
        stop strings beside those that were. Raises InputError."""
        length = self.given.get("max_new_tokens") or task.response_length
        decoder = self.decoder(model, length)
        return replace(decoder, stop=(*task.stop, *decoder.stop))

    def _build(self, kind: Kind, length: int | None, contract: Contract | None = None) -> Decoder:
        known = option_names(kind)
        for name in self.given:
            if name not in known:
                default = ", the default of this model," if self.name is None else ""
                raise InputError(
                    f"the decoder {kind.name}{default} has no option {name}"
                    f"{did_you_mean(name, known)}; it has {', '.join(known)}"
                )
        # Defaults that a model was trained with need the model.
        values = self.given if contract is None else kind.with_model_defaults(self.given, contract)
        return kind(**values if length is None else values | {"max_new_tokens": length})


def _peek(model: str) -> Contract | None:
    """Read a contract where it is a file of this machine; what is wrong with it `load` says."""
    with suppress(OSError, ValueError, TypeError):
        return Contract(**json.loads(Path(resolve(model), FILE_NAME).read_bytes()))
    return None


def option_names(decoder: Kind) -> list[str]:
    """Return the names of a decoder's options."""
    return [field.name for field in fields(decoder)]


def read_settings(options: DecoderOptions) -> DecoderSettings:
    """Return the decoder settings of a command line. Raises InputError."""
    values = read_mapping(options.config) if options.config is not None else {}
    name, given = split(values, options.config or "", options.decoder)
    return DecoderSettings(options.decoder or name, given | options.given)


def split(
    values: dict[str, Any], where: str, decoder: str | None = None
) -> tuple[str | None, dict[str, Any]]:
    """Split a mapping into the decoder's name, None where there is none, and its options.

    where: named in errors. decoder: one that is named elsewhere. Raises InputError for a key that
    no decoder has.
    """
    kinds = list(DECODERS.values())
    try:
        named = (values.get("decoder"), decoder)
        kinds += [find_decoder(name) for name in named if name is not None]
    except InputError as error:
        raise InputError(f"{where}: {error}") from error
    known = {"decoder", *(name for kind in kinds for name in option_names(kind))}
    for key in values:
        if key not in known:
            near = did_you_mean(key, known)
            raise InputError(f"{where}: no decoder has an option {str(key)[:60]}{near}")
    return values.get("decoder"), {key: values[key] for key in values if key != "decoder"}


# The model of a run, and the identity of its weights. From here on torch is loaded.


def check_options(options: ModelOptions) -> None:
    """Raise InputError for a device that is not there, or that has not what the options ask of it;
    nothing is loaded for it."""
    from d2f.device import parse_device, parse_dtype
    from d2f.quantize import check_quantize
    from d2f.tensor_parallel import check_parallel

    if getattr(options, "address", None) is not None:
        return  # its machines may have other devices than this one
    try:
        device = parse_device(options.device)
        if device.type == "meta":
            raise InputError("device meta: it holds shapes and no weights")
        if options.quantize is not None:
            check_quantize(options.quantize, device, parse_dtype(options.dtype, device))
    except InputError as error:
        raise InputError(f"--{error}") from error
    if options.tensor_parallel > 1:
        check_parallel(options.tensor_parallel, device)


def checked_outline(options: ModelOptions) -> DiffusionModel:
    """Check the device, and outline the model that the options name. Raises InputError."""
    from d2f.loading import describe

    check_options(options)
    described = describe(options.model, **options.overrides)
    if getattr(options, "workers", 1) == 1:  # several may be on other machines
        options.described = described
    return outline(described, tensor_parallel=options.tensor_parallel)


def outline(
    model: str | Outline,
    adapter: str | None = None,
    family: str | None = None,
    tensor_parallel: int = 1,
) -> DiffusionModel:
    """Load a model without its weights, which are neither read nor fetched: its contract (the
    adapter's where it has one), tokenizer and context, which a decoder and prompts are checked
    against. Raises InputError."""
    import d2f
    from d2f.loading import describe

    shape = model
    if isinstance(shape, str):
        shape = describe(shape, adapter=adapter, family=family)
    shape = replace(shape, adapter=None, base_contract=shape.contract)
    return d2f.load(shape, device="meta", tensor_parallel=tensor_parallel)


def load(options: ModelOptions) -> tuple[DiffusionModel, str]:
    """Load the model that the options name, its adapter merged and compiled if asked; return it and
    the hash of the weights before that (of quantised ones, after merging). Raises InputError."""
    import d2f
    from d2f.quantize import slowness

    described, options.described = options.described, None
    model = d2f.load(
        described or options.model,
        **({} if described else options.overrides),
        dtype=options.dtype,
        device=options.device,
        quantize=options.quantize,
        progress=options.verbose or sys.stderr.isatty(),
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


def followed(options: ModelOptions, each: Iterable[ModelOptions] = ()) -> bool:
    """Follow the first rank, on a rank behind it: load the models that it loads, in its order, do
    what it does until it has ended, and return True. each: the options of each model, where there
    are several. Raises InputError, which the first rank reports, and RankError."""
    if options.tensor_parallel == 1 or rank() == 0:
        return False
    from d2f.tensor_parallel import follow

    for one in each or [options]:
        check_options(one)
        load(one)
    follow()
    return True


def weights_hash(model: DiffusionModel) -> str:
    """Hash the name, shape and first, middle and last row of every loaded tensor, adapter included,
    or of the parts of them that this process has; of a quantised weight its values and scales."""
    import torch
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    from d2f.tensor_parallel import own_part

    digest = hashlib.sha256()
    for name, whole in sorted(model.backbone.state_dict().items()):
        tensor = own_part(whole)
        parts = {name: tensor}
        if is_traceable_wrapper_subclass(tensor):
            parts = {f"{name}.{p}": getattr(tensor, p) for p in tensor.__tensor_flatten__()[0]}
        for part, values in parts.items():
            rows = values.reshape(-1, values.shape[-1]) if values.ndim else values.reshape(1, 1)
            # Three rows of each tensor: all weights of an 8B model are gigabytes to hash.
            sample = rows[[0, len(rows) // 2, -1]].cpu().contiguous()  # [3, columns]
            digest.update(f"{part}{list(values.shape)}".encode())
            digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
