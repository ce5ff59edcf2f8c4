"""What the tests of the command write and read."""

import json

import torch

from d2f.convert import build
from d2f.saving import save_model

CONTEXT = 256
TAU = ["--tau-conf", "0.3"]  # a random model is confident of nothing


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def untimed(path):
    return [{k: v for k, v in line.items() if k != "seconds"} for line in lines_of(path)]


def prompts_file(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def make_model(place, family, tokenizer, **contract):
    torch.manual_seed(1)
    shape = {"hidden_size": 32, "intermediate_size": 48, "layers": 1, "heads": 2, "kv_heads": 1}
    model = build(family, tokenizer, context_length=CONTEXT, **shape)
    with torch.no_grad():
        model.backbone.lm_head.weight.mul_(12)
    save_model(model, place, dtype=torch.float32, **contract)
    return str(place)
