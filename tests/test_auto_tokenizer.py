"""AutoTokenizer, and so vLLM and whoever takes a folder by it, cuts text as we do: for the models
that ship, and for what is saved."""

import filecmp
import json
import subprocess
from pathlib import Path

import pytest
import torch
from tiny import random_model
from transformers import AutoTokenizer

from d2f import models
from d2f.loading import load
from d2f.saving import save_model, save_official
from d2f.tasks import TASKS, make_problem
from d2f.tokenizer import CODE, load_tokenizer

ROOT = Path(__file__).parent.parent
VLLM = ROOT / ".venv-vllm" / "bin" / "python"  # `make vllm`
WHOLE = [name for name in models.names() if (models.HERE / name / "tokenizer.json").is_file()]
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
    shipped, made = models.HERE / name, tmp_path / name
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
    folders = [models.HERE / name for name in WHOLE]
    done = subprocess.run(
        [VLLM, "-c", code, NUMBERS, *folders], capture_output=True, text=True, check=True
    )
    ours = [load_tokenizer(str(folder))(NUMBERS)["input_ids"] for folder in folders]
    assert json.loads(done.stdout.splitlines()[-1]) == ours
