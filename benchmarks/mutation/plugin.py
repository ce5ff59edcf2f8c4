"""The part that runs in pytest: records which test reaches which line, or runs chosen tests.

Loaded with `-p` from a folder of its own, so it imports nothing of this project. MUTATION_RECORD
or MUTATION_CHOSEN says what to do.
"""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from coverage import Coverage

MOST_MEMORY = 8 * 2**30  # bytes of a process: a fault may allocate without end


def pytest_configure(config: pytest.Config) -> None:
    if record := os.environ.get("MUTATION_RECORD"):
        parallel = config.getoption("numprocesses", None) and not hasattr(config, "workerinput")
        if not parallel:  # the process that hands tests to others runs none
            config.pluginmanager.register(Recorder(Path(record)))
    elif chosen := os.environ.get("MUTATION_CHOSEN"):
        if not Path("/dev/nvidiactl").exists():  # a GPU's driver maps more
            resource.setrlimit(resource.RLIMIT_DATA, (MOST_MEMORY, MOST_MEMORY))
        config.pluginmanager.register(Chosen(Path(chosen)))


class Recorder:
    """Records the lines that each test reaches, also in the processes that it starts.

    What a fixture of a module or session does is recorded under the fixture's name, for all tests
    that use it, not under the test that came first.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tests: dict[str, dict] = {}
        self.context = ""
        self.coverage = Coverage(config_file=str(folder / "coveragerc"), data_suffix=True)
        self.coverage.start()

    def _switch(self, context: str) -> None:
        self.context = context
        self.coverage.switch_context(context)
        # A Python that the test starts reads these: coverage's .pth starts it there.
        os.environ.pop("COVERAGE_PROCESS_START", None)
        if context:
            os.environ["COVERAGE_PROCESS_START"] = str(self.folder / "coveragerc")
            os.environ["MUTATION_CONTEXT"] = context

    @contextmanager
    def _within(self, context: str) -> Iterator[None]:
        outer = self.context
        self._switch(context)
        try:
            yield
        finally:
            self._switch(outer)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item):
        names = getattr(item, "fixturenames", [])
        self.tests[item.nodeid] = {"fixtures": names, "seconds": 0.0, "ran": False, "failed": False}
        with self._within(item.nodeid):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef, request: pytest.FixtureRequest):
        if fixturedef.scope == "function":
            return (yield)
        with self._within(f"fixture {request.node.nodeid}::{fixturedef.argname}"):
            return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = self.tests[report.nodeid]
        test["seconds"] += report.duration
        test["ran"] |= report.when == "call" and not report.skipped
        test["failed"] |= report.failed

    def pytest_sessionfinish(self) -> None:
        self.coverage.stop()
        self.coverage.save()
        (self.folder / f"tests-{os.getpid()}.json").write_text(json.dumps(self.tests))


class Chosen:
    """Runs the tests of a file in its order, each with a limit of seconds; notes what it does.

    The file: {ID: limit}. Beside it, in `.log`, a line `ran ID` when a test begins and
    `failed ID` when it fails. A test over its limit ends the process, status 1.
    """

    def __init__(self, file: Path) -> None:
        self.limits: dict[str, float] = json.loads(file.read_text())
        self.log = file.with_suffix(".log").open("w", buffering=1)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        order = {test: place for place, test in enumerate(self.limits)}
        items[:] = [item for item in items if item.nodeid in order]
        items.sort(key=lambda item: order[item.nodeid])

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item):
        self.log.write(f"ran {item.nodeid}\n")
        faulthandler.dump_traceback_later(
            self.limits[item.nodeid], exit=True, file=sys.__stderr__ or sys.stderr
        )
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.log.write(f"failed {report.nodeid}\n")
