"""What a forward did to a choice, as streams with ``"events": true`` carry it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from decode.engine.result import Event
from decode.server.generation import Choice, Generation


@dataclass
class ForwardEvents:
    """Events of one request as JSON, for who draws them. Texts are those of single tokens."""

    generation: Generation
    _decided: dict[int, dict[int, int]] = field(default_factory=dict)
    _texts: dict[int, str] = field(default_factory=dict)

    def describe(self, choice: Choice, event: Event) -> dict[str, Any]:
        """One event. seconds: since the request came."""
        before = self._decided.get(choice.index, {})
        now = {
            position: token
            for block in event.blocks
            for position, token in enumerate(block.tokens, block.start)
            if token is not None
        }
        self._decided[choice.index] = now
        fed, cached = event.call
        return {
            "choice": choice.index,
            "forward": event.forward,
            "fed": fed,
            "cached": cached,
            "seconds": round(self.generation.seconds, 6),
            "blocks": [
                {
                    "start": block.start,
                    "end": block.end,
                    "state": block.state,
                    "tokens": list(block.tokens),
                    "texts": [None if t is None else self._text(t) for t in block.tokens],
                }
                for block in event.blocks
            ],
            "revealed": [
                {
                    "position": one.position,
                    "token": one.token,
                    "text": self._text(one.token),
                    "confidence": round(one.confidence, 6),
                }
                for one in event.revealed
            ],
            "revoked": [p for p, token in before.items() if now.get(p) != token],
            "settled": len(event.settled),
        }

    def _text(self, token: int) -> str:
        if token not in self._texts:
            tokenizer: Any = self.generation.served.model.tokenizer
            self._texts[token] = "" if tokenizer is None else tokenizer.decode([token])
        return self._texts[token]
