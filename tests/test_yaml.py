"""YAML is read as people write it (core schema of YAML 1.2), whatever a file holds."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from d2f.config import DEEPEST, MOST_BYTES, dump, load, override, read_mapping
from d2f.errors import InputError
from distill.config import read_config

ROOT = Path(__file__).parent.parent
TRAINING = ROOT / "configs" / "training" / "tiny-ar.yaml"

SCALARS = {
    "1e-4": 1e-4, "1E5": 1e5, "1.": 1.0, ".5": 0.5, "+12": 12, "-3": -3, "012": 12, "0o12": 10,
    "0x1F": 31, ".inf": math.inf, "-.INF": -math.inf, "~": None, "null": None, "": None,
    "true": True, "FALSE": False, "no": "no", "Off": "Off", "yes": "yes", "on": "on", "y": "y",
    "1_000": "1_000", "1:30": "1:30", "2026-11-21": "2026-11-21", "0b1": "0b1", "=": "=",
    "'1'": "1", "!!str 1": "1", "1e": "1e", "1.2.3": "1.2.3",
}  # fmt: skip


@pytest.mark.parametrize(("text", "value"), SCALARS.items())
def test_scalars_are_those_of_the_core_schema(tmp_path, text, value):
    """The same in a file, in a list, and on the command line."""
    path = tmp_path / "c.yaml"
    path.write_text(f"a: {text}\nb: [x, {text or '~'}]\n")
    values = read_mapping(path)
    override(values, ["--c.d", text])
    assert values == {"a": value, "b": ["x", value], "c": {"d": value}}
    assert type(values["a"]) is type(values["c"]["d"]) is type(value)
    assert math.isnan(load(".NaN", "x"))


def test_the_override_of_the_readme_is_a_number():
    config = read_config(TRAINING, ["--optimizer.lr", "1e-4", "--model.layers", "012"])
    assert config.optimizer.lr == 1e-4 and config.model.layers == 12


@pytest.mark.parametrize("word", ["no", "Off", "false"])
def test_a_truth_value_may_be_said_in_words(word):
    """`no` is text, but a key that is a truth value takes it."""
    config = read_config(TRAINING, ["--gradient_checkpointing", word, "--mixed_precision", "no"])
    assert config.gradient_checkpointing is False and config.mixed_precision == "no"
    assert read_config(TRAINING, ["--gradient_checkpointing", "yes"]).gradient_checkpointing
    with pytest.raises(InputError, match="gradient_checkpointing"):
        read_config(TRAINING, ["--gradient_checkpointing", "maybe"])


def nested_aliases(member: str) -> str:
    """Each of nine values is ten times the one before."""
    lines = ["a0: &a0 {x: 1}"]
    lines += [f"a{i}: &a{i} {member % ','.join([f'*a{i - 1}'] * 10)}" for i in range(1, 10)]
    return "\n".join(lines)


BAD_FILES = {
    "": "expected a mapping of keys, the file is empty",
    "# nothing\n": "the file is empty",
    "- a\n- b\n": "expected a mapping of keys, got a list of 2",
    "7": "expected a mapping of keys, got 7",
    "steps: 1\nsteps: 2": r"the key steps is there twice \(line 2\)",
    "{1: 2, '1': 3}": "the key 1 is there twice",
    "~: 1": "a key must be text or a whole number",
    "? [a]\n: 1": "a key must be text or a whole number",
    "a: [1, 2": r"not YAML: .* \(line 1\)",
    "a: b: c": "not YAML: mapping values are not allowed",
    "a: 1\n---\nb: 1": "not YAML: .*another document",
    "a: \0": "not YAML: a character that is not allowed",
    'a: "\\0"': "text with a NUL",
    'a: "\\ud800"': "half a surrogate pair",
    'a: "\\U99999999"': "not YAML",
    "a: *b": "not YAML: .*undefined alias",
    "a: *" + "b" * 5000: "not YAML: .*undefined alias",
    "a: &a [*a]": f"nested more than {DEEPEST} deep",
    "a: " + "[" * 100_000: f"nested more than {DEEPEST} deep",
    "a: " + "{b: " * 10_000: f"nested more than {DEEPEST} deep",
    nested_aliases("[%s]"): "aliases counted each time",
    nested_aliases("{<<: [%s]}"): "aliases counted each time",
    "a: !!python/object/apply:os.system [ls]": "the tag .*os.system is not supported",
    "a: !!set {b}": "the tag .*set is not supported",
    "a: !mine text": "the tag !mine is not supported",
    "a: !!int x": "'x' cannot be read as int",
    "a: " + "1" * 5000: "cannot be read as int",
    "a: '" + "x" * MOST_BYTES + "'": f"expected at most {MOST_BYTES} bytes",
    "<<: 3": "<< needs a mapping",
}


@pytest.mark.parametrize("text", BAD_FILES, ids=lambda text: text[:20].encode().hex())
def test_a_bad_file_is_one_line_that_names_it(tmp_path, text):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=BAD_FILES[text]) as caught:
        read_mapping(path)
    said = str(caught.value)
    assert said.startswith(str(path)) and "\n" not in said and len(said) < len(str(path)) + 200


def test_other_bytes_are_named(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_bytes("steps: 1".encode("utf-16"))
    with pytest.raises(InputError, match="not UTF-8"):
        read_mapping(path)
    path.write_bytes(b"a" * (MOST_BYTES - 1) + b"\xff")  # as long as a file may be
    with pytest.raises(InputError, match="not UTF-8"):
        read_mapping(path)
    path.write_bytes("é".encode() * MOST_BYTES)  # cut within a character where it is too long
    with pytest.raises(InputError, match="expected at most"):
        read_mapping(path)
    path.write_bytes(b"\xef\xbb\xbfsteps: 1")  # as some editors begin a file
    assert read_mapping(path) == {"steps": 1}
    with pytest.raises(InputError, match="expected at most"):
        read_mapping("/dev/zero")


@pytest.mark.parametrize("text", ["é", "天", "xé"])
def test_a_file_that_is_too_long_is_never_read_in_part(tmp_path, text):
    """Whatever its characters: of one behind a comment only the comment would be cut."""
    path = tmp_path / "c.yaml"
    comment = text * (MOST_BYTES // len(text.encode()))
    path.write_text(f"steps: 1\n# {comment}\nsteps_more: 2", encoding="utf-8")
    with pytest.raises(InputError, match=f"expected at most {MOST_BYTES} bytes"):
        read_mapping(path)
    whole = f"a: {'x' * (MOST_BYTES - 3)}"
    path.write_text(whole)
    assert len(read_mapping(path)["a"]) == MOST_BYTES - 3


def test_text_that_comes_from_no_file_has_the_same_limit():
    with pytest.raises(InputError, match=f"--key: expected at most {MOST_BYTES} bytes"):
        load("x" * (MOST_BYTES + 1), "--key")


def test_merged_mappings_share_nothing():
    """An override of one does not change the other."""
    values = load("a: &x {k: {n: 1}, l: 1}\nb: {<<: *x, l: 2}\nc: *x", "x")
    assert values == {"a": {"k": {"n": 1}, "l": 1}, "b": {"k": {"n": 1}, "l": 2},
                      "c": {"k": {"n": 1}, "l": 1}}  # fmt: skip
    override(values, ["--a.k.n", "5"])
    assert values["b"]["k"]["n"] == values["c"]["k"]["n"] == 1


TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=8)
WRITTEN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT
    | st.sampled_from([text for text in SCALARS if text]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=10,
)  # fmt: skip


@pytest.mark.parametrize("text", SCALARS)
def test_text_that_looks_like_a_value_is_written_as_text(text):
    """Of either schema: 1e-4 is text to YAML 1.1 and a number here, no is the other way round."""
    assert load(dump([text]), "x") == [text] == yaml.safe_load(dump([text]))


@given(WRITTEN)
def test_what_is_written_reads_back_the_same(value):
    """By this reader and by those of YAML 1.1."""
    assert load(dump(value), "x") == value == yaml.safe_load(dump(value))


@given(st.text(max_size=40) | TEXT.map(lambda text: f"a: {text}"))
def test_any_text_is_read_or_refused(text):
    try:
        load(text, "x")
    except InputError as error:
        assert "\n" not in str(error)
