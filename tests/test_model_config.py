"""A config.json that cannot be, or that would run as something else: refused by the field's name,
before anything of its size is allocated."""

import json
import resource
import shutil

import pytest
import torch

from d2f.checkpoint import Stored
from d2f.errors import CheckpointError
from d2f.families import get_family
from d2f.loading import check_size, load, model_config

SIZES = {
    "dream": ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
              "num_key_value_heads", "vocab_size", "max_position_embeddings", "head_dim"],
    "llada": ["d_model", "mlp_hidden_size", "n_layers", "n_heads", "n_kv_heads", "embedding_size",
              "max_sequence_length"],
}  # fmt: skip


@pytest.fixture
def refused(golden, tmp_path):
    """refused(family, changes of config.json, *texts of the error)."""

    def check(family, changes, *texts, device="cpu"):
        folder = tmp_path / family
        shutil.copytree(golden / f"{family}-tiny", folder, ignore=shutil.ignore_patterns("adapter"))
        values = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps(values))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with pytest.raises(CheckpointError) as caught:
            load(folder, device=device)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert grown < 500 << 10, "KiB: it was built"
        for text in (str(folder), *texts):
            assert text in str(caught.value)

    return check


@pytest.mark.parametrize("size", [0, -1, 10**12, 64.0, True, "64"])
@pytest.mark.parametrize(
    ("family", "name"), [(family, name) for family, names in SIZES.items() for name in names]
)
def test_a_size_that_none_can_be(refused, family, name, size):
    refused(family, {name: size}, f"{name} must be a whole number from 1 to", f"got {size!r}")


@pytest.mark.parametrize(
    ("family", "name"), [("dream", "num_hidden_layers"), ("llada", "n_layers")]
)
def test_more_layers_than_the_files_have_tensors(refused, family, name):
    refused(family, {name: 5000}, "5000 layers", "tensors in all")


@pytest.mark.parametrize(
    ("family", "name"), [("dream", "num_hidden_layers"), ("llada", "n_layers")]
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_ten_thousand_layers_and_one(refused, device, family, name):
    """Also where no weights are read."""
    refused(family, {name: 10_001}, "from 1 to 10000", device=device)


@pytest.mark.parametrize(
    ("name", "size"), [("vocab_size", 2**31 - 1), ("intermediate_size", 10**8), ("head_dim", 10**6)]
)
def test_a_model_larger_than_its_files(refused, name, size):
    refused("dream", {name: size}, "parameters, the weight files hold")


@pytest.mark.parametrize(
    ("changes", "texts"),
    [
        ({"hidden_act": "sigh"}, ["hidden_act must be one of", "silu", "'sigh'"]),
        ({"hidden_act": ["silu"]}, ["hidden_act"]),
        ({"rms_norm_eps": -1.0}, ["rms_norm_eps must be", "-1.0"]),
        ({"rms_norm_eps": "tiny"}, ["'tiny'"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads must be a divisor of 4, got 3"]),
        ({"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}, ["rope_type", "'spiral'"]),
        ({"rope_scaling": {"type": "spiral", "factor": 2.0}}, ["rope_type", "'spiral'"]),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, ["longrope"]),
        ({"rope_scaling": "linear"}, ["config.json"]),
        ({"rope_scaling": {"rope_type": "linear"}}, ["config.json"]),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.0}}, ["config.json"]),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": -2.0}},
            ["RoPE's factor must be a number of at least 1, got -2.0"],
        ),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": True}}, ["factor must be", "True"]),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}},
            ["partial_rotary_factor must be 1, got 0.5"],
        ),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "spiral": 3}},
            ["spiral must be absent"],
        ),
        ({"rope_theta": 0}, ["rope_theta must be a number above 0, got 0"]),
        ({"rope_theta": "big"}, ["'big'"]),
        ({"pad_token_id": 10**6, "model_type": "qwen2"}, ["config.json"]),
        ({"eos_token_id": "end"}, ["eos_token_id", "'end'"]),
        ({"eos_token_id": [{}]}, ["eos_token_id"]),
        ({"eos_token_id": [2, 3]}, ["mask id must not be one of the end ids [2, 3], got 3"]),
        ({"mask_token_id": True}, ["mask_id", "True"]),
    ],
)
def test_values_that_make_no_model(refused, changes, texts):
    refused("dream", changes, *texts)


@pytest.mark.parametrize(
    "changes",
    [
        {"rms_norm_eps": 0.0},
        {"rms_norm_eps": 1.0},
        {"rope_scaling": {"rope_type": "linear", "factor": 1.0}},
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 1},
        {"num_hidden_layers": 10_000},
        {"vocab_size": 2**31 - 1},
        {"max_position_embeddings": 1},
    ],
)
def test_values_at_their_bounds(golden, changes):
    values = json.loads((golden / "dream-tiny" / "config.json").read_text()) | changes
    model_config("here", get_family("dream"), values)


def test_a_model_may_be_twice_as_large_as_its_files():
    model = torch.nn.Linear(2, 4, bias=False)
    check_size("here", model, {"weight": Stored((2, 2), "F32")})
    with pytest.raises(CheckpointError, match="8 parameters, the weight files hold 3"):
        check_size("here", model, {"weight": Stored((3,), "F32")})


WINDOW = {"use_sliding_window": True, "max_window_layers": 0}


@pytest.mark.parametrize("changes", [{"sliding_window": 4}, {"sliding_window": 511}])
def test_a_window_that_hides_something(refused, changes):
    refused("dream", WINDOW | changes, "use_sliding_window must be false", "512 positions")


def test_some_layers_with_a_window(refused):
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    refused(
        "dream", {"layer_types": kinds, "use_sliding_window": True, "sliding_window": 8}, "use_"
    )


@pytest.mark.parametrize("changes", [{"sliding_window": 512}, {"max_window_layers": 28}])
def test_a_window_that_covers_all_or_no_layer(golden, tmp_path, changes):
    folder = tmp_path / "model"
    shutil.copytree(golden / "dream-tiny", folder, ignore=shutil.ignore_patterns("adapter"))
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(values | WINDOW | {"sliding_window": 8} | changes)
    )
    load(folder, device="cpu")


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, '{"model_type": NaN}'])
@pytest.mark.parametrize("name", ["config.json", "d2f_contract.json", "generation_config.json",
                                  "tokenizer_config.json", "tokenizer.json"])  # fmt: skip
def test_a_file_that_is_garbage(tmp_path, name, text):
    from d2f.models import HERE

    folder = shutil.copytree(HERE / "tiny-teacher", tmp_path / "model")
    (folder / name).write_text(text)
    try:
        load(folder, device="cpu")
    except CheckpointError as error:
        assert str(folder) in str(error)
    else:
        assert name == "generation_config.json", "which nothing here reads"


@pytest.mark.parametrize("text", ["{}", "[]", "x", '{"model": {}}', '{"added_tokens": 3}'])
def test_a_tokenizer_that_is_none(tmp_path, text):
    from d2f.models import HERE

    folder = shutil.copytree(HERE / "tiny-teacher", tmp_path / "model")
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(CheckpointError, match="its tokenizer cannot be read"):
        load(folder, device="cpu")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"logit_shift": 0}, "logit_shift must be 1 in the family dream, got 0"),
        ({"rope_fp32": True}, "rope_fp32 must be False in the family dream"),
        ({"mask_id": None}, "needs a mask id"),
    ],
)
def test_a_contract_that_its_family_contradicts(tmp_path, changes, text):
    from d2f.models import HERE

    folder = shutil.copytree(HERE / "tiny-teacher", tmp_path / "model")
    path = folder / "d2f_contract.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(CheckpointError, match=text):
        load(folder, device="cpu")


def test_no_labels_are_made_of_a_number_in_the_configuration(tmp_path):
    """A number of 10^9 would take minutes and all memory."""
    from d2f.models import HERE

    folder = shutil.copytree(HERE / "tiny-teacher", tmp_path / "model")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_labels": 5000}))
    assert len(load(folder, device="meta").backbone.config.id2label) < 5000


@pytest.mark.parametrize(
    "changes",
    [
        {"output_hidden_states": {"odd": [None]}},
        {"output_hidden_states": True, "output_attentions": True},
        {"return_dict": False},
    ],
)
def test_how_transformers_is_called_is_not_for_a_checkpoint_to_say(tmp_path, changes):
    from d2f.models import HERE
    from decode import D2F, generate

    folder = shutil.copytree(HERE / "tiny-teacher", tmp_path / "model")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    got, want = (
        generate(load(place, device="cpu"), "2+3?", D2F(max_new_tokens=4))[0].tokens
        for place in (folder, HERE / "tiny-teacher")
    )
    assert got == want


def test_what_an_error_quotes_is_one_line_of_a_length_to_read(tmp_path):
    error = CheckpointError("expected this, got\n\x1b[2J" + "x" * 10_000 + "\ud800 (the end)")
    assert str(error).isprintable() and len(str(error)) <= 1000
    assert str(error).startswith("expected this, got\\n") and str(error).endswith("(the end)")
