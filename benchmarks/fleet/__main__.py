"""`python -m benchmarks.fleet`: see `benchmarks.fleet.fleet_flags`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.fleet.arrivals import BURSTY
from benchmarks.fleet.fleet_flags import parse
from benchmarks.fleet.fleet_plan import ARRIVALS, STEPS, Load, Target, most
from benchmarks.fleet.forward_time import ForwardTime, read_time
from benchmarks.fleet.recording import Recording
from benchmarks.fleet.simulation import Overheads
from d2f.files import make_folder, write_beside
from decode.cli import command


@command(interrupted="interrupted")
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; the exit status."""
    options = parse(arguments)
    if options.record:
        make_folder(options.folder)
        record_all(options)
        return
    recordings = [Recording.load(place(options.folder, name)) for name in options.ways]
    for found in recordings:
        print(found.summary, flush=True)
    if options.check:
        check_all(options, recordings)
    else:
        simulate_all(options, recordings)


def place(folder: Path, name: str) -> Path:
    """The file of a way's recording."""
    return folder / f"{name.lower()}.json"


def record_all(options: argparse.Namespace) -> None:
    """Record every way that was asked for."""
    import torch

    from benchmarks.fleet.record_way import WAYS, record
    from d2f.quiet import quiet
    from decode.cli import require_scipy

    require_scipy()
    torch.set_num_threads(options.threads)
    for way in WAYS:
        if way.name not in options.ways:
            continue
        if options.model is not None:
            way = replace(way, model=options.model, config=options.config)
        with quiet(False):
            found, means = record(
                way, options.task, options.problems, options.max_batch, compiled=options.compile
            )
        found.save(place(options.folder, way.name))
        print(found.summary)
        for size, measured, fit in means:
            print(
                f"  at most {size:>3} together: {measured:.3f} ms a forward, by the fit {fit:.3f}"
            )


def check_all(options: argparse.Namespace, recordings: Sequence[Recording]) -> None:
    """Measure beside the simulation."""
    from benchmarks.fleet.fleet_check import Servers, check
    from decode.cli import require_scipy

    require_scipy()
    count = options.behind or len(options.check)
    load = Load(count, max_batch=options.max_batch, seed=options.seed)
    # All are asked what they serve before any is measured.
    chosen = [Servers.at(options.check, recording) for recording in recordings]
    for servers in chosen:
        found = check(servers, load, options.loads, options.seconds, options.light)
        added, name = found["overheads"], servers.recording.name
        print(
            f"{name}: alone {found['measured_alone_ms']:.1f} ms, the recorded forwards "
            f"{found['forwards_alone_ms']:.1f} of them; measured beyond these: "
            f"--http-ms {added['http_ms']:.3f} --event-ms {added['event_ms']:.3f}"
        )
        path = options.folder / f"check-{name.lower()}.json"
        about = servers.recording.about
        write_beside(path, json.dumps({"recorded": about, **found}, indent=1) + "\n")
        print(path)


def simulate_all(options: argparse.Namespace, recordings: Sequence[Recording]) -> None:
    """Simulate every fleet that was asked for; report and figure."""
    from decode.cli import require_matplotlib

    require_matplotlib()
    from benchmarks.fleet.fleet_report import fleet_figure, table
    from decode.plots import save

    forward, source = forward_time(options)
    if forward is not None:
        recordings = [recording.model_copy(update={"time": forward}) for recording in recordings]
    target = Target(options.latency_ms, options.first_ms)
    base = Load(
        replicas=1,
        max_batch=options.max_batch,
        overheads=Overheads(options.http_ms, options.event_ms),
        seed=options.seed,
        horizon=options.horizon,
        requests=options.requests,
    )
    loads = [
        replace(base, replicas=count, bursts=bursts, router=router)
        for bursts, kind in ARRIVALS.items()
        if kind in options.arrivals
        for router in options.routers
        for count in options.replicas
        if count > 1 or router == options.routers[0]  # with one there is nothing to route
    ]
    rows = []
    for line in table([])[:2]:
        print(line)
    for recording in recordings:
        for load in loads:
            rows.append(most(recording, load, target))
            print(table(rows)[-1], flush=True)
    told = {
        "date": time.strftime("%Y-%m-%d"),
        "forward": source,
        "target": asdict(target),
        "load": asdict(base),  # but for what each row says
        "bursty": asdict(BURSTY),
        "found_to": 1 / 2**STEPS,
        "recordings": [r.model_dump(exclude={"traces"}) for r in recordings],
    }
    report = options.folder / "report.json"
    write_beside(report, json.dumps({**told, "rows": rows}, indent=1) + "\n")
    caption = (
        f"Simulated; a forward's time: {source}.\n95 % of answers within {target.latency_ms:g} ms "
        f"and of first tokens within {target.first_ms:g}; up to {base.max_batch} requests a forward"
    )
    for path in (report, *save(fleet_figure(rows, caption), options.folder / "fleet")):
        print(path)


def forward_time(options: argparse.Namespace) -> tuple[ForwardTime | None, str]:
    """What --floor or --time says, None without, and where it is from. Raises InputError."""
    if options.floor is not None:
        from benchmarks.fleet.floor import floor

        where = f"estimated floor of {options.floor} in bf16 on an {options.gpu}, not measured"
        return floor(options.floor, options.gpu), where
    if options.time is not None:
        return read_time(options.time), str(options.time)
    return None, "measured, as recorded"


if __name__ == "__main__":
    sys.exit(main())
