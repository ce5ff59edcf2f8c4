"""Self-drafting: an autoregressive model learns to guess its next tokens, and stays what it is.

A LoRA changes draft rows only (`d2f.parts.Gate`). Behind an anchor, a token of the answer, stand
`drafts` draft rows. Each sees the text up to the anchor and the draft rows before it, and has the
position of the token that it stands for. It learns what the clean row of that position predicts,
which has seen the tokens in between. Clean rows see no draft row and no adapter, so the model is
its own teacher.

A prompt p q and an answer a b c d with two anchors (q and b) and two draft rows V each:

    row        0 1   2 3 4 5 | 6 7  8 9
    fed        p q   a b c d | V V  V V
    position   0 1   2 3 4 5 | 2 3  4 5
    row 7 sees rows [0, 2) and [6, 8), and learns what row 3 predicts, which is c
    row 8 sees rows [0, 4) and [8, 9), and learns what row 4 predicts, which is d
    row 9 is not read: nothing follows the answer's last token

The token right behind an anchor needs no draft: the anchor's own row predicts it. Train on the
model's own answers, which `d2f batch` collects: it drafts for itself.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import numpy as np
from pydantic import Field

from d2f import noise, spans
from d2f.config import Tokens
from d2f.contract import DRAFT
from d2f.errors import InputError
from distill.config import Lora, Module, Options, TrainConfig
from distill.data.samples import Sample
from distill.objectives.base import Batch, Fed, Objective, gathered

if TYPE_CHECKING:
    from torch import Tensor

    from d2f.model import DiffusionModel
    from d2f.parts import ModelParts

_Weights = Annotated[tuple[Annotated[float, Field(ge=0)], ...], Field(min_length=1)]


class DraftLora(Lora):
    """The adapter that changes draft rows."""

    r: Annotated[int, Field(ge=1, le=8192)] = 16
    """Rank."""
    alpha: Annotated[int, Field(ge=1, le=10**6)] = 32
    """The update is scaled by alpha / r."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout of the adapter's input."""
    targets: Annotated[tuple[Module, ...], Field(min_length=1)] = (
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    )  # fmt: skip
    """Linear layers that are adapted, by transformers' names."""


class SelfDraftOptions(Options):
    """Self-drafting."""

    prompt_rule, has_teacher, has_tail, is_merged = "causal", True, False, False

    drafts: Tokens = 4
    """Draft rows after an anchor."""
    weights: _Weights | None = None
    """Weight of the first draft row, the second, and so on; default: all alike."""
    lora: DraftLora = DraftLora()
    """The adapter that is trained."""

    @property
    def best_loss(self) -> str:
        return "kl"

    def check(self, config: TrainConfig) -> None:
        super().check(config)
        if self.weights is not None and len(self.weights) != self.drafts:
            raise ValueError(
                f"objective.weights needs one for each of the {self.drafts} drafts, "
                f"got {len(self.weights)}"
            )
        if config.compile:
            raise ValueError("compile is not for self_draft, whose rows the adapter tells apart")

    def contract(self) -> dict[str, object]:
        return super().contract() | {"block_size": self.drafts}


class SelfDraft(Objective):
    """Train by the mean of KL(clean row || draft row) over the draft rows, by their weights."""

    section, copies = SelfDraftOptions, 2

    def __init__(self, model: DiffusionModel, config: TrainConfig):
        make_self_drafting(model)
        super().__init__(model, config)
        self.reads_teacher = False  # its teacher is the clean rows of the same forward
        weights = self.options.weights or (1.0,) * self.options.drafts
        self.weights = np.array(weights) / max(weights)

    @classmethod
    def check_model(cls, model: DiffusionModel, config: TrainConfig) -> None:
        if model.is_diffusion:
            raise InputError(f"objective self_draft trains the family causal, got {model.family}")

    def anchors(self, sample: Sample) -> np.ndarray:
        """Draw the anchors, positions of the sample in ascending order: as many as draft rows fit
        behind it. The last token but one is the last that a draft can follow."""
        first, last = len(sample.prompt) - 1, len(sample) - 2  # last: excluded
        places = np.arange(max(0, first), max(0, last))
        count = min(len(places), len(sample) // self.options.drafts)
        rng = noise.sample_rng(self.config.seed, sample.index, noise.MASK)
        return np.sort(rng.choice(places, count, replace=False))

    def sample_spans(self, sample: Sample) -> Tensor:
        import torch

        length, anchors, drafts = len(sample), self.anchors(sample), self.options.drafts
        own = length + np.arange(len(anchors) * drafts)  # each draft row's place
        group = own - (own - length) % drafts  # its group's first
        clean = spans.stack((0, np.arange(length) + 1), (0, np.zeros(length, dtype=np.int64)))
        rows = spans.stack((0, np.repeat(anchors, drafts) + 1), (group, own + 1))
        nothing = np.zeros((length - len(own), 2, 2), dtype=np.int64)
        return torch.from_numpy(np.concatenate((clean, rows, nothing))).to(torch.int32)

    def fed(self, sample: Sample) -> Fed:
        length, anchors, drafts = len(sample), self.anchors(sample), self.options.drafts
        clean, number = np.array(sample.prompt + sample.response), np.arange(drafts)
        positions = (anchors[:, None] + 1 + number).ravel()
        read = np.flatnonzero(positions < length - 1)
        weight = np.tile(self.weights, len(anchors))[read]
        pad = np.zeros(length - len(positions), dtype=np.int64)
        return Fed(
            ids=np.concatenate((clean, np.full(length, DRAFT))),  # half of a row's are draft rows
            positions=np.concatenate((np.arange(length), positions, pad)),
            rows=length + read,
            targets=clean[positions[read] + 1],
            weight=weight[:, None],
            total=np.array([weight.sum()]),
        )

    def hidden(self, batch: Batch) -> Tensor:
        """Compute the last hidden states ``[R x L, C]`` of all rows: the clean ones first, by the
        base and without a gradient, then the draft rows, by the adapter."""
        import torch

        from d2f.attention import PartPlan

        assert self.model.gate is not None
        embedded, length = self.model.gate.open(batch.input_ids), batch.input_ids.shape[1]
        self.model.gate.rows = None  # the rows of a forward are all of one kind
        order = (batch.input_ids == DRAFT).int().argsort(dim=1, stable=True)
        clean, drafts = order[:, : length // 2], order[:, length // 2 :]

        def forward(places: Tensor, earlier: PartPlan | None) -> tuple[Tensor, PartPlan]:
            seen = batch.spans.gather(
                1, places[..., None, None].expand(-1, -1, *batch.spans.shape[2:])
            )
            plan = PartPlan(seen, places, length, self.attention, earlier)
            states = self.model.backbone.model(
                input_ids=embedded.gather(1, places),
                position_ids=batch.positions.gather(1, places),
                spans=plan,
                use_cache=False,
            ).last_hidden_state
            return states, plan

        with torch.no_grad(), self.model.adapter_disabled():
            known, plan = forward(clean, None)
        guessed, _ = forward(drafts, plan)
        back = order.argsort(dim=1)[..., None].expand(-1, -1, known.shape[-1])
        return torch.cat((known, guessed), dim=1).gather(1, back).flatten(0, 1)

    def teachers(self, batch: Batch) -> Tensor:
        """Find the clean row of each row that is read, ``[N]``: that of its position, counted from
        where its sample begins, which is where the first of its spans does."""
        length = batch.input_ids.shape[1]
        begins = batch.spans.flatten(0, 1)[batch.rows, 0, 0]
        return batch.rows // length * length + begins + batch.positions.flatten()[batch.rows]

    def read(self, batch: Batch, which: Tensor) -> Tensor:
        return self.hidden(batch)[batch.rows]

    def read_teacher(self, batch: Batch) -> Tensor:
        return self.hidden(batch)[self.teachers(batch)]

    def forward(self, batch: Batch) -> Tensor:
        from triton_kernels.masked_kl import masked_linear_kl

        hidden = self.hidden(batch)
        head = gathered(self.model.backbone.lm_head.weight)
        student, teacher = hidden[batch.rows], hidden[self.teachers(batch)].detach()
        return masked_linear_kl(student, teacher, head, batch.weight)

    def held_out_shares(
        self, batch: Batch, student: Tensor, teacher: Tensor | None
    ) -> dict[str, tuple[float, float]]:
        """Count hits, drafts that are the clean row's likeliest token: of each draft row's number,
        and from each anchor up to the first that misses. One more than the latter is the tokens
        that a forward gives where every position has drafts."""
        import torch

        assert teacher is not None
        hits = torch.cat([
            self.model.head(mine).argmax(-1) == self.model.head(its).argmax(-1)
            for mine, its in zip(student.split(1024), teacher.split(1024), strict=True)
        ])  # fmt: skip
        ends = batch.spans.flatten(0, 1)[batch.rows, :, 1]
        number = batch.positions.flatten()[batch.rows] - (
            ends[:, 0] - batch.spans.flatten(0, 1)[batch.rows, 0, 0]
        )
        found = {}
        for k in range(self.options.drafts):
            mine = hits[number == k]
            found[f"hits/{k + 1}"] = (float(mine.sum()), float(len(mine)))
        first = number == 0
        group = first.cumsum(0)
        missed = torch.zeros_like(group).index_add_(0, group - 1, (~hits).long())
        before = (~hits).cumsum(0) - (missed.cumsum(0) - missed)[group - 1]
        led = hits & (before == 0)
        found["drafted_tokens_per_forward"] = (float(led.sum() + first.sum()), float(first.sum()))
        return found


def make_self_drafting(model: ModelParts) -> None:
    """Let the model's adapter change draft rows only. Their embedding is a reserved token's, which
    no text has, else the end token's."""
    from d2f.convert import reserved_tokens
    from d2f.parts import Gate

    if model.gate is None:
        assert model.adapter is not None and model.tokenizer is not None
        draft_id = [*model.end_ids[:1], *reserved_tokens(model.tokenizer, model.end_ids)][-1]
        model.contract = replace(model.contract, draft_id=draft_id)
        model.gate = Gate(model.adapter, draft_id)
