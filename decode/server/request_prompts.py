"""The prompts of a request as ids with a decoder each, checked before any of them starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from d2f.errors import InputError
from decode.decoders import Decoder
from decode.engine.prompts import Prompt, check, encode
from decode.server.api_error import ApiError
from decode.server.served_model import ServedModel

Job = tuple[list[int], Decoder]


def make_jobs(
    served: ServedModel, prompts: Sequence[Prompt], decoder: Decoder, field: str, *, fixed: bool
) -> list[Job]:
    """Each prompt's ids and its decoder. field: the one that the prompts came in. fixed: the
    length of the response is the request's own; else it is less where the context leaves less.

    Raises ApiError (400) for the first that cannot be decoded.
    """
    jobs = []
    for place, prompt in enumerate(prompts):
        where = field if len(prompts) == 1 else f"{field} {place}"
        try:
            ids = encode(served.model, prompt, where, raw=True)
            job = ids, _fitted(served, ids, decoder, where, fixed)
            check(served.model, *job, where)
        except InputError as error:
            raise ApiError(400, str(error), param=field) from error
        jobs.append(job)
    return jobs


def _fitted(
    served: ServedModel, ids: list[int], decoder: Decoder, where: str, fixed: bool
) -> Decoder:
    """The decoder with a length that fits behind the prompt. Raises ApiError."""
    room = served.context_length - len(ids) - decoder.overhang
    length = decoder.length
    if not fixed:
        length = min(length, max(room, 1))
    if length > room:
        after = f", and {decoder.overhang} positions after them" if decoder.overhang else ""
        raise ApiError(
            400,
            f"{where} has {len(ids)} tokens and the response {length}{after}: the context of "
            f"{served.name} is {served.context_length}",
            param=where.partition(" ")[0],
            code="context_length_exceeded",
        )
    length_option: Any = {"max_new_tokens": length}  # a field of every decoder, not of their base
    return replace(decoder, **length_option)
