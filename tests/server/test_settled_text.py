"""Text is sent as soon as it is final, and all pieces together are `Result.text`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from itertools import cycle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import random_model, tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from decode.decoders.base import Decoder
from decode.decoders.session import Session
from decode.engine.request import Request
from decode.server.text import ResponseText
from decode.step import Event, Predictions, Step

CONTRACT = random_model("llada").contract
END = 0  # id of the end token, which is special, in every tokenizer below
WORDS = [
    "2 🙂 END",
    "각각 가가",
    "e\u0301e\u0308 é",
    "日本語日",
    "👩\u200d👩\u200d👧 👍🏽",
    "a b  c\n",
    "é�x",
]
NOTHING = Predictions(np.zeros(1, np.int64), np.ones(1, np.float32))


def fast(core: Tokenizer, **options) -> PreTrainedTokenizerFast:
    options = {"clean_up_tokenization_spaces": False, **options}
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>", **options)


@cache
def split_characters() -> PreTrainedTokenizerFast:
    """Byte-level, with tokens that end within one character and begin within another."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=["<end>", "<user>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # Shuffled bytes of the same words: merges across the borders of characters.
    core.train_from_iterator([word[i:] + word[:i] for word in WORDS for i in range(9)], trainer)
    return fast(core)


@cache
def byte_fallback() -> PreTrainedTokenizerFast:
    """As Llama 2's: a leading space is lost, a run of bytes is text only as a whole."""
    names = ["<end>", "<user>", "▁", "▁a", "b", "▁é", "END", "E", "🙂", "�"]
    names += [f"<0x{i:02X}>" for i in range(256)]
    core = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, [], byte_fallback=True))
    core.add_special_tokens(["<end>", "<user>"])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    core.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    return fast(core)


CLEANED = ["<end>", "▁", "▁'", "'", "▁.", ".", "n't", "▁n", "'t", "▁'v", "e", "▁?", "s", "▁a"]


@cache
def cleaned() -> PreTrainedTokenizerFast:
    """Takes back spaces that it has already written."""
    core = Tokenizer(models.WordLevel({name: i for i, name in enumerate(CLEANED)}, "a"))
    core.add_special_tokens(["<end>"])
    core.decoder = decoders.Metaspace()
    return fast(core, clean_up_tokenization_spaces=True)


@cache
def unknown() -> PreTrainedTokenizerFast:
    """Whose decoder merges what stands behind a token into it."""
    core = Tokenizer(models.WordLevel({name: i for i, name in enumerate(CLEANED)}, "a"))
    core.add_special_tokens(["<end>"])
    core.decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace("'t", "not")])
    return fast(core)


BYTE_LEVEL = [tokenizer, split_characters]
KINDS = [*BYTE_LEVEL, byte_fallback, cleaned, unknown]


@dataclass(frozen=True, kw_only=True)
class Scripted(Decoder):
    """Settles what it is told to, forward after forward."""

    name = "scripted"
    max_new_tokens: int | None = 1
    script: tuple[tuple[int, ...], ...] = field(default=())

    def begin(self, prompt, contract):
        return ScriptedSession(self, prompt, contract)


class ScriptedSession(Session):
    def __init__(self, decoder, prompt, contract):
        super().__init__(prompt, 1, contract)
        self.left, self.given = list(decoder.script), []

    tokens = settled = property(lambda self: list(self.given))

    def step(self):
        one = np.zeros(1, np.int64)
        return Step(one, one, one, np.array([[[0, 1]]]), one, 0) if self.left else None

    def accept(self, predictions):
        self.given += self.left.pop(0)

    def blocks(self):
        return []


def sent(kind, script, stop=(), end_ids=(END,)):
    """The pieces, what was settled at each, and the result, which the engine's own code makes."""
    decoder = Scripted(stop=tuple(stop), script=tuple(map(tuple, script)))
    request = Request(0, [5], decoder, replace(CONTRACT, end_ids=tuple(end_ids)), kind)
    text, pieces, seen = ResponseText(kind, stop, end_ids), [], []
    while True:
        request.accept(request.step or request.begin(1), NOTHING, 0.0)
        event = request.event()
        pieces.append(text.take(replace(event, result=None)))
        seen.append(event.settled)
        if event.result is not None:
            return [*pieces, text.take(event)], seen, event.result


@st.composite
def scripts(draw, kind, encoded=True):
    """Ids in chunks: text of this tokenizer, with ids of any kind in between."""
    size = len(kind)
    texts = st.sampled_from(WORDS).map(lambda word: kind(word)["input_ids"])
    anything = st.lists(st.integers(0, size - 1), max_size=4)
    parts = draw(st.lists(texts | anything if encoded else anything, max_size=6))
    ids = [token for part in parts for token in part]
    sizes = draw(st.lists(st.integers(0, 4), min_size=1, max_size=3).filter(any))  # in turn
    chunks, count = [[]], cycle(sizes)
    while ids:
        size = next(count)
        chunks.append(ids[:size])
        ids = ids[size:]
    return chunks


def stops(whole: str):
    """Stop strings: pieces of the text, which overlap, and what only begins as it does."""
    places = st.integers(0, max(0, len(whole) - 1))
    inside = st.tuples(places, st.integers(1, 4)).map(lambda p: whole[p[0] : p[0] + p[1]])
    beside = st.tuples(inside, st.sampled_from(["x", "END", "가", "�"])).map("".join)
    return st.lists((inside | beside).filter(bool), max_size=3)


@settings(max_examples=150)
@given(st.sampled_from(KINDS), st.data())
def test_the_pieces_are_the_text_of_the_result(make, data):
    kind = make()
    script = data.draw(scripts(kind, encoded=make in BYTE_LEVEL))
    whole = kind.decode([t for chunk in script for t in chunk], skip_special_tokens=True)
    stop = data.draw(stops(whole))
    ends = data.draw(st.sampled_from([(END,), (), (END, 5)]))
    pieces, seen, result = sent(kind, script, stop, ends)
    assert "".join(pieces) == result.text
    if make not in BYTE_LEVEL:
        return
    # Nothing is held back for longer than it may change: half a character, a stop string's
    # beginning.
    longest = max(map(len, stop), default=1)
    for i, ids in enumerate(seen):
        given = sum(map(len, pieces[: i + 1]))
        end = next((n for n, token in enumerate(ids) if token in ends), len(ids))
        final = kind.decode(ids[:end], skip_special_tokens=True).removesuffix("�")
        if not any(s in final for s in stop):
            assert given >= len(final) - longest + 1


@pytest.mark.parametrize(
    ("make", "script", "pieces"),
    [
        # The docstring's: an emoji's four bytes in two tokens, then what may begin a stop string.
        (tokenizer, ["2 ", b"\xf0\x9f", b"\x99\x82E", "v"], ["2 ", "", "🙂", "Ev", ""]),
        # Until the "p" it may be "mno" that ends the text, before the "m".
        (tokenizer, ["x", "m", "n", "p"], ["x", "", "", "m", ""]),
        (tokenizer, [b"\xf0\x9f", "a"], ["", "�a", ""]),  # never completed
        (tokenizer, [b"\xff\xff\xff", "a"], ["��", "�a", ""]),  # nor can be
        (tokenizer, [b"\xf0\x9f"], ["", "�"]),  # nor at the end
        (byte_fallback, [["▁a"], ["▁", "b"]], ["a", " b", ""]),
        # 日 is complete, but with two bytes of the next one the run would be no text.
        (byte_fallback, [["<0xE6>", "<0x97>", "<0xA5>"], ["<user>"], ["<0xE6>"], ["b"]],
         ["", "", "", "����b", ""]),
        (cleaned, [["▁a"] * 15, ["▁"], ["."]],
         ["a a a a a ", "a", "", " a a a a a a a a a."]),
        (unknown, [["▁a"], ["'", "s"]], ["", "", "▁a's"]),
    ],
)  # fmt: skip
def test_what_may_still_change_waits(make, script, pieces):
    kind = make()

    def ids(part):
        if isinstance(part, list):
            return kind.convert_tokens_to_ids(part)
        raw = part.encode() if isinstance(part, str) else part
        return [kind.convert_tokens_to_ids(letter) for letter in letters(raw)]

    assert sent(kind, [ids(part) for part in script], ["END", "mno", "np"])[0] == pieces


def letters(raw: bytes) -> list[str]:
    """Byte-level's names of single bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return [chr(b) if b in plain else chr(256 + others.index(b)) for b in raw]


def test_a_token_is_decoded_a_few_times_however_long_the_text(monkeypatch):
    kind = split_characters()
    ids = kind("각각 가가 🙂 日本語日 e\u0301 " * 40)["input_ids"]
    text, asked = ResponseText(kind, ["END"], [END]), []
    real = kind.decode
    monkeypatch.setattr(kind, "decode", lambda ids, **o: asked.append(len(ids)) or real(ids, **o))
    pieces = [text.take(Event(0, n, [], [], None, ids[:n])) for n in range(1, len(ids) + 1)]
    assert "".join(pieces) == real(ids)
    assert sum(asked) < 6 * len(ids)


def test_a_model_without_tokenizer_has_no_text():
    *pieces, last = sent(None, [[5], [6]])[0]
    assert (pieces, last) == (["", ""], "")
