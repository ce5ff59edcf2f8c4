"""What clients of several replicas meet: the paths, checks and log of one server. It holds no
model; what needs one is a replica's to answer."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from decode.server import about_models, decoding, tokenization
from decode.server.api_error import ApiError
from decode.server.app import new_app
from decode.server.forwarding import ForwardedAnswer
from decode.server.metrics import Metrics
from decode.server.replica import Call
from decode.server.replica_metrics import together
from decode.server.request_body import read_body
from decode.server.request_frame import ID_HEADER, Record
from decode.server.server_state import ServerState, state_of
from decode.server.settings import Settings

REPLY_SECONDS = 5.0  # until a replica must have said how it is
_SENT = (
    "type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path",
    "client", "server",
)  # fmt: skip
_NOT_SENT = (b"authorization", ID_HEADER.encode())
Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]


@dataclass(eq=False, kw_only=True)
class FrontState(ServerState):
    """reads_prompts: whether the router wants to know how a prompt begins. answers: those under
    way."""

    replicas: DeploymentHandle
    reads_prompts: bool
    answers: set[ForwardedAnswer] = field(default_factory=set)

    async def is_ready(self) -> bool:
        """Whether a replica would take a request."""
        return not self.draining and any(await self._ask_all("is_ready"))

    async def metrics_text(self) -> bytes:
        """The counts of all replicas, each with its name, and those of the front."""
        return together(self.metrics.text().decode(), dict(await self._ask_all("metrics")))

    async def cancel(self) -> None:
        for answer in self.answers:
            answer.stop(ApiError(503, "the server is stopping", code="stopping"))

    async def _ask_all(self, method: str) -> list[Any]:
        """What each replica says that says anything."""
        try:
            asked = self.replicas.broadcast(method)
            said = await asked.results_async(timeout_s=REPLY_SECONDS, return_exceptions=True)
        except (TimeoutError, RayError, RayServeException):  # one dies just now, or there is none
            return []
        return [one for one in said if not isinstance(one, BaseException)]


@asynccontextmanager
async def nothing(app: FastAPI) -> AsyncIterator[None]:
    """A life in which nothing is to do."""
    yield


def create_front(
    replicas: DeploymentHandle,
    settings: Settings,
    *,
    reads_prompts: bool = False,
    lifespan: Lifespan = nothing,
) -> FastAPI:
    """The application in front of replicas, with the paths of `decode.server.app.create_app`."""
    state = FrontState({}, settings, Metrics({}), replicas=replicas, reads_prompts=reads_prompts)
    app = new_app(state, lifespan)
    for module in (decoding, about_models, tokenization):
        for route in module.router.routes:
            assert isinstance(route, APIRoute)
            app.add_api_route(route.path, _forward, methods=[*(route.methods or ())])
    return app


async def _forward(request: Request) -> Response:
    state = state_of(request)
    assert isinstance(state, FrontState)
    body = await read_body(request) if request.method == "POST" else b""
    scope = {name: request.scope[name] for name in _SENT if name in request.scope}
    kept = [(name, value) for name, value in request.scope["headers"] if name not in _NOT_SENT]
    scope["headers"] = [*kept, (ID_HEADER.encode(), Record.of(request).id.encode())]
    call = Call(scope, body, _beginning(body) if state.reads_prompts else " ")
    return ForwardedAnswer(state.replicas, call, state.settings, state.answers)


def _beginning(body: bytes) -> str:
    """Text that begins alike for prompts that begin alike; it has at least a character."""
    try:
        values = json.loads(body)
        prompt = values.get("messages") or values.get("prompt")
    except (ValueError, AttributeError, RecursionError):
        prompt = None
    return str(prompt or None)
