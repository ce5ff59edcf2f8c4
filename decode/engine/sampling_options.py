"""How a request chooses tokens, as options: what decoders know of sampling. Importing it does not
import torch; `decode.engine.sampling` does the choosing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

COLDEST = 1e-9
"""Temperatures below are greedy: the noise of a draw spans 20 temperatures, which is less than fp32
tells apart in logits of size 1, and dividing by less than about 1e-38 overflows."""


@dataclass(frozen=True)
class Sampling:
    """How a request chooses tokens; a temperature of 0, or below `COLDEST`, is greedy, top_k None
    and top_p 1 are off."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int = 0

    @property
    def greedy(self) -> bool:
        return self.temperature < COLDEST


def sample_seed(seed: int, prompt: int, sample: int) -> int:
    """The seed of one sample of one of several prompts: different for each, so that equal prompts
    give different answers; of the first sample of the first prompt the given one."""
    if prompt == sample == 0:
        return seed
    drawn = np.random.SeedSequence(seed % 2**64, spawn_key=(prompt, sample))
    return int(drawn.generate_state(1, np.uint64)[0])
