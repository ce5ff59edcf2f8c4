"""All layers of a decoding forward on a CPU in one call of C++ (native_rows.cpp): fp32, of models
whose layers are Llama's, Qwen2's or Qwen3's.

Of a small model's forward most of the time goes between its products, in what calls them one by
one, even through `torch.compile`. Here oneDNN's products are called through PyTorch's C interface
with what lies between them: norms, RoPE, the cache, attention, SwiGLU. Nothing is traced either:
the code is the same for every model, and compiled once, into the cache on disk of PyTorch's
compiler.

A forward whose rows see very much (`d2f.cpu.pays`) takes its attention from the plain way, layer
by layer. ``D2F_KERNELS=0`` leaves the code out.
"""

from __future__ import annotations

import ctypes
import os
import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaModel
from transformers.models.qwen2.modeling_qwen2 import Qwen2Model
from transformers.models.qwen3.modeling_qwen3 import Qwen3Model

from d2f import cpu as native
from d2f.attention import SpanPlan
from d2f.cache import SlotCache
from d2f.cpu import built
from d2f.cpu.packed import MadeCode, Product, can_pack, multiplied_rows
from triton_kernels.confidence import confidence_reference
from triton_kernels.dispatch import VARIABLE, compare, random_inputs

_MODELS = (LlamaModel, Qwen2Model, Qwen3Model)
_BY_LENGTH = ("dynamic", "longrope")  # RoPE whose angles depend on the length of the sequence
_BEYOND_ROTARY = 3  # of the C++ code's answers; 0 is done
_TOLERANCE = 1e-3  # of the largest hidden state, between the plain forward and this one


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
        ("blocks", ctypes.c_void_p),
        ("last_norm", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("count", "width", "inner")),
        *((name, ctypes.c_int64) for name in ("heads", "kv_heads", "dim")),
        *((name, ctypes.c_float) for name in ("eps", "scale")),
    )


class _Rows(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("hidden", "rotary", "positions")),
        *((name, ctypes.c_void_p) for name in ("places", "spans", "caches")),
        *((name, ctypes.c_int64) for name in ("rows", "rotary_rows", "ranges", "slots", "threads")),
        ("multiplied", ctypes.c_int64),
    )


@cache
def library() -> Any:
    """The compiled code. Raises whatever a compiler may."""
    return native.built("span_attention.cpp", "native_rows.cpp")


def native_rows(
    backbone: PreTrainedModel, new_cache: Callable[[int], SlotCache]
) -> NativeRows | None:
    """The model's forwards in C++, looked at beside the plain ones; None where it is of another
    kind, and, with a warning, where the code cannot be built here or computes something else."""
    if os.environ.get(VARIABLE) == "0" or not fits(backbone):
        return None
    try:
        rows = NativeRows(backbone)
        rows.check(new_cache)
    except Exception as error:  # whatever a compiler or the linker may raise
        reason = str(error).strip().splitlines() or [type(error).__name__]
        warnings.warn(
            f"forwards in C++ do not work here, torch.compile is used: {reason[0]}",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    return rows


def fits(backbone: PreTrainedModel) -> bool:
    """Whether the C++ code computes what this model's layers do: of the types that it knows, with
    nothing put in place of their parts or hooked in between, whole in this process."""
    model = backbone.model
    if type(model) not in _MODELS or not can_pack(backbone):
        return False
    rotary = getattr(model.rotary_emb, "rotary", model.rotary_emb)  # d2f.model.Fp32Rotary has one
    return (
        backbone.config.hidden_act in ("silu", "swish")
        and rotary.rope_type not in _BY_LENGTH
        and all(layer.self_attn.head_dim in native.DIMS for layer in model.layers)
        and all(type(product) is nn.Linear for layer in model.layers for product in _linear(layer))
        and all(type(parameter.data) is Tensor for parameter in model.parameters())
        and not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    )


class NativeRows:
    """The hidden states of flat rows. The weights of its products are copies (`d2f.cpu.packed`)."""

    def __init__(self, backbone: PreTrainedModel):
        """Raises whatever a compiler may."""
        self._library = library()
        self._plain = model = backbone.model
        first = model.layers[0].self_attn
        self.products: list[Product] = []
        self._handles: list[int] = []
        weakref.finalize(self, _let_go, self._library, self._handles)
        self._norms = [model.norm.weight.detach().contiguous()]
        blocks = (_Block * len(model.layers))(*(self._block(layer) for layer in model.layers))
        self._blocks = blocks
        self.dim: int = first.head_dim
        self.scale: float = first.scaling
        config = backbone.config
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._model = _Model(
            ctypes.addressof(blocks), self._norms[0].data_ptr(), len(blocks),
            config.hidden_size, config.intermediate_size, self.heads, self.kv_heads, self.dim,
            model.norm.variance_epsilon, self.scale,
        )  # fmt: skip
        self.code = MadeCode(self.products)
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
        self._norms += weights
        return _Block(*products, *(weight.data_ptr() for weight in weights))

    def _product(self, *layers: nn.Linear) -> _Product:
        product = Product(list(layers))
        self.products.append(product)
        tensors = [tensor for tensor in product.tensors if tensor is not None]
        handles = [_handle(tensor) for tensor in tensors]
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
        buffers = [buffer.data_ptr() for pair in cache.layers for buffer in pair]
        caches = (ctypes.c_void_p * len(buffers))(*buffers)
        slots = cache.layers[0][0].shape[2]
        rotary = self._rotary  # held: another thread may put a larger one in its place
        given = _Rows(
            hidden.data_ptr(), rotary.data_ptr(), positions.data_ptr(), places.data_ptr(),
            spans.data_ptr(), ctypes.addressof(caches), rows, len(rotary), spans.shape[1],
            slots, torch.get_num_threads(), multiplied_rows(rows),
        )  # fmt: skip
        if self._library.check_rows(ctypes.byref(given)) == _BEYOND_ROTARY:
            self._rotary = rotary = self._angles(2 * (int(positions.max()) + 1))
            given.rotary, given.rotary_rows = rotary.data_ptr(), len(rotary)
        requests = len(plan.segments or [None])
        # Most forwards are seen to be small without a look into the spans.
        if rows * slots <= native.MOST * requests or native.pays(spans, requests):
            _checked(self._library.forward(ctypes.byref(self._model), ctypes.byref(given)))
        else:
            self._by_layers(given, plan, cache)
        return hidden

    def _by_layers(self, given: _Rows, plan: SpanPlan, cache: SlotCache) -> None:
        """The forward with plain attention."""
        parts = [n * self.dim for n in (self.heads, self.kv_heads, self.kv_heads)]
        joined = torch.empty(given.rows, sum(parts))
        model, rows = ctypes.byref(self._model), ctypes.byref(given)
        for i in range(len(self._blocks)):
            at = ctypes.c_void_p(joined.data_ptr())
            _checked(self._library.before_attention(model, rows, ctypes.c_int64(i), at))
            query, key, value = (
                part.view(1, given.rows, -1, self.dim).transpose(1, 2)
                for part in joined.split(parts, -1)
            )
            keys, values = cache.update(key, value, i)
            out = plan.attend(None, query, keys, values, self.scale).contiguous()
            at = ctypes.c_void_p(out.data_ptr())
            _checked(self._library.after_attention(model, rows, ctypes.c_int64(i), at))
        self._library.normalise_last(model, rows)

    def check(self, new_cache: Callable[[int], SlotCache]) -> None:
        """Raise AssertionError unless two forwards, the second on what the first has cached, give
        the hidden states of the plain model."""
        places = torch.arange(7)
        tokens = places % self._plain.embed_tokens.num_embeddings
        caches = [new_cache(len(places)) for _ in range(2)]
        with torch.inference_mode():
            for at, end in ((places[:4], 4), (places[4:], 7)):
                spans = torch.tensor([[[0, end]]] * len(at), dtype=torch.int32)
                for each in caches:
                    each.slots = at
                plain: Tensor = self._plain(
                    input_ids=tokens[at][None], position_ids=at[None], spans=SpanPlan(spans),
                    past_key_values=caches[0], use_cache=True,
                ).last_hidden_state[0]  # fmt: skip
                ours = self(tokens[at], at, SpanPlan(spans), caches[1])
                error, most = (ours - plain).abs().max().item(), plain.abs().max().item()
                if not error <= _TOLERANCE * max(1.0, most):  # NaN is not
                    raise AssertionError(f"hidden states up to {most:.3g} differ by {error:.2g}")


def _linear(layer: Any) -> list[nn.Module]:
    attention, mlp = layer.self_attn, layer.mlp
    own = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
    return [*own, mlp.gate_proj, mlp.up_proj, mlp.down_proj]


def _handle(tensor: Tensor) -> int:
    """A tensor for PyTorch's C interface; it lives until `_let_go`."""
    capsule = torch._C._aoti.unsafe_alloc_void_ptr_from_tensor(tensor)
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    return int(pointer(capsule, None))


def _let_go(library: Any, handles: list[int]) -> None:
    for handle in handles:
        library.let_go(ctypes.c_void_p(handle))


def _checked(answer: int) -> None:
    """Raise RuntimeError unless the C++ code answered that it is done."""
    if answer:
        raise RuntimeError(f"a forward in C++ failed (code {answer}); PyTorch has said why above")


# Of rows of logits on a CPU the chosen token and how sure the model is of it, in one call of C++
# (confidence.cpp), for compiled models in fp32.
#
# The plain computation, `triton_kernels.confidence.confidence_reference`, goes over the vocabulary
# about ten times, this one twice. Built, looked at and
# left out as `d2f.cpu` says.


class _Scored(ctypes.Structure):
    """`Scored` of confidence.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("logits", "named", "table")),
        *((name, ctypes.c_int64) for name in ("rows", "vocabulary", "mask", "threads")),
    )


@cache
def library_native_confidence() -> Any:
    """The compiled code. Raises whatever a compiler may."""
    return built("span_attention.cpp", "confidence.cpp")


def can_score() -> bool:
    """Whether the code is wanted, can be built here and gives what the plain computation gives;
    warns, once, where it is and does not."""
    return os.environ.get(VARIABLE) != "0" and _is_sound()


@cache
def _is_sound() -> bool:
    try:
        with torch.inference_mode(False):
            _check()
    except Exception as error:  # whatever a compiler or the linker may raise
        reason = str(error).strip().splitlines() or [type(error).__name__]
        warnings.warn(
            f"confidence in C++ does not work here, the plain one is used: {reason[0]}",
            RuntimeWarning,
            stacklevel=3,
        )
        return False
    return True


def scored(logits: Tensor, mask_id: int | None, named: Tensor | None) -> Tensor:
    """An fp64 table ``[2, N]`` of logits ``[N, V]``, fp32 on a CPU: token and probability as
    `triton_kernels.confidence` has them; with named, int64 ``[N]``, ``[6, N]``: also named,
    named_log, entropy and margin."""
    logits, rows = logits.contiguous(), len(logits)
    table = torch.empty(2 if named is None else 6, rows, dtype=torch.float64)
    given = _Scored(
        logits.data_ptr(), None if named is None else named.data_ptr(), table.data_ptr(),
        rows, logits.shape[1], -1 if mask_id is None else mask_id, torch.get_num_threads(),
    )  # fmt: skip
    library_native_confidence().score(ctypes.byref(given))
    return table


def _check() -> None:
    """Rows that do not fill a vector, a mask id, equal logits."""
    (logits,) = random_inputs([(5, 43)], torch.float32, torch.device("cpu"))
    logits[1, 7] = logits[1, 30] = 9.0
    named = torch.tensor([0, 7, 3, 42, 5])

    def compute(given: Sequence[Tensor], kernel: bool) -> list[Tensor]:
        if kernel:
            return list(scored(given[0], 3, named))
        found = confidence_reference(given[0], mask_id=3, named=named)
        assert found.named is not None and found.named_log is not None
        columns = [found.token, found.probability, found.named, found.named_log]
        return [column.double() for column in (*columns, found.entropy, found.margin)]

    compare("confidence in C++", [logits], compute)
