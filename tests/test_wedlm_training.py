"""WeDLM's training: the noise and its order, the two streams, the loss as the paper writes it, and
a result that the streaming and the autoregressive decoder take."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from test_train import SHAPE, same
from tiny import fresh_model, random_model

import d2f
import decode
from d2f import noise
from d2f.convert import convert
from d2f.errors import CheckpointError, InputError
from d2f.saving import save_model
from decode.cli import DecoderSettings
from distill.config import TrainConfig, parse_config
from distill.data.samples import Placed, Sample
from distill.objectives.wedlm import WeDLM
from distill.train import train
from tests.references.predictions import DensePlan
from tests.references.wedlm import streaming_mask


def settings(output: Path | str = "unused", **changes) -> TrainConfig:
    values = {
        "objective": "wedlm",
        "output": str(output),
        "family": "wedlm",
        "model": SHAPE,
        "block_size": 8,
        "data": {"tasks": {"countdown": 1.0}, "row_length": 80, "rows": 2},
        "optimizer": {"lr": 0.003, "warmup": 2},
        "steps": 6,
        "save_every": 2,
        "log_every": 1,
        "tracker": "none",
    }
    values |= changes
    if "init" in changes:
        del values["model"]
    return parse_config(values, "test")


def objective(model: d2f.DiffusionModel | None = None, **changes) -> WeDLM:
    return WeDLM(model or random_model("wedlm"), settings(**changes))


def made_up(index: int, prompt: int, response: int) -> Sample:
    rng = np.random.default_rng([index, prompt, response])
    ids = rng.integers(4, 200, prompt + response).tolist()
    return Sample(index, ids[:prompt], ids[prompt:], int(rng.integers(1, response + 1)))


samples = st.builds(made_up, st.integers(0, 99), st.integers(1, 20), st.integers(1, 30))
sizes = st.one_of(st.integers(1, 12), st.just({3: 1, 8: 1}))  # a mapping draws one a sample


@given(samples, sizes)
def test_each_block_masks_the_rounded_share_of_its_response_tokens(sample, size):
    """Never the prompt; each block has a gamma of its own, which weighs its masks by 1 / gamma."""
    made = objective(block_size=size)
    size = made.block_size(sample)
    masked, weight = made.draw(sample)
    gammas = noise.sample_rng(0, sample.index, noise.RATIOS).random(-(-len(sample) // size))
    places = len(sample.prompt) + np.arange(len(sample.response))
    for block, gamma in enumerate(gammas):
        own = places // size == block
        assert masked[own].sum() == round(gamma * own.sum())
        kept = masked[own]
        want = made.importance(sample)[own][kept] / gamma
        assert weight[own][kept] == pytest.approx(want, rel=1e-12)


@given(samples, sizes)
def test_the_second_stream_is_the_text_with_each_blocks_masks_last(sample, size):
    made = objective(block_size=size)
    size = made.block_size(sample)
    fed, length = made.fed(sample), len(sample)
    clean = np.array(sample.prompt + sample.response)
    mask_id = made.model.mask_id
    assert fed.ids[:length].tolist() == clean.tolist()
    assert fed.positions[:length].tolist() == list(range(length))
    order, noisy = fed.positions[length:], fed.ids[length:]
    hidden = noisy == mask_id
    masked, _ = made.draw(sample)
    assert sorted(order[hidden]) == (len(sample.prompt) + np.flatnonzero(masked)).tolist()
    assert (noisy[~hidden] == clean[order[~hidden]]).all()
    for start in range(0, length, size):
        part = slice(start, min(start + size, length))
        assert sorted(order[part]) == list(range(part.start, part.stop))
        observed = (~hidden[part]).sum()
        assert not hidden[part][:observed].any()
        assert (np.diff(order[part][:observed]) > 0).all()
        assert (np.diff(order[part][observed:]) > 0).all()


@given(st.lists(samples, min_size=1, max_size=3), sizes)
def test_packed_streams_see_what_the_paper_allows_and_no_other_sample(packed, size):
    """allow(q, k) = same stream, same block, k <= q; or k clean in an earlier block."""
    row, start = [], 0
    for sample in packed:
        row.append(Placed(sample, start))
        start += len(sample)
    data = {"tasks": {"countdown": 1.0}, "row_length": start + 3, "rows": 1}
    made = objective(block_size=size, data=data)
    batch = made.batch([row], slice(0, 1))
    key = torch.arange(2 * start + 6)
    ranges = batch.spans[0].long()  # [Q, K, 2]
    seen = ((key >= ranges[..., :1]) & (key < ranges[..., 1:])).any(1)
    allow = torch.zeros_like(seen)
    for placed in row:
        length = len(placed.sample)
        at = torch.arange(2 * length)
        stream, block = at // length, at % length // made.block_size(placed.sample)
        own = (stream[:, None] == stream) & (block[:, None] == block) & (at <= at[:, None])
        earlier = (stream == 0) & (block < block[:, None])
        part = slice(2 * placed.start, 2 * placed.start + 2 * length)
        allow[part, part] = own | earlier
    assert torch.equal(seen, allow)


def written_out(made: WeDLM, row: list[Sample]) -> float:
    """The loss from the formulas: each sample alone, x_t in the order of the text, a dense mask."""
    model, config = made.model, made.config
    (size,) = config.objective.block_shares
    recover = follow = weights = tokens = 0.0
    for sample in row:
        length, prompt = len(sample), len(sample.prompt)
        clean = torch.tensor(sample.prompt + sample.response)
        masked, _ = made.draw(sample)
        hidden = torch.tensor([False] * prompt + masked.tolist())
        gammas = noise.sample_rng(config.seed, sample.index, noise.RATIOS).random(length)
        at = torch.arange(length)
        block = at // size
        allow = torch.zeros(2 * length, 2 * length, dtype=torch.bool)
        allow[:length, :length] = at <= at[:, None]
        allow[length:, :length] = block < block[:, None]
        own = torch.ones(length, length, dtype=torch.bool)
        if config.objective.attention == "causal":
            own = streaming_mask((~hidden).tolist())
        allow[length:, length:] = (block[:, None] == block) & own
        x_t = torch.where(hidden, torch.tensor(model.mask_id), clean)
        logits = model.forward(
            torch.cat((clean, x_t))[None], DensePlan(allow), torch.cat((at, at))[None]
        )[0]
        for j in range(prompt, length):
            counts = 1.0 if j - prompt < sample.answer else config.data.tail_weight
            tokens += counts
            follow += counts * F.cross_entropy(logits[j - 1], clean[j]).item()
            if hidden[j]:
                weight = counts / gammas[j // size]
                weights += weight
                recover += weight * F.cross_entropy(logits[length + j], clean[j]).item()
    divisor = weights if config.objective.weights == "code" else tokens
    ar = config.objective.ar_weight
    return (recover / divisor + ar * follow / tokens) / (1 + ar)


@pytest.mark.parametrize("weights", ["paper", "code"])
@pytest.mark.parametrize("ar_weight", [0.0, 1.0, 0.5])
@pytest.mark.parametrize("attention", ["causal", "bidirectional"])
def test_the_loss_is_the_written_out_one(weights, ar_weight, attention):
    row = [made_up(3, 7, 20), made_up(4, 12, 9), made_up(5, 1, 5)]
    data = {"tasks": {"countdown": 1.0}, "row_length": 60, "rows": 2, "tail_weight": 0.25}
    keys = {"weights": weights, "ar_weight": ar_weight, "attention": attention}
    made = objective(data=data, wedlm=keys)
    rows = [[Placed(row[0], 0), Placed(row[1], len(row[0]))], [Placed(row[2], 0)]]
    with torch.no_grad():
        whole = made.forward(made.batch(rows, slice(0, 2))).item()
        halves = [made.forward(made.batch(rows, slice(i, i + 1))).item() for i in (0, 1)]
        assert whole == pytest.approx(written_out(made, row), rel=1e-5)
    assert sum(halves) == pytest.approx(whole, rel=1e-5), "processes share one normaliser"


@pytest.fixture(scope="module")
def causal(tmp_path_factory) -> Path:
    """A small autoregressive model with the tasks' tokenizer."""
    folder = tmp_path_factory.mktemp("causal") / "model"
    save_model(fresh_model("causal"), folder, dtype=torch.float32, objective="next_token")
    return folder


def test_a_killed_run_resumes_to_the_same_weights(tmp_path, causal):
    """The adapter on its base is the merged model."""
    changes = {"init": str(causal), "wedlm": {"adapter": True}}
    train(settings(tmp_path / "whole", **changes))
    for _ in range(2):
        train(settings(tmp_path / "killed", **changes), stop_after=3)
    assert same(tmp_path / "whole", tmp_path / "killed")
    merged = d2f.load(tmp_path / "whole" / "model", device="cpu")
    place = tmp_path / "whole" / "adapter"
    on_base = d2f.load(causal, family="wedlm", adapter=place, device="cpu")
    assert (on_base.contract.objective, on_base.contract.base) == ("wedlm", causal.name)
    ids = torch.randint(4, 200, (1, 12))
    with torch.no_grad():
        ours, theirs = (m.forward(ids, d2f.spans.causal(12)) for m in (merged, on_base))
    assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()


def test_the_result_of_an_autoregressive_model_decodes_both_ways(tmp_path, causal):
    """A Llama stays a Llama; the contract says what it is now; verified streaming gives what
    autoregressive decoding of the same model gives."""
    train(settings(tmp_path, init=str(causal), steps=2))
    model = d2f.load(tmp_path / "model", device="cpu")
    assert type(model.backbone).__name__ == "LlamaForCausalLM"
    contract = model.contract
    assert (contract.family, contract.logit_shift, contract.prompt_rule) == ("wedlm", 0, "causal")
    assert (contract.objective, contract.block_size) == ("wedlm", 8)
    assert contract.mask_id == model.tokenizer.mask_token_id
    chosen = DecoderSettings(None, {}).decoder(model, 16)  # what decodes it unless told otherwise
    assert (chosen.name, chosen.window) == ("wedlm", 8)
    assert DecoderSettings(None, {"window": 3}).decoder(model, 16).window == 3
    prompts = [[5, 9, 20], [7, 30, 31, 40]]
    plain = decode.generate(model, prompts, decode.Autoregressive(max_new_tokens=12))
    sure = decode.generate(model, prompts, decode.WeDLM(8, max_new_tokens=12, verify="ar"))
    assert [r.tokens for r in sure] == [r.tokens for r in plain]
    streamed = decode.generate(model, prompts, decode.WeDLM(8, max_new_tokens=12))
    assert all(1 <= r.forwards <= 12 for r in streamed)


def test_what_is_not_causal_or_has_no_mask_token_is_refused(tmp_path, causal):
    with pytest.raises(InputError, match="trains the family wedlm, got llada"):
        train(settings(tmp_path / "a", family="llada"))
    with pytest.raises(InputError, match="needs a family with a mask, got causal"):
        train(settings(tmp_path / "b", init=str(causal), family=None))
    with pytest.raises(CheckpointError, match="RoPE is of another precision"):
        convert(fresh_model("llada"), "wedlm")
    with pytest.raises(InputError, match="objective wedlm needs init"):
        settings(wedlm={"adapter": True})
    for token, message in (
        (None, "wedlm needs a tokenizer with a mask_token"),
        ("<|new mask|>", "mask_id must lie in the vocabulary"),
    ):
        model = fresh_model("causal")
        model.tokenizer = type(model.tokenizer).from_pretrained(causal)
        model.tokenizer.mask_token = None
        if token is not None:
            model.tokenizer.add_special_tokens({"mask_token": token})
        with pytest.raises(CheckpointError, match=message):
            convert(model, "wedlm")
