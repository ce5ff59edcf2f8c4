"""Whatever a task file and its rows hold, it is a task with problems, or one line says what is
wrong; and whatever a model writes is judged."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from d2f.tasks import Problem, find_task
from d2f.tasks.data_task import TaskFile
from d2f.tasks.judges import make_judge
from tests.fuzz.odd import LEAVES, TEXT, VALUES, damaged
from tests.fuzz.outcome import attempt, budget

GOOD = {
    "data": "rows.jsonl",
    "splits": {"heldout": 1.0},
    "judge": "exact",
    "prompt": "{{ question }}",
}
TEMPLATES = st.sampled_from(
    ["{{ question }}", "{{ question", "{% for i in question %}{{ i.x }}{% endfor %}", "{{ 1 / 0 }}",
     "{{ question.a.b }}", "{{ question | tojson }}", "{% include 'x' %}", "{{ ().__class__ }}",
     "{{ range(10**9) | list }}"]
)  # fmt: skip
JUDGES = st.sampled_from(["numeric", "choice", "contains", "python", "a:b", "no"]) | VALUES
KEYS = st.sampled_from([*TaskFile.model_fields]) | TEXT
ROWS = st.dictionaries(st.sampled_from(["question", "answer", "messages"]), VALUES | TEXT) | VALUES


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


@budget()
@given(
    changes=st.dictionaries(KEYS, VALUES | TEXT | TEMPLATES, max_size=2),
    judge=st.just("exact") | JUDGES,
    prompt=st.just("{{ question }}") | TEMPLATES,
    row=ROWS,
)
def test_any_task_file(folder, changes, judge, prompt, row):
    values = GOOD | {"judge": judge, "prompt": prompt} | changes
    try:
        text = json.dumps(values)  # JSON is YAML
        text.encode()
    except UnicodeEncodeError:
        return
    (folder / "task.yaml").write_text(text)
    (folder / "rows.jsonl").write_text(json.dumps(row))
    found = attempt(lambda: find_task(str(folder / "task.yaml")))
    if found is not None:
        attempt(lambda: [problem.prompt for problem in found.problems("heldout", None)])


@budget(0.5)
@given(damaged(json.dumps(GOOD)))
def test_a_damaged_task_file(folder, text):
    (folder / "damaged.yaml").write_bytes(text.encode("utf-8", "surrogatepass"))
    attempt(lambda: find_task(str(folder / "damaged.yaml")))


@budget()
@given(text=TEXT | st.text(max_size=50), reference=TEXT, leaf=LEAVES)
def test_any_response_is_judged(text, reference, leaf):
    problem = Problem("t", "?", reference, "k", row={"x": leaf})
    for judge in ("exact", "numeric", "choice", "contains", {"name": "regex", "pattern": "(.)x?"}):
        found = make_judge(judge, "t", allow_code_execution=False)
        assert attempt(lambda found=found: found.right(problem, text)) in (True, False)
        attempt(lambda found=found: found.answer(text))
