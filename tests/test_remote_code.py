"""A checkpoint's own code is never run nor offered, also where there is a person to ask."""

import json
import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from d2f.errors import CheckpointError, InputError
from d2f.loading import load, load_tokenizer
from d2f.models import HERE
from decode.compare.config import Transformers
from decode.compare.entries import TransformersRunner
from distill.config import parse_config
from distill.export import prepare_model

ROOT = Path(__file__).parents[1]


@pytest.fixture
def hostile(tmp_path):
    """A model whose configurations name code that leaves a mark when it is run."""
    folder = shutil.copytree(HERE / "tiny-teacher", tmp_path / "hostile")
    code = f"open({str(tmp_path / 'ran')!r}, 'w').write('x')\nclass Evil: pass\n"
    (folder / "evil.py").write_text(code)
    for file, key, value in (
        ("tokenizer_config.json", "AutoTokenizer", ["evil.Evil", "evil.Evil"]),
        ("config.json", "AutoConfig", "evil.Evil"),
    ):
        values = json.loads((folder / file).read_text())
        values["auto_map"] = {key: value, "AutoModelForCausalLM": "evil.Evil"}
        if file == "config.json":  # a type that transformers does not have: it would ask
            values["model_type"] = "Dream"
        (folder / file).write_text(json.dumps(values))
    return folder


def needs_code(folder):
    """Nothing but its own code reads the tokenizer."""
    (folder / "tokenizer.json").unlink()
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": "Evil"}))


def on_a_terminal(*arguments):
    """What a command prints to a person who answers y, and how it ends."""
    parent, child = pty.openpty()
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, *arguments], stdin=child, stdout=child, stderr=child, env=environment
    )
    os.close(child)
    os.write(parent, b"y\ny\ny\n")
    printed, end = b"", time.monotonic() + 120
    while time.monotonic() < end:
        ready, _, _ = select.select([parent], [], [], 1)
        try:
            piece = os.read(parent, 4096) if ready else b""
        except OSError:  # the child closed its end
            break
        printed += piece
        if not piece and process.poll() is not None:
            break
    os.close(parent)
    return process.wait(timeout=10), printed.decode(errors="replace")


@pytest.mark.slow
@pytest.mark.parametrize("code_is_needed", [True, False])
def test_nothing_is_asked_and_nothing_run(hostile, tmp_path, code_is_needed):
    if code_is_needed:
        needs_code(hostile)
    status, printed = on_a_terminal(
        "-m", "decode.pipeline", "--model", str(hostile), "--prompt", "2 + 2 =",
        "--max-new-tokens", "4",
    )  # fmt: skip
    assert "[y/N]" not in printed and "custom code?" not in printed
    assert not (tmp_path / "ran").exists()
    assert (status, "error: " in printed) == ((2, True) if code_is_needed else (0, False)), printed


def test_every_way_in(hostile, tmp_path, monkeypatch):
    """Each where transformers would ask: as if somebody sat there and typed y."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    needs_code(hostile)
    with pytest.raises(CheckpointError, match="tokenizer cannot be read"):
        load_tokenizer(str(hostile))
    with pytest.raises(CheckpointError, match="tokenizer cannot be read"):
        load(hostile, device="cpu")
    with pytest.raises(InputError, match="hostile"):
        TransformersRunner(
            Transformers(name="hf", kind="transformers", model=str(hostile), device="cpu"), []
        )
    shape = {"hidden_size": 32, "intermediate_size": 64, "layers": 2, "heads": 2, "kv_heads": 2}
    values = {
        "objective": "masked_diffusion",
        "family": "llada",
        "model": shape | {"context_length": 64},
        "tokenizer": str(hostile),
        "output": str(tmp_path / "run"),
        "data": {"tasks": {"story": 1.0}, "row_length": 64, "rows": 2},
        "optimizer": {"lr": 0.01, "warmup": 0},
        "steps": 1,
    }
    with pytest.raises(InputError, match="tokenizer cannot be read"):
        prepare_model(parse_config(values, "test"))
    assert not (tmp_path / "ran").exists()


def test_a_model_is_read_as_its_class_whatever_code_it_names(hostile):
    ours = load(hostile, device="cpu").backbone.state_dict()
    for name, value in load_file(HERE / "tiny-teacher/model.safetensors").items():
        assert ours[name].equal(value.to(ours[name].dtype))
