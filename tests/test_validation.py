"""A fault in a configuration is one line: the key, what was expected, what came."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.ablation.ablation_config import read_ablation
from hypothesis import given
from hypothesis import strategies as st

from d2f.config import read_mapping
from d2f.errors import LONGEST, InputError, brief, one_line
from decode.cli import DecoderSettings, split
from decode.compare.config import read_config as read_comparison
from distill.config import read_config

CONFIGS = Path(__file__).parent.parent / "configs"
TRAINING = CONFIGS / "training" / "tiny-d2f.yaml"
COMPARISON = CONFIGS / "comparison" / "compare-tiny.yaml"
ABLATION = CONFIGS / "ablations" / "d2f.yaml"
OPTIONS = CONFIGS / "published" / "d2f-llada-math.yaml"


def read_options(path: Path) -> object:
    return split(read_mapping(path), str(path))


KINDS = {
    TRAINING: (read_config, "a training configuration .*distill/train.py"),
    COMPARISON: (read_comparison, "a comparison configuration .*decode.compare"),
    ABLATION: (read_ablation, "an ablation configuration .*benchmarks.ablation"),
    OPTIONS: (read_options, "a file of decoder options .*decode.pipeline"),
}


@pytest.mark.parametrize(
    "path", [*KINDS, CONFIGS / "accelerate" / "ddp.yaml"], ids=lambda p: p.stem
)
@pytest.mark.parametrize("reader", [reader for reader, _ in KINDS.values()])
def test_another_kind_of_file_is_named_with_the_command_that_takes_it(path, reader, monkeypatch):
    monkeypatch.chdir(CONFIGS.parent)
    own, said = KINDS.get(path, (None, "a configuration of accelerate .*accelerate launch"))
    if reader is own:
        assert reader(path)
        return
    with pytest.raises(InputError, match=rf"{path.stem}\.yaml looks like {said}") as caught:
        reader(path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < len(str(path)) + 250


def test_a_file_that_names_a_decoder_and_nothing_else_is_one_of_options(tmp_path):
    (tmp_path / "c.yaml").write_text("decoder: static")
    with pytest.raises(InputError, match=r"looks like a file of decoder options \(key decoder\)"):
        read_config(tmp_path / "c.yaml")


FAULTS = {
    ("--block_size", "[0]"): "objective.block_size.0: expected at least 1, got 0",
    ("--block_size", "x"):
        r"objective\.block_size: expected a whole number or a list or a mapping, got 'x'",
    ("--optimizer", "[1, 2]"): "optimizer: expected a section of keys, got a list of 2",
    ("--output", "2024"): "output: expected text, got 2024",
    ("--stepz", "3"): "stepz: there is no such key",
    ("--lora.targets", "[q]"): r"objective\.lora\.targets\.0: expected 'q_proj', .*, got 'q'",
    ("--data.columns", "3"): r"data\.columns: expected text or a section of keys, got 3",
    ("--steps", "~"): "steps: expected a whole number, got null",
    ("--data.tasks", "[" + "x, " * 400 + "x]"):
        r"data\.tasks: expected a mapping, got a list of 401",
    ("--init", "{" + ", ".join(f"k{i}: 1" for i in range(400)) + "}"):
        r"init: expected text, got a mapping of 400 keys \(k0, k1, k2, \.\.\.\)",
    ("--attention", "x" * 5000): r"attention: expected 'auto'.*, got 'x{56}\.\.\.",
}  # fmt: skip


@pytest.mark.parametrize(("words", "message"), FAULTS.items(), ids=lambda v: str(v)[:30])
def test_a_fault_is_named_by_its_path_and_shortened(words, message):
    with pytest.raises(InputError, match=rf": {message}") as caught:
        read_config(TRAINING, words)
    assert len(str(caught.value)) < len(str(TRAINING)) + 200


def test_faults_within_a_list_of_entries_are_named_without_the_rest():
    with pytest.raises(InputError, match=r": entries\.1\.model: expected a value, got nothing$"):
        read_comparison(
            COMPARISON, ["--entries", "[{name: a, kind: ours, model: b}, {name: x, kind: ours}]"]
        )
    with pytest.raises(InputError, match=r"entries\.0: expected 'kind' to be one of 'ours', "):
        read_comparison(COMPARISON, ["--entries", "[{name: x, kind: y}]"])


def test_many_faults_are_counted():
    words = [word for i in range(50) for word in (f"--k{i}", "1")]
    with pytest.raises(InputError, match=r"k0: there is no such key; .*; and 44 more$"):
        read_config(TRAINING, words)


@pytest.mark.parametrize(
    "words", [("--a\n\x1b[2J", "1"), ("--data.a\x1d.b", "1e-4\n: ["), ("--a", "\x1d")]
)
def test_what_is_quoted_is_one_line_that_a_terminal_can_show(words):
    with pytest.raises(InputError) as caught:
        read_config(TRAINING, words)
    assert str(caught.value).isprintable()


def test_keys_of_decoder_options_are_quoted_short_and_printable(tmp_path):
    path = tmp_path / "c.yaml"
    for text in ('decoder: {"a\\nb": 1}', '"a\\nb": 1', f"{'x' * 900}: 1"):
        path.write_text(text)
        with pytest.raises(InputError) as caught:
            read_options(path)
        assert str(caught.value).isprintable() and len(str(caught.value)) < len(str(path)) + 700
    with pytest.raises(InputError, match="has no option xxx") as caught:
        DecoderSettings("static", {"x" * 5000: 1}).check([8])
    assert len(str(caught.value)) < 600


def test_a_long_key_is_shortened():
    with pytest.raises(InputError, match="expected a finite number, got inf") as caught:
        read_config(TRAINING, ["--data.tasks", "{" + "x" * 900 + ": .inf}"])
    assert len(str(caught.value)) < len(str(TRAINING)) + 150


@given(st.text(alphabet="a\x00\u2028", max_size=8), st.integers(0, LONGEST))
def test_an_error_quotes_the_ends_of_what_is_long(part, times):
    line = one_line(part * times)
    if len(line) > LONGEST:
        line = f"{line[: 2 * LONGEST // 3]} ... {line[-LONGEST // 4 :]}"
    assert brief(part * times) == line
