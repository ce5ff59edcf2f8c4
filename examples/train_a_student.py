"""Distil a D2F student on your own JSONL, and decode with it.

    python examples/train_a_student.py
    python examples/train_a_student.py --data mine.jsonl --teacher DIR_OR_HUB_NAME --steps 1000

A line of the file has `prompt` and `response`, or chat `messages`. The teacher is a model that
reads both ways; the student is the same weights with a small adapter that reads block by block, so
that finished blocks can be cached. So few steps show the way and no more: `d2f train --config
tiny-d2f` is the recipe of the bundled student.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import d2f
import decode
from d2f.tasks import make_problems


def write_rows(path: Path, count: int) -> None:
    """Write rows of the bundled task `story` in the format that your own file would have."""
    problems = make_problems("story", "train", count, seed=0)
    rows = [{"prompt": problem.question, "response": problem.answer} for problem in problems]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="JSONL (default: rows of the task story)")
    parser.add_argument("--teacher", default="tiny-plain-teacher")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--output", type=Path, default=Path("runs/example-student"))
    options = parser.parse_args(arguments)

    data = options.data or options.output / "rows.jsonl"
    if options.data is None:
        write_rows(data, 2000)
    # The same as on the command line: d2f train --config tiny-d2f --init TEACHER --data ...
    keys = {
        "init": options.teacher,
        "data": f"{{file: {data}, row_length: 256, rows: 8, on_long: drop}}",
        "steps": options.steps,
        "objective.block_size": 8,
        "optimizer.lr": 1e-3,
        "output": options.output / "run",
    }
    words = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
    command = [sys.executable, "-m", "distill.train", "--config", "tiny-d2f", *words]
    subprocess.run(command, check=True)
    folder = options.output / "run" / "model"

    student = d2f.load(folder)
    question = "Raj has 18 stamps. He buys 7 more. How many stamps does Raj have now?"
    result = decode.generate(student, question)[0]
    print(f"{folder}: {result.text!r}, {result.tokens_per_forward:.2f} tokens a forward")


if __name__ == "__main__":
    main()
