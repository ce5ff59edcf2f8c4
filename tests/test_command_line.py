"""The command line: what may be said, help without torch, mistakes that are one line before any
work, how a command ends, and its status."""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import re
import subprocess
import sys
import time
from contextlib import redirect_stderr
from pathlib import Path

import numpy as np
import pytest
import torch

import d2f
from d2f import command as command_line
from d2f import flags
from d2f.command import COMMANDS, command, main
from d2f.errors import InputError, NonFiniteLogitsError, OutputError
from decode import batch, evaluate, pipeline, record_states, tune
from decode import serve as serving
from decode.compare import __main__ as compare
from decode.decoders import DECODERS
from decode.decoders.base import options_of
from decode.server import options as serve
from distill import convert, info, rollouts, train
from distill.data import __main__ as data

ROOT = Path(__file__).parent.parent
HEAVY = ("torch", "transformers", "accelerate", "peft", "triton", "datasets")


def started(code: str) -> list[str]:
    """The lines that a fresh Python prints."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


def test_version_and_help_list_the_commands(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"d2f-toolkit {d2f.__version__}\n"
    assert (main(["--help"]), main([])) == (0, 2)
    said = capsys.readouterr().out
    assert all(said.count(f"\n  {name} ") == 2 for name in COMMANDS)


def test_every_help_begins_with_examples_and_comes_without_torch():
    code = f"""
import sys
import d2f, decode, distill, triton_kernels, decode.decoders, decode.batch
from d2f.command import COMMANDS, main
decoders = [["decode", "--decoder", name] for name in decode.decoders.DECODERS]
for words in [*map(str.split, COMMANDS), *decoders]:
    sys.argv[1:] = [*words, "--help"]
    print("command:", *words)
    try: main()
    except SystemExit as end: assert not end.code
    print("heavy:", *set(sys.modules) & set({HEAVY}))
"""
    for said in "\n".join(started(code)).split("command: ")[1:]:
        words, *lines, heavy = said.strip().splitlines()
        assert heavy == "heavy:"
        if words != "lm-eval":  # that of another library
            name = words.split()[0]
            assert lines[0].startswith(f"usage: d2f {name} ") and lines[2] == "examples:"
            assert all(name in line for line in lines[3:5])
        assert len(lines) <= 2 * 50, "two screens"
        own = re.findall(r"^│ (--[\w-]+)", said, flags=re.MULTILINE)
        if words.startswith("decode"):
            assert ("--tau-add" in own) == words.endswith(" d2f")


def test_bash_completes_commands_and_flags():
    """And values, by the script that `d2f --tyro-print-completion bash` prints."""
    script = subprocess.run(
        [sys.executable, "-m", "d2f", "--tyro-print-completion", "bash"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    for words, found in {
        "d2f ev": "evaluate",
        "d2f decode --tau-": "--tau-add --tau-act --tau-conf --tau-revoke",
        "d2f decode --dtype bf": "bfloat16 bf16",
    }.items():
        count = len(words.split()) - 1
        line = f"COMP_WORDS=({words}); COMP_CWORD={count}; _tyro_d2f; echo ${{COMPREPLY[@]}}"
        done = subprocess.run(["bash"], input=f"{script}\n{line}", capture_output=True, text=True)
        assert set(done.stdout.split()) == set(found.split())


def test_a_command_gets_its_words_and_gives_its_status(monkeypatch, capsys):
    monkeypatch.setattr(command_line, "_called_as", None)
    monkeypatch.setattr("sys.argv", ["d2f"])
    assert main(["configs", "tiny-d2f"]) == 0
    assert capsys.readouterr().out == f"{ROOT}/configs/training/tiny-d2f.yaml\n"
    assert main(["decode", "--batch-size", "0"]) == 2
    assert capsys.readouterr().err == "error: --batch-size must be at least 1, got 0\n"
    assert main(["deocde"]) == 2
    assert "no command 'deocde'; did you mean decode?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (None, 0, ""),
        (InputError("bad"), 2, "error: bad\n"),
        (OutputError("full"), 2, "error: full\n"),
        (FloatingPointError("of this command"), 2, "error: of this command\n"),
        (NonFiniteLogitsError("nan"), 1, "error: nan\n"),
        (OSError(28, "No space left on device"), 1, "error: [Errno 28] No space left on device\n"),
        (KeyboardInterrupt(), 130, "stopped, it goes on\n"),
    ],
)
def test_what_is_raised_is_a_line_and_a_status(capsys, monkeypatch, error, status, said):
    @command(FloatingPointError, interrupted="stopped, it goes on")
    def main():
        if error is not None:
            raise error

    assert main() == status
    assert capsys.readouterr().err == said
    if status == 130:  # of several processes one says it
        monkeypatch.setenv("RANK", "1")
        assert (main(), capsys.readouterr().err) == (130, "")


@pytest.mark.parametrize(
    ("fails", "said"),
    [
        (lambda: torch.zeros(10**15), "can't allocate memory: you tried to allocate 4000000000000"),
        (lambda: np.zeros(10**15), "Unable to allocate"),
        (lambda: raised(torch.OutOfMemoryError("CUDA out of memory. Tried\nmore")), "CUDA out of"),
    ],
)
def test_too_little_memory_is_a_line(capsys, fails, said):
    assert command(interrupted="")(fails)() == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: out of memory: ") and said in line


def raised(error):
    raise error


def test_a_status_of_its_own_stays_and_a_bug_is_seen():
    assert command(interrupted="")(lambda status: status)(7) == 7
    with pytest.raises(ZeroDivisionError):
        command(interrupted="")(lambda: 1 / 0)()


def test_a_reader_who_left_is_no_traceback():
    """As with `| head`."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as unread:
        done = subprocess.run(
            [sys.executable, "-m", "d2f", "configs"], stdout=unread, stderr=subprocess.PIPE,
            cwd=ROOT, text=True,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, "")


def test_public_names_are_there_when_asked_for():
    assert all(hasattr(d2f, name) for name in d2f.__all__)
    with pytest.raises(AttributeError, match="no attribute 'lood'"):
        _ = d2f.lood


# What may be said, and what is a mistake.

MAINS = {
    "decode": pipeline.main,
    "batch": batch.main,
    "evaluate": evaluate.main,
    "tune": tune.main,
    "compare": compare.main,
    "serve": serving.main,
    "states": record_states.main,
    "rollouts": rollouts.main,
    "convert": convert.main,
    "data": data.main,
    "info": info.main,
}


def test_every_decoder_option_is_a_flag_and_only_what_was_given_is_known():
    line, asked = [], {}
    for kind in DECODERS.values():
        for option in options_of(kind):
            value = option.kind[0] if isinstance(option.kind, tuple) else option.kind(1)
            if option.name not in asked:
                given = [] if value is True else [str(value)]
                line += ["--" + option.name.replace("_", "-"), *given]
            asked[option.name] = value
    assert pipeline.parse(line).given == asked
    assert pipeline.parse([]).given == {}
    assert pipeline.parse(["--no-early-exit", "--stop", "a", "--stop", "b"]).given == {
        "early_exit": False, "stop": ("a", "b"),
    }  # fmt: skip


def test_flags_are_read_as_they_were_written():
    options = pipeline.parse(
        ["--prompt", "None", "--tau_add", "1e-1", "--output=--x", "--no-merge", "--adapter", "a/b"]
    )
    assert (options.prompt, options.output, options.merge) == ("None", "--x", False)
    assert options.given == {"tau_add": 0.1} and options.verbose is False
    assert pipeline.parse(["-v", "--threads", "auto", "--temperature", "0"]).threads == "auto"
    assert pipeline.parse(["--n", "3", "--n", "4"]).n == 4
    for words in (["x"], ["--output", "x"], ["--output=x"]):  # an argument, or named as a flag is
        line = [*words, "--no-figures", "--tau-conf", "0.5,1", "--block-size", "4"]
        lists = flags.parse(tune.Options, line, usual="")
        assert (lists.output, lists.given) == ("x", {"tau_conf": [0.5, 1.0], "block_size": [4]})
    asked = flags.parse(batch.Options, ["x", "--input=-y"], usual="")
    assert (asked.input, asked.output) == ("-y", "x")
    line = ["c", "--concurrency", "[1, 4]", "--config", "d"]
    found, overrides = flags.parse_known(compare.Options, line, usual="")
    assert (found.config, overrides) == ("d", ["c", "--concurrency", "[1, 4]"])


def test_a_decoder_of_ones_own_brings_its_flags(tmp_path, monkeypatch):
    text = (
        "from dataclasses import dataclass\nfrom decode.decoders.base import option\n"
        "from decode.decoders.unmask import Static\n\n@dataclass(frozen=True)\n"
        "class Mine(Static):\n    name = 'mine'\n    {field}: int = option(3, 'how it is mine')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_decoder.py").write_text(text.format(field="mine"))
    line = ["--decoder", "own_decoder:Mine", "--mine", "5", "--steps", "2"]
    assert pipeline.parse(line).given == {"mine": 5, "steps": 2}


NEAREST = {
    "decode --tau-confidence 1": "unknown option '--tau-confidence'; did you mean --tau-conf?",
    "decode --tau-ad 0.5": "did you mean --tau-add?",
    "decode --no-merg": "did you mean --no-merge?",
    "decode --decoder treshold": "did you mean threshold?",
    "decode --decoder Threshol": "did you mean threshold?",
    "decode --tasks stroy": "did you mean story?",
    "decode --model tiny-d2": "no such folder or bundled model; did you mean tiny-d2f?",
    "decode --config tiny-d2f-stori": "did you mean tiny-d2f-story?",
    "decode --dtype fp17": "--dtype: got 'fp17'; did you mean fp16?; expected one of auto",
    "decode --reveal sttic": "did you mean static?",
    "decode --decoder d2ff": "got 'd2ff'; did you mean d2f?; expected one of",
    "decode --family lada": "--family: got 'lada'; did you mean llada?; expected one of",
    "compare --config compare-tiny --entries.D2F.decoder treshold": "did you mean threshold?",
    "compare --config compare-tiny --entries.D2F.famly x": "--entries.3.famly: there is no such",
    "compare --config compare-tiny --entries.autoregressive.family cusal": "did you mean causal?",
    "compare --config compare-tiny --repetition 3": "--repetition: there is no such key; did you",
    "compare compare-tny": "did you mean compare-tiny?",
    "data tiny-d2g": "did you mean tiny-d2f?",
}
NONSENSE = {
    "decode": {
        "--tau-conf 1.5": "tau_conf must", "--tau-conf nan": "tau_conf must",
        "--max-new-tokens -5": "max_new_tokens must", "--block-size 0": "block_size must",
        "--prompt ''": "--prompt is empty", "--threads 0": "--threads must be at least 1",
        "--threads x": "--threads: expected a whole number or 'auto', got 'x'",
        "--steps x": "--steps: expected a whole number, got 'x'",
        "--batch-size": "--batch-size: expected a value", "stray": "unknown option 'stray'",
        "--batch-size 0": "--batch-size must", "--problems 0": "--problems must",
        "--n 0": "--n must lie", "--pause nan": "--pause must lie", "--pause 61": "--pause must",
        "--raw": "--raw needs", "--no-merge": "--no-merge without --adapter",
        "--prompt x --problems 2": "--problems is for held-out problems",
        "--prompt x --prompts-file y": "exclude each other",
        "--prompts-file none": "cannot be read",
        "--model a/b/c": "--model a/b/c", "--data x": "--data and --judge go together",
        "--top-p 0": "top_p must", "--temperature -1": "temperature must", "--seed x": "--seed",
        "--decoder static --tau-add 0.1": "static has no option tau_add",
        "--steps 4": "the decoder d2f, the default of this model, has no option steps",
        "--temperature 1 --lossless 2": "lossless needs temperature 0",
        "--output none/x": "expected a file in", "--trace none/x": "expected a file in",
        "--adapter no/such/folder": "--adapter no/such/folder: no such folder",
        "--quantize nf4 --no-merge --adapter a/b": "--quantize with --no-merge is not possible",
        "--tensor-parallel 0": "--tensor-parallel must be at least 1",
    },
    "batch": {
        "": "expected INPUT, OUTPUT", "--output y": "expected INPUT", "x y z": "option 'z'",
        "x y --batch-size 0": "must be", "x --output": "--output: expected a value",
    },
    "evaluate": {
        "--problems 0": "--problems must", "--samples 0": "--samples must", "--pass-at 2": "from 1",
        "--pass-at x": "--pass-at must be whole numbers", "--split train": "--split: got 'train'",
        "--judge-jobs 0": "--judge-jobs must", "--workers 0": "--workers must",
        "--address x:1": "--address is of a Ray cluster", "--tasks ,": "--tasks",
    },
    "tune": {
        "": "expected OUTPUT", "o --tau-conf x": "--tau-conf: expected numbers",
        "--output o --within 1 --min-accuracy 1": "exclude each other",
        "--output o --search x": "--search: got 'x'; expected one of",
    },
    "compare": {"": "expected CONFIG", "none": "cannot be read"},
    "states": {"": "expected OUTPUT", "o --block-sizes x": "--block-sizes must be as"},
    "rollouts": {
        "--output o": "expected MODEL", "tiny-teacher": "expected OUTPUT",
        "--model tiny-teacher --output o --temperatures x": "--temperatures must be numbers",
        "--model tiny-teacher --output o --decoder block": "--decoder: got 'block'",
    },
    "convert": {"--model tiny-ar": "expected OUTPUT"},
    "data": {"--inspect": "expected CONFIG", "tiny-d2f --samples 0": "--samples must be"},
    "info": {"tiny-d2": "did you mean tiny-d2f?", "tiny-d2f --famly x": "did you mean --family?"},
}  # fmt: skip
for start in ("batch x y", "decode", "evaluate", "serve", "tune --output o"):
    NEAREST[f"{start} --device cudda"] = "--device: got 'cudda'; did you mean cuda?; expected one"
    NEAREST[f"{start} --model ."] = "expected a model folder with a config.json, found none"
    NEAREST[f"{start} --mask-id -5"] = "--mask-id must be at least 0, got -5"
    NEAREST[f"{start} --end-ids 2,-5"] = "--end-ids must be whole numbers, as 2,13: got '2,-5'"
CASES = [(*line.split(" ", 1), said) for line, said in NEAREST.items()]
CASES += [(name, words, said) for name, cases in NONSENSE.items() for words, said in cases.items()]


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("decode.cli.outline", lambda *_: pytest.fail("read a model"))
    return tmp_path


@pytest.mark.parametrize(("name", "words", "said"), CASES)
def test_a_mistake_is_one_line_at_once(elsewhere, capsys, name, words, said):
    """Before a model is read, with one exit status in all commands, and nothing is written."""
    line = ["" if word == "''" else word for word in words.split()]
    began = time.process_time()  # what else the machine does is not counted
    assert MAINS[name](line) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    for part in said.split(".*"):
        assert part in error
    assert time.process_time() - began < 5 and not list(elsewhere.iterdir())


def test_a_mistake_in_a_training_is_the_same(elsewhere, monkeypatch):
    for words, said in {
        "--config tiny-d2g": "did you mean tiny-d2f?",
        "--stepz 3": "--stepz: there is no such key; did you mean steps?",
        "--steps x": "--steps: expected a whole number, got 'x'",
        "--steps": "overrides must be pairs",
        "--family lada": "--family: got 'lada'; did you mean llada?; expected one of causal",
        "--lora.rank 4": "--objective.lora.rank: there is no such key; did you mean",
    }.items():
        monkeypatch.setattr("sys.argv", ["train", *words.split()])
        error = io.StringIO()
        with redirect_stderr(error):
            try:
                status = train.main()
            except SystemExit as end:
                status = end.code
        assert said in f"{error.getvalue()}{status}"


def test_a_training_whose_inputs_are_not_there_says_so():
    for words, said in {
        "--init tiny-tacher": "init tiny-tacher: no such folder or bundled model; did you mean",
        "--init_adapter no/such/folder": "init_adapter no/such/folder: no such folder",
        "--data.tasks null --data.file none.jsonl": "data.file none.jsonl: no such file",
    }.items():
        with pytest.raises(InputError, match=said):
            train.parse(words.split())


def test_the_options_of_a_server_are_plain_values_that_a_process_can_be_sent():
    options = serve.parse(["--model", "a=tiny-d2f", "--tau-conf", "0.5", "--api-key", "k"])
    there = pickle.loads(pickle.dumps(options))
    assert there == options and there.named == {"a": "tiny-d2f"}
    assert dataclasses.replace(options, model="x").given == {"tau_conf": 0.5}
