"""The recorded logits of the official code, and ours on the same inputs."""

import torch
from safetensors.torch import load_file

from d2f import spans as sp


def difference(a, b):
    return (a.double() - b.double()).abs().max().item()


def spans_of(mask, lengths, length):
    if mask == "bidirectional":
        return sp.bidirectional(length)
    return torch.stack([sp.block_causal(length, p, 8) for p in lengths.tolist()])


def run(model, golden, family, mask):
    """Logits on the golden inputs."""
    facts = load_file(golden / f"{family}-tiny/forward.safetensors")
    ids = facts["input_ids"]
    with torch.inference_mode():
        return model.forward(ids, spans_of(mask, facts["prompt_lengths"], ids.shape[1]))


def official(golden, family, mask, adapter=False):
    folder = golden / f"{family}-tiny"
    facts = load_file((folder / "adapter" if adapter else folder) / "forward.safetensors")
    raw = facts.get(f"raw_logits_{mask}")
    return facts[f"logits_{mask}"] if raw is None else raw
