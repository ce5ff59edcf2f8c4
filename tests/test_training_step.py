"""How a training step is computed: attention in parts, the last layer's rows alone, layers that
are compiled, the fastest attention, and nothing that waits for a GPU."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType
from hypothesis import given
from hypothesis import strategies as st
from test_train import SHAPE, curve, same, settings, weights
from tiny import fresh_model, random_model
from torch._dynamo.utils import counters
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from d2f import spans as sp
from d2f.adapters import new_lora
from d2f.attention import SpanPlan, TrainingPlan, parts_of, read_rows_only
from d2f.errors import CompileError, InputError
from d2f.saving import save_model
from distill import trainer
from distill.data.stream import fill_rows
from distill.export import prepare_model
from distill.sharding import check_compile, compile_layers, uncompiled
from distill.train import train
from distill.trainer import choose_attention

NONE = torch.zeros(0, dtype=torch.int64)  # places that are read: attention does not ask


# Attention in parts, each with the keys that it needs.


@st.composite
def spans(draw):
    """``[B, T, 2, 2]``: of each query none, one or two ranges that do not overlap."""
    batch, length = draw(st.integers(1, 3)), draw(st.integers(1, 12))
    cuts = st.lists(st.integers(0, length), min_size=4, max_size=4).map(sorted)
    made = draw(st.lists(cuts, min_size=batch * length, max_size=batch * length))
    return torch.tensor(made, dtype=torch.int32).view(batch, length, 2, 2)


@given(spans(), st.integers(1, 5))
def test_parts_give_what_all_keys_at_once_give(spans, rows):
    batch, length = spans.shape[:2]
    torch.manual_seed(0)
    q, k, v = (torch.randn(batch, heads, length, 8, requires_grad=True) for heads in (4, 2, 2))
    upstream = torch.randn(batch, length, 4, 8)
    plans = SpanPlan(spans, way="sdpa"), TrainingPlan(spans, NONE)
    plans[1].segments = parts_of(spans, rows)
    found = []
    for plan in plans:
        out = plan.attend(None, q, k, v)
        found.append([out, *torch.autograd.grad(out, (q, k, v), upstream)])
    for want, got in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


# The last layer computes the places that the loss reads, and no others.

IDS = torch.tensor([[5, 6, 7, 8, 9, 10], [11, 12, 13, 14, 15, 16]])
READ = torch.tensor([3, 4, 8, 11])  # of the 2 x 6 places
PLACES = torch.arange(6).expand(2, -1)
SPANS = torch.stack([sp.block_causal(6, 2, 2), sp.bidirectional(6)])


def model_with_lora(family, checkpointing=False):
    model = fresh_model(family)
    model.backbone.requires_grad_(False)
    new_lora(model, r=4, alpha=4, dropout=0.0)
    torch.manual_seed(1)
    for parameter in model.adapter.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3)
    if checkpointing:
        model.backbone.gradient_checkpointing_enable({"use_reentrant": False})
        model.backbone.train()
    return model


def gradients(model, hidden):
    hidden.square().sum().backward()
    return {n: p.grad for n, p in model.backbone.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", ["llada", "dream", "wedlm"])
def test_the_last_layer_gives_the_rows_that_are_read_and_their_gradients(family, checkpointing):
    whole, part = (model_with_lora(family, checkpointing) for _ in range(2))
    read_rows_only(part.backbone)
    fed = []
    part.backbone.model.layers[-1].mlp.register_forward_pre_hook(lambda _, x: fed.append(x[0]))
    want = whole.hidden(IDS, SPANS, PLACES).flatten(0, 1)[READ]
    got = part.hidden(IDS, TrainingPlan(SPANS, READ), PLACES)
    assert [x.shape for x in fed] == [(1, 4, 32)]
    assert got.shape == (1, 4, 32)
    torch.testing.assert_close(got[0], want)
    wanted, found = gradients(whole, want), gradients(part, got)
    assert wanted.keys() == found.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, msg=lambda m, n=name: f"{n}: {m}")


def test_other_forwards_are_as_before_and_a_step_that_reads_nothing_has_no_gradient():
    model = model_with_lora("llada")
    before = model.hidden(IDS, SPANS, PLACES)
    read_rows_only(model.backbone)
    assert torch.equal(model.hidden(IDS, SPANS, PLACES), before)
    hidden = model.hidden(IDS, TrainingPlan(SPANS, READ[:0]), PLACES)
    assert hidden.shape == (1, 0, 32)
    assert not any(g.any() for g in gradients(model, hidden).values())


# The attention of a run, chosen once.


class OnGpu:
    """Spans that say that they are on a GPU."""

    is_cuda = True
    shape = SPANS.shape


def test_the_fastest_attention_is_taken_and_kept_for_a_resumed_run(tmp_path, monkeypatch, capsys):
    times = {"sdpa": 3.0, "flex": 1.5}
    monkeypatch.setattr(trainer, "measure_attention", lambda *given: times)
    model, config = random_model("llada"), settings(tmp_path)
    here = SimpleNamespace(is_main_process=True, mixed_precision="no")
    assert choose_attention(here, config, model, SPANS) == "sdpa", "a CPU measures nothing"
    assert list(tmp_path.iterdir()) == []
    path = tmp_path / trainer.ATTENTION
    assert choose_attention(here, config, model, OnGpu()) == "flex"
    assert "attention: flex (milliseconds a layer" in capsys.readouterr().out
    assert json.loads(path.read_text()) == {"chosen": "flex", "milliseconds": times}
    times["sdpa"] = 0.1
    assert choose_attention(here, config, model, OnGpu()) == "flex"
    wanted = settings(tmp_path, attention="sdpa")
    assert choose_attention(here, wanted, model, OnGpu()) == "sdpa"
    with pytest.raises(InputError, match="attention flex trains on a GPU only, this is cpu"):
        train(settings(tmp_path / "run", attention="flex"))
    assert not (tmp_path / "run").exists()


# Compiled layers learn what plain ones do.


def test_a_compiled_adapter_has_the_curve_of_the_plain_run(tmp_path):
    """With dropout, gradient checkpointing, evaluations in between, and after a kill to the bit."""
    save_model(random_model("llada"), tmp_path / "teacher", dtype=torch.float32)
    changes = {
        "init": str(tmp_path / "teacher"), "lora": {"r": 4, "alpha": 4, "dropout": 0.1},
        "eval_every": 2, "evaluation": {"tasks": ["sudoku"], "problems": 1, "loss_rows": 2},
        "gradient_checkpointing": True, "steps": 4,
    }  # fmt: skip
    train(settings(tmp_path / "plain", "d2f", **changes))
    counters.clear()
    train(settings(tmp_path / "compiled", "d2f", compile=True, **changes))
    assert counters["stats"]["unique_graphs"], "nothing was compiled"
    assert curve(tmp_path / "compiled") == pytest.approx(curve(tmp_path / "plain"), rel=1e-4)
    compiled = weights(tmp_path / "compiled")
    for name, value in weights(tmp_path / "plain").items():
        torch.testing.assert_close(compiled[name], value, rtol=1e-3, atol=1e-4)
    killed = shutil.copytree(tmp_path / "compiled", tmp_path / "killed")
    for place in ("checkpoints/step-0000004", "model", "adapter"):  # as it was after step 2
        shutil.rmtree(killed / place)
    train(settings(killed, "d2f", compile=True, **changes))
    assert same(killed, tmp_path / "compiled")


def test_all_layers_share_their_graphs(tmp_path, monkeypatch):
    plain = torch.nn.Module.compile

    def traced(layer, dynamic=None, options=None):  # the graphs alone, without code of them
        return plain(layer, dynamic=dynamic, backend="eager")

    monkeypatch.setattr(torch.nn.Module, "compile", traced)
    graphs = []
    for layers in (3, 12):  # more than dynamo keeps graphs of one function
        torch._dynamo.reset()
        counters.clear()
        config = settings(tmp_path, model=SHAPE | {"layers": layers})
        objective = trainer.OBJECTIVES["masked_diffusion"](prepare_model(config), config)
        objective.network.train()
        compile_layers(objective.model.backbone)
        objective.forward(
            objective.batch(fill_rows(objective.stream(), 0)[0], slice(0, 2))
        ).backward()
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[1] > 0


def test_what_cannot_be_compiled_is_refused_before_anything_is_begun(tmp_path):
    from torch._inductor import config
    from torch._inductor.utils import fresh_cache

    torch._dynamo.reset()
    lacking = config.patch({"cpp.cxx": ("no-such-compiler",)})
    with lacking, fresh_cache(), pytest.raises(CompileError, match=r"needs a C\+\+ compiler"):
        train(settings(tmp_path / "run", compile=True))
    assert not (tmp_path / "run").exists()
    sharded = SimpleNamespace(distributed_type=DistributedType.FSDP)
    with pytest.raises(InputError, match="compile: expected one process or DDP, got FSDP"):
        check_compile(sharded)


def test_an_evaluation_compiles_nothing():
    """Its forwards are of any length; afterwards a step's are compiled again."""
    model = fresh_model("llada")
    compile_layers(model.backbone)
    compiled = [layer._compiled_call_impl for layer in model.backbone.model.layers]
    assert all(compiled)
    torch._dynamo.reset()
    counters.clear()
    with torch.no_grad(), uncompiled(model.backbone):
        model.forward(torch.zeros(1, 3, dtype=torch.int64), sp.bidirectional(3))
    assert not counters["stats"]["unique_graphs"]
    assert [layer._compiled_call_impl for layer in model.backbone.model.layers] == compiled


# A step hands its work to the GPU and goes on: nothing of it waits for a value to come back to the
# host. Counted on the CPU, where reading a value is the same call.

CALLS = {"item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__"}
OPERATORS = {
    "_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2",
    "unique_dim", "unique_consecutive",
}  # fmt: skip


class Calls(TorchFunctionMode):
    """Counts what gives Python a value."""

    def __init__(self, seen: Counter):
        super().__init__()
        self.seen = seen

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        if name in CALLS:
            self.seen[name] += 1
        return function(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    """Counts what gives a shape that depends on values."""

    def __init__(self, seen: Counter):
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name().split("::")[1].split(".")[0]
        by_mask = name.startswith("index") and any(
            isinstance(x, torch.Tensor) and x.dtype == torch.bool
            for x in (args[1] if isinstance(args[1], list | tuple) else ())
        )
        if name in OPERATORS or by_mask:
            self.seen[name] += 1
        return function(*args, **(kwargs or {}))


def read_in_a_step(config, monkeypatch) -> Counter:
    """What the second step of a run reads, from its rate to the check of its loss; its batch is
    made on the host before it."""
    kind, seen, modes = trainer.OBJECTIVES[config.objective.name], Counter(), []
    plain_rate, plain_batch = trainer.learning_rate, kind.batch

    def rate(config, step):
        if step == 1:
            modes.extend([Calls(seen), Operators(seen)])
            for mode in modes:
                mode.__enter__()
        return plain_rate(config, step)

    def asked(self):
        while modes:
            modes.pop().__exit__(None, None, None)
        return 0

    batches = []

    def batch(self, rows, mine):
        if not batches:
            batches.append(plain_batch(self, rows, mine))
        return batches[0]

    monkeypatch.setattr(trainer, "learning_rate", rate)
    monkeypatch.setattr(trainer.StopRequest, "asked", asked)
    monkeypatch.setattr(kind, "batch", batch)
    monkeypatch.setattr("d2f.attention.parts_of", lambda spans: None)  # a CPU's alone
    # The processor's own generator takes a seed from a tensor; a GPU's takes the number.
    monkeypatch.setattr(trainer, "seed_dropout", lambda *given: None)
    train(config, stop_after=2)
    assert batches and not modes
    return seen


@pytest.mark.parametrize("objective", ["masked_diffusion", "next_token", "d2f", "wedlm"])
def test_a_step_reads_nothing_back(objective, tmp_path, monkeypatch):
    model = random_model({"next_token": "causal", "wedlm": "wedlm"}.get(objective, "llada"))
    save_model(model, tmp_path / "init", dtype=torch.float32)
    config = settings(
        tmp_path / "run", objective, init=str(tmp_path / "init"), log_every=100, save_every=100
    )
    assert read_in_a_step(config, monkeypatch) == {}
