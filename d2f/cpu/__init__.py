"""Run a decoding forward in C++ on a CPU, of models in fp32 or bf16 with layers of Llama's kind.

A decoding step multiplies so few rows that it costs what reading the weights costs, and calling
operators one by one costs a small model more than computing them. Here one call does a whole
forward, from token ids to logits (forward.cpp): the weights are packed in the order in which
products.cpp reads them, and layers with one input become one product, so that a few rows cost
little more than one. A second call finds token and confidence in the logits (confidence.cpp). The
code is the same for every model; PyTorch's compiler builds it once for this CPU and keeps it in its
cache on disk. ``D2F_KERNELS=0`` leaves it out.

`compiled_rows` makes a model's forward; `scored` reads its logits.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from d2f.attention import SpanPlan
from d2f.cache import SlotCache
from d2f.contract import DRAFT
from d2f.parts import Gate
from triton_kernels.dispatch import VARIABLE

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DIMS = (8, 16, 32, 64, 80, 96, 128)  # head dimensions that forward.cpp has code for
LANES, STEP = 16, 32  # outputs of a block of packed weights, and inputs that are read at once
SMALL = 1 << 20  # weights of a model below which waking other threads costs more than they save
ONCE = 1 << 24  # weights of a model from which on they are held once, packed
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
    from transformers.models.llama.modeling_llama import LlamaModel
    from transformers.models.qwen2.modeling_qwen2 import Qwen2Model
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Model

    model = backbone.model
    if type(model) not in (LlamaModel, Qwen2Model, Qwen3Model):
        return False
    rotary = getattr(model.rotary_emb, "rotary", model.rotary_emb)  # d2f.model.Fp32Rotary has one
    linear = [one for layer in model.layers for group in _linear_layers(layer) for one in group]
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


def _linear_layers(layer: Any) -> list[list[Any]]:
    """List a layer's linear layers, those with one input together, as `Block` has them."""
    attention, mlp = layer.self_attn, layer.mlp
    return [
        [attention.q_proj, attention.k_proj, attention.v_proj],
        [attention.o_proj],
        [mlp.gate_proj, mlp.up_proj],
        [mlp.down_proj],
    ]


def pack(weight: Tensor) -> Tensor:
    """Lay a weight ``[O, I]`` out as products.cpp reads it, padded with zeros::

    fp32  [O / 16, I, 16]        bf16  [O / 16, I / 2, 16, 2]
    """
    outputs, inputs = weight.shape
    if inputs % STEP or outputs % LANES:
        weight = F.pad(weight, (0, -inputs % STEP, 0, -outputs % LANES))
    # Words of four bytes: a number of fp32, or a pair of bf16, which stays together.
    words = weight.view(torch.int32).view(-1, LANES, weight.shape[1] * weight.element_size() // 4)
    return words.transpose(1, 2).contiguous().view(weight.dtype)


class _Unpacked(nn.Module):
    """Give a layer whose weight is held packed the weight that it had, for whoever else reads it: a
    forward that is not in C++, saving, hashing. Each reading copies it."""

    def __init__(self, packed: Tensor, shape: torch.Size):
        super().__init__()
        self.packed: Tensor | None = packed
        self.shape = shape

    def right_inverse(self, weight: Tensor) -> Tensor:
        """Return what is held instead, when the layer is changed."""
        packed, self.packed = self.packed, None
        assert packed is not None
        return packed

    def forward(self, packed: Tensor) -> Tensor:
        outputs, inputs = self.shape
        words = packed.view(torch.int32)  # [O / 16, words of I, 16]
        rows = words.transpose(1, 2).flatten(0, 1).view(packed.dtype)
        return rows[:outputs, :inputs]


def _hold_packed(layer: Any, packed: Tensor) -> None:
    """Let a layer hold its weight packed alone; `state_dict` has it as before."""

    def named(module: Any, found: dict[str, Any], prefix: str, *_: Any) -> None:
        found.pop(f"{prefix}parametrizations.weight.original")
        found[f"{prefix}weight"] = module.weight.detach()

    weight = layer.weight
    # Its own, as that of a tied layer must keep its shape.
    layer.weight = nn.Parameter(weight.detach(), requires_grad=weight.requires_grad)
    held = _Unpacked(packed, weight.shape)
    # "unsafe" skips unpacking it once, to see that shape and dtype are what they were.
    parametrize.register_parametrization(layer, "weight", held, unsafe=True)
    layer._register_state_dict_hook(named)


def _joined(parts: list[Tensor]) -> Tensor:
    """Stack weights or biases of layers with one input. Of two, which are gate and up, blocks of 16
    outputs alternate."""
    if len(parts) != 2:
        return torch.cat(parts)
    rows = [F.pad(part, (0, 0) * (part.dim() - 1) + (0, -len(part) % LANES)) for part in parts]
    blocks = [part.view(-1, LANES, *part.shape[1:]) for part in rows]
    return torch.stack(blocks, 1).flatten(0, 2)


def _structure(*fields: tuple[Any, str]) -> Any:
    """Make a class that mirrors a C++ structure: types with the names of their fields."""
    members = [(name, kind) for kind, names in fields for name in names.split()]
    return type("Structure", (ctypes.Structure,), {"_fields_": members})


_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64
# Those of the same names in products.cpp, forward.cpp and confidence.cpp.
_Product = _structure((_POINTER, "weight bias"), (_INT, "inputs outputs"))
_Adapter = _structure((_Product, "a"), (_POINTER, "b starts"), (_INT, "rank"))
_Block = _structure(
    (_Product, "qkv o gate_up down"),
    (_POINTER, "before_attention before_mlp q_norm k_norm"),
    (_Adapter, "to_qkv to_o to_gate_up to_down"),
)
_Model = _structure(
    (_POINTER, "blocks embeddings"),
    (_Product, "head"),
    (_POINTER, "last_norm"),
    (_INT, "count width inner heads kv_heads dim bf16"),
    (ctypes.c_float, "eps scale"),
)
_Rows = _structure(
    (_POINTER, "tokens positions places spans read rotary caches logits"),
    (_INT, "rows ranges reads slots threads plain"),
)
_Scored = _structure((_POINTER, "logits named table"), (_INT, "rows vocabulary mask threads"))


def compiled_rows(
    backbone: PreTrainedModel, new_cache: Callable[[int], SlotCache], gate: Gate | None = None
) -> NativeRows | None:
    """Build the model's forward in C++ and compare it with the plain one.

    Returns None for a model that it is not made for or with ``D2F_KERNELS=0``; and, with a warning,
    where it cannot be built or its results differ.
    """
    if os.environ.get(VARIABLE) == "0" or not fits(backbone, gate):
        return None
    try:
        plain = _plain_logits(backbone, gate, new_cache)  # before the weights are packed
        rows = NativeRows(backbone, gate)
        rows.check(plain, new_cache)
    except Exception as error:  # whatever a compiler or a linker raises
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        warnings.warn(
            f"forwards in C++ do not work here, torch.compile is used: {reason}",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    return rows


class NativeRows:
    """Compute logits of flat rows. Of a model with `ONCE` weights or more the packed ones take the
    place of those that its layers had (`_Unpacked`); of a smaller one they are a second copy.

    gate: of a self-drafting model, whose adapter changes the rows that it names.
    in_tiles: whether AMX multiplies, for which rows cost less.
    """

    def __init__(self, backbone: PreTrainedModel, gate: Gate | None = None):
        """Pack the weights. Raises whatever a compiler raises."""
        self._library, self._gate = library(), gate
        self._plain = backbone.model
        self._kept: list[Tensor] = []  # what the structures point to
        model, config = backbone.model, backbone.config
        first = model.layers[0].self_attn
        self._once = backbone.num_parameters() >= ONCE
        tied = backbone.lm_head.weight is model.embed_tokens.weight
        self._blocks = (_Block * len(model.layers))(*map(self._block, model.layers))
        self._model = _Model(
            ctypes.addressof(self._blocks),
            0 if tied else self._keep(model.embed_tokens.weight),  # 0: they are the head's
            self._product([backbone.lm_head]),
            self._vector(model.norm.weight),
            len(self._blocks), config.hidden_size, config.intermediate_size,
            config.num_attention_heads, config.num_key_value_heads, first.head_dim,
            backbone.dtype == torch.bfloat16, model.norm.variance_epsilon, first.scaling,
        )  # fmt: skip
        if tied and parametrize.is_parametrized(backbone.lm_head):
            held = backbone.lm_head.parametrizations.weight
            _hold_packed(model.embed_tokens, held.original.data)
            model.embed_tokens.parametrizations.weight.original = held.original  # tied as before
        if self._once:
            with contextlib.suppress(AttributeError):  # glibc keeps what was freed
                ctypes.CDLL(None).malloc_trim(0)
        self._rotary = self._angles(min(config.max_position_embeddings, 4096))
        self._small = sum(tensor.numel() for tensor in self._kept) < SMALL
        self.in_tiles = bool(self._model.bf16 and self._library.tiled())

    def _keep(self, tensor: Tensor) -> int:
        self._kept.append(tensor.detach().contiguous())
        return self._kept[-1].data_ptr()

    def _vector(self, weight: Tensor) -> int:
        return self._keep(weight.detach().float())

    def _block(self, layer: Any) -> Any:
        attention = layer.self_attn
        norms = [layer.input_layernorm, layer.post_attention_layernorm]
        norms += [attention.q_norm, attention.k_norm] if hasattr(attention, "q_norm") else []
        vectors = [self._vector(norm.weight) for norm in norms] + [None] * (4 - len(norms))
        together = _linear_layers(layer)
        adapters = map(self._adapter, together) if self._gate is not None else ()
        return _Block(*map(self._product, together), *vectors, *adapters)

    def _adapter(self, layers: list[Any]) -> Any:
        """Pack what a LoRA adds to layers with one input: all A below each other as one product,
        and B, scaled, by blocks of outputs, each with the part of A's results that it takes."""
        own = [(layer, name) for layer in layers for name in getattr(layer, "lora_B", ())]
        if not own:
            return _Adapter()
        a = [layer.lora_A[name].weight.detach() for layer, name in own]
        starts = [0, *itertools.accumulate(map(len, a))]
        b = {id(layer): a[0].new_zeros(layer.out_features, starts[-1]) for layer in layers}
        for (layer, name), start in zip(own, starts, strict=False):
            part = layer.lora_B[name].weight.detach() * layer.scaling[name]
            b[id(layer)][:, start : start + part.shape[1]] = part
        whole = _joined(list(b.values()))
        blocks = F.pad(whole, (0, 0, 0, -len(whole) % LANES)).view(-1, LANES, starts[-1])
        used = blocks.any(1)  # [blocks, results of A]
        first, end = used.int().argmax(1), starts[-1] - used.flip(1).int().argmax(1)
        rank = int((end - first).where(used.any(1), 1).max())
        first = first.clamp(max=starts[-1] - rank)
        taken = (first[:, None] + torch.arange(rank))[:, None].expand(-1, LANES, -1)
        dtype = layers[0].weight.dtype
        b_blocks = blocks.gather(2, taken).transpose(1, 2).to(dtype)
        return _Adapter(
            self._packed(torch.cat(a).to(dtype)), self._keep(b_blocks), self._keep(first), rank
        )

    def _product(self, layers: list[Any]) -> Any:
        """Pack layers with one input as one product."""
        weight = _joined([layer.weight.detach() for layer in layers])
        bias = 0
        if any(layer.bias is not None for layer in layers):
            zeros = [layer.weight.new_zeros(layer.out_features) for layer in layers]
            own = [
                z if one.bias is None else one.bias for z, one in zip(zeros, layers, strict=True)
            ]
            bias = self._vector(_joined(own))
        product = self._packed(weight, bias)
        if self._once and not any(
            layer.weight.shape[0] % LANES or layer.weight.shape[1] % STEP for layer in layers
        ):
            self._replace(layers, self._kept[-1])
        return product

    def _replace(self, layers: list[Any], packed: Tensor) -> None:
        """Give layers that were packed as one product, in whole blocks, their parts of it."""
        blocks = [layer.weight.shape[0] // LANES for layer in layers]
        parts = packed.split(blocks) if len(layers) != 2 else [packed[0::2], packed[1::2]]
        for layer, part in zip(layers, parts, strict=True):
            _hold_packed(getattr(layer, "base_layer", layer), part)

    def _packed(self, weight: Tensor, bias: int = 0) -> Any:
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
    def check(self, plain: list[Tensor], new_cache: Callable[[int], SlotCache]) -> None:
        """Raise AssertionError unless this gives the logits of the plain model, `_plain_logits`."""
        forwards = _checked(self._plain, self._gate, new_cache)
        for want, (tokens, places, plan, own) in zip(plain, forwards, strict=True):
            ours = self(tokens, places, plan, own, torch.arange(len(tokens)))
            error, size = ((x**2).mean().sqrt().item() for x in (ours - want, want))
            if not error <= _TOLERANCE[self._plain.dtype] * max(1.0, size):  # NaN is not
                raise AssertionError(f"logits of about {size:.3g} differ by about {error:.2g}")


def _checked(
    model: Any, gate: Gate | None, new_cache: Callable[[int], SlotCache]
) -> Iterator[tuple[Tensor, Tensor, SpanPlan, SlotCache]]:
    """Yield tokens, places, mask and cache of two forwards to compare, the second on what the first
    has cached."""
    places = torch.arange(7)
    # Spread over the vocabulary: the first ids are of tokens that text does not have.
    tokens = places * model.embed_tokens.num_embeddings // len(places)
    if gate is not None:
        tokens[5:] = DRAFT
    own = new_cache(len(places))
    for at, end in ((places[:4], 4), (places[4:], 7)):
        own.slots = at
        seen = torch.tensor([[[0, end]]] * len(at), dtype=torch.int32)
        yield tokens[at], at, SpanPlan(seen), own


@torch.inference_mode()
def _plain_logits(
    backbone: PreTrainedModel, gate: Gate | None, new_cache: Callable[[int], SlotCache]
) -> list[Tensor]:
    """Compute the logits that the C++ code is compared with."""
    found = []
    for tokens, places, plan, own in _checked(backbone.model, gate, new_cache):
        fed = tokens[None] if gate is None else gate.open(tokens[None])
        hidden = backbone.model(
            input_ids=fed, position_ids=places[None], spans=plan,
            past_key_values=own, use_cache=True,
        ).last_hidden_state[0]  # fmt: skip
        found.append(backbone.lm_head(hidden).float())
    return found


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
