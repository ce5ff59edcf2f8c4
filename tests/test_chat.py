"""Chat templates: the text is that of transformers, and what fails is an input error."""

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


def test_what_is_no_message(tokenizer):
    for messages in ([], ["a"]):
        with pytest.raises(InputError, match="message"):
            chat.render(tokenizer, messages)
    with pytest.raises(InputError, match="not Unicode text"):
        chat.encode(tokenizer, [{"role": "user", "content": "\ud800"}])
    tokenizer.chat_template = None
    with pytest.raises(InputError, match="the tokenizer has none"):
        chat.render(tokenizer, MESSAGES)


def test_a_last_message_that_begins_the_answer_follows_to_the_letter(tokenizer):
    question, begun = MESSAGES[1], {"role": "assistant", "content": "<b> x\n", "prefix": True}
    assert chat.render(tokenizer, [question, begun]) == (
        chat.render(tokenizer, [question]) + "<b> x\n"
    )
    for wrong in ([begun], [question, begun | {"content": 3}]):
        with pytest.raises(InputError, match="expected"):
            chat.render(tokenizer, wrong)


def test_a_folder_without_a_vocabulary_has_no_tokenizer(tmp_path):
    """Its special tokens alone would make no token of any prompt."""
    from d2f import load

    folder = shutil.copytree(HERE / "tiny-d2f", tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    model = load(folder, device="cpu")
    assert model.tokenizer is None
    with pytest.raises(InputError, match=r"text needs a tokenizer, .*model has none"):
        encode(model, "2 + 2 =", "prompt 0")
