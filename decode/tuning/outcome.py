"""What came out for a task: the search, the choice, and the final measurement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from decode.reporting.measurements import Measurements
from decode.tuning.choose import Choice, Goal, Verdict, frontier, paired_interval, verdict
from decode.tuning.search import SMALLEST_PASS, Found
from decode.tuning.space import Setting, described

ROLES = ("chosen", "most accurate in the search", "defaults")


@dataclass(frozen=True)
class Final:
    """One setting on the held-out problems. roles: some of `ROLES`. repetitions: the same problems
    again; accuracy is that of the first, speed is over all."""

    roles: list[str]
    setting: Setting
    repetitions: list[Measurements]

    @property
    def measured(self) -> Measurements:
        return self.repetitions[0]

    @property
    def speeds(self) -> list[float]:
        """Visible tokens per second of each repetition."""
        return [e.tokens_per_second for e in self.repetitions]


@dataclass(frozen=True)
class Outcome:
    """A task's result. settings: all that were searched. finals: chosen, most accurate, defaults,
    each once."""

    task: str
    goal: Goal
    settings: Sequence[Setting]
    found: Found
    choice: Choice
    finals: list[Final]

    @property
    def chosen(self) -> Setting:
        return self.settings[self.found.compared[self.choice.chosen]]

    @property
    def front(self) -> list[int]:
        """The places in `settings` of those that no other compared one dominates."""
        # All on the same problems: of settings that were dropped earlier there are too few.
        points = [(e.tokens_per_second, e.accuracy) for e in self.found.comparable()]
        return [self.found.compared[i] for i in frontier(points)]

    def final(self, role: str) -> Final:
        """The final measurement of the setting with that role."""
        return next(final for final in self.finals if role in final.roles)

    @property
    def verdict(self) -> Verdict:
        """Whether the chosen setting reaches the goal on the held-out problems."""
        chosen, reference = self.final(ROLES[0]).measured, self.final(ROLES[1]).measured
        return verdict(self.goal, chosen, reference)

    @property
    def verdict_text(self) -> str:
        """The same as a sentence."""
        v = self.verdict
        held = "holds up" if v.holds else "does not hold up"
        sure = "" if v.certain else "; these problems do not settle it at 95 %"
        return (
            f"On held-out problems the choice {held}: its accuracy is {100 * abs(v.margin):.1f} "
            f"points {'above' if v.margin >= 0 else 'below'} the bound (95 % "
            f"{100 * v.low:+.1f} to {100 * v.high:+.1f}){sure}."
        )

    @property
    def against_defaults(self) -> str:
        """The chosen setting against the decoder's defaults, on the held-out problems."""
        chosen, defaults = self.final(ROLES[0]), self.final(ROLES[2])
        if chosen is defaults:
            return "These are the decoder's defaults."
        low, high = paired_interval(chosen.measured, defaults.measured)
        more = chosen.measured.accuracy - defaults.measured.accuracy
        # Accuracy is of the first repetition alone: the others decode the same tokens again.
        speed = median(chosen.speeds) / median(defaults.speeds)
        return (
            f"Against the decoder's defaults it is {speed:.2f} times as fast, its accuracy "
            f"differs by {100 * more:+.1f} points (95 % "
            f"{100 * low:+.1f} to {100 * high:+.1f})."
        )

    @property
    def search_text(self) -> list[str]:
        """How the search went, as sentences."""
        found = self.found
        lines = [
            f"{cut.settings} settings decoded {cut.problems} problems, {cut.kept} went on"
            + (", as many as the budget had room for." if cut.fitted else ".")
            for cut in found.cuts
        ]
        lines.append(
            f"The choice is among {len(found.compared)} settings on the first {found.problems} "
            "tuning problems."
        )
        if found.spent:
            # A budget may end before a setting's first problem; that is told, not hidden.
            missing = sum(measured is None for measured in found.measured)
            more = f"; {missing} settings were not measured at all" if missing else ""
            lines.append(f"The budget ended the search before its last rung was done{more}.")
        if found.problems < SMALLEST_PASS:
            lines.append(
                "So few problems tell settings apart only roughly: go by the held-out measurement."
            )
        if not self.choice.reached:
            lines.append(
                f"No setting reached the bound of {self.choice.bound:.1%}: the most accurate one "
                "was chosen."
            )
        return lines

    def to_json(self) -> dict[str, Any]:
        """Everything that was measured, in sums, and what was made of it."""
        common = dict(zip(self.found.compared, self.found.comparable(), strict=True))
        front = set(self.front)
        candidates = [
            {
                "setting": dict(setting),
                "compared": i in common,
                "frontier": i in front,
                # Compared settings with their common problems, dropped ones with what they have.
                **(numbers(common.get(i, measured)) if measured is not None else {}),
            }
            for i, (setting, measured) in enumerate(
                zip(self.settings, self.found.measured, strict=True)
            )
        ]
        v = self.verdict
        return {
            "task": self.task,
            "goal": self.goal.text,
            "bound": self.choice.bound,
            "bound_reached": self.choice.reached,
            "chosen": dict(self.chosen),
            "search": {
                "cuts": [vars(cut) for cut in self.found.cuts],
                "compared_problems": self.found.problems,
                "budget_spent": self.found.spent,
                "text": self.search_text,
            },
            "settings": candidates,
            "heldout": [
                {
                    "roles": final.roles,
                    "setting": dict(final.setting),
                    **numbers(final.measured),
                    "tokens_per_second": median(final.speeds),
                    "tokens_per_second_of_repetitions": final.speeds,
                }
                for final in self.finals
            ],
            "verdict": {
                "holds": v.holds,
                "certain": v.certain,
                "margin": v.margin,
                "margin_low": v.low,
                "margin_high": v.high,
                "text": self.verdict_text,
            },
            "against_defaults": self.against_defaults,
        }


def numbers(measured: Measurements) -> dict[str, Any]:
    """Sums and rates of what was measured."""
    return measured.numbers() | {
        "tokens_per_second": measured.tokens_per_second,
        "seconds_per_problem": measured.seconds_per_problem,
    }


def final_cells(final: Final) -> list[str]:
    """A held-out measurement for a table with `FINAL_COLUMNS`."""
    measured, speeds = final.measured, final.speeds
    low, high = measured.interval
    return [
        ", ".join(final.roles),
        described(final.setting) or "defaults",
        f"{measured.count_right} of {measured.problems}",
        f"{measured.accuracy:.1%} ({low:.1%} to {high:.1%})",
        f"{median(speeds):.1f} ({min(speeds):.1f} to {max(speeds):.1f})",
        f"{measured.tokens_per_forward:.2f}",
        f"{measured.forwards_per_problem:.1f}",
    ]


FINAL_COLUMNS = (
    "held-out",
    "setting",
    "right",
    "accuracy (95 %)",
    "tokens/s, median (range)",
    "tokens a forward",
    "forwards a problem",
)
