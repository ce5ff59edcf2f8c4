"""The head of a card that the Hugging Face hub reads: what it lists a model under."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from huggingface_hub import EvalResult, ModelCardData


def front_matter(
    name: str,
    objective: str,
    tags: Sequence[str] = (),
    reports: list[dict[str, Any]] | None = None,
    license: str | None = None,
    language: str | None = None,
) -> list[str]:
    """Its lines, with the ``---`` around them.

    objective: what it was trained by. tags: more of them. reports: of `decode.evaluate`, each with
    a `label`. license, language: by the names that the hub has for them.
    """
    results = [
        EvalResult(
            task_type="text-generation",
            dataset_type=row["task"],
            dataset_name=f"{row['task']}, held out",
            metric_type="accuracy",
            metric_name=f"accuracy, {report['label']}",
            metric_value=row["accuracy"],
        )
        for report in reports or []
        for row in report["rows"]
    ]
    kind = [] if objective == "next_token" else ["diffusion-language-model"]
    data = ModelCardData(
        library_name="d2f-toolkit",
        pipeline_tag="text-generation",
        tags=["d2f", *kind, objective, *tags],
        model_name=name if results else None,
        eval_results=results or None,
        license=license,
        language=language,
    )
    return ["---", *data.to_yaml().splitlines(), "---"]
