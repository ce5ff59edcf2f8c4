"""The benchmarks' own behaviour; what they measure is not for tests."""

import pytest
import torch

from benchmarks import gpu


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpu_measurements_say_that_there_is_no_gpu(tmp_path, capsys):
    assert gpu.main(["--output", str(tmp_path / "gpu.json")]) == 2
    assert "expected an NVIDIA GPU" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("python", [None, "py"])
def test_the_comparison_on_a_gpu_is_a_valid_configuration(monkeypatch, python):
    """Without vLLM its entries are left out; what is left is still read."""
    from decode.comparison.config import read_config

    seen = []

    def run(module, *arguments):
        seen.append(read_config(arguments[1], arguments[2:]))
        raise InterruptedError

    monkeypatch.setattr(gpu, "_run", run)
    with pytest.raises(InterruptedError):
        gpu.compare(python)
    (config,) = seen
    kinds = [entry.kind for entry in config.entries]
    assert ("vllm" in kinds) == (python is not None)
    assert config.reference.kind == ("vllm" if python else "ours")
    assert {e.device for e in config.entries if e.kind != "vllm"} == {"cuda"}
