"""Chat templates (d2f/chat_worker.py): what transformers makes of them, in bounded time and
memory."""

import os
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from d2f import chat
from d2f.errors import InputError
from d2f.loading import load_tokenizer
from d2f.models import HERE, names
from decode.engine.prompts import encode

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Why?\n  <b>&'\"</b> 天"},
    {"role": "assistant", "content": "Because."},
    {"role": "user", "content": "Oh.", "name": None},
]
TEMPLATES = {
    "plain": "{% for m in messages %}{{ m.role }}: {{ m['content'] | trim }}\n{% endfor %}",
    "tools": "{{ messages | tojson(indent=2) }}{% if tools is none %}-{% endif %}{{ eos_token }}",
    "json": "{{ messages | tojson(true, 1, [',', ':'], true) }}"
    "{{ messages | tojson(separators=['; ', '='], sort_keys=true) }}",
    "types": "{{ dict.fromkeys('ab', 1) }}{% set ns = namespace({'a': 1}, b=2) %}{{ ns.a + ns.b }}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.n = ns.n + 1 %}{% endif %}{% endfor %}{{ ns.n }}",
    "controls": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}"
    "    {% if true %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}",
    "generation": "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}{% endgeneration %}{% endif %}{% endfor %}",
    "macro": "{% macro a(x, n=2) %}{{ x * n }}{% endmacro %}{{ a('=') }}{{ a(messages[0].role) }}"
    "{% if add_generation_prompt %}>{% endif %}{{ dict(a=1).items() | list }}",
    "names": "{{ messages[3].name is defined }}{{ undefined_thing }}{{ strftime_now('%Y') }}",
}


@pytest.fixture
def tokenizer():
    return load_tokenizer(str(HERE / "tiny-d2f"))


def theirs(tokenizer, messages, **options):
    """As transformers 5.23 writes them; earlier ones hand keys without a value to the template."""
    messages = [{k: v for k, v in m.items() if v is not None} for m in messages]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, **options)


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_the_text_is_that_of_transformers(tokenizer, name):
    tokenizer.chat_template = TEMPLATES[name]
    assert chat.render(tokenizer, MESSAGES) == theirs(tokenizer, MESSAGES, tokenize=False)
    assert chat.encode(tokenizer, MESSAGES) == list(theirs(tokenizer, MESSAGES, return_dict=False))


roles = st.sampled_from(["user", "assistant", "system"])
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
conversations = st.lists(st.fixed_dictionaries({"role": roles, "content": texts}), min_size=1)


@given(
    messages=conversations,
    name=st.sampled_from(["controls", "generation", "namespace", "plain", "tools"]),
)
def test_any_messages_are_written_as_by_transformers(messages, name):
    tokenizer = load_tokenizer(str(HERE / "tiny-d2f"))
    tokenizer.chat_template = TEMPLATES[name]
    assert chat.render(tokenizer, messages) == theirs(tokenizer, messages, tokenize=False)


def test_the_bundled_templates():
    for name in names():
        tokenizer = load_tokenizer(str(HERE / name))
        if tokenizer is not None:
            ours = chat.render(tokenizer, MESSAGES[1:2])
            assert ours == theirs(tokenizer, MESSAGES[1:2], tokenize=False)


LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
ENDLESS = {
    "loops": LOOP + "{% endfor %}{% endfor %}{% endfor %}",
    "a power, in C": "{{ (9 ** (9 ** 9)) % 7 }}",
    "a macro that calls itself twice": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}"
    "{% endif %}{% endmacro %}{{ f(60) }}",
}
LARGE = {
    "one product": "{{ ('a' * 10 ** 10) | length }}",
    "doubling": "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(60) %}"
    "{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
    "a text": "{{ 'a' * 20000000 }}",
}


@pytest.mark.parametrize("kind", sorted(ENDLESS))
def test_a_template_that_does_not_end(tokenizer, kind, monkeypatch):
    monkeypatch.setattr(chat, "SECONDS", 0.3)
    tokenizer.chat_template = ENDLESS[kind]
    with pytest.raises(InputError, match=r"the chat template of tiny-d2f did not end: .* 0\.3 s"):
        chat.render(tokenizer, MESSAGES)
    tokenizer.chat_template = TEMPLATES["plain"]  # and the next one is not harmed
    monkeypatch.setattr(chat, "SECONDS", 10.0)
    assert chat.render(tokenizer, MESSAGES) == theirs(tokenizer, MESSAGES, tokenize=False)


@pytest.mark.parametrize("kind", sorted(LARGE))
def test_a_template_that_needs_too_much(tokenizer, kind):
    tokenizer.chat_template = LARGE[kind]
    with pytest.raises(InputError, match=r"tiny-d2f refused the messages: it (needs|gives)"):
        chat.render(tokenizer, MESSAGES)


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{{ raise_exception('only users') }}", "only users"),
        ("{% for %}", "TemplateSyntaxError"),
        ("{{ messages[9].content.x }}", "UndefinedError"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
        ("{% set x = namespace(__class__=1) %}", "SecurityError"),
        ("{% set x = namespace() %}{% set x._y = 1 %}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
    ],
)
def test_a_template_that_refuses_or_is_broken(tokenizer, template, problem):
    tokenizer.chat_template = template
    with pytest.raises(InputError, match=f"refused the messages: .*{problem}"):
        chat.render(tokenizer, MESSAGES)


def test_what_a_template_says_is_one_line_of_a_length_to_read(tokenizer):
    tokenizer.chat_template = "{{ raise_exception('only users\\n\\x1b[2J' ~ 'x' * 10000) }}"
    with pytest.raises(InputError, match=r"refused the messages: .*only users") as caught:
        chat.render(tokenizer, MESSAGES)
    assert str(caught.value).isprintable() and len(str(caught.value)) <= 1000


def test_what_is_no_message(tokenizer):
    for messages in ([], [{"role": "user", "content": object()}], ["a"]):
        with pytest.raises(InputError, match="message"):
            chat.render(tokenizer, messages)
    with pytest.raises(InputError, match="not Unicode text"):
        chat.encode(tokenizer, [{"role": "user", "content": "\ud800"}])
    tokenizer.chat_template = None
    with pytest.raises(InputError, match="the tokenizer has none"):
        chat.render(tokenizer, MESSAGES)


def test_a_prompt_says_which_it_was(monkeypatch):
    from d2f import load

    model = load("tiny-d2f", device="cpu")
    model.tokenizer.chat_template = ENDLESS["loops"]
    monkeypatch.setattr(chat, "SECONDS", 0.3)
    with pytest.raises(InputError, match=r"prompt 3: the chat template of tiny-d2f did not end"):
        encode(model, MESSAGES, "prompt 3")


def test_a_fork_has_a_worker_of_its_own(tokenizer):
    want = chat.render(tokenizer, MESSAGES[1:2])
    child = os.fork()
    if child == 0:
        os._exit(0 if chat.render(tokenizer, MESSAGES[1:2]) == want else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert chat.render(tokenizer, MESSAGES[1:2]) == want


def test_a_folder_without_a_vocabulary_has_no_tokenizer(tmp_path):
    """Its special tokens alone would make no token of any prompt."""
    from d2f import load

    folder = shutil.copytree(HERE / "tiny-d2f", tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    model = load(folder, device="cpu")
    assert model.tokenizer is None
    with pytest.raises(InputError, match=r"text needs a tokenizer, .*model has none"):
        encode(model, "2 + 2 =", "prompt 0")
