"""lm-eval's several processes, as `accelerate launch` starts them."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather, parse_flag_from_env
from torch import Tensor


class Processes:
    """Those of this run; alone where it was not launched as one of several."""

    def __init__(self) -> None:
        # As an Accelerator asks for it; without a GPU processes know of each other only with cpu.
        on_cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.cuda.is_available()
        self.state = PartialState(cpu=on_cpu)

    @property
    def rank(self) -> int:
        return self.state.process_index

    @property
    def size(self) -> int:
        return self.state.num_processes

    def device(self, asked: str | None) -> str | None:
        """Each process has a device of its own; one alone takes what is asked for."""
        return str(self.state.device) if self.size > 1 else asked

    def all_gather(self, tensor: Tensor) -> Tensor:
        """The processes' tensors, one behind the other, in each of them."""
        return gather(tensor) if self.size > 1 else tensor

    def gather_object(self, value: Any, to: int) -> list[Any] | None:
        """The processes' values in process `to`, None in the others."""
        if self.size == 1:
            return [value]
        found = [None] * self.size if self.rank == to else None
        torch.distributed.gather_object(value, found, dst=to)
        return found

    def wait(self) -> None:
        """Until all are here."""
        self.state.wait_for_everyone()

    def end(self) -> None:
        """Leave the others, at the end of the program."""
        if self.size > 1:
            self.state.destroy_process_group()
