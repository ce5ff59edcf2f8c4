"""Decode your own prompts, all in one batch.

python examples/decode_own_prompts.py
python examples/decode_own_prompts.py --model DIR_OR_HUB_NAME "First prompt." "Second prompt."
"""

import argparse

import d2f
import decode

STORIES = (
    "Raj has 18 stamps. He buys 7 more. How many stamps does Raj have now?",
    "Mei has 15 marbles. She gives away 8 marbles. How many marbles does Mei have now?",
)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompts", nargs="*", default=STORIES, help="user messages")
    parser.add_argument("--model", default="tiny-d2f-long", help="folder, hub or bundled name")
    options = parser.parse_args(arguments)

    model = d2f.load(options.model)
    # No decoder is named, so the model's own one is taken: `d2f info MODEL` says which.
    results = decode.generate(model, list(options.prompts))
    for prompt, result in zip(options.prompts, results, strict=True):
        print(f"> {prompt}\n{result.text}")
        print(
            f"  {len(result.tokens)} tokens in {result.forwards} forwards: "
            f"{result.tokens_per_forward:.2f} tokens a forward\n"
        )


if __name__ == "__main__":
    main()
