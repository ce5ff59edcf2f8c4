"""What a decoding forward of the engine moves and computes, launch by launch, by the sizes of its
tensors; nothing is allocated and nothing is measured (`python -m benchmarks.decode_step --count`).

The model runs on the meta device. There every operator that is no view is a launch, and so is every
Triton kernel; a launch's bytes are those of the tensors that it reads and writes, each once, of a
table only the rows that are looked up. Compiled and joined it launches by two rules, whose number
of launches tests/test_launches.py holds against the compiler's:

    products of one input are one product                          q k v, gate up
    small operators are one launch until a product or a kernel     add and norm, RoPE and casts,
    wants what they make; it reads what it does not make itself,   SiLU x up
    and writes what is wanted later

An estimate of the time gives each launch what its bytes take at the memory's speed, or its products
at the arithmetic's if that is longer, and a gap: what passes until the next one keeps the memory
busy again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import KernelInterface

from benchmarks.span_attention import decoding_spans
from d2f import attention
from d2f.attention import SpanPlan
from d2f.cache import SlotCache
from d2f.model import DiffusionModel
from triton_kernels import span_attention

_PRODUCTS = ("mm", "addmm", "bmm")
_LOOKUPS = ("embedding", "index_select")


@dataclass(frozen=True)
class Part:
    """Memory of a tensor that a launch touches. storage: which memory; bytes: how much of it."""

    storage: int
    bytes: int


@dataclass
class Launch:
    """One launch. small: an operator that a compiler fuses with its neighbours. kernel: one of this
    project's Triton kernels."""

    name: str
    reads: list[Part]
    writes: list[Part]
    flops: int = 0
    small: bool = False
    kernel: bool = False
    source: int = 0  # of a product: the storage that it multiplies with its weight

    @property
    def bytes(self) -> int:
        """All that it touches; a part that is read and written counts once."""
        return sum(_largest([*self.reads, *self.writes]).values())


@dataclass(frozen=True)
class Gpu:
    """What an estimate takes for given: bytes and floating-point operations a second, and the
    seconds between two launches of a graph."""

    bytes_per_second: float
    flops_per_second: float
    gap: float

    def seconds(self, launches: Sequence[Launch]) -> float:
        return sum(
            max(x.bytes / self.bytes_per_second, x.flops / self.flops_per_second) + self.gap
            for x in launches
        )


@dataclass
class _Record(TorchDispatchMode):
    """Records the launches of what runs within it."""

    launches: list[Launch] = field(default_factory=list)
    kept: list[Tensor] = field(default_factory=list)  # so that no storage is taken for another

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        name = function.name().removeprefix("aten::").split(".")[0]
        if function.is_view or "empty" in name or name in ("_unsafe_view", "detach"):
            return out
        given = [x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if _is_tensor(x)]
        made = [x for x in torch.utils._pytree.tree_leaves(out) if _is_tensor(x)]
        reads, writes = [_part(x) for x in given], [_part(x) for x in made]
        if name in _LOOKUPS:
            reads = [Part(reads[0].storage, writes[0].bytes), *reads[1:]]
        product = name in _PRODUCTS
        launch = Launch(name, reads, writes, small=not product)
        if product:
            left, right = given[-2:]
            launch.flops = 2 * left.numel() * right.shape[-1]
            launch.source = _part(left).storage
        self._add(launch, [*given, *made])
        return out

    def kernel(self, name: str, tensors: list[Tensor]) -> None:
        """Record a Triton kernel by the tensors that it is given; of the cache that rows are
        written to, as much as they are."""
        if name == "write":
            keys, values, slots, *caches = tensors
            rows = [_part(x) for x in (keys, values, slots)]
            written = [Part(_part(x).storage, rows[0].bytes) for x in caches]
            self._add(Launch(name, rows, written, kernel=True), tensors)
        else:
            parts = [_part(x) for x in tensors]
            self._add(Launch(name, [], parts, kernel=True), tensors)

    def _add(self, launch: Launch, tensors: list[Tensor]) -> None:
        self.launches.append(launch)
        self.kept += tensors


class _AsCompiled(SpanPlan):
    """Attends as `d2f.compile` does: casts first, then the operator that writes the slots too."""

    def __init__(self, spans: Tensor, cache: SlotCache):
        super().__init__(spans)
        self.cache = cache

    def attend(
        self,
        layer: nn.Module | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None = None,
    ) -> Tensor:
        assert layer is not None
        query, key = query.to(value.dtype), key.to(value.dtype)
        keys, values = self.cache.update(key, value, layer.layer_idx)
        return super().attend(layer, query, keys, values, scale)


def bytes_needed(model: DiffusionModel, rows: int, cached: int) -> int:
    """Bytes that one forward must read."""
    backbone = model.backbone
    weights = sum(p.numel() * p.element_size() for p in backbone.parameters())
    table = backbone.model.embed_tokens.weight
    keys = model.new_cache(1).layers
    a_slot = sum(x.numel() * x.element_size() for layer in keys for x in layer)
    return weights - table.numel() * table.element_size() + a_slot * (cached + rows)


def count(model: DiffusionModel, rows: int, cached: int) -> dict[str, list[Launch]]:
    """The launches of a forward of `rows` rows, all of them read, on `cached` slots, from their
    embeddings to their logits: ``eager``, and ``compiled`` with joined products. model: on the
    meta device."""
    cache = model.new_cache(cached + rows + 1)
    places = torch.empty(rows, dtype=torch.int64, device="meta")
    cache.slots = places
    spans = decoding_spans(rows, cached).to("meta")

    def eager() -> None:
        model.decode_rows(places, places, SpanPlan(spans), cache, places)

    def compiled() -> None:
        hidden = model.hidden(places[None], _AsCompiled(spans, cache), places[None])
        model.head(hidden[0].index_select(0, places))

    records = []
    for run in (eager, compiled):
        record = _Record()
        # Not inference mode: there composite operators come whole, and a cast is taken for a view.
        with torch.no_grad(), _recorded_kernels(record.kernel), record:
            run()
        records.append(record.launches)
    return {"eager": records[0], "compiled": fused(records[1])}


def fused(launches: Sequence[Launch]) -> list[Launch]:
    """The same work as a compiled model with joined products launches it, as the module says."""
    found: list[Launch] = []
    run: list[Launch] = []  # small ones whose results nobody has asked for yet
    for i, launch in enumerate(launches):
        if launch.small:
            run.append(launch)
            continue
        made = {part.storage for small in run for part in small.writes}
        if made & {part.storage for part in (*launch.reads, *launch.writes)}:
            found.append(_as_one(run, launches[i:]))
            run = []
        before = found[-1] if found else None
        if before is not None and launch.source and before.source == launch.source:
            before.name += f" {launch.name}"
            before.reads, before.flops = before.reads + launch.reads, before.flops + launch.flops
            before.writes = before.writes + launch.writes
        else:
            found.append(replace(launch))
    return [*found, _as_one(run, [])] if run else found


def _as_one(run: Sequence[Launch], later: Sequence[Launch]) -> Launch:
    """Operators as one launch: it reads what it does not make, and writes what is read later."""
    made = {part.storage for launch in run for part in launch.writes}
    wanted = {part.storage for launch in later for part in (*launch.reads, *launch.writes)}
    reads = [part for launch in run for part in launch.reads if part.storage not in made]
    writes = [part for launch in run for part in launch.writes]
    kept = [part for part in writes if not later or part.storage in wanted]
    return Launch("+".join(dict.fromkeys(x.name for x in run)), _unique(reads), _unique(kept))


@contextmanager
def _recorded_kernels(record: Callable[[str, list[Tensor]], None]) -> Iterator[None]:
    """Within it the Triton kernels are chosen and not launched: they are recorded."""

    def __getitem__(self: Any, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **more: Any) -> None:
            record(self.fn.__name__.strip("_"), [x for x in args if _is_tensor(x)])

        return launch

    with (
        mock.patch.object(KernelInterface, "__getitem__", __getitem__),
        mock.patch.object(attention, "use_kernel", lambda *given: True),
        mock.patch.object(span_attention, "use_kernel", lambda *given: True),
    ):
        yield


def _is_tensor(x: object) -> bool:
    return isinstance(x, Tensor)


def _part(x: Tensor) -> Part:
    """Of an expanded tensor what is there."""
    sizes = [size for size, stride in zip(x.shape, x.stride(), strict=True) if stride]
    elements = int(torch.Size(sizes).numel()) if sizes else 1
    return Part(x.untyped_storage()._cdata, elements * x.element_size())


def _largest(parts: Sequence[Part]) -> dict[int, int]:
    """Bytes by storage."""
    found: dict[int, int] = {}
    for part in parts:
        found[part.storage] = max(found.get(part.storage, 0), part.bytes)
    return found


def _unique(parts: Sequence[Part]) -> list[Part]:
    return [Part(storage, size) for storage, size in _largest(parts).items()]
