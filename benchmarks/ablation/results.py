"""A report.json of an ablation by what its tables and figures ask for: over seeds, on the same
problems."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from benchmarks.ablation.seed_intervals import Values, difference_interval, share_interval


@dataclass(frozen=True)
class Measured:
    """What a decoding gave on a task: a row of report.json for each seed, or one, of seed None, for
    what is not trained."""

    by_seed: Mapping[int | None, Mapping[str, Any]]

    @property
    def counts(self) -> dict[int | None, int]:
        """Problems right, by seed."""
        return {seed: row["right"] for seed, row in self.by_seed.items()}

    @property
    def accuracy(self) -> float:
        return float(self.right(list(self.by_seed)).mean())

    @cached_property
    def interval(self) -> tuple[float, float]:
        """95 %, of the accuracy."""
        return share_interval(self.right(list(self.by_seed)))

    @property
    def tokens_per_forward(self) -> float:
        """Visible ones."""
        return self._sum("visible_tokens") / self._sum("forwards")

    @property
    def rows_per_token(self) -> float:
        """Rows fed for each visible token, inf where there is none."""
        rows = sum(row["rows_per_forward"] * row["forwards"] for row in self.by_seed.values())
        tokens = self._sum("visible_tokens")
        return float(rows) / tokens if tokens else math.inf

    @property
    def p_cache(self) -> float | None:
        """WeDLM's figure (`decode.step.p_cache_of`); None for other decoders."""
        rows = list(self.by_seed.values())
        if any(not row.get("p_cache") for row in rows):
            return None
        fed = sum(row["visible_tokens"] / row["p_cache"] for row in rows)
        return float(self._sum("visible_tokens") / fed)

    def right(self, seeds: list[int | None]) -> Values:
        """1 where a problem is right, ``[seeds, problems]``."""
        return np.array(
            [[int(c) for c in self.by_seed[s]["right_by_problem"]] for s in seeds], float
        )

    def against(self, base: Measured) -> tuple[float, tuple[float, float], int] | None:
        """The accuracy less that of another, its 95 % interval, and at how many seeds: those that
        both have; what is not trained is paired with each of the other's. None without any."""
        own, other = list(self.by_seed), list(base.by_seed)
        if None not in own and None not in other:
            own = other = [seed for seed in own if seed in base.by_seed]
        if not own:
            return None
        right, based = self.right(own), base.right(other)
        middle = float((right - based).mean())
        return middle, difference_interval(right, based), max(len(own), len(other))

    def _sum(self, key: str) -> float:
        return float(sum(row[key] for row in self.by_seed.values()))


class Results:
    """The runs of a report."""

    def __init__(self, report: dict[str, Any]):
        self.report = report

    @property
    def settings(self) -> list[str]:
        """In the configuration's order; one without a name where there are none."""
        return [setting["name"] for setting in self.report["config"]["settings"]] or [""]

    @property
    def tasks(self) -> list[str]:
        return list(dict.fromkeys(row["task"] for row in self._rows))

    @property
    def environments(self) -> list[str]:
        """A line for each date and machine that anything was measured on."""
        return list(
            dict.fromkeys(
                "{date}, {device}, {dtype}, torch {torch}, transformers {transformers}, "
                "Python {python}.".format(**row["environment"])
                for row in self._rows
            )
        )

    def set_of(self, setting: str) -> dict[str, Any]:
        """What a setting sets."""
        found = (s["set"] for s in self.report["config"]["settings"] if s["name"] == setting)
        return dict(next(found, {}))

    def decodings(self, setting: str) -> list[dict[str, Any]]:
        """Those of the configuration that the variants have in a setting, each once."""
        config = self.report["config"]
        of_setting = (d for s in config["settings"] if s["name"] == setting for d in s["decode"])
        of_variants = (d for variant in config["variants"] for d in variant["decode"])
        return list({d["name"]: d for d in (*config["decode"], *of_setting, *of_variants)}.values())

    def measured(self, variant: str, setting: str, task: str, decoding: str) -> Measured | None:
        """What a decoding of a variant, or of an untrained model, gave on a task, if anything."""
        found = {
            run["seed"]: row
            for run in self.report["runs"]
            if (run["variant"], run["setting"]) == (variant, setting)
            for row in run["rows"]
            if (row["task"], row["decoding"]) == (task, decoding)
        }
        return Measured(found) if found else None

    @property
    def _rows(self) -> list[dict[str, Any]]:
        return [row for run in self.report["runs"] for row in run["rows"]]
