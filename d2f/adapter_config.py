"""adapter_config.json, checked: what this project carries out is read, anything else is refused.

PEFT writes every field of its LoraConfig, most of them with the value that changes nothing. A field
that would change what the adapter computes, or the base that it goes on, must have that value.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from d2f.errors import CheckpointError
from d2f.json_file import read_object
from d2f.weight_files import ADAPTER_CONFIG

# Read here, or of no effect on a trained adapter: how it was made, on which tool, for which task.
_FREE = frozenset(
    {
        "auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "eva_config",
        "inference_mode", "init_lora_weights", "layers_pattern", "lora_alpha", "lora_dropout",
        "megatron_core", "peft_type", "peft_version", "qalora_group_size", "r", "revision",
        "runtime_config", "target_modules", "task_type", "use_rslora",
    }
)  # fmt: skip
# Others (pissa, olora, corda, loftq, lora_ga, ...) change the base's weights at the start.
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True)
class AdapterConfig:
    """What an adapter_config.json says.

    r, alpha, dropout, use_rslora: the LoRA's rank and scale as PEFT means them. targets: names of
    the modules that it adapts, as the file has them: the family's own or transformers'. base: name
    or path of the base, None where it names none. base_class: name of the class that it was trained
    on, empty where the file does not say.
    """

    r: int
    alpha: float
    dropout: float
    use_rslora: bool
    targets: tuple[str, ...]
    base: str | None
    base_class: str

    @property
    def scaling(self) -> float:
        """What the product of its matrices is multiplied by."""
        return self.alpha / (math.sqrt(self.r) if self.use_rslora else self.r)


def read_adapter_config(folder: Path) -> AdapterConfig:
    """The adapter_config.json in `folder`. Raises CheckpointError that names the field, what was
    expected and what came."""
    path = folder / ADAPTER_CONFIG
    if not path.is_file():
        raise CheckpointError(f"{folder}: expected an adapter with a {ADAPTER_CONFIG}")
    values = read_object(path, CheckpointError)

    def expect(name: str, what: str, is_right: bool) -> None:
        if not is_right:
            raise CheckpointError(f"{path}: {name} must be {what}, got {values.get(name)!r}")

    if values.get("peft_type") != "LORA" or values.get("use_dora"):
        kind = "DoRA" if values.get("use_dora") else values.get("peft_type")
        raise CheckpointError(f"{path}: expected a LORA adapter, got {kind!r}")
    for name, value in values.items():
        says_nothing = value is None or value is False or value in ("none", [], {})
        if name not in _FREE and not says_nothing:  # 0 is a layer, though it equals False
            raise CheckpointError(
                f"{path}: {name} is not supported: expected it absent or empty, got {value!r}"
            )
    start = values.get("init_lora_weights", True)
    # By identity first: 1 and 0 equal True and False, but are none of PEFT's values.
    is_plain = any(start is plain for plain in _PLAIN_STARTS[:3]) or start in _PLAIN_STARTS[3:]
    expect("init_lora_weights", f"one of {list(_PLAIN_STARTS)} (others change the base)", is_plain)
    r: Any = values.get("r")
    alpha: Any = values.get("lora_alpha")
    expect("r", "a whole number of at least 1", _is_number(r) and r >= 1 and r == int(r))
    expect("lora_alpha", "a positive number", _is_number(alpha) and alpha > 0)
    dropout = values.get("lora_dropout") or 0.0
    expect("lora_dropout", "a number in [0, 1)", _is_number(dropout) and 0 <= dropout < 1)
    rslora = values.get("use_rslora") or False
    expect("use_rslora", "true or false", isinstance(rslora, bool))
    base = values.get("base_model_name_or_path")
    expect("base_model_name_or_path", "text", isinstance(base, str | None))
    mapping = values.get("auto_mapping") or {}
    expect("auto_mapping", "an object", isinstance(mapping, dict))
    # PEFT takes a regular expression too, and a word for all layers: not one name of a module.
    targets = values.get("target_modules")
    if not isinstance(targets, list) or not targets or not all(isinstance(t, str) for t in targets):
        raise CheckpointError(f"{folder}: expected a list of target_modules, got {targets!r}")
    return AdapterConfig(
        r=int(r),
        alpha=alpha,
        dropout=float(dropout),
        use_rslora=rslora,
        targets=tuple(targets),
        base=base,
        base_class=str(mapping.get("base_model_class") or ""),
    )


def _is_number(value: Any) -> bool:
    if isinstance(value, int) and not isinstance(value, bool):
        return abs(value) < 2**53  # a whole number that a float holds exactly
    return isinstance(value, float) and math.isfinite(value)
