"""`python -m decode.compare` from its configuration to its report, with a fake server of vLLM."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

import d2f
import decode
from d2f.errors import InputError
from d2f.tasks import make_problems
from decode.compare.__main__ import main, plan
from decode.compare.config import make_workloads, read_config
from decode.compare.report import ComparisonReport
from tests.comparison.conftest import make_fake_python
from tests.comparison.endpoint import answering, endpoint
from tests.comparison.test_server import gone

pytestmark = pytest.mark.xdist_group("compare")  # one worker, one set of its fixtures

ROOT = Path(__file__).parents[2]
FOUR_KINDS = [
    {"name": "base", "kind": "vllm", "model": "tiny-ar", "stream": False},
    {"name": "D2F", "kind": "ours", "model": "tiny-d2f", "threads": 1},
    {"name": "hf", "kind": "transformers", "model": "tiny-ar", "threads": 1},
]


def write(path, values):
    path.write_text(yaml.safe_dump(values))
    return str(path)


def configuration(folder, python, **more):
    values = {
        "output": str(folder / "out"),
        "entries": FOUR_KINDS,
        "tasks": ["story"],
        "problems": 3,
        "accuracy_problems": 5,
        "concurrency": [1, 2],
        "repetitions": 2,
        "warmup": 1,
        "vllm_python": python,
    }
    return values | more


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """(report, folder, what was printed) of one comparison of all four kinds of entries."""
    folder = tmp_path_factory.mktemp("compare")
    python = make_fake_python(folder)
    with endpoint(answering(lambda body: "#### 7")) as server:
        remote = {
            "name": "remote", "kind": "endpoint", "url": server.url, "model": "served",
            "tokenizer": "tiny-ar",
        }  # fmt: skip
        values = configuration(folder, python, entries=[*FOUR_KINDS, remote])
        command = [sys.executable, "-m", "decode.compare", "--config", "FILE", "--problems", "4"]
        command[4] = write(folder / "c.yaml", values)
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return ComparisonReport.load(folder / "out" / "report.json"), folder / "out", done.stdout


def test_every_entry_is_measured_alike(finished):
    report, _, _ = finished
    names = ["base", "D2F", "hf", "remote"]
    assert [(r.concurrency, r.entry) for r in report.speeds] == [
        (concurrency, name) for concurrency in (1, 2) for name in names
    ]
    assert all((r.repetitions, r.requests, r.failed) == (2, 4, 0) for r in report.speeds)
    assert all((a.problems, a.unstable) == (5, 0) for a in report.accuracies)


def test_every_repetition_has_all_entries_in_an_order_of_its_own(finished):
    runs = [r for r in finished[0].records if r.concurrency == 1 and r.repetition is not None]
    assert [r.repetition for r in runs] == 4 * [0] + 4 * [1]
    first, second = ([r.entry for r in runs if r.repetition == n] for n in (0, 1))
    assert sorted(first) == sorted(second) == ["D2F", "base", "hf", "remote"] and first != second


def test_a_run_has_at_least_its_waves(tmp_path):
    """And what it has more than `problems` is judged with it."""
    entry = {"name": "base", "kind": "transformers", "model": "tiny-ar"}
    for tasks, most in ((["story"], 12), ([str(file_of_seven(tmp_path))], 7)):
        values = configuration(tmp_path, "python", entries=[entry], tasks=tasks, waves=3)
        config = read_config(write(tmp_path / "c.yaml", values | {"concurrency": [1, 4]}))
        (workload,) = make_workloads(config)
        contestant = SimpleNamespace(entry=config.entries[0])
        runs = plan(config, [contestant], [workload])  # type: ignore[list-item]
        timed = {(r.concurrency, r.count) for r in runs if r.repetition is not None}
        assert timed == {(1, 3), (4, most)} and len(workload.items) == most
        assert all(r.warmup for r in runs if r.repetition is None)


def file_of_seven(folder):
    (folder / "data.jsonl").write_text('{"q": "1+2", "a": "3"}\n' * 7)
    path = folder / "seven.yaml"
    path.write_text("data: data.jsonl\nprompt: '{{ q }}'\nreference: '{{ a }}'\njudge: numeric\n")
    return path


def test_answers_are_those_of_decode_generate(finished):
    report, _, _ = finished
    problems = make_problems("story", "heldout", 5)
    prompts = [[{"role": "user", "content": p.question}] for p in problems]
    for entry, name, decoder in (
        ("D2F", "tiny-d2f", decode.D2F(max_new_tokens=64)),
        ("hf", "tiny-ar", decode.Autoregressive(max_new_tokens=64)),
    ):
        results = decode.generate(d2f.load(name, device="cpu"), prompts, decoder, batch_size=1)
        for record in report.records:
            if record.entry == entry:
                for answer in record.answers:
                    result = results[answer.item]
                    assert answer.text == result.text
                    assert answer.tokens == len(result.tokens)
                    assert answer.forwards == result.forwards


def test_the_report_says_what_a_reader_needs(finished):
    report, folder, printed = finished
    text = (folder / "report.md").read_text()
    for part in (
        "## story",
        "What was counted",
        "tokens/s",
        "python -m decode.compare",
        "0.0-fake",
    ):
        assert part in text
    for name in ("throughput.png", "throughput.svg", "frontier.png", "frontier.svg"):
        assert (folder / name).stat().st_size > 1000
    assert "fastest" in printed and str(folder) in printed
    assert report.about["config"]["problems"] == 4
    assert report.about["cut_short"] is None
    assert sorted(p.name for p in folder.iterdir()) == [
        "frontier.png", "frontier.svg", "logs", "report.json", "report.md", "throughput.png",
        "throughput.svg",
    ]  # fmt: skip


def test_memory_and_work_are_there_where_they_can_be_known(finished):
    rows = {(r.entry, r.concurrency): r for r in finished[0].speeds}
    assert rows["D2F", 1].peak_bytes > 50 * 2**20
    assert rows["remote", 1].peak_bytes is None and rows["remote", 1].forwards is None
    assert rows["base", 1].forwards == 9  # what the fake counts
    assert rows["base", 1].first is None and rows["remote", 1].first is not None
    assert rows["D2F", 1].tokens_per_forward == rows["D2F", 2].tokens_per_forward
    assert rows["D2F", 2].tokens_per_call > rows["D2F", 1].tokens_per_call
    assert rows["D2F", 1].prefill <= rows["D2F", 1].first <= rows["D2F", 1].finished


def test_a_report_is_not_overwritten(finished, capsys):
    _, folder, _ = finished
    before = (folder / "report.json").read_bytes()
    assert main(["--config", str(folder.parent / "c.yaml"), "--entries", str(FOUR_KINDS[1:2])]) == 2
    assert "holds a report" in capsys.readouterr().err
    assert (folder / "report.json").read_bytes() == before


def test_a_server_that_dies_at_work_is_quoted_and_the_rest_is_kept(
    tmp_path, fake_python, monkeypatch, capsys
):
    monkeypatch.setenv("FAKE", "dies at work")
    with endpoint(answering()) as server:
        remote = {
            "name": "remote", "kind": "endpoint", "url": server.url, "model": "served",
            "tokenizer": "tiny-ar",
        }  # fmt: skip
        path = write(
            tmp_path / "c.yaml",
            configuration(
                tmp_path, fake_python, entries=[remote, FOUR_KINDS[0]], retries=0, figures=False
            ),
        )
        assert main(["--config", path]) == 2
    said = capsys.readouterr().err
    assert "ended with status 7" in said and "worker: out of memory" in said
    assert gone(tmp_path / "out" / "logs" / "base.log")


def test_an_interrupt_stops_the_server_and_keeps_what_was_measured(tmp_path, fake_python):
    slow = answering(pause=0.05)
    with endpoint(slow) as server:
        remote = {
            "name": "remote", "kind": "endpoint", "url": server.url, "model": "served",
            "tokenizer": "tiny-ar",
        }  # fmt: skip
        values = configuration(
            tmp_path, fake_python, entries=[FOUR_KINDS[0], remote], repetitions=500, figures=False
        )
        command = [sys.executable, "-m", "decode.compare", "--config"]
        command.append(write(tmp_path / "c.yaml", values))
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
        )
        ledger = tmp_path / "out" / "measurements.jsonl"
        until = time.monotonic() + 60
        while time.monotonic() < until and not (
            ledger.is_file() and len(ledger.read_bytes().splitlines()) > 3
        ):
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGTERM)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert gone(tmp_path / "out" / "logs" / "base.log")
    report = ComparisonReport.load(tmp_path / "out" / "report.json")
    assert report.speeds and report.about["cut_short"]
    assert "Cut short" in (tmp_path / "out" / "report.md").read_text()


def changed(**more):
    return {"output": "o", "entries": FOUR_KINDS, "tasks": ["story"]} | more


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (changed(tasks=[]), "exactly one of tasks and prompts_file"),
        (changed(tasks=["chess"]), "expected a task among story"),
        (changed(problem=3), "problem: there is no such key"),
        (changed(concurrency=[2, 1]), "concurrency must rise"),
        (changed(concurrency=[]), "concurrency"),
        (changed(baseline="none"), "baseline must be one of base, D2F, hf"),
        (changed(entries=[]), "entries"),
        (changed(entries=[{"name": "a", "kind": "tgi", "model": "m"}]), "kind|tag"),
        (changed(entries=[FOUR_KINDS[1], FOUR_KINDS[1]]), "two entries have one name"),
        (changed(entries=[FOUR_KINDS[1] | {"config": "no-{task}.yaml"}]), "no-story.yaml"),
        (changed(entries=[FOUR_KINDS[0] | {"shares": "x"}]), "shares must name an earlier entry"),
        (changed(repetitions="two"), "repetitions"),
    ],
)
def test_a_bad_configuration_is_refused(tmp_path, values, said):
    with pytest.raises(InputError, match=said):
        read_config(write(tmp_path / "c.yaml", values))


def test_flags_reach_every_key(tmp_path):
    path = write(tmp_path / "c.yaml", changed())
    flags = [
        "--concurrency", "[1, 4]", "--entries.D2F.options.tau_conf", "0.5",
        "--entries.0.model", "m",
        "--limits.silence", "3.5", "--vllm-python", "py",
    ]  # fmt: skip
    config = read_config(path, flags)
    assert config.concurrency == (1, 4)
    assert config.entries[1].options == {"tau_conf": 0.5}
    assert config.entries[0].model == "m"
    assert (config.limits.silence, config.vllm_python) == (3.5, "py")
    with pytest.raises(InputError, match="expected one of base, D2F, hf or a number"):
        read_config(path, ["--entries.vLLM.model", "m"])


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"options": {"tau": 1}}, "no option tau"),
        ({"options": {"tau_conf": 2.0}}, "tau_conf must lie in"),
        ({"model": "nowhere"}, "nowhere"),
        ({"decoder": "autoregressive"}, "autoregressive"),
    ],
)
def test_an_entry_that_cannot_run_is_an_error_before_any_measurement(tmp_path, entry, said, capsys):
    values = changed(
        output=str(tmp_path / "out"), entries=[FOUR_KINDS[1] | entry], figures=False,
    )  # fmt: skip
    assert main(["--config", write(tmp_path / "c.yaml", values)]) == 2
    error = capsys.readouterr().err
    assert said in error and "Traceback" not in error
    assert not (tmp_path / "out" / "report.json").exists()


def test_prompts_of_your_own(tmp_path, fake_python):
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"Say {i}."}) + "\n" for i in range(2)))
    values = configuration(
        tmp_path, fake_python, entries=FOUR_KINDS[:1], tasks=[], prompts_file=str(prompts),
        max_new_tokens=8, stop=["####"], figures=False,
    )  # fmt: skip
    assert main(["--config", write(tmp_path / "c.yaml", values)]) == 0
    report = ComparisonReport.load(tmp_path / "out" / "report.json")
    assert report.workloads == ["prompts"] and report.accuracies == []
    answers = [a for record in report.records for a in record.answers]
    assert {a.text for a in answers} == {"3+4=7\n"}  # cut before the stop string
    assert {a.right for a in answers} == {None}


def test_the_shipped_configuration_is_read():
    text = (ROOT / "configs" / "comparison" / "compare-tiny.yaml").read_text()
    assert yaml.safe_load(text)["entries"][0]["kind"] == "vllm"
    read_config(ROOT / "configs" / "comparison" / "compare-tiny.yaml")
