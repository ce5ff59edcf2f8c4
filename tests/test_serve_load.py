"""The benchmarks of the server: their commands, what they read, how they go on."""

import json
from pathlib import Path

import pytest

from benchmarks import serve_cost
from benchmarks.serve_load import __main__ as command
from benchmarks.serve_load.load_tools import (
    Load,
    guidellm_command,
    read_guidellm,
    read_vllm,
    vllm_command,
)
from d2f.models import resolve
from d2f.tasks import make_problems

PROBLEMS = make_problems("story", "heldout", 3, seed=0)
SAID = {
    "num_prompts": 3,
    "completed": 2,
    "duration": 2.0,
    "total_output_tokens": 30,
    "output_throughput": 15.0,
    "median_ttft_ms": 20.0,
    "p95_ttft_ms": 40.0,
    "errors": ["", "Bad Gateway", ""],
    "generated_texts": [PROBLEMS[0].answer, "no", ""],
}


def load(tmp_path):
    return Load("http://h:1", "m", tmp_path / "tok", ["one", "two"], 4.0, 64, 0)


def test_both_tools_are_sent_the_same_prompts(tmp_path):
    report = tmp_path / "report.json"
    vllm = vllm_command("python", load(tmp_path), report)
    guidellm = guidellm_command("python", load(tmp_path), report)
    talks = json.loads((tmp_path / "sharegpt.json").read_text())
    lines = (tmp_path / "prompts.jsonl").read_text().splitlines()
    assert [t["conversations"][0]["value"] for t in talks] == ["one", "two"]
    assert [json.loads(line)["prompt"] for line in lines] == ["one", "two"]
    assert vllm[vllm.index("--num-prompts") + 1] == "2"
    assert '{"kind": "max_requests", "count": 2}' in guidellm


def test_what_vllm_reports_is_read_and_its_answers_judged(tmp_path):
    (tmp_path / "r.json").write_text(json.dumps(SAID))
    found = read_vllm(tmp_path / "r.json", PROBLEMS)
    assert (found["failed"], found["right"], found["first_ms_95"]) == (1, 1, 40.0)
    assert found["error"] == "Bad Gateway"


def test_what_guidellm_reports_is_read(tmp_path):
    first = {"median": 20.0, "percentiles": {"p95": 40.0}}
    metrics = {
        "request_totals": {"successful": 2, "errored": 1, "incomplete": 0, "total": 3},
        "time_to_first_token_ms": {"successful": first},
        "output_token_count": {"successful": {"total_sum": 30.0}},
        "output_tokens_per_second": {"successful": {"mean": 15.0}},
        "turns": None,
    }
    requests = {"errored": [{"info": {"error": "it timed out"}}]}
    report = {"benchmarks": [{"metrics": metrics, "duration": 2.0, "requests": requests}]}
    (tmp_path / "r.json").write_text(json.dumps(report))
    found = read_guidellm(tmp_path / "r.json", PROBLEMS)
    assert (found["failed"], found["tokens_per_second"], found["first_ms"]) == (1, 15.0, 20.0)
    assert found["error"] == "it timed out"


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """The command with servers and tools that are not there; the runs that it makes."""
    made = []

    class Server:
        port = 1

        def __enter__(self):
            return self

        def __exit__(self, *exception):
            pass

        def check(self):
            pass

    def measure(tool, load, problems, options, folder):
        if len(made) == 3:
            made.append("stopped")
            raise KeyboardInterrupt
        made.append((tool, load.model, load.rate))
        assert len(load.prompts) == len(problems) == 16
        (folder / "r.json").write_text(json.dumps(SAID | {"num_prompts": 16}))
        return read_vllm(folder / "r.json", PROBLEMS)

    monkeypatch.setattr(command, "start", lambda name, *more: (Server(), name))
    monkeypatch.setattr(command, "measure", measure)
    return made


def run(tmp_path, *more):
    python = str(tmp_path / "python")
    (tmp_path / "python").touch()
    environments = ["--vllm-python", python, "--guidellm-python", python]
    given = [
        "--servers",
        "D2F",
        "vLLM",
        "--rates",
        "1",
        "2",
        "--seconds",
        "1",
        "--tools",
        "guidellm",
    ]
    return command.main([*given, *environments, "--output", str(tmp_path / "load.jsonl"), *more])


def test_it_goes_on_where_it_was_and_draws(measured, tmp_path, capsys):
    assert run(tmp_path) == 130
    assert not (tmp_path / "load.png").exists()
    assert run(tmp_path) == 0
    runs = [one for one in measured if one != "stopped"]
    assert [(model, rate) for _, model, rate in runs] == [
        ("D2F", 1.0), ("vLLM", 1.0), ("D2F", 2.0), ("vLLM", 2.0)
    ]  # fmt: skip
    assert (tmp_path / "load.png").stat().st_size > 10_000
    assert capsys.readouterr().out.count("requests/s") == 4 + 4
    assert run(tmp_path, "--seed", "5") == 2
    assert "another run: seed was 0, now 5" in capsys.readouterr().err


def test_an_environment_that_is_missing_is_an_error_before_anything_starts(tmp_path, capsys):
    given = ["--guidellm-python", str(tmp_path / "no"), "--output", str(tmp_path / "x" / "o.jsonl")]
    assert command.main(given) == 2
    assert capsys.readouterr().err.startswith("error: there is no ")
    assert not (tmp_path / "x").exists()


def test_both_models_cut_text_alike():
    """So that one tokenizer counts for all servers."""
    files = [Path(resolve(name), "tokenizer.json") for name in ("tiny-ar", "tiny-d2f")]
    first, second = (file.read_bytes() for file in files)
    assert first == second


@pytest.mark.slow
def test_the_servers_cost_is_measured_over_the_same_answers(tmp_path, capsys):
    file = tmp_path / "cost.json"
    sizes = ["--problems", "4", "--repeat", "2", "--in-flight", "1", "2"]
    assert serve_cost.main([*sizes, "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    ways = {(row["way"], row["in_flight"]) for row in report["measured"]}
    assert ways == {(way, users) for way in serve_cost.WAYS for users in (1, 2)}
    assert all(len(row["tokens_per_second"]) == 2 for row in report["measured"])
    assert capsys.readouterr().out.count("in flight") == 2


def test_sizes_that_cannot_be_measured_are_refused(capsys):
    assert serve_cost.main(["--repeat", "1"]) == 2
    assert capsys.readouterr().err.startswith("error: expected at least 1")
