"""A compiled model decodes to the tokens of the plain one, whatever rows, caches and batches."""

from __future__ import annotations

import gc
import json
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import fresh_model, random_model

import d2f
import d2f.compile
import d2f.cpu.packed
import d2f.cpu.rows
import decode
from d2f import spans as sp
from d2f.attention import SpanPlan
from d2f.errors import CompileError
from d2f.tasks import make_problems
from decode.compare.config import Item, Ours, Workload
from decode.compare.local import OursRunner
from decode.pipeline import main

DECODERS = {
    "llada": [
        decode.D2F(block_size=4, tau_conf=0.5, max_new_tokens=24),
        decode.Static(steps=6, block_size=8, max_new_tokens=24),
    ],
    "dream": [decode.D2F(block_size=4, tau_conf=0.5, max_new_tokens=24)],
    "causal": [decode.Autoregressive(12)],
}
WAYS = {"graph": d2f.compile.CompiledRows}
if d2f.cpu.packed.can_pack(random_model("llada").backbone):
    WAYS["native"] = d2f.cpu.rows.NativeRows


@pytest.fixture(scope="module", params=[f"{f} {w}" for f in sorted(DECODERS) for w in WAYS])
def compiled(request):
    """(family, compiled model)"""
    family, way = request.param.split()
    model = fresh_model(family)
    with pytest.MonkeyPatch.context() as patch:
        if way == "graph":
            patch.setattr(d2f.cpu.rows, "fits", lambda backbone: False)
        model.compile()
    assert type(model.compiled_rows) is WAYS[way]
    return family, model


@pytest.fixture
def by_graph(monkeypatch):
    """`torch.compile` also of what C++ would compute whole."""
    monkeypatch.setattr(d2f.cpu.rows, "fits", lambda backbone: False)


def test_rows_of_any_number_have_the_logits_of_the_plain_forward(compiled):
    family, model = compiled
    plain = random_model(family)
    ids = torch.randint(3, 200, (53,), generator=torch.Generator().manual_seed(1))
    caches = [m.new_cache(60) for m in (plain, model)]
    first = 0
    for rows in (7, 1, 2, 10, 33):  # each sees the slots that the ones before it wrote
        at = torch.arange(first, first + rows)
        seen = sp.causal(first + rows)[first:]
        logits = []
        for m, cache in zip((plain, model), caches, strict=True):
            cache.slots = at
            with torch.inference_mode():
                logits.append(m.decode_rows(ids[at], at, SpanPlan(seen), cache, torch.arange(rows)))
        torch.testing.assert_close(*logits)
        first += rows


@pytest.mark.parametrize("batch_size", [1, 3])
def test_the_tokens_are_those_of_the_plain_model(compiled, batch_size):
    family, model = compiled
    prompts = [[5, 6, 7, 8, 9], [11], [20, 21, 22], [30, 31, 32, 33]]
    for decoder in DECODERS[family]:
        results = [
            decode.generate(m, prompts, decoder, batch_size=batch_size)
            for m in (random_model(family), model)
        ]
        plain, fast = ([r.raw_tokens for r in some] for some in results)
        assert fast == plain


def test_the_pipeline_and_the_comparison_give_the_answers_of_the_plain_model(tmp_path, capsys):
    problems = make_problems("story", "heldout", 3)
    prompts = [[{"role": "user", "content": problem.question}] for problem in problems]
    decoder = decode.D2F(max_new_tokens=40)
    plain = [r.tokens for r in decode.generate(d2f.load("tiny-d2f"), prompts, decoder)]

    out = tmp_path / "out.jsonl"
    options = ["--problems", "3", "--tasks", "story", "--max-new-tokens", "40", "--output"]
    assert main([*options, str(out), "--compile"]) == 0
    records = [json.loads(line) for line in out.read_text().splitlines()[1:]]
    assert [record["tokens"] for record in records] == plain
    assert "cpu, 1 threads, compiled" in capsys.readouterr().out

    items = [Item(str(i), prompt) for i, prompt in enumerate(prompts)]
    entry = Ours(kind="ours", name="D2F", model="tiny-d2f", compile=True)
    runner = OursRunner(entry, [Workload("story", items, 3, 1, 40, ())])
    text = [answer.text for answer in runner.run("story", 3, 2).answers]
    assert text == [record["text"] for record in records]
    assert runner.facts["compiled"] is True


def test_where_layers_cannot_be_packed_they_are_joined_and_the_tokens_are_the_same(
    monkeypatch, by_graph
):
    monkeypatch.setattr(d2f.compile, "can_pack", lambda backbone: False)
    model = fresh_model("dream")
    model.compile()
    assert isinstance(model.compiled_rows.packed, d2f.cpu.packed.JoinedModel)
    (decoder,) = DECODERS["dream"]
    plain, fast = (
        decode.generate(m, [[5, 6, 7], [9]], decoder) for m in (random_model("dream"), model)
    )
    assert [r.raw_tokens for r in fast] == [r.raw_tokens for r in plain]


@pytest.mark.parametrize("way", WAYS)
def test_packed_weights_go_with_the_model(way, monkeypatch):
    if way == "graph":
        monkeypatch.setattr(d2f.cpu.rows, "fits", lambda backbone: False)
    model = fresh_model("dream", seed=2)
    before = set(d2f.cpu.packed._weights)
    model.compile()
    new = set(d2f.cpu.packed._weights) - before
    assert new
    del model
    gc.collect()
    assert not new & set(d2f.cpu.packed._weights)


@pytest.mark.skipif("native" not in WAYS, reason="no packed layers here")
def test_a_small_model_has_its_code_before_its_first_forward(monkeypatch):
    """oneDNN's, of each number of rows: a large one computes longer than it would wait for that."""

    def made_later(*rows: int) -> list[int]:
        made: list[int] = []
        model = fresh_model("llada", seed=3)
        model.compile()
        with monkeypatch.context() as patch:
            patch.setattr(d2f.cpu.packed.Product, "__call__", lambda _, x: made.append(len(x)))
            for number in rows:
                model.compiled_rows.code.make(number)
        return sorted(set(made))

    assert made_later(1, 17, 33, 100, 512, 513) == [513]
    monkeypatch.setattr(d2f.cpu.packed, "SMALL", 0)
    assert made_later(1, 17) == [1, 17]


def test_a_compiled_model_has_its_adapter_merged(tmp_path, capsys):
    assert main(["--adapter", "x", "--no-merge", "--compile"]) == 2
    assert "--compile needs a merged adapter" in capsys.readouterr().err


def test_without_a_compiler_the_error_says_what_is_missing():
    from torch._inductor import config
    from torch._inductor.utils import fresh_cache

    model = fresh_model("llada", seed=1)
    lacking = config.patch({"cpp.cxx": ("no-such-compiler",)})
    d2f.cpu.rows.library.cache_clear()
    with lacking, fresh_cache(), pytest.raises(CompileError, match="needs a C\\+\\+ compiler"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that forwards in C++ do not work either
            model.compile()
    assert not model.is_compiled


needs_packing = pytest.mark.skipif(
    not d2f.cpu.packed.can_pack(random_model("llada").backbone), reason="nothing is packed here"
)


@needs_packing
@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 90), min_size=1, max_size=2))
def test_a_product_of_any_number_of_rows_is_that_of_its_layers(shape):
    torch.manual_seed(2)
    layers = [torch.nn.Linear(12, 5), torch.nn.Linear(12, 20)]
    x = torch.randn(*shape, 12)
    with torch.inference_mode():
        out = d2f.cpu.packed.Product(layers)(x)
        torch.testing.assert_close(out, torch.cat([layer(x) for layer in layers], -1))


@given(st.integers(1, 1 << 20))
def test_few_numbers_of_rows_are_multiplied(rows):
    """Else oneDNN makes code for each forward of many requests."""
    fed = d2f.cpu.packed.multiplied_rows(rows)
    assert rows <= fed <= rows * 17 / 16
    octave = 1 << (rows - 1).bit_length() - 1 if rows > 1 else 1
    numbers = {d2f.cpu.packed.multiplied_rows(octave + i) for i in range(1, min(octave, 4096) + 1)}
    assert len(numbers) <= 16


@needs_packing
def test_a_packed_model_keeps_no_other_copy_of_the_weights():
    """Beside the packed layers themselves: norms, embeddings and RoPE's tables are the model's."""
    backbone = random_model("llada").backbone
    twin = d2f.cpu.packed.PackedModel(backbone).model
    ours = {tensor.data_ptr() for tensor in (*backbone.parameters(), *backbone.buffers())}
    shared = [*twin.parameters(), *twin.buffers()]
    assert shared and all(tensor.data_ptr() in ours for tensor in shared)
