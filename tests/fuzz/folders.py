"""Tiny checkpoints and adapters to damage: made once, laid out anew for each example."""

from __future__ import annotations

import copy
import json
import os
import shutil
import struct
from functools import cache
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny import fresh_model
from transformers import Qwen3Config, Qwen3ForCausalLM

import decode
from d2f.adapters import new_lora
from d2f.loading import load
from d2f.model import DiffusionModel
from tests.fuzz.odd import TEXT, VALUES

GOLDEN = Path(__file__).parents[1] / "golden"
OFFICIAL = ("llada-official", "dream-official", "sdar-official")
NATIVE = ("llada", "dream", "wedlm", "causal")
BASES = (*OFFICIAL, *NATIVE)
WEIGHTS, ADAPTER = "model.safetensors", "adapter_model.safetensors"


def made(place: Path) -> Path:
    """The folders of BASES in `place`, and of ``adapter`` (official) and ``own-adapter``."""
    for name in ("llada", "dream"):
        folder = place / f"{name}-official"
        folder.mkdir()
        for file in ("config.json", WEIGHTS):
            shutil.copy(GOLDEN / f"{name}-tiny" / file, folder / file)
    _sdar(place / "sdar-official")
    for name in NATIVE:
        fresh_model(name).save(place / name)
    shutil.copytree(GOLDEN / "llada-tiny" / "adapter", place / "adapter")
    (place / "adapter" / "forward.safetensors").unlink()
    own = load(place / "dream", device="cpu")
    new_lora(own, r=2, alpha=4, dropout=0.0)
    for key, value in own.adapter.state_dict().items():
        if ".lora_B." in key:
            value.fill_(0.05)
    own.save(place / "own-adapter")
    return place


def _sdar(folder: Path) -> None:
    """A checkpoint as the family's official ones are: Qwen3's under a type of its own."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=256,
        eos_token_id=2,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    change(folder, "config.json", {"model_type": "sdar", "mask_token_id": 3, "block_size": 4})


def laid(source: Path, place: Path) -> Path:
    """`place` with the files of `source`, the large ones linked: to be replaced, not written to."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    for path in source.iterdir():
        if path.suffix == ".safetensors":
            os.link(path, place / path.name)
        else:
            shutil.copy(path, place / path.name)
    return place


def put(folder: Path, name: str, content: str | bytes) -> None:
    """Write a file in place of the one that is there."""
    (folder / name).unlink(missing_ok=True)
    data = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
    (folder / name).write_bytes(data)


def put_json(folder: Path, name: str, values: Any) -> None:
    put(folder, name, json.dumps(values))


def change(folder: Path, name: str, changes: dict[str, Any]) -> None:
    """Replace values of a JSON object in a file; ``...`` removes one."""
    values = json.loads((folder / name).read_text(encoding="utf-8")) | changes
    put_json(folder, name, {key: value for key, value in values.items() if value is not ...})


def change_tensors(folder: Path, name: str, changes: dict[str, Any]) -> None:
    """Replace tensors of a file; None removes one."""
    tensors = load_file(folder / name) | changes
    (folder / name).unlink()
    kept = {key: value.contiguous() for key, value in tensors.items() if value is not None}
    save_file(kept, folder / name, metadata={"format": "pt"})


def header(content: bytes) -> tuple[dict[str, Any], bytes]:
    """The header of a safetensors file, and the data after it."""
    size = struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def with_header(values: Any, data: bytes) -> bytes:
    text = json.dumps(values).encode()
    return struct.pack("<Q", len(text)) + text + data


@st.composite
def edited(draw: st.DrawFn, values: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    """A JSON object with one to three values replaced, removed or put beside the others; `others`:
    keys that may come into it with values that somebody could mean."""
    values = copy.deepcopy(values)
    for _ in range(draw(st.integers(1, 3))):
        place = values
        while True:  # into what is nested, as often as not
            key = draw(st.sampled_from(sorted(place.keys() | (others.keys()))) | TEXT)
            if isinstance(place.get(key), dict) and place[key] and draw(st.booleans()):
                place = place[key]
                continue
            break
        meant = [st.just(v) for v in others.get(key, [])]
        kind = draw(st.sampled_from(["remove", "odd", "near", "meant"]))
        old = place.get(key)
        if kind == "remove":
            place.pop(key, None)
        elif kind == "near" and isinstance(old, int | float):
            place[key] = draw(
                st.sampled_from([old + 1, old - 1, old * 2, old / 2, -old, str(old), [old]])
            )
        else:
            place[key] = draw(st.one_of(*meant) if kind == "meant" and meant else VALUES)
    return values


@cache
def options(family: str) -> Any:
    if family == "causal":
        return decode.Autoregressive(max_new_tokens=4)
    if family == "wedlm":
        return decode.WeDLM(max_new_tokens=4)
    return decode.D2F(max_new_tokens=4, block_size=4, tau_conf=0.5)


def tokens(model: DiffusionModel, prompt: Any = (5, 6, 7)) -> list[int]:
    """What the model decodes after a prompt."""
    given = prompt if isinstance(prompt, str) else list(prompt)
    return decode.generate(model, [given], options(model.family))[0].raw_tokens
