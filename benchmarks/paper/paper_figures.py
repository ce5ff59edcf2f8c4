"""What decoded responses come to: as the D2F paper counts, and as this project does."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from d2f.tasks import before_stop
from decode.jobs import Record
from decode.report import paired


def figures(
    records: Sequence[Record], cuts: tuple[str, ...], tokenizer: Any, *, cut_at_end: bool
) -> dict[str, Any]:
    """Counts and speeds of the responses of one method on one task, decoded one at a time.

    published: as the official evaluation counts. What was generated is decoded without special
    tokens, cut at the stop strings and tokenized again. cut_at_end: whether what stands behind an
    end token is left out of it.
    visible: tokens before the first end token and stop string.
    """
    seconds = sum(record.seconds for record in records)
    forwards = sum(record.forwards for record in records)
    generated = [record.tokens if cut_at_end else record.raw_tokens for record in records]
    published = sum(_published(tokens, cuts, tokenizer) for tokens in generated)
    visible = sum(_visible(record, cuts, tokenizer) for record in records)
    return {
        "latency": seconds / len(records),
        "forwards": forwards,
        "published": _speeds(published, len(records), seconds, forwards),
        "visible": _speeds(visible, len(records), seconds, forwards),
    }


def compared(
    right: Sequence[bool], own: dict[str, Any], base_right: Sequence[bool], base: dict[str, Any]
) -> dict[str, Any]:
    """A method against the base on the same problems: the difference in points with its 95 %
    interval, and speed-ups."""
    gained = sum(a and not b for a, b in zip(right, base_right, strict=True))
    lost = sum(b and not a for a, b in zip(right, base_right, strict=True))
    low, high = paired(gained, lost, len(right))
    return {
        "points": [100 * (gained - lost) / len(right), 100 * low, 100 * high],
        "latency": base["latency"] / own["latency"],
        **{
            counted: _ratio(own[counted]["tps"], base[counted]["tps"])
            for counted in ("published", "visible")
        },
    }


def _speeds(tokens: int, responses: int, seconds: float, forwards: int) -> dict[str, float]:
    return {
        "tokens": tokens,
        "length": tokens / responses,
        "tps": tokens / seconds,
        "tokens_per_forward": tokens / forwards,
    }


def _ratio(above: float, below: float) -> float | None:
    """None against a method that has no token."""
    return above / below if below else None


def _published(tokens: list[int], cuts: tuple[str, ...], tokenizer: Any) -> int:
    text = before_stop(tokenizer.decode(tokens, skip_special_tokens=True), cuts)
    return len(tokenizer(text, add_special_tokens=False)["input_ids"])


def _visible(record: Record, cuts: tuple[str, ...], tokenizer: Any) -> int:
    """Tokens whose text lies wholly before the first stop string."""
    text = record.text or ""
    end = len(before_stop(text, cuts))
    if end == len(text):
        return len(record.tokens)

    def length(count: int) -> int:
        return len(tokenizer.decode(record.tokens[:count], skip_special_tokens=True))

    return bisect_right(range(len(record.tokens) + 1), end, key=length) - 1
