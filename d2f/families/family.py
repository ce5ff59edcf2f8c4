"""Describe a family of checkpoints: which of transformers' classes runs its weights unchanged, how
to read its logits, what can become of it.

The facts are from the published checkpoints' configurations and weight indexes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from transformers import PretrainedConfig
from transformers.core_model_loading import WeightRenaming

from d2f.contract import PromptRule
from d2f.errors import CheckpointError, did_you_mean

MakeConfig = Callable[[Mapping[str, Any]], PretrainedConfig]


@dataclass(frozen=True)
class Family:
    """Describe one family.

    Checkpoints:

    name: in contracts and on command lines; the names of its official classes begin with it, in any
    case. model_types: values of ``model_type`` in an official config.json. classes: transformers'
    classes that run its weights. make_config: official config.json to the configuration of one of
    them; raises CheckpointError for what they cannot express. knows: keys of an official
    config.json that are read or may be left out; another one is an error. key_mapping: official
    weight name to transformers', as `from_pretrained` takes it (a regex with at most one group):
    every weight, or empty where the names are the same. tokenizer: transformers' class for
    tokenizer files whose own class is code of the checkpoint.

    Reading:

    logit_shift: 1 where row p-1 predicts position p. rope_fp32: RoPE is applied in fp32 whatever
    the dtype. prompt_rule: what a prompt attends to before D2F training (``bidirectional``,
    ``block_causal``, ``causal``). needs_mask: it predicts masked positions, as all but plain causal
    models do. end_tokens: tokens that end a response besides the configured eos.

    Making models:

    scratch: the class of a model from scratch, None where none is built. starts: transformers'
    model types of autoregressive models whose weights a model of the family can start from.
    keeps_class: such a model keeps its class, else it becomes a `scratch`. official_config: the
    configuration to the fields of an official config.json, architectures and model_type among
    them; None where models are not exported in the family's own format.
    """

    name: str
    model_types: tuple[str, ...]
    architectures: tuple[str, ...]
    classes: tuple[Any, ...]
    make_config: MakeConfig
    logit_shift: int
    rope_fp32: bool
    prompt_rule: PromptRule
    needs_mask: bool = True
    mask_id: int | None = None
    knows: tuple[str, ...] = ()
    key_mapping: Mapping[str, str] = field(default_factory=dict)
    tokenizer: Any = None
    end_tokens: tuple[str, ...] = ()
    scratch: Any = None
    starts: tuple[str, ...] = ()
    keeps_class: bool = False
    official_config: Callable[[PretrainedConfig], dict[str, Any]] | None = None

    @cached_property
    def _renamings(self) -> list[WeightRenaming]:
        return [WeightRenaming(theirs, ours) for theirs, ours in self.key_mapping.items()]

    @cached_property
    def _reverse_renamings(self) -> list[WeightRenaming]:
        # In the opposite order: a later rule may have seen an earlier one's result.
        return [renaming.reverse_transform() for renaming in reversed(self._renamings)]

    def native_name(self, name: str) -> str:
        """Return transformers' name of a weight, from the family's."""
        return _renamed(name, self._renamings)

    def official_name(self, name: str) -> str:
        """Return the family's name of a weight, from transformers'. Raises CheckpointError."""
        made = _renamed(name, self._reverse_renamings)
        # A mapping names every weight, and each name must lead back to the same weight.
        if self.key_mapping and (made == name or self.native_name(made) != name):
            raise CheckpointError(f"{name}: the family {self.name} has no name for this weight")
        return made


def _renamed(name: str, renamings: Iterable[WeightRenaming]) -> str:
    for renaming in renamings:
        name, _ = renaming.rename_source_key(name)
    return name


# Read elsewhere (ids, dtype), by transformers alone, or without a say in a forward.
_ANY = {
    "architectures", "auto_map", "bos_token_id", "dtype", "eos_token_id", "initializer_range",
    "mask_token_id", "model_type", "pad_token_id", "rope_scaling", "rope_theta", "tokenizer_class",
    "torch_dtype", "transformers_version", "unsloth_version", "use_cache",
}  # fmt: skip


def keys_of(*kinds: Any) -> tuple[str, ...]:
    """List the keys of transformers' configuration classes, for a family that reads them."""
    return tuple(sorted({key for kind in kinds for key in kind().to_dict()}))


def check_keys(family: Family, raw: Mapping[str, Any]) -> None:
    """Raise CheckpointError for a key of config.json that is not off and that the family does not
    know: what it says may change the outputs."""
    known = {*_ANY, *family.knows}
    for key, value in raw.items():
        if value and key not in known and not key.startswith("_"):
            raise CheckpointError(
                f"config.json: {key}: the family {family.name} does not know this key (got "
                f"{value!r:.60}), which may change what the model is{did_you_mean(key, known)}; "
                f"it knows {', '.join(sorted(known))}; name the family to load it all the same"
            )


_NEEDED = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size",
)  # fmt: skip
_SIZES = (*_NEEDED, "num_key_value_heads", "head_dim", "max_position_embeddings")


def check_sizes(raw: Mapping[str, Any], names: tuple[str, ...]) -> None:
    """Raise CheckpointError for an impossible size, before anything is allocated."""
    for name in names:
        size = raw.get(name)
        most = 10_000 if "layers" in name else 2**31 - 1
        if size is not None and (type(size) is not int or not 1 <= size <= most):
            raise CheckpointError(
                f"config.json: {name} must be a whole number from 1 to {most}, got {size!r}"
            )


def check_complete(raw: Mapping[str, Any]) -> None:
    """Raise CheckpointError for an impossible size in transformers' names, or a missing one that
    transformers would replace by a default."""
    lacking = [name for name in _NEEDED if name not in raw]
    if lacking:
        raise CheckpointError(f"config.json lacks {', '.join(lacking)}")
    check_sizes(raw, _SIZES)


def renamed_config(kind: Any) -> MakeConfig:
    """Return a `make_config` for a config.json with the fields of transformers' configuration class
    `kind` under another model_type."""

    def make(raw: Mapping[str, Any]) -> PretrainedConfig:
        check_complete(raw)
        drop = ("model_type", "architectures", "auto_map", "pad_token_id", "transformers_version")
        return kind.from_dict({k: v for k, v in raw.items() if k not in drop})

    return make
