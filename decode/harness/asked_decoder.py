"""What lm-eval asks of a generation, as options of a decoder."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from d2f.errors import InputError, repr_of
from decode.decoders import Decoder
from decode.decoders.options import DEFAULT_MAX_NEW_TOKENS

LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
KNOWN = ("until", "do_sample", "temperature", "top_p", "top_k", *LENGTHS)
NEUTRAL = {"num_beams": 1, "num_return_sequences": 1, "repetition_penalty": 1.0}  # change nothing
OF_A_TASK = ("temperature", "top_p", "top_k", "stop", "max_new_tokens")  # not of model_args
OF_A_REQUEST = (*OF_A_TASK, "seed")


def asked_decoder(decoder: Decoder, asked: Mapping[str, Any], seed: int) -> Decoder:
    """The decoder as a request's generation_kwargs ask for it: stops, length, choice of tokens.

    As in transformers, a temperature counts only with do_sample, which is meant where a temperature
    above 0 is given and do_sample is not; do_sample without a temperature is 1. Raises InputError
    for what is not honoured.
    """
    given = {k: v for k, v in asked.items() if v is not None and v != NEUTRAL.get(k)}
    unknown = sorted(set(given) - set(KNOWN))
    if unknown:
        raise InputError(
            f"gen_kwargs: {', '.join(unknown)} is not honoured here; expected some of "
            f"{', '.join(KNOWN)}"
        )
    until = given.get("until", [])
    temperature = given.get("temperature", 1.0 if given.get("do_sample") else 0.0)
    sampled = given.get("do_sample", temperature != 0)
    if not isinstance(sampled, bool):
        raise InputError(f"gen_kwargs: do_sample must be True or False, got {repr_of(sampled)}")
    top_k = given.get("top_k")
    lengths = [given[name] for name in LENGTHS if name in given]
    values: dict[str, Any] = {
        "stop": tuple([until] if isinstance(until, str) else until),
        "max_new_tokens": lengths[0] if lengths else DEFAULT_MAX_NEW_TOKENS,
        "temperature": temperature if sampled else 0.0,
        "top_p": given.get("top_p", 1.0),
        "top_k": None if top_k in (0, -1) else top_k,  # both are off in what others run
        "seed": seed,
    }
    return replace(decoder, **values)


def request_seed(seed: int, *of: object) -> int:
    """A seed of a request's own, made of what the request is: the same in any order, batch and
    number of processes."""
    digest = hashlib.blake2b(repr((seed, *of)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")
