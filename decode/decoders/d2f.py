"""D2F's pipelined decoding (arXiv 2508.09192, section 3.3): the pipeline and its options are in
`decode.decoders.d2f_session`, its lossless and its revoking form have a file each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from d2f.contract import Contract
from decode.decoders.base import DEFAULT_BLOCK_SIZE
from decode.decoders.d2f_lossless import LosslessSession
from decode.decoders.d2f_revoke import AlwaysSession, CommitSession
from decode.decoders.d2f_session import D2FSession, Pipeline
from decode.decoders.session import mask_kind


@dataclass(frozen=True)
class D2F(Pipeline):
    """The pipeline in all its forms; its options are those of `Pipeline`."""

    name: ClassVar[str] = "d2f"
    summary: ClassVar[str] = "the pipeline (default for a model that D2F trained)"

    @classmethod
    def is_default_for(cls, contract: Contract) -> bool:
        return (
            contract.mask_id is not None
            and contract.objective == "d2f"
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

    def begin(self, prompt: list[int], contract: Contract) -> D2FSession:
        kind = D2FSession
        # tau_revoke 0 takes nothing back: then it is the plain pipeline, without shadows.
        if self.lossless is not None:
            kind = LosslessSession
        elif self.revoke is not None and self.tau_revoke > 0:
            kind = AlwaysSession if self.revoke == "always" else CommitSession
        return kind(self, prompt, contract)
