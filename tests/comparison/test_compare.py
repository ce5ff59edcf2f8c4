"""`python -m decode.compare` from its configuration to its report, with a fake server of vLLM."""

import json
import os
import signal
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

import d2f
import decode
from benchmarks import tables
from d2f.errors import InputError
from d2f.tasks import make_problems
from decode.compare import local
from decode.compare.__main__ import main, measure, plan
from decode.compare.config import Transformers, identity, make_workloads, read_config
from decode.compare.local import Worker
from decode.compare.report import Report
from decode.compare.results import Answer, Run
from decode.display import ShownProgress
from decode.ledger import Ledger
from tests.comparison.conftest import make_fake_python
from tests.comparison.endpoint import answering, endpoint
from tests.comparison.test_server import gone

pytestmark = pytest.mark.xdist_group("compare")  # one worker, one set of its fixtures

ROOT = Path(__file__).parents[2]
BASE = {"name": "base", "kind": "vllm", "model": "tiny-ar", "stream": False}
SWEPT = {
    "name": "D2F", "kind": "ours", "model": "tiny-d2f", "threads": 1,
    "sweep": {"tau_conf": [0.5, 0.9]},
}  # fmt: skip
HF = {"name": "hf", "kind": "transformers", "model": "tiny-ar", "threads": 1}
NAMES = ["base", "D2F tau_conf 0.5", "D2F tau_conf 0.9", "hf", "remote"]


def remote(url):
    return {
        "name": "remote", "kind": "endpoint", "url": url, "model": "served", "tokenizer": "tiny-ar",
    }  # fmt: skip


def write(folder, **values):
    path = folder / "c.yaml"
    path.write_text(yaml.safe_dump(values))
    return str(path)


def configuration(folder, python, entries, **more):
    values = {
        "output": str(folder / "out"),
        "entries": entries,
        "tasks": ["story"],
        "problems": 2,
        "accuracy_problems": 4,
        "repetitions": 2,
        "warmup": 1,
        "vllm_python": python,
        "figures": False,
    }
    return write(folder, **values | more)


def load(folder):
    """The rows of summary.json, which leaves out what is unknown."""
    values = json.loads((folder / "out" / "summary.json").read_text())
    return Report(**values)


def records(folder):
    lines = map(json.loads, (folder / "out" / "measurements.jsonl").read_text().splitlines())
    return [Run.from_json(run) for line in lines for run in line.get("runs", ())]


class Here:
    """A worker in this process: starting one takes seconds. Those of transformers stay as they
    are."""

    def __new__(cls, entries, verbose):
        if isinstance(entries[0], Transformers):
            return Worker(entries, verbose)
        return super().__new__(cls)

    def __init__(self, entries, verbose):
        self.facts = local._load_runners(entries)

    def run(self, name, prepared, concurrency):
        return local._run(name, prepared, concurrency)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass


def test_a_process_that_computes_nothing_ends_itself(monkeypatch):
    """One that is killed leaves semaphores of its libraries, and Python warns of them."""
    monkeypatch.setattr(local, "_load_runners", len)
    with Worker([SimpleNamespace(name="one")]) as worker:
        (process,) = worker._pool._processes.values()
    assert process.exitcode == 0


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of one comparison of all kinds of entries, and what was printed."""
    folder = tmp_path_factory.mktemp("compare")
    with endpoint(answering(lambda body: "#### 7")) as server, pytest.MonkeyPatch.context() as m:
        m.setattr("sys.stdout", out := (folder / "printed").open("w+"))
        m.setattr("decode.compare.entries.Worker", Here)
        m.setattr("decode.plots.DPI", 40)
        entries = [BASE, SWEPT, HF, remote(server.url)]
        python = make_fake_python(folder)
        path = configuration(folder, python, entries, concurrency=[1, 2], figures=True)
        assert main(["--config", path, "--problems", "3"]) == 0
        out.seek(0)
        return folder, out.read()


def test_prompt_lookup_of_transformers_takes_one_at_a_time(tmp_path):
    config = read_config(
        configuration(tmp_path, "none", [HF, HF | {"prompt_lookup": 4, "name": "l"}])
    )
    (workload,) = make_workloads(config)
    prompts = [
        local.tokenizer_of("tiny-ar").apply_chat_template(
            [{"role": "user", "content": problem.question}], add_generation_prompt=True
        )["input_ids"]
        for problem in make_problems("sudoku", "heldout", 3)
    ]
    plain, drafted = (
        local.TransformersRunner(entry).run(local.Prepared(workload, prompts), 2)
        for entry in config.entries
    )
    assert [a.text for a in drafted.answers] == [a.text for a in plain.answers]
    assert [a.forwards < a.own_tokens for a in drafted.answers] == 3 * [True]
    assert drafted.calls == sum(a.forwards for a in drafted.answers)


def test_every_entry_is_measured_alike(finished):
    report = load(finished[0])
    assert [(r["concurrency"], r["entry"]) for r in report.speeds] == [
        (concurrency, name) for concurrency in (1, 2) for name in NAMES
    ]
    keys = "repetitions", "requests", "failed"
    assert all([r[key] for key in keys] == [2, 3, 0] for r in report.speeds)
    assert all((a["problems"], a["unstable"]) == (4, 0) for a in report.accuracies)
    # Each repetition has an order of its own.
    runs = [r for r in records(finished[0]) if r.concurrency == 1 and r.repetition is not None]
    assert [r.repetition for r in runs] == 5 * [0] + 5 * [1]
    first, second = ([r.entry for r in runs if r.repetition == n] for n in (0, 1))
    assert sorted(first) == sorted(second) == sorted(NAMES) and first != second


def test_answers_are_those_of_decode_generate(finished):
    problems = make_problems("story", "heldout", 4)
    prompts = [[{"role": "user", "content": p.question}] for p in problems]
    for entry, name, decoder in (
        ("D2F tau_conf 0.9", "tiny-d2f", decode.D2F(max_new_tokens=64)),
        ("hf", "tiny-ar", decode.Autoregressive(max_new_tokens=64)),
    ):
        results = decode.generate(d2f.load(name, device="cpu"), prompts, decoder, batch_size=1)
        own = [record for record in records(finished[0]) if record.entry == entry]
        assert len(own) == 5
        for answer in (answer for record in own for answer in record.answers):
            result = results[answer.item]
            assert answer.text == result.text
            assert answer.tokens == len(result.tokens)
            assert answer.forwards == result.forwards
            assert 0 <= answer.submitted < answer.prefill <= answer.first <= answer.finished


def test_the_report_says_what_a_reader_needs(finished, monkeypatch):
    folder, printed = finished
    report, out = load(folder), folder / "out"
    text = (out / "report.md").read_text()
    for part in ("## story", "What was counted", "tokens/s", "decode.compare", "0.0-fake"):
        assert part in text
    assert "fastest" in printed and str(out) in printed
    assert report.about["config"]["problems"] == 3 and report.about["cut_short"] is None
    for key in ("date", "device", "versions", "command", "baseline", "tokenizer"):
        assert report.about[key], key
    names = [n + of for n in ("frontier", "forwards", "throughput") for of in ("", "-dark")]
    figures = {f"{name}.{kind}" for name in names for kind in ("png", "svg")}
    files = {path.name for path in out.iterdir() if path.stat().st_size > 1000}
    assert {*figures, "report.md", "summary.json", "measurements.jsonl", "logs"} == files
    # What is known of the work, and what a server or an endpoint cannot tell.
    rows = {(r["entry"], r["concurrency"]): r for r in report.speeds}
    bold, shy = (row for row in report.speeds if row.get("series") and row["concurrency"] == 1)
    assert bold["tokens_per_forward"] > shy["tokens_per_forward"]
    decoder = report.about["entries"][bold["entry"]]["decoder"]["story"]
    assert decoder["decoder"] == "d2f" and decoder["tau_conf"] == 0.5
    base, remote, hf = rows["base", 1], rows["remote", 1], rows["hf", 1]
    assert hf["peak_bytes"] > 50 * 2**20 and base["peak_bytes"]
    assert not remote.keys() & {"peak_bytes", "forwards", "tokens_per_call"}
    assert base["forwards"] == 9 and "tokens_per_call" not in base
    assert hf["tokens_per_call"] == pytest.approx(hf["tokens_per_forward"], rel=1e-4)
    assert rows["hf", 2]["tokens_per_call"] > hf["tokens_per_call"]
    # As the tables of the README read it.
    monkeypatch.setattr("benchmarks.tables.RESULTS", folder)
    again = tables.load("out")
    assert again.workloads == ["story"] and tables.right(again, "hf", "story")[1] == 4
    assert list(tables.speeds_at(again, "story", 2)) == NAMES


def test_another_comparison_into_the_same_folder_is_refused(finished, capsys):
    folder = finished[0]
    before = (folder / "out" / "measurements.jsonl").read_bytes()
    argument = ["--config", str(folder / "c.yaml"), "--problems", "3", "--figures", "false"]
    with endpoint(answering()) as server:  # the old one is gone: the endpoint must be there
        assert main([*argument, "--entries.remote.url", server.url]) == 2
    assert "entries.remote.url was" in capsys.readouterr().err
    assert (folder / "out" / "measurements.jsonl").read_bytes() == before


# Failures.


@pytest.mark.parametrize("first", ["honest", "failing"])
def test_one_with_failed_requests_is_never_ranked(tmp_path, capsys, first):
    """A request that fails is answered quickly: fast, and no winner."""

    def fail(handler, body, number):
        good = answering(lambda body: "#### 7", pause=0.0)
        handler.send(400, "no") if number % 3 == 1 else good(handler, body, number)

    with endpoint(answering(lambda b: "#### 7", pause=0.03)) as a, endpoint(fail) as b:
        both = [remote(a.url) | {"name": "honest"}, remote(b.url) | {"name": "failing"}]
        path = configuration(tmp_path, "none", both, baseline=first, accuracy_problems=0)
        assert main(["--config", path]) == 1
    assert "of failing failed, it is not ranked" in capsys.readouterr().err
    report = load(tmp_path)
    assert [f["entry"] for f in report.failures] == ["failing"]
    assert {r["entry"] for r in report.ranked} == {"honest"}
    text = (tmp_path / "out" / "report.md").read_text()
    assert "**honest** is fastest" in text and "(not ranked)" in text
    assert "faster" not in text and "times" not in text.split("## What was counted")[0]


def test_one_that_answers_nothing_or_dies_has_failed(tmp_path, fake_python, capsys):
    with endpoint(lambda handler, body, number: handler.send(400, "no")) as server:
        path = configuration(tmp_path, "none", [remote(server.url)])
        assert main(["--config", path]) == 2
    assert "entry remote has failed: not one of 1 requests" in capsys.readouterr().err
    dying, other = BASE | {"env": {"FAKE": "dies at work"}}, tmp_path / "other"
    other.mkdir()
    assert main(["--config", configuration(other, fake_python, [dying], retries=0)]) == 2
    said = capsys.readouterr().err
    assert "ended with status 7" in said and "worker: out of memory" in said
    assert gone(other / "out" / "logs" / "base.log")


# Stopped, and going on.


def test_a_stopped_comparison_goes_on(tmp_path, fake_python):
    """Stopped in the endpoint's run of the second repetition, which comes again as a whole: its
    entries are compared with each other, and are measured in one go."""
    stopped, good = [], answering(lambda body: "#### 7")

    def behave(handler, body, count):
        if count == 3 and not stopped:  # the warm-up of its second repetition
            stopped.append(count)
            os.kill(os.getpid(), signal.SIGTERM)
        good(handler, body, count)

    out = tmp_path / "out"
    with endpoint(behave) as server:
        path = configuration(tmp_path, fake_python, [BASE, remote(server.url)])
        assert main(["--config", path]) == 130
        assert gone(out / "logs" / "base.log")
        assert load(tmp_path).about["cut_short"] == "interrupted"
        assert "Cut short" in (out / "report.md").read_text()
        assert [(r.repetition) for r in records(tmp_path)] == [0, 0]
        with (out / "measurements.jsonl").open("a") as file:
            file.write('{"id": "story 1 1", "ru')  # and a kill within a line
        asked = len(server.bodies)
        assert main(["--config", path]) == 0
        assert len(server.bodies) - asked == 1 + 2 + 4  # not what was kept
    report = load(tmp_path)
    assert len(report.about["starts"]) == 2 and report.about["cut_short"] is None
    assert "**Resumed:** measured in 2 goes" in (out / "report.md").read_text()
    runs = sorted((str(r.repetition), r.entry) for r in records(tmp_path))
    assert runs == [(n, e) for n in ("0", "1", "None") for e in ("base", "remote")]


class Fake:
    """An entry that answers at once. seen: notes who ran, in order."""

    def __init__(self, name, seen):
        self.name, self.seen = name, seen

    def run(self, workload, count, concurrency):
        self.seen.append((self.name, count))
        return Run([Answer(i, text="#### 7", finished=1.0) for i in range(count)], 1.0)


def test_the_runs_of_a_comparison(tmp_path, monkeypatch):
    """Warm-up as wide as the run, calm between entries, timed problems by waves, accuracy last; and
    what is done is left out."""
    seen = []
    monkeypatch.setattr("decode.compare.entries.wait_for_calm", lambda: seen.append("calm"))
    config = read_config(
        configuration(
            tmp_path, "none", [HF, HF | {"name": "b"}], waves=2, concurrency=[1, 2], repetitions=1,
            accuracy_problems=6,
        )
    )  # fmt: skip
    (workload,) = workloads = make_workloads(config)
    contestants = {name: Fake(name, seen) for name in ("hf", "b")}
    words = lambda texts, **_: {"input_ids": [text.split() for text in texts]}  # noqa: E731
    show = ShownProgress(None, "runs")
    steps = plan(config, workloads)
    with Ledger(tmp_path / "m.jsonl", {"seed": 0}) as ledger:
        measure(steps, contestants, words, ledger, show, config.warmup)
        assert plan(config, workloads, ledger.rows) == []
    runs = [one for one in seen if one != "calm"]
    assert sorted(runs[:4]) == [("b", 1), ("b", 2), ("hf", 1), ("hf", 2)]  # warm-up, then 2 timed
    assert sorted(runs[4:8]) == [("b", 2), ("b", 4), ("hf", 2), ("hf", 4)]
    assert runs[8:] == [("hf", 6), ("b", 6)] and len(workload.items) == 6
    for before, now in pairwise(seen):  # calm where another entry's turn comes, and nowhere else
        assert (before == "calm" or now == "calm") or before[0] == now[0]
    assert seen[0] == "calm" and 5 <= seen.count("calm") <= 6


# Configurations.


OURS = {"name": "D2F", "kind": "ours", "model": "tiny-d2f"}


def changed(**more):
    return {"output": "o", "entries": [BASE, OURS, HF], "tasks": ["story"]} | more


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (changed(tasks=[]), "exactly one of tasks and prompts_file"),
        (changed(tasks=["chess"]), "no task or task file 'chess'"),
        (changed(concurrency=[2, 1]), "concurrency must rise"),
        (changed(baseline="none"), "baseline: got 'none'; expected one of base, D2F, hf"),
        (changed(entries=[OURS, OURS]), "two entries have one name"),
        (changed(entries=[OURS | {"config": "no-{task}.yaml"}]), "no-story.yaml"),
        (changed(entries=[BASE | {"shares": "x"}]), "shares must name an earlier entry"),
        (changed(entries=[SWEPT, OURS | {"name": "x", "shares": "D2F"}]), "shares must name"),
        (
            changed(entries=[OURS, HF | {"kind": "ours", "name": "x", "shares": "D2F"}]),
            "its model must be 'tiny-d2f'",
        ),
        (changed(entries=[SWEPT | {"sweep": {"a": [1], "b": [2]}}]), "sweep: expected at most 1"),
        (changed(entries=[SWEPT | {"sweep": {"tau_conf": [0.5, 0.5]}}]), "two entries have one"),
        (changed(entries=[SWEPT | {"sweep": {"tau": [1]}, "decoder": "d2f"}]), "D2F tau 1"),
    ],
)  # fmt: skip
def test_a_bad_configuration_is_refused(tmp_path, values, said):
    with pytest.raises(InputError, match=said):
        read_config(write(tmp_path, **values))


def test_flags_reach_every_key(tmp_path):
    flags = ["--concurrency", "[1, 4]", "--entries.D2F.options.tau_conf", "0.5"]
    flags += ["--entries.0.model", "m", "--limits.silence", "3.5", "--vllm-python", "py"]
    config = read_config(write(tmp_path, **changed()), flags)
    assert config.concurrency == (1, 4)
    assert config.entries[1].options == {"tau_conf": 0.5}
    assert config.entries[0].model == "m"
    assert (config.limits.silence, config.vllm_python) == (3.5, "py")


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"options": {"tau": 1}}, "no option tau"),
        ({"options": {"tau_conf": 2.0}}, "tau_conf must lie in"),
        ({"model": "tiny-d2"}, "did you mean tiny-d2f?"),
        ({"decoder": "autoregressive"}, "autoregressive"),
    ],
)
def test_an_entry_that_cannot_run_is_an_error_before_any_measurement(tmp_path, entry, said, capsys):
    assert main(["--config", configuration(tmp_path, "none", [OURS | entry])]) == 2
    error = capsys.readouterr().err
    assert said in error and "Traceback" not in error
    assert not (tmp_path / "out").exists()


def test_prompts_of_your_own(tmp_path, fake_python):
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"Say {i}."}) + "\n" for i in range(2)))
    own = {"tasks": [], "prompts_file": str(prompts), "max_new_tokens": 8, "stop": ["####"]}
    assert main(["--config", configuration(tmp_path, fake_python, [BASE], **own)]) == 0
    report = load(tmp_path)
    assert report.workloads == ["prompts"] and report.accuracies == []
    answers = [answer for record in records(tmp_path) for answer in record.answers]
    assert {a.text for a in answers} == {"3+4=7\n"}  # cut before the stop string
    assert {a.right for a in answers} == {None}


def test_settings_machine_prompts_and_models_decide(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    options = tmp_path / "options.yaml"
    options.write_text("tau_conf: 0.9\n")
    ours = OURS | {"model": str(model), "config": str(options)}
    path = write(tmp_path, **changed(entries=[ours]))

    def found(*flags, question="1+1", device="x"):
        item = SimpleNamespace(id="1", prompt=question)
        about = {"device": device, "versions": {"torch": "1"}}
        config = read_config(path, flags)
        return json.loads(json.dumps(identity(config, [SimpleNamespace(items=[item])], about)))

    def different(*flags, **more):
        now = found(*flags, **more)
        return {key for key in before.keys() | now.keys() if before.get(key) != now.get(key)}

    before = found()
    assert different("--output", "p", "--figures", "false") == set()
    assert different("--seed", "1", "--limits.silence", "3") == {"seed", "limits.silence"}
    assert different("--entries.D2F.options.tau_add", "0.1") == {
        "entries.D2F.options", "entries.D2F.options.tau_add",
    }  # fmt: skip
    assert different(question="1+2", device="y") == {"prompts", "device"}
    options.write_text("tau_conf: 0.8\n")
    assert different() == {f"content of {options}"}
    (model / "config.json").write_text("{ }")
    assert different() == {f"content of {options}", f"files of {model}"}
