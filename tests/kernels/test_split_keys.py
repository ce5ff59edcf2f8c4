"""Keys split over programs: as many splits as a row's spans are worth, which the kernel decides on
the device, and never so many that joining them is a large part of the work."""

from __future__ import annotations

import pytest
import torch

import decode
from benchmarks.kernels import decoding_spans
from d2f.convert import build
from d2f.model import DiffusionModel
from tests.tiny import tokenizer
from triton_kernels import span_attention as tiles
from triton_kernels.span_attention import span_attention

LLADA = (32, 32, 128)  # heads, key heads, head dimension of LLaDA-8B
DREAM = (28, 4, 128)


def tensors(rows, slots, heads, kv_heads, dim, device="cpu", dtype=torch.float32):
    rng = torch.Generator().manual_seed(0)
    shapes = ((rows, heads, dim), (kv_heads, slots, dim), (kv_heads, slots, dim))
    return [torch.randn(shape, generator=rng).to(device, dtype) for shape in shapes]


@pytest.fixture
def used(monkeypatch):
    """The splits that computed for each tile, of each call that joined some."""
    seen = []

    class Watched:
        def __getitem__(self, grid):
            def launch(part, most, total, used, *rest, **sizes):
                seen.append(used.tolist())
                return join[grid](part, most, total, used, *rest, **sizes)

            return launch

    join = tiles._join
    monkeypatch.setattr(tiles, "_join", Watched())
    return seen


def check(q, k, v, spans):
    got, want = (span_attention(q, k, v, spans, kernel=kernel) for kernel in (True, False))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    return got


@pytest.mark.parametrize("least", [1, 40, 150, 1000])
def test_split_keys_are_joined_to_the_same_output(device, monkeypatch, used, least):
    """However many splits compute: eight, some, or one of the eight that the grid has."""
    monkeypatch.setattr(tiles.Shape, "splits", lambda self: 8)
    monkeypatch.setattr(tiles.Shape, "least_keys", lambda self: least)
    rows = [[[0, 300], [300, 300]], [[290, 300], [0, 7]], [[4, 4], [9, 9]], [[150, 151], [0, 1]]]
    spans = torch.tensor(rows, dtype=torch.int32, device=device)
    got = check(*tensors(4, 300, 4, 2, 32, device=device), spans)
    assert got[2].abs().max().item() == 0.0, "a row that sees nothing"
    # The first ranges reach over 300 keys, the second over 7.
    assert used == [[max(1, min(307 // least, 8))]]


def test_a_row_of_few_keys_is_not_split_in_a_long_cache(device, used):
    """Other requests' slots are no reason: 16 rows see 100 keys of 2,048, the next 16 all."""
    spans = torch.tensor([[[1000, 1100]]] * 16 + [[[0, 2048]]] * 16, dtype=torch.int32)
    args = tensors(32, 2048, 2, 2, 32, device=device)
    assert tiles.Shape(*args, spans).splits() == 16
    check(*args, spans.to(device))
    assert used == [[1, 16]]


def test_a_grid_of_splits_follows_from_sizes_alone():
    """A CUDA graph replays it, whatever the rows of the next forward see."""
    for slots, splits in ((512, 1), (4096, 4), (65536, 8)):
        assert shape_of(torch.empty(64, 3, 2, device="meta"), slots, *LLADA).splits() == splits


def shape_of(spans, slots, heads, kv_heads, dim):
    """Of a call in bf16."""
    q = torch.empty(len(spans), heads, dim, dtype=torch.bfloat16, device="meta")
    k = torch.empty(kv_heads, slots, dim, dtype=torch.bfloat16, device="meta")
    return tiles.Shape(q, k, k, spans)


def share_of_join(spans, slots, heads, kv_heads, dim):
    """Bytes that joining writes and reads over those of the keys and values that are read, by a
    model of the kernel's loops, for one call over all of its tiles."""
    shape = shape_of(spans, slots, heads, kv_heads, dim)
    joined = read = 0
    for rows in spans.split(shape.tile):
        reach = 0
        for span in rows.unbind(1):
            seen = span[span[:, 1] > span[:, 0]]
            reach += int(seen[:, 1].max() - seen[:, 0].min()) if len(seen) else 0
        splits = max(1, min(reach // shape.least_keys(), shape.splits()))
        if splits > 1:  # an fp32 row, its maximum and its total, written and read
            joined += splits * len(rows) * heads * (dim + 2) * 4 * 2
        read += reach * kv_heads * dim * 2 * 2
    return joined / read


@pytest.mark.parametrize("heads", [LLADA, DREAM])
@pytest.mark.parametrize("rows", [16, 64, 128])
@pytest.mark.parametrize("cached", [512, 4096, 32768])
def test_joining_takes_at_most_15_percent_of_the_keys_traffic(heads, rows, cached):
    spans = decoding_spans(rows, cached)
    assert share_of_join(spans, cached + rows, *heads) <= 0.15


def recorded(decoder, prompts, batch_size) -> list[tuple[torch.Tensor, int]]:
    """Spans and slots of each forward of a run."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "layers": 1, "heads": 2, "kv_heads": 1}
    model = build("llada", tokenizer(), context_length=2048, **sizes)
    found = []

    def keep(self, tokens, positions, plan, cache, read):
        found.append((plan.spans[0].clone(), cache.layers[0][0].shape[2]))
        return real(self, tokens, positions, plan, cache, read)

    real = DiffusionModel.decode_rows
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DiffusionModel, "decode_rows", keep)
        decode.generate(model, prompts, decoder, batch_size=batch_size)
    return found


@pytest.mark.parametrize(
    ("decoder", "batch_size"),
    [
        (decode.D2F(block_size=16, max_new_tokens=32), 6),
        (decode.D2F(block_size=16, max_new_tokens=32), 1),
    ],
)
def test_joining_stays_within_15_percent_in_a_real_run(decoder, batch_size):
    prompts = [[5 + i % 90 for i in range(length)] for length in (1900, 40, 700, 1200, 10, 300)]
    steps = recorded(decoder, prompts, batch_size)
    shares = [share_of_join(spans, slots, *LLADA) for spans, slots in steps]
    assert max(shares) <= 0.15
    assert any(shares), "some keys were split"
