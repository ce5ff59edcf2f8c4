"""Flags: what a command line may say, and that a mistake is one line before any work."""

from __future__ import annotations

import dataclasses
import io
import time
from contextlib import redirect_stderr

import pytest

from d2f.errors import InputError
from decode import batch, evaluate, pipeline, record_states, tune
from decode import serve as serving
from decode.cli import decoder_flags, help_of, options_by_name
from decode.compare import __main__ as compare
from decode.decoders import DECODERS
from decode.decoders.base import options_of
from decode.server import options as serve
from distill import convert, rollouts
from distill.data import __main__ as data

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
    lists = tune.parse(
        ["--output", "x", "--no-figures", "--tau-conf", "0.5,1", "--block-size", "4"]
    )
    assert lists.given == {"tau_conf": [0.5, 1.0], "block_size": [4]}


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


def test_a_flags_help_tells_the_decoders_apart():
    found = options_by_name(DECODERS.values())
    said = help_of(found["tau"], len(DECODERS))
    assert said.startswith("block: ") and "(default: 0.85); freedave: " in said
    assert help_of(found["seed"], len(DECODERS)).startswith("seed of the random numbers")
    (flag,) = decoder_flags(list(DECODERS.values()), ["tau_add"])
    assert flag[0] == "tau_add" and flag[2] is None


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
    "compare --config compare-tny": "did you mean compare-tiny?",
    "data --inspect --config tiny-d2g": "did you mean tiny-d2f?",
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
    "batch": {"": "expected --input, --output", "--input x --output y --batch-size 0": "must be"},
    "evaluate": {
        "--problems 0": "--problems must", "--samples 0": "--samples must", "--pass-at 2": "from 1",
        "--pass-at x": "--pass-at must be whole numbers", "--split train": "--split: got 'train'",
        "--judge-jobs 0": "--judge-jobs must", "--workers 0": "--workers must",
        "--address x:1": "--address is of a Ray cluster", "--tasks ,": "--tasks",
    },
    "tune": {
        "": "expected --output", "--output o --tau-conf x": "--tau-conf: expected numbers",
        "--output o --within 1 --min-accuracy 1": "exclude each other",
        "--output o --search x": "--search: got 'x'; expected one of",
    },
    "compare": {"": "expected --config", "--config none": "cannot be read"},
    "states": {"": "expected --output", "--output o --block-sizes x": "--block-sizes must be as"},
    "rollouts": {
        "--output o": "expected --model", "--model tiny-teacher": "expected --output",
        "--model tiny-teacher --output o --temperatures x": "--temperatures must be numbers",
        "--model tiny-teacher --output o --decoder block": "--decoder: got 'block'",
    },
    "convert": {"--model tiny-ar": "expected --output"},
    "data": {"--config tiny-d2f": "expected --inspect", "--inspect": "expected --config"},
}  # fmt: skip
for command in ("batch --input x --output y", "decode", "evaluate", "serve", "tune --output o"):
    NEAREST[f"{command} --device cudda"] = "--device: got 'cudda'; did you mean cuda?; expected one"
    NEAREST[f"{command} --model ."] = "expected a model folder with a config.json, found none"
    NEAREST[f"{command} --mask-id -5"] = "--mask-id must be at least 0, got -5"
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
    from distill import train

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


def test_a_training_whose_inputs_are_not_there_says_so_before_torch(monkeypatch):
    from distill import train

    monkeypatch.setattr("distill.config.OBJECTIVES", None)  # their files import torch
    for words, said in {
        "--init tiny-tacher": "init tiny-tacher: no such folder or bundled model; did you mean",
        "--init_adapter no/such/folder": "init_adapter no/such/folder: no such folder",
        "--data.tasks null --data.file none.jsonl": "data.file none.jsonl: no such file",
    }.items():
        with pytest.raises(InputError, match=said):
            train.parse(words.split())


def test_the_options_of_a_server_are_plain_values_that_a_process_can_be_sent():
    import pickle

    options = serve.parse(["--model", "a=tiny-d2f", "--tau-conf", "0.5", "--api-key", "k"])
    there = pickle.loads(pickle.dumps(options))
    assert there == options and there.named == {"a": "tiny-d2f"}
    assert dataclasses.replace(options, model="x").given == {"tau_conf": 0.5}


def test_help_has_every_flag_that_the_inventory_of_a_command_lists(capsys):
    for parse in (pipeline.parse, batch.parse, evaluate.parse, tune.parse, serve.parse):
        with pytest.raises(SystemExit):
            parse(["--help"])
        shown = capsys.readouterr().out
        for field in dataclasses.fields(parse.__globals__["Options"]):
            flag = {"models": "--model"}.get(field.name, "--" + field.name.replace("_", "-"))
            hidden = field.name in ("given", "model", "tensor_parallel")
            assert hidden or f"{flag} " in shown or f"{flag}, " in shown, flag
