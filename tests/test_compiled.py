"""A compiled model decodes to the tokens of the plain one, whatever rows, caches and batches, and
its joined layers share the weights."""

from __future__ import annotations

import copy
import json
import warnings

import pytest
import torch
from tiny import fresh_model, random_model

import d2f
import decode
from d2f import cpu
from d2f import spans as sp
from d2f.adapters import new_lora
from d2f.attention import SpanPlan
from d2f.compile import CompiledRows, joined
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
WAYS = {"graph": CompiledRows}
if cpu.fits(random_model("llada").backbone):
    WAYS["native"] = cpu.NativeRows


@pytest.fixture(scope="module", params=[f"{f} {w}" for f in sorted(DECODERS) for w in WAYS])
def compiled(request):
    """(family, compiled model)"""
    family, way = request.param.split()
    model = fresh_model(family)
    with pytest.MonkeyPatch.context() as patch:
        if way == "graph":
            patch.setattr(cpu, "fits", lambda *given: False)
        model.compile()
    assert type(model.compiled_rows) is WAYS[way]
    return family, model


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


def test_without_a_compiler_the_error_says_what_is_missing():
    from torch._inductor import config
    from torch._inductor.utils import fresh_cache

    model = fresh_model("llada", seed=1)
    lacking = config.patch({"cpp.cxx": ("no-such-compiler",)})
    cpu.library.cache_clear()
    with lacking, fresh_cache(), pytest.raises(CompileError, match="needs a C\\+\\+ compiler"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that forwards in C++ do not work either
            model.compile()
    assert not model.is_compiled


IDS = torch.arange(3, 23)[None]


def hidden(network, spans):
    """Last hidden states of a joined model or of a backbone's own decoder."""
    positions = torch.arange(IDS.shape[1])[None]
    with torch.inference_mode():
        return network(
            input_ids=IDS, position_ids=positions, spans=SpanPlan(spans), use_cache=False
        ).last_hidden_state


def storages(tensors):
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}


@pytest.mark.parametrize("family", ["llada", "dream"])  # without and with biases
def test_joined_layers_compute_the_same_and_no_weight_is_held_twice(family):
    model, spans = fresh_model(family), sp.bidirectional(IDS.shape[1])
    want = hidden(model.backbone.model, spans)
    before = sum(s.nbytes() for s in storages(model.backbone.parameters()).values())
    twin, products = joined(model.backbone)
    torch.testing.assert_close(hidden(twin, spans), want)
    assert len(products) == 2 * model.backbone.config.num_hidden_layers
    held = storages((*model.backbone.parameters(), *model.backbone.buffers()))
    weights = [product.weight for product in products]
    assert storages((*weights, *twin.parameters(), *twin.buffers())).keys() <= (held.keys())
    assert sum(s.nbytes() for s in storages(model.backbone.parameters()).values()) == before
    assert torch.equal(hidden(model.backbone.model, spans), want), "the originals are whole"


def test_a_change_of_the_weights_changes_the_joined_ones(tmp_path):
    """An adapter that is merged later, new weights loaded into it, and saving."""
    model, spans = fresh_model("llada"), sp.causal(IDS.shape[1])
    twin, _ = joined(model.backbone)
    new_lora(model, r=4, alpha=8, dropout=0.0)
    for name, weight in model.adapter.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.2)
    model.merge_adapter()
    want = hidden(model.backbone.model, spans)
    torch.testing.assert_close(hidden(twin, spans), want)
    model.save(tmp_path / "saved")
    assert torch.equal(hidden(d2f.load(tmp_path / "saved").backbone.model, spans), want)
    other = random_model("llada", seed=3).backbone
    model.backbone.load_state_dict(other.state_dict())
    torch.testing.assert_close(hidden(twin, spans), hidden(other.model, spans))


def test_quantised_weights_are_not_joined():
    quantised = copy.copy(random_model("llada").backbone)
    quantised.quantized = "int8-weight"
    assert joined(quantised) == (quantised.model, [])
