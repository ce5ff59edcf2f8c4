"""Summarise measurements: intervals, the machine and memory that they took, Markdown tables."""

from __future__ import annotations

import contextlib
import math
import platform
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from d2f.model import DiffusionModel
    from decode.decoders import Decoder

Z95 = 1.959964


def wilson(right: float, count: float) -> tuple[float, float]:
    """Return Wilson's 95 % score interval of a share; of whole numbers it is scipy's.

    `right` may also be a sum of values in [0, 1], such as pass@k a problem: the interval is then
    wider than needed, since the variance of such values is at most that of a share.
    """
    share, z2 = right / count, Z95 * Z95
    middle = (share + z2 / (2 * count)) / (1 + z2 / count)
    variance = share * (1 - share) / count + z2 / (4 * count * count)
    half = Z95 / (1 + z2 / count) * math.sqrt(variance)
    return max(0.0, middle - half), min(1.0, middle + half)


def paired(gained: float, lost: float, count: float) -> tuple[float, float]:
    """Return the 95 % interval of the difference of two shares on the same `count` problems.

    It holds the differences that Tango's score test does not reject (Statistics in Medicine 17,
    1998; recommended for few pairs by Fagerland, Lydersen and Laake, Statistics in Medicine 33,
    2014). Where no pair differs it is z^2 / (count + z^2) on either side, about 3.8 problems.

    gained, lost: problems that only the first, or only the second, is right on.
    """
    if not count:
        return -1.0, 1.0
    return -_highest(lost, gained, count), _highest(gained, lost, count)


def _highest(gained: float, lost: float, count: float) -> float:
    """Find the highest difference that the score test does not reject, by bisection: it rejects
    all above and none between it and the estimate."""
    low, high = (gained - lost) / count, 1.0  # the estimate is never rejected
    # Until no float lies between the two.
    while low < (middle := (low + high) / 2) < high:
        # The likeliest share of `lost` where the difference is `middle`: A q^2 + B q + C = 0.
        a = 2 * count
        b = (2 * count - gained + lost) * middle - gained - lost
        c = -lost * middle * (1 - middle)
        q = (math.sqrt(max(0.0, b * b - 4 * a * c)) - b) / (2 * a)
        # The variance under the tested difference, not that of the observed shares, which is 0
        # where no pair differs.
        variance = count * (2 * q + middle * (1 - middle))
        rejected = (gained - lost - count * middle) ** 2 > Z95 * Z95 * variance
        low, high = (low, middle) if rejected else (middle, high)
    return low


@dataclass(frozen=True, eq=False)
class Measurements:
    """Problems decoded by one decoder; all arrays are [problems].

    right: the response solves the problem. tokens: visible ones. forwards: calls of the model that
    the request was in. seconds: wall time; problems decoded together share it, so that the sum is
    the time that passed.
    """

    right: npt.NDArray[np.bool_]
    tokens: npt.NDArray[np.int64]
    forwards: npt.NDArray[np.int64]
    seconds: npt.NDArray[np.float64]

    @property
    def problems(self) -> int:
        return len(self.right)

    @property
    def count_right(self) -> int:
        return int(self.right.sum())

    @property
    def accuracy(self) -> float:
        return self.count_right / self.problems

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the accuracy."""
        return wilson(self.count_right, self.problems)

    @property
    def tokens_per_second(self) -> float:
        # A ratio of sums: a mean of ratios would count short answers as much as long ones.
        return float(self.tokens.sum() / self.seconds.sum())

    def numbers(self) -> dict[str, Any]:
        """Return sums, shares and rates as reports have them."""
        low, high = self.interval
        tokens, forwards = int(self.tokens.sum()), int(self.forwards.sum())
        return {
            "problems": self.problems,
            "right": self.count_right,
            "accuracy": self.accuracy,
            "accuracy_low": low,
            "accuracy_high": high,
            "visible_tokens": tokens,
            "forwards": forwards,
            "tokens_per_forward": tokens / forwards,
            "tokens_per_second": self.tokens_per_second,
            "seconds_per_problem": float(self.seconds.sum() / self.problems),
        }


def joined(parts: list[Measurements]) -> Measurements:
    """Concatenate at least one part."""
    names = [field.name for field in fields(Measurements)]
    return Measurements(*(np.concatenate([getattr(p, n) for p in parts]) for n in names))


def environment(model: DiffusionModel) -> dict[str, Any]:
    """Describe the machine, the versions and the model's precision."""
    import torch
    import transformers

    cuda = model.device.type == "cuda"
    return {
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name() if cuda else processor(),
        "threads": model.threads,
        "dtype": model.precision,
        "compiled": model.is_compiled,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def processor() -> str:
    """Return the CPU's name."""
    information = Path("/proc/cpuinfo")
    if information.is_file():
        for entry in information.read_text().splitlines():
            if entry.startswith("model name"):
                return entry.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def reset_peak(pids: Iterable[int]) -> None:
    """Let each process's peak begin anew."""
    for pid in pids:
        with contextlib.suppress(OSError):
            # 5 sets VmHWM, the peak, back to what is resident now (proc(5)).
            Path(f"/proc/{pid}/clear_refs").write_text("5")


def peak_bytes(pids: Iterable[int]) -> int | None:
    """Sum the processes' peaks (pages that two of them share count twice); None where they cannot
    be read."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    total += int(line.split()[1]) * 1024
    return total or None


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Return the lines of a Markdown table."""
    lines = [columns, *([str(cell) for cell in row] for row in rows)]
    head, *rest = ["| " + " | ".join(cells) + " |" for cells in lines]
    return [head, "|---" * len(columns) + "|", *rest]


def empty_notice(model: DiffusionModel, count: int, length: int) -> str | None:
    """Say why `count` answers of at most `length` tokens may be empty; None for none."""
    if not count:
        return None
    trained = model.contract.response_length
    if trained is not None and length > trained:
        reason = f"{length} tokens were asked of a model that was trained on at most {trained}"
    else:
        reason = "the model may not know such a task, or be asked for another length than it learnt"
    return f"{count} {'answer is' if count == 1 else 'answers are'} empty: {reason}"


_warned: WeakSet[DiffusionModel] = WeakSet()


def doubt_of(model: DiffusionModel, decoder: Decoder) -> str | None:
    """Return why the decoder may decode the model badly, once for each model; None if it should
    not."""
    contract = model.contract
    doubt = decoder.warning_for(contract)
    if contract.objective == "next_token" and contract.mask_id is not None:
        doubt = "is not a diffusion model yet: it was converted and has to be trained as one"
    if doubt is None or model in _warned:
        return None
    _warned.add(model)
    return f"{model.path or 'the model'} {doubt}"
