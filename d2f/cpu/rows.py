"""Run all layers of a forward in one call of C++ (rows.cpp), and read its logits (confidence.cpp).

The linear layers are packed: layers with one input become one product, whose weight is a copy in
the order in which oneDNN reads it. (PyTorch's own fp32 product rearranges the weight at every call,
which the few rows of a decoding step do not pay for.)

oneDNN generates code for each shape of a product, so for each number of rows, which takes a small
model as long as some forwards; it keeps the last 1,024. Decoding has any number of rows, so above
32 they are rounded up to one of 16 numbers an octave (at most a sixteenth more), and a small
model's code is generated when the model is compiled.
"""

from __future__ import annotations

import ctypes
import platform
import weakref
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

DIMS = (8, 16, 32, 64, 80, 96, 128)  # head dimensions that attention.cpp has code for
# Rows x slots of a request (the mean of a forward) up to which attention in C++ is the faster one.
# Beyond, scaled_dot_product_attention is: its tiles of rows share what they read.
MOST = 16 * 1024
WARM_ROWS = 512  # numbers of rows that a small model is warmed up for
SMALL = 2 << 20  # weights in products of different shape, up to which a model is small
_MODELS = (LlamaModel, Qwen2Model, Qwen3Model)
_BY_LENGTH = ("dynamic", "longrope")  # RoPE whose angles depend on the length of the sequence
_TOLERANCE = 1e-3  # of the largest hidden state, between the plain forward and this one


@cache
def library() -> Any:
    """Compile the files together and load them. Raises whatever a compiler raises."""
    from torch._inductor.codecache import CppCodeCache

    names = ("attention.cpp", "confidence.cpp", "rows.cpp")
    files = (Path(__file__).with_name(name) for name in names)
    source = "\n".join(file.read_text(encoding="utf-8") for file in files)
    return CppCodeCache.load(source, "cpu", extra_flags=("-ffp-contract=fast",))


def can_pack(backbone: PreTrainedModel) -> bool:
    """Say whether the layers can be packed here: fp32 on an x86 CPU, not quantised."""
    return (
        getattr(backbone, "quantized", None) is None
        and backbone.device.type == "cpu"
        and backbone.dtype == torch.float32
        and platform.machine() in ("x86_64", "AMD64")
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def fits(backbone: PreTrainedModel) -> bool:
    """Say whether the C++ code computes what this model computes: layers of the known types, none
    replaced, hooked or split over processes."""
    model = backbone.model
    if type(model) not in _MODELS or not can_pack(backbone):
        return False
    rotary = getattr(model.rotary_emb, "rotary", model.rotary_emb)  # d2f.model.Fp32Rotary has one
    return (
        backbone.config.hidden_act in ("silu", "swish")
        and rotary.rope_type not in _BY_LENGTH
        and all(layer.self_attn.head_dim in DIMS for layer in model.layers)
        and all(type(one) is nn.Linear for layer in model.layers for one in _linear_layers(layer))
        and all(type(parameter.data) is Tensor for parameter in model.parameters())
        and not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    )


def _linear_layers(layer: Any) -> list[nn.Module]:
    attention, mlp = layer.self_attn, layer.mlp
    own = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
    return [*own, mlp.gate_proj, mlp.up_proj, mlp.down_proj]


def multiplied_rows(rows: int) -> int:
    """Round a number of rows up; the rows behind those asked for are zeros."""
    step = 1 << max(0, (rows - 1).bit_length() - 5)
    return -(-rows // step) * step


class Product:
    """Linear layers with one input as one product::

    [T, C] @ q_proj k_proj v_proj  =  [T, q | k | v]
    """

    def __init__(self, *layers: nn.Linear):
        weight = torch.cat([layer.weight.detach() for layer in layers])
        biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
        self.outputs, self.inputs = weight.shape
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight)
        self.bias = torch.cat(biases) if biases else None

    def __call__(self, x: Tensor) -> Tensor:
        """Outputs ``[..., outputs]`` of x ``[..., inputs]``."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise.default(
            x, self.weight, self.bias, "none", [], ""
        )
        return out


class _Product(ctypes.Structure):
    _fields_ = (("weight", ctypes.c_void_p), ("bias", ctypes.c_void_p))


class _Block(ctypes.Structure):
    _fields_ = (
        *((name, _Product) for name in ("qkv", "o", "gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("before_attention", "before_mlp")),
        *((name, ctypes.c_void_p) for name in ("q_norm", "k_norm")),
    )


class _Model(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("blocks", "last_norm")),
        *((name, ctypes.c_int64) for name in ("count", "width", "inner")),
        *((name, ctypes.c_int64) for name in ("heads", "kv_heads", "dim")),
        *((name, ctypes.c_float) for name in ("eps", "scale")),
    )


class _Rows(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("hidden", "rotary", "positions")),
        *((name, ctypes.c_void_p) for name in ("places", "spans", "caches")),
        *((name, ctypes.c_int64) for name in ("rows", "ranges", "slots", "threads", "multiplied")),
    )


class NativeRows:
    """Compute the last hidden states of flat rows. Packed weights are a second copy."""

    def __init__(self, backbone: PreTrainedModel):
        """Pack the weights. Raises whatever a compiler raises."""
        self._library = library()
        self._plain = model = backbone.model
        self.products: list[Product] = []
        self._handles: list[int] = []
        weakref.finalize(self, _delete, self._library, self._handles)
        self._norms = [model.norm.weight.detach().contiguous()]
        self._blocks = (_Block * len(model.layers))(*map(self._block, model.layers))
        first, config = model.layers[0].self_attn, backbone.config
        self.dim: int = first.head_dim
        self.scale: float = first.scaling
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._model = _Model(
            ctypes.addressof(self._blocks), self._norms[0].data_ptr(), len(self._blocks),
            config.hidden_size, config.intermediate_size, self.heads, self.kv_heads, self.dim,
            model.norm.variance_epsilon, self.scale,
        )  # fmt: skip
        self._rotary = self._angles(min(config.max_position_embeddings, 4096))

    def _block(self, layer: Any) -> _Block:
        attention, mlp = layer.self_attn, layer.mlp
        products = [
            self._product(attention.q_proj, attention.k_proj, attention.v_proj),
            self._product(attention.o_proj),
            self._product(mlp.gate_proj, mlp.up_proj),
            self._product(mlp.down_proj),
        ]
        norms = [layer.input_layernorm, layer.post_attention_layernorm]
        norms += [attention.q_norm, attention.k_norm] if hasattr(attention, "q_norm") else []
        weights = [norm.weight.detach().contiguous() for norm in norms]
        self._norms += weights  # holds what the structure points to
        return _Block(*products, *(weight.data_ptr() for weight in weights))

    def _product(self, *layers: nn.Linear) -> _Product:
        product = Product(*layers)
        self.products.append(product)
        handles = [_handle(x) for x in (product.weight, product.bias) if x is not None]
        self._handles += handles
        return _Product(*handles)

    def _angles(self, positions: int) -> Tensor:
        """Cosines and sines ``[positions, 2, D]``."""
        places = torch.arange(positions)[None]
        with torch.inference_mode():
            angles: tuple[Tensor, Tensor] = self._plain.rotary_emb(torch.empty(()), places)
            return torch.stack([part[0].float() for part in angles], dim=1).contiguous()

    def __call__(
        self, tokens: Tensor, positions: Tensor, plan: SpanPlan, cache: SlotCache
    ) -> Tensor:
        """Last hidden states ``[T, C]`` of rows ``[T]`` fed through the cache."""
        assert cache.slots is not None
        hidden = F.embedding(tokens, self._plain.embed_tokens.weight.detach()).contiguous()
        spans, places, rows = plan.spans[0].contiguous(), cache.slots.contiguous(), len(tokens)
        positions = positions.contiguous()
        if (needed := int(positions.max()) + 1) > len(self._rotary):
            self._rotary = self._angles(2 * needed)
        rotary = self._rotary  # held: another thread may put a larger one in its place
        buffers = [buffer.data_ptr() for pair in cache.layers for buffer in pair]
        caches = (ctypes.c_void_p * len(buffers))(*buffers)
        slots = cache.layers[0][0].shape[2]
        given = _Rows(
            hidden.data_ptr(), rotary.data_ptr(), positions.data_ptr(), places.data_ptr(),
            spans.data_ptr(), ctypes.addressof(caches), rows, spans.shape[1], slots,
            torch.get_num_threads(), multiplied_rows(rows),
        )  # fmt: skip
        requests = len(plan.segments or [None])
        # Most forwards are small enough without a look into the spans.
        if rows * slots <= MOST * requests or _sees_little(spans, requests):
            _check(self._library.forward(ctypes.byref(self._model), ctypes.byref(given)))
        else:
            self._by_layers(given, plan, cache)
        return hidden

    def _by_layers(self, given: _Rows, plan: SpanPlan, cache: SlotCache) -> None:
        """Run the forward with plain attention between two calls of C++ a layer."""
        parts = [n * self.dim for n in (self.heads, self.kv_heads, self.kv_heads)]
        joined = torch.empty(given.rows, sum(parts))
        model, rows = ctypes.byref(self._model), ctypes.byref(given)
        for i in range(len(self._blocks)):
            at = ctypes.c_void_p(joined.data_ptr())
            _check(self._library.before_attention(model, rows, ctypes.c_int64(i), at))
            query, key, value = (
                part.view(1, given.rows, -1, self.dim).transpose(1, 2)
                for part in joined.split(parts, -1)
            )
            keys, values = cache.update(key, value, i)
            out = plan.attend(None, query, keys, values, self.scale).contiguous()
            at = ctypes.c_void_p(out.data_ptr())
            _check(self._library.after_attention(model, rows, ctypes.c_int64(i), at))
        self._library.normalise_last(model, rows)

    @torch.inference_mode()
    def check(self, new_cache: Callable[[int], SlotCache]) -> None:
        """Raise AssertionError unless two forwards, the second on what the first has cached, give
        the hidden states of the plain model."""
        places = torch.arange(7)
        tokens = places % self._plain.embed_tokens.num_embeddings
        caches = [new_cache(len(places)) for _ in range(2)]
        for at, end in ((places[:4], 4), (places[4:], 7)):
            plan = SpanPlan(torch.tensor([[[0, end]]] * len(at), dtype=torch.int32))
            for each in caches:
                each.slots = at
            plain: Tensor = self._plain(
                input_ids=tokens[at][None], position_ids=at[None], spans=plan,
                past_key_values=caches[0], use_cache=True,
            ).last_hidden_state[0]  # fmt: skip
            ours = self(tokens[at], at, plan, caches[1])
            error, most = (ours - plain).abs().max().item(), plain.abs().max().item()
            if not error <= _TOLERANCE * max(1.0, most):  # NaN is not
                raise AssertionError(f"hidden states up to {most:.3g} differ by {error:.2g}")

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Let oneDNN generate a small model's code for all usual numbers of rows. A large model
        computes longer than it would wait for that."""
        by_shape = {(p.inputs, p.outputs, p.bias is None): p for p in self.products}
        if sum(inputs * outputs for inputs, outputs, _ in by_shape) <= SMALL:
            for rows in sorted({multiplied_rows(rows) for rows in range(1, WARM_ROWS + 1)}):
                for product in by_shape.values():
                    product(torch.zeros(rows, product.inputs))


def _sees_little(spans: Tensor, requests: int) -> bool:
    return int((spans[..., 1] - spans[..., 0]).sum()) <= MOST * requests


def _handle(tensor: Tensor) -> int:
    """Return a handle of a tensor for PyTorch's C interface, valid until `_delete`."""
    capsule = torch._C._aoti.unsafe_alloc_void_ptr_from_tensor(tensor)
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    return int(pointer(capsule, None))


def _delete(library: Any, handles: list[int]) -> None:
    for handle in handles:
        library.delete_handle(ctypes.c_void_p(handle))


def _check(failed: int) -> None:
    if failed:
        raise RuntimeError("a forward in C++ failed; PyTorch has said why above")


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
