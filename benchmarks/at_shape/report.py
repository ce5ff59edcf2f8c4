"""What was measured at a shape, for reading: tables, and a figure of milliseconds by rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from decode.report import markdown_table


def render(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    a, machine = report["about"], report["machine"]
    rates = ", ".join(
        f"{value / 1e9:.0f} · 10⁹ {key.removesuffix('_per_second').replace('_', ' ')}/s"
        for key, value in machine.items()
    )
    lines = [
        f"# Forwards of {report['shape']}",
        "",
        f"{report['parameters'] / 1e9:.2f} · 10⁹ parameters, random. {a['processor']}, "
        f"{a['device']}, torch {a['torch']}, {a['date']}. Measured here: {rates}.",
        "",
        "## Milliseconds a forward",
        "",
        f"Of the engine, from tokens on the host to tokens on the host; {report['cached']} rows "
        f"before; median of {report['repeat']}. In brackets: times its own floor, the longer of "
        "bytes over bandwidth (b) and operations over the rate of a large product (o).",
        "",
        *markdown_table(
            ["precision", "GB read", *(f"{rows} rows" for rows in report["shown"])],
            _forwards(report),
        ),
        "",
        "## Tokens a second, one request at a time",
        "",
        "Visible tokens over the time of whole requests, prompts included. D2F: the recorded rows "
        "of each forward at the milliseconds that so many rows take (a straight line between two "
        "numbers of rows that were timed). Autoregressive: the same prompts and as many tokens, "
        "by the same engine at its milliseconds a row, and by vLLM, run.",
    ]
    for task, counted in report["traces"].items():
        if isinstance(counted, dict):
            lines += ["", f"### {task}", "", _about(report, counted), ""]
            lines += markdown_table(["decoding", "precision", "tokens/s"], _speeds(report, task))
    return "\n".join(lines) + "\n"


def _forwards(report: dict[str, Any]) -> Iterator[list[str]]:
    for one in report["precisions"]:
        if "left_out" in one:
            yield [one["precision"], "left out: " + one["left_out"], *[""] * len(report["shown"])]
            continue
        by_rows = {forward["rows"]: forward for forward in one["forwards"]}
        cells = []
        for rows in report["shown"]:
            f = by_rows[rows]
            floor = max(f["bytes_ms"], f["operations_ms"])
            which = "b" if floor == f["bytes_ms"] else "o"
            cells.append(f"{f['ms']:.1f} ({f['ms'] / floor:.1f} {which})")
        name = f"{_name(one)} (slow here)" if one["slow"] else _name(one)
        yield [name, f"{one['gigabytes']:.2f}", *cells]


def _name(one: dict[str, Any]) -> str:
    """As int8-weight in float32, compiled."""
    name = one["precision"]
    if name != one["dtype"]:
        name += f" in {one['dtype']}"
    return name + ", compiled" * one["compiled"]


def _about(report: dict[str, Any], counted: dict[str, float]) -> str:
    traces = report["traces"]
    return (
        f"{traces['problems']} problems by {traces['model']}: {counted['prompt_tokens']:.0f} "
        f"tokens a prompt, {counted['visible_tokens']} visible tokens in {counted['forwards']} "
        f"forwards ({counted['tokens_per_forward']:.2f} a forward); after the first, which has the "
        f"prompt, {counted['rows_per_forward']:.1f} rows a forward."
    )


def _speeds(report: dict[str, Any], task: str) -> Iterator[list[str]]:
    for way, name in (("d2f", "D2F"), ("autoregressive", "autoregressive, same engine")):
        for one in report["precisions"]:
            if "left_out" not in one:
                yield [name, _name(one), f"{one['tokens_per_second'][task][way]:.2f}"]
    for server in report["vllm"]:
        said = server.get("refused")
        speed = f"did not run: {said}" if said else f"{server['tokens_per_second'][task]:.2f}"
        yield ["autoregressive, vLLM", server["dtype"], speed.replace("|", "/")]


def draw(report: dict[str, Any], stem: Path) -> None:
    """Milliseconds by rows, with each precision's floor dashed: PNG and SVG."""
    from decode.plots import COLORS, dress, new_figure, save

    a = report["about"]
    figure, (axes,) = new_figure(
        1, f"{report['shape']}, random weights, {a['processor']}, {a['device']}; dashed: floor"
    )
    there = [one for one in report["precisions"] if "left_out" not in one]
    for one, color in zip(there, COLORS, strict=False):
        rows = [forward["rows"] for forward in one["forwards"]]
        floors = [max(f["bytes_ms"], f["operations_ms"]) for f in one["forwards"]]
        axes.plot(rows, [f["ms"] for f in one["forwards"]], "o-", color=color, label=_name(one))
        axes.plot(rows, floors, "--", color=color, linewidth=1)
    axes.set_ylabel("milliseconds a forward")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
    dress(axes, f"A forward of {report['shape']}", "rows")
    save(figure, stem)
