"""python -m benchmarks.compiled_kernels --capability 90

Compiles every Triton kernel for an NVIDIA GPU of that compute capability, which needs none here,
and prints what each takes: bytes of shared memory, registers of a thread, bytes spilled. That a
kernel compiles and fits is not that it is fast.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from d2f.files import write_beside

LIMIT = 227 * 1024  # shared memory of a block on compute capability 9.0
TYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


@dataclass(frozen=True)
class Case:
    """A kernel with the types of its arguments and its constants; numbers are int32 unless said."""

    name: str
    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]


def cases(dtype: str) -> Iterator[Case]:
    """Every kernel as decoding and training call it, on tensors of one dtype."""
    from triton_kernels import confidence_tiles as confidence
    from triton_kernels import masked_kl_tiles as masked_kl
    from triton_kernels import span_attention_tiles as spans

    data = f"*{TYPES[dtype]}"
    wide = {"largest": "*fp32", "total": "*fp32", "cross": "*fp32", "log_sum": "*fp32"}
    wide |= {"scale": "*fp32", "logits": data, "out": data}
    yield Case("masked_kl add", masked_kl._add_tile, wide, {"BLOCK": masked_kl._BLOCK})
    yield Case("masked_kl difference", masked_kl._difference, wide, {"BLOCK": masked_kl._BLOCK})
    facts = {"facts": "*fp32", "tokens": "*i32", "named_logit": "*fp32", "named": "*i64"}
    facts |= {"seeds": "*i64", "temperature": "fp32", "logits": data, "hidden": data, "head": data}
    for sampled in (False, True):
        on = {"HAS_MASK": True, "HAS_NAMED": True, "SAMPLED": sampled}
        said = ", sampled" if sampled else ""
        yield Case(
            f"confidence of logits{said}",
            confidence._logits_tile,
            facts,
            {**on, "COLUMNS": confidence._COLUMNS},
        )
        for rows in (16, 64):
            tile = confidence.head_tile(rows, 4 if dtype == "float32" else 2)
            yield Case(
                f"confidence head, {rows} rows{said}", confidence._head_tile, facts, {**on, **tile}
            )
    joined = facts | {"out": "*fp32", "token": "*i64"}
    yield Case(
        "confidence join", confidence._join_tiles, joined, {"HAS_NAMED": True, "TILES": 2048}
    )
    yield from _span_cases(spans, data, dtype)


def _span_cases(spans: Any, data: str, dtype: str) -> Iterator[Case]:
    import torch

    from triton_kernels import span_attention_backward as gradients

    pointers = dict.fromkeys(("q", "k", "v", "out", "d_out", "d_q", "d_k", "d_v"), data)
    pointers |= dict.fromkeys(("keys", "values"), data)
    pointers |= dict.fromkeys(("part", "part_most", "part_total", "log_sum", "delta"), "*fp32")
    pointers |= {"spans": "*i32", "bounds": "*i32", "slots": "i32", "scale": "fp32"}
    for heads, kv_heads, dim in ((32, 32, 128), (28, 4, 128), (32, 8, 256), (32, 32, 80)):
        for queries in (16, 1024):
            q = torch.empty(queries, heads, dim, dtype=getattr(torch, dtype), device="meta")
            k = torch.empty(kv_heads, 4096, dim, dtype=q.dtype, device="meta")
            shape = spans.Shape(q, k, k, torch.empty(queries, 1, 2, device="meta"))
            sizes = {**shape.sizes, "KEYS": shape.keys}
            what = f"{heads} heads over {kv_heads}, dimension {dim}, {queries} queries"
            for splits in (1, 16) if queries == 16 else (1,):
                yield Case(
                    f"span attention, {what}, {splits} splits",
                    spans._forward,
                    pointers,
                    {**sizes, "SPLITS": splits},
                )
            if queries == 1024:
                for name in ("_backward_queries", "_backward_keys"):
                    kernel = getattr(gradients, name)
                    yield Case(f"span attention {name}, {what}", kernel, pointers, sizes)
    width = {"DIM": 128, "WIDTH": 128}
    yield Case("span attention join", spans._join, pointers, {**width, "SPLITS": 64})
    slots = pointers | {"slots": "*i64"}
    yield Case("write slots", spans._write, slots, width)


def compiled(case: Case, capability: int) -> dict[str, Any]:
    """What a case takes. Raises triton's errors where it does not compile."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas
    from triton.compiler import ASTSource

    names = case.kernel.arg_names
    options = {k: v for k, v in case.constants.items() if k not in names}  # such as num_warps
    constants = {k: v for k, v in case.constants.items() if k in names}
    signature = {
        name: "constexpr" if name in constants else case.types.get(name, "i32") for name in names
    }
    places = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(case.kernel, signature, constexprs=places)
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder) / "kernel.ptx"
        ptx.write_text(kernel.asm["ptx"])
        arch = re.search(r"\.target (sm_\w+)", kernel.asm["ptx"])
        assert arch is not None
        said = subprocess.run(
            [get_ptxas(capability).path, "-v", f"--gpu-name={arch[1]}", str(ptx), "-o",
             f"{folder}/kernel.cubin"],
            capture_output=True, text=True, check=True,
        ).stderr  # fmt: skip
    registers, spilled = (
        re.search(r"Used (\d+) registers", said),
        re.findall(r"(\d+) bytes spill stores", said),
    )
    assert registers is not None
    return {
        "kernel": case.name,
        "shared": kernel.metadata.shared,
        "registers": int(registers[1]),
        "spilled": sum(map(int, spilled)),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile and print; 1 where a kernel does not fit into shared memory."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--capability", type=int, default=90)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"], choices=TYPES)
    parser.add_argument("--only", default="", metavar="TEXT", help="kernels with this in the name")
    parser.add_argument("--json", type=Path, help="file for the numbers")
    options = parser.parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET") == "1":
        print("error: unset TRITON_INTERPRET: the interpreter compiles nothing", file=sys.stderr)
        return 2
    import triton

    print(f"triton {triton.__version__}, compute capability {options.capability}")
    print(f"{'dtype':<10}{'shared':>8}{'registers':>11}{'spilled':>9}  kernel")
    table = []
    for dtype in options.dtypes:
        for case in cases(dtype):
            if options.only in case.name:
                found = compiled(case, options.capability)
                table.append({"dtype": dtype, **found})
                numbers = f"{found['shared']:>8}{found['registers']:>11}{found['spilled']:>9}"
                print(f"{dtype:<10}{numbers}  {case.name}", flush=True)
    if options.json is not None:
        about = {"triton": triton.__version__, "capability": options.capability}
        write_beside(options.json, json.dumps({**about, "kernels": table}) + "\n")
    return int(any(row["shared"] > LIMIT for row in table))


if __name__ == "__main__":
    sys.exit(main())
