"""The files in configs/accelerate/ are what `accelerate launch --config_file` takes."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DistributedType

FOLDER = Path(__file__).parent.parent / "configs" / "accelerate"
KINDS = {
    "one-gpu": DistributedType.NO,
    "ddp": DistributedType.MULTI_GPU,
    "fsdp2": DistributedType.FSDP,
    "zero2": DistributedType.DEEPSPEED,
    "zero2-offload": DistributedType.DEEPSPEED,
    "zero3": DistributedType.DEEPSPEED,
    "zero3-offload": DistributedType.DEEPSPEED,
}


def launched(name: str) -> Namespace:
    """The arguments that accelerate's own launcher makes of a file."""
    words = ["--config_file", str(FOLDER / f"{name}.yaml"), "distill/train.py", "--config", "x"]
    arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    return arguments


def test_every_kind_has_a_file():
    assert {path.stem for path in FOLDER.glob("*.yaml")} == KINDS.keys()


@pytest.mark.parametrize("name", KINDS)
def test_a_file_loads_as_what_its_name_says(name):
    config = load_config_from_file(str(FOLDER / f"{name}.yaml"))
    assert isinstance(config, ClusterConfig)
    assert config.distributed_type == KINDS[name]
    assert config.mixed_precision == "no"  # what the run's configuration says is not overruled


def test_fsdp_is_its_second_version_by_layers():
    arguments = launched("fsdp2")
    assert arguments.use_fsdp and int(arguments.fsdp_version) == 2
    assert arguments.fsdp_auto_wrap_policy == "TRANSFORMER_BASED_WRAP"
    assert arguments.fsdp_transformer_layer_cls_to_wrap is None  # from the model


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("offload", ["", "-offload"])
def test_zero_has_its_stage_and_offload(stage, offload):
    arguments = launched(f"zero{stage}{offload}")
    device = "cpu" if offload else "none"
    assert arguments.use_deepspeed and arguments.zero_stage == stage
    assert arguments.offload_optimizer_device == device
    assert arguments.offload_param_device == (device if stage == 3 else "none")
    assert arguments.gradient_clipping is None  # the run's own
