"""The plain reference decoders: the specification that the engine must equal token by token.

One request, no cache, no engine, no spans: every forward feeds the whole sequence under a dense
boolean mask. Written to be read, not to be fast.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from d2f.model import DiffusionModel
from decode import D2F, Autoregressive
from decode.decoders.d2f import DEFAULT_BLOCK_SIZE
from decode.engine.batch import PredictionRequest, Sampler
from tests.references.predictions import dense_logits, predict, scored, seen_blocks


def predict_positions(
    model: DiffusionModel, x: list[int], allowed: Tensor, wanted: list[int], shift: int,
    sampler: Sampler,
) -> list[tuple[int, float]]:  # fmt: skip
    """(token, confidence) of each wanted position."""
    rows = dense_logits(model, x, allowed)[[p - shift for p in wanted]]
    predictions = predict(rows, [PredictionRequest(sampler, len(wanted))], forward=0)[0]
    return list(zip(predictions.token.tolist(), predictions.confidence.tolist(), strict=True))


def predict_rows(
    rows: Tensor, sampler: Sampler, pick: str = "confidence"
) -> list[tuple[int, float, float]]:
    """(token, confidence, what a forced pick goes by: the larger, the surer) from the logits
    ``[N, V]`` of each wanted row."""
    found = scored(rows, sampler)
    assert found.entropy is not None and found.margin is not None
    sure = {"confidence": found.confidence, "entropy": -found.entropy, "margin": found.margin}
    columns = found.token, found.confidence, sure[pick]
    return list(zip(*(column.tolist() for column in columns), strict=True))


def in_fp32(threshold: float) -> float:
    """A threshold as torch compares an fp32 tensor with it, as the official codes of D2F and SDAR
    do: rounded to fp32."""
    return float(np.float32(threshold))


def decode_d2f(model: DiffusionModel, prompt: list[int], options: D2F) -> list[int | None]:
    """All that D2F's pipeline generates, None where early exit left a position undecoded."""
    contract, start = model.contract, len(prompt)
    size = options.block_size or contract.block_size or DEFAULT_BLOCK_SIZE
    sampler = Sampler(options, contract.mask_id)
    out: list[int | None] = []  # the opened response
    blocks: list[list[int]] = []  # response positions of each opened block
    full: set[int] = set()  # blocks that must reveal at least one token a forward
    ended = False

    def decoded(block: int) -> float:
        if block < 0:
            return 1.0  # the prompt
        return sum(out[p] is not None for p in blocks[block]) / len(blocks[block])

    while True:
        room = options.length - len(out)
        if room and not ended and decoded(len(blocks) - 1) >= options.tau_add:
            blocks.append(list(range(len(out), len(out) + min(size, room))))
            out += [None] * len(blocks[-1])
        full |= {b for b in range(len(blocks)) if decoded(b - 1) >= options.tau_act}
        ends = [p for p, token in enumerate(out) if token in contract.end_ids]
        open_ = out[: ends[0]] if options.early_exit and ends else out
        if None not in open_:
            return out
        number = [0] * start + [1 + b for b, block in enumerate(blocks) for _ in block]
        wanted = [p for p, token in enumerate(out) if token is None]
        x = prompt + [contract.mask_id if token is None else token for token in out]
        logits = dense_logits(model, x, seen_blocks(number))
        rows = logits[[start + p - contract.logit_shift for p in wanted]]
        found = predict_rows(rows, sampler, options.forced_pick)
        guess = dict(zip(wanted, found, strict=True))
        for b, block in enumerate(blocks):
            masked = [p for p in block if out[p] is None]
            chosen = [p for p in masked if guess[p][1] > in_fp32(options.tau_conf)]
            if not chosen and masked and b in full:
                chosen = [max(masked, key=lambda p: (guess[p][2], -p))]
            for p in chosen:
                out[p] = guess[p][0]
                ended = ended or out[p] in contract.end_ids


def decode_autoregressive(
    model: DiffusionModel, prompt: list[int], options: Autoregressive
) -> list[int]:
    """One token after the other, up to and with the first end id."""
    sampler = Sampler(options, model.mask_id)
    x = list(prompt)
    while len(x) < len(prompt) + options.length:
        allowed = torch.ones(len(x), len(x)).tril().bool()
        x.append(predict_positions(model, x, allowed, [len(x)], 1, sampler)[0][0])
        if x[-1] in model.end_ids:
            break
    return x[len(prompt) :]
