"""Counts what the fuzzers tried, and the seed of a run with D2F_FUZZ_SEED=random: one for all
workers. Both are said at the end."""

import os
import secrets
from collections import Counter, defaultdict

import pytest

from tests.fuzz.outcome import OUTCOMES

if os.environ.get("D2F_FUZZ_SEED") == "random":
    os.environ["D2F_FUZZ_SEED"] = str(secrets.randbelow(2**32))


@pytest.fixture(autouse=True)
def counted(record_property):
    """What the attempts of a test came to, kept with its report (which comes from a worker)."""
    OUTCOMES.clear()
    yield
    for outcome, count in OUTCOMES.items():
        record_property(f"fuzz {outcome}", count)


def pytest_terminal_summary(terminalreporter):
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for kind, reports in terminalreporter.stats.items():
        for report in reports:
            if not getattr(report, "nodeid", "").startswith("tests/fuzz/"):
                continue
            file = report.nodeid.split("::")[0].rsplit("/", 1)[-1]
            found[file]["failed"] += kind == "failed"
            if getattr(report, "when", None) == "teardown":  # it has all that was recorded
                for name, count in report.user_properties:
                    found[file][name.removeprefix("fuzz ")] += count
    for file, counts in sorted(found.items()):
        inputs = counts["taken"] + counts["refused"] + counts["failed"]
        if inputs:
            terminalreporter.write_line(
                f"{file}: {inputs} inputs, {counts['taken']} taken, {counts['refused']} refused, "
                f"{counts['failed']} tests failed"
            )
    if "D2F_FUZZ_SEED" in os.environ:
        terminalreporter.write_line(f"D2F_FUZZ_SEED={os.environ['D2F_FUZZ_SEED']}")


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """The tiny checkpoints and adapters of tests/fuzz/folders.py, not to be changed."""
    from tests.fuzz.folders import made

    return made(tmp_path_factory.mktemp("bases"))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Where an example lays out its folder."""
    return tmp_path_factory.mktemp("fuzz") / "example"
