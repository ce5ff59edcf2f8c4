"""lm-eval's texts as our models' tokens."""

from __future__ import annotations

from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from d2f import chat
from d2f.errors import InputError
from d2f.model import DiffusionModel
from decode.decoders.options import DEFAULT_MAX_NEW_TOKENS
from decode.harness.scoring import Pair
from decode.harness.task_figures import TaskFigures


class HarnessText(TemplateLM):
    """What lm-eval asks of a model's tokenizer."""

    model: DiffusionModel
    tokenizer: Any

    @property
    def eot_token_id(self) -> int:
        return self.model.end_ids[0]

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text that has nothing before it."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    @property
    def max_length(self) -> int:
        return self.model.context_length

    @property
    def max_gen_toks(self) -> int:
        return DEFAULT_MAX_NEW_TOKENS

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Ids of a text. One that begins with a special token, as what a chat template writes does,
        has those that it needs."""
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(tuple(self.tokenizer.all_special_tokens))
        return list(self.tokenizer(string, add_special_tokens=add_special_tokens)["input_ids"])

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        if add_generation_prompt:
            return chat.render(self.tokenizer, chat_history)
        # The last message is the beginning of the answer, which is not closed.
        return chat.render(self.tokenizer, chat_history[:-1]) + chat_history[-1]["content"]

    def prompt(self, text: str, room: int, figures: TaskFigures) -> list[int]:
        """Ids of a prompt, one or more."""
        return self._cut(self.tok_encode(text), room, figures)

    def pair(self, context: str, continuation: str, room: int, figures: TaskFigures) -> Pair:
        """Ids of a context and of its continuation, at most `room` together."""
        if context:
            prompt, target = self._encode_pair(context, continuation)
        else:
            prompt, target = [], self.tok_encode(continuation, add_special_tokens=False)
        return self._cut(prompt, room - len(target), figures), target

    def windows(self, text: str, room: int) -> list[Pair]:
        """A text in parts of at most `room` tokens together with what stands before them, as much
        of it as fits."""
        # A window's targets may be as many as it is given, and one token stands before them.
        windows = get_rolling_token_windows(
            self.tok_encode(text), self.prefix_token_id, room - 1, 1
        )
        return [make_disjoint_window(window) for window in windows]

    def _cut(self, ids: list[int], room: int, figures: TaskFigures) -> list[int]:
        """The last tokens, as many as there is room for, as lm-eval's own models do; one where
        there are none."""
        if room < 1:
            raise InputError(
                f"a request asks for as much as the model's context of {self.max_length} tokens, "
                "which leaves no room for a prompt"
            )
        figures.truncated += len(ids) > room
        return ids[-room:] or [self.prefix_token_id]
