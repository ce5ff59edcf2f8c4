"""Rows of a held-out loss: which they are, that training never sees them, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import wino_plus_runs
from data_rows import pairs, run_settings, write
from tiny import random_model, tokenizer

from d2f.errors import InputError
from d2f.tasks import make_problem
from distill.check import check
from distill.config import TrainConfig
from distill.data.stream import Stream, plan
from distill.objectives import OBJECTIVES
from distill.train import train

base, files = wino_plus_runs.base, wino_plus_runs.files  # fixtures


def stream_of(config: TrainConfig) -> Stream:
    return OBJECTIVES[config.objective.name](random_model("llada"), config).stream()


def asked(ids: list[list[int]]) -> set[str]:
    return {tokenizer().decode(prompt) for prompt in ids}


def trained(found: Stream, epochs: int = 2) -> set[str]:
    """Prompts of all samples that training sees."""
    assert found.epoch is not None
    drawn = [found.sample(i) for i in range(epochs * found.epoch)]
    return asked([sample.prompt for sample in drawn if sample is not None])


def held(found: Stream) -> set[str]:
    assert found.held_out is not None
    return asked([sample.prompt for sample in found.held_out.samples])


def test_held_out_rows_are_never_trained_on_and_all_others_are(tmp_path):
    file = write(tmp_path / "rows.jsonl", pairs(20))
    data = {"file": str(file)}
    every = trained(stream_of(run_settings(tmp_path / "run", data)))
    found = stream_of(run_settings(tmp_path / "run", data, evaluation={"loss_rows": 6}))
    assert len(every) == 20 and len(held(found)) == 6
    assert trained(found) == every - held(found)
    assert plan(found, 99).samples_per_epoch == 14
    assert found.report() is not None and "6 held out" in found.report()
    assert found.held_out.said == f"6 of 20 rows of {file}"


def test_they_are_drawn_by_the_seed_and_their_text_and_by_nothing_else(tmp_path):
    """Neither by the order of the rows nor by what else is there."""
    file = write(tmp_path / "rows.jsonl", pairs(20))
    turned = write(tmp_path / "turned.jsonl", [{"prompt": "x", "response": "y"}, *pairs(20)[::-1]])

    def drawn(seed: int = 0, rows: int = 5, file: Path = file) -> set[str]:
        settings = {"evaluation": {"loss_rows": rows}, "seed": seed}
        return held(stream_of(run_settings(tmp_path / "run", {"file": str(file)}, **settings)))

    assert drawn() < drawn(rows=9)
    assert len(drawn() - drawn(file=turned)) <= 1
    assert drawn() != drawn(seed=1)


def test_rows_of_one_text_are_on_one_side(tmp_path):
    """However often a row is there: held out once, and trained on never."""
    rows = [row for row in pairs(8) for _ in range(3)]
    data = {"file": str(write(tmp_path / "rows.jsonl", rows))}
    found = stream_of(run_settings(tmp_path / "run", data, evaluation={"loss_rows": 3}))
    assert len(found.held_out.samples) == len(held(found)) == 3
    assert len(trained(found)) == 5 and not trained(found) & held(found)
    assert plan(found, 99).samples_per_epoch == 15 and "9 held out" in found.report()
    with pytest.raises(InputError, match=r"must be at most 8, the different rows of .* got 9"):
        stream_of(run_settings(tmp_path / "run", data, evaluation={"loss_rows": 9}))


def test_rows_that_training_leaves_out_are_not_held_out(tmp_path):
    rows = [*pairs(6), "not JSON", {"prompt": "q", "response": "a " * 99}]
    data = {"file": str(write(tmp_path / "rows.jsonl", rows))}
    data |= {"on_long": "drop", "on_bad_row": "skip"}
    found = stream_of(run_settings(tmp_path / "run", data, evaluation={"loss_rows": 5}))
    assert len(held(found)) == 5
    assert len(trained(found)) == 1


def test_a_file_of_its_own_takes_nothing_from_training(tmp_path):
    file = write(tmp_path / "rows.jsonl", pairs(8))
    other = write(tmp_path / "other.jsonl", pairs(12)[6:])
    data = {"file": str(file)}
    plain = stream_of(run_settings(tmp_path / "run", data))
    found = stream_of(run_settings(tmp_path / "run", data, evaluation={"loss_file": str(other)}))
    assert trained(found) == trained(plain)
    assert len(held(found)) == 6
    # Two of them ask what training asks.
    assert found.held_out.said == (
        f"6 of 6 rows of {other}; warning: 2 rows that are trained on have a prompt of theirs"
    )
    some = {"loss_file": str(other), "loss_rows": 4}
    assert len(held(stream_of(run_settings(tmp_path / "run", data, evaluation=some)))) == 4


def test_of_generated_tasks_they_are_problems_of_the_split(tmp_path):
    changes = {"evaluation": {"loss_rows": 5, "split": "heldout"}}
    found = stream_of(run_settings(tmp_path / "run", {"tasks": {"countdown": 1.0}}, **changes))
    questions = [make_problem("countdown", "heldout", i, 0).question for i in range(5)]
    prompts = [tokenizer().decode(sample.prompt) for sample in found.held_out.samples]
    assert all(question in prompt for question, prompt in zip(questions, prompts, strict=True))
    assert found.held_out.said == "5 generated problems of the split heldout"


BAD = [
    (
        {"loss_rows": 21},
        r"loss_rows must be at most 20, the different rows of .*rows\.jsonl .* got 21",
    ),
    ({"loss_rows": 20}, r"no row is left to train on; .* 0 of 20 rows used, 20 held out"),
    ({"loss_file": "/nonexistent.jsonl"}, r"/nonexistent\.jsonl: cannot be read"),
    ({"loss_file": "ROWS"}, r"rows\.jsonl is what is trained on: expected other rows"),
    ({"loss_rows": 2, "loss_ratios": [1.5]}, r"evaluation\.loss_ratios.* got 1\.5"),
    ({"loss_rows": 2, "loss_ratios": [1e-9]}, r"loss_ratios: 1e-09 masks no token"),
    ({"loss_rows": 2, "best_by": "kl"}, r"kl is not measured, expected one of cross_entropy"),
    ({"tasks": ["story"], "best_by": "cross_entropy"}, r"not measured, expected one of accuracy"),
    ({}, r"eval_every needs evaluation\.tasks .* or a held-out loss"),
]


@pytest.mark.parametrize(("evaluation", "message"), BAD)
def test_what_cannot_be_is_refused_before_any_work(tmp_path, evaluation, message):
    file = write(tmp_path / "rows.jsonl", pairs(20))
    chosen = {key: str(file) if value == "ROWS" else value for key, value in evaluation.items()}
    for call in (check, train):
        with pytest.raises(InputError, match=message):
            call(
                run_settings(tmp_path / "run", {"file": str(file)}, eval_every=1, evaluation=chosen)
            )
    assert not (tmp_path / "run" / "log.jsonl").exists()


@pytest.mark.parametrize(
    ("evaluation", "message"),
    [
        ({"loss_rows": 3}, r"must be at most 2 of the 3 rollouts of .*, got 3"),
        ({"loss_file": "SAME"}, r"is what is trained on: expected other rollouts"),
        ({"loss_file": "FEWER", "loss_rows": 3}, "at most 2 of the 2 rollouts of .*fewer.jsonl"),
        (
            {"loss_rows": 1, "best_by": "kl"},
            r"best_by: kl is not measured, expected one of cross_entropy",
        ),
    ],
)
def test_rollouts_that_cannot_be_held_out_are_refused(tmp_path, base, files, evaluation, message):
    file, fewer = files["llada", "wino"], tmp_path / "fewer.jsonl"
    fewer.write_text("".join(file.read_text().splitlines(keepends=True)[:3]))  # a run, two rollouts
    places = {"SAME": str(file), "FEWER": str(fewer)}
    evaluation = {key: places.get(str(value), value) for key, value in evaluation.items()}
    with pytest.raises(InputError, match=message):
        init = str(base["llada"])
        check(wino_plus_runs.settings(tmp_path, file, init=init, evaluation=evaluation))


def test_a_file_of_rollouts_of_its_own_takes_nothing_from_training(tmp_path, base, files):
    file, fewer = files["llada", "wino"], tmp_path / "fewer.jsonl"
    fewer.write_text("".join(file.read_text().splitlines(keepends=True)[:3]))
    init = {"init": str(base["llada"])}
    every = stream_of(wino_plus_runs.settings(tmp_path, file, **init))
    loss = {"evaluation": {"loss_file": str(fewer)}}
    found = stream_of(wino_plus_runs.settings(tmp_path, file, **init, **loss))
    assert trained(found) == trained(every)
    assert len(held(found)) == 2
    assert found.held_out.said.endswith(f"states of 2 rollouts, of the 2 of {fewer}")
