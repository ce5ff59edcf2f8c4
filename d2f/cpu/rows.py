"""Compute whole forwards in one call of C++ (forward.cpp), and read their logits (confidence.cpp).

The weights are packed in the order in which products.cpp reads them, and layers with one input
become one product. A decoding step multiplies so few rows that it costs what reading the weights
costs; 8 rows cost little more than one.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaModel
from transformers.models.qwen2.modeling_qwen2 import Qwen2Model
from transformers.models.qwen3.modeling_qwen3 import Qwen3Model

from d2f.attention import SpanPlan
from d2f.cache import SlotCache
from d2f.contract import DRAFT
from d2f.gate import Gate

DIMS = (8, 16, 32, 64, 80, 96, 128)  # head dimensions that forward.cpp has code for
LANES = 16  # outputs of a block of packed weights
SMALL = 1 << 20  # weights of a model below which waking other threads costs more than they save
_MODELS = (LlamaModel, Qwen2Model, Qwen3Model)
_BY_LENGTH = ("dynamic", "longrope")  # RoPE whose angles depend on the length of the sequence
# Of the logits' size, between the plain forward and this one. In bf16 they round in other places.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25}


def source() -> str:
    """Return the files one behind the other, as they use each other."""
    names = ("vectors", "products", "attention", "forward", "confidence")
    files = (Path(__file__).with_name(f"{name}.cpp") for name in names)
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


@cache
def library() -> Any:
    """Compile for this CPU and load. Raises whatever a compiler raises."""
    from torch._inductor.codecache import CppCodeCache

    return CppCodeCache.load(source(), "cpu", extra_flags=("-ffp-contract=fast",))


def fits(backbone: PreTrainedModel, gate: Gate | None = None) -> bool:
    """Say whether the C++ code computes what this model computes: layers of the known types in fp32
    or bf16 on a CPU, none replaced, hooked, quantised or split over processes, but for the adapter
    of the gate."""
    model = backbone.model
    if type(model) not in _MODELS or getattr(backbone, "quantized", None) is not None:
        return False
    rotary = getattr(model.rotary_emb, "rotary", model.rotary_emb)  # d2f.model.Fp32Rotary has one
    linear = [one for layer in model.layers for one in _linear_layers(layer)]
    hooked = list(model.modules())
    if gate is not None:  # what is hooked there is its own
        linear = [getattr(one, "base_layer", one) for one in linear]
        hooked = [module for name, module in model.named_modules() if "lora_B" not in name]
    return (
        backbone.device.type == "cpu"
        and backbone.dtype in _TOLERANCE
        and backbone.config.hidden_act in ("silu", "swish")
        and rotary.rope_type not in _BY_LENGTH
        and all(layer.self_attn.head_dim in DIMS for layer in model.layers)
        and all(type(one) is nn.Linear for one in [*linear, backbone.lm_head])
        and all(type(parameter.data) is Tensor for parameter in model.parameters())
        and not any(m._forward_hooks or m._forward_pre_hooks for m in hooked)
    )


def _linear_layers(layer: Any) -> list[nn.Module]:
    attention, mlp = layer.self_attn, layer.mlp
    own = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
    return [*own, mlp.gate_proj, mlp.up_proj, mlp.down_proj]


def pack(weight: Tensor) -> Tensor:
    """Lay a weight ``[O, I]`` out as products.cpp reads it, padded with zeros::

    fp32  [O / 16, I, 16]        bf16  [O / 16, I / 2, 16, 2]
    """
    outputs, inputs = weight.shape
    weight = F.pad(weight, (0, -inputs % LANES, 0, -outputs % LANES))
    pair = 4 // weight.element_size()
    return weight.view(-(-outputs // LANES), LANES, -1, pair).transpose(1, 2).contiguous()


def _joined(parts: list[Tensor], alternate: bool) -> Tensor:
    """Put weights or biases of several layers below each other. alternate: a block of the one, a
    block of the other, and so on."""
    if not alternate:
        return torch.cat(parts)
    rows = [F.pad(part, (0, 0) * (part.dim() - 1) + (0, -len(part) % LANES)) for part in parts]
    blocks = [part.view(-1, LANES, *part.shape[1:]) for part in rows]
    return torch.stack(blocks, 1).flatten(0, 2)


class _Product(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "bias")),
        *((name, ctypes.c_int64) for name in ("inputs", "outputs")),
    )


class _Adapter(ctypes.Structure):
    _fields_ = (("a", _Product), ("b", _Product))


class _Block(ctypes.Structure):
    _fields_ = (
        *((name, _Product) for name in ("qkv", "o", "gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("before_attention", "before_mlp")),
        *((name, ctypes.c_void_p) for name in ("q_norm", "k_norm")),
        *((name, _Adapter) for name in ("to_qkv", "to_o", "to_gate_up", "to_down")),
    )


class _Model(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("blocks", "embeddings")),
        ("head", _Product),
        ("last_norm", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("count", "width", "inner")),
        *((name, ctypes.c_int64) for name in ("heads", "kv_heads", "dim", "bf16")),
        *((name, ctypes.c_float) for name in ("eps", "scale")),
    )


class _Rows(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("tokens", "positions", "places", "spans", "read")),
        *((name, ctypes.c_void_p) for name in ("rotary", "caches", "logits")),
        *((name, ctypes.c_int64) for name in ("rows", "ranges", "reads", "slots", "threads")),
        ("plain", ctypes.c_int64),
    )


class NativeRows:
    """Compute logits of flat rows. Packed weights are a second copy.

    gate: of a self-drafting model, whose adapter changes the rows that it names.
    """

    def __init__(self, backbone: PreTrainedModel, gate: Gate | None = None):
        """Pack the weights. Raises whatever a compiler raises."""
        self._library, self._gate = library(), gate
        self._plain, self._head = backbone.model, backbone.lm_head
        self._kept: list[Tensor] = []  # what the structures point to
        model, config = backbone.model, backbone.config
        first = model.layers[0].self_attn
        self._blocks = (_Block * len(model.layers))(*map(self._block, model.layers))
        self._model = _Model(
            ctypes.addressof(self._blocks),
            self._keep(model.embed_tokens.weight), self._product(backbone.lm_head),
            self._vector(model.norm.weight),
            len(self._blocks), config.hidden_size, config.intermediate_size,
            config.num_attention_heads, config.num_key_value_heads, first.head_dim,
            backbone.dtype == torch.bfloat16, model.norm.variance_epsilon, first.scaling,
        )  # fmt: skip
        self._rotary = self._angles(min(config.max_position_embeddings, 4096))
        self._small = sum(tensor.numel() for tensor in self._kept) < SMALL

    def _keep(self, tensor: Tensor) -> int:
        self._kept.append(tensor.detach().contiguous())
        return self._kept[-1].data_ptr()

    def _vector(self, weight: Tensor) -> int:
        return self._keep(weight.detach().float())

    def _block(self, layer: Any) -> _Block:
        attention, mlp = layer.self_attn, layer.mlp
        products = [
            self._product(attention.q_proj, attention.k_proj, attention.v_proj),
            self._product(attention.o_proj),
            self._product(mlp.gate_proj, mlp.up_proj, alternate=True),
            self._product(mlp.down_proj),
        ]
        norms = [layer.input_layernorm, layer.post_attention_layernorm]
        norms += [attention.q_norm, attention.k_norm] if hasattr(attention, "q_norm") else []
        block = _Block(*products, *(self._vector(norm.weight) for norm in norms))
        if self._gate is not None:
            block.to_qkv = self._adapter(attention.q_proj, attention.k_proj, attention.v_proj)
            block.to_o = self._adapter(attention.o_proj)
            block.to_gate_up = self._adapter(mlp.gate_proj, mlp.up_proj, alternate=True)
            block.to_down = self._adapter(mlp.down_proj)
        return block

    def _adapter(self, *layers: Any, alternate: bool = False) -> _Adapter:
        """Pack what a LoRA adds to layers with one input as two products: all A below each other,
        then each B, scaled, for the outputs of its own layer and A."""
        own = [(layer, name) for layer in layers for name in getattr(layer, "lora_B", ())]
        if not own:
            return _Adapter()
        a = [layer.lora_A[name].weight.detach() for layer, name in own]
        a = [F.pad(part, (0, 0, 0, -len(part) % LANES)) for part in a]
        dtype, starts = layers[0].weight.dtype, [0, *itertools.accumulate(map(len, a))]
        b = {id(layer): a[0].new_zeros(layer.out_features, starts[-1]) for layer in layers}
        for (layer, name), start in zip(own, starts, strict=False):
            part = layer.lora_B[name].weight.detach() * layer.scaling[name]
            b[id(layer)][:, start : start + part.shape[1]] = part
        whole = _joined(list(b.values()), alternate)
        return _Adapter(*(self._packed(part.to(dtype)) for part in (torch.cat(a), whole)))

    def _product(self, *layers: nn.Linear, alternate: bool = False) -> _Product:
        """Pack layers with one input as one product. alternate: a block of 16 outputs of the one,
        a block of the other, and so on."""

        weight = _joined([layer.weight.detach() for layer in layers], alternate)
        bias = 0
        if any(layer.bias is not None for layer in layers):
            parts = [
                layer.weight.new_zeros(layer.out_features)
                if layer.bias is None
                else layer.bias.detach()
                for layer in layers
            ]
            bias = self._vector(_joined(parts, alternate))
        return self._packed(weight, bias)

    def _packed(self, weight: Tensor, bias: int = 0) -> _Product:
        packed = pack(weight)
        inputs = packed[0].numel() // LANES
        return _Product(self._keep(packed), bias, inputs, len(weight))

    def _angles(self, positions: int) -> Tensor:
        """Cosines and sines ``[positions, 2, D]``."""
        places = torch.arange(positions)[None]
        with torch.inference_mode():
            angles: tuple[Tensor, Tensor] = self._plain.rotary_emb(torch.empty(()), places)
            return torch.stack([part[0].float() for part in angles], dim=1).contiguous()

    def __call__(
        self, tokens: Tensor, positions: Tensor, plan: SpanPlan, cache: SlotCache, read: Tensor
    ) -> Tensor:
        """Logits ``[N, V]``, in fp32, of the rows `read` ``[N]`` of rows ``[T]`` that are fed
        through the cache."""
        assert cache.slots is not None
        spans, rows = plan.spans[0], len(tokens)
        slots, plain = cache.slots, rows
        if self._gate is not None and bool((drafts := tokens == DRAFT).any()):
            # The adapter's rows behind the others.
            order = drafts.to(torch.uint8).argsort(stable=True)
            plain = rows - int(drafts.sum())
            read = torch.empty_like(order).scatter_(0, order, torch.arange(rows))[read]
            tokens = torch.where(drafts, self._gate.draft_id, tokens)
            tokens, positions, slots, spans = (
                part.index_select(0, order) for part in (tokens, positions, slots, spans)
            )
        if (needed := int(positions.max()) + 1) > len(self._rotary):
            self._rotary = self._angles(2 * needed)
        rotary = self._rotary  # held: another thread may put a larger one in its place
        given = [part.contiguous() for part in (tokens, positions, slots, spans, read)]
        buffers = [buffer.data_ptr() for pair in cache.layers for buffer in pair]
        caches = (ctypes.c_void_p * len(buffers))(*buffers)
        logits = torch.empty(len(read), self._model.head.outputs)
        described = _Rows(
            *(part.data_ptr() for part in given),
            rotary.data_ptr(), ctypes.addressof(caches), logits.data_ptr(),
            rows, spans.shape[1], len(read), cache.layers[0][0].shape[2],
            1 if self._small else torch.get_num_threads(), plain,
        )  # fmt: skip
        if self._library.forward(ctypes.byref(self._model), ctypes.byref(described)):
            raise RuntimeError(f"no code for a head dimension of {self._model.dim}")
        return logits

    @torch.inference_mode()
    def check(self, new_cache: Callable[[int], SlotCache]) -> None:
        """Raise AssertionError unless two forwards, the second on what the first has cached, give
        the logits of the plain model."""
        places = torch.arange(7)
        # Spread over the vocabulary: the first ids are of tokens that text does not have.
        tokens = places * self._plain.embed_tokens.num_embeddings // len(places)
        if self._gate is not None:
            tokens[5:] = DRAFT
        caches = [new_cache(len(places)) for _ in range(2)]
        for at, end in ((places[:4], 4), (places[4:], 7)):
            plan = SpanPlan(torch.tensor([[[0, end]]] * len(at), dtype=torch.int32))
            for each in caches:
                each.slots = at
            fed = tokens[at][None] if self._gate is None else self._gate.open(tokens[at][None])
            hidden = self._plain(
                input_ids=fed, position_ids=at[None], spans=plan,
                past_key_values=caches[0], use_cache=True,
            ).last_hidden_state[0]  # fmt: skip
            plain: Tensor = self._head(hidden).float()
            ours = self(tokens[at], at, plan, caches[1], torch.arange(len(at)))
            error, size = ((x**2).mean().sqrt().item() for x in (ours - plain, plain))
            if not error <= _TOLERANCE[hidden.dtype] * max(1.0, size):  # NaN is not
                raise AssertionError(f"logits of about {size:.3g} differ by about {error:.2g}")


class _Scored(ctypes.Structure):
    """`Scored` of confidence.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("logits", "named", "table")),
        *((name, ctypes.c_int64) for name in ("rows", "vocabulary", "mask", "threads")),
    )


def scored(logits: Tensor, mask_id: int | None, named: Tensor | None) -> Tensor:
    """Score logits ``[N, V]``, fp32 on a CPU, as `triton_kernels.confidence` defines it.
    It passes over the vocabulary twice, `confidence_reference` about ten times.

    named: a token of each row, int64 ``[N]``, or None. Returns an fp64 table: ``[2, N]`` of token
    and probability; with `named` ``[6, N]``: also named, named_log, entropy and margin.
    """
    logits, rows = logits.contiguous(), len(logits)
    table = torch.empty(2 if named is None else 6, rows, dtype=torch.float64)
    given = _Scored(
        logits.data_ptr(), None if named is None else named.data_ptr(), table.data_ptr(),
        rows, logits.shape[1], -1 if mask_id is None else mask_id, torch.get_num_threads(),
    )  # fmt: skip
    library().score(ctypes.byref(given))
    return table
