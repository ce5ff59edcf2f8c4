"""python -m benchmarks.decoder_table

Writes the table of docs/decoders.md from what each decoder says of itself (`Decoder.card`).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from d2f.files import write_beside
from decode.compare.report import ComparisonReport, Speed
from decode.decoders import DECODERS

PAGE = Path(__file__).parent.parent / "docs" / "decoders.md"
BEGIN, END = "<!-- decoders: written by python -m benchmarks.decoder_table -->\n", "<!-- end -->"


def table() -> str:
    """A line a decoder, Markdown."""
    lines = ["| decoder | a forward decides | rows | cache | models | source |", "|---" * 6 + "|"]
    for name, kind in DECODERS.items():
        card = kind.card
        if card is not None:
            cells = (card.decides, card.rows, card.cache, card.models, card.source)
            lines.append(" | ".join((f"| `{name}`", *cells)) + " |")
    return "\n".join(lines) + "\n"


def page() -> str:
    """The page with the table as it is now."""
    return between(PAGE, BEGIN, table())


def between(page: Path, begin: str, table: str) -> str:
    """A page's text with the table after its line `begin` replaced, up to `END`."""
    head, rest = page.read_text(encoding="utf-8").split(begin)
    return head + begin + table + rest[rest.index(END) :]


def fastest_of_vllm(speeds: Sequence[Speed], baseline: str) -> Speed:
    """Of the ways to serve with vLLM (the baseline and entries whose names begin like it) the one
    of most tokens a second."""
    served = [speed for speed in speeds if speed.entry.startswith(baseline)]
    return max(served, key=lambda speed: speed.throughput)


def measured(reports: Sequence[ComparisonReport]) -> str:
    """When each was measured, and on what."""
    lines = []
    for report in reports:
        about, tasks = report.about, " and ".join(report.workloads)
        versions = f"torch {about['versions']['torch']}, fp32"
        lines.append(f"{tasks}: {about['date']}, {about['device']}, {versions}.")
    return "\n" + "\n".join(lines) + "\n"


def main() -> None:
    argparse.ArgumentParser(
        prog="python -m benchmarks.decoder_table",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args()
    write_beside(PAGE, page())


if __name__ == "__main__":
    main()
