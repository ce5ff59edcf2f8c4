"""A key that nothing would read is an error: by objective, and by the other keys."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_train import settings
from tiny import tokenizer

from d2f.errors import InputError
from distill.config import TrainConfig, parse_config, read_config, unread, value_of
from distill.export import prepare_model

ROOT = Path(__file__).parent.parent
INIT = {"init": "unused"}
ROLLOUTS = INIT | {"data": {"file": "r.jsonl", "row_length": 96, "rows": 2}}
TEXT = {"file": "d.jsonl", "row_length": 96, "rows": 2}

CASES = [
    ("masked_diffusion", INIT | {"tokenizer": "/nonexistent"}, "tokenizer"),
    ("masked_diffusion", {"lora": {"r": 4}}, "lora.r"),
    ("masked_diffusion", {"block_size": 8}, "block_size"),
    ("masked_diffusion", {"distill_target": "hard"}, "distill_target"),
    ("masked_diffusion", {"noise": {"schedule": "paper"}}, "noise.schedule"),
    ("masked_diffusion", {"noise": {"low": 0.1}}, "noise.low"),
    ("masked_diffusion", {"noise": {"far_weight": 0.1}}, "noise.far_weight"),
    ("masked_diffusion", {"noise": {"block_sizes": [4]}}, "noise.block_sizes"),
    ("masked_diffusion", {"noise": {"uniform_share": 0, "max_ratio": 0.9}}, "noise.max_ratio"),
    ("masked_diffusion", {"noise": {"most_active": 3}}, "noise.most_active"),
    ("masked_diffusion", {"wino_plus": {"tau1": 0.5}}, "wino_plus.tau1"),
    ("masked_diffusion", {"wedlm": {"weights": "code"}}, "wedlm.weights"),
    ("next_token", {"noise": {"min_ratio": 0.1}}, "noise.min_ratio"),
    ("next_token", {"data": TEXT | {"train_on_padding": True}}, "data.train_on_padding"),
    ("next_token", {"data": TEXT | {"short_tail": 3}}, "data.short_tail"),
    ("d2f", INIT | {"noise": {"uniform_share": 0.5}}, "noise.uniform_share"),
    ("d2f", INIT | {"noise": {"causal_share": 0.5}}, "noise.causal_share"),
    ("d2f", INIT | {"noise": {"cart_p": 0.1}}, "noise.cart_p"),
    ("d2f", INIT | {"noise": {"most_active": 5}}, "noise.most_active"),
    ("d2f", INIT | {"noise": {"min_ratio": 0.1}}, "noise.min_ratio"),
    ("d2f", INIT | {"noise": {"far_weight": 0.1}}, "noise.far_weight"),
    ("d2f", INIT | {"noise": {"schedule": "pipeline", "low": 0.1}}, "noise.low"),
    (
        "d2f",
        INIT | {"noise": {"schedule": "pipeline", "states": "s", "most_active": 2}},
        "noise.most_active",
    ),
    ("d2f", INIT | {"init_adapter": "a", "lora": {"dropout": 0.3}}, "lora.dropout"),
    ("wedlm", INIT | {"lora": {"alpha": 4}}, "lora.alpha"),
    ("wedlm", INIT | {"noise": {"low": 0.1}}, "noise.low"),
    ("next_token", {"evaluation": {"loss_ratios": [0.5]}}, "evaluation.loss_ratios"),
    ("wino_plus", ROLLOUTS | {"noise": {"low": 0.1}}, "noise.low"),
    ("wino_plus", {**INIT, "data": TEXT | {"on_long": "drop"}}, "data.on_long"),
    ("wino_plus", {**INIT, "data": TEXT | {"tail_weight": 0.5}}, "data.tail_weight"),
]


@pytest.mark.parametrize(("objective", "changes", "key"), CASES)
def test_a_key_that_nothing_reads_is_an_error_that_names_it(tmp_path, objective, changes, key):
    plain = {k: v for k, v in changes.items() if k in ("init", "data")}
    if "data" in plain:
        plain["data"] = TEXT
    fine = settings(tmp_path, objective, **{"noise": {}} | plain)
    assert key in unread(fine) or key.startswith(("noise.", "lora."))
    with pytest.raises(InputError, match=rf"{key}: nothing reads it here, it is for"):
        settings(tmp_path, objective, **{"noise": {}} | changes)


def test_names_within_messages_need_messages(tmp_path):
    columns = {"prompt": "a", "response": "b", "role": "from"}
    with pytest.raises(InputError, match=r"columns\.role and columns\.content are names within"):
        settings(tmp_path, data=TEXT | {"columns": columns})


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "training").glob("*.yaml")), ids=str)
def test_a_resolved_configuration_is_one_again(path):
    """Every key is in it; what nothing reads has its default."""
    config = read_config(path)
    assert parse_config(config.model_dump(mode="json"), "again") == config


def test_every_key_that_may_be_unread_is_a_key(tmp_path):
    """A rule of a key that was renamed would never be read itself."""
    data = {"data": TEXT}
    for objective in ("next_token", "masked_diffusion", "d2f", "wedlm", "wino_plus"):
        more = {"init": "unused"} if objective in ("d2f", "wino_plus") else {}
        config = settings(tmp_path, objective, **{"noise": {}} | data | more)
        assert isinstance(config, TrainConfig)
        for key in unread(config):
            value_of(config, key)


def test_the_tokenizer_of_a_model_from_scratch_is_used_or_an_error(tmp_path):
    tokenizer().save_pretrained(tmp_path / "tokenizer")
    config = settings(tmp_path / "run", tokenizer=str(tmp_path / "tokenizer"))
    assert prepare_model(config).vocab_size == len(tokenizer())
    with pytest.raises(InputError, match="/nonexistent: no such folder or hub name"):
        prepare_model(settings(tmp_path / "run", tokenizer="/nonexistent"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="empty: expected a tokenizer, found none"):
        prepare_model(settings(tmp_path / "run", tokenizer=str(tmp_path / "empty")))
