"""One task: the search on its tuning problems, the choice, the final measurement."""

from __future__ import annotations

from collections.abc import Sequence

from d2f.contract import Contract
from decode.reporting.measurements import Measurements, joined
from decode.reporting.shown_progress import ShownProgress
from decode.tuning.bench import Bench
from decode.tuning.choose import choose
from decode.tuning.outcome import ROLES, Final, Outcome
from decode.tuning.search import make_plan, passes, run_search, smallest_pass
from decode.tuning.space import Setting
from decode.tuning.tuning_ledger import job
from decode.tuning.tuning_run import Tuning


def tune_task(
    bench: Bench, tuning: Tuning, task: str, contract: Contract, display: ShownProgress
) -> Outcome:
    """One task: the search on its tuning problems, the choice, the final measurement. contract: of
    the model."""
    settings = bench.space.settings
    used: list[float] = []  # seconds of this search, what the ledger had of it included

    def seconds_left() -> float:
        return tuning.budget_per_task - sum(used)

    def measure(setting: Setting, first: int, stop: int) -> Measurements | None:
        wanted = job(task, "tuning", setting, first, stop)
        spent = bench.ledger.spent(task) >= tuning.budget_per_task
        # What the ledger has costs nothing, and every setting gets its look whatever the budget.
        if spent and wanted not in bench.ledger.done and stop > plan.look:
            return None
        measured = bench.measure(wanted)
        used.append(bench.ledger.done[wanted].wall)
        return measured

    def on_pass(alive: Sequence[Setting], first: int, stop: int) -> None:
        # Several workers look at the budget before a pass, one before each setting of it.
        if stop <= plan.look or bench.ledger.spent(task) < tuning.budget_per_task:
            bench.measure_ahead(job(task, "tuning", setting, first, stop) for setting in alive)

    def on_rung(alive: int, first: int, stop: int) -> None:
        what = f"{task}, {alive} settings on tuning problems {first + 1} to {stop}"
        _begin(display, what, alive * (stop - first))

    plan = make_plan(
        tuning.search,
        len(settings),
        tuning.problems,
        eta=tuning.eta,
        batch_size=tuning.batch_size,
    )
    goal = tuning.goal
    found = run_search(
        settings,
        measure,
        plan,
        goal,
        seed=tuning.seed,
        seconds_left=seconds_left,
        on_rung=on_rung,
        on_pass=on_pass,
    )
    choice = choose(goal, found.comparable())
    chosen, reference = (
        settings[found.compared[i]] for i in (choice.chosen, choice.reference)
    )  # fmt: skip
    finals = measure_heldout(bench, tuning, task, chosen, reference, contract, display)
    return Outcome(task, goal, settings, found, choice, finals)


def measure_heldout(
    bench: Bench,
    tuning: Tuning,
    task: str,
    chosen: Setting,
    reference: Setting,
    contract: Contract,
    display: ShownProgress,
) -> list[Final]:
    """The chosen, the most accurate and the default setting on the held-out problems, in turn."""
    defaults = bench.space.defaults(contract)
    wanted = finals_of(chosen, reference, defaults)
    parts = passes(0, tuning.heldout, smallest_pass(tuning.batch_size))
    total = len(wanted) * tuning.repetitions * tuning.heldout
    _begin(display, f"{task}, {len(wanted)} settings on held-out problems", total)
    parts_of: dict[tuple[int, int], list[Measurements]] = {}
    for repetition in range(tuning.repetitions):
        bench.measure_ahead(
            job(task, "heldout", setting, first, stop, repetition)
            for first, stop in parts
            for _, setting in wanted
        )
        # In turn, as in the search: a machine that gets slower does so for all of them.
        for first, stop in parts:
            for i, (_, setting) in enumerate(wanted):
                measured = bench.measure(job(task, "heldout", setting, first, stop, repetition))
                parts_of.setdefault((i, repetition), []).append(measured)
    return [
        Final(roles, setting, [joined(parts_of[i, r]) for r in range(tuning.repetitions)])
        for i, (roles, setting) in enumerate(wanted)
    ]


def _begin(display: ShownProgress, what: str, problems: int) -> None:
    display.say(f"{what}: {problems} problems to decode")
    display.begin(problems, what)


def finals_of(
    chosen: Setting, reference: Setting, defaults: Setting
) -> list[tuple[list[str], Setting]]:
    """The settings to measure on held-out problems, each once, with their roles."""
    found: list[tuple[list[str], Setting]] = []
    for role, setting in zip(ROLES, (chosen, reference, defaults), strict=True):
        same = [roles for roles, other in found if other == setting]
        if same:
            # The defaults may be the choice too: measured once, with both roles.
            same[0].append(role)
        else:
            found.append(([role], setting))
    return found
