"""python -m benchmarks.compiled_kernels --capability 90

Compiles every Triton kernel for an NVIDIA GPU of that compute capability, which needs none here:
the project's own functions are called on tensors without data, and each kernel that they launch is
compiled with the argument types, alignments and tiles of that launch. Of each it prints

    shared     bytes of shared memory of a block
    registers  of a thread
    spilled    bytes of a thread that did not fit into registers
    blocks     that fit on a multiprocessor at a time
    by         instructions in the binary: wgmma or mma multiply matrices, cp.async and tma copy
               while something else is computed

That a kernel compiles and fits is not that it is fast.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks import parser
from benchmarks.common import RowFile
from triton_kernels import masked_kl
from triton_kernels.confidence import confidence_of_logits
from triton_kernels.draws import Draws
from triton_kernels.span_attention import MAX_SPANS, span_attention, write_slots

# Of a multiprocessor (CUDA C++ Programming Guide, technical specifications): KiB of shared memory,
# of which a block may take all but one, and threads. Registers are 64 Ki on each.
SM = {80: (164, 2048), 86: (100, 1536), 89: (100, 1536), 90: (228, 2048), 100: (228, 2048)}
INSTRUCTIONS = {  # as cuobjdump names them
    "wgmma": r"HGMMA", "mma": r"HMMA", "cp.async": r"LDGSTS", "tma": r"UTMALDG|UBLKCP",
}  # fmt: skip


@dataclass(frozen=True)
class Compiled:
    """The resources of a compiled kernel."""

    kernel: str
    shared: int
    registers: int
    spilled: int
    blocks: int
    by: list[str]


def cases(dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], object]]]:
    """Calls that launch every kernel as decoding and training do, by name."""
    new = partial(torch.empty, device="meta", dtype=dtype)
    long = partial(torch.empty, device="meta", dtype=torch.int64)
    wide = partial(torch.empty, device="meta")
    shapes = [(32, 32, 128), (28, 4, 128), (32, 8, 128), (32, 8, 256)]
    shapes += [(32, 32, dim) for dim in (64, 80, 96)]
    for (heads, kv_heads, dim), rows in product(shapes, (16, 64, 1024)):
        q, k = new(rows, heads, dim), new(kv_heads, 8192, dim)
        spans = torch.empty(rows, MAX_SPANS, 2, device="meta", dtype=torch.int32)
        what = f"{heads} heads over {kv_heads}, dimension {dim}, {rows} rows"
        attend = partial(span_attention, q, k, k, spans, kernel=True, check=False)
        yield f"span attention, {what}", attend
    k, keys = new(32, 4096, 128), new(32, 64, 128)
    yield "write slots", partial(write_slots, k, k, long(64), keys, keys, kernel=True)
    for sampled in (False, True):
        draws = Draws(long(64), long(64), wide(64), long(64), wide(64)) if sampled else None
        score = partial(confidence_of_logits, mask_id=5, named=long(64), draws=draws, kernel=True)
        yield f"confidence{', sampled' * sampled}", partial(score, new(64, 126464))
    logits = new(1024, 126464)
    statistics = (wide(1024), wide(1024), wide(512))
    yield "masked KL", partial(masked_kl.add_tile, logits, *statistics)
    both = (wide(1024), wide(512))
    yield "masked KL", partial(masked_kl.difference, logits, *both, kernel=True)


@contextmanager
def compiling(capability: int) -> Iterator[list[tuple[str, Any]]]:
    """Within it, launching a kernel compiles it for that GPU, as a launch there would, and runs
    nothing. Gives name and compiled kernel of each launch. As on that GPU, too large a tile raises
    triton's OutOfResources."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver
    from triton.runtime.errors import OutOfResources
    from triton.runtime.jit import JITFunction

    found: list[tuple[str, Any]] = []
    launch = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = launch(self, *args, grid=grid, warmup=True, **options)
        if kernel.metadata.shared > (most := largest_block(capability)):
            raise OutOfResources(kernel.metadata.shared, most, "shared memory")
        found.append((self.fn.__name__, kernel))
        return kernel

    device = mock.Mock()
    device.get_current_target.return_value = GPUTarget("cuda", capability, 32)
    device.get_current_device.return_value = f"sm_{capability}"  # what triton keeps kernels by
    with (
        mock.patch.object(driver, "_active", device),
        mock.patch.object(JITFunction, "run", compile_only),
    ):
        yield found


def largest_block(capability: int) -> int:
    """Bytes of shared memory that one block may take."""
    return 1024 * (SM[capability][0] - 1)


def compiled(name: str, call: Callable[[], object], capability: int) -> list[Compiled]:
    """Compile the kernels that a call launches and list their resources.

    Raises triton's errors where one does not compile or fit.
    """
    with compiling(capability) as found:
        call()
    table = {}
    for function, kernel in found:
        if function not in table:
            usage, code = (_dumped(kernel.asm["cubin"], flag) for flag in ("-res-usage", "-sass"))
            registers, spilled = (
                int(re.findall(rf"{what}:(\d+)", usage)[-1]) for what in ("REG", "STACK")
            )
            table[function] = Compiled(
                f"{name}: {function.lstrip('_')}",
                kernel.metadata.shared,
                registers,
                spilled,
                _blocks(registers, kernel.metadata.shared, kernel.metadata.num_warps, capability),
                [by for by, names in INSTRUCTIONS.items() if re.search(rf"\b({names})\b", code)],
            )
    return list(table.values())


def _dumped(cubin: bytes, flag: str) -> str:
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, flag, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _blocks(registers: int, shared: int, warps: int, capability: int) -> int:
    size, threads = SM[capability]
    of_warp = -(-registers * 32 // 256) * 256  # registers are given out by 256 a warp
    by_shared = 1024 * size // (shared + 1024)  # each block takes 1 KiB more than it asks for
    return min(65536 // of_warp // warps, by_shared, threads // (32 * warps))


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile and print; the exit status."""
    given = parser(__doc__)
    dtypes = ["bfloat16", "float16", "float32"]
    given.add_argument("--capability", type=int, default=90, choices=SM)
    given.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"], choices=dtypes)
    given.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="calls by name")
    given.add_argument("--json", type=Path, help="file for the numbers")
    options = given.parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET") == "1":
        print("error: unset TRITON_INTERPRET: the interpreter compiles nothing", file=sys.stderr)
        return 2
    import triton

    print(f"triton {triton.__version__}, compute capability {options.capability}")
    print(f"{'dtype':<10}{'shared':>7}{'registers':>10}{'spilled':>8}{'blocks':>7}  by")
    about = {"triton": triton.__version__, "capability": options.capability}
    table = RowFile(options.json, about)
    for dtype in options.dtypes:
        for name, call in cases(getattr(torch, dtype)):
            wanted = any(text in name for text in options.only)
            for row in compiled(name, call, options.capability) if wanted else ():
                table.add({"dtype": dtype, **asdict(row)})
                numbers = f"{row.shared:>7}{row.registers:>10}{row.spilled:>8}{row.blocks:>7}"
                by = " ".join(row.by) or "-"
                print(f"{dtype:<10}{numbers}  {by:<16}{row.kernel}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
