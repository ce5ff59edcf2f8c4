"""What a configuration must know of an objective: the keys that it reads, what it trains, and what
the contract of its result says.

The objectives themselves are the classes that `Kind.home` names, a file each. This much of them
lies here because a configuration is checked, and refused, without waiting for torch.
"""

from __future__ import annotations

from distill.config_keys import TrainKeys, section_keys


class Kind:
    """An objective as a configuration sees it; what most have in common is the default."""

    name: str
    home: str
    """Its class, as ``module:Class``."""
    prompt_rule: str
    """What the prompt attends to in the result (`d2f.contract.Contract`)."""
    masks = True
    """Whether it hides tokens behind the model's mask token."""
    reads_text = True
    """Whether it trains on text, a file's or generated; else on rollouts."""
    tail = True
    """Whether samples of text carry end tokens after the first."""
    masks_by_ratio = False
    """Whether a held-out loss sets the share of hidden tokens (`Objective.mask_ratio`); else it
    hides what training would."""
    has_teacher = False
    """Whether it learns a teacher's distribution, so that a held-out KL says how well."""

    def trains_adapter(self, keys: TrainKeys) -> bool:
        """Whether the weights of init stay as they are and a LoRA on them is trained."""
        return False

    def block_causal(self, keys: TrainKeys) -> bool:
        """Whether the result is a D2F student."""
        return False

    def reads(self, keys: TrainKeys) -> set[str]:
        """Which of the keys that some runs do not read (`distill.config`) it reads, but for
        those that follow from what is above."""
        return set()

    def check(self, keys: TrainKeys) -> None:
        """Raise ValueError for keys that do not go together."""

    def contract(self, keys: TrainKeys) -> dict[str, object]:
        """What decoding must know of the result."""
        return {"objective": self.name, "prompt_rule": self.prompt_rule}


class NextTokenKind(Kind):
    name, home = "next_token", "distill.objectives.next_token:NextToken"
    prompt_rule, masks, tail = "causal", False, False


class MaskedDiffusionKind(Kind):
    name, home = "masked_diffusion", "distill.objectives.masked_diffusion:MaskedDiffusion"
    prompt_rule, masks_by_ratio = "bidirectional", True

    def reads(self, keys: TrainKeys) -> set[str]:
        found = {"noise.min_ratio", "noise.uniform_share", "noise.causal_share"}
        found.add("noise.cart_p")
        if keys.noise.uniform_share > 0:
            found.add("noise.max_ratio")
        if keys.noise.uniform_share < 1:  # samples that follow block-wise decoding
            found |= {"noise.block_sizes", "noise.far_weight"}
        return found


class D2FKind(Kind):
    name, home = "d2f", "distill.objectives.d2f:D2F"
    prompt_rule, masks_by_ratio, has_teacher = "block", True, True

    def trains_adapter(self, keys: TrainKeys) -> bool:
        return True

    def block_causal(self, keys: TrainKeys) -> bool:
        return True

    def reads(self, keys: TrainKeys) -> set[str]:
        found = {"block_size", "distill_target", "weighting"}
        found |= {"noise.schedule", "noise.monotone_share"}
        if keys.noise.schedule == "clean_prefix":
            return found | {"noise.min_ratio"}
        found.add("noise.states")
        if keys.noise.monotone_share > 0:
            found |= {"noise.low", "noise.high"}
        if keys.noise.monotone_share < 1:  # samples that follow the pipeline's states
            found.add("noise.far_weight")
            if keys.noise.states is None:  # which are drawn, not recorded ones
                found |= {"noise.min_ratio", "noise.most_active"}
        return found

    def contract(self, keys: TrainKeys) -> dict[str, object]:
        noise = (keys.noise.low, keys.noise.high)
        return super().contract(keys) | {"block_size": first_block_size(keys), "noise": noise}


class WinoPlusKind(Kind):
    name, home = "wino_plus", "distill.objectives.wino_plus:WinoPlusObjective"
    prompt_rule, reads_text = "bidirectional", False

    def trains_adapter(self, keys: TrainKeys) -> bool:
        return True

    def block_causal(self, keys: TrainKeys) -> bool:
        return keys.wino_plus.mask == "block_causal"

    def reads(self, keys: TrainKeys) -> set[str]:
        return {"block_size", *section_keys("wino_plus")}

    def check(self, keys: TrainKeys) -> None:
        if len(keys.block_shares) > 1:
            raise ValueError("objective wino_plus takes one block_size, that of its rollouts")
        if keys.data.file is None:
            raise ValueError("objective wino_plus needs data.file: a file of distill.rollouts")

    def contract(self, keys: TrainKeys) -> dict[str, object]:
        found = super().contract(keys) | {"block_size": first_block_size(keys)}
        if self.block_causal(keys):  # a D2F student, whatever it was trained by
            found |= {"objective": "d2f", "prompt_rule": "block"}
        return found


class WeDLMKind(Kind):
    name, home = "wedlm", "distill.objectives.wedlm:WeDLM"
    prompt_rule, masks_by_ratio = "causal", True

    def trains_adapter(self, keys: TrainKeys) -> bool:
        return keys.wedlm.adapter

    def reads(self, keys: TrainKeys) -> set[str]:
        return {"block_size", *section_keys("wedlm")}

    def contract(self, keys: TrainKeys) -> dict[str, object]:
        return super().contract(keys) | {"block_size": first_block_size(keys)}


def first_block_size(keys: TrainKeys) -> int:
    """Of several block sizes, decoders take the first."""
    return next(iter(keys.block_shares))


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (MaskedDiffusionKind(), NextTokenKind(), D2FKind(), WinoPlusKind(), WeDLMKind())
}
