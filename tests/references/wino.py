"""WINO, plainly: every forward feeds the whole sequence under a dense mask, and the shadow in a
forward of its own."""

from __future__ import annotations

from d2f.model import DiffusionModel
from decode.decoders.wino import Wino
from decode.engine.batch import Sampler
from tests.references.predictions import allowed_pairs, dense_logits
from tests.references.shadowed import predict_rows, shadow_logits


def decode_wino(
    model: DiffusionModel, prompt: list[int], options: Wino
) -> tuple[list[int | None], int]:
    """All that WINO without an approximate cache generates, None where early exit left a position
    undecoded; and the number of forwards."""
    contract, total = model.contract, len(prompt) + options.length
    assert contract.mask_id is not None
    sampler = Sampler(options, contract.mask_id)
    x = prompt + [contract.mask_id] * options.length
    masked = [False] * len(prompt) + [True] * options.length
    allowed = allowed_pairs(contract, len(prompt), total)
    forwards = 0

    def ended(stop: int) -> bool:
        return options.early_exit and any(t in contract.end_ids for t in x[len(prompt) : stop])

    for start in range(len(prompt), total, options.size):
        block = range(start, min(start + options.size, total))
        last, step = 30, 0
        if ended(start):
            break
        while any(masked[p] for p in block):
            if not options.tau2 and ended(masked.index(True)):
                break
            wanted = [p for p in block if masked[p]]
            decided = [p for p in block if not masked[p]]
            if not options.tau2 or (options.caps and min(last, len(wanted)) < 2):
                decided = []  # nothing could be taken back
            logits = dense_logits(model, x, allowed)
            found, probability = predict_rows(
                logits[[p - contract.logit_shift for p in wanted]],
                shadow_logits(model, x, allowed, block, decided),
                [x[p] for p in decided],
                sampler,
            )
            forwards, step = forwards + 1, step + 1
            ranked = sorted(range(len(wanted)), key=lambda i: -found[i][1])  # stable
            chosen = [i for i in ranked if found[i][1] > options.tau1] or ranked[:1]
            if options.caps:
                chosen = chosen[: max(5, min(20, int(0.7 * len(wanted))))]
            for i in chosen:
                x[wanted[i]], masked[wanted[i]] = found[i][0], False
            low = [i for i in range(len(decided)) if probability[i] < options.tau2]
            low.sort(key=lambda i: probability[i])
            if options.caps and len(chosen) < 2:
                low = []
            elif options.caps and len(low) >= last:
                low = low[: last - 1]
            elif not options.caps:
                low = low[: len(decided) + len(chosen) - step]
            for i in low:
                x[decided[i]], masked[decided[i]] = contract.mask_id, True
            last = len(chosen)
    response = range(len(prompt), total)
    return [None if masked[p] else x[p] for p in response], forwards
