"""The plain reference of WeDLM's streaming decoding: the sequence stays in the order of the text,
every forward feeds all of it, and the mask says what reordering does. Written to be read, not to be
fast. With verify="ar" the truth is `tests.references.d2f.decode_autoregressive`."""

from __future__ import annotations

import torch
from torch import Tensor

from d2f.model import DiffusionModel
from decode import WeDLM
from decode.engine.batch import Sampler
from tests.references.predictions import dense_logits, scored


def streaming_mask(filled: list[bool]) -> Tensor:
    """``[L, L]``: a filled position sees the filled ones up to itself, a masked one all filled ones
    and the masked ones up to itself."""
    order = torch.arange(len(filled))
    earlier = order[None, :] <= order[:, None]  # [query, key]
    query, key = torch.tensor(filled)[:, None], torch.tensor(filled)[None, :]
    return (key & (~query | earlier)) | (~key & ~query & earlier)


def decode_wedlm(
    model: DiffusionModel, prompt: list[int], options: WeDLM
) -> tuple[list[int | None], int]:
    """The response as it stands when it is known to its first end id or its limit, None where still
    masked; and how many forwards that takes."""
    contract, start = model.contract, len(prompt)
    assert contract.mask_id is not None
    limit, size = start + options.length, options.window
    sampler = Sampler(options, contract.mask_id)
    text: list[int | None] = [*prompt]  # and after it the window
    committed, forwards = start, 0  # the next forward commits up to the first gap
    while True:
        gap = text.index(None) if None in text else len(text)
        known = text[start : min(gap, limit)]
        if len(known) == options.length or set(known) & set(contract.end_ids):
            response = text[start:limit]
            return response + [None] * (options.length - len(response)), forwards
        if options.refill == "block":
            committed = gap if gap >= committed + size else committed  # a window that is all filled
            end = min(committed + size, limit)
        elif options.refill == "repository":
            end = committed + size + (gap - committed)
        else:
            end = min(committed + size, limit)
        text += [None] * (end - len(text))
        masked = [p for p, token in enumerate(text) if token is None]
        if options.refill != "block":
            committed = gap
        if not masked:
            continue  # a forward that only commits; the decoder does it within the next one
        x = [contract.mask_id if token is None else token for token in text]
        allowed = streaming_mask([token is not None for token in text])
        if options.window_attention == "bidirectional":
            allowed[committed:] = True
        found = scored(dense_logits(model, x, allowed)[masked], sampler)
        forwards += 1
        assert found.entropy is not None
        distance = torch.tensor(masked, dtype=torch.float32) - masked[0]
        score = torch.from_numpy(found.entropy) + distance * options.distance_penalty
        chosen: list[int] = []
        if options.entropy_threshold is not None:
            chosen = (score < options.entropy_threshold).nonzero().flatten().tolist()
        for i in chosen or [int(score.argmin())]:
            text[masked[i]] = int(found.token[i])
