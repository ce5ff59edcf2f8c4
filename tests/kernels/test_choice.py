"""Which computation is chosen, and that a kernel which errs is found out before it is."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from decode import pipeline
from triton_kernels import confidence, masked_kl, span_attention
from triton_kernels import dispatch as choice
from triton_kernels.dispatch import CHECKS


@pytest.fixture(autouse=True)
def asked_anew():
    choice.is_sound.cache_clear()
    yield
    choice.is_sound.cache_clear()


def test_the_files_of_the_kernels_register_their_checks():
    owners = {name: check.__module__ for name, check in CHECKS.items()}
    assert owners == {
        "span_attention": span_attention.__name__,
        "write_slots": span_attention.__name__,
        "confidence": confidence.__name__,
        "masked_kl": masked_kl.__name__,
    }


@pytest.mark.parametrize("name", CHECKS)
def test_every_kernel_is_sound_here(name, device):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the Triton kernel")
        assert choice.is_sound(name, torch.float32, torch.device(device), 32)


def spoiled(run):
    """The same with a result that is wrong in one place; not where the kernel is switched off."""

    def wrong(*args, **options):
        found = run(*args, **options)
        if args[-1] is False:
            return found
        whole = found[0] if isinstance(found, tuple) else found
        whole.view(-1)[-1] += 1
        return found

    return wrong


def wrong_token(run):
    def wrong(*args, **options):
        found = run(*args, **options)
        found.token[0] += 1
        return found

    return wrong


def writes_nothing(run):
    return lambda *args, kernel: None if kernel else run(*args, kernel=kernel)


@pytest.mark.parametrize(
    ("name", "place", "function", "fault"),
    [
        ("span_attention", span_attention, "forward", spoiled),
        ("write_slots", span_attention, "write_slots", writes_nothing),
        ("confidence", confidence, "launch", wrong_token),
        ("masked_kl", masked_kl, "difference", spoiled),
    ],
)
def test_a_kernel_that_errs_is_left_out_with_a_warning(
    monkeypatch, device, name, place, function, fault
):
    monkeypatch.setattr(place, function, fault(getattr(place, function)))
    with pytest.warns(RuntimeWarning, match=f"{name} does not work in torch.float32"):
        assert not choice.is_sound(name, torch.float32, torch.device(device), 32)


def test_a_kernel_that_does_not_compile_is_left_out(monkeypatch, device):
    def broken(*args, **options):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(span_attention, "forward", broken)
    with pytest.warns(RuntimeWarning, match="no such instruction"):
        assert not choice.is_sound("span_attention", torch.float32, torch.device(device), 64)


def on_a_gpu(dtype=torch.float32, device="cpu"):
    """device: where the kernel is looked at, for want of a GPU in the interpreter."""
    return SimpleNamespace(dtype=dtype, is_cuda=True, device=torch.device(device), shape=(2, 32))


@pytest.mark.parametrize(("told", "used"), [("0", False), ("1", True), (None, True)])
def test_the_environment_overrides_what_is_chosen_on_a_gpu(monkeypatch, device, told, used):
    if told is None:
        monkeypatch.delenv(choice.VARIABLE, raising=False)
    else:
        monkeypatch.setenv(choice.VARIABLE, told)
    monkeypatch.setitem(CHECKS, "confidence", lambda *of: None)
    assert choice.use_kernel("confidence", on_a_gpu(device=device)) is used


def test_a_bad_value_in_the_environment_is_an_error(monkeypatch):
    monkeypatch.setenv(choice.VARIABLE, "yes")
    with pytest.raises(ValueError, match="must be 0 or 1, or not set, got 'yes'"):
        choice.use_kernel("confidence", on_a_gpu())


def test_a_cpu_and_fp64_take_the_plain_computation():
    assert not choice.use_kernel("confidence", torch.zeros(2, 3))
    assert not choice.use_kernel("confidence", on_a_gpu(torch.float64), True)
    assert choice.use_kernel("confidence", torch.zeros(2, 3), True)


ROOT = Path(__file__).parents[2]
WITHOUT_TRITON = """
import sys
from importlib.machinery import PathFinder
find = PathFinder.find_spec
PathFinder.find_spec = lambda name, *more: None if name == "triton" else find(name, *more)
import d2f, decode, distill.train, triton_kernels.masked_kl
from decode.pipeline import main
status = main(sys.argv[1:])
assert "triton" not in sys.modules
sys.exit(status)
"""


def test_everything_but_the_kernels_works_without_triton(capsys):
    words = ["--model", "tiny-d2f-long", "--tau-add", "0.1", "--tasks", "story"]
    assert pipeline.main(words) == 0
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TRITON, *words], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    answers = [
        [line for line in said.splitlines() if " answer " in line]
        for said in (done.stdout, capsys.readouterr().out)
    ]
    assert answers[0] == answers[1] != []


def test_a_kernel_without_triton_says_what_to_install(monkeypatch):
    monkeypatch.setattr(choice, "triton", None)
    monkeypatch.delenv(choice.VARIABLE, raising=False)
    with pytest.raises(ModuleNotFoundError, match="which is missing: pip install triton"):
        choice.use_kernel("confidence", torch.zeros(2, 3), True)
    with pytest.warns(RuntimeWarning, match="pip install triton"):
        assert not choice.use_kernel("confidence", on_a_gpu())
