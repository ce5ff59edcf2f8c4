"""Whatever a command line says, what it asks for is begun or refused in one line; nonsense is
refused. Loading weights, training and measuring are cut off."""

from __future__ import annotations

import contextlib
import functools
import json
import sys
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import d2f.command
from decode import evaluate, pipeline, record_states, tune
from decode.cli import outline
from decode.compare import __main__ as compare
from distill import convert, rollouts, train
from distill.data import __main__ as data
from tests.fuzz.commands import flags_of, reached, run_command
from tests.fuzz.odd import NUMBERS, TEXT, VALUES
from tests.fuzz.outcome import attempt, budget

MAINS = {
    "decode": pipeline.main,
    "evaluate": evaluate.main,
    "compare": compare.main,
    "tune": tune.main,
    "states": record_states.main,
    "rollouts": rollouts.main,
    "train": train.main,
    "convert": convert.main,
    "data": data.main,
}
# A command line that is accepted, which odd options come after.
USUAL = {
    "compare": ["--config", "compare-tiny"],
    "tune": ["--output", "out", "--no-figures", "--problems", "2", "--heldout", "2"],
    "evaluate": ["--problems", "2"],
    "states": ["--output", "out.json", "--problems", "2"],
    "rollouts": ["--output", "out.jsonl", "--model", "tiny-teacher", "--problems", "2"],
    "train": ["--check"],
    "convert": ["--model", "tiny-ar", "--family", "dream", "--output", "out"],
    "data": ["--inspect", "--config", "tiny-d2f"],
}
GOOD = ["tiny-d2f", "tiny-teacher", "tiny-ar", "story", "sudoku,story", "d2f", "wino", "wedlm",
        "block", "cpu", "float32", "llada", "causal", "dream", "prefix", "tree", "static", "always",
        "halving", "train", "heldout", "0", "1", "4", "0.5", "0.2,0.9", "out", "folder", "file",
        "odd.yaml", "odd.jsonl", "d2f-llada-8b"]  # fmt: skip
ODD = ["cuda:99", "tpu", "meta", "int8", "no/such", "a/b/c", "/", "/proc/self/mem", "/dev/null",
       "file/below", ",", "story,story", "1,2,", "1e9999", "nan", "-inf", "1_000", "٣", "--", "-",
       "-x", "--no", "a\nb", "\udcff", "2" * 5000, "[1, 2]", "{a: 1}", "[" * 3000]  # fmt: skip
WORDS = (
    st.sampled_from(GOOD)
    | st.sampled_from(ODD)
    # Problems of a number in between are made, which takes its time.
    | NUMBERS.filter(lambda n: not 20 < n < 200_000).map(
        lambda n: f"{n:g}" if isinstance(n, float) or abs(n) < 10**300 else "9" * 400
    )
    # An argument has no NUL, and half of a surrogate pair only as a byte that is no UTF-8.
    | TEXT.filter(lambda text: text.isprintable() and not set(text) & set("\0\ud800"))
)
KEYS = ["--steps", "--optimizer.lr", "--data.rows", "--data.file", "--init", "--entries.0.model",
        "--entries.D2F.options.tau_conf", "--problems", "--tasks", "--unknown", "--lora.r", "--x.y",
        "--block_size", "--objective", "--evaluation.problems"]  # fmt: skip


@functools.cache
def known_flags(name: str) -> list[str]:
    return [f for f in flags_of(main_of(name)) if f not in ("--compile", "--help")]


@st.composite
def command_lines(draw: st.DrawFn, name: str) -> list[str]:
    """Usual options, then odd ones: flags with a value, without one, with two, values alone."""
    line = list(USUAL.get(name, ())) if draw(st.integers(0, 9)) else []
    for _ in range(draw(st.integers(1, 4))):
        flag = draw(st.sampled_from(known_flags(name)) | st.sampled_from(KEYS))
        match draw(st.integers(0, 9)):
            case 0:
                line.append(flag)
            case 1:
                line.append(draw(WORDS))
            case 2:
                line.append(f"{flag}={draw(WORDS)}")
            case _:
                line += [flag, draw(WORDS)]
    return line


@pytest.fixture(autouse=True)
def without_the_expensive_part(monkeypatch, tmp_path):
    place = tmp_path / "a" / "b" / "c" / "d"  # what `../..` leads to is a test's own, too
    (place / "folder").mkdir(parents=True)
    (place / "file").write_text("mine")
    (place / "odd.yaml").write_text("tau_add: [1\n")
    (place / "odd.jsonl").write_text('{"prompt": 3}\n')
    monkeypatch.chdir(place)
    monkeypatch.setattr("sys.stdin", open("/dev/null"))  # noqa: SIM115
    monkeypatch.setattr("decode.cli.outline", functools.cache(outline))
    monkeypatch.setattr("decode.cli.load", reached)
    monkeypatch.setattr("decode.workers.load", reached)
    monkeypatch.setattr("decode.compare._run", reached)
    monkeypatch.setattr("distill.convert._make_room", reached)
    monkeypatch.setattr("distill.check.check", reached)
    monkeypatch.setattr("distill.data.__main__.show", reached)
    monkeypatch.setattr("distill.train.train", reached)


def main_of(name: str):
    """A command as `main(arguments)`; train's takes them from the process."""
    if name != "train":
        return MAINS[name]

    def main(arguments: list[str]) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["train", *arguments])
            train.main()

    return main


@pytest.mark.parametrize("name", MAINS)
@budget(0.4)
@given(drawn=st.data())
def test_any_command_line(name, drawn):
    line = drawn.draw(command_lines(name))
    attempt(lambda: run_command(main_of(name), line))
    assert Path("file").read_text() == "mine"


@pytest.mark.parametrize("word", ["[" * 5000, "9" * 4000, "a\nb\x1b[2J", "\udcff", ""])
@pytest.mark.parametrize("name", MAINS)
def test_every_option_with_a_word_of_no_sense(name, word):
    for flag in known_flags(name):
        line = [*USUAL.get(name, ()), flag, word]
        attempt(lambda line=line: run_command(main_of(name), line))


@budget(0.5)
@given(name=st.sampled_from([*d2f.command.COMMANDS, "", "deocde", "-h", "--version"]) | WORDS,
       rest=st.lists(WORDS, max_size=2))  # fmt: skip
def test_any_command_through_d2f(name, rest):
    def main(arguments: list[str]) -> int | None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["d2f", *arguments])
            patch.setattr(d2f.command, "_called_as", None)
            return d2f.command.main()

    attempt(lambda: run_command(main, [name, *rest]))


ROWS = st.lists(
    st.dictionaries(st.sampled_from(["prompt", "messages", "ids", "id", "x"]), VALUES, max_size=3)
    | VALUES,
    max_size=3,
)


@budget()
@given(rows=ROWS, odd=TEXT)
@example(rows=[], odd="[" * 30_000)
@example(rows=[], odd='{"ids": [' + "1" * 5000 + "]}")
def test_any_prompts_file(rows, odd):
    """A line of it may be no JSON."""
    with contextlib.suppress(ValueError, RecursionError):
        odd = "\n".join([*map(json.dumps, rows), odd * (len(odd) % 2)])
    Path("rows.jsonl").write_bytes(odd.encode("utf-8", "surrogatepass"))
    attempt(lambda: run_command(pipeline.main, ["--prompts-file", "rows.jsonl"]))


NONSENSE = {
    "decode": ["--problems 0", "--n 0", "--batch-size -1", "--pause nan", "--pause 61",
               "--tau-add 2", "--tau-conf nan", "--block-size 1000000000", "--max-new-tokens 0",
               "--top-p 0", "--temperature -1", "--temperature inf", "--top-k 0",
               "--seed 99999999999999999999", "--decoder fast", "--window 4", "--tasks story,story",
               "--model", "--raw", "--no-merge", "--output folder", "--output none/x",
               "--output file --trace file", "--device meta", "--dtype int8", "--config odd.yaml",
               "--prompts-file odd.jsonl", "--prompt x --problems 2", "--unknown 1", "stray",
               "--decoder static --tau-add 0.1",
               "--decoder block --block-size 4 --denoising-steps 5",
               "--family x", "--decoder freedave --temperature 1"],
    "evaluate": ["--problems 0", "--problems 99999999999", "--batch-size 0", "--split train",
                 "--json folder", "--json none/x", "--tasks ,", "--device cuda:99", "--tau 7",
                 "--samples 0", "--samples 2", "--pass-at 2", "--pass-at x", "--data x",
                 "--data x.jsonl --judge exact", "--data x --judge no", "--tasks humaneval"],
    "tune": ["--problems 0", "--problems 2147483648", "--eta 1", "--budget 0", "--budget nan",
             "--within nan", "--within -1", "--min-accuracy 2", "--heldout 0", "--repetitions 0",
             "--tau-conf 2", "--tau-conf ''", "--tasks story,story", "--decoder x", "--seed -1",
             "--output file", "--output ''", "--batch-size 0", "--search x"],
    "compare": ["--config odd.yaml", "--problems 0", "--concurrency [0]", "--unknown 1",
                "--entries.nobody.model x", "stray"],
    "states": ["--problems 0", "--batch-size 0", "--seed -1", "--block-sizes 4,4", "--tau-act 2",
               "--block-sizes 0", "--block-sizes x", "--output folder", "--split x",
               "--output file/x"],
    "rollouts": ["--problems 0", "--batch-size 0", "--seed -1", "--temperatures x", "--tau1 0.95",
                 "--temperatures nan", "--decoder block", "--output folder", "--output none/x",
                 "--tau-add 0.1", "--decoder d2f --tau1 0.5"],
    "train": ["--steps 0", "--unknown 1", "stray", "--optimizer.lr nan", "--data.rows 0",
              "--config odd.yaml", "--config none", "--init", "--block_size -1"],
    "convert": ["--family x", "--family causal", "--family sdar", "--output file",
                "--output file/x", "--mask-token ''", "--model none", "--model tiny-d2f"],
    "data": ["--samples 0", "--config none", "--steps 0", "stray"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "words"), [(name, words) for name, cases in NONSENSE.items() for words in cases]
)
def test_nonsense_is_refused(name, words):
    line = [*USUAL.get(name, ()), *("" if word == "''" else word for word in words.split())]
    attempt(lambda: run_command(main_of(name), line), nonsense=True)
