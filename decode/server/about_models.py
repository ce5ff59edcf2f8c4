"""/v1/models: what is served, and with which decoders."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from openai.types import Model

from decode.decoders.options import Option, options_of
from decode.server.served_model import Kind, ServedModel
from decode.server.server_state import state_of

router = APIRouter()


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """All of them."""
    models = state_of(request).models.values()
    return {"object": "list", "data": [describe(served) for served in models]}


@router.get("/v1/models/{name:path}")
async def one_model(request: Request, name: str) -> dict[str, Any]:
    """One of them; a name may have slashes."""
    return describe(state_of(request).find(name))


def describe(served: ServedModel) -> dict[str, Any]:
    """OpenAI's fields, vLLM's max_model_len, and what is only ours (`d2f`)."""
    contract = served.model.contract
    card = Model(id=served.name, object="model", created=served.created, owned_by="d2f-toolkit")
    return card.model_dump(exclude_unset=True) | {
        "max_model_len": served.context_length,
        "d2f": {
            "family": contract.family,
            "objective": contract.objective,
            "block_size": contract.block_size,
            "end_ids": list(served.model.end_ids),
            "context_length": served.context_length,
            "default_decoder": next(
                name for name, kind in served.decoders.items() if kind is served.default
            ),
            "decoders": [
                _describe_decoder(served, name, kind) for name, kind in served.decoders.items()
            ],
        },
    }


def _describe_decoder(served: ServedModel, name: str, kind: Kind) -> dict[str, Any]:
    given = served.options(kind)
    return {
        "name": name,
        "summary": kind.summary,
        "labels": dict(kind.labels),
        "options": [_describe_option(option, given) for option in options_of(kind)],
    }


def _describe_option(option: Option, given: dict[str, Any]) -> dict[str, Any]:
    """An option; where the operator gave it, the default is his."""
    own = option.name in given
    default = given[option.name] if own else option.default
    kind = list(option.kind) if isinstance(option.kind, tuple) else option.kind.__name__
    return {
        "name": option.name,
        "kind": kind,
        "words": list(option.words),
        "default": default,
        "shown": str(default) if own else option.shown,
        "help": option.help,
    }
