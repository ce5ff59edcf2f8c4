"""The command `python -m decode.pipeline`: resuming an output, and bad input, which is found before
any weights are read."""

import json
import shutil

import pytest
import torch
from files import TAU, lines_of, prompts_file, untimed

import d2f
from d2f.errors import InputError
from d2f.saving import save_model
from decode import pipeline
from decode.cli import DecoderSettings, outline
from decode.compare.config import make_workloads, read_config
from decode.compare.entries import prepare_entries
from decode.decoders import DECODERS
from decode.display import Plain
from decode.pipeline import main

SMALL = ["--prompt", "Tom has 3 pens.", "--raw", "--max-new-tokens", "8", "--quiet"]

# Resuming


def test_interrupted_and_resumed_is_the_same_run(student, tmp_path, monkeypatch, capsys):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    arguments = ["--model", student, "--tasks", "story", "--problems", "3", *TAU, "--output"]
    assert main([*arguments, str(whole)]) == 0

    def interrupt(self, job, record):
        if record.id == "story-2":
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Plain, "finish", interrupt)
        assert main([*arguments, str(cut)]) == 130
    assert untimed(cut) == untimed(whole)[:3]
    cut.write_bytes(cut.read_bytes()[:-20])
    capsys.readouterr()
    assert main([*arguments, str(cut)]) == 0
    captured = capsys.readouterr()
    assert "its last line was cut short" in captured.err
    assert "1 of 3 prompts are already" in captured.err
    assert "right 0 of 3" in captured.out and "story-1" not in captured.out
    assert untimed(cut) == untimed(whole)
    before = cut.read_bytes()
    assert main([*arguments, str(cut)]) == 0
    assert cut.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cut", "whole"]


def test_output_of_another_run(student, tmp_path, capsys):
    path = tmp_path / "out"
    arguments = ["--model", student, "--prompt", "Hi", "--max-new-tokens", "2"]
    assert main([*arguments, "--output", str(path)]) == 0
    before = path.read_bytes()
    assert main([*arguments, "--output", str(path), "--seed", "1"]) == 2
    assert "is the output of another run: options was" in capsys.readouterr().err
    assert path.read_bytes() == before
    capsys.readouterr()
    changed = tmp_path / "changed"
    model = d2f.load(student)
    model.backbone.lm_head.weight.data[-1] += 1
    save_model(model, changed, dtype=torch.float32)
    path.write_bytes(before.replace(student.encode(), str(changed).encode()))
    assert main(["--model", str(changed), *arguments[2:], "--output", str(path)]) == 2
    assert "another run: weights was" in capsys.readouterr().err


# Bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tau", "1.5"], "decoder d2f, the default of this model, has no option tau"),
        (["--decoder", "autoregressive"], "autoregressive needs a causal model"),
        (["--decoder", "wedlm"], "wedlm needs"),
        (["--prompt", "<|mask|>"], "contains the mask id 1 at position 1"),
        (["--prompt", "a " * 300], "--prompt has 3"),
        (["--prompt", "Hi", "--max-new-tokens", "9999"], "the model's context is 256"),
        (["--device", "abacus"], "--device: got 'abacus'; expected one of cpu, cuda"),
        (["--adapter", "no/such/folder"], "no/such/folder"),
    ],
)
def test_bad_arguments_are_said_before_the_weights_are_read(
    student, tmp_path, monkeypatch, capsys, arguments, message
):
    monkeypatch.setattr(pipeline, "load", lambda options: pytest.fail("loaded"))
    out = tmp_path / "out"
    assert main(["--model", student, "--output", str(out), *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and message in captured.err
    assert not captured.out and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tau_ad: 0.1", "no decoder has an option tau_ad; did you mean tau_add?"),
        ("tau_add: 0.1\ndecoder: static", "the decoder static has no option tau_add; it has"),
        ("tau_add: high", "tau_add must lie in [0, 1], got 'high'"),
        ("stop: 3", "stop must be non-empty strings, got 3"),
        (
            "decoder: beam",
            f"decoder: got 'beam'; expected one of {', '.join(DECODERS)}, or your own",
        ),
        ("- 1", "expected a mapping of keys, got a list of 1"),
    ],
)
def test_bad_config(student, tmp_path, capsys, text, message):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    assert main(["--model", student, "--config", str(path)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not JSON"),
        ("[]", "line 2: the line: expected a section of keys"),
        ('{"prompt": "a", "ids": [5]}', "line 2: expected one of prompt, messages, ids"),
        ('{"prompt": "a", "tau": 1}', "line 2: tau: there is no such key"),
        ('{"prompt": 3}', "line 2: prompt: expected text, got 3"),
        ('{"prompt": ""}', "line 2: prompt: expected at least 1 character, got ''"),
        (
            '{"messages": [{"role": "user"}]}',
            "line 2: messages.0.content: expected a value, got nothing",
        ),
        ('{"messages": [{"role": "judge", "content": "a"}]}', "line 2: the chat template of "),
        ('{"ids": [1.5]}', "line 2: ids.0: expected a whole number"),
        ('{"ids": [5, 1]}', "line 2 contains the mask id 1 at position 1"),
        ('{"ids": [99999]}', "line 2: ids must lie in"),
        ('{"prompt": "a", "id": 1}', "two answers would have the id 1: give other ids"),
        ('{"prompt": "a", "id": null}', "line 2: id: expected a whole number or text, got null"),
        (b"\n", "expected at least one line"),
        (b"\xff", "cannot be read: 'utf-8'"),
    ],
)
def test_bad_prompts_file(student, tmp_path, capsys, line, message):
    path = tmp_path / "p.jsonl"
    whole = line if isinstance(line, bytes) else f'{{"prompt": "fine"}}\n{line}\n'.encode()
    path.write_bytes(whole)
    assert main(["--model", student, "--prompts-file", str(path)]) == 2
    assert message in capsys.readouterr().err


def test_nan_logits_stop_the_run(broken, tmp_path, capsys):
    """A prompt without token 5 is decoded, one with it is not."""
    path = prompts_file(tmp_path / "p", {"ids": [7, 8], "id": "good"}, {"ids": [5], "id": "bad"})
    out = tmp_path / "out"
    options = ["--model", broken, "--max-new-tokens", "1", "--output", str(out)]
    assert main([*options, "--prompts-file", path]) == 1
    captured = capsys.readouterr()
    assert "line 2: the model gave NaN or infinite logits at forward 1; no token" in captured.err
    assert [line["id"] for line in lines_of(out)[1:]] == ["good"]
    assert "good" in captured.out and "bad" not in captured.out
    out.unlink()
    path = prompts_file(tmp_path / "p", {"ids": [5], "id": "bad"})
    assert main([*options, "--prompts-file", path]) == 1
    assert "forward 1 of the warm-up" in capsys.readouterr().err
    assert not out.exists()


# Options are checked against the decoder that will decode.


@pytest.mark.parametrize("model", ["student", "teacher", "causal", "wino_plus"])
def test_an_option_that_another_decoder_refuses(model, request):
    """FreeDave and lossless decoding have a temperature too, and want it to be 0."""
    place = request.getfixturevalue(model)
    assert main(["--model", place, *SMALL, "--temperature", "0.7"]) == 0


def test_an_outline_needs_no_weights(student, tmp_path):
    place = tmp_path / "bare"
    shutil.copytree(student, place, ignore=shutil.ignore_patterns("*.safetensors"))
    model = outline(str(place))
    assert (model.contract.block_size, model.device.type) == (16, "meta")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": str(place)})
    )
    contract = json.loads((place / "d2f_contract.json").read_text()) | {"block_size": 4}
    (adapter / "d2f_contract.json").write_text(json.dumps(contract))
    assert outline(str(place), str(adapter)).contract.block_size == 4
    assert outline(str(adapter)).contract.block_size == 4  # an adapter alone


def test_without_a_model_an_option_is_refused_only_where_every_decoder_refuses_it():
    DecoderSettings(None, {"temperature": 0.5}).check([8])
    DecoderSettings(None, {"tau": 1.5}).check([8])
    for given, message in (
        ({"temperature": -1}, "temperature must be 0 or more"),
        ({"tau_add": 2}, r"tau_add must lie in \[0, 1\]"),
        ({"tau1": 0.5, "tau_add": 0.5}, "no decoder has all of the options tau1, tau_add"),
    ):
        with pytest.raises(InputError, match=message):
            DecoderSettings(None, given).check([8])


@pytest.mark.parametrize("name", DECODERS)
def test_a_named_decoder_answers_for_itself(name):
    """An error names the decoder in use or one of its options, never another decoder."""
    others = set(DECODERS) - {name}
    for given in ({"temperature": 0.7}, {"tau": 1.5}, {"block_size": 0}, {"nothing": 1}):
        try:
            DecoderSettings(name, given).check([8])
        except InputError as error:
            assert not others & set(str(error).replace(",", "").split(" it has ")[0].split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("{tau: 1.5}", "entry mine: the decoder d2f, the default of this model, has no option tau"),
        ("{decoder: wedlm}", "entry mine: .*decoder"),
        ("{max_new_tokens: 4}", None),
    ],
)
def test_compare_checks_its_entries_before_it_starts_one(student, tmp_path, options, message):
    path = tmp_path / "compare.yaml"
    path.write_text(
        f"output: {tmp_path}\ntasks: [sudoku]\nproblems: 2\naccuracy_problems: 0\n"
        f"entries: [{{kind: ours, name: mine, model: {student}, options: {options}}}]\n"
    )
    config = read_config(path)
    workloads = make_workloads(config)
    if message is None:
        prepare_entries(config, workloads)
    else:
        with pytest.raises(InputError, match=message):
            prepare_entries(config, workloads)
