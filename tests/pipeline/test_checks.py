"""Options are checked against the decoder that will decode, before any weights are read."""

import json
import shutil

import pytest

from d2f.errors import InputError
from decode import pipeline
from decode.cli import DecoderSettings, outline
from decode.compare.config import make_workloads, read_config
from decode.compare.entries import check_entries
from decode.decoders import DECODERS
from decode.pipeline import main

SMALL = ["--prompt", "Tom has 3 pens.", "--raw", "--max-new-tokens", "8", "--quiet"]


@pytest.mark.parametrize("model", ["student", "teacher", "causal", "wino_plus"])
def test_an_option_that_another_decoder_refuses(model, request):
    """FreeDave and lossless decoding have a temperature too, and want it to be 0."""
    place = request.getfixturevalue(model)
    assert main(["--model", place, *SMALL, "--temperature", "0.7"]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--window", "8"], "the decoder d2f, the default of this model, has no option window"),
        (["--decoder", "wedlm"], "wedlm needs"),
        (["--prompt", "<|mask|>"], "contains the mask id"),
        (["--adapter", "no/such"], "no/such"),
    ],
)
def test_before_the_weights_are_read(student, monkeypatch, capsys, arguments, message):
    monkeypatch.setattr(pipeline, "load", lambda options: pytest.fail("loaded"))
    assert main(["--model", student, *SMALL, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_an_outline_needs_no_weights(student, tmp_path):
    place = tmp_path / "bare"
    shutil.copytree(student, place, ignore=shutil.ignore_patterns("*.safetensors"))
    model = outline(str(place))
    assert (model.contract.block_size, model.device.type) == (16, "meta")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": str(place)})
    )
    contract = json.loads((place / "d2f_contract.json").read_text()) | {"block_size": 4}
    (adapter / "d2f_contract.json").write_text(json.dumps(contract))
    assert outline(str(place), str(adapter)).contract.block_size == 4
    assert outline(str(adapter)).contract.block_size == 4  # an adapter alone


def test_without_a_model_an_option_is_refused_only_where_every_decoder_refuses_it():
    DecoderSettings(None, {"temperature": 0.5}).check([8])
    DecoderSettings(None, {"tau": 1.5}).check([8])
    for given, message in (
        ({"temperature": -1}, "temperature must be 0 or more"),
        ({"tau_add": 2}, r"tau_add must lie in \[0, 1\]"),
        ({"tau1": 0.5, "tau_add": 0.5}, "no decoder has all of the options tau1, tau_add"),
    ):
        with pytest.raises(InputError, match=message):
            DecoderSettings(None, given).check([8])


@pytest.mark.parametrize("name", DECODERS)
def test_a_named_decoder_answers_for_itself(name):
    """An error names the decoder in use or one of its options, never another decoder."""
    others = set(DECODERS) - {name}
    for given in ({"temperature": 0.7}, {"tau": 1.5}, {"block_size": 0}, {"nothing": 1}):
        try:
            DecoderSettings(name, given).check([8])
        except InputError as error:
            assert not others & set(str(error).replace(",", "").split(" it has ")[0].split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("{tau: 1.5}", "entry mine: the decoder d2f, the default of this model, has no option tau"),
        ("{decoder: wedlm}", "entry mine: .*decoder"),
        ("{max_new_tokens: 4}", None),
    ],
)
def test_compare_checks_its_entries_before_it_starts_one(student, tmp_path, options, message):
    path = tmp_path / "compare.yaml"
    path.write_text(
        f"output: {tmp_path}\ntasks: [sudoku]\nproblems: 2\naccuracy_problems: 0\n"
        f"entries: [{{kind: ours, name: mine, model: {student}, options: {options}}}]\n"
    )
    config = read_config(path)
    workloads = make_workloads(config)
    if message is None:
        check_entries(config, workloads)
    else:
        with pytest.raises(InputError, match=message):
            check_entries(config, workloads)
