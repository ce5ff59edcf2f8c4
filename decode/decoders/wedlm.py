"""WeDLM's streaming decoding (arXiv 2512.22737, section 4): its options. The window is in
`decode.decoders.wedlm_session`, its lossless variant in `decode.decoders.wedlm_verified`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from d2f.contract import Contract
from d2f.errors import InputError
from decode.decoders.adaptive import AUTO
from decode.decoders.base import Card, Decoder
from decode.decoders.checks import not_negative
from decode.decoders.options import max_new_tokens_option, option
from decode.decoders.visibility import mask_kind
from decode.decoders.wedlm_session import Refill, WeDLMSession, WindowRules
from decode.decoders.wedlm_verified import VerifiedSession


@dataclass(frozen=True)
class WeDLM(Decoder):
    """Options of streaming decoding.

    window: slots W of the window; with verify, ``auto`` lets the engine choose it before each
    forward (`decode.engine.row_budget`). entropy_threshold: a mask is filled where its entropy in
    nats plus its penalty lies below it; where none does, and always for None, the lowest is filled.
    distance_penalty: nats a position, counted from the first mask. max_new_tokens: kept exactly;
    decoding stops at the first end id. refill: ``paper`` keeps W slots and none beyond
    max_new_tokens (a window without masks goes on with the next one in the same forward);
    ``repository`` adds a mask for each slot that is about to be committed, before it is, and goes
    on past max_new_tokens by up to W - 1 positions, which are then cut off; ``block``, the paper's
    ablation, leaves the window where it is until all of it is filled, and commits it whole.
    window_attention: ``bidirectional`` lets the rows of a window that is not filled yet see all of
    it, for a model trained so; what is committed is causal all the same. verify: ``ar`` commits
    only the model's own greedy next tokens; None takes the masks' word.
    """

    name: ClassVar[str] = "wedlm"
    summary: ClassVar[str] = (
        "streaming decoding of a causal diffusion model, where it is the default"
    )
    labels: ClassVar[Mapping[str, str]] = {"cached": "committed", "fully active": "window"}
    card: ClassVar[Card] = Card(
        decides="masks whose entropy plus penalty is below `entropy_threshold`",
        rows="W to 2W",
        cache="exact",
        models="causal with a mask id",
        source="WeDLM, [2512.22737](https://arxiv.org/abs/2512.22737)",
    )

    window: int | Literal["auto"] = option(
        16,
        "slots of the window, at least 1; auto, with verify, what decodes fastest at the time",
        shown="as trained here, else 16",
        search=(8, 16),
    )
    entropy_threshold: float | None = option(
        0.4,
        "entropy below which a mask is filled, its penalty included, at least 0; 0 fills one a "
        "forward",
        search=(0.1, 0.2, 0.4, 0.6),
        unit="NATS",
        check=not_negative,
    )
    distance_penalty: float = option(
        0.02,
        "what is added to the entropy for each position from the first mask, at least 0",
        unit="NATS",
        check=not_negative,
    )
    max_new_tokens: int | None = max_new_tokens_option()
    refill: Refill = option(
        "paper",
        "paper tops the window up after it commits, repository before, block once all is filled",
    )
    window_attention: Literal["causal", "bidirectional"] = option(
        "causal", "bidirectional: rows of a window see all of it; with refill block, if trained so"
    )
    verify: Literal["ar"] | None = option(
        None, "commit only what greedy autoregressive decoding of the model confirms"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.verify and self.temperature:
            raise InputError(
                f"verify needs temperature 0, got {self.temperature!r}: what is drawn at random "
                "cannot be confirmed"
            )
        if self.verify and self.refill == "block":
            raise InputError("verify commits token by token: expected another refill, got block")
        if self.window == AUTO and not self.verify:
            raise InputError(
                "window auto needs verify ar: without it the tokens depend on the window, got "
                f"verify {self.verify!r}"
            )
        if self.window_attention == "bidirectional" and self.refill != "block":
            raise InputError(
                "window_attention bidirectional needs refill block, as a row that saw all of the "
                f"window is not final before it, got refill {self.refill}"
            )

    def check(self, contract: Contract) -> None:
        super().check(contract)
        kind = mask_kind(contract)
        if kind != "causal":
            other = "static or d2f" if kind == "bidirectional" else "block"
            raise InputError(
                f"the decoder wedlm needs a causal model with a mask id, the family "
                f"{contract.family} is {kind}: take {other} for it"
            )

    @classmethod
    def is_default_for(cls, contract: Contract) -> bool:
        return (
            contract.mask_id is not None
            and contract.objective != "wino_plus"
            and mask_kind(contract) == "causal"
        )

    @classmethod
    def completed(cls, given: Mapping[str, Any], contract: Contract) -> dict[str, Any]:
        own = contract.block_size if contract.objective == "wedlm" else None
        return {"window": own, **given} if own is not None else dict(given)

    @property
    def overhang(self) -> int:
        if self.refill != "repository" or self.verify:
            return 0
        assert not isinstance(self.window, str)  # which goes with verify alone
        return self.window - 1

    def begin(self, prompt: list[int], contract: Contract) -> WeDLMSession:
        kind = VerifiedSession if self.verify else WeDLMSession
        rules = WindowRules(
            length=self.length,
            overhang=self.overhang,
            window=None if isinstance(self.window, str) else self.window,
            entropy_threshold=self.entropy_threshold,
            distance_penalty=self.distance_penalty,
            refill=self.refill,
            bidirectional=self.window_attention == "bidirectional",
        )
        return kind(prompt, contract, rules)
