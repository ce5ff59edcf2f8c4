"""Chat templates: messages go to transformers' as they are; what fails is an input error."""

import shutil

import pytest

from d2f import load
from d2f.errors import InputError
from d2f.models import HERE
from d2f.tokenizer import encode as encode_chat
from d2f.tokenizer import load_tokenizer, render
from decode.engine.prompts import encode

QUESTION = {"role": "user", "content": "Why?\n  <b>&'\"</b> 天"}
MESSAGES = [QUESTION, {"role": "assistant", "content": "Because.", "name": None}]


@pytest.fixture
def tokenizer():
    return load_tokenizer(str(HERE / "tiny-d2f"))


def test_ids_are_those_of_transformers_and_keys_without_a_value_are_none(tokenizer):
    said = [{k: v for k, v in m.items() if v is not None} for m in MESSAGES]
    options = {"add_generation_prompt": True, "return_dict": False}
    assert encode_chat(tokenizer, MESSAGES) == tokenizer.apply_chat_template(said, **options)
    tokenizer.chat_template = (
        "{{ messages[1].name is defined }}{% if add_generation_prompt %}>{% endif %}"
    )
    assert render(tokenizer, MESSAGES) == "False>"


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
        render(tokenizer, MESSAGES)


def test_what_is_no_message(tokenizer):
    for messages in ([], ["a"]):
        with pytest.raises(InputError, match="message"):
            render(tokenizer, messages)
    with pytest.raises(InputError, match="not Unicode text"):
        encode_chat(tokenizer, [{"role": "user", "content": "\ud800"}])
    tokenizer.chat_template = None
    with pytest.raises(InputError, match="the tokenizer has none"):
        render(tokenizer, MESSAGES)


def test_a_last_message_that_begins_the_answer_follows_to_the_letter(tokenizer):
    begun = {"role": "assistant", "content": "<b> x\n", "prefix": True}
    alone = render(tokenizer, [QUESTION])
    assert render(tokenizer, [QUESTION, begun]) == alone + "<b> x\n"
    for wrong in ([begun], [QUESTION, begun | {"content": 3}]):
        with pytest.raises(InputError, match="expected"):
            render(tokenizer, wrong)


def test_a_folder_without_a_vocabulary_has_no_tokenizer(tmp_path):
    """Its special tokens alone would make no token of any prompt."""
    folder = shutil.copytree(HERE / "tiny-d2f", tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    model = load(folder, device="cpu")
    assert model.tokenizer is None
    with pytest.raises(InputError, match=r"text needs a tokenizer, .*model has none"):
        encode(model, "2 + 2 =", "prompt 0")
