"""python -m benchmarks.trace

Count the files of this project that are entered on the ways that matter: one forward of a plain D2F
request, one training step from a row of JSONL to its loss, and the modules that a decode imports.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

from benchmarks import parser

ROOT = Path(__file__).parent.parent
PACKAGES = ("triton_kernels", "d2f", "decode", "distill")


@contextmanager
def entered() -> Iterator[dict[str, int]]:
    """Count the calls into each file of the project while the context lasts."""
    calls: dict[str, int] = {}

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            path = frame.f_code.co_filename
            if path.startswith(str(ROOT)):
                name = str(Path(path).relative_to(ROOT))
                if name.split("/")[0] in PACKAGES:
                    calls[name] = calls.get(name, 0) + 1

    sys.setprofile(profile)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def forward() -> dict[str, int]:
    """Trace a forward of a D2F request that is neither its first nor its last."""
    import d2f
    import decode

    model = d2f.load("tiny-d2f")
    events = decode.stream(model, ["Use 3, 5 and 7 to make 22."], decode.D2F(), views=False)
    next(events)
    with entered() as calls:
        next(events)
    return calls


def step() -> dict[str, int]:
    """Trace the second step of a D2F training on a JSONL file, from the rows to the loss."""
    from distill import trainer
    from distill.config import read_config

    asked: list[dict[str, int]] = []
    plain = trainer.StopRequest.asked  # looked at between two steps

    def between_two_steps(self: trainer.StopRequest) -> int:
        asked.append(dict(calls))
        return plain(self)

    with (
        tempfile.TemporaryDirectory() as folder,
        entered() as calls,
        patch.object(trainer.StopRequest, "asked", between_two_steps),
    ):
        rows = Path(folder) / "rows.jsonl"
        row = {"prompt": "Use 3, 5 and 7 to make 22.", "response": "3*5=15\n15+7=22"}
        rows.write_text("".join(json.dumps(row) + "\n" for _ in range(64)))
        flags = {"data": json.dumps({"file": str(rows), "row_length": 64, "rows": 2})}
        flags |= {"output": f"{folder}/run", "tracker": "none", "log_every": "100"}
        flags |= {"mixed_precision": "no"}
        given = [part for key, value in flags.items() for part in (f"--{key}", value)]
        trainer.train(read_config("tiny-d2f", given), stop_after=3)
    before, after = asked[1:3]
    return {path: n - before.get(path, 0) for path, n in after.items() if n > before.get(path, 0)}


def main() -> None:
    """Print each way's files, with the calls into each."""
    parser(__doc__).parse_args()
    for name, found in (("a D2F forward", forward()), ("a training step", step())):
        print(f"{name}: {len(found)} files, {sum(found.values())} calls")
        for path, calls in sorted(found.items()):
            print(f"  {calls:5} {path}")
    names = [n for n in sys.modules if n.split(".")[0] in PACKAGES]
    print(f"modules of the project that are imported by now: {len(names)}")


if __name__ == "__main__":
    main()
