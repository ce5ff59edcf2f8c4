"""The trace file: every forward of every request, as JSON."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from d2f.files import write_beside
from decode.commands.prompt_jobs import PromptJob
from decode.engine.result import Event
from decode.reporting.places import check_place


class Trace:
    """Collects events and writes them at the end; meant for a few prompts, it is kept in memory.

    The file: ``run`` (the settings) and ``requests``, each with id, prompt (ids), tokens, and
    ``forwards``: rows fed, rows already cached, blocks (response positions ``[start, end)``, state,
    tokens, null where masked) and what was revealed (position, token, confidence).
    """

    def __init__(self, path: str):
        self.path = Path(os.path.realpath(path))
        check_place(self.path, "--trace")
        self._requests: dict[int | str, dict[str, Any]] = {}

    def add(self, job: PromptJob, event: Event) -> None:
        """Take one forward of a request."""
        entry = self._requests.setdefault(
            job.source.id, {"id": job.source.id, "prompt": job.ids, "forwards": []}
        )
        entry["forwards"].append(
            {
                "forward": event.forward,
                "blocks": [asdict(block) for block in event.blocks],
                "revealed": [asdict(revealed) for revealed in event.revealed],
            }
        )
        if event.result is not None:
            for forward, (fed, cached) in zip(entry["forwards"], event.result.calls, strict=True):
                forward |= {"fed": fed, "cached": cached}
            entry |= {
                "tokens": event.result.tokens,
                "raw_tokens": event.result.raw_tokens,
                "finish_reason": event.result.finish_reason,
            }

    def write(self, run: dict[str, Any]) -> None:
        """Write the file, whole or not at all."""
        content = {"run": run, "requests": list(self._requests.values())}
        write_beside(self.path, json.dumps(content) + "\n")
