"""AutoTokenizer, and so vLLM and whoever takes a folder by it, cuts text as we do: for the models
that ship, and for what is saved."""

import filecmp
import json
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import random_model
from transformers import AutoTokenizer

from d2f import models
from d2f.loading import load, load_tokenizer
from d2f.saving import CODE, save_model, save_official
from d2f.tasks import TASKS, make_problem

ROOT = Path(__file__).parent.parent
VLLM = ROOT / ".venv-vllm" / "bin" / "python"  # `make vllm`
WHOLE = [name for name in models.names() if (models.HERE / name / "tokenizer.json").is_file()]
TRUST = [False, True]
NUMBERS = " 15 + It's 3...\n\n 27-4=23 ####7"
tasks = st.builds(make_problem, st.sampled_from(TASKS), st.just("train"), st.integers(0, 10**9))
texts = tasks.map(lambda p: f"{p.question}\n{p.answer}") | st.text(st.characters(codec="utf-8"))


@pytest.fixture(autouse=True)
def modules(tmp_path, monkeypatch):
    """transformers copies code of a folder to a cache of its own."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "m"))
    monkeypatch.syspath_prepend(str(tmp_path / "m"))


def same(folder, trust):
    theirs = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust)
    return theirs(NUMBERS)["input_ids"] == load_tokenizer(str(folder))(NUMBERS)["input_ids"]


@pytest.mark.parametrize("trust", TRUST)
@pytest.mark.parametrize("name", WHOLE)
def test_a_shipped_model_is_read_the_same_by_both(name, trust):
    ours = load_tokenizer(str(models.HERE / name))
    theirs = AutoTokenizer.from_pretrained(models.HERE / name, trust_remote_code=trust)
    messages = [{"role": "user", "content": NUMBERS}]

    @given(texts)
    def check(text):
        ids = ours(text)["input_ids"]
        assert theirs(text)["input_ids"] == ids
        assert theirs.decode(ids) == ours.decode(ids)

    check()
    assert theirs.special_tokens_map == ours.special_tokens_map
    expected = ours.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"] == expected


@pytest.mark.parametrize("trust", TRUST)
@pytest.mark.parametrize("family", ["causal", "llada", "dream"])
def test_a_saved_model_is_read_the_same_by_both(tmp_path, family, trust):
    """Also one that is saved from what was loaded, and in the family's own format."""
    save_model(random_model(family), tmp_path / "a", dtype=torch.float32)
    assert same(tmp_path / "a", trust)
    again = load(tmp_path / "a")
    save_model(again, tmp_path / "b", dtype=torch.float32)
    assert same(tmp_path / "b", trust)
    if family != "causal":
        save_official(again, tmp_path / "c", dtype=torch.float32)
        assert same(tmp_path / "c", trust)


def test_code_lies_only_where_it_is_needed(tmp_path):
    for family, needed in (("llada", False), ("dream", True)):
        save_model(random_model(family), tmp_path / family, dtype=torch.float32)
        settings = json.loads((tmp_path / family / "tokenizer_config.json").read_text())
        assert ("auto_map" in settings) == needed
        assert [path.name for path in (tmp_path / family).glob("*.py")] == [CODE.name] * needed
    save_official(load(tmp_path / "dream"), tmp_path / "official", dtype=torch.float32)
    # Its type is Dream, which is no other tokenizer's: nothing may name code that is not there.
    assert "auto_map" not in json.loads((tmp_path / "official/tokenizer_config.json").read_text())


@pytest.mark.parametrize("name", WHOLE)
def test_a_shipped_folder_is_what_a_save_writes(tmp_path, name):
    """So that training the models again ships them right."""
    save_model(load(name), tmp_path / name, dtype=torch.float16)
    shipped, made = models.HERE / name, tmp_path / name
    settings = [json.loads((f / "tokenizer_config.json").read_text()) for f in (shipped, made)]
    assert settings[0].get("auto_map") == settings[1].get("auto_map")
    code = [f / CODE.name for f in (shipped, made)]
    assert code[0].is_file() == code[1].is_file()
    assert not code[0].is_file() or filecmp.cmp(*code, shallow=False)


@pytest.mark.skipif(not VLLM.exists(), reason="needs `make vllm`")
def test_vllm_reads_the_shipped_models_as_we_do():
    code = (
        "import sys, json\nfrom vllm.tokenizers import get_tokenizer\n"
        "print(json.dumps([get_tokenizer(f)(sys.argv[1])['input_ids'] for f in sys.argv[2:]]))"
    )
    folders = [models.HERE / name for name in WHOLE]
    done = subprocess.run(
        [VLLM, "-c", code, NUMBERS, *folders], capture_output=True, text=True, check=True
    )
    ours = [load_tokenizer(str(folder))(NUMBERS)["input_ids"] for folder in folders]
    assert dict(zip(WHOLE, json.loads(done.stdout.splitlines()[-1]), strict=True)) == (
        dict(zip(WHOLE, ours, strict=True))
    )
