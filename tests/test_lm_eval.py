"""lm-eval runs our models: from Python, as a command, in several processes, on our tasks."""

from __future__ import annotations

import inspect
import json
import re
from argparse import Namespace
from importlib.resources import files
from pathlib import Path

import lm_eval
import pytest
import yaml
from lm_eval.tasks import TaskManager
from test_train_processes import free_ports, start

from d2f.tasks import DEFAULT_TASKS, TASKS, find_task, make_problems
from d2f.tasks.task import RESPONSE_LENGTH
from decode import lm_eval as ours
from decode.decoders.d2f import D2F
from decode.evaluate import decode_and_judge
from decode.harness.model import D2FLM, LOADING

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def model():
    return D2FLM("tiny-d2f", device="cpu")


@pytest.fixture(scope="module")
def sums(tmp_path_factory):
    """A folder with a local task of questions to answer, and one of answers to choose."""
    folder = tmp_path_factory.mktemp("sums")
    rows = [
        {"a": a, "b": 4, "answer": str(a + 4), "place": place}
        for place, a in enumerate((3, 5, 6, 8, 9))
    ]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "sums.jsonl")}},
        "test_split": "test",
        "fewshot_split": "test",
        "doc_to_text": "What is {{a}}+{{b}}?",
    }
    generate = {
        "task": "sums",
        "output_type": "generate_until",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 16},
        "metric_list": [{"metric": "exact_match"}],
    }
    choose = {
        "task": "sums_choice",
        "output_type": "multiple_choice",
        "doc_to_target": "{{place}}",
        "doc_to_choice": ["7", "9", "10", "12", "13"],
        "metric_list": [{"metric": "acc"}],
    }
    for more in (generate, choose):
        (folder / f"{more['task']}.yaml").write_text(yaml.safe_dump(common | more))
    return folder


@pytest.fixture(autouse=True)
def ours_alone(monkeypatch):
    """Leave out lm-eval's thousands of task files, which take it ten seconds to read."""
    whole = TaskManager.__init__

    def made(self, *given, **more):
        whole(self, *given, **more | {"include_defaults": False})

    monkeypatch.setattr(TaskManager, "__init__", made)


@pytest.mark.parametrize("task", DEFAULT_TASKS)
def test_our_tasks_score_as_decode_evaluate_does(model, task):
    """The same problems, prompts and judge, so the same answers in as many forwards."""
    found = lm_eval.simple_evaluate(
        model, tasks=[f"d2f_{task}"], limit=12, apply_chat_template=True,
        task_manager=TaskManager(include_path=ours.TASKS), bootstrap_iters=0,
    )  # fmt: skip
    length = {"max_new_tokens": RESPONSE_LENGTH[task]}
    decoder = D2F(**D2F.with_model_defaults(length, model.model.contract))
    problems = make_problems(task, "heldout", 12)
    _, measured = decode_and_judge(model.model, decoder, find_task(task), problems, batch_size=16)
    assert found["results"][f"d2f_{task}"]["solved,none"] == measured.accuracy > 0
    figures = found["config"]["d2f"]["tasks"][f"d2f_{task}"]["generation"]
    assert figures["forwards"] == measured.forwards.sum()
    assert figures["tokens"] == measured.tokens.sum()
    questions = [sample["doc"]["question"] for sample in found["samples"][f"d2f_{task}"]]
    assert questions == [problem.question for problem in problems]
    text = (files("decode.harness.tasks") / f"d2f_{task}.yaml").read_text()
    assert f"max_gen_toks: {RESPONSE_LENGTH[task]}" in text


def test_examples_come_as_turns_of_the_chat(model, sums):
    found = lm_eval.simple_evaluate(
        model, tasks=["sums"], num_fewshot=2, limit=2, apply_chat_template=True,
        fewshot_as_multiturn=True, bootstrap_iters=0,
        task_manager=TaskManager(include_path=str(sums)),
    )  # fmt: skip
    for sample in found["samples"]["sums"]:
        context, asked = sample["arguments"][0]
        assert context.count("<|user|>") == 3 == context.count("<|assistant|>")
        assert context.endswith(f"What is {sample['doc']['a']}+4?<|assistant|>")
        assert asked["until"] == ["\n\n"]


def test_a_users_tasks_stand_beside_ours(tmp_path):
    def given(**more):
        return Namespace(**({"command": "run", "include_path": None, "device": None} | more))

    assert {f"d2f_{task}.yaml" for task in TASKS} <= {p.name for p in Path(ours.TASKS).iterdir()}
    assert ours.with_ours(given()).include_path == [ours.TASKS]
    assert ours.with_ours(given(include_path="mine")).include_path == [ours.TASKS, "mine"]
    assert ours.with_ours(given()).batch_size == 16
    assert ours.with_ours(given(batch_size="2", device="cpu")).batch_size == "2"
    config = tmp_path / "c.yaml"
    config.write_text("include_path: theirs\nbatch_size: 4\ndevice: meta\n")
    found = ours.with_ours(given(config=str(config)))
    assert found.include_path == [ours.TASKS, "theirs"]
    assert (found.batch_size, found.device) == (4, "meta")


def scored(model, folder):
    """What one process, or the first of several, says of the two local tasks."""
    found = lm_eval.simple_evaluate(
        model, tasks=["sums", "sums_choice"], bootstrap_iters=0, apply_chat_template=True,
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
    )  # fmt: skip
    return found and {
        "results": found["results"],
        "d2f": found["config"]["d2f"],
        "answers": {
            task: {str(s["doc_id"]): s["filtered_resps"] for s in samples}
            for task, samples in found["samples"].items()
        },
    }


PROCESS = """
import json, sys
from pathlib import Path
from accelerate import PartialState
from decode.lm_eval import D2FLM
from test_lm_eval import scored

folder, output = sys.argv[1:]
found = scored(D2FLM("tiny-d2f", device="cpu", batch_size=2), folder)
if found is not None:
    Path(output).write_text(json.dumps(found))
PartialState().destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes_find_what_one_does(sums):
    """Five documents: one process has one less, and gets a copy that it does not compute."""
    arguments = ["-c", PROCESS, str(sums), str(sums / "two.json")]
    for process in start(arguments, 2, free_ports(1)):
        said, _ = process.communicate(timeout=240)
        assert process.returncode == 0, said
    two = json.loads((sums / "two.json").read_text())
    one = scored(D2FLM("tiny-d2f", device="cpu", batch_size=2), sums)
    assert one["answers"]["sums"] == two["answers"]["sums"] and any(one["answers"]["sums"].values())
    for place, each in one["answers"]["sums_choice"].items():
        for (value, greedy), other in zip(each, two["answers"]["sums_choice"][place], strict=True):
            # In another batch sums are rounded elsewhere.
            assert tuple(other) == (pytest.approx(value, rel=1e-5), greedy)
    for task in ("sums", "sums_choice"):
        scores, figures = [], []
        for found in (one, two):
            scores.append({k: v for k, v in found["results"][task].items() if "stderr" not in k})
            (counted,) = found["d2f"]["tasks"][task].values()
            figures.append([counted[name] for name in ("requests", "tokens", "forwards")])
        assert scores[0] == scores[1] and figures[0] == figures[1]
    assert [found["d2f"]["processes"] for found in (one, two)] == [1, 2]


def test_the_command_scores_a_local_task_and_ours(sums, monkeypatch, capsys):
    monkeypatch.chdir(sums)
    monkeypatch.setattr("sys.argv", ["lm_eval"])
    command = [
        "--model", "d2f", "--model_args", "pretrained=tiny-d2f,decoder=d2f,tau_conf=0.9",
        "--tasks", "sums,d2f_sudoku", "--include_path", str(sums), "--limit", "3",
        "--apply_chat_template", "--output_path", str(sums / "out"), "--log_samples",
        "--device", "cpu", "--use_cache", str(sums / "cache"),
    ]  # fmt: skip
    assert ours.main(command) == 0
    said = capsys.readouterr().out
    assert "d2f_sudoku" in said and "solved" in said
    (path,) = (sums / "out").rglob("results_*.json")
    config = json.loads(path.read_text())["config"]
    assert config["batch_size"] == 16
    assert config["d2f"]["decoder"] == "d2f" and config["d2f"]["options"]["tau_conf"] == 0.9
    for task in ("sums", "d2f_sudoku"):
        figures = config["d2f"]["tasks"][task]["generation"]
        assert figures["requests"] == 3 and figures["tokens_per_second"] > 0
    command[3] = "pretrained=tiny-d2f,decoder=d2f,tau_conf=0.8"
    assert ours.main(command) == 2
    (line,) = [li for li in capsys.readouterr().err.splitlines() if li.startswith("error")]
    assert "has answers of other settings" in line


def test_the_documentation_is_of_this_model():
    table = PAGE.partition("## `--model_args`")[2].partition("\n\nWhat a task")[0]
    names = {
        name
        for row in table.splitlines()
        for name in re.findall(r"`(\w+)`", row.split("|")[1] if row.count("|") > 1 else "")
    }
    taken = {*inspect.signature(D2FLM.__init__).parameters, *LOADING}
    outside = {"self", "options", "device", "batch_size", "max_batch_size", "trust_remote_code"}
    assert names == taken - outside
    block = PAGE.partition("```python\n")[2].partition("```")[0]
    assert block.count("limit=100") == 1
    found: dict = {}
    exec(block.replace("limit=100", "limit=2"), found)
    tasks = found["found"]["config"]["d2f"]["tasks"]
    assert tasks["d2f_story"]["generation"]["requests"] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "error: No tasks specified"),
        (["--tasks", "nope"], "error: Tasks not found: nope; `ls tasks` has the tasks"),
        (["--tasks", "d2f_story", "--limit", "-1"], "error: --limit must be 0 or more, got -1"),
    ],
)
def test_a_bad_argument_is_a_line(capsys, monkeypatch, arguments, message):
    monkeypatch.setattr("sys.argv", ["lm_eval"])
    given = ["--model", "d2f", "--model_args", "pretrained=tiny-d2f,device=cpu", *arguments]
    assert ours.main(given) == 2
    (line,) = [li for li in capsys.readouterr().err.splitlines() if li.startswith("error")]
    assert line.startswith(message)
