"""The configuration of a training run: what cannot be, files of earlier versions."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from test_train import settings
from tiny import tokenizer

from d2f.errors import InputError
from distill.config import parse_config, read_config, with_section
from distill.export import prepare_model

SHIPPED = sorted((Path(__file__).parent.parent / "configs" / "training").glob("*.yaml"))
INIT = {"init": "unused"}
NO_KEY = "there is no such key"


@pytest.mark.parametrize(
    ("objective", "changes", "message"),
    [
        ("masked_diffusion", INIT | {"init_adapter": "x"}, "are of frozen weights"),
        ("masked_diffusion", {"quantize": "4bit"}, "are of frozen weights"),
        ("masked_diffusion", {"base_dtype": "bfloat16"}, "are of frozen weights"),
        ("masked_diffusion", INIT | {"model": {}}, "exactly one of init and model"),
        ("masked_diffusion", {"family": None}, "from scratch needs a family"),
        ("d2f", {}, "objective d2f needs init"),
        ("d2f", INIT | {"compile": True, "quantize": "4bit"}, "not quantised, got 4bit"),
        ("d2f", INIT | {"block_size": 97}, "block_size must not exceed data.row_length 96, got 97"),
        ({"name": "masked_diffusion", "lora": {"r": 4}}, {}, f"objective.lora: {NO_KEY}"),
        (
            {"name": "masked_diffusion", "noise": {"schedule": "paper"}},
            {},
            f"objective.noise.schedule: {NO_KEY}",
        ),
        ({"name": "next_token", "noise": {}}, {}, f"objective.noise: {NO_KEY}"),
        (
            {"name": "d2f", "lora": {"rank": 4}},
            INIT,
            f"objective.lora.rank: {NO_KEY}; did you mean objective.lora.r",
        ),
        ("d2f", INIT | {"optimizer": {"learning_rate": 1}}, "did you mean optimizer.lr"),
        ("d3f", {}, "objective.name: got 'd3f'; did you mean d2f"),
        ({"nam": "d2f"}, {}, "objective.name: got None; expected one of"),
        ("masked_diffusion", {"data": {"tasks": {"stroy": 1}}}, "did you mean story"),
        ("masked_diffusion", {"data": {"file": "a", "columns": "d2f"}}, "columns.*d2f-reference"),
        ("masked_diffusion", {"model": {"hidden_size": 12, "heads": 4}}, "12, 4 and 4"),
    ],
)
def test_what_cannot_be_is_an_error_that_names_the_key(tmp_path, objective, changes, message):
    values = settings(tmp_path).model_dump(mode="json") | {"objective": objective}
    if "init" in changes:
        values |= {"model": None, "family": None}
    with pytest.raises(InputError, match=message):
        parse_config(values | changes, "test")


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_resolved_configuration_is_one_again(path, tmp_path):
    """Every key is in it; what nothing reads has its default."""
    config = read_config(path)
    assert parse_config(config.model_dump(mode="json"), "again") == config
    config.save(tmp_path / "config.yaml")
    assert read_config(tmp_path / "config.yaml") == config


# Files of earlier versions: `objective: NAME`, and the keys of all objectives beside it.


def flat(path: Path) -> dict:
    """A shipped configuration as a file of an earlier version has it."""
    values = yaml.safe_load(path.read_text())
    section = values.pop("objective")
    name, beside = section.pop("name"), {}
    for key in [*section]:
        if name in ("wino_plus", "wedlm") and key not in ("block_size", "lora"):
            beside.setdefault(name, {})[key] = section.pop(key)
    return {"objective": name, **section, **beside, **values}


EARLIER = [path for path in SHIPPED if path.stem != "self-draft"]  # which is newer


@pytest.mark.parametrize("path", EARLIER, ids=lambda path: path.stem)
def test_a_file_of_an_earlier_version_is_the_same_run(path, tmp_path):
    (tmp_path / "flat.yaml").write_text(yaml.safe_dump(flat(path)))
    assert read_config(tmp_path / "flat.yaml") == read_config(path)
    today = yaml.safe_load(path.read_text())
    assert with_section(today, "test") == today


def test_a_resolved_file_of_an_earlier_version_has_every_key():
    """Also those of other objectives, which are dropped."""
    noise = {"low": 0.2, "monotone_share": 0.5, "uniform_share": 1.0, "block_sizes": [8, 16, 32]}
    earlier = {"objective": "d2f", "block_size": 16, "noise": noise, "wedlm": {"adapter": False}}
    section = {"name": "d2f", "block_size": 16, "noise": {"low": 0.2, "monotone_share": 0.5}}
    assert with_section(earlier | {"data": {"measure_rows": 3}}, "test") == {
        "objective": section, "data": {},
    }  # fmt: skip
    wedlm = {"objective": "wedlm", "wedlm": {"adapter": True}, "wino_plus": {"tau1": 0.6}}
    assert with_section(wedlm, "test") == {"objective": {"name": "wedlm", "adapter": True}}


@pytest.mark.parametrize("path", ["new", "flat"])
@pytest.mark.parametrize(
    ("flag", "value", "found"),
    [
        ("--block_size", "8", lambda o: o.block_size),
        ("--objective.block-size", "8", lambda o: o.block_size),
        ("--noise.low", "0.2", lambda o: o.noise.low),
        ("--objective.noise.low", "0.3", lambda o: o.noise.low),
        ("--lora.r", "32", lambda o: o.lora.r),
        ("--objective", "d2f", lambda o: o.name),
        ("--objective.name", "d2f", lambda o: o.name),
    ],
)
def test_overrides_by_todays_names_and_by_earlier_ones(tmp_path, path, flag, value, found):
    """Also where the value is the default, which the file has otherwise."""
    values = {"objective": "d2f", "output": "o", "steps": 1, "init": "i", "block_size": 4}
    values |= {"noise": {"low": 0.1}, "lora": {"r": 8}, "data": {"tasks": {"story": 1.0}}}
    values = with_section(values, "test") if path == "new" else values
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(values))
    objective = read_config(tmp_path / "c.yaml", [flag, value]).objective
    assert str(found(objective)) == value
    kept = [objective.block_size == 4, objective.noise.low == 0.1, objective.lora.r == 8]
    assert sum(kept) == (3 if value == "d2f" else 2)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--lora.rank", "8"], "^--objective.lora.rank: .* did you mean objective.lora.r"),
        (["--objective.blocksize", "8"], "^--objective.blocksize: .* did you mean .*block_size"),
        (["--objective.noise.low", "x"], "^--objective.noise.low: expected a number, got 'x'"),
        (["--optimizer.learning_rate", "1"], "^--optimizer.learning_rate: .* mean optimizer.lr"),
        (["--objective", "d3f"], "did you mean d2f"),
    ],
)
def test_a_fault_of_a_flag_is_not_blamed_on_the_file(flags, message):
    with pytest.raises(InputError, match=message):
        read_config("tiny-d2f", flags)


PROBE = """
import sys
from distill.objectives import OBJECTIVES
from distill.train import main
assert all(OBJECTIVES.values())
sys.argv[1:] = ["--config", "tiny-d2f", *sys.argv[1:]]
status = main()
assert not {"torch", "transformers", "datasets"} & sys.modules.keys()
sys.exit(status)
"""


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--objective.distill_targets", "soft", "no such key; did you mean .*distill_target"),
        ("--lora.r", "0", "--objective.lora.r: expected at least 1, got 0"),
        ("--init", "tiny-tacher", "did you mean tiny-teacher"),
    ],
)
def test_a_wrong_option_is_said_before_torch_is_loaded(flag, value, message):
    done = subprocess.run(
        [sys.executable, "-c", PROBE, flag, value], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and re.search(message, done.stderr), done.stderr


def test_the_tokenizer_of_a_model_from_scratch_is_used_or_an_error(tmp_path):
    tokenizer().save_pretrained(tmp_path / "tokenizer")
    config = settings(tmp_path / "run", tokenizer=str(tmp_path / "tokenizer"))
    assert prepare_model(config).vocab_size == len(tokenizer())
    with pytest.raises(InputError, match="/nonexistent: no such folder, bundled model"):
        prepare_model(settings(tmp_path / "run", tokenizer="/nonexistent"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="empty: expected a tokenizer, found none"):
        prepare_model(settings(tmp_path / "run", tokenizer=str(tmp_path / "empty")))
