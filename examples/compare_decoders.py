"""Decode one prompt with several decoders and print what each one cost.

    python examples/compare_decoders.py

A forward is one call of the model. Rows are the token positions that all forwards together
computed: few forwards of many rows can be slower than many forwards of few.
"""

import argparse

import d2f
import decode

QUESTION = (
    "Omar has 4 bags with 12 coins in each. He finds 23 more coins. A neighbor brings 28 more "
    "coins. Then he sorts them into 3 equal bags, keeping one. How many coins does Omar have now?"
)
DECODERS = {
    # bundled model: decoders to try on it
    "tiny-d2f-long": [
        decode.D2F(),
        decode.D2F(tau_conf=0.99),
        decode.D2F(lossless=4),
        decode.Block(tau=0.9),
        decode.Static(block_size=8, cache="prefix", max_new_tokens=64),
    ],
    "tiny-plain-teacher": [
        decode.Threshold(tau=0.9, max_new_tokens=64),
        decode.Wino(block_size=32, max_new_tokens=64),
        decode.FreeDave(block_size=32, max_new_tokens=64),
        decode.Static(block_size=32, max_new_tokens=64),
    ],
    "tiny-wedlm": [decode.WeDLM(verify="ar"), decode.Autoregressive()],
}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("question", nargs="?", default=QUESTION)
    question = parser.parse_args(arguments).question

    print(f"{'model':<20}{'decoder':<16}{'tokens':>7}{'forwards':>9}{'rows':>6}  answer")
    for name, decoders in DECODERS.items():
        model = d2f.load(name)
        for decoder in decoders:
            result = decode.generate(model, question, decoder)[0]
            rows = sum(fed for fed, _ in result.calls)
            numbers = f"{len(result.tokens):>7}{result.forwards:>9}{rows:>6}"
            print(f"{name:<20}{decoder.name:<16}{numbers}  {result.text!r}")


if __name__ == "__main__":
    main()
