"""Pairs of text as token ids, through the tokenizer's chat template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from d2f import chat
from d2f.data_records import BadRecord
from d2f.errors import InputError
from distill.data.columns import Pair
from distill.data.data_config import Data


@dataclass(frozen=True)
class Encoded:
    """Token ids of a prompt and of its response, the end token included."""

    prompt: list[int]
    response: list[int]


class Encoder:
    """Turns pairs into ids. end_id: the token that ends a response; mask_id: None where there is
    none, else no pair may contain it.

    Raises InputError for a tokenizer without the chat template or the end token that the
    configuration wants.
    """

    def __init__(
        self,
        data: Data,
        tokenizer: PreTrainedTokenizerBase,
        end_id: int,
        mask_id: int | None,
    ):
        self.tokenizer, self.mask_id = tokenizer, mask_id
        self.templated = data.chat_template == "tokenizer"
        if self.templated and tokenizer.chat_template is None:
            raise InputError(
                f"the tokenizer {tokenizer.name_or_path or ''} has no chat template: take the "
                "tokenizer of the instruction-tuned model, save this one with a chat_template, or "
                "set data.chat_template: none, which takes prompts as they are"
            )
        self.end_id = end_id
        if data.end_token is not None:
            self.end_id = tokenizer.get_vocab().get(data.end_token, -1)
            if self.end_id < 0:
                raise InputError(
                    f"data.end_token must be a token of the tokenizer, got {data.end_token!r}"
                )

    def encode(self, pairs: Sequence[Pair]) -> list[Encoded | BadRecord]:
        """The ids of each pair, or why it has none."""
        found: list[Encoded | BadRecord | None] = [None] * len(pairs)
        texts = []
        for i, pair in enumerate(pairs):
            try:
                texts.append((i, self.prompt_text(pair.messages), pair.response))
            except BadRecord as error:
                found[i] = error
        if texts:
            # A template writes its own special tokens.
            prompts = self._ids([text for _, text, _ in texts], special=not self.templated)
            # A response goes on where the prompt's text ends: no special token may stand between
            # them.
            responses = self._ids([text for _, _, text in texts], special=False)
            for (i, *_), prompt, response in zip(texts, prompts, responses, strict=True):
                found[i] = self._checked(prompt, response)
        return [entry for entry in found if entry is not None]

    def prompt_text(self, messages: list[dict[str, str]]) -> str:
        """The prompt up to where the response begins. Raises BadRecord."""
        if not self.templated:
            if len(messages) > 1:
                raise BadRecord("several messages need a chat template, data.chat_template is none")
            return messages[0]["content"]
        try:
            return chat.render(self.tokenizer, messages)
        except InputError as error:
            raise BadRecord(str(error)) from error

    def _ids(self, texts: list[str], special: bool) -> list[list[int]]:
        ids: Any = self.tokenizer(texts, add_special_tokens=special)["input_ids"]
        return list(ids)

    def _checked(self, prompt: list[int], response: list[int]) -> Encoded | BadRecord:
        for name, ids in (("prompt", prompt), ("response", response)):
            if not ids:
                return BadRecord(f"the {name} has no tokens")
            if self.mask_id is not None and self.mask_id in ids:
                return BadRecord(f"the {name} contains the mask token (id {self.mask_id})")
        # Training would teach to stop there, and the rest could never be decoded.
        if self.end_id in response:
            return BadRecord(
                f"the response contains its end token (id {self.end_id}) at token "
                f"{response.index(self.end_id)}: expected text, which gets one at its end"
            )
        # The one end token that is always a target; what may follow it is the tail.
        return Encoded(prompt, [*response, self.end_id])
