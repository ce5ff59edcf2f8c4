"""A checkpoint's tokenizer: whoever takes a folder by it (AutoTokenizer, and so vLLM) cuts text as
we do, for the models that ship and for what is saved; its own code is never needed. Chat messages
go to its template as they are, and what fails is an input error."""

import filecmp
import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from tiny import random_model
from transformers import AutoTokenizer, Qwen2Tokenizer

from d2f import models
from d2f.errors import InputError
from d2f.loading import load
from d2f.models import HERE
from d2f.saving import save_model, save_official
from d2f.tasks import TASKS, make_problem
from d2f.tokenizer import CODE, load_tokenizer, render
from d2f.tokenizer import encode as encode_chat
from decode.engine.prompts import encode

ROOT = Path(__file__).parent.parent
VLLM = ROOT / ".venv-vllm" / "bin" / "python"  # `make vllm`
WHOLE = [name for name in models.names() if (HERE / name / "tokenizer.json").is_file()]
NUMBERS = " 15 + It's 3...\n\n 27-4=23 ####7"
PROBLEMS = [make_problem(task, "train", seed) for task in TASKS for seed in range(20)]
TEXTS = [NUMBERS, "天 \u0301\ttab", *(f"{p.question}\n{p.answer}" for p in PROBLEMS)]


@pytest.fixture(autouse=True)
def modules(tmp_path, monkeypatch):
    """transformers copies code of a folder to a cache of its own."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "m"))
    monkeypatch.syspath_prepend(str(tmp_path / "m"))


def check_the_same(folder):
    """Text is cut, decoded and templated alike, with and without the folder's own code."""
    ours, messages = load_tokenizer(str(folder)), [{"role": "user", "content": NUMBERS}]
    for trust in (False, True):
        theirs = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust)
        ids = ours(TEXTS)["input_ids"]
        assert theirs(TEXTS)["input_ids"] == ids
        assert theirs.batch_decode(ids) == ours.batch_decode(ids)
        assert theirs.special_tokens_map == ours.special_tokens_map
        expected, came = (
            one.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
            for one in (ours, theirs)
        )
        assert came == expected


@pytest.mark.parametrize("name", WHOLE)
def test_a_shipped_model_is_read_the_same_by_both_and_is_what_a_save_writes(tmp_path, name):
    """So that training the models again ships them right."""
    shipped, made = HERE / name, tmp_path / name
    check_the_same(shipped)
    save_model(load(name), made, dtype=torch.float16)
    settings = [json.loads((f / "tokenizer_config.json").read_text()) for f in (shipped, made)]
    assert settings[0].get("auto_map") == settings[1].get("auto_map")
    code = [f / CODE.name for f in (shipped, made)]
    assert code[0].is_file() == code[1].is_file()
    assert not code[0].is_file() or filecmp.cmp(*code, shallow=False)


@pytest.mark.parametrize(
    ("family", "needs_code"), [("causal", False), ("llada", False), ("dream", True)]
)
def test_a_saved_model_is_read_the_same_by_both(tmp_path, family, needs_code):
    """Also one that is saved from what was loaded, and in the family's own format; code lies only
    where it is needed."""
    save_model(random_model(family), tmp_path / "a", dtype=torch.float32)
    again = load(tmp_path / "a")
    assert again.tokenizer(TEXTS)["input_ids"] == random_model(family).tokenizer(TEXTS)["input_ids"]
    save_model(again, tmp_path / "b", dtype=torch.float32)
    if family != "causal":
        save_official(again, tmp_path / "c", dtype=torch.float32)
    for folder in tmp_path.glob("[abc]"):
        check_the_same(folder)
        # Dream's own type is no other tokenizer's: nothing may name code that is not there.
        needed = needs_code and folder.name != "c"
        assert ("auto_map" in json.loads((folder / "tokenizer_config.json").read_text())) == needed
        assert [path.name for path in folder.glob("*.py")] == [CODE.name] * needed


@pytest.mark.skipif(not VLLM.exists(), reason="needs `make vllm`")
def test_vllm_reads_the_shipped_models_as_we_do():
    code = (
        "import sys, json\nfrom vllm.tokenizers import get_tokenizer\n"
        "print(json.dumps([get_tokenizer(f)(sys.argv[1])['input_ids'] for f in sys.argv[2:]]))"
    )
    folders = [HERE / name for name in WHOLE]
    done = subprocess.run(
        [VLLM, "-c", code, NUMBERS, *folders], capture_output=True, text=True, check=True
    )
    ours = [load_tokenizer(str(folder))(NUMBERS)["input_ids"] for folder in folders]
    assert json.loads(done.stdout.splitlines()[-1]) == ours


@pytest.mark.parametrize("settings", [None, "{}"])
def test_a_tokenizer_without_settings_cuts_text_as_its_file_says(tmp_path, settings):
    """Not as the tokenizers of its model's type do."""
    text = "Ann has 3 apples."
    shutil.copytree(HERE / "tiny-d2f", tmp_path / "model")
    expected = load_tokenizer(str(tmp_path / "model"))(text)["input_ids"]
    (tmp_path / "model" / "tokenizer_config.json").unlink()
    if settings is not None:
        (tmp_path / "model" / "tokenizer_config.json").write_text(settings)
    assert load_tokenizer(str(tmp_path / "model"))(text)["input_ids"] == expected


def test_a_tokenizer_of_remote_code_is_read_as_its_familys(tmp_path):
    """Dream's: Qwen2's files under a class that only the checkpoint's own code has."""
    vocabulary = {letter: i for i, letter in enumerate("abcdefgh")}
    vocabulary |= {"ab": 8, "<|mask|>": 9, "<|endoftext|>": 10}
    end = dict.fromkeys(("eos_token", "pad_token", "unk_token"), "<|endoftext|>")
    remote = {"AutoTokenizer": ["tokenization_dream.DreamTokenizer", None]}
    settings = {"tokenizer_class": "DreamTokenizer", "auto_map": remote, "mask_token": "<|mask|>"}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "Dream"}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | end))
    tokenizer = load_tokenizer(str(tmp_path))
    assert isinstance(tokenizer, Qwen2Tokenizer)
    assert tokenizer("abab<|mask|>c")["input_ids"] == [8, 8, 9, 2]
    assert tokenizer.mask_token_id == 9


# Chat messages.

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
