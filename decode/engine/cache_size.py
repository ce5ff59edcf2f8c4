"""How many slots a cache gets where nobody says, and how many at most."""

from __future__ import annotations

import psutil
import torch

from d2f.errors import InputError
from d2f.model import DiffusionModel

LONG = 4096  # positions of a request that is long, but not rare


def default_slots(model: DiffusionModel, batch_size: int) -> int:
    """Slots for `batch_size` requests of 4,096 positions each (of the model's context, where that
    is shorter), and for one that fills the context at least; but no more than half of the memory
    that is free on the model's device holds."""
    context = model.context_length
    wanted = max(context, batch_size * min(context, LONG))
    return max(1, min(wanted, free_bytes(model.device) // 2 // _slot_bytes(model)))


def check_slots(model: DiffusionModel, slots: int) -> None:
    """Raise InputError for more slots than the memory that is free holds: a system that lends more
    than it has would end the process later, or another one."""
    slot, free = _slot_bytes(model), free_bytes(model.device)
    if slots > free // slot:
        raise InputError(
            f"slots: {slots} take {slots * slot / 2**30:,.1f} GiB, and {free / 2**30:,.1f} GiB are "
            f"free on {model.device}: expected {free // slot} at most"
        )


def _slot_bytes(model: DiffusionModel) -> int:
    """Of the memory that `free_bytes` counts."""
    slot = sum(k.nbytes + v.nbytes for k, v in model.new_cache(1).layers)
    # Processes that share the model share a CPU's memory, too.
    return slot * model.tensor_parallel if model.device.type == "cpu" else slot


def free_bytes(device: torch.device | str) -> int:
    """What is free of the device's memory."""
    if torch.device(device).type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)
