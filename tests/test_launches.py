"""How many kernels a compiled decoder layer launches. Counted in what the compiler makes for a CPU,
since there is no GPU: it joins the same operators there, but for the halves that RoPE turns, which
are a kernel of their own here and part of the next one on a GPU."""

from __future__ import annotations

import json
import re
from collections import Counter

import pytest
import torch
from torch._inductor.utils import run_and_get_code
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from transformers import LlamaConfig, Qwen2Config
from triton.runtime.interpreter import GridExecutor

from benchmarks import decode_step, shapes
from benchmarks.count_report import AIM
from benchmarks.count_report import layer as second_layer
from benchmarks.forward_count import count
from d2f import attention
from d2f.attention import SpanPlan
from d2f.cache import SlotCache
from d2f.compile import CompiledRows, _attend, _running
from d2f.cpu.packed import JoinedModel
from triton_kernels import span_attention

SIZES = {
    "vocab_size": 300, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4,
    "num_key_value_heads": 4,
}  # fmt: skip
ATTEND = 3  # at most: writing the slots, attention, joining its splits
MOST = 16
CALL = re.compile(r"(extern_kernels|cpp_fused|torch\.ops\.d2f\.attend)\w*[.(]")


def calls(monkeypatch, config, layers) -> Counter:
    """What a forward of several rows calls, by kind."""
    shape = config(**SIZES, num_hidden_layers=layers)
    monkeypatch.setitem(shapes.SHAPES, "layers", lambda: shape)
    model = shapes.build("layers", torch.bfloat16, "cpu")
    torch._dynamo.reset()
    compiled, code = run_and_get_code(lambda: CompiledRows(model.backbone, model.new_cache))
    assert isinstance(compiled.packed, JoinedModel)
    of_any_rows = code[-1]  # after the graph of a single row
    body = of_any_rows[of_any_rows.index("def call(") :]
    lines = [line for line in body.splitlines() if "assert_" not in line]
    return Counter(match[1] for line in lines if (match := CALL.search(line)))


@pytest.mark.parametrize("config", [LlamaConfig, Qwen2Config])
def test_a_compiled_layer_is_at_most_sixteen_launches(monkeypatch, config):
    layer = calls(monkeypatch, config, 3)
    layer.subtract(calls(monkeypatch, config, 2))
    assert layer["extern_kernels"] == 4, "q k v, o, gate up, down"
    assert layer["torch.ops.d2f.attend"] == 1
    assert layer.total() - 1 + ATTEND <= MOST
    # What benchmarks.decode_step --count says without the compiler.
    shape = config(**SIZES, num_hidden_layers=4)
    monkeypatch.setitem(shapes.SHAPES, "layers", lambda: shape)
    counted = count(shapes.build("layers", torch.bfloat16, "meta"), 16, 64)["compiled"]
    kernels = sum(launch.kernel for launch in second_layer(counted))
    assert len(second_layer(counted)) - kernels == layer.total() - 1


class Work(TorchDispatchMode):
    """Counts operators that compute: no views, no new memory."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        name = function.name()
        if not function.is_view and "empty" not in name and name != "aten::_unsafe_view":
            self.seen[name] += 1
        return out


def test_attention_is_the_launches_that_are_counted_for_it(monkeypatch):
    """Two key tiles, so that there are splits to join; of the second layer, since the first makes
    what all share."""
    launched = Counter()
    launch = GridExecutor.__call__

    def counted(self, *given, **more):
        launched[self.fn.__name__] += 1
        with _disable_current_modes():  # the interpreter copies tensors
            return launch(self, *given, **more)

    monkeypatch.setattr(GridExecutor, "__call__", counted)
    for module in (attention, span_attention):
        monkeypatch.setattr(module, "use_kernel", lambda *given: True)
    config = LlamaConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=2)
    cache = SlotCache(config, 300, dtype=torch.float32, device=torch.device("cpu"))
    plan = SpanPlan(torch.tensor([[[0, 300], [0, 0], [0, 0]]] * 4, dtype=torch.int32))
    cache.slots = torch.arange(4)
    # as the joined product gives them: parts of the columns, heads not yet in front
    q, k, v = torch.randn(1, 4, 6 * 32).view(1, 4, 6, 32).split(2, 2)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    monkeypatch.setattr(_running, "cache", cache, raising=False)
    monkeypatch.setattr(_running, "plan", plan, raising=False)
    for layer in range(2):
        launched.clear()
        with Work() as work:
            _attend(q, k, v, layer, 32**-0.5)
    assert launched.total() <= ATTEND
    assert not work.seen


def test_a_count_says_bytes_and_operations_of_each_launch(tmp_path, capsys):
    """LLaDA-8B, whose weights would be 16 GB, by the sizes of its tensors."""
    path = tmp_path / "count.json"
    assert decode_step.main(["--count", "--json", str(path)]) == 0
    out = capsys.readouterr().out
    assert "counted, not measured" in out
    (found,) = json.loads(path.read_text())["counted"]
    rows, width, inner, layers = 64, 4096, 12288, 32
    of_layers = layers * (4 * width**2 + 3 * width * inner)
    products = 2 * rows * (of_layers + width * 126464)
    slots = 2 * 2 * layers * width * (512 + rows)
    assert found["floor_bytes"] == pytest.approx(2 * (of_layers + width * 126464) + slots, rel=1e-3)
    for way, most in (("eager", 41), ("compiled", 11)):
        every = found[way]["launches"]
        beyond = sum(launch["flops"] for launch in every) - products
        # transformers 5.17 multiplies RoPE's positions and its 64 frequencies as matrices.
        assert beyond in (0, 2 * rows * 64), way
        down = next(x for x in every if x["flops"] == 2 * rows * width * inner)
        assert down["bytes"] == 2 * (width * inner + rows * (width + inner))
        assert (most - 1) * layers < len(every) < most * layers + 25  # splits are joined or not
        assert sum(launch["bytes"] for launch in every) > found["floor_bytes"]
    floor = 1e3 * found["floor_bytes"] / 3e12
    assert found["compiled"]["milliseconds"] <= AIM * floor < found["eager"]["milliseconds"]
