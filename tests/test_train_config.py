"""The configuration of a training run: keys that nothing reads, files of earlier versions."""

from __future__ import annotations

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
ROLLOUTS = INIT | {"data": {"file": "r.jsonl", "row_length": 96, "rows": 2}}
TEXT = {"file": "d.jsonl", "row_length": 96, "rows": 2}
NO_KEY = "there is no such key"
UNREAD = "nothing reads it here"


@pytest.mark.parametrize(
    ("objective", "changes", "message"),
    [
        ("masked_diffusion", INIT | {"tokenizer": "/nonexistent"}, f"tokenizer: {UNREAD}"),
        ("masked_diffusion", INIT | {"init_adapter": "x"}, "leave out init_adapter"),
        ("masked_diffusion", {"quantize": "4bit"}, "are of frozen weights"),
        ("masked_diffusion", {"base_dtype": "bfloat16"}, "are of frozen weights"),
        ("d2f", INIT | {"block_size": 97}, "block_size must not exceed data.row_length 96, got 97"),
        ("masked_diffusion", {"lora": {"r": 4}}, f"objective.lora: {NO_KEY}"),
        ("masked_diffusion", {"block_size": 8}, f"objective.block_size: {NO_KEY}"),
        ("masked_diffusion", {"distill_target": "hard"}, f"objective.distill_target: {NO_KEY}"),
        ("masked_diffusion", {"noise": {"schedule": "paper"}}, f"noise.schedule: {NO_KEY}"),
        ("masked_diffusion", {"noise": {"far_weight": 0.1}}, f"far_weight: {UNREAD}"),
        ("masked_diffusion", {"noise": {"block_sizes": [4]}}, f"block_sizes: {UNREAD}"),
        (
            "masked_diffusion",
            {"noise": {"uniform_share": 0, "max_ratio": 0.9}},
            f"max_ratio: {UNREAD}",
        ),
        ("masked_diffusion", {"wino_plus": {"tau1": 0.5}}, f"objective.tau1: {NO_KEY}"),
        ("masked_diffusion", {"wedlm": {"weights": "code"}}, f"objective.weights: {NO_KEY}"),
        ("next_token", {"noise": {"min_ratio": 0.1}}, f"objective.noise: {NO_KEY}"),
        ("next_token", {"data": TEXT | {"train_on_padding": True}}, "data.train_on_padding"),
        ("next_token", {"data": TEXT | {"short_tail": 3}}, f"data.short_tail: {UNREAD}"),
        ("next_token", {"evaluation": {"loss_ratios": [0.5]}}, f"loss_ratios: {UNREAD}"),
        ("d2f", INIT | {"noise": {"uniform_share": 0.5}}, f"noise.uniform_share: {NO_KEY}"),
        ("d2f", INIT | {"noise": {"most_active": 5}}, f"most_active: {UNREAD}"),
        ("d2f", INIT | {"noise": {"min_ratio": 0.1}}, f"min_ratio: {UNREAD}"),
        ("d2f", INIT | {"noise": {"far_weight": 0.1}}, f"far_weight: {UNREAD}"),
        ("d2f", INIT | {"noise": {"schedule": "pipeline", "low": 0.1}}, f"low: {UNREAD}"),
        (
            "d2f",
            INIT | {"noise": {"schedule": "pipeline", "states": "s", "most_active": 2}},
            f"most_active: {UNREAD}",
        ),
        ("d2f", INIT | {"init_adapter": "a", "lora": {"dropout": 0.3}}, f"lora.dropout: {UNREAD}"),
        ("wedlm", INIT | {"lora": {"alpha": 4}}, f"lora: {UNREAD}"),
        ("wedlm", INIT | {"noise": {"low": 0.1}}, f"objective.noise: {NO_KEY}"),
        ("wino_plus", ROLLOUTS | {"noise": {"low": 0.1}}, f"objective.noise: {NO_KEY}"),
        ("wino_plus", {**INIT, "data": TEXT | {"on_long": "drop"}}, f"data.on_long: {UNREAD}"),
        ("wino_plus", {**INIT, "data": TEXT | {"tail_weight": 0.5}}, "data.tail_weight"),
        (
            "masked_diffusion",
            {"data": TEXT | {"columns": {"prompt": "a", "response": "b", "role": "from"}}},
            "columns.role and columns.content are names within",
        ),
    ],
)
def test_a_key_that_nothing_reads_is_an_error_that_names_it(tmp_path, objective, changes, message):
    with pytest.raises(InputError, match=message):
        settings(tmp_path, objective, **{"noise": {}} | changes)


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


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_file_of_an_earlier_version_is_the_same_run(path, tmp_path):
    (tmp_path / "flat.yaml").write_text(yaml.safe_dump(flat(path)))
    assert read_config(tmp_path / "flat.yaml") == read_config(path)
    today = yaml.safe_load(path.read_text())
    assert with_section(today) == today


def test_a_resolved_file_of_an_earlier_version_has_every_key():
    """Also those of other objectives, at their defaults."""
    noise = {"schedule": None, "states": None, "low": 0.2, "high": 0.7, "monotone_share": 0.5}
    noise |= {"uniform_share": 1.0, "cart_p": None, "block_sizes": [8, 16, 32], "most_active": 3}
    earlier = {"objective": "d2f", "block_size": 16, "noise": noise, "wedlm": {"adapter": False}}
    earlier |= {"wino_plus": {"tau1": 0.6, "kl_weight": 0.0}, "lora": {"r": 8}}
    section = {"name": "d2f", "noise": {"monotone_share": 0.5, "most_active": 3}, "lora": {"r": 8}}
    assert with_section(earlier) == {"objective": section}
    with pytest.raises(InputError, match=f"objective.tau1: {NO_KEY}"):
        more = {"output": "o", "steps": 1, "init": "i", "data": {"tasks": {"story": 1.0}}}
        parse_config(earlier | more | {"wino_plus": {"tau1": 0.5}}, "test")


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
    values = with_section(values) if path == "new" else values
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(values))
    objective = read_config(tmp_path / "c.yaml", [flag, value]).objective
    assert str(found(objective)) == value
    kept = [objective.block_size == 4, objective.noise.low == 0.1, objective.lora.r == 8]
    assert sum(kept) == (3 if value == "d2f" else 2)


def test_the_tokenizer_of_a_model_from_scratch_is_used_or_an_error(tmp_path):
    tokenizer().save_pretrained(tmp_path / "tokenizer")
    config = settings(tmp_path / "run", tokenizer=str(tmp_path / "tokenizer"))
    assert prepare_model(config).vocab_size == len(tokenizer())
    with pytest.raises(InputError, match="/nonexistent: no such folder, bundled model"):
        prepare_model(settings(tmp_path / "run", tokenizer="/nonexistent"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="empty: expected a tokenizer, found none"):
        prepare_model(settings(tmp_path / "run", tokenizer=str(tmp_path / "empty")))
