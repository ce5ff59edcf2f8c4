"""WeDLM's streaming decoding (arXiv 2512.22737, section 4): parallel decoding under a causal mask.

A window of masks follows what is decoded. Each forward feeds the window reordered, filled slots
before masked ones, each kind in ascending order, causally in that order and with the positions of
the text: a filled slot sees what is filled before it, a masked one all that is filled and the masks
before it. Masks of low entropy are filled, earlier ones more readily. Filled slots that follow the
decoded text without a gap are fed as any causal model feeds them, so their keys and values are
final: they are committed. Filled tokens are never revised.

Prompt ``7 8`` at positions 0 1, a window of 4, m the mask id; a row at slot s sees ``[0, s]``::

    forward          slot 0  1  2  3  4  5  6
    1    token            7  8  m  m  m  m          fills positions 2 and 4 (say with a and c)
         position         0  1  2  3  4  5
    2    token                  a  c  m  m          a's row is final, no gap is before it; c's is
         position               2  4  3  5          not: it does not see position 3, which is filled
    3    token                     b  c  m  m       with b. c is fed anew, at the slot of its
         position                  3  4  5  6       position; the window moved on by a's slot

The published algorithm feeds the prompt in a forward of its own and discards its logits, and ends
with one that only commits the last tokens. Both are left out here, the tokens are the same: the
prompt is fed with the first window, and nothing is fed once the response is known. So `forwards`
counts every call of the model, the prompt's included, and is two less than the calls there.

With ``verify="ar"`` (`VerifiedSession`) it is lossless: only what greedy autoregressive decoding of
the same model would give is committed. The row of a filled slot without a gap before it, read for
nothing otherwise, predicts the next position as in any causal model. So each forward checks the
tokens that masks were filled with before (drafts), from left to right: one that is the greedy next
token stays, the first that is not becomes that token and all after it are masked again, and where
all stay the last row says one token more. The response is the greedy one whatever the drafts are
(up to the rounding of forwards with other rows in them), at least one token a forward. Drafts hold
where the model was trained on next tokens too, as WeDLM's are. The prompt and window as above, but
forward 1 fills positions 3 and 4; the row of position 1, the prompt's last, gives a::

    forward          slot 2  3  4  5  6
    2    token            a  b  c  m         the rows of a, b, c give the tokens of positions 3 4 5:
                                             x  .  .    b is wrong: x, and c is masked again
                                             b  x  .    b is right, c is wrong: x
                                             b  c  d    both are right, and d is known for nothing
    3    token               x  m  m  m      after the first of these; x is fed for its row, which
                                             gives position 4
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from d2f.contract import Contract
from d2f.errors import InputError
from d2f.spans import prefix
from decode.decoders.base import Decoder, max_new_tokens_option, option
from decode.decoders.session import MaskedSession, MaskKind
from decode.step import BlockView, Floats, Ints, Predictions, Step

Refill = Literal["paper", "repository", "block"]


@dataclass(frozen=True)
class WeDLM(Decoder):
    """Options of streaming decoding.

    window: slots W of the window. With verify the engine's `max_rows` bounds it, too.
    refill: ``paper`` keeps W slots, none beyond max_new_tokens; a window without masks is followed
        by the next one in the same forward. ``repository`` adds a mask for each slot before it is
        committed, and goes up to W - 1 positions past max_new_tokens, which are cut off. ``block``,
        the paper's ablation, moves the window only once all of it is filled, and commits it whole.
    window_attention: committed slots are causal with ``bidirectional`` too.
    """

    name: ClassVar[str] = "wedlm"
    summary: ClassVar[str] = "streams a window (default for a causal diffusion model)"
    labels: ClassVar[Mapping[str, str]] = {"cached": "committed", "fully active": "window"}
    masks: ClassVar[tuple[MaskKind, ...]] = ("causal",)

    window: int = option(
        16,
        "slots of the window, at least 1",
        shown="as trained here, else 16",
        search=(8, 16),
    )
    entropy_threshold: float | None = option(
        0.4,
        "entropy below which a mask is filled, its penalty included, at least 0; 0 fills one a "
        "forward",
        search=(0.1, 0.2, 0.4, 0.6),
        unit="NATS",
    )
    distance_penalty: float = option(
        0.02,
        "what is added to the entropy for each position from the first mask, at least 0",
        unit="NATS",
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
        if self.verify:
            self.greedy_only("verify")
        if self.verify and self.refill == "block":
            raise InputError("verify commits token by token: expected another refill, got block")
        if self.window_attention == "bidirectional" and self.refill != "block":
            raise InputError(
                "window_attention bidirectional needs refill block, as a row that saw all of the "
                f"window is not final before it, got refill {self.refill}"
            )

    @classmethod
    def with_model_defaults(cls, given: Mapping[str, Any], contract: Contract) -> dict[str, Any]:
        own = contract.block_size if contract.objective == "wedlm" else None
        return {"window": own, **given} if own is not None else dict(given)

    @property
    def extra_positions(self) -> int:
        return self.window - 1 if self.refill == "repository" and not self.verify else 0

    def begin(self, prompt: list[int], contract: Contract) -> WeDLMSession:
        return (VerifiedSession if self.verify else WeDLMSession)(self, prompt, contract)


class WeDLMSession(MaskedSession):
    """Decode a request. The rows of a step, in their physical order, take the slots that follow the
    committed ones: a committed row's slot is its position, every row sees the slots up to its own.

    visible_end: where the response ends; with refill ``repository`` x goes on beyond it.
    committed: rows before it are fed no longer.
    end: of the window, from the first step on.
    counts: ``window_rows`` after the prompt's, in all forwards.
    """

    def __init__(self, decoder: WeDLM, prompt: list[int], contract: Contract):
        super().__init__(prompt, decoder.length + decoder.extra_positions, contract)
        self.decoder = decoder
        self.visible_end = len(prompt) + decoder.length
        self.committed = 0
        self.counts["window_rows"] = 0

    @property
    def settled(self) -> list[int]:
        return self.x[self.prompt_length : min(self.settled_end, self.visible_end)].tolist()

    @property
    def tokens(self) -> list[int]:
        part = slice(self.prompt_length, self.visible_end)
        return self.x[part][~self.masked[part]].tolist()

    def step(self) -> Step | None:
        if self.saw_eos or self.settled_end >= self.visible_end:
            return None
        leading, begin = self.settled_end, self.begin_of_window
        step = self.feed_window(leading)
        # Its rows saw no mask: final with this forward. Block by block, only a whole window is.
        part = self.decoder.refill == "block" and leading < begin + self.window
        self.committed = begin if part else leading
        return step

    @property
    def begin_of_window(self) -> int:
        return max(self.committed, self.prompt_length)

    @property
    def window(self) -> int:
        return self.decoder.window

    def end_of_window(self, leading: int) -> int:
        """Find where what is fed ends, the first mask being at `leading`."""
        begin = self.begin_of_window
        end = begin + self.window
        if self.decoder.refill == "repository" or leading >= end:
            # The official code appends before it commits: up to 2 W rows, and more masks compete.
            end += leading - begin  # a mask for each slot that this forward commits
        return min(end, len(self.x))

    def feed_window(self, first: int) -> Step:
        """Read the filled rows from position `first` up to the first mask, then the masks of the
        window. Feeds what is not committed, at first with it the prompt."""
        leading, begin = self.settled_end, self.begin_of_window
        self.end = self.end_of_window(leading)
        fed = np.arange(self.committed, self.end)
        filled, self.wanted = fed[~self.masked[fed]], fed[self.masked[fed]]
        # Observed tokens come first, so that under a causal mask every mask sees all of them, also
        # those to its right in the text.
        order = np.concatenate((filled, self.wanted))
        ends = fed + 1
        if self.decoder.window_attention == "bidirectional":
            # A window that is filled is committed causally, beside the next one's masks.
            ends[fed >= (leading if leading >= begin + self.window else begin)] = self.end
        self.counts["window_rows"] += int((fed >= self.prompt_length).sum())
        return Step(
            tokens=self.x[order],
            # RoPE has the positions of the text; a row is visible by its slot. The two agree for
            # all that is committed, and a filled slot behind a gap is fed anew until the gap is
            # closed.
            positions=order,
            slots=fed,
            spans=prefix(ends),
            read=np.concatenate(  # by slot: the filled rows before the gap, then the masks
                (np.arange(first, leading) - self.committed, np.arange(len(filled), len(fed)))
            ),
            cached=self.committed,
            uncertainty=len(self.wanted) > 0,  # which masks to fill is all that it is for
        )

    def accept(self, predictions: Predictions) -> None:
        self.revealed = []
        assert predictions.entropy is not None
        self.reveal_all(self.choose(self.wanted, predictions.entropy), predictions)

    def choose(self, masks: Ints, entropy: Floats) -> Ints:
        """Choose which of the masks at these positions, ascending, to fill, as indices. All in
        fp32, as in the official code."""
        # Only what has no gap before it is committed, so earlier masks are filled more readily.
        distance = (masks - masks[0]).astype(np.float32)
        penalised = entropy + distance * self.decoder.distance_penalty
        threshold = self.decoder.entropy_threshold
        # Strictly below, as the official code has it.
        chosen = np.flatnonzero(penalised < (-np.inf if threshold is None else threshold))
        # None below the threshold: the lowest, so that every forward fills a mask.
        return chosen if len(chosen) else penalised.argmin(keepdims=True)

    def reveal(self, position: int, token: int, confidence: float) -> None:
        super().reveal(position, token, confidence)
        if position >= self.visible_end:
            self.revealed.pop()  # of no response

    def blocks(self) -> list[BlockView]:
        first, views = self.prompt_length, []
        start, end = max(self.committed, first), min(self.end, self.visible_end)
        if start > first:
            views.append(self.view(first, start, "cached"))
        if end > start:
            views.append(self.view(start, end, "fully active"))
        return views


class VerifiedSession(WeDLMSession):
    """Decode a request with verify="ar". Positions before `known` are verified, all but the last of
    them committed; filled ones from there on are drafts.

    counts: accepted, drafts that were the greedy next token; rejected, those that were not, with
    the drafts after them.
    """

    def __init__(self, decoder: WeDLM, prompt: list[int], contract: Contract):
        super().__init__(decoder, prompt, contract)
        self.known = len(prompt)
        self.counts |= {"accepted": 0, "rejected": 0}

    @property
    def window(self) -> int:
        return min(self.decoder.window, self.width)

    def end_of_window(self, leading: int) -> int:
        # A window of one slot feeds no mask, as autoregressive decoding. Drafts that are left cost
        # a row a token too, and save forwards.
        return leading if self.window == 1 else super().end_of_window(leading)

    @property
    def settled(self) -> list[int]:
        return self.x[self.prompt_length : self.known].tolist()

    tokens = settled

    @property
    def done(self) -> bool:
        # Nothing is verified behind an end id, so only the last token can be one.
        begun = self.known > self.prompt_length
        ended = begun and int(self.x[self.known - 1]) in self.contract.end_ids
        return ended or self.known == self.visible_end

    def step(self) -> Step | None:
        if self.done:
            return None
        if self.window > 1 or not self.masked[self.known]:
            return self.feed_window(self.known - 1)
        # `feed_window` without drafts and masks, in less time: at high load there is one for each
        # token.
        self.end = self.known
        fed = np.arange(self.committed, self.known)
        self.wanted = fed[:0]
        self.counts["window_rows"] += self.known - self.begin_of_window
        read = np.array([self.known - 1 - self.committed])
        return Step(self.x[fed], fed, fed, prefix(fed + 1), read, cached=self.committed)

    def accept(self, predictions: Predictions) -> None:
        self.revealed = []
        # Rows known - 1, known, ...: each predicts the next position, as in any causal model.
        filled = len(predictions.token) - len(self.wanted)
        ahead = slice(self.known, self.known + filled)
        found = predictions.token[:filled].tolist(), predictions.confidence[:filled].tolist()
        drafts = self.x[ahead].tolist(), self.masked[ahead].tolist()
        # The response may end before the rows do; the last drafts are then behind it.
        for token, confidence, draft, masked in zip(*found, *drafts, strict=False):
            drafted, right = not masked, draft == token
            self.reveal(self.known, token, confidence)
            self.known += 1
            self.counts["accepted"] += int(drafted and right)
            if drafted and not right:  # the rows after it saw a wrong token
                self._undo_drafts()
                break
            if self.done:
                break
        else:
            # No draft was wrong and the response goes on: what the masks say rests on right tokens.
            self._draft(filled, predictions)
        # The row of the last known token has not been fed with it yet.
        self.committed = self.known - 1

    def _undo_drafts(self) -> None:
        drafts = ~self.masked[self.known :]
        self.counts["rejected"] += 1 + int(drafts.sum())
        assert self.contract.mask_id is not None
        self.x[self.known :] = self.contract.mask_id
        self.masked[self.known :] = True

    def _draft(self, filled: int, predictions: Predictions) -> None:
        """Fill masks, whose predictions follow those of the `filled` rows; the first mask is known
        by now."""
        masks, own = self.wanted[1:], slice(filled + 1, None)
        if len(masks):
            assert predictions.entropy is not None
            chosen = self.choose(masks, predictions.entropy[own])
            self.x[masks[chosen]] = predictions.token[own][chosen]
            self.masked[masks[chosen]] = False
