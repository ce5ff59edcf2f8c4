"""python -m benchmarks.low_precision --problems 500

What low precision costs in answers: the bundled models decode held-out problems of each task in
float32, in bfloat16 and in every quantisation that the device has, each with the decoder and the
settings that `python -m decode.evaluate` takes by default. Counted against float32, on the same
problems: right answers, those lost and won, answers whose tokens are not all the same, and tokens
at whose place another one stands, of the visible ones.

Each run is one of `decode.evaluate --output`, below --runs: what is decoded there is not decoded
again, so the command goes on where it was. The report is report.json and report.md in --output.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from d2f.device import parse_device, parse_dtype
from d2f.files import make_folder, write_beside
from d2f.models import names
from d2f.quantize import QUANTISATIONS, available, check_quantize, slowness
from d2f.quiet import quiet
from decode import evaluate
from decode.cli import Parser, check_least, command
from decode.cli import parse_evaluation_flags as parse_evaluation
from decode.jobs import Record
from decode.report import markdown_table, paired

REFERENCE = "float32"
COLUMNS = (
    "precision", "right", "95 %", "points more", "95 %", "lost", "won", "answers changed",
    "tokens changed", "tokens a forward",
)  # fmt: skip


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Decode what is missing; what was found."""
    rows = []
    for model in options.models:
        plain = None
        for precision in (REFERENCE, *options.precisions):
            report, records = evaluated(options, model, precision)
            plain = plain or records
            for row in report["rows"]:
                changes = compared(plain[row["task"]], records[row["task"]])
                rows.append({"model": model, "precision": precision, **row, **changes})
    environment = {k: v for k, v in report["environment"].items() if k != "dtype"}
    return {"problems": options.problems, "environment": environment, "rows": rows}


def evaluated(
    options: argparse.Namespace, model: str, precision: str
) -> tuple[dict[str, Any], dict[str, dict[int | str, Record]]]:
    """The report of `decode.evaluate`, and by task its records by problem."""
    place = options.runs / f"{model}-{precision}"
    flags = ["--dtype", _dtype(precision), "--device", str(options.device)]
    flags += ["--quantize", precision] if precision in QUANTISATIONS else []
    flags += ["--tasks", options.tasks] if options.tasks else []
    print(f"{model} in {precision}", flush=True)
    with _int8_products(options.device):
        report = evaluate.run(
            parse_evaluation([
                "--model", model, "--problems", str(options.problems), "--output", str(place),
                "--batch-size", str(options.batch_size), *flags,
            ])
        )  # fmt: skip
    records: dict[str, dict[int | str, Record]] = {}
    for line in (place / "answers.jsonl").read_text(encoding="utf-8").splitlines()[1:]:
        record = Record.from_json(json.loads(line))
        records.setdefault(record.group, {})[record.id] = record
    return report, records


def compared(
    plain: dict[int | str, Record], records: dict[int | str, Record]
) -> dict[str, int | float]:
    """How the answers differ from those in float32: problems lost and won, answers with another
    token, and the visible tokens of float32 and of these at whose places different ones stand."""
    found = {"lost": 0, "won": 0, "answers_changed": 0, "tokens_changed": 0}
    for key, before in plain.items():
        now = records[key]
        found["lost"] += bool(before.right and not now.right)
        found["won"] += bool(now.right and not before.right)
        found["answers_changed"] += before.tokens != now.tokens
        found["tokens_changed"] += sum(a != b for a, b in zip_longest(before.tokens, now.tokens))
    places = sum(max(len(a.tokens), len(records[key].tokens)) for key, a in plain.items())
    return {**found, "places": places}


def render(report: dict[str, Any]) -> str:
    """The report as Markdown: a table a model and task."""
    about = ", ".join(f"{key} {value}" for key, value in report["environment"].items())
    lines = [
        "# Answers in low precision",
        "",
        f"`python -m benchmarks.low_precision --problems {report['problems']}`: held-out problems, "
        f"greedy, default decoders. {about}.",
        "",
        "Against float32 on the same problems. The first 95 % is Wilson's interval of the share of "
        "right answers; points more is the difference in percentage points, its 95 % Tango's "
        "paired interval. Answers changed: another visible token anywhere. Tokens changed: places "
        "with another token, of all places with one in either.",
    ]
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in report["rows"]:
        groups.setdefault((row["model"], row["task"]), []).append(row)
    for (model, task), rows in groups.items():
        lines += ["", f"## {model} on {task}", ""]
        lines += markdown_table(COLUMNS, [_cells(row) for row in rows])
    return "\n".join(lines) + "\n"


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    count = row["problems"]
    low, high = paired(row["won"], row["lost"], count)
    return (
        row["precision"],
        f"{100 * row['accuracy']:.1f} %",
        f"{100 * row['accuracy_low']:.1f} to {100 * row['accuracy_high']:.1f}",
        f"{100 * (row['won'] - row['lost']) / count:+.1f}",
        f"{100 * low:+.1f} to {100 * high:+.1f}",
        str(row["lost"]),
        str(row["won"]),
        f"{row['answers_changed']} of {count}",
        f"{100 * row['tokens_changed'] / row['places']:.2f} %",
        f"{row['tokens_per_forward']:.2f}",
    )


def _dtype(precision: str) -> str:
    """What is computed in."""
    if precision in QUANTISATIONS:
        return "bfloat16" if QUANTISATIONS[precision].bf16 else REFERENCE
    return precision


@contextlib.contextmanager
def _int8_products(device: torch.device) -> Iterator[None]:
    """Within it int8 products take float32's where PyTorch has no fast ones for the CPU: the same
    integers, many times sooner. A sum of `inner` products of int8 is exact in float32 while
    inner · 2^14 <= 2^24; wider layers are computed as they are."""
    if not slowness("int8", device):
        yield
        return
    slow = torch._int_mm

    def product(a: Tensor, b: Tensor) -> Tensor:
        return (a.float() @ b.float()).int() if a.shape[1] <= 1 << 10 else slow(a, b)

    with patch.object(torch, "_int_mm", product):
        yield


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; `models` and `precisions` are lists. Raises InputError."""
    parser = Parser("python -m benchmarks.low_precision", description=__doc__)
    parser.add_argument("--models", help=f"with commas (default {','.join(names())})")
    parser.add_argument("--tasks", help="with commas (default: the bundled ones)")
    parser.add_argument("--problems", type=int, default=500, help="of each task (default 500)")
    parser.add_argument("--precisions", help="with commas: bfloat16, quantisations (default all)")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--device", help="default: cuda where there is one")
    parser.add_argument("--runs", type=Path, default=Path("runs/quantize"), help="answers, kept")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/quantize"))
    options = parser.parse_args(arguments)
    check_least(options, problems=1, batch_size=1)
    options.models = options.models.split(",") if options.models else names()
    options.device = parse_device(options.device)
    given = options.precisions
    options.precisions = given.split(",") if given else ["bfloat16", *available(options.device)]
    for name in options.precisions:
        if name != "bfloat16":
            check_quantize(name, options.device, parse_dtype(_dtype(name), options.device))
    return options


@command(interrupted="interrupted; the same command goes on")
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; the exit status."""
    options = parse(arguments)
    make_folder(options.output)
    with quiet():
        report = run(options)
    write_beside(options.output / "report.json", json.dumps(report, indent=1) + "\n")
    text = render(report)
    write_beside(options.output / "report.md", text)
    print(text, end="")


if __name__ == "__main__":
    sys.exit(main())
