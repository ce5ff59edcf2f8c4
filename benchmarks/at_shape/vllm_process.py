"""Autoregressive decoding by vLLM of a shape with random weights. Runs under the Python of vLLM's
environment, which has none of this project: one JSON object on standard input ({model, dtype,
requests: [[prompt tokens, new tokens], ...]}), one on the last line of standard output.
"""

from __future__ import annotations

import argparse
import json
import sys
import time


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()  # no arguments, and --help
    import vllm

    asked = json.load(sys.stdin)
    longest = max(prompt + new for prompt, new in asked["requests"])
    began = time.perf_counter()
    engine = vllm.LLM(
        model=asked["model"],
        dtype=asked["dtype"],
        load_format="dummy",  # random weights: how long a forward takes does not depend on them
        skip_tokenizer_init=True,
        max_model_len=longest + 1,
        max_num_seqs=1,
        enable_prefix_caching=False,
    )
    started = time.perf_counter() - began

    def decode(prompt: int, new: int) -> float:
        """Seconds of one request alone."""
        began = time.perf_counter()
        (answer,) = engine.generate(
            {"prompt_token_ids": [5 + i % 200 for i in range(prompt)]},
            vllm.SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False),
            use_tqdm=False,
        )
        seconds = time.perf_counter() - began
        assert len(answer.outputs[0].token_ids) == new
        return seconds

    decode(*asked["requests"][0])  # pays for what is done only once
    seconds = [decode(*request) for request in asked["requests"]]
    found = {"vllm": vllm.__version__, "seconds": seconds, "startup_seconds": started}
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
