"""What a process of a training run needs of memory, estimated by part from shapes alone."""

from __future__ import annotations

from dataclasses import dataclass

from d2f.model import DiffusionModel
from distill.config import TrainConfig
from distill.objectives import OBJECTIVES

NF4 = 0.5 + 0.127 / 8  # bytes a weight of a 4-bit base, with its doubly quantised scales (QLoRA)


@dataclass(frozen=True)
class Memory:
    """What a process that holds the whole model (alone, or one of DDP) needs, in bytes.

    load: for reading the weights. activations: what the backward pass of one part of a step keeps,
    with and without gradient checkpointing. loss: the logits that are there at once, with what is
    computed of them. export: for writing the result, with what is still there then.
    """

    load: int
    weights: int
    adapter: int
    gradients: int
    optimizer: int
    activations: int
    activations_checkpointed: int
    loss: int
    export: int

    def total(self, checkpointing: bool) -> int:
        fixed = self.weights + self.adapter + self.gradients + self.optimizer + self.loss
        return fixed + (self.activations_checkpointed if checkpointing else self.activations)


def estimate(model: DiffusionModel, config: TrainConfig, tokens: int, reads: int) -> Memory:
    """Memory of feeding `tokens` at once, of which `reads` rows are read (masked tokens).

    model: with its adapter, on the meta device or any other.
    """
    network = model.adapter or model.backbone
    parameters = list(network.parameters())
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    frozen = sum(p.numel() for p in parameters) - trained
    kept = 2 if config.base_dtype == "bfloat16" else 4
    adapted = config.trains_adapter
    linear = sum(p.numel() for n, p in network.named_parameters() if is_linear(n))
    # What is trained is in fp32 whatever the base is kept in.
    load = weights = frozen * kept if adapted else 4 * trained
    if config.quantize == "4bit":
        weights -= int(linear * (kept - NF4))
    elif kept == 4 and config.mixed_precision != "no":
        weights += 2 * linear  # autocast's copies
    layer = layer_bytes(model, config) * tokens
    layers = model.backbone.config.num_hidden_layers
    inputs = kept * model.backbone.config.hidden_size * tokens  # of a layer
    # AdamW's two moments in fp32.
    optimizer = 8 * trained
    # Weights are merged, converted and written one after another, in fp32.
    largest = 4 * max(p.numel() for p in parameters)
    return Memory(
        load=load,
        weights=weights,
        adapter=4 * trained if adapted else 0,
        gradients=4 * trained,
        optimizer=optimizer,
        activations=layers * layer,
        # Each layer keeps its input, and one layer at a time is computed again.
        activations_checkpointed=layers * inputs + layer,
        loss=OBJECTIVES[config.objective].loss_bytes(model, config, reads),
        export=load + 4 * trained * adapted + optimizer + largest,
    )


def layer_bytes(model: DiffusionModel, config: TrainConfig) -> int:
    """Bytes a token that one decoder layer keeps for its backward pass, without checkpointing, as
    transformers' Llama and Qwen2 and PEFT's LoRA compute it; attention by a kernel that keeps
    queries, keys, values and output, dropout by one that keeps a mask of bytes."""
    shape = model.backbone.config
    hidden, inner, heads = shape.hidden_size, shape.intermediate_size, shape.num_attention_heads
    dim = getattr(shape, "head_dim", None) or hidden // heads
    queries, keys = heads * dim, shape.num_key_value_heads * dim
    autocast = config.mixed_precision != "no"
    kept = 2 if config.base_dtype == "bfloat16" else 4
    size = 2 if autocast else kept
    attention = size * (2 * queries + 2 * keys)
    norms = 2 * 4 * hidden  # each in fp32
    mlp = size * 3 * inner  # gate, its SiLU, up
    if not config.trains_adapter:  # every linear layer keeps its input
        copies = 5 if autocast else 2  # q, k, v, gate and up cast their own
        return attention + norms + mlp + size * (copies * hidden + inner) + 2 * kept * hidden
    assert model.adapter is not None
    lora_config = model.adapter.peft_config["default"]  # an init_adapter's own, where there is one
    targets, rank = lora_config.target_modules, lora_config.r
    of_hidden = sum(name not in ("o_proj", "down_proj") for name in targets)
    own = of_hidden * hidden + inner * ("down_proj" in targets)  # inputs that nothing else keeps
    if lora_config.lora_dropout:  # each drops its own, and keeps the mask
        own += queries * ("o_proj" in targets)
        lora = (size if autocast else 4) * own + own
    elif autocast:
        lora = size * own
    else:  # q, k and v share their input, gate and up theirs
        groups = [("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")]
        inputs = sum(any(name in targets for name in group) for group in groups)
        lora = kept * (hidden * inputs + inner * ("down_proj" in targets))
    return attention + norms + mlp + lora + len(targets) * size * rank


def is_linear(name: str) -> bool:
    """Whether a parameter is a layer's own matrix (of attention or MLP)."""
    return name.endswith(("_proj.base_layer.weight", "_proj.weight"))
