"""Keys of a training configuration that nothing would read, given its other keys: each is an error
where it has another value than its default, as a key is there to change something. What belongs to
a switch (evaluation to eval_every, wandb_mode to tracker, final_lr_share to the schedule, what a
weight of 0 leaves out) may stay while the switch is off."""

from __future__ import annotations

from typing import Any

from distill.config_keys import TrainKeys, section_keys
from distill.objectives.kinds import KINDS

_OF_TEXT = ["data." + name for name in (
    "columns", "chat_template", "end_token", "max_prompt", "max_response", "on_long", "on_bad_row",
    "measure_rows",
)]  # fmt: skip
_OF_TAILS = ["data." + name for name in (
    "train_on_padding", "padded_share", "short_tail", "tail_weight",
)]  # fmt: skip
_OF_DECODING = ["evaluation." + name for name in (
    "allow_code_execution", "problems", "split", "decoder", "options",
)]  # fmt: skip
_OF_FRESH_LORA = [key for key in section_keys("lora") if key != "lora.targets"]
# Every key that some runs do not read, by what does read it.
_READERS: list[tuple[str, list[str]]] = [
    ("a model from scratch, init has its own", ["tokenizer"]),
    ("a run that trains a fresh adapter", _OF_FRESH_LORA),
    ("objectives that train an adapter", ["lora.targets"]),
    ("d2f, wedlm and wino_plus", ["block_size"]),
    (
        "objective d2f",
        ["distill_target", "weighting", "noise.schedule", "noise.monotone_share"],
    ),
    ("objective d2f with samples of pipeline states", ["noise.states"]),
    ("monotone samples of objective d2f (noise.monotone_share)", ["noise.low", "noise.high"]),
    (
        "masked_diffusion, and d2f with noise.schedule clean_prefix or samples of pipeline states "
        "that are drawn (noise.monotone_share below 1, no noise.states)",
        ["noise.min_ratio"],
    ),
    (
        "objective d2f with samples of pipeline states that are drawn "
        "(noise.monotone_share below 1, no noise.states)",
        ["noise.most_active"],
    ),
    (
        "masked_diffusion with noise.uniform_share, d2f with noise.monotone_share below 1",
        ["noise.far_weight"],
    ),
    (
        "objective masked_diffusion",
        ["noise.uniform_share", "noise.causal_share", "noise.cart_p"],
    ),
    (
        "uniform samples of objective masked_diffusion (noise.uniform_share)",
        ["noise.max_ratio"],
    ),
    ("objective masked_diffusion with noise.uniform_share below 1", ["noise.block_sizes"]),
    ("objective wino_plus", section_keys("wino_plus")),
    ("objective wedlm", section_keys("wedlm")),
    ("rows of text, and wino_plus reads rollouts", _OF_TEXT),
    ("evaluations that decode (evaluation.tasks or data.tasks)", _OF_DECODING),
    (
        "a held-out loss (evaluation.loss_rows, evaluation.loss_file) of an objective that masks "
        "by a ratio",
        ["evaluation.loss_ratios"],
    ),
    ("objectives that train on a response's tail (wino_plus.tail is of its own)", _OF_TAILS),
]


def unread(config: TrainKeys) -> dict[str, str]:
    """What would read each key that nothing reads, by the key with dots into its section."""
    kind = KINDS[config.objective]
    read = kind.reads(config)
    if config.init is None:
        read.add("tokenizer")
    if kind.trains_adapter(config):
        read |= {"lora.targets", *(_OF_FRESH_LORA if config.init_adapter is None else ())}
    if kind.reads_text:
        read |= {*_OF_TEXT, *(_OF_TAILS if kind.tail else ())}
    # While the switch eval_every is off, what belongs to it may stay.
    if config.eval_every is None or config.evaluation.tasks or config.data.tasks:
        read |= set(_OF_DECODING)
    if config.evaluation.wants_loss and kind.masks_by_ratio:
        read.add("evaluation.loss_ratios")
    return {key: reader for reader, keys in _READERS for key in keys if key not in read}


def refuse_unread(config: TrainKeys) -> None:
    """Raise ValueError for a key that is given though nothing reads it."""
    given = [
        f"{key}: nothing reads it here, it is for {reader}; leave it out"
        for key, reader in unread(config).items()
        if value_of(config, key) != _default(config, key)
    ]
    if given:
        raise ValueError("; ".join(given))


def value_of(config: TrainKeys, key: str) -> Any:
    """The value of a key with dots into its section."""
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def _default(config: TrainKeys, key: str) -> Any:
    """The value that a key has where it is not given."""
    if key in ("data.padded_share", "data.short_tail") and config.data.tasks is None:
        return 0
    section, _, name = key.rpartition(".")
    owner = value_of(config, section) if section else config
    return type(owner).model_fields[name].get_default(call_default_factory=True)
