"""D2F's pipeline with WINO's check, plainly: no cache, the opened blocks whole in every forward
under a dense mask, and each shadow in a forward of its own."""

from __future__ import annotations

import torch

from d2f.model import DiffusionModel
from decode.decoders.d2f import D2F, DEFAULT_BLOCK_SIZE
from decode.engine.batch import Sampler
from tests.references.d2f import in_fp32
from tests.references.predictions import dense_logits, seen_blocks
from tests.references.shadowed import predict_rows, shadow_logits


def decode_d2f_revoking(
    model: DiffusionModel, prompt: list[int], options: D2F
) -> tuple[list[int | None], int]:
    """All that the pipeline generates, None where a position is undecoded; and the number of
    forwards. Positions count from the response's start."""
    contract, start, always = model.contract, len(prompt), options.revoke == "always"
    assert contract.mask_id is not None
    size = options.block_size or contract.block_size or DEFAULT_BLOCK_SIZE
    sampler = Sampler(options, contract.mask_id)
    out: list[int | None] = []  # the opened response
    blocks: list[range] = []
    full: set[int] = set()  # blocks that must decide at least one token a forward
    spare: list[int] = []  # always: how many tokens each block may still take back
    tried: set[int] = set()  # commit: positions that were taken back once
    complete = 0  # blocks before it are done: they and all before them hold no mask
    final = 0  # blocks before it can change no more
    forwards = 0

    def decoded(block: int) -> float:
        if block < 0:
            return 1.0  # the prompt
        return sum(out[p] is not None for p in blocks[block]) / len(blocks[block])

    while True:
        room = options.length - len(out)
        ended = any(token in contract.end_ids for token in out)
        if room and not ended and decoded(len(blocks) - 1) >= options.tau_add:
            blocks.append(range(len(out), len(out) + min(size, room)))
            out += [None] * len(blocks[-1])
            spare.append(0)
        full |= {b for b in range(len(blocks)) if decoded(b - 1) >= options.tau_act}
        while final < complete and (always or set(blocks[final]) <= tried):
            final += 1
        fixed = out[: blocks[final - 1].stop] if final else []
        if options.early_exit and any(token in contract.end_ids for token in fixed):
            return out, forwards
        if final == len(blocks):
            return out, forwards

        check: list[list[int]] = []  # positions of each block to verify
        for b, block in enumerate(blocks):
            decided = [p for p in block if out[p] is not None]
            if always:
                check.append(decided if b >= complete and spare[b] else [])
            else:
                fresh = [p for p in decided if p not in tried]
                check.append(fresh if final <= b < complete else [])
        x = prompt + [contract.mask_id if token is None else token for token in out]
        allowed = seen_blocks([0] * start + [1 + b for b, r in enumerate(blocks) for _ in r])
        wanted = [p for p, token in enumerate(out) if token is None]
        logits = dense_logits(model, x, allowed)
        shadows = [
            shadow_logits(
                model, x, allowed, range(start + r.start, start + r.stop), [start + p for p in c]
            )
            for r, c in zip(blocks, check, strict=True)
        ]
        found, named = predict_rows(
            logits[[start + p - contract.logit_shift for p in wanted]],
            torch.cat(shadows),
            [x[start + p] for c in check for p in c],
            sampler,
            options.forced_pick,
        )
        forwards += 1
        probability = dict(zip([p for c in check for p in c], named, strict=True))
        guess = dict(zip(wanted, found, strict=True))

        drafted = [0] * len(blocks)
        for b, block in enumerate(blocks):
            masked = [p for p in block if out[p] is None]
            chosen = [p for p in masked if guess[p][1] > in_fp32(options.tau_conf)]
            if not chosen and masked and b in full:
                chosen = [max(masked, key=lambda p: (guess[p][2], -p))]
            for p in chosen:
                out[p] = guess[p][0]
            drafted[b] = len(chosen)
        for b in range(len(blocks)):
            low = [p for p in check[b] if probability[p] < options.tau_revoke]
            low.sort(key=lambda p: probability[p])
            if always:
                low = low[: spare[b]]
                spare[b] = drafted[b] - 1 if drafted[b] else spare[b] - len(low)
            elif not final <= b < complete:
                continue  # not fed as a candidate, or after a block that was refused
            elif low:
                complete = b
            else:
                final = b + 1
            for p in low:
                out[p] = None
                tried.add(p)
        while complete < len(blocks) and decoded(complete) == 1.0:
            complete += 1
