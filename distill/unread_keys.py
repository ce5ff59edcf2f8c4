"""Keys of a training configuration that nothing would read, given its other keys: each is an error
where it has another value than its default, as a key is there to change something. What belongs to
a switch (evaluation to eval_every, wandb_mode to tracker, final_lr_share to the schedule, what a
weight of 0 leaves out) may stay while the switch is off."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distill.config import TrainConfig

_OF_ROWS = ("columns", "chat_template", "end_token", "max_prompt", "max_response", "on_long",
            "on_bad_row", "measure_rows")  # fmt: skip
_OF_TAILS = ("train_on_padding", "padded_share", "short_tail", "tail_weight")


def unread(config: TrainConfig) -> dict[str, str]:
    """What would read each key that nothing reads, by the key with dots into its section."""
    objective, noise = config.objective, config.noise
    d2f, masked = objective == "d2f", objective == "masked_diffusion"
    blocks = d2f and noise.monotone_share < 1  # samples that follow the pipeline's states
    drawn = blocks and noise.states is None  # states that are not recorded ones
    blockwise = masked and noise.uniform_share < 1
    rollouts = objective == "wino_plus"
    rules: list[tuple[bool, str, list[str]]] = [
        (config.init is None, "a model from scratch, init has its own", ["tokenizer"]),
        (
            config.trains_adapter and config.init_adapter is None,
            "a run that trains a fresh adapter",
            _keys(config, "lora"),
        ),
        (d2f or objective in ("wedlm", "wino_plus"), "d2f, wedlm and wino_plus", ["block_size"]),
        (
            d2f,
            "objective d2f",
            ["distill_target", "noise.schedule", "noise.states", "noise.monotone_share"],
        ),
        (
            d2f and noise.monotone_share > 0,
            "monotone samples of objective d2f (noise.monotone_share)",
            ["noise.low", "noise.high"],
        ),
        (
            masked or drawn,
            "masked_diffusion, and d2f with samples of pipeline states that are drawn "
            "(noise.monotone_share below 1, no noise.states)",
            ["noise.min_ratio"],
        ),
        (
            drawn,
            "objective d2f with samples of pipeline states that are drawn "
            "(noise.monotone_share below 1, no noise.states)",
            ["noise.most_active"],
        ),
        (
            blocks or blockwise,
            "masked_diffusion with noise.uniform_share, d2f with noise.monotone_share below 1",
            ["noise.far_weight"],
        ),
        (masked, "objective masked_diffusion", ["noise.uniform_share", "noise.causal_share"]),
        (
            masked and noise.uniform_share > 0,
            "uniform samples of objective masked_diffusion (noise.uniform_share)",
            ["noise.max_ratio"],
        ),
        (
            blockwise,
            "objective masked_diffusion with noise.uniform_share below 1",
            ["noise.block_sizes"],
        ),
        (rollouts, "objective wino_plus", _keys(config, "wino_plus")),
        (objective == "wedlm", "objective wedlm", _keys(config, "wedlm")),
        (
            not rollouts,
            "rows of text, and wino_plus reads rollouts",
            [f"data.{name}" for name in _OF_ROWS],
        ),
        (
            not rollouts and objective != "next_token",
            "objectives that train on a response's tail (wino_plus.tail is of its own)",
            [f"data.{name}" for name in _OF_TAILS],
        ),
    ]
    return {key: reader for is_read, reader, keys in rules if not is_read for key in keys}


def refuse_unread(config: TrainConfig) -> None:
    """Raise ValueError for a key that is given though nothing reads it."""
    given = [
        f"{key}: nothing reads it here, it is for {reader}; leave it out"
        for key, reader in unread(config).items()
        if value_of(config, key) != _default(config, key)
    ]
    if given:
        raise ValueError("; ".join(given))


def value_of(config: TrainConfig, key: str) -> Any:
    """The value of a key with dots into its section."""
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def _keys(config: TrainConfig, section: str) -> list[str]:
    return [f"{section}.{name}" for name in type(getattr(config, section)).model_fields]


def _default(config: TrainConfig, key: str) -> Any:
    """The value that a key has where it is not given."""
    if key in ("data.padded_share", "data.short_tail") and config.data.tasks is None:
        return 0
    section, _, name = key.rpartition(".")
    owner = value_of(config, section) if section else config
    return type(owner).model_fields[name].get_default(call_default_factory=True)
