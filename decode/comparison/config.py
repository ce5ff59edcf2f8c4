"""What a comparison runs: prompts, rules, and the entries that are compared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from d2f.configuration import Section, Switch, check, override, read_mapping
from d2f.errors import InputError
from d2f.shipped import COMPARISON, DECODING, find_config
from d2f.tasks.registry import TASKS

Whole = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0)]


class Entry(Section):
    """What all kinds of entries have. name: as in the table."""

    name: Annotated[str, Field(min_length=1)]
    model: str  # folder, hub name or bundled name


class Ours(Entry):
    """A decoder of this project. config: a YAML of decoder options, as `decode.pipeline --config`
    takes, by path or name; ``{task}`` in it is replaced. options: over that file. sweep: values of
    one option: the entry becomes one for each, named ``NAME OPTION VALUE``, a line of the figures
    together. shares: an earlier entry of this kind whose process and model it uses; the memory that
    is measured is then that of all. Entries of one sweep share."""

    kind: Literal["ours"]
    shares: str | None = None
    sweep: dict[str, tuple[Any, ...]] = Field(default_factory=dict)  # empty once read
    series: str | None = None  # the line of the figures that it is a point of
    adapter: str | None = None
    family: str | None = None
    dtype: str | None = None
    device: str | None = None
    config: str | None = None
    decoder: str | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    compile: Switch = False  # through torch.compile, as vLLM does; before anything is measured
    batch_size: Positive | None = None  # most requests in a forward; default: the concurrency
    threads: Positive | None = None


class Transformers(Entry):
    """`generate` of transformers, greedy, in batches of the concurrency, as published figures use
    it: no request enters before the whole batch is done."""

    kind: Literal["transformers"]
    dtype: str | None = None
    device: str | None = None
    threads: Positive | None = None


class Served(Entry):
    """What the two served kinds have. stream: tokens are sent as they are made; without it there
    is less work for the server and no latency to the first token."""

    stream: Switch = True
    prompt_as: Literal["ids", "text"] = "ids"
    body: dict[str, Any] = Field(
        default_factory=dict
    )  # more fields of each request, e.g. {stop_token_ids: [2]}


class Vllm(Served):
    """`vllm serve MODEL`, started and stopped by the command. shares: an earlier entry of this
    kind whose server it uses, so that one server is measured in two ways."""

    kind: Literal["vllm"]
    shares: str | None = None
    python: str | None = None  # of vLLM's environment; default: vllm_python of the configuration
    dtype: str = "auto"
    prefix_caching: Switch = False  # prompts come again in each repetition; a cache would skip them
    args: tuple[str, ...] = ()  # more of the command line
    env: dict[str, str] = Field(default_factory=dict)
    startup_seconds: Seconds = 600.0


class Endpoint(Served):
    """An OpenAI-compatible completions endpoint that is already there, e.g. http://host:8000/v1.
    model: the name it serves. tokenizer: of that model, for the prompts."""

    kind: Literal["endpoint"]
    url: str
    tokenizer: str
    api_key_env: str | None = None  # the environment variable that holds the key


AnyEntry = Annotated[Ours | Transformers | Vllm | Endpoint, Field(discriminator="kind")]


class Limits(Section):
    """Seconds after which a served request has failed."""

    connect: Seconds = 10.0
    silence: Seconds = 60.0  # without a byte
    request: Seconds = 600.0


class CompareConfig(Section):
    """One comparison. Greedy throughout."""

    output: str
    entries: Annotated[tuple[AnyEntry, ...], Field(min_length=1)]
    baseline: str | None = None  # the entry that ratios are taken against; default: the first
    tasks: tuple[str, ...] = ()
    prompts_file: str | None = None  # or prompts of your own, as decode.pipeline takes them
    split: Literal["tuning", "heldout"] = "heldout"
    seed: Whole = 0  # of the problems
    problems: Positive = 64  # a task, timed
    accuracy_problems: Whole = 500  # a task, judged, in a pass of their own; 0: only the timed ones
    max_new_tokens: Positive | None = None  # default: the task's; 256 for prompts
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    accuracy_concurrency: Positive | None = None  # of that pass; default: the highest below
    concurrency: Annotated[tuple[Positive, ...], Field(min_length=1)] = (1,)
    repetitions: Positive = 3
    warmup: Positive = 4  # requests before each run, not counted; at least the concurrency
    tokenizer: str | None = None  # that counts visible tokens; default: the baseline's
    vllm_python: str = ".venv-vllm/bin/python"
    retries: Whole = 2
    limits: Limits = Limits()
    figures: Switch = True

    @model_validator(mode="after")
    def _consistent(self) -> CompareConfig:
        names = [entry.name for entry in self.entries]
        if len(set(names)) < len(names):
            raise ValueError(f"two entries have one name among {', '.join(names)}")
        for i, entry in enumerate(self.entries):
            if isinstance(entry, Vllm) and entry.shares is not None:
                servers = [e.name for e in self.entries[:i] if isinstance(e, Vllm) and not e.shares]
                if entry.shares not in servers:
                    raise ValueError(
                        f"{entry.name}: shares must name an earlier entry of kind vllm with a "
                        f"server of its own, got {entry.shares!r}"
                    )
            if isinstance(entry, Ours) and entry.shares is not None:
                _check_shared(entry, self.entries[:i])
        if self.baseline is not None and self.baseline not in names:
            raise ValueError(f"baseline must be one of {', '.join(names)}, got {self.baseline!r}")
        if bool(self.tasks) == (self.prompts_file is not None):
            raise ValueError("exactly one of tasks and prompts_file must be given")
        unknown = [task for task in self.tasks if task not in TASKS]
        if unknown or len(set(self.tasks)) < len(self.tasks):
            raise ValueError(f"tasks must be some of {', '.join(TASKS)}, each once")
        if sorted(set(self.concurrency)) != list(self.concurrency):
            raise ValueError("concurrency must rise, each once")
        return self

    @property
    def reference(self) -> Ours | Transformers | Vllm | Endpoint:
        """The entry that the others are compared with."""
        named = [entry for entry in self.entries if entry.name == self.baseline]
        return (named or self.entries)[0]


def _expanded(entry: Any, path: str | Path) -> list[Any]:
    """An entry's mapping, or where it sweeps an option one for each of its values."""
    sweep = entry.get("sweep") if isinstance(entry, dict) else None
    if not sweep:
        return [entry]
    well = isinstance(sweep, dict) and len(sweep) == 1
    values = next(iter(sweep.values())) if well else None
    if not isinstance(values, list | tuple) or not values:
        raise InputError(
            f"{path}: {entry.get('name')}: sweep must have one option with a list of values, "
            f"got {sweep!r}"
        )
    option, series = next(iter(sweep)), entry.get("name")
    base = {key: value for key, value in entry.items() if key != "sweep"} | {"series": series}
    names = [f"{series} {option} {'none' if value is None else value}" for value in values]
    entries = []
    for name, value in zip(names, values, strict=True):
        one = base | {"name": name, "options": {**(entry.get("options") or {}), option: value}}
        if name != names[0] and entry.get("shares") is None:
            one["shares"] = names[0]
        entries.append(one)
    return entries


def _check_shared(entry: Ours, before: Sequence[AnyEntry]) -> None:
    owners = [e for e in before if isinstance(e, Ours) and e.shares is None]
    owner = next((e for e in owners if e.name == entry.shares), None)
    if owner is None:
        raise ValueError(
            f"{entry.name}: shares must name an earlier entry of kind ours with a process of its "
            f"own, got {entry.shares!r}"
        )
    for key in ("model", "adapter", "family", "dtype", "device", "compile", "threads"):
        theirs, own = getattr(owner, key), getattr(entry, key)
        if theirs != own:
            raise ValueError(
                f"{entry.name} shares {owner.name}'s process, so its {key} must be {theirs!r}, "
                f"got {own!r}"
            )


def read_config(path: str | Path, overrides: Sequence[str] = ()) -> CompareConfig:
    """The configuration in a YAML file, or of that name among those that ship with the package,
    with ``--key value`` overrides. Raises InputError."""
    values = read_mapping(find_config(path, *COMPARISON))
    override(values, overrides)
    if isinstance(values.get("entries"), list):
        values["entries"] = [one for entry in values["entries"] for one in _expanded(entry, path)]
    config = check(CompareConfig, values, str(path))
    for entry in config.entries:
        if isinstance(entry, Ours):
            for task in config.tasks:
                options_file(entry, task)
    return config


def options_file(entry: Ours, task: str | None) -> str | None:
    """The path of an entry's decoder options for a task. Raises InputError where there are none."""
    if entry.config is None:
        return None
    try:
        return str(find_config(entry.config.replace("{task}", task or ""), *DECODING))
    except InputError as error:
        raise InputError(f"entry {entry.name}: config: {error}") from error
