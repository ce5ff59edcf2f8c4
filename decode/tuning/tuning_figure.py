"""The figure of a tuning run: a row a task, the search's frontier and the final measurement."""

from __future__ import annotations

from statistics import median

from decode.reporting.measurements import Measurements
from decode.reporting.plots import Panel, Point, Series, frontier, save
from decode.tuning.outcome import ROLES, Final, Outcome
from decode.tuning.space import Setting
from decode.tuning.tuning_report import TuningReport

SHORT = {"block_size": "block", "tau_add": "add", "tau_act": "act", "tau_conf": "conf"}


def draw(report: TuningReport) -> None:
    """Write frontier.png and frontier.svg."""
    run, environment = report.run, report.environment
    names = ", ".join(f"{SHORT[n]}: {n}" for n in report.space.varying if n in SHORT)
    caption = (
        f"{report.model}, decoder {run['decoder']}, batch {run['batch_size']}, "
        f"{environment['dtype']}, {environment['device']}, {environment['threads']} threads, "
        f"{environment['date']}. Bars: 95 % Wilson intervals."
    )
    if names:
        caption += f"\nLabels: {names}."
    panels = [
        panel
        for outcome in report.outcomes
        for panel in (search_panel(outcome, report.space.varying), final_panel(outcome))
    ]
    save(frontier(panels, caption, columns=2), report.folder / "frontier")


def search_panel(outcome: Outcome, varying: list[str]) -> Panel:
    """The frontier of a task on its tuning problems, and the settings below it."""
    found = outcome.found
    common = dict(zip(found.compared, found.comparable(), strict=True))
    chosen = found.compared[outcome.choice.chosen]
    front = outcome.front
    on_front = [
        point(common[i], label=short(outcome.settings[i], varying), chosen=i == chosen)
        for i in front
    ]
    below = [point(e, chosen=i == chosen) for i, e in common.items() if i not in front]
    dropped = [point(e) for i, e in enumerate(found.measured) if e is not None and i not in common]
    return Panel(
        title=f"{outcome.task}: the search, {found.problems} tuning problems",
        series=[
            Series("frontier", on_front, line=True),
            Series("other settings, the same problems", below, light=True),
            Series("dropped on fewer problems (no bars)", dropped, faint=True),
        ],
        bound=(outcome.choice.bound, "accuracy to reach"),
    )


def final_panel(outcome: Outcome) -> Panel:
    """The final measurement. It has axes of its own: its speeds were measured at another time."""
    problems = outcome.finals[0].measured.problems
    # On held-out problems the bound follows from the reference's accuracy there.
    bound = outcome.goal.bound(outcome.final(ROLES[1]).measured.accuracy)
    return Panel(
        title=f"{outcome.task}: {problems} held-out problems",
        series=[
            Series(
                f"median of {len(outcome.finals[0].repetitions)} repetitions, and their range",
                [final_point(final) for final in outcome.finals],
            )
        ],
        bound=(bound, "accuracy to reach"),
    )


def point(measured: Measurements, label: str = "", chosen: bool = False) -> Point:
    """Measured problems as a point."""
    low, high = measured.interval
    return Point(
        measured.tokens_per_second, measured.accuracy, low, high, label=label, chosen=chosen
    )


def final_point(final: Final) -> Point:
    """A final measurement, with the range of its repetitions."""
    low, high = final.measured.interval
    return Point(
        median(final.speeds),
        final.measured.accuracy,
        low,
        high,
        label=", ".join(final.roles),
        chosen=ROLES[0] in final.roles,
        slowest=min(final.speeds),
        fastest=max(final.speeds),
    )


def short(setting: Setting, varying: list[str]) -> str:
    """The values by which a setting is told apart."""
    return ", ".join(f"{SHORT.get(name, name)} {setting[name]:g}" for name in varying)
