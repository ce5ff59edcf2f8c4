"""The published protocols: each task file makes the prompt that its source says, of rows with the
hub's columns, and tells right responses from wrong ones."""

from __future__ import annotations

import ast
import json
import re
import shlex
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from jinja2 import Environment

from d2f.config import read_mapping
from d2f.shipped import EVALUATION, shipped
from d2f.tasks import find_task
from decode.cli import read_settings
from decode.decoders import find_decoder
from decode.evaluate import parse

ROOT = Path(__file__).parent.parent.parent
GSM8K = {"question": "Ann has {} pens.", "answer": "<<2+2=4>>\n#### 4"}
MATH = {
    "problem": "$1+{}$?", "solution": r"It is $\boxed{2}$.", "answer": "2", "level": "Level 1",
    "type": "Algebra",
}  # fmt: skip
MBPP = {
    "task_id": 1, "text": "Write two, {}.", "code": "def two():\n    return 2",
    "test_list": ["assert two() == 2", "assert two() > 1", "assert two() < 3"],
    "test_setup_code": "", "challenge_test_list": [],
}  # fmt: skip
HUMANEVAL = {
    "task_id": "HumanEval/0", "prompt": "def two():\n    '{}'\n", "entry_point": "two",
    "canonical_solution": "    return 2\n", "test": "def check(f):\n    assert f() == 2\n",
}  # fmt: skip
ARC = {
    "id": "a", "question": "Which, {}?", "answerKey": "B",
    "choices": {"text": ["Red", "Blue"], "label": ["A", "B"]},
}  # fmt: skip
SUDOKU = {"Puzzle": "3102200002100320", "Solution": "3142243142131324"}
COUNTDOWN = {"input": "3,4,5", "output": "35"}
BOXED = "<reasoning>\nso\n</reasoning>\n<answer>\n\\boxed{%s}\n</answer>"

# A row of the data set ({} is another number in each), a right response, and a wrong one.
CASES: dict[str, tuple[dict[str, Any], str, str]] = {
    "gsm8k": (GSM8K, "so\n#### 4", "#### 5"),
    "math-500": (MATH, r"$\boxed{\frac{4}{2}}$", r"$\boxed{3}$"),
    "humaneval": (HUMANEVAL, "    return 2\n", "    return 3\n"),
    "mbpp": (MBPP, "def two():\n    return 2", "two = 2"),
    "gsm8k-chat": (GSM8K, "2 + 2\n#### 4", "#### 5"),
    "gsm8k-message": (GSM8K, "2 + 2\n#### 4", "#### 5"),
    "gsm8k-zero-shot": (GSM8K, "2 + 2 is 4.", "The answer is 5."),
    "math-500-zero-shot": (MATH, r"$\boxed{\frac{4}{2}}$", r"$\boxed{3}$"),
    "humaneval-zero-shot": (HUMANEVAL, "So:\n```\ndef two():\n    return 2\n```", "    return 3\n"),
    "mbpp-zero-shot": (MBPP, "So:\n```python\ndef two():\n    return 2\n```\nOK", "two = 2"),
    "gsm8k-cot": (GSM8K, "The answer is 4.", "4 pens. The answer is 5."),
    "math-chat": (MATH, r"$\boxed{\frac{4}{2}}$", r"$\boxed{3}$"),
    "math-4-shot": (MATH, "Final Answer: The final answer is $2$. I hope", "the answer is $3$."),
    "mbpp-chat": (MBPP, "def two():\n    return 2", "```python\ndef two():\n    return 2\n```"),
    "humaneval-uncut": (HUMANEVAL, "    return 2\n```\nprose", "    return 3\n"),
    "humaneval-message": (
        HUMANEVAL, "So:\n```python\ndef two():\n    return 2\n```\nas said", "    return 3\n",
    ),
    "math-message": (MATH, "Final Answer: The final answer is $2$. I hope", "the answer is $3$."),
    "mbpp-message": (MBPP, "def two():\n    return 2", "```python\ndef two():\n    return 2\n```"),
    "freedave-gsm8k": (GSM8K, "2 + 2\n#### 4", "so 5 pens"),
    "freedave-math-500": (MATH, r"$\boxed{\frac{4}{2}}$", r"$\boxed{3}$"),
    "freedave-mbpp": (MBPP, "def two():\n    return 2\n```\nas said", "two = 2\n```"),
    "freedave-humaneval": (HUMANEVAL, "    return 2\n```\nas said", "    return 3\n```"),
    "wino-gsm8k": (GSM8K, BOXED % "4", BOXED % "5"),
    "wino-math-500": (MATH, BOXED % r"\frac{4}{2}", BOXED % "3"),
    "wino-humaneval": (
        HUMANEVAL, "    return 2\n```\nThat is it.", "    return 3\n```",
    ),
    "wino-mbpp": (MBPP, "def two():\n    return 2\n```\nThat is it.", "two = 2\n```"),
    "wino-arc-challenge": (ARC, BOXED % "B", BOXED % "A"),
    "wino-arc-easy": (ARC, BOXED % "B", "B"),
    "wino-sudoku": (
        SUDOKU, "<answer>\n3142243142131324\n</answer>", "<answer>\n1111222233334444\n</answer>",
    ),
    "wino-countdown": (COUNTDOWN, BOXED % "(3 + 4) \\times 5", BOXED % "3 * 4 * 5"),
    "wino-plus-countdown": (COUNTDOWN, BOXED % "(3 + 4) * 5", BOXED % "3 * 4 * 5"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_processes(monkeypatch):
    """Run the programs, which are those above, in this process."""

    def passes(program: str, tests: str, *_: object, **__: object) -> bool:
        try:
            exec(program + "\n" + tests, {})
        except Exception:
            return False
        return True

    monkeypatch.setattr("d2f.tasks.judges.passes", passes)


@pytest.fixture(scope="module")
def problem_of(tmp_path_factory):
    """A task on a few rows in place of the hub's, and one of its problems."""
    folder = tmp_path_factory.mktemp("rows")

    @cache
    def made(name: str):
        if "math" in name and find_spec("math_verify") is None:
            pytest.skip("math-verify is missing")
        rows = [json.dumps(CASES[name][0]).replace("{}", str(i)) for i in range(510)]
        (folder / f"{name}.jsonl").write_text("\n".join(rows))
        splits = find_task(name, allow_code_execution=True).data_splits
        files = dict.fromkeys(splits, str(folder / f"{name}.jsonl"))
        task = find_task(name, allow_code_execution=True, data_files=files)
        return task, task.problems("train" if name == "wino-plus-countdown" else "heldout", 1)[0]

    return made


def test_these_are_all():
    assert set(CASES) == set(shipped(*EVALUATION))


@pytest.mark.parametrize("name", CASES)
def test_each_asks_and_judges(problem_of, name):
    """The response is begun as the protocol begins it."""
    task, problem = problem_of(name)
    _, right, wrong = CASES[name]
    assert task.right(problem, right)
    assert not task.right(problem, wrong) and not task.right(problem, "")
    prompt = problem.prompt
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    asked = next(turn["content"] for turn in reversed(turns) if turn["role"] == "user")
    assert asked.endswith(problem.question) and "{{" not in str(prompt)
    begun = [turn["content"] for turn in turns if "prefix" in turn]
    before, _, after = PREFIXES.get(name, "").partition("{}")
    assert all(one.startswith(before) and one.endswith(after) for one in begun)
    assert len(begun) == (name in PREFIXES)


def shots(prompt: list[dict[str, Any]]) -> int:
    return sum(turn["role"] == "assistant" and "prefix" not in turn for turn in prompt)


PREFIXES = {
    "wino-gsm8k": "<reasoning>", "wino-math-500": "<reasoning>", "wino-sudoku": "<reasoning>",
    "wino-countdown": "<reasoning>", "wino-plus-countdown": "<reasoning>",
    "wino-arc-easy": "<reasoning>",
    "wino-arc-challenge": "<reasoning>", "wino-mbpp": ">>> Code:\n```python\n",
    "wino-humaneval": f"Here is the completed function:\n```python\n{HUMANEVAL['prompt']}\n",
    "freedave-humaneval": f"Here is the completed function:\n```python\n{HUMANEVAL['prompt']}\n",
    "freedave-mbpp": "\n```python\n",
}  # fmt: skip


def test_examples_stand_where_the_protocol_has_them(problem_of):
    made = {
        name: problem_of(name)[1].prompt
        for name in (
            "gsm8k-chat", "gsm8k-message", "gsm8k-cot", "math-4-shot", "math-message", "mbpp-chat",
            "mbpp-message", "freedave-gsm8k", "freedave-math-500", "freedave-mbpp",
        )
    }  # fmt: skip
    assert shots(made["gsm8k-chat"]) == 4 and shots(made["mbpp-chat"]) == 3
    assert made["mbpp-chat"][1]["content"].endswith("return 2\n[DONE]")
    (message,) = made["gsm8k-message"]
    assert message["content"].count("\nAnswer: <<2+2=4>>\n#### 4\n\nQuestion: ") == 5
    assert made["gsm8k-cot"].count("The answer is") == made["gsm8k-cot"].count("\n\nQ: ") == 8
    assert made["math-4-shot"].count("\n\nSolution: ") == 4
    assert made["math-4-shot"].endswith("?\n\nSolution:")
    # Fast-dLLM's are the harness's text in one message, FreeDave's are turns.
    (message,) = made["math-message"]
    shown, text = (re.sub(r"\$1\+\d\$", "", t) for t in (message["content"], made["math-4-shot"]))
    assert shown == text
    (message,) = made["mbpp-message"]
    assert message["content"].count("return 2\n[DONE]\n\nYou are an expert") == 3
    assert [shots(made[f"freedave-{n}"]) for n in ("gsm8k", "math-500", "mbpp")] == [5, 4, 3]
    assert made["freedave-gsm8k"][1]["content"] == GSM8K["answer"]
    assert made["freedave-math-500"][1]["content"].startswith("The expressions inside")
    assert made["freedave-mbpp"][1]["content"] == f"\n```python\n{MBPP['code']}\n```"


HARNESS = find_spec("lm_eval")
needs_harness = pytest.mark.skipif(HARNESS is None, reason="lm-eval is missing")


def of_harness(path: str) -> Any:
    """A task of lm-eval as its files say, without importing what they import."""
    place = Path(HARNESS.submodule_search_locations[0]) / "tasks" / path  # type: ignore[union-attr, index]
    if place.suffix == ".py":
        found = {n.name: n for n in ast.parse(place.read_text()).body if hasattr(n, "name")}
        return ast.literal_eval(found["list_fewshot_samples"].body[-1].value)  # type: ignore[attr-defined]
    loader = type("Loader", (yaml.SafeLoader,), {})
    loader.add_constructor("!function", lambda loader, node: node.value)  # type: ignore[attr-defined]
    return yaml.load(place.read_text(), loader)


@needs_harness
@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("gsm8k-chat", "gsm8k/gsm8k.yaml"),
        ("gsm8k-message", "gsm8k/gsm8k.yaml"),
        ("gsm8k-cot", "gsm8k/gsm8k-cot.yaml"),
        ("humaneval-uncut", "humaneval/humaneval.yaml"),
        ("mbpp-chat", "mbpp/mbpp.yaml"),
        ("mbpp-message", "mbpp/mbpp.yaml"),
        ("freedave-mbpp", "mbpp/mbpp_instruct.yaml"),
        ("freedave-humaneval", "humaneval/humaneval_instruct.yaml"),
    ],
)
def test_templates_and_stops_are_the_harness_own(problem_of, name, path):
    theirs = of_harness(path)
    task, problem = problem_of(name)
    if "include" in theirs:
        theirs = of_harness(f"{Path(path).parent}/{theirs['include']}") | theirs
    environment = Environment(keep_trailing_newline=True)
    assert environment.from_string(theirs["doc_to_text"]).render(problem.row) == problem.question
    if "gen_prefix" in theirs:
        begun = environment.from_string(theirs["gen_prefix"]).render(problem.row)
        assert problem.prompt[-1]["content"] == begun
    if "uncut" not in name:
        assert list(task.stop) == theirs["generation_kwargs"]["until"]


@needs_harness
@pytest.mark.parametrize(
    ("name", "path"),
    [("gsm8k-cot", "gsm8k/gsm8k-cot.yaml"), ("math-4-shot", "minerva_math/utils.py")],
)
def test_examples_are_the_harness_own(name, path):
    ours = read_mapping(shipped(*EVALUATION)[name])["few_shot"]["examples"]
    theirs = of_harness(path)
    if isinstance(theirs, dict):
        theirs = theirs["fewshot_config"]["samples"]
    assert [list(one.values())[:2] for one in theirs] == [list(one.values()) for one in ours]


@needs_harness
def test_mbpps_examples_are_the_second_to_fourth_row():
    assert [one["task_id"] for one in of_harness("mbpp/utils.py")] == [2, 3, 4]
    assert read_mapping(shipped(*EVALUATION)["mbpp-chat"])["splits"]["train"] == "prompt[1:]"


# Rows as the official files have them: MATH-500's with its instruction, MBPP's by task id.
FILES = {
    "math-500-zero-shot": (
        [{"prompt": "$1+1$?\nReason, and use \\boxed{}.", "answer": r"\frac{4}{2}"}],
        "test={}", "$1+1$?\nReason, and use \\boxed{}.", r"\boxed{2}",
    ),
    "humaneval-zero-shot": (
        [HUMANEVAL | {"prompt": "from math import sqrt\n\ndef two():\n    # Two\n",
                      "canonical_solution": "    return int(sqrt(4))\n"}],
        "test={}", "# Two\n```", "    return int(sqrt(4))\n",
    ),
    "mbpp-zero-shot": (
        [MBPP | {"task_id": n, "code": f"def two():\r\n    return {n}",
                 "test_list": [f"assert two() == {n}"]} for n in range(1, 14)],
        "test={}[10:12]", "assert two() == 1", "```\ndef two():\n    return {}\n```",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_the_official_files_are_read_as_they_are(problem_of, tmp_path, name):
    """And on the hub's rows the same configuration asks the same way."""
    rows, place, asked, right = FILES[name]
    (tmp_path / "official.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = ["--tasks", name, "--data-files", place.format(tmp_path / "official.jsonl")]
    (task,) = parse([*words, "--allow-code-execution"]).chosen
    problems = task.problems("heldout", None)
    for problem in problems:
        assert asked in problem.question and len(problem.prompt) == 1
        number = problem.row.get("task_id")
        assert task.right(problem, right.replace("{}", str(number)))
        assert task.right(problem, problem.answer) and not task.right(problem, "")
    if "[" in place:
        assert sorted(problem.row["task_id"] for problem in problems) == [11, 12]


def test_the_commands_of_the_page_are_protocols():
    """Each names a task and decoder settings that are there and go together."""
    page = (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8")
    lines = re.findall(r"^\| .*`(--tasks [^`]+)` \|", page, flags=re.MULTILINE)
    named = set()
    for words in lines:
        options = parse([*shlex.split(words), "--allow-code-execution"])
        (task,) = options.chosen
        settings = read_settings(options)
        decoder = find_decoder(settings.name)
        settings.check([settings.given.get("max_new_tokens") or task.response_length])
        named |= {task.name, Path(options.config).stem}
        assert settings.name == decoder.name
    assert len(lines) >= 25
    plain = {"gsm8k", "math-500", "humaneval", "mbpp"}
    others = {"wino-plus-countdown"} | {n for n in CASES if "zero-shot" in n}  # of no paper
    assert set(CASES) - plain - others <= named
    decoding = {path.stem for path in (ROOT / "configs" / "published").glob("*.yaml")}
    assert decoding - {"static-llada", "static-dream"} <= named
