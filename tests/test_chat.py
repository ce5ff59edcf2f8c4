"""Chat templates: the text is that of transformers, and what fails is an input error."""

import shutil

import pytest

from d2f import load
from d2f import tokenizer as chat
from d2f.errors import InputError
from d2f.models import HERE, names
from d2f.tokenizer import load_tokenizer
from decode.engine.prompts import encode

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Why?\n  <b>&'\"</b> 天"},
    {"role": "assistant", "content": "Because."},
    {"role": "user", "content": "Oh.", "name": None},
]
QUESTION = MESSAGES[1]
TEMPLATES = {
    "tools": "{{ messages | tojson(indent=2) }}{% if tools is none %}-{% endif %}{{ eos_token }}",
    "controls": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}"
    "    {% if true %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}",
    "generation": "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}{% endgeneration %}{% endif %}{% endfor %}",
    "prompt": "{{ messages[0].role }}{% if add_generation_prompt %}>{% endif %}",
    "names": "{{ messages[3].name is defined }}{{ undefined_thing }}{{ strftime_now('%Y') }}",
}


@pytest.fixture
def tokenizer():
    return load_tokenizer(str(HERE / "tiny-d2f"))


def theirs(tokenizer, messages, **options):
    """As transformers 5.23 writes them; earlier ones hand keys without a value to the template."""
    messages = [{k: v for k, v in m.items() if v is not None} for m in messages]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, **options)


def test_the_text_is_that_of_transformers(tokenizer):
    for template in TEMPLATES.values():
        tokenizer.chat_template = template
        assert chat.render(tokenizer, MESSAGES) == theirs(tokenizer, MESSAGES, tokenize=False)
        ids = list(theirs(tokenizer, MESSAGES, return_dict=False))
        assert chat.encode(tokenizer, MESSAGES) == ids
    for bundled in map(load_tokenizer, (str(HERE / name) for name in names())):
        if bundled is not None:
            text = theirs(bundled, [QUESTION], tokenize=False)
            assert chat.render(bundled, [QUESTION]) == text


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{{ raise_exception('only users') }}", "only users"),
        ("{% for %}", "TemplateSyntaxError"),
        ("{{ messages[9].content.x }}", "UndefinedError"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
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
    begun = {"role": "assistant", "content": "<b> x\n", "prefix": True}
    alone = chat.render(tokenizer, [QUESTION])
    assert chat.render(tokenizer, [QUESTION, begun]) == alone + "<b> x\n"
    for wrong in ([begun], [QUESTION, begun | {"content": 3}]):
        with pytest.raises(InputError, match="expected"):
            chat.render(tokenizer, wrong)


def test_a_folder_without_a_vocabulary_has_no_tokenizer(tmp_path):
    """Its special tokens alone would make no token of any prompt."""
    folder = shutil.copytree(HERE / "tiny-d2f", tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    model = load(folder, device="cpu")
    assert model.tokenizer is None
    with pytest.raises(InputError, match=r"text needs a tokenizer, .*model has none"):
        encode(model, "2 + 2 =", "prompt 0")
