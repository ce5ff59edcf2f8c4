"""The seed of a run with D2F_FUZZ_SEED=random: one for all workers, said at the end."""

import os
import secrets

if os.environ.get("D2F_FUZZ_SEED") == "random":
    os.environ["D2F_FUZZ_SEED"] = str(secrets.randbelow(2**32))


def pytest_terminal_summary(terminalreporter):
    if "D2F_FUZZ_SEED" in os.environ:
        terminalreporter.write_line(f"D2F_FUZZ_SEED={os.environ['D2F_FUZZ_SEED']}")
