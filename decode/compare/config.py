"""Read the configuration of a comparison, draw its prompts, and say what identifies its runs."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from d2f.config import (
    Name,
    Problems,
    Seconds,
    Section,
    Seed,
    Switch,
    Text,
    Threads,
    Tokens,
    check,
    override,
    read_mapping,
)
from d2f.device import DEVICE
from d2f.errors import InputError, not_one_of
from d2f.flags import check_family_name, check_model_name
from d2f.models import resolve
from d2f.shipped import COMPARISON, DECODING, find_config
from d2f.tasks import Problem, Task, find_tasks
from d2f.tasks.judges import CodeExecution
from decode.decoders.base import DEFAULT_MAX_NEW_TOKENS
from decode.jobs import draw_problems, read_prompts

if TYPE_CHECKING:
    from decode.cli import DecoderSettings

Device = Annotated[str, Field(pattern=DEVICE)]
Dtype = Literal["float32", "fp32", "bfloat16", "bf16", "float16", "fp16", "auto"]
Requests = Annotated[int, Field(ge=1, le=10**5)]  # at once
Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]  # of the environment


class Entry(Section):
    """The keys of every kind of entry."""

    name: Name
    """Name in the table."""
    model: Text
    """Folder, hub name or bundled name."""


class Local(Entry):
    """The keys of both kinds that run in a process of this command."""

    dtype: Dtype | None = None
    """Default: float32 on a CPU, bfloat16 elsewhere."""
    device: Device | None = None
    """Default: CUDA where there is one."""
    threads: Threads | None = None
    """Threads of a forward on a CPU. Default: torch's."""


class Ours(Local):
    """A decoder of this project."""

    kind: Literal["ours"]
    """The kind of entry."""
    shares: Text | None = None
    """An earlier entry of this kind whose process and model it uses; the memory that is measured
    is then that of all. Entries of one sweep share."""
    sweep: Annotated[
        dict[str, Annotated[tuple[Any, ...], Field(min_length=1)]], Field(max_length=1)
    ] = Field(default_factory=dict)  # empty once read
    """Values of one option: the entry becomes one for each, named NAME OPTION VALUE, a line of the
    figures together."""
    series: Text | None = None
    """The line of the figures that it is a point of."""
    adapter: Text | None = None
    """Adapter on the model."""
    quantize: Text | None = None
    """Weights in few bits, as `--quantize` takes it; the adapter is merged first."""
    family: Text | None = None
    """Default: what the checkpoint says."""
    config: Text | None = None
    """A YAML of decoder options, by path or name as `decode.pipeline --config` takes; `{task}` in
    it is replaced."""
    decoder: Text | None = None
    """Default: the one that suits the model."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the decoder; they come before that file."""
    compile: Switch = False
    """Compiled, as vLLM does with its own; before anything is measured."""
    batch_size: Requests | None = None
    """Most requests in a forward; default: the concurrency."""
    max_rows: Annotated[int, Field(ge=1, le=10**6)] | None = None
    """Rows that one forward should have, which bounds how wide lossless decoders speculate;
    default: a constant for the kind of device."""


class Transformers(Local):
    """`generate` of transformers, greedy, in static batches of the concurrency, as published
    figures use it: no request enters before the whole batch is done."""

    kind: Literal["transformers"]
    """The kind of entry."""
    prompt_lookup: Annotated[int, Field(ge=1, le=1000)] | None = None
    """Tokens that its prompt lookup drafts. It takes one request at a time, whatever the
    concurrency."""


class Served(Entry):
    """The keys of both served kinds."""

    stream: Switch = True
    """Tokens are sent as they are made; without it there is less work for the server and no latency
    to the first token."""
    prompt_as: Literal["ids", "text"] = "ids"
    """The form in which prompts are sent."""
    body: dict[str, Any] = Field(default_factory=dict)
    """More fields of each request, e.g. {stop_token_ids: [2]}."""


class Started(Served):
    """The keys of both kinds of server that the comparison starts and stops."""

    env: dict[Variable, str] = Field(default_factory=dict)
    """More of the environment."""
    startup_seconds: Seconds = 600.0
    """Seconds that it may take to start."""


class Command(Started):
    """Any OpenAI-compatible server, by the command that starts it. model: the folder or name of the
    model whose tokenizer makes the prompts."""

    kind: Literal["command"]
    """The kind of entry."""
    command: Annotated[tuple[Text, ...], Field(min_length=1)]
    """Its words; {port} in them is replaced by a free port of 127.0.0.1."""
    health: Annotated[str, Field(pattern="^/")] = "/health"
    """Path that is answered with 200 once it is ready."""


class Vllm(Started):
    """`vllm serve MODEL`."""

    kind: Literal["vllm"]
    """The kind of entry."""
    shares: Text | None = None
    """An earlier entry of this kind whose server it uses, so that one server is measured in two
    ways."""
    python: Text | None = None
    """Python of vLLM's environment; default: vllm_python of the configuration."""
    dtype: Text = "auto"
    """vLLM's name for it."""
    prefix_caching: Switch = False
    """Prompts come again in each repetition; a cache would skip them."""
    args: tuple[str, ...] = ()
    """More of the command line."""


class Endpoint(Served):
    """An OpenAI-compatible completions endpoint that is already there. model: the name it
    serves."""

    kind: Literal["endpoint"]
    """The kind of entry."""
    url: Annotated[str, Field(pattern=r"^https?://[^\s/]\S*$")]
    """E.g. http://host:8000/v1."""
    tokenizer: Text
    """Tokenizer of that model, for the prompts."""
    api_key_env: Variable | None = None
    """The environment variable that holds the key."""


AnyEntry = Annotated[Ours | Transformers | Vllm | Command | Endpoint, Field(discriminator="kind")]

# Entries that share a process share its model, which was made with these.
OF_THE_MODEL = ("model", "adapter", "quantize", "family", "dtype", "device", "compile", "threads")


class Limits(Section):
    """Seconds after which a served request has failed."""

    connect: Seconds = 10.0
    """Without a connection."""
    silence: Seconds = 60.0
    """Without a byte."""
    request: Seconds = 600.0
    """In all."""


class CompareConfig(Section):
    """Configure one comparison. All entries decode greedily."""

    output: Text
    """Folder of the report."""
    entries: Annotated[tuple[AnyEntry, ...], Field(min_length=1)]
    """The entries to compare."""
    baseline: Text | None = None
    """The entry that ratios are taken against; default: the first."""
    tasks: tuple[Text, ...] = ()
    """Tasks whose problems are decoded: generated ones, or task files. Either they or
    prompts_file."""
    data_files: dict[Text, Text] = Field(default_factory=dict)
    """Local files for the splits of the tasks' data set, which is then not read:
    {test: PATH, train: PATH}; PATH[10:510] is a part of the rows."""
    allow_code_execution: CodeExecution = False
    """Let the judge python run what the models write, on this machine."""
    prompts_file: Text | None = None
    """Prompts of your own, as decode.pipeline takes them."""
    split: Literal["tuning", "heldout"] = "heldout"
    """Split of the problems."""
    seed: Seed = 0
    """Seed of the problems."""
    problems: Problems = 64
    """Timed problems of each task."""
    waves: Annotated[int, Field(ge=1, le=1000)] = 1
    """Timed problems for each request in flight, at least: with one wave alone all begin together
    and the run ends with few in flight."""
    accuracy_problems: Annotated[int, Field(ge=0, le=10**6)] = 500
    """Judged problems of each task, in a pass of their own; 0: only the timed ones."""
    max_new_tokens: Tokens | None = None
    """Default: the task's; 256 for prompts."""
    stop: tuple[Text, ...] = ()
    """Strings that end a response."""
    accuracy_concurrency: Requests | None = None
    """Concurrency of the judged pass; default: the highest of `concurrency`."""
    concurrency: Annotated[tuple[Requests, ...], Field(min_length=1)] = (1,)
    """Requests in flight, rising; each is measured."""
    repetitions: Annotated[int, Field(ge=1, le=1000)] = 3
    """Repetitions of each measurement."""
    warmup: Problems = 4
    """Requests before each run, not counted; at least the concurrency."""
    tokenizer: Text | None = None
    """Tokenizer that counts visible tokens; default: the baseline's."""
    vllm_python: Text = ".venv-vllm/bin/python"
    """Python of vLLM's environment."""
    retries: Annotated[int, Field(ge=0, le=1000)] = 2
    """Retries of a served request that failed."""
    limits: Limits = Limits()
    """Seconds after which a served request has failed."""
    figures: Switch = True
    """Draw them."""

    @field_validator("entries")
    @classmethod
    def _write_out_sweeps(cls, entries: tuple[AnyEntry, ...]) -> tuple[AnyEntry, ...]:
        return tuple(one for entry in entries for one in _expand(entry))

    @model_validator(mode="after")
    def _consistent(self) -> CompareConfig:
        names = [entry.name for entry in self.entries]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"two entries have one name, {twice}")
        for place, entry in enumerate(self.entries):
            if isinstance(entry, Ours | Vllm) and entry.shares is not None:
                _check_shares(entry, self.entries[:place])
        if self.baseline is not None and self.baseline not in names:
            raise ValueError(f"baseline: {not_one_of(self.baseline, names)}")
        if bool(self.tasks) == (self.prompts_file is not None):
            raise ValueError("exactly one of tasks and prompts_file must be given")
        if sorted(set(self.concurrency)) != list(self.concurrency):
            raise ValueError("concurrency must rise, each once")
        _ = self.chosen  # an unknown task is an error of the configuration
        return self

    @cached_property
    def chosen(self) -> tuple[Task, ...]:
        """Find the tasks; none for a prompts file."""
        if not self.tasks:
            return ()
        return find_tasks(
            self.tasks,
            allow_code_execution=self.allow_code_execution,
            data_files=self.data_files,
        )

    @property
    def reference(self) -> AnyEntry:
        """The baseline's entry."""
        return next((e for e in self.entries if e.name == self.baseline), self.entries[0])

    def length(self, task: Task | None) -> int:
        """Return the longest answer to a task's problems, or to a prompt of one's own."""
        default = task.response_length if task else DEFAULT_MAX_NEW_TOKENS
        return self.max_new_tokens or default


def _expand(entry: AnyEntry) -> list[AnyEntry]:
    """Write out an entry that sweeps an option: one entry for each value."""
    if not isinstance(entry, Ours) or not entry.sweep:
        return [entry]
    ((option, values),) = entry.sweep.items()
    names = [f"{entry.name} {option} {'none' if value is None else value}" for value in values]
    found: list[AnyEntry] = []
    for name, value in zip(names, values, strict=True):
        own = {"name": name, "series": entry.name, "sweep": {}}
        own["options"] = entry.options | {option: value}
        if found:  # the first value's entry has the process, the others use its model
            own["shares"] = entry.shares or names[0]
        found.append(entry.model_copy(update=own))
    return found


def _check_shares(entry: Ours | Vllm, before: Sequence[AnyEntry]) -> None:
    """Raise ValueError unless `shares` names an earlier entry with a process of the same model."""
    owners = [e for e in before if type(e) is type(entry) and getattr(e, "shares", None) is None]
    owner = next((e for e in owners if e.name == entry.shares), None)
    if owner is None:
        raise ValueError(
            f"{entry.name}: shares must name an earlier entry of kind {entry.kind} that shares "
            f"no other's, got {entry.shares!r}"
        )
    for key in OF_THE_MODEL if isinstance(entry, Ours) else ():
        theirs, own = getattr(owner, key), getattr(entry, key)
        if theirs != own:
            raise ValueError(
                f"{entry.name} shares {owner.name}'s process, so its {key} must be {theirs!r}, "
                f"got {own!r}"
            )


def read_config(path: str | Path, overrides: Sequence[str] = ()) -> CompareConfig:
    """Read a comparison from a YAML file, or of that name among those shipped with the package.

    overrides: ``--key value`` pairs. Raises InputError, also for options that no model's decoder
    could take.
    """
    values = read_mapping(find_config(path, *COMPARISON))
    override(values, overrides, CompareConfig)
    config = check(CompareConfig, values, str(path))
    for entry in (entry for entry in config.entries if isinstance(entry, Ours)):
        with named(entry):
            check_model_name(entry.model)
            check_family_name(entry.family)
            for task in config.chosen or (None,):
                settings = decoder_settings(entry, task.name if task else None)
                if settings.name is not None:  # else the model decides which decoder it is
                    settings.check([config.length(task)])
    return config


@contextmanager
def named(entry: Entry) -> Iterator[None]:
    """Let an InputError begin with the entry's name."""
    try:
        yield
    except InputError as error:
        raise InputError(f"entry {entry.name}: {error}") from error


def decoder_settings(entry: Ours, task: str | None) -> DecoderSettings:
    """Read the decoder and options of an entry for a task. Raises InputError."""
    from decode.cli import DecoderSettings, split

    path = options_file(entry, task)
    values = (read_mapping(path) if path is not None else {}) | entry.options
    if entry.decoder is not None:
        values["decoder"] = entry.decoder
    return DecoderSettings(*split(values, "options" + (f" over {path}" if path else "")))


def options_file(entry: Ours, task: str | None) -> str | None:
    """Find the file of an entry's decoder options for a task, None without one. Raises
    InputError."""
    if entry.config is None:
        return None
    return str(find_config(entry.config.replace("{task}", task or ""), *DECODING))


# The prompts, in one order for every entry.

OWN_PROMPTS = "prompts"  # the name of the workload that a prompts file is


@dataclass(frozen=True)
class Item:
    """Hold a prompt; text is taken as it is. problem, task: None where nothing can judge the
    answer."""

    id: str
    prompt: Any  # decode.engine.prompts.Prompt
    problem: Problem | None = None
    task: Task | None = None

    def right(self, text: str) -> bool | None:
        """Judge a text; None without a problem."""
        if self.problem is None or self.task is None:
            return None
        return self.task.right(self.problem, text)


@dataclass(frozen=True)
class Workload:
    """Prompts that share their rules. problems, waves: as `CompareConfig` has them."""

    name: str
    items: list[Item]
    problems: int
    waves: int
    max_new_tokens: int
    stop: tuple[str, ...]

    @property
    def task(self) -> str | None:
        return None if self.name == OWN_PROMPTS else self.name

    def timed(self, concurrency: int) -> int:
        """Count the items, the first ones, that speed is measured on."""
        return min(len(self.items), max(self.problems, self.waves * concurrency))


def make_workloads(config: CompareConfig) -> list[Workload]:
    """Make one workload for each task, or one of the prompts file. Raises InputError."""
    if config.prompts_file is not None:
        items = []
        for source in read_prompts(config.prompts_file):
            # Text is one user message, as decode.pipeline takes it.
            is_text = isinstance(source.prompt, str)
            prompt = [{"role": "user", "content": source.prompt}] if is_text else source.prompt
            items.append(Item(str(source.id), prompt))
        length = config.length(None)
        return [Workload(OWN_PROMPTS, items, len(items), config.waves, length, config.stop)]
    found = []
    for task in config.chosen:
        problems = enumerate(_draw(task, config), 1)
        items = [Item(f"{task.name}-{n}", p.prompt, p, task) for n, p in problems]
        rules = config.problems, config.waves, config.length(task), (*task.stop, *config.stop)
        found.append(Workload(task.name, items, *rules))
    return found


def _draw(task: Task, config: CompareConfig) -> list[Problem]:
    """Draw as many problems as are asked for; of data that has fewer than the default, all."""
    where = f"{task.name}: problems"
    in_waves = config.waves * config.concurrency[-1]
    count = max(config.problems, config.accuracy_problems, in_waves)
    if task.default_count is None and "accuracy_problems" not in config.model_fields_set:
        return draw_problems(task, config.split, None, config.seed, where)[:count]
    return draw_problems(task, config.split, count, config.seed, where)


def identity(
    config: CompareConfig, workloads: Sequence[Workload], about: dict[str, Any]
) -> dict[str, Any]:
    """Collect everything that decides a measurement, under dotted keys so that a difference can be
    named: settings, machine, versions, and digests of prompts, option files and model folders."""
    found: dict[str, Any] = {"device": about["device"]}
    found |= {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")}
    found |= {f"version of {name}": version for name, version in about["versions"].items()}
    found |= _flat(config.model_dump(mode="json", exclude={"output", "figures", "entries"}))
    found["entries"] = [entry.name for entry in config.entries]  # their order is that of the runs
    found["tasks"] = [task.identity for task in config.chosen]
    prompts = [[item.id, item.prompt] for workload in workloads for item in workload.items]
    found["prompts"] = _digest(json.dumps(prompts).encode())
    for entry in config.entries:
        found |= _flat(entry.model_dump(mode="json"), f"entries.{entry.name}.")
        if isinstance(entry, Ours):
            for task in config.chosen or (None,):
                if path := options_file(entry, task.name if task else None):
                    found[f"content of {path}"] = _digest(Path(path).read_bytes())
        names = () if isinstance(entry, Endpoint) else (entry.model, getattr(entry, "adapter", ""))
        for name in filter(None, names):
            if (folder := Path(resolve(name))).is_dir():
                # Names, sizes and times: weights would take longer to read than to measure.
                files = sorted((p, p.stat()) for p in folder.rglob("*") if p.is_file())
                said = [f"{p.relative_to(folder)} {s.st_size} {s.st_mtime_ns}" for p, s in files]
                found[f"files of {name}"] = _digest("\n".join(said).encode())
    return found


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        nested = isinstance(value, dict) and value
        flat |= _flat(value, f"{prefix}{key}.") if nested else {prefix + key: value}
    return flat


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
