"""What the command shows while it measures: a progress bar, or plain lines."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from decode.tuning.space import named
from decode.tuning.tuning_ledger import JobDone


class Silent:
    """Shows nothing, and is the form of the others."""

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *exception: object) -> None:
        """Nothing to close."""

    def begin(self, what: str, problems: int) -> None:
        """A rung or a final measurement, and how many problems it decodes over all settings."""

    def done(self, measurement: JobDone) -> None:
        """One more measurement, new or from the ledger."""

    def say(self, line: str) -> None:
        """Something that the user should know."""


class Plain(Silent):
    """A line for each thing that begins or ends, without control codes."""

    def __init__(self, console: Console):
        self.console = console

    def begin(self, what: str, problems: int) -> None:
        self.say(f"{what}: {problems} problems to decode")

    def say(self, line: str) -> None:
        print(line, file=self.console.file, flush=True)


class Live(Plain):
    """The same above a bar of what is left, with the setting that was measured last."""

    def __init__(self, console: Console):
        super().__init__(console)
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.completed}/{task.total} problems"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self.bar = self.progress.add_task("", total=None)

    def __enter__(self) -> Live:
        self.progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.progress.stop()

    def begin(self, what: str, problems: int) -> None:
        super().begin(what, problems)
        self.progress.reset(self.bar, total=problems, description=what)

    def done(self, measurement: JobDone) -> None:
        job, measured = measurement.job, measurement.measured
        text = f"{job.task}, {named(dict(job.setting))}: {measured.accuracy:.0%} right"
        self.progress.update(self.bar, advance=measured.problems, description=text)

    def say(self, line: str) -> None:
        self.progress.console.print(line, markup=False, highlight=False)
