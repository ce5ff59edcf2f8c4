"""The plain reference of block diffusion: every forward feeds the whole sequence under a dense
mask, nothing is cached. Written to be read, not to be fast."""

from __future__ import annotations

from d2f.model import DiffusionModel
from decode import Block
from decode.engine.batch import Sampler
from tests.references.d2f import in_fp32, predict_positions
from tests.references.predictions import seen_blocks


def decode_block(
    model: DiffusionModel, prompt: list[int], options: Block
) -> tuple[list[int | None], int]:
    """All that is generated, None where early exit left a position undecoded; and how many forwards
    that takes."""
    contract, start = model.contract, len(prompt)
    assert contract.mask_id is not None
    size = options.size(contract)
    origin = 0 if options.is_absolute(contract) else start
    total = start + options.length
    block_of = [-1 if p < origin else (p - origin) // size for p in range(total)]
    steps = options.denoising_steps or size
    sampler = Sampler(options, contract.mask_id)
    x, forwards = prompt + [contract.mask_id] * options.length, 0

    def ended() -> bool:
        decided = x[start : x.index(contract.mask_id)] if contract.mask_id in x else x[start:]
        return options.early_exit and any(token in contract.end_ids for token in decided)

    for block in range(block_of[start], block_of[-1] + 1):
        masked = [p for p in range(start, total) if block_of[p] == block]
        seen = [b for b in block_of if b <= block]  # later blocks are not there yet
        for step in range(steps):
            if not masked or ended():
                break
            n = size // steps + (step < size % steps)
            found = predict_positions(
                model, x[: len(seen)], seen_blocks(seen), masked, contract.logit_shift, sampler
            )  # fmt: skip
            forwards += 1
            guess = dict(zip(masked, found, strict=True))
            above = [p for p in masked if guess[p][1] > in_fp32(options.tau)]
            best = sorted(masked, key=lambda p: (-guess[p][1], p))[:n]
            if options.reveal == "sequential":
                chosen = masked[:n]
            elif options.reveal == "dynamic" and len(above) >= n:
                chosen = above
            else:
                chosen = best
            for p in chosen:
                x[p] = guess[p][0]
            masked = [p for p in masked if p not in chosen]
    return [None if token == contract.mask_id else token for token in x[start:]], forwards
