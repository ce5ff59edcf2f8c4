"""Build a model to begin with: from scratch, or from another family's weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from d2f import attention
from d2f.checkpoint import check_fit
from d2f.errors import CheckpointError
from d2f.families import FAMILIES, check_ids, get_family, new_contract
from d2f.model import DiffusionModel, Fp32Rotary


def build(
    family_name: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    hidden_size: int,
    intermediate_size: int,
    layers: int,
    heads: int,
    kv_heads: int,
    context_length: int,
    **config_values: object,
) -> DiffusionModel:
    """Build a model with random weights from torch's generator; vocabulary, mask and end ids are
    the tokenizer's. config_values: further fields of the transformers configuration. Raises
    CheckpointError for a tokenizer without a mask or end token."""
    family = get_family(family_name)
    if family.scratch is None:
        known = sorted(name for name, other in FAMILIES.items() if other.scratch)
        raise CheckpointError(f"a model from scratch must be of {known}, got {family.name!r}")
    contract = new_contract(family, tokenizer)
    values: dict[str, object] = {
        "vocab_size": len(tokenizer),  # with the added tokens, of which the mask is one
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": context_length,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": None,
    }
    config = family.scratch.config_class(**(values | config_values))
    backbone = family.scratch._from_config(
        config, attn_implementation=attention.NAME, dtype=torch.float32
    )
    return DiffusionModel(backbone, contract, tokenizer=tokenizer)


def convert(
    model: DiffusionModel, family_name: str, *, drop_biases: bool = False
) -> DiffusionModel:
    """Take a model's weights, in their dtype and not copied, as the start of another family's (an
    autoregressive model is the usual start of a diffusion model).

    Biases that the source lacks begin at 0. End ids stay, and the objective of an autoregressive
    source: it says that nothing was trained bidirectionally yet. drop_biases: leave out biases that
    the family has no place for, which changes what the weights compute.

    Raises CheckpointError where the weights do not fit, the tokenizer has no mask token or
    drop_biases finds nothing to leave out.
    """
    family, tokenizer = get_family(family_name), model.tokenizer
    says = f"a {model.family} model does not convert to {family_name}"
    dropped: list[str] = []
    made = model
    if family_name != model.family:
        if tokenizer is None:
            raise CheckpointError(f"{model.path}: converting to {family_name} needs a tokenizer")
        contract = new_contract(family, tokenizer)
        contract = dataclasses.replace(
            contract,
            end_ids=model.end_ids or contract.end_ids,
            objective=None if model.is_diffusion else model.contract.objective,
        )
        backbone: Any = model.backbone
        if not family.keeps_class:
            backbone, dropped = _rebuilt(model, family_name, says, drop_biases)
        # Both share the backbone, and a wrapper for one would change what the other computes.
        elif model.contract.rope_fp32 != family.rope_fp32:
            raise CheckpointError(f"{says}: its RoPE is of another precision")
        check_ids(str(model.path), contract, model.vocab_size)
        made = DiffusionModel(backbone, contract, tokenizer=tokenizer, path=model.path)
    if drop_biases and not dropped:
        raise CheckpointError(
            f"drop_biases: expected a model with biases that {family_name} has no place for, "
            f"got a {model.family} model, which has none"
        )
    return made


def _rebuilt(
    model: DiffusionModel, family: str, says: str, drop_biases: bool
) -> tuple[Any, list[str]]:
    """Put a model's own tensors into the family's class; return it and the biases left out."""
    config = model.config
    # A head dimension that does not follow from the sizes has a field, which not all classes know.
    own = config.hidden_size // config.num_attention_heads
    unusual = {} if getattr(config, "head_dim", own) == own else {"head_dim": config.head_dim}
    kept = (
        "vocab_size", "rope_parameters", "rms_norm_eps", "hidden_act", "tie_word_embeddings",
        "bos_token_id", "eos_token_id",
    )  # fmt: skip
    with torch.device("meta"):  # every weight comes from the source
        new: Any = build(
            family,
            model.tokenizer,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            context_length=config.max_position_embeddings,
            **{name: getattr(config, name) for name in kept},
            **unusual,
        ).backbone
    came, expected = model.backbone.state_dict(), new.state_dict()
    # Dream has Qwen2's biases, a Llama none: of 0 they change nothing until they are trained.
    zeros = {
        name: torch.zeros_like(value, dtype=model.dtype, device=model.device)
        for name, value in expected.items()
        if name not in came and name.endswith("_proj.bias")
    }
    extra = came.keys() - expected.keys()
    dropped = [name for name in extra if drop_biases and name.endswith("_proj.bias")]
    check_fit(
        says,
        missing=expected.keys() - came.keys() - zeros.keys(),
        unexpected=extra - set(dropped),
        misshapen=[
            (name, came[name].shape, value.shape)
            for name, value in expected.items()
            if name in came and came[name].shape != value.shape
        ],
    )
    # assign: the source's own tensors take the place of those without data, nothing is copied.
    new.load_state_dict(came | zeros, strict=False, assign=True)
    # RoPE's frequencies are a buffer that no state_dict has: those of `new` are without data. The
    # source's wrapper goes, because the new family decides on the precision.
    rotary = model.backbone.model.rotary_emb
    new.model.rotary_emb = rotary.rotary if isinstance(rotary, Fp32Rotary) else rotary
    new.tie_weights()  # undone by assigning
    return new.eval(), dropped


def reserved_tokens(tokenizer: PreTrainedTokenizerBase, end_ids: Sequence[int]) -> list[int]:
    """List the special tokens that begin, end, pad and replace nothing and that no chat template
    writes, in ascending order: rows of the embedding that are free for another use."""
    roles = ("bos_token_id", "eos_token_id", "unk_token_id", "pad_token_id")
    used = {*end_ids, *(getattr(tokenizer, role) for role in roles)}
    template = str(tokenizer.chat_template or "")
    return [
        id
        for id, token in sorted(tokenizer.added_tokens_decoder.items())
        if token.special and id not in used and token.content not in template
    ]
