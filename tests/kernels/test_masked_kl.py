"""The chunked KL is the plain one: its value, its gradient, its zeros; and the kernel is both."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from triton_kernels import masked_kl
from triton_kernels.masked_kl import CPU_TILE_BYTES, masked_linear_kl, masked_linear_kl_reference

KERNEL = [False, True]


def inputs(n, width, vocabulary, seed=0, dtype=torch.float32, device="cpu"):
    rng = torch.Generator().manual_seed(seed)
    student, teacher = (torch.randn(n, width, generator=rng) for _ in range(2))
    head = torch.randn(vocabulary, width, generator=rng)
    parts = (student, teacher, head)
    student, teacher, head = (x.to(device, dtype) for x in parts)
    return student.requires_grad_(), teacher, head, torch.rand(n, generator=rng).to(device)


def value_and_gradient(function, student, *more, **options):
    loss = function(student, *more, **options)
    (gradient,) = torch.autograd.grad(loss, student)
    return loss.detach(), gradient


@pytest.mark.parametrize("kernel", KERNEL)
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 5), st.integers(1, 9), st.integers(1, 40), st.integers(1, 45), st.data())
def test_equals_the_plain_computation(device, kernel, n, width, vocabulary, columns, data):
    args = inputs(n, width, vocabulary, data.draw(st.integers(0, 999)), device=device)
    got = value_and_gradient(masked_linear_kl, *args, columns=columns, kernel=kernel)
    want = value_and_gradient(masked_linear_kl_reference, *args)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("kernel", KERNEL)
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 9), st.integers(1, 40), st.integers(1, 4), st.data())
def test_rows_a_part_at_a_time_equal_the_plain_computation(
    device, kernel, n, vocabulary, part, data
):
    """As by default where a tile holds the whole vocabulary for `part` rows."""
    args = inputs(n, 5, vocabulary, data.draw(st.integers(0, 999)), device=device)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("TILE_BYTES", "CPU_TILE_BYTES"):
            patch.setattr(masked_kl, name, 8 * vocabulary * part)
        for name in ("_LEAST_ROWS", "_CPU_LEAST_ROWS"):
            patch.setattr(masked_kl, name, 1)
        got = value_and_gradient(masked_linear_kl, *args, kernel=kernel)
    want = value_and_gradient(masked_linear_kl_reference, *args)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-6)


def test_fp16_keeps_a_gradient_that_the_scaled_loss_can_hold():
    """Weights as small as 1 / (rows of a step) are not fp16's, their product with the scale is."""
    student, teacher, head, _ = inputs(6, 16, 50)
    weight = torch.full((6,), 1e-7)
    half = [x.detach().half() for x in (student, teacher, head)]
    got, want = [], []
    for found, (s, *more), function in (
        (got, half, masked_linear_kl),
        (want, [x.float() for x in half], masked_linear_kl_reference),
    ):
        s = s.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(2**16 * function(s, *more, weight), s)
        found.append(gradient.float())
    assert want[0].abs().max() > 1e-5
    torch.testing.assert_close(got[0], want[0], rtol=0.02, atol=2e-2 * want[0].abs().max().item())


@settings(max_examples=10)
@given(st.integers(0, 4), st.integers(1, 4), st.integers(1, 9), st.integers(1, 10))
def test_passes_gradcheck_in_fp64(n, width, vocabulary, columns):
    student, *more = inputs(n, width, vocabulary, dtype=torch.float64)
    more[-1] = more[-1].double()
    assert torch.autograd.gradcheck(
        lambda s: masked_linear_kl(s, *more, columns=columns), (student,)
    )


@pytest.mark.parametrize("kernel", KERNEL)
@pytest.mark.parametrize("columns", [500, None])
def test_equal_states_give_exactly_zero(device, columns, kernel):
    student, _, head, weight = inputs(7, 33, 1300, device=device)
    loss, gradient = value_and_gradient(
        masked_linear_kl, student, student.detach().clone(), 5 * head, weight,
        columns=columns, kernel=kernel,
    )  # fmt: skip
    assert loss.item() == 0.0
    assert gradient.abs().max().item() == 0.0


@pytest.mark.parametrize("kernel", KERNEL)
@pytest.mark.parametrize("columns", [512, None])
def test_half_precision_errs_no_more_than_the_plain_computation(device, dtype, columns, kernel):
    student, teacher, head, weight = inputs(13, 70, 2100, seed=3, dtype=dtype, device=device)
    head = head / 8
    exact = value_and_gradient(
        masked_linear_kl_reference,
        student.detach().double().requires_grad_(), teacher.double(), head.double(), weight,
    )  # fmt: skip
    plain = value_and_gradient(masked_linear_kl_reference, student, teacher, head, weight)
    ours = value_and_gradient(
        masked_linear_kl, student, teacher, head, weight, columns=columns, kernel=kernel
    )
    for got, theirs, truth in zip(ours, plain, exact, strict=True):
        scale = truth.abs().max()
        allowed = (theirs.double() - truth).abs().max() + 4 * torch.finfo(dtype).eps * scale
        assert (got.double() - truth).abs().max() <= allowed


@pytest.mark.parametrize("kernel", KERNEL)
def test_logits_far_apart_stay_finite(device, kernel):
    student, teacher, head, weight = inputs(3, 8, 50, device=device)
    args = (student, teacher, 300 * head, weight)
    got = value_and_gradient(masked_linear_kl, *args, columns=7, kernel=kernel)
    want = value_and_gradient(masked_linear_kl_reference, *args)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-3)


def test_the_default_tile_does_not_grow_with_the_vocabulary():
    """The largest tensor that is made has as many elements for 40,000 tokens as for 400,000."""
    largest = []
    for vocabulary in (40_000, 400_000):
        sizes = []

        class Watch(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None, *, seen=sizes):
                out = function(*args, **(kwargs or {}))
                if isinstance(out, torch.Tensor) and out._base is None:
                    seen.append(out.untyped_storage().nbytes())
                return out

        with FakeTensorMode(), Watch():
            student, teacher = torch.empty(2, 600, 2)
            head, weight = torch.empty(vocabulary, 2), torch.empty(600)
            value_and_gradient(masked_linear_kl, student.requires_grad_(), teacher, head, weight)
        largest.append(max(size for size in sizes if size != head.untyped_storage().nbytes()))
    assert all(0.95 * CPU_TILE_BYTES < size <= CPU_TILE_BYTES for size in largest)


@pytest.mark.parametrize(("gib", "mib"), [(8, 256), (24, 768), (80, 768)])
def test_a_tile_is_a_part_of_the_gpus_memory(monkeypatch, gib, mib):
    properties = SimpleNamespace(total_memory=gib << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert masked_kl.tile_bytes(torch.device("cuda", 1)) == mib << 20
    rows, columns = masked_kl.tile_shape(4096, 126464, torch.device("cuda", 1))
    assert 0.9 * (mib << 20) < 2 * rows * columns * 4 <= mib << 20
    assert (columns == 126464) == (mib == 768), "a few rows at a time would read the head for each"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"teacher_hidden": torch.zeros(3, 5)}, r"\[4, 5\] and \[3, 5\]"),
        ({"head": torch.zeros(9, 6)}, r"head must be \[V, 5\], got \[9, 6\]"),
        ({"head": torch.zeros(9, 5, dtype=torch.float16)}, "one floating dtype, got float16"),
        ({"head": torch.zeros(9, 5, requires_grad=True)}, "head must be frozen"),
    ],
)
def test_a_misfit_is_refused_by_name(change, says):
    good = {
        "student_hidden": torch.zeros(4, 5),
        "teacher_hidden": torch.zeros(4, 5),
        "head": torch.zeros(9, 5),
        "weight": torch.zeros(4),
    }
    with pytest.raises(ValueError, match=says):
        masked_linear_kl(**(good | change))
