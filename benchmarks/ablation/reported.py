"""What the report of an ablation that is there already says of its runs, whose folders may be on
another machine or gone: a part that was measured elsewhere is not done again, and not lost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.ablation.ablation_config import Run
from d2f.checkpoint import read_object
from d2f.errors import InputError

if TYPE_CHECKING:
    from distill.checkpoint import RunFolder

Key = tuple[str, str, int | None]
Entry = dict[str, Any]


@dataclass(frozen=True)
class Reported:
    """The entries under `runs` of a report.json."""

    path: Path
    entries: Mapping[Key, Entry] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Reported:
        """None where there is no report. Raises InputError where it is not one of an ablation."""
        if not path.is_file():
            return cls(path)
        report = read_object(path)
        try:
            runs = [(key_of(entry), entry) for entry in report["runs"] if entry["rows"]]
        except (KeyError, TypeError) as error:
            raise InputError(
                f"{path} is not a report of an ablation (no {error}): expected another output"
            ) from error
        return cls(path, dict(runs))

    def has(self, run: Run) -> bool:
        """Whether it says anything of a run."""
        return key_of(run) in self.entries

    def rows(self, run: Run) -> list[Entry]:
        """What was measured of a run."""
        return self.entries.get(key_of(run), {}).get("rows", [])

    def trained(self, run: Run, folder: RunFolder) -> Entry | None:
        """What it says of a run's training, if it was this one: the same configuration, trained on
        the same. None where it says nothing. Raises InputError where it was another."""
        entry = self.entries.get(key_of(run))
        if entry is None or "training" not in entry:  # which earlier versions did not say
            return None
        differ = folder.differences(entry["training"], entry["inputs"])
        changed = [*differ.values(), *folder.changed_inputs(entry["inputs"])]
        if changed:
            raise InputError(
                f"{self.path} has another {run.name} ({'; '.join(changed)}): expected the same "
                "training, or another output"
            )
        return entry

    def lost(self, keys: Iterable[Key]) -> set[Key]:
        """Of which runs that are here a report of these alone would have nothing."""
        return self.entries.keys() - set(keys)

    def check_kept(self, keys: Iterable[Key]) -> None:
        """Raise InputError where a report of these runs alone would lose one that is here."""
        lost = [" ".join(str(part) for part in key if part) for key in self.lost(keys)]
        if lost:
            raise InputError(
                f"{self.path} has what is neither asked for now nor in a folder of runs "
                f"({', '.join(sorted(lost))}) and would be lost: expected another output"
            )


def key_of(run: Run | Entry) -> Key:
    """Variant, setting and seed of a run or of its entry in a report."""
    if isinstance(run, Run):
        return run.variant, run.setting, run.seed
    return run["variant"], run["setting"], run["seed"]
