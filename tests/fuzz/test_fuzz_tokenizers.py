"""Whatever a checkpoint's tokenizer files hold, it loads and decodes text, or is refused in one
line; a chat template gives a prompt or an error in bounded time."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from d2f import chat
from d2f.loading import load, load_tokenizer
from tests.fuzz.folders import NATIVE, edited, laid, put, put_json, tokens
from tests.fuzz.odd import TEXT, VALUES, damaged
from tests.fuzz.outcome import attempt, budget

CORE, SETTINGS, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
FILES = [CORE, SETTINGS, TEMPLATE, "special_tokens_map.json", "added_tokens.json", "vocab.json",
         "merges.txt", "chat_template.json"]  # fmt: skip
CLASSES = ["PreTrainedTokenizerFast", "TokenizersBackend", "LlamaTokenizer", "Qwen2Tokenizer",
           "GPT2Tokenizer", "T5Tokenizer", "BertTokenizer", "Evil", "", None, 3]  # fmt: skip
OTHERS = {
    "tokenizer_class": CLASSES,
    "auto_map": [{"AutoTokenizer": ["evil.Evil", None]}],
    "model_max_length": [0, -1, 3, 10**30],
    "padding_side": ["left", "evil"],
    "truncation_side": ["left", "evil"],
    "eos_token": ["<|endoftext|>", "new", None, {"content": "x"}, {"__type": "AddedToken"}, 3],
    "mask_token": ["<|mask|>", "new", None, "a"],
    "extra_special_tokens": [["a"], {"a": "b"}, [3], "x"],
    "additional_special_tokens": [["a"], [3], "x"],
    "added_tokens_decoder": [{"0": {"content": "x"}}, {"99999": {"content": "y"}}, {"x": 3}],
    "chat_template": ["{{ messages }}", "{% for %}", [], {"a": "b"}, [{"name": "a"}], 3],
    "clean_up_tokenization_spaces": [True],
    "add_bos_token": [True],
    "add_prefix_space": [True],
    "backend": ["tokenizers", "sentencepiece", "evil"],
    "normalizer": [None, {"type": "Lowercase"}, {"type": "Replace", "pattern": {"Regex": "("}}],
    "pre_tokenizer": [None, {"type": "Whitespace"}, {"type": "evil"}],
    "post_processor": [None, {"type": "evil"}],
    "decoder": [None, {"type": "ByteLevel"}, {"type": "Fuse"}],
    "truncation": [None, {"max_length": 1, "strategy": "LongestFirst", "stride": 0,
                          "direction": "Right"}],
    "padding": [None, {"strategy": {"Fixed": 10**9}, "direction": "Right", "pad_id": 0,
                       "pad_type_id": 0, "pad_token": "x", "pad_to_multiple_of": None}],
    "vocab": [{}, {"a": 0}, {"a": -1}, {"a": 10**12}],
    "merges": [[], [["a", "b"]], ["a b"], [["a"]]],
    "unk_token": [None, "missing"],
    "type": ["BPE", "WordLevel", "WordPiece", "Unigram", "evil"],
}  # fmt: skip


def used(folder):
    """Load a checkpoint and decode a text with it."""
    model = attempt(lambda: load(folder, device="cpu"))
    if model is not None and model.tokenizer is not None:
        attempt(lambda: tokens(model, "2+3?"))


@budget(0.5)
@given(data=st.data())
def test_changed_values(folders, place, data):
    folder = laid(folders / data.draw(st.sampled_from(NATIVE)), place)
    name = data.draw(st.sampled_from([CORE, SETTINGS]))
    values = json.loads((folder / name).read_text(encoding="utf-8"))
    put_json(folder, name, data.draw(edited(values, OTHERS)))
    used(folder)


@budget(0.2)
@given(data=st.data())
def test_damaged_text(folders, place, data):
    folder = laid(folders / data.draw(st.sampled_from(NATIVE)), place)
    name = data.draw(st.sampled_from([CORE, SETTINGS, TEMPLATE]))
    text = (folder / name).read_text(encoding="utf-8")
    put(folder, name, data.draw(damaged(text)))
    used(folder)


@budget(0.2)
@given(
    st.sampled_from(FILES),
    st.binary(max_size=60)
    | VALUES.map(lambda value: json.dumps(value).encode())
    | st.just(b"[" * 100_000),
)
def test_any_bytes(folders, place, name, content):
    folder = laid(folders / "llada", place)
    put(folder, name, content)
    used(folder)


@budget(0.1)
@given(st.sets(st.sampled_from([CORE, SETTINGS, TEMPLATE])), st.sampled_from(CLASSES))
def test_missing_files_and_any_class(folders, place, gone, kind):
    folder = laid(folders / "dream", place)
    for name in gone:
        (folder / name).unlink()
    if SETTINGS not in gone:
        values = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
        put_json(folder, SETTINGS, values | {"tokenizer_class": kind})
    used(folder)


@pytest.mark.parametrize(
    ("name", "content"),
    [(CORE, "{}"), (CORE, "[]"), (CORE, ""), (CORE, "null"), (CORE, "\0" * 50), (CORE, "{" * 9999),
     (CORE, '{"model": {"type": "evil"}}'), (SETTINGS, "[]"), (SETTINGS, "x"), (SETTINGS, "null"),
     (SETTINGS, "[" * 100_000)],
)  # fmt: skip
def test_nonsense_is_refused(folders, place, name, content):
    folder = laid(folders / "llada", place)
    put(folder, name, content)
    attempt(lambda: load(folder, device="cpu"), nonsense=True)


@pytest.fixture(scope="module")
def tokenizer(folders):
    return load_tokenizer(str(folders / "llada"))


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(chat, "SECONDS", 0.4)


MESSAGES = [{"role": "user", "content": "2+3?"}]
PIECES = st.sampled_from(
    ["{% for m in messages %}", "{% endfor %}", "{% if m.role == 'user' %}", "{% endif %}",
     "{{ m.content }}", "{{ m['content'] | trim }}", "{% else %}", "{% break %}",
     "{{ loop.index }}",
     "{{ raise_exception('no') }}", "{{ raise_exception('a\\nb') }}", "{{ 1 / 0 }}", "{{ x.y.z }}",
     "{% for i in range(99999) %}", "{{ 'a' * 10 ** 6 }}", "{{ 'a' * 10 ** 10 }}",
     "{{ 9 ** (9 ** 9) }}",
     "{% set ns = namespace(a=1) %}", "{% set ns.a = ns.a ~ ns.a %}", "{% macro f(n) %}",
     "{% endmacro %}", "{{ f(30) }}", "{% include 'x' %}", "{% import 'x' as y %}",
     "{{ messages | tojson }}", "{{ ''.__class__ }}", "{{ self }}", "{{ cycler }}",
     "{{ lipsum() }}",
     "{{ lipsum(n=10**6) }}", "{{ '%999999999d' % 1 }}", "{{ '{:>999999999}'.format(1) }}",
     "{{ 'a' | center(10**9) }}", "{{ [1] * 10**9 }}", "{{ strftime_now('%Y' * 99) }}",
     "{{ strftime_now(3) }}", "{% generation %}", "{% endgeneration %}", "{{ '\\ud800' }}",
     "{{ range(10**9) | list }}", "{{ dict(a=1) | tojson(indent=10**7) }}", "{#", "#}", "{{", "}}",
     "{% raw %}", "{{ undefined }}", "{{ '\\x1b[2J' }}", "{% extends messages %}",
     "{{ caller() }}", "{% call f(1) %}", "{% endcall %}",
     "{{ messages | map(attribute='x') | list }}",
     "{{ 'x' | attr('__class__') }}", "{{ eos_token }}", "{% set messages = [] %}"]
)  # fmt: skip
TEMPLATES = st.lists(PIECES, max_size=6).map("".join) | TEXT


@budget(0.4)
@given(TEMPLATES)
def test_any_template(short, tokenizer, template):
    tokenizer.chat_template = template
    attempt(lambda: chat.encode(tokenizer, MESSAGES))


@budget(0.2)
@given(data=st.data())
def test_damaged_template(short, folders, tokenizer, data):
    text = (folders / "llada" / TEMPLATE).read_text(encoding="utf-8")
    tokenizer.chat_template = data.draw(damaged(text))
    attempt(lambda: chat.encode(tokenizer, MESSAGES))


@budget(0.2)
@given(st.lists(st.dictionaries(st.sampled_from(["role", "content"]) | TEXT, VALUES, max_size=3)))
def test_any_messages(short, folders, tokenizer, messages):
    tokenizer.chat_template = (folders / "llada" / TEMPLATE).read_text(encoding="utf-8")
    attempt(lambda: chat.encode(tokenizer, messages))


LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"


@pytest.mark.parametrize(
    "template",
    [
        LOOP + "{% endfor %}{% endfor %}{% endfor %}",
        LOOP + "aaaa{% endfor %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
        "{{ 'a' * 10 ** 10 }}",
        "{{ 'a' * 2 * 10 ** 7 }}",
        "{{ (9 ** (9 ** 9)) % 7 }}",
        "{{ '%999999999d' % 1 }}",
        "{{ range(10 ** 9) | list | length }}",
        "{{ '' | center(10 ** 10) }}",
        "{{ lipsum(n=10 ** 6) }}",
        "{" * 10_000,
        "{{ " + "(" * 10_000 + " }}",
        "{% if 1 %}" * 10_000,
        "{{ raise_exception('no') }}",
        "{% include 'x' %}",
        "{{ '\\ud800' }}",
        "\ud800",
    ],
    ids=lambda template: repr(template[:30]),
)
def test_a_template_of_nonsense_is_refused(short, tokenizer, template):
    tokenizer.chat_template = template
    attempt(lambda: chat.encode(tokenizer, MESSAGES), nonsense=True, seconds=5.0)
