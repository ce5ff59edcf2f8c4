"""/tokenize, /detokenize and /tokenizer_info, as vLLM has them."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request

from d2f import chat
from d2f.errors import InputError
from decode.server.api_error import ApiError
from decode.server.fields import Fields, Ids, Messages, read_fields
from decode.server.request_body import read_json
from decode.server.served_model import ServedModel
from decode.server.server_state import ServerState, state_of

router = APIRouter()


class _Tokenize(Fields):
    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool = False


class _Detokenize(Fields):
    model: str | None = None
    tokens: Ids


@router.post("/tokenize")
async def tokenize(request: Request) -> dict[str, Any]:
    """The ids of a text, or of messages through the chat template. add_special_tokens: by default
    for a text, as its template writes those of messages."""
    asked = read_fields(_Tokenize, await read_json(request))
    served = _model(state_of(request), asked.model)
    if (asked.prompt is None) == (asked.messages is None):
        raise ApiError(400, "expected one of prompt and messages", param="prompt")
    if not asked.add_generation_prompt:
        raise ApiError(
            400, "add_generation_prompt false is not supported", param="add_generation_prompt"
        )
    ids = await asyncio.to_thread(_ids, served, asked)
    tokenizer = _tokenizer(served)
    texts = tokenizer.convert_ids_to_tokens(ids) if asked.return_token_strs else None
    return {
        "count": len(ids),
        "max_model_len": served.context_length,
        "tokens": ids,
        "token_strs": texts,
    }


@router.post("/detokenize")
async def detokenize(request: Request) -> dict[str, str]:
    """The text of ids, special tokens with it."""
    asked = read_fields(_Detokenize, await read_json(request))
    served = _model(state_of(request), asked.model)
    wrong = [token for token in asked.tokens if not 0 <= token < served.model.vocab_size]
    if wrong:
        raise ApiError(
            400,
            f"tokens must lie in [0, {served.model.vocab_size}), got {wrong[0]}",
            param="tokens",
        )
    return {"prompt": await asyncio.to_thread(_tokenizer(served).decode, asked.tokens)}


@router.get("/tokenizer_info")
async def tokenizer_info(request: Request, model: str | None = None) -> dict[str, Any]:
    """What the tokenizer is, its special tokens and its chat template."""
    served = _model(state_of(request), model)
    tokenizer = _tokenizer(served)
    return {
        "tokenizer_class": type(tokenizer).__name__,
        "vocab_size": served.model.vocab_size,
        "max_model_len": served.context_length,
        "chat_template": tokenizer.chat_template,
        **{
            name: getattr(tokenizer, name)
            for name in ("bos_token", "eos_token", "pad_token", "unk_token", "mask_token")
        },
    }


def _model(state: ServerState, name: str | None) -> ServedModel:
    """The model of that name; where none is named, the first. Raises ApiError."""
    return next(iter(state.models.values())) if name is None else state.find(name)


def _tokenizer(served: ServedModel) -> Any:
    if served.model.tokenizer is None:
        raise ApiError(400, f"the model {served.name} has no tokenizer", param="model")
    return served.model.tokenizer


def _ids(served: ServedModel, asked: _Tokenize) -> list[int]:
    tokenizer = _tokenizer(served)
    try:
        if asked.messages is None:
            text, special = asked.prompt, asked.add_special_tokens is not False
        else:
            text = chat.render(tokenizer, [message.plain() for message in asked.messages])
            special = asked.add_special_tokens is True
        return list(tokenizer(text, add_special_tokens=special)["input_ids"])
    except (InputError, ValueError, TypeError) as error:  # half of a surrogate pair, too
        field = "prompt" if asked.messages is None else "messages"
        raise ApiError(400, str(error), param=field) from error
