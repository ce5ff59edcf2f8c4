"""A task file is taken wherever a tiny task is: tuned, compared, collected, evaluated in training,
decoded by the pipeline."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import yaml
from accelerate import Accelerator
from tiny import fresh_model

from d2f.errors import InputError
from d2f.tasks import find_task, make_problems
from decode.compare.config import make_workloads
from decode.compare.config import read_config as read_comparison
from decode.compare.local import OursRunner, encode_all, tokenizer_of
from decode.compare.results import judge
from decode.pipeline import main as pipeline
from decode.tune import main as tune
from distill.config import parse_config
from distill.evaluation import Evaluator
from distill.objectives import OBJECTIVES
from distill.objectives.wino_plus import read_rollouts
from distill.rollouts import main as rollouts

ROOT = Path(__file__).parents[2]
NEVER = "@@never@@"


@pytest.fixture
def task(tmp_path, monkeypatch) -> str:
    """Stories as a user's task: a chat, stopped at the end of its first line."""
    monkeypatch.chdir(tmp_path)
    rows = [{"q": p.question, "a": p.answer} for p in make_problems("story", "train", 40)]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    values = {
        "data": "rows.jsonl",
        "splits": {"train": 0.3, "tuning": 0.3, "heldout": 0.4},
        "prompt": "{{ q }}",
        "reference": "{{ a }}",
        "max_new_tokens": 64,
        "stop": [NEVER],
        "judge": "numeric",
    }
    Path("mine.yaml").write_text(yaml.safe_dump(values))
    return "mine.yaml"


def test_it_is_tuned(task, tmp_path, capsys):
    words = f"--tasks {task} --problems 4 --heldout 4 --repetitions 1 --tau-conf 0.9 --tau-add 0.1"
    assert tune([*words.split(), "--tau-act", "0.95", "--no-figures", "--output", "out"]) == 0
    (found,) = json.loads(Path("out/report.json").read_text())["tasks"]
    assert found["task"] == "mine" and found["heldout"][0]["problems"] == 4
    assert "--tasks mine.yaml" in Path("out/report.md").read_text()  # the command that uses it
    assert Path("out/tiny-d2f-mine.yaml").is_file()
    assert tune([*words.split(), "--heldout", "400", "--output", "o", "--no-figures"]) == 2
    assert "--heldout 400: count must be at most 17" in capsys.readouterr().err


def test_its_training_problems_are_collected(task):
    """All of a response is decoded and kept; what is judged ends at the stop string."""
    values = yaml.safe_load(Path(task).read_text()) | {"stop": ["####"]}
    Path(task).write_text(yaml.safe_dump(values))
    words = ["--model", "tiny-teacher", "--tasks", task, "--problems", "6", "--output", "r.jsonl"]
    assert rollouts([*words, "--device", "cpu"]) == 0
    run, found = read_rollouts("r.jsonl")
    train = {p.key: p for p in find_task(task).problems("train", 6)}
    assert found and run["tasks"] == [find_task(task).identity]
    assert all(rollout.source == "mine" for rollout in found)
    assert all(len(rollout.generated_ids) == 64 and "####" in rollout.text for rollout in found)
    assert len(found) <= len(train)


def test_it_is_evaluated_in_training(task, tmp_path):
    values = {
        "objective": "d2f", "output": "run", "init": "tiny-teacher", "steps": 1, "block_size": 4,
        "data": {"tasks": {"countdown": 1.0}}, "tracker": "none", "eval_every": 1,
        "evaluation": {"tasks": [task], "problems": 2, "options": {"tau_conf": 0.5}},
    }  # fmt: skip
    config = parse_config(values, "test")
    made = OBJECTIVES[config.objective.name](fresh_model("llada"), config)
    evaluator = Evaluator(made, None, Accelerator())
    ((found, problems, decoder),) = evaluator.jobs
    assert found.name == "mine" and len(problems) == 2
    assert (decoder.max_new_tokens, decoder.stop) == (64, (NEVER,))
    tuning = {p.key for p in found.problems("tuning", None)}
    assert {p.key for p in problems} <= tuning  # held-out ones are kept for the end
    evaluator._keep = lambda step, values: None
    assert evaluator.run(1)["evaluation/mine/accuracy"] in (0.0, 0.5, 1.0)


def compared(task: str, **more: object):
    entry = {"name": "D2F", "kind": "ours", "model": "tiny-d2f"}
    values = {"output": "out", "entries": [entry], "tasks": [task], "problems": 2} | more
    Path("comparison.yaml").write_text(yaml.safe_dump(values))
    return read_comparison("comparison.yaml")


def test_it_is_compared(task):
    config = compared(task)
    (workload,) = make_workloads(config)
    assert (workload.name, workload.max_new_tokens, workload.stop) == ("mine", 64, (NEVER,))
    # All problems that there are are judged: fewer than the default of 500.
    assert len(workload.items) == len(find_task(task).problems("heldout", None))
    workload = pickle.loads(pickle.dumps(workload))  # entries run in processes of their own
    runner = OursRunner(config.entries[0], [workload])
    run = runner.run("mine", 2, 2)
    found = judge(run, workload, tokenizer_of("tiny-d2f"), entry="D2F", concurrency=2, repetition=0)
    assert any(answer.right for answer in found.answers)
    with pytest.raises(InputError, match="mine: problems 400: count must be at most"):
        make_workloads(compared(task, accuracy_problems=400))


def test_plain_text_is_sent_as_it_is(task):
    values = yaml.safe_load(Path(task).read_text()) | {"chat": False, "prompt": "Q: {{ q }}\nA:"}
    Path(task).write_text(yaml.safe_dump(values))
    config = compared(task)
    (workload,) = make_workloads(config)
    text = workload.items[0].prompt
    assert text.startswith("Q: ") and text.endswith("\nA:")
    tokenizer = tokenizer_of("tiny-d2f")
    plain = tokenizer(text)["input_ids"]
    assert encode_all(tokenizer, workload, "x")[0] == plain
    assert OursRunner(config.entries[0], [workload]).prepared["mine"][1][0] == plain


def test_the_pipeline_decodes_it(task, capsys):
    assert pipeline(["--tasks", task, "--problems", "2", "--output", "o.jsonl"]) == 0
    lines = [json.loads(line) for line in Path("o.jsonl").read_text().splitlines()[1:]]
    assert [line["id"] for line in lines] == ["mine-1", "mine-2"]
    assert all(line["task"] == "mine" and line["max_new_tokens"] == 64 for line in lines)
    assert "of 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    "read",
    [
        lambda: compared("humaneval"),
        lambda: parse_config({"objective": "d2f", "evaluation": {"tasks": ["humaneval"]}}, "test"),
    ],
)
def test_a_configuration_too_must_allow_code_to_be_run(read, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="allow_code_execution: true"):
        read()
