"""A decoder of one's own by a dotted name (tests/random_k.py): every command takes it, with its
options as flags and keys, its labels and its search values, and nothing else knows of it."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from rich.console import Console
from tiny import random_model

import decode
from d2f.errors import InputError
from decode import evaluate, pipeline, tune
from decode.decoders import DECODERS, as_decoder, find_decoder, spelled

ROOT = Path(__file__).parent.parent
NAME = "random_k:RandomK"
STORY = ["--model", "tiny-teacher", "--tasks", "story", "--problems", "2"]


@pytest.fixture
def working(tmp_path, monkeypatch):
    """A folder that has the file, as a user's would."""
    shutil.copy(ROOT / "tests" / "random_k.py", tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def command(module, *arguments):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-m", module, *arguments]
    return subprocess.run(line, env=environment, capture_output=True, text=True, timeout=300)


def test_the_pipeline_decodes_with_it_and_goes_on_with_it(working):
    line = ["--decoder", NAME, "--k", "3", "--no-shuffle", *STORY, "--output", "out.jsonl"]
    done = command("decode.pipeline", *line)
    assert done.returncode == 0, done.stderr
    header, *results = map(json.loads, Path("out.jsonl").read_text().splitlines())
    assert header["run"]["decoder"] == NAME and header["run"]["options"]["k"] == 3
    for result in results:
        assert result["forwards"] >= len(result["tokens"]) / 3
    before = Path("out.jsonl").read_text()
    assert command("decode.pipeline", *line).returncode == 0
    assert Path("out.jsonl").read_text() == before
    other = command("decode.pipeline", *line, "--k", "4")
    assert other.returncode == 2 and "is the output of another run: options was" in other.stderr


def test_a_file_names_it_and_its_options(working):
    Path("mine.yaml").write_text(f"decoder: {NAME}\nk: 4\nblock_size: 8\n")
    done = command("decode.pipeline", "--config", "mine.yaml", *STORY, "--output", "out.jsonl")
    assert done.returncode == 0, done.stderr
    run = json.loads(Path("out.jsonl").read_text().splitlines()[0])["run"]
    assert (run["decoder"], run["options"]["k"], run["options"]["block_size"]) == (NAME, 4, 8)


def test_evaluate_takes_it(working):
    done = command("decode.evaluate", "--decoder", NAME, "--k", "4", *STORY, "--json", "r.json")
    assert done.returncode == 0, done.stderr
    report = json.loads(Path("r.json").read_text())
    assert report["settings"] == {"k": 4}
    assert 0 < report["rows"][0]["tokens_per_forward"] <= 4


def test_tune_searches_its_values_and_writes_what_the_pipeline_takes(working):
    few = "--model tiny-teacher --problems 2 --heldout 2 --repetitions 1 --no-figures".split()
    done = command("decode.tune", "--decoder", NAME, "--tasks", "story", *few, "--output", "tuned")
    assert done.returncode == 0, done.stderr
    lines = Path("tuned/measurements.jsonl").read_text().splitlines()[1:]
    assert {json.loads(line)["setting"]["k"] for line in lines} == {2, 4}
    config = "tuned/tiny-teacher-story.yaml"
    chosen = yaml.safe_load(Path(config).read_text())
    assert chosen["decoder"] == NAME and chosen["k"] in (2, 4)
    assert command("decode.pipeline", "--config", config, *STORY).returncode == 0


def test_compare_has_it_as_an_entry(working):
    ours = {"kind": "ours", "model": "tiny-teacher", "threads": 1}
    entries = [
        {"name": "one by one", **ours, "decoder": "static"},
        {"name": "mine", **ours, "decoder": NAME, "options": {"k": 4}},
    ]
    values = {
        "output": "compared", "entries": entries, "tasks": ["story"], "problems": 2,
        "accuracy_problems": 2, "repetitions": 1, "warmup": 1, "figures": False,
    }  # fmt: skip
    Path("c.yaml").write_text(yaml.safe_dump(values))
    done = command("decode.compare", "--config", "c.yaml")
    assert done.returncode == 0, done.stderr
    report = json.loads(Path("compared/report.json").read_text())
    facts = report["about"]["entries"]["mine"]["decoder"]["story"]
    assert (facts["decoder"], facts["k"]) == (NAME, 4)


def test_its_labels_are_shown_and_its_flags_are_in_the_help(working, capsys):
    console = Console(file=io.StringIO(), force_terminal=True, width=90, height=30)
    line = ["--decoder", NAME, *STORY, "--problems", "1", "--pause", "0.001"]
    assert pipeline.main(line, console) == 0
    assert "drawing" in console.file.getvalue()
    with pytest.raises(SystemExit):
        pipeline.main(["--decoder", NAME, "--help"])
    assert "random_k: tokens a forward, drawn at random" in " ".join(
        capsys.readouterr().out.split()
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('batch_size: int = option(2, "x")', "--batch-size is one of the command already"),
        ('k: list[int] = option(2, "x")', "the option k of a decoder must be annotated as int"),
    ],
)
def test_an_option_that_cannot_be_a_flag_is_named(working, capsys, line, message):
    own = f"@dataclass(frozen=True)\nclass Own(RandomK):\n    name = 'own'\n    {line}\n"
    module = f"own_{len(line)}"  # modules stay imported from one test to the next
    (working / f"{module}.py").write_text(f"from random_k import *\n{own}")
    for main in (pipeline.main, evaluate.main):
        assert main(["--decoder", f"{module}:Own", *STORY]) == 2
        assert message in capsys.readouterr().err
    assert tune.main(["--decoder", f"{module}:Own", "--tasks", "story", "--output", "out"]) == 2
    assert message in capsys.readouterr().err and not Path("out").exists()


def test_python_takes_the_name_and_the_class(working):
    kind = find_decoder(NAME)
    assert spelled(kind) == NAME and spelled(decode.Static) == "static"
    assert as_decoder(NAME, random_model("llada").contract) == kind()
    with pytest.raises(InputError, match="k must be a whole number of at least 1, got 0"):
        kind(k=0)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("random_j:RandomK", "cannot be imported: ModuleNotFoundError: No module named 'random_j'"),
        ("random_k:RandomJ", "cannot be imported: AttributeError"),
        ("random_k:RandomKSession", "expected a subclass of decode.Decoder that has a name"),
        ("broken:Any", "cannot be imported: ZeroDivisionError"),
        ("beam", f"must be one of {', '.join(DECODERS)}, got 'beam'"),
    ],
)
def test_one_that_cannot_be_had_is_named_with_the_reason(working, name, message, capsys):
    (working / "broken.py").write_text("1 / 0\n")
    assert pipeline.main(["--decoder", name, *STORY]) == 2
    assert message in capsys.readouterr().err
