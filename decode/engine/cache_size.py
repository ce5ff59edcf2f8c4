"""How many slots a cache gets where nobody says."""

from __future__ import annotations

import psutil
import torch

from d2f.model import DiffusionModel

LONG = 4096  # positions of a request that is long, but not rare


def default_slots(model: DiffusionModel, batch_size: int) -> int:
    """Slots for `batch_size` requests of 4,096 positions each (of the model's context, where that
    is shorter), and for one that fills the context at least; but no more than half of the memory
    that is free on the model's device holds."""
    context = model.context_length
    wanted = max(context, batch_size * min(context, LONG))
    slot = sum(k.nbytes + v.nbytes for k, v in model.new_cache(1).layers)
    if model.device.type == "cpu":  # processes that share the model share the memory, too
        slot *= model.tensor_parallel
    return max(1, min(wanted, free_bytes(model.device) // 2 // slot))


def free_bytes(device: torch.device | str) -> int:
    """What is free of the device's memory."""
    if torch.device(device).type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)
