"""Add a decoder in one file, here one that reveals the k surest tokens of a block in each forward.

    python examples/add_a_decoder.py
    cd examples && d2f decode --model tiny-teacher --decoder add_a_decoder:TopK --k 3

The class is all that is needed: `k` becomes the flag --k, its bounds are checked, `d2f tune` tries
the values of `search`, and the server takes it as a field of a request.
"""

import argparse
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

import d2f
import decode
from decode.decoders.base import option
from decode.decoders.blockwise import Blockwise
from decode.step import Ints, Predictions


@dataclass(frozen=True)
class TopK(Blockwise):
    """Reveal the k surest tokens of the current block."""

    name: ClassVar[str] = "top_k_surest"

    k: int = option(2, "tokens a forward, at least 1", search=(1, 2, 4))

    def choose(self, predictions: Predictions) -> Ints:
        """Return which of the masked positions to reveal, as indices into the predictions."""
        return np.argsort(-predictions.confidence, kind="stable")[: self.k]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny-teacher")
    options = parser.parse_args(arguments)

    model = d2f.load(options.model)
    question = "Raj has 18 stamps. He buys 7 more. How many stamps does Raj have now?"
    for k in (1, 2, 4):
        decoder = TopK(k=k, block_size=8, max_new_tokens=32)
        result = decode.generate(model, question, decoder)[0]
        print(f"k={k}: {result.forwards:>2} forwards  {result.text!r}")


if __name__ == "__main__":
    main()
