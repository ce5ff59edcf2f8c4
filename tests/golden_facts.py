"""The recorded logits of the official code, and ours on the same inputs."""

import copy
from pathlib import Path

import torch
from safetensors.torch import load_file

from d2f import spans as sp
from d2f.model import DiffusionModel


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


def sums_as_recorded():
    """Whether this CPU adds up a matrix product in the order of the one that the logits were
    recorded on: AMD with AVX-512. Others have kernels that add in other orders."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    info = Path("/proc/cpuinfo")
    return info.is_file() and "AuthenticAMD" in info.read_text()


def allowed(model, golden, family, mask):
    """How far ours may lie from the official logits: not at all where sums are added up as
    recorded; elsewhere what rounding leaves, twice (theirs and ours) the distance of our fp32
    logits from the same model's in fp64."""
    if sums_as_recorded():
        return 0.0
    network = model.adapter if model.adapter is not None else model.backbone
    exact = copy.deepcopy(network).double()
    backbone = exact if model.adapter is None else exact.get_base_model()
    twin = DiffusionModel(backbone, model.contract)
    return 2 * difference(run(model, golden, family, mask), run(twin, golden, family, mask))
