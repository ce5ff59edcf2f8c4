"""Quantised models: each quantisation that a CPU has decodes, whatever the batch; one that a device
has not is an error before any weights are read."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import d2f
import decode
from d2f import quantize
from d2f.adapters import new_lora
from d2f.compile import CompiledRows
from d2f.cpu import fits
from d2f.errors import InputError
from d2f.quantize import check_quantize, slowness, torchao_config
from d2f.tasks import make_problems
from decode.cli import weights_hash
from decode.engine.engine import Engine
from decode.engine.prompts import encode
from decode.engine.request import Request

quantization = pytest.importorskip("torchao.quantization")
pytest.importorskip("bitsandbytes")
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
ON_A_CPU = ["int8", "int8-weight", "nf4"]
LINEAR = "model.layers.0.mlp.up_proj"


@pytest.fixture(scope="module", params=ON_A_CPU)
def quantised(request):
    return d2f.load("tiny-d2f", quantize=request.param, device="cpu")


def prompts(model, count: int) -> list[list[int]]:
    return [
        encode(model, [{"role": "user", "content": problem.question}], "a problem")
        for problem in make_problems("sudoku", "heldout", count)
    ]


def answers(model, ids, decoder, batch_size):
    found = decode.generate(model, ids, decoder, batch_size=batch_size)
    return [(result.raw_tokens, result.forwards) for result in found]


def test_layers_are_quantised_and_the_head_is_not(quantised):
    layer, head = quantised.backbone.get_submodule(LINEAR), quantised.backbone.lm_head
    assert type(head) is nn.Linear and type(head.weight) is nn.Parameter
    assert type(layer.weight) is not nn.Parameter
    assert quantised.dtype == torch.float32
    assert quantised.precision == f"float32 {quantised.quantized}"
    assert f"{quantised.quantized} on cpu" in repr(quantised)


def test_answers_are_near_those_of_float32(quantised):
    """A wrong scale would make nonsense of the logits; quantisation errs by less than a tenth."""
    plain = d2f.load("tiny-d2f", device="cpu")
    ids = torch.tensor(prompts(plain, 1))
    spans = torch.tensor([[[0, ids.shape[1]]]] * ids.shape[1], dtype=torch.int32)
    with torch.inference_mode():
        expected, came = plain.forward(ids, spans), quantised.forward(ids, spans)
    error = (came - expected).norm() / expected.norm()
    assert 1e-4 < error < 0.1


def test_neither_a_batch_nor_arrivals_change_a_token(quantised):
    """A request that enters while others run is decoded as alone."""
    ids, decoder = prompts(quantised, 4), decode.D2F(max_new_tokens=24)
    one = answers(quantised, ids, decoder, 1)
    assert answers(quantised, ids[::-1], decoder, 3) == one[::-1]
    made = [Request(i, one, decoder, quantised.contract, None) for i, one in enumerate(ids)]
    engine = Engine(quantised, batch_size=4, slots=sum(r.session.slots for r in made))
    for request in made:
        engine.submit(request)
        engine.advance()
    for _ in engine.run():
        pass
    assert [(r.result.raw_tokens, r.result.forwards) for r in made if r.result] == one


def test_rows_of_dynamic_int8_do_not_see_each_other():
    """To the last bit, beside a row of other size and in any company: scales are of one row each,
    and sums of integers have no order. Later layers would make a whole step of a last bit."""
    torch.manual_seed(0)
    layers, rows = nn.Sequential(nn.Linear(96, 80)), torch.randn(7, 96)
    quantization.quantize_(layers, torchao_config("int8"))
    with torch.inference_mode():
        together, beside = layers(rows), rows.clone()
        beside[3] *= 1e4
        others = [0, 1, 2, 4, 5, 6]
        assert torch.equal(layers(beside)[others], together[others])
        for i in range(7):
            assert torch.equal(layers(rows[i : i + 1])[0], together[i])


@pytest.mark.parametrize("name", ON_A_CPU)
def test_an_adapter_is_merged_before_weights_are_quantised(name, tmp_path):
    """The same as quantising, while it is read, a model that the adapter was merged into; and
    another than the base."""
    torch.manual_seed(0)
    model = d2f.load("tiny-teacher", device="cpu")
    new_lora(model, r=4, alpha=64, dropout=0.0, targets=("q_proj", "up_proj"))
    for key, parameter in model.adapter.named_parameters():
        if "lora_B" in key:
            nn.init.normal_(parameter, std=0.05)
    model.save(tmp_path / "adapter")
    model.merge_adapter()
    model.save(tmp_path / "merged")
    base = d2f.load("tiny-teacher", quantize=name, device="cpu")
    adapted = d2f.load("tiny-teacher", adapter=tmp_path / "adapter", quantize=name, device="cpu")
    alone = d2f.load(tmp_path / "adapter", quantize=name, device="cpu")  # names its base
    merged = d2f.load(tmp_path / "merged", quantize=name, device="cpu")
    assert adapted.is_adapted and adapted.adapter is None and adapted.quantized == name
    assert weights_hash(adapted) == weights_hash(alone) == weights_hash(merged)
    assert weights_hash(adapted) != weights_hash(base)


def test_an_adapter_beside_quantised_weights_is_not_merged():
    model = d2f.load("tiny-teacher", quantize="nf4", device="cpu")
    new_lora(model, r=4, alpha=8, dropout=0.0)
    with pytest.raises(InputError, match="cannot be merged into nf4 weights"):
        model.merge_adapter()


@pytest.mark.parametrize(
    ("name", "dtype", "capability", "said"),
    [
        ("int4-weight", torch.float32, None, "CUDA GPUs alone.*one of int8, int8-weight, nf4"),
        ("fp8", torch.bfloat16, None, "not on cpu: .*no float8"),
        ("int8", torch.bfloat16, (7, 5), "compute capability 8.0, this GPU has 7.5; .*-weight"),
        ("fp8", torch.bfloat16, (8, 0), "needs compute capability 8.9, this GPU has 8.0"),
        ("fp8", torch.float32, (9, 0), "bfloat16 alone, got the dtype torch.float32"),
        ("int4-weight", torch.float16, (9, 0), "bfloat16 alone"),
        ("int3", torch.bfloat16, (9, 0), "got 'int3'; did you mean int8.*int4-weight, nf4, fp8"),
    ],
)  # fmt: skip
def test_what_a_device_has_not(name, dtype, capability, said, monkeypatch):
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device=None: capability)
    with pytest.raises(InputError, match=said):
        check_quantize(name, CUDA if capability else CPU, dtype)


def test_a_library_that_is_not_installed(monkeypatch):
    monkeypatch.setattr(quantize.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"needs .*, which is not installed: .*\[quantize\]"):
        check_quantize("nf4", CPU, torch.float32)


def test_int8_is_said_to_be_slow_where_it_is(monkeypatch):
    for vnni, amx in ((False, False), (True, False), (False, True)):
        monkeypatch.setattr("torch.cpu._is_vnni_supported", lambda vnni=vnni: vnni)
        monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda amx=amx: amx)
        assert bool(slowness("int8", CPU)) == (not vnni and not amx)
        assert not slowness("int8", CUDA) and not slowness("int8-weight", CPU)


def test_compiled_as_not(monkeypatch):
    """Traced into one graph, the tokens are the same; what a CPU's compiler makes of the graph is
    PyTorch's matter and takes a minute."""

    def traced(function, options, **how):
        return compile(function, backend="aot_eager", **how)

    compile = torch.compile
    monkeypatch.setattr(torch, "compile", traced)
    model = d2f.load("tiny-d2f", quantize="int8-weight", device="cpu")
    ids, decoder = [[5, 6, 7], [9, 8]], decode.D2F(4, max_new_tokens=12)
    plain = answers(model, ids, decoder, 2)
    assert not fits(model.backbone)
    model.compile()
    assert type(model.compiled_rows) is CompiledRows
    assert answers(model, ids, decoder, 2) == answers(model, ids, decoder, 1) == plain
