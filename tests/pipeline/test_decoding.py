"""The command `python -m decode.pipeline`: what it prints, decodes and writes."""

import io
import json

import pytest
import torch
from block_tiny import wedlm
from files import CONTEXT, TAU, lines_of, make_model, prompts_file, untimed
from rich.console import Console

import d2f
import decode
from d2f.saving import save_model
from d2f.tasks import DEFAULT_TASKS, make_problems
from d2f.tasks.task import RESPONSE_LENGTH
from decode.display import LiveDisplay, Running
from decode.pipeline import main

# What it prints


def test_plain_output(student, capsys):
    assert main(["--model", student, "--problems", "1", *TAU]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert out.replace("\n", "").isprintable()
    assert [line.split()[:2] for line in lines[:9:3]] == [
        [f"{task}-1", "question"] for task in DEFAULT_TASKS
    ]
    assert make_problems("story", "heldout", 1)[0].question in lines[0]
    assert all("tokens/s" in line and "tokens/forward" in line for line in lines[2:9:3])
    assert lines[9].startswith("story      right 0 of 1") and "measured" not in lines[9]
    assert lines[12].startswith("counted: visible tokens, up to the end token")
    assert "batch 1" in lines[12] and "float32, cpu, 1 threads" in lines[12]


def test_a_bundled_model_shows_what_it_does_well(capsys):
    """It has a fifth of countdown right; what its card measured stands beside."""
    assert main(["--model", "tiny-d2f", "--problems", "1"]) == 0
    out = capsys.readouterr().out
    assert "countdown" not in out
    assert "(measured: 93.2% of 500 held-out problems right)" in out
    assert main(["--model", "tiny-d2f", "--problems", "1", "--tau-conf", "0.8", "--quiet"]) == 0
    assert "measured" not in capsys.readouterr().out, "not with this decoder"


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
    assert main(["--model", causal, *arguments[:-1], "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["text"], said["tokens"]) == (expected[0].text, expected[0].tokens)


def test_live_display_of_a_batch(student):
    console = Console(
        file=io.StringIO(), force_terminal=True, width=100, _environ={"TERM": "xterm"}
    )
    arguments = ["--model", student, "--problems", "1", "--max-new-tokens", "20"]
    assert main([*arguments, "--pause", "0.001", "--batch-size", "3"], console) == 0
    out = console.file.getvalue()
    assert all(word in out for word in ["forward 1", "question", "answer", "tokens/s", "wrong"])
    assert "together: 60 tokens" in out
    assert max(map(len, out[out.index("together") :].splitlines())) <= 100  # no word is broken


def test_live_display_states_and_marks(tokenizer):
    view, end = decode.step.BlockView, tokenizer.eos_token_id
    console = Console(file=io.StringIO(), force_terminal=True, width=80, _environ={"TERM": "xterm"})
    display = LiveDisplay(console, tokenizer, (end,), pause=0.0)
    newline = tokenizer("\n")["input_ids"][0]
    states = ["cached", "to cache", "fully active", "semi-active"]
    blocks = [view(2 * i, 2 * i + 2, state, (newline, None)) for i, state in enumerate(states)]
    blocks.append(view(8, 10, "semi-active", (end, None)))
    source = decode.jobs.Source("a", "[bold]a", "b")
    job = decode.jobs.Job(source, [1], decode.D2F())
    with console.capture() as capture:
        console.print(Running([display._panel(job, decode.Event(0, 1, blocks))]))
    out = capture.get()
    assert all(state in out for state in states)
    assert "↵" in out and "·" in out and "▪" in out and "[bold]a" in out


# What it decodes


def test_output_has_the_tokens_of_generate(student, tmp_path, batch_size=4):
    path = tmp_path / "out.jsonl"
    arguments = ["--model", student, "--problems", "1", "--output", str(path), *TAU]
    assert main([*arguments, "--batch-size", str(batch_size)]) == 0
    header, *results = lines_of(path)
    assert header["run"]["decoder"] == "d2f"
    assert header["run"]["options"]["block_size"] == 16
    model = d2f.load(student)
    for task in DEFAULT_TASKS:
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


def test_the_default_length_is_what_the_model_was_trained_on(capsys):
    """And not 256 tokens, at which tiny-teacher says nothing."""
    line = ["--model", "tiny-teacher", "--decoder", "static", "--quiet", "--device", "cpu"]
    line += ["--prompt", "Use 3, 5 and 7 to make 22."]
    assert main(line) == 0
    said = capsys.readouterr()
    assert said.out == "7+5=12\n12+3=22\n" and "empty" not in said.err
    line = ["--prompt", "What is the capital of France?", "--max-new-tokens", "96", "--quiet"]
    assert main([*line, "--device", "cpu"]) == 0
    said = capsys.readouterr()
    reason = "96 tokens were asked of a model that was trained on at most 64"
    assert said.out == "\n" and f"notice: 1 answer is empty: {reason}" in said.err
    prompt = [{"role": "user", "content": "What is the capital of France?"}]
    with pytest.warns(UserWarning, match="1 answer is empty: the model may not know"):
        decode.generate(d2f.load("tiny-d2f", device="cpu"), [prompt], decode.D2F())


def test_default_length_leaves_room_for_what_is_fed_behind_it(tmp_path):
    """Where `decode.generate` answers, so does the command: the official window goes beyond."""
    model = wedlm(True, 0)
    save_model(model, tmp_path / "model", dtype=torch.float32)
    path = prompts_file(tmp_path / "p", {"ids": [7] * (CONTEXT - 8)})
    options = ["--decoder", "wedlm", "--refill", "repository", "--window", "5"]
    options += ["--model", str(tmp_path / "model"), "--prompts-file", path]
    assert main([*options, "--output", str(tmp_path / "out")]) == 0
    row = lines_of(tmp_path / "out")[1]
    by_call = decode.generate(model, [[7] * (CONTEXT - 8)], decode.WeDLM(5, refill="repository"))[0]
    assert row["max_new_tokens"] == 4 and row["tokens"] == by_call.tokens


def test_config_and_command_line(student, tmp_path):
    config, out = tmp_path / "c.yaml", tmp_path / "out"
    config.write_text("decoder: static\nblock_size: 4\nsteps: 4\nstop: [x]\n")
    arguments = ["--config", str(config), "--prompt", "Hi", "--max-new-tokens", "8"]
    assert main(["--model", student, *arguments, "--block-size", "8", "--output", str(out)]) == 0
    run = lines_of(out)[0]["run"]
    assert run["decoder"] == "static" and run["options"]["stop"] == ["x"]
    assert run["options"]["block_size"] == 8 and run["options"]["steps"] == 4


def test_a_model_that_is_no_student_is_noticed(teacher, student, tokenizer, tmp_path, capsys):
    arguments = ["--prompt", "Hi", "--max-new-tokens", "4"]
    converted = make_model(tmp_path / "converted", "dream", tokenizer, objective="next_token")
    assert main(["--model", converted, *arguments]) == 0
    assert "converted is not a diffusion model yet" in capsys.readouterr().err
    assert main(["--model", teacher, *arguments, "--decoder", "d2f"]) == 0
    assert "was not trained by D2F" in capsys.readouterr().err
    assert main(["--model", teacher, *arguments]) == 0  # static, which suits it
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


def test_samples_have_the_seeds_and_the_answers_of_the_library(student, tmp_path):
    """Equal prompts of a file and --n: each answer has its own seed, and --output goes on."""
    path = prompts_file(tmp_path / "p", {"ids": [5, 6, 7]}, {"ids": [5, 6, 7], "id": "b"})
    out = tmp_path / "out"
    options = ["--decoder", "d2f", "--max-new-tokens", "12", "--temperature", "2", "--n", "2"]
    options += ["--output", str(out)]
    assert main(["--model", student, "--prompts-file", path, *options]) == 0
    lines = lines_of(out)[1:]
    assert [line["id"] for line in lines] == ["1#1", "1#2", "b#1", "b#2"]
    answers = [line["raw_tokens"] for line in lines]
    assert len(set(map(tuple, answers))) == 4
    model = d2f.load(student, device="cpu")
    decoder = decode.D2F(max_new_tokens=12, temperature=2.0)
    expected = decode.generate(model, [[5, 6, 7]] * 2, decoder, n=2)
    assert answers == [result.raw_tokens for result in expected]
    out.write_text("".join(out.read_text().splitlines(keepends=True)[:3]))
    assert main(["--model", student, "--prompts-file", path, *options]) == 0
    assert [line["raw_tokens"] for line in lines_of(out)[1:]] == answers


def test_bad_numbers_of_samples_are_refused(student, tmp_path, capsys):
    path = prompts_file(tmp_path / "p", {"ids": [5], "id": "a"}, {"ids": [5], "id": "a#1"})
    assert main(["--model", student, "--prompts-file", path, "--n", "1", "--quiet"]) == 0
    path = prompts_file(tmp_path / "p", {"ids": [5], "id": 1}, {"ids": [5], "id": "1"})
    assert main(["--model", student, "--prompts-file", path, "--n", "2"]) == 2
    assert "two answers would have the id '1#1'" in capsys.readouterr().err
    assert main(["--model", student, "--prompt", "a", "--n", "2"]) == 2
    assert "--n 2: greedy answers of one problem are all the same" in capsys.readouterr().err
