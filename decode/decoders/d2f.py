"""The options of D2F's pipelined decoding (arXiv 2508.09192, section 3.3).

The pipeline is in `decode.decoders.d2f_session`; its lossless and its revoking form have a file
each, as they have papers of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from d2f.contract import Contract
from d2f.errors import InputError
from decode.decoders.base import (
    DEFAULT_BLOCK_SIZE,
    Card,
    Decoder,
    block_size_option,
    early_exit_option,
    mask_kind,
    max_new_tokens_option,
    option,
    ratio,
)
from decode.decoders.d2f_lossless import LosslessSession
from decode.decoders.d2f_revoke import AlwaysSession, CommitSession
from decode.decoders.d2f_session import D2FSession, Pick

Revoke = Literal["always", "commit"]


@dataclass(frozen=True)
class D2F(Decoder):
    """Options of the pipeline.

    block_size: None takes the one that the model was trained with, else 32.
    tau_add: share of the last block that must be decoded before another is appended.
    tau_act: share of a block that must be decoded before the next becomes fully active.
    tau_conf: confidence above which a token is revealed.
    forced_pick: which token a fully active block reveals where none is above tau_conf: the one of
        highest confidence, of lowest entropy (the official code's neg_entropy) or of the largest
        margin between its two likeliest ids.
    max_new_tokens: kept exactly, the last block may be short.
    early_exit: stop when the first end id and all before it are decoded; False finishes all open
        blocks, as the official code does.
    lossless: states of the pipeline that a forward checks at most, the fed one and drafts of the
        next (`decode.decoders.d2f_lossless`): the same tokens in no more forwards; None drafts
        nothing. The engine's `max_rows` bounds it, too.
    revoke: take decided tokens back that WINO's shadow (arXiv 2507.18578) gives less than
        tau_revoke: ``always``, in every forward, in the blocks that are still active; ``commit``,
        once, in the forward that would cache a block. It helps a tau_conf below tau_revoke.
    """

    name: ClassVar[str] = "d2f"
    summary: ClassVar[str] = "the pipeline (default for LLaDA- and Dream-like models)"
    card: ClassVar[Card] = Card(
        decides="in each open block all above `tau_conf`; in fully active ones at least one",
        rows="open blocks, and those just finished",
        cache="exact",
        models="D2F students, LLaDA and Dream with a D2F adapter",
        source="D2F, [2508.09192](https://arxiv.org/abs/2508.09192)",
    )

    block_size: int | None = block_size_option(None, f"the model's own, else {DEFAULT_BLOCK_SIZE}")
    tau_add: float = ratio(
        0.1,
        "share of the last block that must be decoded before another is appended",
        search=(0.1, 0.5),
    )
    tau_act: float = ratio(
        0.95,
        "share of a block that must be decoded before the next becomes fully active",
        search=(0.95, 1.0),
    )
    tau_conf: float = ratio(
        0.9,
        "confidence above which a token is revealed",
        search=(0.8, 0.9, 0.95, 0.97, 0.99),
    )
    max_new_tokens: int | None = max_new_tokens_option()
    early_exit: bool = early_exit_option("finish the open blocks")
    lossless: int | None = option(
        None,
        "states that a forward checks at most, at least 1, drafted from the predictions at hand: "
        "the same tokens in no more forwards, each with more rows",
    )
    revoke: Revoke | None = option(
        None,
        "take decided tokens back that WINO's check does not bear out: always, in the active "
        "blocks, or once, when a block would be cached",
        shown="never",
    )
    tau_revoke: float = ratio(0.9, "with revoke: probability below which a token is taken back")
    forced_pick: Pick = option(
        "confidence",
        "which token a fully active block reveals where none is above tau_conf: that of highest "
        "confidence, lowest entropy or largest margin between its two likeliest",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lossless is not None:
            self.greedy_only("lossless")
            if self.revoke is not None:
                raise InputError(
                    "lossless drafts the pipeline that takes nothing back: expected lossless or "
                    f"revoke, got lossless {self.lossless!r} and revoke {self.revoke!r}"
                )

    @classmethod
    def is_default_for(cls, contract: Contract) -> bool:
        return (
            contract.mask_id is not None
            and contract.objective != "wino_plus"
            and mask_kind(contract) in ("bidirectional", "block-causal")
        )

    @classmethod
    def with_model_defaults(cls, given: Mapping[str, Any], contract: Contract) -> dict[str, Any]:
        if given.get("block_size") is not None:
            return dict(given)
        return {**given, "block_size": contract.block_size or DEFAULT_BLOCK_SIZE}

    def warning_for(self, contract: Contract) -> str | None:
        if contract.objective == "d2f":
            return None
        return (
            f"was not trained by D2F (its objective: {contract.objective or 'unknown'}): the "
            "pipeline's block-causal mask is foreign to it; expect lower accuracy"
        )

    def size(self, contract: Contract) -> int:
        """Tokens a block."""
        return self.block_size or contract.block_size or DEFAULT_BLOCK_SIZE

    def begin(self, prompt: list[int], contract: Contract) -> D2FSession:
        kind = D2FSession
        # tau_revoke 0 takes nothing back: then it is the plain pipeline, without shadows.
        if self.lossless is not None:
            kind = LosslessSession
        elif self.revoke is not None and self.tau_revoke > 0:
            kind = AlwaysSession if self.revoke == "always" else CommitSession
        return kind(self, prompt, contract)
