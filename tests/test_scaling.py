"""The arithmetic of docs/scaling.md: against the published configurations, real tensors, and what
the page says."""

from __future__ import annotations

import json
import re
from functools import cache

import pytest
import torch
from documents import ROOT
from hypothesis import given
from hypothesis import strategies as st

import d2f
from benchmarks import scaling
from benchmarks.forward_count import bytes_needed
from benchmarks.model_size import GPUS, PRECISIONS, USABLE, size_of
from benchmarks.shapes import build

PAGE = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
NAMES = {
    "llada-8b": ("d_model", "n_layers", "n_heads", "n_kv_heads", "mlp_hidden_size"),
    "dream-7b": (
        "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "intermediate_size",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("published", "shape"), [("llada-8b", "LLaDA-8B"), ("dream-7b", "Dream-7B")]
)
def test_a_size_is_that_of_the_published_configuration(published, shape):
    config = json.loads((ROOT / "tests" / "published" / published / "config.json").read_text())
    hidden, layers, heads, kv_heads, inner = (config[name] for name in NAMES[published])
    keys = hidden // heads * kv_heads
    size = size_of(shape)
    assert size.linear == layers * (2 * hidden * hidden + 2 * hidden * keys + 3 * hidden * inner)
    vocabulary = config.get("embedding_size") or config["vocab_size"]
    assert size.head == size.table == vocabulary * hidden
    biases = layers * (hidden + 2 * keys) if published == "dream-7b" else 0
    assert size.norms == (2 * layers + 1) * hidden + biases
    assert size.slot == 2 * layers * keys
    assert (size.layers, size.hidden, size.heads, size.kv_heads) == (
        layers,
        hidden,
        heads,
        kv_heads,
    )


def test_bytes_are_those_of_the_tensors():
    model = build("small", torch.bfloat16, "cpu")
    size = size_of("small")
    assert size.weights("bf16") == sum(p.nbytes for p in model.backbone.parameters())
    assert size.read("bf16") == bytes_needed(model, 0, 0)
    assert 2 * size.slot == sum(x.nbytes for layer in model.new_cache(1).layers for x in layer)
    tiny = d2f.load("tiny-d2f", device="meta")
    assert size_of("tiny-d2f").weights("bf16") == 2 * sum(
        p.numel() for p in tiny.backbone.parameters()
    )


known_size = cache(size_of)


@given(
    st.sampled_from(("LLaDA-8B", "Dream-7B")), st.sampled_from(tuple(GPUS)),
    st.sampled_from(tuple(PRECISIONS)), st.integers(1, 2000), st.integers(0, 10**5),
    st.sampled_from((2, 4)),
)  # fmt: skip
def test_what_the_page_says_of_replicas_and_groups(name, gpu_name, precision, rows, cached, gpus):
    size, gpu = known_size(name), GPUS[gpu_name]
    alone = size.floor_ms(gpu, rows, cached, precision)
    group = size.floor_ms(gpu, rows, cached, precision, gpus)
    assert alone / gpus <= group * (1 + 1e-9) and group <= alone
    assert alone <= size.floor_ms(gpu, rows + 1, cached, precision)
    assert alone <= size.floor_ms(gpu, rows, cached + 1, precision)
    count = size.requests(gpu, 1024, precision)
    full = size.weights(precision) + 2 * size.slot * 1024 * count
    assert full <= USABLE * gpu.bytes < full + 2 * size.slot * 1024
    # A group holds the weights once.
    assert size.requests(gpu, 1024, precision, gpus) >= gpus * count


def test_every_row_of_the_page_is_printed(capsys):
    assert scaling.main([]) == 0
    printed = capsys.readouterr().out.splitlines()
    said = [line for line in PAGE.splitlines() if re.match(r"\| (model|LLaDA|Dream|tiny)", line)]
    assert len(said) > 20 and [line for line in said if line not in printed] == []


def test_a_model_that_is_not_there_is_an_error(capsys):
    assert scaling.main(["--models", "nothing"]) == 2
    assert capsys.readouterr().err.startswith("error: ")
