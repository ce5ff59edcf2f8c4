"""Make a Hugging Face model draft for itself: its own tokens, in fewer forwards.

    python examples/lossless_drafting.py
    python examples/lossless_drafting.py --model models/smollm2 --prompts mine.jsonl --steps 1000

`--model` is a Llama, Qwen2 or Qwen3 by folder or hub name. The model answers prompts, a small
adapter learns to draft what it answered, and each forward verifies the drafts of the one before.
The adapter changes draft rows only, so the text is the model's own, token for token.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import d2f
import decode
from d2f.tasks import make_problems


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny-ar")
    parser.add_argument("--prompts", type=Path, help='JSONL with {"prompt": ...} a line')
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--output", type=Path, default=Path("runs/example-drafting"))
    options = parser.parse_args(arguments)

    if options.prompts is None:
        asked = [problem.question for problem in make_problems("story", "train", 200, seed=0)]
    else:
        asked = [json.loads(line)["prompt"] for line in options.prompts.read_text().splitlines()]
    held_out, asked = asked[:8], asked[8:]

    # 1. What the model says, one token a forward.
    model = d2f.load(options.model)
    answers = [result.text for result in decode.generate(model, asked)]
    plain = decode.generate(model, held_out)

    # 2. An adapter that drafts it. `d2f train --config self-draft` has every key.
    rows = options.output / "answers.jsonl"
    rows.parent.mkdir(parents=True, exist_ok=True)
    pairs = [{"prompt": p, "response": a} for p, a in zip(asked, answers, strict=True)]
    rows.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    keys = {
        "init": options.model,
        "data": f"{{file: {rows}, row_length: 256, rows: 4}}",
        "steps": options.steps,
        "base_dtype": "float32",
        "mixed_precision": "no",
        "output": options.output / "run",
    }
    words = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
    command = [sys.executable, "-m", "distill.train", "--config", "self-draft", *words]
    subprocess.run(command, check=True)

    # 3. Decode with it: the same tokens, fewer forwards.
    model = d2f.load(options.model, adapter=options.output / "run" / "adapter")
    drafted = decode.generate(model, held_out)
    assert [r.raw_tokens for r in drafted] == [r.raw_tokens for r in plain]
    for name, results in (("plain", plain), ("self-drafting", drafted)):
        tokens = sum(len(result.tokens) for result in results)
        forwards = sum(result.forwards for result in results)
        print(f"{name:<14} {tokens} tokens in {forwards} forwards: {tokens / forwards:.2f} each")


if __name__ == "__main__":
    main()
