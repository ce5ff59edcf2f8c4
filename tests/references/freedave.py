"""FreeDave's plain reference: algorithm 1 of arXiv 2510.00294, and FreeDave++, on dense masks,
without cache."""

from __future__ import annotations

from d2f.model import DiffusionModel
from decode import FreeDave
from decode.engine.batch import Sampler
from tests.references.d2f import predict_positions
from tests.references.predictions import allowed_pairs

Guesses = dict[int, tuple[int, float]]  # (token, confidence) by position


def decode_freedave(
    model: DiffusionModel, prompt: list[int], options: FreeDave
) -> tuple[list[int | None], int]:
    """All that is generated, None where early exit left a position undecoded, and the forwards.

    options.cache must be ``none``; options.drafting does not matter here.
    """
    contract, start, d = model.contract, len(prompt), options.drafts
    mask, sampler = contract.mask_id, Sampler(options, contract.mask_id)
    assert mask is not None and options.cache == "none"
    allowed = allowed_pairs(contract, start, start + options.length)
    size = options.block_size or options.length
    ahead = -(-d // size) if options.eager else 0

    def masks(x: list[int]) -> list[int]:
        """Masked positions of the blocks that may be decoded now."""
        masked = [p for p, token in enumerate(x) if token == mask and p >= start]
        current = (masked[0] - start) // size if masked else 0
        return [p for p in masked if (p - start) // size <= current + ahead]

    def see(x: list[int], window: list[int]) -> Guesses:
        wanted = [p for p in window if x[p] == mask]
        found = predict_positions(model, x, allowed, wanted, contract.logit_shift, sampler)
        return dict(zip(wanted, found, strict=True))

    def ranked(x: list[int], z: Guesses) -> list[int]:
        known = set(masks(x)) & set(z)
        return sorted(known, key=lambda p: ((p - start) // size, -z[p][1], p))

    def reveal(x: list[int], z: Guesses, chosen: list[int]) -> list[int]:
        return [z[p][0] if p in chosen else token for p, token in enumerate(x)]

    def step(x: list[int], z: Guesses) -> list[int]:
        """One step of the decoding that is drafted for: static, or by the threshold."""
        low = start + (masks(x)[0] - start) // size * size
        high = min(low + size, len(x))
        own = [p for p in ranked(x, z) if p < high]
        if options.tau is not None:
            return reveal(x, z, [p for p in own if z[p][1] >= options.tau] or own[:1])
        blocks = -(-options.length // size)
        steps = options.steps // blocks if options.steps else high - low
        counts = [(high - low) // steps + (j < (high - low) % steps) for j in range(steps)]
        done = sum(token != mask for token in x[low:high])
        return reveal(x, z, own[: next(n for j, n in enumerate(counts) if sum(counts[:j]) == done)])

    def candidates(x: list[int], z: Guesses, count: int) -> list[list[int]]:
        """c_1, c_2, ...: x after a step, and after more of them by the same predictions (static) or
        with one more token each (threshold)."""
        found = [step(x, z)]
        while len(found) < count and mask in found[-1] and ranked(found[-1], z):
            last = found[-1]
            one_more = reveal(last, z, ranked(last, z)[:1])
            found.append(step(last, z) if options.tau is None else one_more)
        return found

    def agrees(draft: list[int], target: list[int]) -> bool:
        """Static steps are compared whole; by the threshold a part of one will do."""
        if options.tau is None:
            return draft == target
        return all(d in (mask, t) for d, t in zip(draft, target, strict=True))

    def over(x: list[int]) -> bool:
        settled = x[start : next((p for p in range(start, len(x)) if x[p] == mask), len(x))]
        ended = any(token in contract.end_ids for token in settled)
        return mask not in x[start:] or (options.early_exit and ended)

    def open_after(c: list[int], x: list[int]) -> bool:
        """Whether the blocks that were open in x have something left to decode in c."""
        end = len(x) if options.eager else start + ((masks(x)[0] - start) // size + 1) * size
        return mask in c[start:end]

    x, forwards = prompt + [mask] * options.length, 0
    while not over(x):
        z = see(x, masks(x))  # once a block
        forwards += 1
        while True:
            drafted = candidates(x, z, d)
            if over(drafted[0]) or not open_after(drafted[0], x):
                x = drafted[0]
                break
            drafted = [c for c in drafted if open_after(c, x)]
            window = masks(drafted[0])  # what the blocks that are open have in it, in all of them
            seen = [see(c, window) for c in drafted]
            forwards += 1
            best = 0
            while not over(drafted[best]):
                target = step(drafted[best], seen[best])
                later = range(best + 1, len(drafted))
                if not (fitting := [j for j in later if agrees(drafted[j], target)]):
                    break
                best = fitting[-1]
            x, z = drafted[best], seen[best]
            if over(x):
                break
    return [None if token == mask else token for token in x[start:]], forwards
