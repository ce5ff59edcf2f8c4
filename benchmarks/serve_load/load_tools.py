"""The load generators: their command lines, and what their reports say.

Both send the same texts to /v1/completions, streamed and greedy, at a Poisson rate. vLLM's is run
as the module behind `vllm bench serve`, because that command itself asks for the metadata of a
package named vllm, which vLLM's CPU package has not.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from d2f.tasks import Problem, check
from decode.ledger import json_line

VLLM_BENCH = (
    "from vllm.benchmarks.serve import add_cli_args, main; "
    "from vllm.utils.argparse_utils import FlexibleArgumentParser as Parser; "
    "parser = Parser(); add_cli_args(parser); main(parser.parse_args())"
)


@dataclass(frozen=True)
class Load:
    """What is sent. url: of the server, without /v1. model: as it names it. tokenizer: a folder.
    prompts: as text, one a request. rate: requests a second. length: most tokens of an answer."""

    url: str
    model: str
    tokenizer: Path
    prompts: Sequence[str]
    rate: float
    length: int
    seed: int


def vllm_command(python: str, load: Load, report: Path) -> list[str]:
    """`vllm bench serve`, which writes `report`. python: of vLLM's environment."""
    # ShareGPT's format is the one of text that is read without pandas, which vLLM does not bring.
    data = report.with_name("sharegpt.json")
    pairs = [[{"value": prompt}, {"value": "an answer"}] for prompt in load.prompts]
    data.write_text(json.dumps([{"conversations": pair} for pair in pairs]))
    options = {
        "backend": "openai",
        "base-url": load.url,
        "endpoint": "/v1/completions",
        "model": load.model,
        "tokenizer": load.tokenizer,
        "dataset-name": "sharegpt",
        "dataset-path": data,
        "sharegpt-output-len": load.length,
        "num-prompts": len(load.prompts),
        "num-warmups": 4,
        "request-rate": load.rate,
        "temperature": 0,
        "seed": load.seed,
        "metric-percentiles": "95",
        "result-dir": report.parent,
        "result-filename": report.name,
    }
    given = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    # Detailed: with the texts, in the order of the prompts.
    flags = ("--disable-shuffle", "--disable-tqdm", "--save-result", "--save-detailed")
    return [python, "-c", VLLM_BENCH, *given, *flags]


def guidellm_command(python: str, load: Load, report: Path) -> list[str]:
    """`guidellm run`, which writes `report`. python: of guidellm's environment."""
    data = report.with_name("prompts.jsonl")
    data.write_text("".join(json_line({"prompt": prompt}) for prompt in load.prompts))
    backend = {
        "kind": "openai_http",
        "target": load.url,
        "model": load.model,
        "request_format": "/v1/completions",
        "max_tokens": load.length,
        "http2": False,
        "extras": {"body": {"temperature": 0}},
    }
    return [
        *(python, "-m", "guidellm", "run", "--disable-console-interactive"),
        *("--backend", json.dumps(backend)),
        *("--profile", json.dumps({"kind": "poisson", "rate": load.rate})),
        *("--constraint", json.dumps({"kind": "max_requests", "count": len(load.prompts)})),
        *("--tokenizer", json.dumps({"kind": "huggingface_auto", "model": str(load.tokenizer)})),
        *("--data", json.dumps({"kind": "json_file", "path": str(data)})),
        *("--seed", json.dumps({"kind": "static", "value": load.seed})),
        *("--output", json.dumps({"kind": "json", "path": str(report)})),
    ]


def read_vllm(report: Path, problems: Sequence[Problem]) -> dict[str, Any]:
    """What the report of `vllm bench serve` says. error: the first of those that failed. right:
    problems solved, of its texts."""
    said = json.loads(report.read_text())
    return {
        "requests": said["num_prompts"],
        "failed": said["num_prompts"] - said["completed"],
        "seconds": said["duration"],
        "tokens": said["total_output_tokens"],
        "tokens_per_second": said["output_throughput"],
        "first_ms": said["median_ttft_ms"],
        "first_ms_95": said["p95_ttft_ms"],
        "error": next(filter(None, said["errors"]), None),
        "right": sum(map(check, problems, said["generated_texts"])),
    }


def read_guidellm(report: Path, problems: Sequence[Problem]) -> dict[str, Any]:
    """The same of guidellm's, which keeps no order of the problems: nothing is judged."""
    (said,) = json.loads(report.read_text())["benchmarks"]
    metrics = {name: found["successful"] for name, found in said["metrics"].items() if _is(found)}
    first = metrics["time_to_first_token_ms"]
    errors = (request["info"]["error"] for request in said["requests"]["errored"])
    return {
        "requests": len(problems),
        "failed": len(problems) - said["metrics"]["request_totals"]["successful"],
        "seconds": said["duration"],
        "tokens": metrics["output_token_count"]["total_sum"],
        "tokens_per_second": metrics["output_tokens_per_second"]["mean"],
        "first_ms": first["median"],
        "first_ms_95": first["percentiles"]["p95"],
        "error": next(errors, None),
    }


def _is(found: Any) -> bool:
    return isinstance(found, dict) and isinstance(found.get("successful"), dict)


TOOLS = {
    "vllm bench serve": (vllm_command, read_vllm),
    "guidellm": (guidellm_command, read_guidellm),
}
