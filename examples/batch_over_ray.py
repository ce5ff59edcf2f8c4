"""Answer every row of a file with several processes, on this machine or on a Ray cluster.

    pip install 'd2f-toolkit[ray]'
    python examples/batch_over_ray.py
    python examples/batch_over_ray.py --workers 8 --address HOST:PORT

Each worker has the model. The answers do not depend on how many there are, and a run that was
stopped goes on where it was: this script calls `d2f batch`, which keeps a ledger.
"""

import argparse
import json
from pathlib import Path

from d2f.tasks import make_problems
from decode.batch import main as batch


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--address", help="of a Ray cluster (default: start Ray here)")
    parser.add_argument("--output", type=Path, default=Path("runs/example-batch"))
    options = parser.parse_args(arguments)

    prompts = options.output / "prompts.jsonl"
    prompts.parent.mkdir(parents=True, exist_ok=True)
    problems = make_problems("story", "train", options.rows, seed=0)
    prompts.write_text("".join(json.dumps({"prompt": p.question}) + "\n" for p in problems))

    answers = options.output / "answers"
    words = ["--model", "tiny-d2f-long", "--input", prompts, "--output", answers]
    words += ["--workers", options.workers]
    words += ["--address", options.address] if options.address else []
    if status := batch([str(word) for word in words]):
        raise SystemExit(status)

    lines = (answers / "answers.jsonl").read_text().splitlines()
    for line in lines[:3]:
        row = json.loads(line)
        print(f"{row['prompt']}\n  {row['text']!r} in {row['forwards']} forwards")
    print(f"{len(lines)} rows in {answers / 'answers.jsonl'}")


if __name__ == "__main__":
    main()
