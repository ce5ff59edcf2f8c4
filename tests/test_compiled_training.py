"""A training whose layers are compiled learns what the plain one does."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType
from test_train import settings, weights
from tiny import fresh_model, random_model
from torch._dynamo.utils import counters

from d2f.errors import CompileError, InputError
from d2f.saving import save_model
from d2f.spans import bidirectional
from distill.sharding import as_they_are, check_compile, compile_layers
from distill.train import train


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    folder = tmp_path_factory.mktemp("teacher") / "teacher"
    save_model(random_model("llada"), folder, dtype=torch.float32, objective="masked_diffusion")
    return folder


def losses(output):
    lines = (output / "log.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


LORA = {"r": 4, "alpha": 4, "dropout": 0.1}


@pytest.mark.parametrize("more", [{}, {"gradient_checkpointing": True}])
def test_an_adapter_has_the_curve_of_the_plain_run(tmp_path, teacher, more):
    """With dropout, gradient checkpointing, evaluations in between, and after a kill to the bit."""
    evaluation = {"tasks": ["sudoku"], "problems": 1, "loss_rows": 2}
    changes = {
        "init": str(teacher),
        "lora": LORA,
        "eval_every": 2,
        "evaluation": evaluation,
        **more,
    }
    train(settings(tmp_path / "plain", "d2f", **changes))
    counters.clear()
    train(settings(tmp_path / "compiled", "d2f", compile=True, **changes))
    graphs = counters["stats"]["unique_graphs"]
    assert graphs, "nothing was compiled"
    want, got = losses(tmp_path / "plain"), losses(tmp_path / "compiled")
    assert len(want) == 6 and got == pytest.approx(want, rel=1e-4)
    for name, value in weights(tmp_path / "plain").items():
        torch.testing.assert_close(
            weights(tmp_path / "compiled")[name], value, rtol=1e-3, atol=1e-4
        )
    for _ in range(3):
        train(settings(tmp_path / "killed", "d2f", compile=True, **changes), stop_after=2)
    whole, killed = weights(tmp_path / "compiled"), weights(tmp_path / "killed")
    assert all(torch.equal(killed[name], value) for name, value in whole.items())


def test_all_layers_share_their_graphs(tmp_path):
    shape = settings(tmp_path).model.model_dump()
    graphs = []
    for layers in (3, 12):  # more than dynamo keeps graphs of one function
        torch._dynamo.reset()
        counters.clear()
        model = {**shape, "layers": layers}
        train(settings(tmp_path / str(layers), steps=1, compile=True, model=model))
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[1] > 0


def test_without_a_compiler_nothing_is_begun(tmp_path):
    from torch._inductor import config
    from torch._inductor.utils import fresh_cache

    torch._dynamo.reset()
    lacking = config.patch({"cpp.cxx": ("no-such-compiler",)})
    with lacking, fresh_cache(), pytest.raises(CompileError, match="needs a C\\+\\+ compiler"):
        train(settings(tmp_path / "run", compile=True))
    assert not (tmp_path / "run").exists()


def test_what_is_not_compiled_is_refused(tmp_path, teacher):
    sharded = SimpleNamespace(
        distributed_type=DistributedType.FSDP, device=torch.device("cpu"), is_main_process=True
    )
    with pytest.raises(InputError, match="compile: expected one process or DDP, got FSDP"):
        check_compile(sharded)
    with pytest.raises(InputError, match="compile needs weights that are not quantised, got 4bit"):
        settings(tmp_path, "d2f", init=str(teacher), compile=True, quantize="4bit")


def test_an_evaluation_compiles_nothing():
    """Its forwards are of any length; afterwards a step's are compiled again."""
    model = fresh_model("llada")
    compile_layers(model.backbone)
    compiled = [layer._compiled_call_impl for layer in model.backbone.model.layers]
    assert all(compiled)
    torch._dynamo.reset()
    counters.clear()
    with torch.no_grad(), as_they_are(model.backbone):
        for length in (3, 4):
            model.forward(torch.zeros(1, length, dtype=torch.int64), bidirectional(length))
    assert not counters["stats"]["unique_graphs"]
    assert [layer._compiled_call_impl for layer in model.backbone.model.layers] == compiled
