"""The benchmarks' own behaviour; what they measure is not for tests."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import (
    confidence,
    decode_step,
    masked_kl,
    prefill,
    shapes,
    span_attention,
    train_step,
)

ROOT = Path(__file__).parent.parent
COMMANDS = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
    for path in (ROOT / "benchmarks").rglob("*.py")
    if path.name == "__main__.py" or '__name__ == "__main__"' in path.read_text(encoding="utf-8")
)
on_a_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def test_these_are_all_the_commands():
    assert {"benchmarks.tables", "benchmarks.ablation", "benchmarks.gpu"} < set(COMMANDS)
    assert len(COMMANDS) >= 10


@pytest.mark.parametrize("module", COMMANDS)
def test_help_prints_and_does_nothing_else(module, monkeypatch, capsys):
    def forbidden(*arguments, **more):
        raise AssertionError("--help wrote a file or started a process")

    for place, name in [(Path, "write_text"), (Path, "write_bytes"), (Path, "mkdir")]:
        monkeypatch.setattr(place, name, forbidden)
    monkeypatch.setattr("subprocess.Popen.__init__", forbidden)
    monkeypatch.setattr("multiprocessing.process.BaseProcess.start", forbidden)
    monkeypatch.setattr(sys, "argv", [module, "--help"])
    parent, _, child = module.rpartition(".")
    if module in sys.modules:  # what is imported now takes its place there, too
        monkeypatch.setattr(sys.modules[parent], child, sys.modules[module])
    for name in [n for n in sys.modules if n == module or n.startswith(module + ".")]:
        monkeypatch.delitem(sys.modules, name)  # runpy warns of what is imported already
    with pytest.raises(SystemExit) as end:
        runpy.run_module(module, run_name="__main__")
    assert not end.value.code
    out = capsys.readouterr().out
    assert out.startswith("usage: ") and "--help" in out


@on_a_cpu
def test_without_arguments_a_cpu_measures_small_shapes(monkeypatch, capsys):
    """Nothing is built beyond the shapes meant for a CPU."""
    built = []

    def build(shape, dtype, device):
        built.append((shape, device))
        return shapes.build(shape, dtype, "meta")

    def done(*arguments):
        return {"eager": 1.0}

    for name, value in [("build", build), ("measure", done), ("bandwidth", lambda device: 1e9)]:
        monkeypatch.setattr(decode_step, name, value)
    monkeypatch.setattr(decode_step, "try_compile", lambda model: None)
    assert decode_step.main([]) == 0
    assert [shape for shape, device in built if device == "cpu"] == ["tiny", "small"]
    monkeypatch.setattr(train_step, "in_fresh_process", lambda *arguments: None)
    assert train_step.main([]) == 0
    assert "small, 1 x 1024 tokens" in capsys.readouterr().out


@on_a_cpu
def test_without_arguments_a_cpu_measures_small_sizes(monkeypatch):
    """Largest tensors of a default run: what is measured here must end on a laptop."""
    largest = []

    def on(*arguments):
        largest.append(arguments)
        return None

    monkeypatch.setattr(masked_kl, "in_fresh_process", on)
    masked_kl.main([])
    assert max(rows * vocabulary for _, _, rows, vocabulary, *_ in largest) <= 2**23
    sizes = []

    def timed(run, copies, device, repeat):
        sizes.append([tuple(x.shape) for x in run.args if isinstance(x, torch.Tensor)])
        return 1.0

    monkeypatch.setattr(confidence, "replayed_milliseconds", timed)
    confidence.main([])
    assert max(x[0] * head[0] for x, head in sizes) <= 2**23
    seen = []
    monkeypatch.setattr(span_attention, "measure", lambda *a: seen.append(a[1:3]) or {})
    span_attention.main([])
    assert max(len(spans) * slots for spans, slots in seen) <= 2**18


@pytest.mark.parametrize("module", [decode_step, train_step])
def test_a_shape_that_does_not_fit_is_an_error_before_it_is_built(module, monkeypatch, capsys):
    monkeypatch.setattr(shapes, "free_bytes", lambda device: 2**33)
    monkeypatch.setattr(module, "about", lambda dtype: pytest.fail("it began"))
    flag = "--shapes" if module is decode_step else "--shape"
    assert module.main([flag, "LLaDA-8B", "--dtype", "float32"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: LLaDA-8B needs about ")
    assert "8.0 GiB are free" in said


def test_a_gpu_measures_the_large_shapes_that_it_holds(monkeypatch):
    needed = {"LLaDA-8B": 16, "Dream-7B": 15, "tiny": 1, "small": 1}
    for free, expected in [(20, shapes.LARGE), (15, ["Dream-7B"]), (4, shapes.SMALL)]:
        monkeypatch.setattr(shapes, "free_bytes", lambda device, free=free: free)
        assert list(shapes.default_shapes(needed, "cuda")) == list(expected)


def test_the_estimate_of_a_shape_is_its_weights_and_more():
    needed = decode_step.memory_needed("LLaDA-8B", torch.bfloat16, 128, 4096, "cpu")
    assert 2 * 8.0e9 < needed < 2 * 8.0e9 * 1.4


def test_what_was_measured_is_kept_where_a_later_row_fails(tmp_path, monkeypatch):
    def measure(model, rows, *arguments):
        if rows == 2:
            raise RuntimeError("no memory")
        return {"eager": 1.0}

    for name, value in [("bandwidth", lambda device: 1e9), ("try_compile", lambda model: None)]:
        monkeypatch.setattr(decode_step, name, value)
    monkeypatch.setattr(decode_step, "measure", measure)
    sizes = ["--shapes", "tiny", "--rows", "1", "2", "--cached", "8"]
    with pytest.raises(RuntimeError):
        decode_step.main([*sizes, "--json", str(tmp_path / "d.json")])
    assert [row["rows"] for row in json.loads((tmp_path / "d.json").read_text())["measured"]] == [1]

    def measure_way(way, *arguments):
        if way == "ours":
            raise RuntimeError("killed")
        return {"seconds": 1.0, "tokens_per_second": 1.0, "loss": 1.0, "peak_mib": 1.0}

    monkeypatch.setattr(train_step, "in_fresh_process", lambda _, *rest: measure_way(*rest))
    with pytest.raises(RuntimeError):
        train_step.main(["--shape", "tiny", "--json", str(tmp_path / "t.json")])
    measured = json.loads((tmp_path / "t.json").read_text())["measured"]
    assert [row["way"] for row in measured] == ["plain"]


def test_a_long_prompt_is_measured_whole_and_in_pieces(tmp_path, capsys):
    """What is counted, not what it takes: rows and forwards."""
    file = tmp_path / "prefill.json"
    sizes = ["--prompt", "90", "--running", "2", "--rows", "16", "--repeat", "1"]
    assert prefill.main(["--shape", "tiny", *sizes, "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    assert {"device", "dtype", "torch", "transformers", "date", "counted"} <= set(report)
    found = {(row["decoder"], row["prefill_rows"]): row for row in report["measured"]}
    assert len(found) == 6 == len(capsys.readouterr().out.splitlines()) - 2
    assert found["autoregressive", None]["rows"] == 90 + 2
    assert found["autoregressive", 16]["rows"] == 16 + 2
    assert [found["autoregressive", rows]["calls"] for rows in (None, 16)] == [1, 6]
    assert found["block", 16]["rows"] < 16 + 2 * 9 < 90 < found["block", None]["rows"]
    assert found["d2f", 16]["rows"] >= 90, "the prompt is one block"


@pytest.mark.parametrize(
    ("flag", "value"), [("--prompt", "0"), ("--rows", "0"), ("--prompt", "9000")]
)
def test_sizes_that_cannot_be_measured_are_refused(flag, value, capsys):
    assert prefill.main(["--shape", "tiny", flag, value]) == 2
    assert capsys.readouterr().err.startswith("error: expected ")
