"""The command `python -m decode.pipeline`: what it prints and writes, resuming, bad input."""

import dataclasses
import io
import json
import subprocess
import sys

import pytest
import torch
from rich.console import Console

import d2f
import decode
from d2f.export import build, save_model
from d2f.tasks import TASKS, make_problems
from d2f.tasks.registry import RESPONSE_LENGTH
from d2f.tasks.tokenizer import train_tokenizer
from decode.cli.display import LiveDisplay, Plain
from decode.cli.options import parse
from decode.decoders import DECODERS
from decode.pipeline import main

CONTEXT = 256
TAU = ["--tau-conf", "0.3"]  # a random model is confident of nothing


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(400)


def make_model(place, family, tokenizer, **contract):
    torch.manual_seed(1)
    shape = {"hidden_size": 32, "intermediate_size": 48, "layers": 1, "heads": 2, "kv_heads": 1}
    model = build(family, tokenizer, context_length=CONTEXT, **shape)
    with torch.no_grad():
        model.backbone.lm_head.weight.mul_(12)
    save_model(model, place, dtype=torch.float32, **contract)
    return str(place)


@pytest.fixture(scope="module")
def student(folder, tokenizer):
    return make_model(folder / "student", "dream", tokenizer, objective="d2f", block_size=16)


@pytest.fixture(scope="module")
def teacher(folder, tokenizer):
    return make_model(folder / "teacher", "llada", tokenizer, objective="masked_diffusion")


@pytest.fixture(scope="module")
def causal(folder, tokenizer):
    return make_model(folder / "causal", "causal", tokenizer, objective="next_token")


@pytest.fixture(scope="module")
def broken(folder, student):
    """The student with a NaN embedding of token 5."""
    model = d2f.load(student)
    model.backbone.model.embed_tokens.weight.data[5] = torch.nan
    place = folder / "broken"
    save_model(model, place, dtype=torch.float32)
    return str(place)


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def untimed(path):
    return [{k: v for k, v in line.items() if k != "seconds"} for line in lines_of(path)]


def prompts_file(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


# What it prints


def test_plain_output(student, capsys):
    assert main(["--model", student, "--problems", "1", *TAU]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert out.replace("\n", "").isprintable()
    assert [line.split("  ")[0] for line in lines[:3]] == ["story-1", "countdown-1", "sudoku-1"]
    assert all("tokens/s" in line and "tokens/forward" in line for line in lines[:6])
    assert lines[3].startswith("story      right 0 of 1")
    assert lines[6].startswith("counted: visible tokens, up to the end token")
    assert "batch 1" in lines[6] and "float32, cpu, 1 threads" in lines[6]


def test_quiet(student, causal, capsys):
    assert main(["--model", student, "--problems", "1", "--tasks", "sudoku", "--quiet"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        "sudoku",
        "counted:",
    ]
    arguments = ["--prompt", "Hello", "--max-new-tokens", "5", "--quiet"]
    assert main(["--model", causal, *arguments]) == 0
    expected = decode.generate(
        d2f.load(causal), [[{"role": "user", "content": "Hello"}]], decode.Autoregressive(5)
    )
    assert capsys.readouterr().out == f"{expected[0].text}\n"


@pytest.mark.parametrize("decoder", ["d2f", "static"])
@pytest.mark.parametrize("batch_size", ["1", "3"])
def test_live_display(student, decoder, batch_size):
    console = Console(
        file=io.StringIO(), force_terminal=True, width=100, _environ={"TERM": "xterm"}
    )
    arguments = ["--model", student, "--problems", "1", "--max-new-tokens", "20"]
    arguments += ["--pause", "0.001", "--decoder", decoder, "--batch-size", batch_size]
    assert main(arguments, console) == 0
    out = console.file.getvalue()
    assert all(word in out for word in ["forward 1", "question", "answer", "tokens/s", "wrong"])
    if batch_size == "1":  # every forward is drawn
        states = {"d2f": ["semi-active", "fully active"], "static": ["current", "decoded"]}
        assert all(state in out for state in states[decoder])
    assert ("together: 60 tokens" in out) == (batch_size == "3")


def test_live_display_states_and_marks(tokenizer):
    view, end = decode.result.BlockView, tokenizer.eos_token_id
    console = Console(file=io.StringIO(), force_terminal=True, width=80, _environ={"TERM": "xterm"})
    display = LiveDisplay(console, tokenizer, (end,), total=1, pause=0.0)
    newline = tokenizer("\n")["input_ids"][0]
    states = ["cached", "to cache", "fully active", "semi-active"]
    blocks = [view(2 * i, 2 * i + 2, state, (newline, None)) for i, state in enumerate(states)]
    blocks.append(view(8, 10, "semi-active", (end, None)))
    source = decode.cli.jobs.Source("a", "[bold]a", "b")
    job = decode.cli.jobs.Job(source, [1], decode.D2F())
    with console.capture() as capture:
        console.print(display._panel(job, decode.Event(0, 1, blocks)))
    out = capture.get()
    assert all(state in out for state in states)
    assert "↵" in out and "·" in out and "▪" in out and "[bold]a" in out


def test_help_reads_well_and_does_not_import_torch():
    code = (
        "import sys; from decode.pipeline import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as stop: assert stop.code == 0\n"
        "assert not {'torch', 'transformers', 'rich'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("python -m decode.pipeline --tau-add 0.1\n")
    assert not done.stderr


def test_every_decoder_option_is_on_the_command_line():
    flags = {field.name for kind in DECODERS.values() for field in dataclasses.fields(kind)}
    values = {"early_exit": []} | {name: ["1"] for name in flags if name != "early_exit"}
    line = [part for name in flags for part in ["--" + name.replace("_", "-"), *values[name]]]
    assert flags <= vars(parse(line)).keys()
    assert not flags & vars(parse([])).keys()


# What it decodes


@pytest.mark.parametrize("batch_size", [1, 4])
def test_output_has_the_tokens_of_generate(student, tmp_path, batch_size):
    path = tmp_path / "out.jsonl"
    arguments = ["--model", student, "--problems", "1", "--output", str(path), *TAU]
    assert main([*arguments, "--batch-size", str(batch_size)]) == 0
    header, *results = lines_of(path)
    assert header["run"]["decoder"] == "d2f"
    assert header["run"]["options"]["block_size"] == 16
    model = d2f.load(student)
    for task in TASKS:
        question = make_problems(task, "heldout", 1)[0].question
        decoder = decode.D2F(tau_conf=0.3, max_new_tokens=RESPONSE_LENGTH[task])
        expected = decode.generate(model, [[{"role": "user", "content": question}]], decoder)[0]
        line = next(line for line in results if line["id"] == f"{task}-1")
        assert line["tokens"] == expected.tokens and line["forwards"] == expected.forwards
        assert line["text"] == expected.text and line["right"] is False


def test_prompts_from_a_file_and_standard_input(student, tmp_path, monkeypatch, capsys):
    lines = [
        {"prompt": "Two and two?"},
        {"messages": [{"role": "user", "content": "Two and two?"}], "id": "chat"},
        {"ids": [7, 8, 9]},
    ]
    path = prompts_file(tmp_path / "p.jsonl", *lines)
    options = ["--model", student, "--max-new-tokens", "8", "--output"]
    assert main([*options, str(tmp_path / "a"), "--prompts-file", path]) == 0
    stdin = io.TextIOWrapper(io.BytesIO((tmp_path / "p.jsonl").read_bytes()))
    monkeypatch.setattr("sys.stdin", stdin)
    assert main([*options, str(tmp_path / "b"), "--prompts-file", "-"]) == 0
    assert untimed(tmp_path / "a") == untimed(tmp_path / "b")
    _, text, chat, ids = lines_of(tmp_path / "a")
    assert [text["id"], chat["id"], ids["id"]] == [1, "chat", 3]
    assert text["tokens"] == chat["tokens"] and ids["question"] is None
    assert "3 decoded" in capsys.readouterr().out
    assert main([*options, str(tmp_path / "c"), "--prompts-file", path, "--raw"]) == 0
    raw = lines_of(tmp_path / "c")[1]
    assert raw["prompt_tokens"] == text["prompt_tokens"] - 2


def test_default_length_is_what_the_context_leaves(student, tmp_path):
    path = prompts_file(tmp_path / "p", {"ids": [7] * (CONTEXT - 3)})
    out = tmp_path / "out"
    assert main(["--model", student, "--prompts-file", path, "--output", str(out), *TAU]) == 0
    assert lines_of(out)[1]["max_new_tokens"] == 3


def test_config_and_command_line(student, tmp_path):
    config, out = tmp_path / "c.yaml", tmp_path / "out"
    config.write_text("decoder: static\nblock_size: 4\nsteps: 4\nstop: [x]\n")
    arguments = ["--config", str(config), "--prompt", "Hi", "--max-new-tokens", "8"]
    assert main(["--model", student, *arguments, "--block-size", "8", "--output", str(out)]) == 0
    run = lines_of(out)[0]["run"]
    assert run["decoder"] == "static" and run["options"]["stop"] == ["x"]
    assert run["options"]["block_size"] == 8 and run["options"]["steps"] == 4


def test_a_model_that_is_no_student_is_noticed(teacher, student, capsys):
    arguments = ["--prompt", "Hi", "--max-new-tokens", "4"]
    assert main(["--model", teacher, *arguments]) == 0
    assert "was not trained by D2F" in capsys.readouterr().err
    assert main(["--model", teacher, *arguments, "--decoder", "static"]) == 0
    assert main(["--model", student, *arguments]) == 0
    assert not capsys.readouterr().err


@pytest.mark.parametrize("merge", ["--merge", "--no-merge"])
def test_adapter(golden, tmp_path, capsys, merge):
    place, out = golden / "llada-tiny", tmp_path / "out"
    path = prompts_file(tmp_path / "p", {"ids": [5, 6, 7]})
    arguments = ["--prompts-file", path, "--max-new-tokens", "12", "--model", str(place), merge]
    assert main([*arguments, "--adapter", str(place / "adapter"), "--output", str(out)]) == 0
    model = d2f.load(place, adapter=place / "adapter")
    expected = decode.generate(model, [[5, 6, 7]], decode.D2F(max_new_tokens=12))[0]
    run, line = lines_of(out)
    assert line["tokens"] == expected.tokens and line["text"] is None
    assert run["run"]["merged"] == (merge == "--merge")
    captured = capsys.readouterr()
    assert not captured.err and " ".join(map(str, expected.tokens)) in captured.out


def test_trace_replays_to_the_same_tokens(student, tmp_path):
    trace, out = tmp_path / "trace.json", tmp_path / "out"
    arguments = ["--model", student, "--problems", "1", "--batch-size", "2", *TAU]
    assert main([*arguments, "--trace", str(trace), "--output", str(out)]) == 0
    content = json.loads(trace.read_text())
    results = {line["id"]: line for line in lines_of(out)[1:]}
    assert content["run"] == lines_of(out)[0]["run"]
    for request in content["requests"]:
        result, tokens = results[request["id"]], {}
        for number, forward in enumerate(request["forwards"], 1):
            assert forward["forward"] == number and forward["fed"] > 0
            for revealed in forward["revealed"]:
                assert revealed["position"] not in tokens and 0 < revealed["confidence"] <= 1
                tokens[revealed["position"]] = revealed["token"]
            for block in forward["blocks"]:
                shown = [tokens.get(p) for p in range(block["start"], block["end"])]
                assert shown == block["tokens"]
        assert [tokens[p] for p in sorted(tokens)] == result["raw_tokens"]
        assert len(request["forwards"]) == result["forwards"]


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


@pytest.mark.parametrize("content", ["", "{}\n", "[1]\n", "text", '{"run": 3}\n'])
def test_output_that_is_something_else(student, tmp_path, capsys, content):
    path = tmp_path / "out"
    path.write_text(content)
    arguments = ["--model", student, "--prompt", "Hi", "--max-new-tokens", "2"]
    assert main([*arguments, "--output", str(path)]) == (2 if content else 0)
    if content:
        assert path.read_text() == content
        assert "is not an output of this command" in capsys.readouterr().err


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
    path.write_bytes(before + before.splitlines(keepends=True)[1])
    assert main([*arguments, "--output", str(path)]) == 2
    assert "line 3 is not a result of this run, or its second one" in capsys.readouterr().err


# Bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tau-add", "1.5"], "tau_add must lie in [0, 1], got 1.5"),
        (["--tau-conf", "nan"], "tau_conf must lie in [0, 1]"),
        (["--block-size", "0"], "block_size must be a whole number of at least 1, got 0"),
        (["--max-new-tokens", "0"], "max_new_tokens must be a whole number of at least 1, got 0"),
        (["--batch-size", "0"], "--batch-size must be at least 1, got 0"),
        (["--steps", "x"], "argument --steps: invalid int value: 'x'"),
        (["--decoder", "static", "--tau-add", "0.1"], "decoder static has no option tau_add; it"),
        (["--decoder", "autoregressive", "--tau-add", "0"], "autoregressive has no option tau_add"),
        (["--steps", "4", "--tau-add", "0.1"], "no decoder has all of the options"),
        (["--steps", "4"], "the decoder d2f has no option steps; it has"),
        (["--decoder", "static", "--steps", "7", "--block-size", "4"], "steps must be a multiple"),
        (["--decoder", "autoregressive"], "autoregressive needs a causal model"),
        (["--prompt", ""], "--prompt is empty: expected at least one token"),
        (["--prompt", "<|mask|>"], "contains the mask id 1 at position 1"),
        (["--prompt", "a " * 300], "--prompt has 3"),
        (["--prompt", "Hi", "--max-new-tokens", "9999"], "the model's context is 256"),
        (["--prompt", "Hi", "--problems", "3"], "--problems is for held-out problems"),
        (["--prompt", "\ud800"], "--prompt is not Unicode text"),
        (["--tasks", "story,chess"], "--tasks must be some of story,countdown,sudoku"),
        (["--problems", "0"], "--problems must be at least 1, got 0"),
        (["--raw"], "--raw needs --prompt or --prompts-file"),
        (["--no-merge"], "--no-merge needs --adapter"),
        (["--dtype", "int4"], "dtype must be one of"),
        (["--device", "abacus"], "--device abacus: no such device here"),
        (["--device", "cuda:99"], "--device cuda:99: no such device here"),
        (["--adapter", "no/such/folder"], "no/such/folder"),
        (["--trace", "no/such/trace"], "does not exist"),
        (["--nothing"], "unrecognized arguments: --nothing"),
    ],
)
def test_bad_arguments(student, tmp_path, capsys, arguments, message):
    out = tmp_path / "out"
    assert main(["--model", student, "--output", str(out), *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and message in captured.err
    assert not captured.out and not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["no-such-model", "./no/such", "/no/such", "a/b/c"])
def test_missing_model(name, capsys):
    assert main(["--model", name]) == 2
    assert f"error: --model {name}: no such folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tau_ad: 0.1", "unknown key tau_ad; expected some of decoder, "),
        ("tau_add: 0.1\ndecoder: static", "the decoder static has no option tau_add; it has"),
        ("tau_add: high", "tau_add must lie in [0, 1], got 'high'"),
        ("max_new_tokens: [1]", "max_new_tokens must be a whole number"),
        ("early_exit: 3", "early_exit must be true or false, got 3"),
        ("stop: 3", "stop must be text or a list of texts, got 3"),
        ("decoder: beam", "decoder must be one of d2f, static, autoregressive, got 'beam'"),
        ("decoder: [d2f]", "decoder must be one of d2f, static, autoregressive"),
        ("- 1", "expected a mapping of keys, got list"),
        ("a: [", "is not YAML"),
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
        ("[]", "line 2: expected an object with one of prompt, messages, ids"),
        ('{"prompt": "a", "ids": [5]}', "line 2: expected an object with one of"),
        ('{"prompt": "a", "tau": 1}', "line 2: unknown key 'tau'"),
        ('{"prompt": 3}', "line 2: prompt must be text"),
        ('{"prompt": ""}', "line 2: prompt is empty"),
        ('{"messages": [{"role": "user"}]}', "line 2: messages must be a list of objects"),
        ('{"messages": [{"role": "judge", "content": "a"}]}', "line 2: the chat template refused"),
        ('{"ids": [1.5]}', "line 2: ids must be a list of whole numbers"),
        ('{"ids": [5, 1]}', "line 2 contains the mask id 1 at position 1"),
        ('{"ids": [99999]}', "line 2: ids must lie in"),
        ('{"prompt": "a", "id": 1}', "line 2: the id 1 is that of"),
        ('{"prompt": "a", "id": null}', "line 2: id must be text or a whole number"),
    ],
)
def test_bad_prompts_file(student, tmp_path, capsys, line, message):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n")
    assert main(["--model", student, "--prompts-file", str(path)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b"\n", b"\xff"])
def test_prompts_file_without_lines(tmp_path, capsys, content):
    path = tmp_path / "p.jsonl"
    path.write_bytes(content)
    assert main(["--prompts-file", str(path)]) == 2
    assert "expected at least one line" in (err := capsys.readouterr().err) or "UTF-8" in err


def test_options_that_name_one_file(student, tmp_path, capsys):
    path = str(tmp_path / "f")
    assert main(["--model", student, "--output", path, "--trace", path]) == 2
    assert "--output and --trace are the same file" in capsys.readouterr().err


def test_nan_logits_stop_the_run(broken, tmp_path, capsys):
    """A prompt without token 5 is decoded, one with it is not."""
    path = prompts_file(tmp_path / "p", {"ids": [7, 8], "id": "good"}, {"ids": [5], "id": "bad"})
    out = tmp_path / "out"
    options = ["--model", broken, "--max-new-tokens", "1", "--output", str(out)]
    assert main([*options, "--prompts-file", path]) == 1
    captured = capsys.readouterr()
    assert "NaN or infinite logits at forward 2 (" in captured.err
    assert "line 2 at its forward 1); no token was taken from it" in captured.err
    assert [line["id"] for line in lines_of(out)[1:]] == ["good"]
    assert "good" in captured.out and "bad" not in captured.out
    out.unlink()
    path = prompts_file(tmp_path / "p", {"ids": [5], "id": "bad"})
    assert main([*options, "--prompts-file", path]) == 1
    assert "forward 1 of the warm-up" in capsys.readouterr().err
    assert not out.exists()
