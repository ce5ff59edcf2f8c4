"""python -m benchmarks.quantize_table

Writes the table of docs/low-precision.md from `d2f.quantize.QUANTISATIONS`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.decoder_table import between
from d2f.files import write_beside
from d2f.quantize import QUANTISATIONS, Quantisation
from decode.report import markdown_table

PAGE = Path(__file__).parent.parent / "docs" / "low-precision.md"
BEGIN = "<!-- quantisations: written by python -m benchmarks.quantize_table -->\n"
COLUMNS = ("`--quantize`", "weights", "activations", "by", "CPU", "CUDA GPU")


def table() -> str:
    """A line a quantisation, Markdown."""
    rows = (
        (f"`{name}`", q.weights, q.activations, q.library, _cpu(name, q), _cuda(q))
        for name, q in QUANTISATIONS.items()
    )
    return "\n".join(markdown_table(COLUMNS, rows)) + "\n"


def _cpu(name: str, found: Quantisation) -> str:
    if found.no_cpu:
        return f"no: {found.no_cpu}"
    return "yes; slow without AVX512-VNNI or AMX" if name == "int8" else "yes"


def _cuda(found: Quantisation) -> str:
    if found.capability is None:
        return "yes"
    major, minor = found.capability
    return f"compute capability {major}.{minor}" + ", bfloat16" * found.bf16


def page() -> str:
    """The page with the table as it is now."""
    return between(PAGE, BEGIN, table())


def main() -> None:
    argparse.ArgumentParser(
        prog="python -m benchmarks.quantize_table",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args()
    write_beside(PAGE, page())


if __name__ == "__main__":
    main()
