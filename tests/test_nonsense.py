"""Values that no run can mean are refused where the configuration is read, before any work."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.ablation.ablation_config import read_ablation

from d2f.errors import InputError
from decode import Block, Static
from decode.compare.config import read_config as read_comparison
from distill.config import read_config

CONFIGS = Path(__file__).parent.parent / "configs"

TRAINING = {
    "--model.heads 3": "model: hidden_size must be a multiple of 2 x heads 3, got 256",
    "--model.kv_heads 3": "model: heads must be a multiple of kv_heads 3, got 4",
    "--model.hidden_size 1000000000000": "model.hidden_size: expected at most 65536, got 10{12}",
    "--model.layers 1000000": "model.layers: expected at most 1000",
    "--optimizer.betas [2, 3]": "optimizer.betas.0: expected less than 1, got 2.*betas.1",
    "--optimizer.betas [-1, 0]": "optimizer.betas.0: expected at least 0",
    "--optimizer.lr .inf": "optimizer.lr: expected a finite number, got inf",
    "--optimizer.lr .nan": "optimizer.lr: expected a finite number, got nan",
    "--optimizer.lr 1e300": "optimizer.lr: expected at most 10",
    "--optimizer.clip -.inf": "optimizer.clip: expected a finite number",
    "--seed -1": "seed: expected at least 0, got -1",
    "--seed 9223372036854775808": "seed: expected less than 9223372036854775808",
    "--data.tasks.story .inf": "data.tasks.story: expected a finite number, got inf",
    "--data.tasks {story: 0}": "data.tasks.story: expected more than 0, got 0",
    "--data.tasks {story: 1e308, sudoku: 1e308}": "data.tasks.story: expected at most 1000000",
    "--data.tasks {}": "data.tasks: expected at least 1 of them, got a mapping of 0 keys",
    "--data.tasks {chess: 1}": "data.tasks.*expected a task among story, .*'chess'",
    "--data.rows 1000000000000": "data.rows: expected at most 65536",
    "--data {tasks: {story: 1}, rows: 65536, row_length: 1048576}": "x data.row_length must be at",
    "--steps 1000000000000": "steps: expected at most 1000000000",
    "--block_size 1000000000000": "block_size: expected at most 1048576",
    "--block_size {8: .nan}": "block_size.8: expected a finite number",
    "--noise {low: 0.8}": "noise.low must not exceed noise.high 0.7, got 0.8",
    "--lora.r 1000000": "lora.r: expected at most 8192",
    "--lora.dropout 1": "lora.dropout: expected less than 1, got 1",
    "--evaluation.tasks [chess]": "evaluation: tasks: expected a task among",
    "--evaluation.options {tau_conf: .nan}": "evaluation.options.tau_conf: expected a finite",
    "--evaluation.problems 2147483648": "evaluation.problems: expected at most 1000000",
    "--output ''": "output: expected text that is not empty",
}
MASKING = {
    "--noise {min_ratio: 0.9, max_ratio: 0.5}": "min_ratio must not exceed .* 0.5, got 0.9",
    "--noise.min_ratio 0": "noise.min_ratio: expected more than 0, got 0",
    "--noise.block_sizes []": "noise.block_sizes: expected at least 1 of them",
}
COMPARISON = {
    "--problems 2147483648": "problems: expected at most 1000000",
    "--concurrency [1000000000]": "concurrency.0: expected at most 100000",
    "--seed -1": "seed: expected at least 0",
    "--max_new_tokens 1000000000": "max_new_tokens: expected at most 1048576",
    "--limits.request .inf": "limits.request: expected a finite number",
    "--entries.D2F.options.tau_conf 7": "entry D2F: tau_conf must lie in",
    "--entries.D2F.options {window: 3}": "entry D2F: the decoder d2f has no option window",
    "--entries.D2F.options {tau_x: 1}": "entry D2F: options: unknown key tau_x",
    "--entries.D2F.decoder fast": "entry D2F: options: decoder must be .*got 'fast'",
    "--entries.D2F.device tpu": r"entries\.3\.device: expected text like",
    "--entries.D2F.dtype int8": "dtype: expected 'float32'",
    '--entries.D2F.name "a\\nb"': "name: expected printable characters, got 'a",
    "--entries.D2F.threads 0": "threads: expected at least 1",
    "--entries.vLLM.env {a=b: c}": "env.*: expected text like",
    "--entries.vLLM.body {top_p: .inf}": "body.top_p: expected a finite number",
    "--entries.vLLM.startup_seconds 0": "startup_seconds: expected more than 0",
}
ABLATION = {
    "--seeds [-1]": "seeds.0: expected at least 0",
    "--problems 1000000000000": "problems: expected at most",
    "--train " + "x" * 2000: "train: expected text of at most 1000 characters",
    "--set.lora.r .inf": "set.lora.r: expected a finite number",
    "--set {optimizer.lr: 1e300}": "optimizer.lr: expected at most 10",
    "--decode [{name: x, decoder: d2f, options: {block_size: 1e9}}]": "block_size must be",
    "--decode [{name: x, decoder: static, options: {steps: 1000000000}}]": "steps must be at most",
}
CASES = [
    (reader, path, words, message)
    for reader, path, cases in (
        (read_config, "training/tiny-d2f", TRAINING),
        (read_config, "training/tiny-teacher-start", MASKING),
        (read_comparison, "comparison/compare-tiny", COMPARISON),
        (read_ablation, "ablations/d2f", ABLATION),
    )
    for words, message in cases.items()
]


@pytest.mark.parametrize(("reader", "path", "words", "message"), CASES)
def test_nonsense_is_named(monkeypatch, reader, path, words, message):
    monkeypatch.chdir(CONFIGS.parent)
    with pytest.raises(InputError, match=message) as caught:
        reader(CONFIGS / f"{path}.yaml", words.split(" ", 1))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["options", "{tau_x: 1}"], "unknown key tau_x"),
        (["decoder", "fast"], "decoder must be .*got 'fast'"),
    ],
)
def test_nonsense_over_a_file_is_named_with_the_file(monkeypatch, words, message):
    monkeypatch.chdir(CONFIGS.parent)
    key, value = words
    place = r"entry D2F tuned: options over \S*tuned/tiny-d2f-long-\w+\.yaml: "
    with pytest.raises(InputError, match=place + message):
        read_comparison(
            CONFIGS / "comparison/compare-tiny.yaml", [f"--entries.D2F tuned.{key}", value]
        )


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tiny-d2f", "--noise {low: 0.5, high: 0.5}"),
        ("tiny-d2f", "--block_size 192 --data.row_length 192"),
        ("tiny-teacher", "--noise.min_ratio 0.4 --noise.max_ratio 0.4"),
        ("tiny-teacher", "--optimizer.warmup 0"),
        ("tiny-teacher", "--optimizer.betas [0,0]"),
    ],
)
def test_bounds_may_meet(name, words):
    parts = words.split(" ", 1) if "{" in words else words.split()
    assert read_config(name, parts) != read_config(name)


def test_a_decoder_that_would_count_for_ever_is_refused():
    for make in (lambda: Block(block_size=10**9), lambda: Static(steps=2 * 10**9, block_size=8)):
        with pytest.raises(InputError, match="must be at most 1048576, got"):
            make()
