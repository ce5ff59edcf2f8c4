"""python -m benchmarks.gpu.page

Writes the tables of docs/gpu.md: what was measured, from benchmarks/results/gpu, and what fits, by
`benchmarks.gpu.what_fits`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from benchmarks.gpu.measured_tables import markdown
from benchmarks.gpu.results_file import read_runs
from benchmarks.gpu.what_fits import decoding, training, weights_and_cache
from benchmarks.tables import with_block
from d2f.files import write_beside

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "gpu.md"
RESULTS = ROOT / "benchmarks" / "results" / "gpu"


def measured() -> str:
    """The runs in benchmarks/results/gpu."""
    return markdown([run for path in sorted(RESULTS.glob("*.json")) for run in read_runs(path)])


BLOCKS: dict[str, Callable[[], str]] = {
    "measured": measured,
    "weights and cache": lambda: "\n".join(weights_and_cache()),
    "decoding": lambda: "\n".join(decoding()),
    "training": lambda: "\n".join(training()),
}


def main() -> None:
    """Rewrite every block of the page."""
    argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.page",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args()
    text = PAGE.read_text(encoding="utf-8")
    for name, make in BLOCKS.items():
        text = with_block(text, name, make())
    write_beside(PAGE, text)


if __name__ == "__main__":
    main()
