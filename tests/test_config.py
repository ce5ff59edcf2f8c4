"""Configurations: YAML as people write it, one line for a fault, and flags that are flags' own."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from d2f.config import Section, dump, load, override, put, read_mapping
from d2f.errors import LONGEST, InputError, brief
from decode.cli import DecoderSettings, split
from decode.compare.config import read_config as read_comparison
from distill.config import read_config

CONFIGS = Path(__file__).parent.parent / "configs"
TRAINING = CONFIGS / "training" / "tiny-d2f.yaml"
SCALARS = {
    "1e-4": 1e-4, "1E5": 1e5, "1.": 1.0, ".5": 0.5, "+12": 12, "-3": -3, "0x1F": 31,
    ".inf": math.inf, "~": None, "null": None, "": None, "true": True, "FALSE": False, "no": "no",
    "Off": "Off", "yes": "yes", "y": "y", "1_000": "1_000", "1:30": "1:30",
    "2026-11-21": "2026-11-21", "=": "=", "'1'": "1", "!!str 1": "1", "1e": "1e", "1.2.3": "1.2.3",
}  # fmt: skip


@pytest.mark.parametrize(("text", "value"), SCALARS.items())
def test_scalars_are_those_of_yaml_1_2(tmp_path, text, value):
    path = tmp_path / "c.yaml"
    path.write_text(f"a: {text}\nb: [x, {text or '~'}]\n")
    values = read_mapping(path)
    assert values == {"a": value, "b": ["x", value]} and type(values["a"]) is type(value)


TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=8)
WRITTEN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT
    | st.sampled_from([text for text in SCALARS if text]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=10,
)  # fmt: skip


@given(WRITTEN)
def test_what_is_written_reads_back_the_same(value):
    """By this reader and by those of YAML 1.1."""
    assert load(dump(value), "x") == value == yaml.safe_load(dump(value))


@pytest.mark.parametrize(
    ("text", "said"),
    {
        "": "expected a mapping of keys, got an empty file",
        "- a\n- b\n": "expected a mapping of keys, got a list of 2",
        "steps: 1\nsteps: 2": r"the key steps is there twice \(line 2\)",
        "a: [1, 2": r"not YAML: .* \(line 1\)",
        "a: b: c": "not YAML: mapping values are not allowed",
        "a: *b": "not YAML: .*undefined alias",
        "a: !!python/object/apply:os.system [ls]": "not YAML: .*os.system",
    }.items(),
)
def test_a_bad_file_is_one_line_that_names_it(tmp_path, text, said):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=said) as caught:
        read_mapping(path)
    assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(InputError, match=r"c\.yaml: cannot be read: No such file"):
        read_mapping(tmp_path / "c.yaml")
    (tmp_path / "c.yaml").write_bytes(b"a: \xff")
    with pytest.raises(InputError, match=r"c\.yaml: not YAML"):
        read_mapping(tmp_path / "c.yaml")


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("output", "runs/try #2", "runs/try #2"),
        ("output", "2024", "2024"),
        ("output", "a: [b", "a: [b"),
        ("optimizer.lr", "1e-4", 1e-4),
        ("steps", "1e3", 1000),
        ("gradient_checkpointing", "no", False),
        ("mixed_precision", "no", "no"),
        ("objective.name", "d2f", "d2f"),
    ],
)
def test_an_override_is_read_as_what_its_key_holds(key, text, value):
    found = read_config(TRAINING, [f"--{key}", text])
    for part in key.split("."):
        found = getattr(found, part)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("words", "said"),
    {
        "--optimizer.learning_rate 1": "no such key; did you mean optimizer.lr?",
        "--optimiser.lr 1": "no such key; did you mean optimizer.lr?",
        "--max_steps 1": "no such key; did you mean steps?",
        "--stepz 3": "no such key; did you mean steps?",
        "--steps x": "expected a whole number, got 'x'",
        "--steps ~": "expected a whole number, got null",
        "--steps 1000000000000": "expected at most 1000000000",
        "--optimizer [1,2]": "expected a section of keys, got a list of 2",
        "--seed -1": "expected at least 0, got -1",
        "--data.tasks [x,x]": "expected a mapping, got a list of 2",
        "--data.tasks {}": "expected at least 1 item, got a mapping of 0 keys",
    }.items(),
)
def test_a_flags_fault_is_the_flags_own(words, said):
    """And not the file's that it overrides."""
    with pytest.raises(InputError) as caught:
        read_config(TRAINING, words.split(" "))
    assert said in str(caught.value) and str(caught.value).startswith(words.split(".")[0][:6])
    assert TRAINING.name not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    {
        "objective.lora {rank: 4}": r"objective\.lora\.rank: there is no such key; did you mean "
        r"objective\.lora\.r\?",
        "objective.block_size [0]": "objective.block_size.0: expected at least 1, got 0",
        "objective.block_size {8: .nan}": "objective.block_size.8: expected a finite number",
        "objective.noise.low 0.8": "noise.low must not exceed noise.high 0.7, got 0.8",
        "optimizer {betas: [2, 0.3]}": "optimizer.betas.0: expected less than 1, got 2",
        "data {tasks: {chess: 1}}": "got 'chess'; expected one of story",
        "data.tasks.story .inf": "data.tasks.story: expected a finite number, got inf",
        "output ''": "output: expected at least 1 character",
        "init {a: 1, b: 2, c: 3, d: 4}": r"init: expected text, got a mapping of 4 keys \(a, b, c",
        "attention " + "x" * 5000: r"attention: expected 'auto'.*, got 'x{56}\.\.\.",
    }.items(),
)
def test_a_fault_is_named_by_its_path_and_shortened(tmp_path, text, said):
    path, values = tmp_path / "c.yaml", read_mapping(TRAINING)
    key, _, value = text.partition(" ")
    put(values, key, load(value, "x"))
    path.write_text(dump(values))
    with pytest.raises(InputError, match=said) as caught:
        read_config(path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < len(str(path)) + 250


def test_many_faults_are_counted(tmp_path):
    values = read_mapping(TRAINING) | {f"k{i}": 1 for i in range(50)}
    (tmp_path / "c.yaml").write_text(dump(values))
    with pytest.raises(InputError, match=r"k0: there is no such key; .*; and 44 more$"):
        read_config(tmp_path / "c.yaml")


@pytest.mark.parametrize(
    ("words", "said"),
    {
        "--entries.D2F.options.tau_conf 7": "entry D2F: tau_conf must",
        "--entries.D2F.options {window: 3}": "entry D2F: the decoder d2f has no option window",
        "--entries.D2F.options {tau_x: 1}": "entry D2F: options: no decoder has an option tau_x",
        "--entries.D2F.decoder fast": "entry D2F: options: decoder: got 'fast'",
        "--entries.D2F.device tpu": r"entries\.3\.device: expected text like",
        "--entries.vLLM.startup_seconds 0": "startup_seconds: expected more than 0",
        "--entries.vLMM.model x": "got 'vLMM'; did you mean vLLM\\?; expected one of",
        "--entries [{name: a, kind: ours, model: b}, {name: x, kind: ours}]":
            r"entries\.1\.model: expected a value, got nothing$",
        "--entries [{name: x, kind: y}]": "entries.0: Input tag 'y' .* expected tags: 'ours', ",
        "--max_new_tokens 1000000000": "max_new_tokens: expected at most",
    }.items(),
)  # fmt: skip
def test_faults_of_a_comparison(monkeypatch, words, said):
    monkeypatch.chdir(CONFIGS.parent)
    with pytest.raises(InputError, match=said):
        read_comparison(CONFIGS / "comparison/compare-tiny.yaml", words.split(" ", 1))


def test_an_override_names_a_member_by_its_name_or_place():
    values = {"a": {"k": {"n": 1}}, "b": [{"name": "x-y", "m": 1}, {"name": "z"}]}

    class Anything(Section, extra="allow"):
        pass

    override(values, ["--a.k.n", "5", "--b.x_y.m", "2", "--b.1.m", "[3]", "--c.d", "t"], Anything)
    assert values == {
        "a": {"k": {"n": 5}}, "b": [{"name": "x-y", "m": 2}, {"name": "z", "m": [3]}],
        "c": {"d": "t"},
    }  # fmt: skip
    for words in (["--a"], ["a", "1"], ["--a.k.n.x", "1"], ["--b.w.m", "1"]):
        with pytest.raises(InputError):
            override(values, words, Anything)


def test_keys_of_decoder_options_are_quoted_short_and_printable():
    with pytest.raises(
        InputError, match=r"x: no decoder has an option tau_cnf; did you mean tau_conf\?"
    ):
        split({"tau_cnf": 1}, "x")
    for values in ({"a\nb": 1}, {"x" * 900: 1}, {"decoder": {"a\nb": 1}}):
        with pytest.raises(InputError) as caught:
            split(values, "x")
        assert str(caught.value).isprintable() and len(str(caught.value)) < LONGEST
    with pytest.raises(InputError, match="has no option xxx"):
        DecoderSettings("static", {"x" * 500: 1}).check([8])


def test_an_error_quotes_the_ends_of_what_is_long():
    said = brief("a" + "\u2028b" * LONGEST + "z")
    assert said.startswith(r"a\u2028b") and said.endswith("bz") and len(said) < LONGEST
    assert brief("a\nb") == r"a\nb"
