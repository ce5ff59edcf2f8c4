"""python -m tests.gpu_measurements.row_writer --rows 3 --json FILE

A measurement for tests: writes its rows one by one. --then: what it does behind the last one.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

WARNING = "the Triton kernel span_attention does not work in torch.bfloat16 on cuda:0"
STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(600)
"""


def saved_rows(results: Path) -> int:
    """Rows of the measurement `writer` in the results that others write."""
    entry = json.loads(results.read_text())["runs"][-1]["measured"].get("writer", {})
    return len(entry["found"].get("measured", ())) if entry else 0


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--then", choices=("end", "fail", "warn", "hang"), default="end")
    parser.add_argument("--await", type=Path, dest="results", help="results that must get each row")
    parser.add_argument("--pids", type=Path, help="file for the processes of one that hangs")
    parser.add_argument("--count", type=Path, help="file that grows by a line a run")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    if options.count is not None:
        with options.count.open("a") as count:
            print(options.then, file=count)
    for rows in range(1, options.rows + 1):
        found = {"measured": [{"row": i, "ms": 1.5 * i} for i in range(rows)]}
        beside = options.json.with_suffix(".beside")
        beside.write_text(json.dumps(found))
        beside.replace(options.json)
        began = time.monotonic()
        while options.results is not None and (
            not options.results.exists() or saved_rows(options.results) < rows
        ):
            time.sleep(0.01)
            if time.monotonic() > began + 60:
                return 3
    print("all rows are written")
    if options.then == "warn":
        print(f"x.py:1: RuntimeWarning: {WARNING}", file=sys.stderr)
    if options.then == "hang":
        asked = options.pids.with_name("asked")
        signal.signal(signal.SIGTERM, lambda *_: (asked.touch(), sys.exit()))
        sleeper = subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE)
        assert sleeper.stdout is not None and sleeper.stdout.readline()
        beside.write_text(f"{os.getpid()} {sleeper.pid}")
        beside.replace(options.pids)
        time.sleep(600)
    return int(options.then == "fail")


if __name__ == "__main__":
    sys.exit(main())
