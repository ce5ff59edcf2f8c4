"""The order of the runs: warm-up apart, repetitions interleaved between the entries."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from d2f.errors import InputError
from decode.comparison.calm import wait_for_calm
from decode.comparison.comparison_config import CompareConfig
from decode.comparison.contestants import Contestant
from decode.comparison.records import Key, Record, judge
from decode.comparison.runs_ledger import RunsLedger
from decode.comparison.workload import Workload


@dataclass(frozen=True)
class Planned:
    """One run to come: a warm-up, which leaves no record, a timed repetition, or where repetition
    is None the pass that only judges."""

    workload: Workload
    contestant: Contestant
    concurrency: int
    count: int
    repetition: int | None
    warmup: bool = False


def plan(
    config: CompareConfig,
    contestants: Sequence[Contestant],
    workloads: Sequence[Workload],
    done: Collection[Key] = (),
) -> list[Planned]:
    """Every run that is not done, in order: for each workload and concurrency all entries once a
    repetition, each run after a warm-up of its own, because a process that has waited for the
    others finds its caches cold; at last a pass over all problems that only judges. Each repetition
    has an order of its own, the same in every comparison of these entries: who came always behind
    the same neighbour would be measured with what it leaves behind."""
    judging = config.accuracy_concurrency or config.concurrency[-1]
    runs = []
    for workload in workloads:
        for concurrency in config.concurrency:
            # At least as many as run at once, so that the warm-up is as wide as the timed run.
            warm = min(len(workload.items), max(config.warmup, concurrency))
            timed = workload.timed(concurrency)
            for repetition in range(config.repetitions):
                order = random.Random(f"{workload.name} {concurrency} {repetition}")
                for c in order.sample(contestants, len(contestants)):
                    if (workload.name, concurrency, repetition, c.entry.name) in done:
                        continue
                    runs.append(Planned(workload, c, concurrency, warm, None, True))
                    runs.append(Planned(workload, c, concurrency, timed, repetition))
        # The timed answers are judged too: a pass that only judges is for the problems beyond them.
        if len(workload.items) > workload.timed(config.concurrency[-1]):
            runs += [
                Planned(workload, c, judging, len(workload.items), None)
                for c in contestants
                if (workload.name, judging, None, c.entry.name) not in done
            ]
    return runs


def measure(
    runs: Sequence[Planned],
    tokenizer: Any,
    ledger: RunsLedger,
    show: Callable[[Planned, Record | None], None],
) -> None:
    """Do the runs, those of an entry once what the one before it left running is over; show is
    called before each with None and after each with its record. Raises
    InputError where an entry has failed: as it says itself, or because it answers nothing."""
    last = None
    for planned in runs:
        show(planned, None)
        if planned.contestant is not last:
            wait_for_calm()
        last = planned.contestant
        entry = planned.contestant.entry.name
        run = planned.contestant.run(planned.workload, planned.count, planned.concurrency)
        errors = [answer.error for answer in run.answers if answer.error is not None]
        # Some failed requests are reported and leave the entry unranked; none answered is a failed
        # entry, and going on would measure nothing.
        if len(errors) == len(run.answers):
            raise InputError(
                f"entry {entry} has failed: not one of {len(errors)} requests was answered, e.g. "
                f"{errors[0]}"
            )
        if planned.warmup:
            continue
        record = judge(
            run,
            planned.workload,
            tokenizer,
            entry=entry,
            concurrency=planned.concurrency,
            repetition=planned.repetition,
        )
        ledger.add(record)
        show(planned, record)
