"""What the routes of one application share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fastapi import Request

from d2f.errors import repr_of
from decode.server.api_error import ApiError
from decode.server.metrics import Metrics
from decode.server.served_model import ServedModel
from decode.server.settings import Settings


@dataclass(eq=False)
class ServerState:
    """models: by the names that they are served under. in_flight: requests that are not answered
    to their end. draining: whether new ones are refused, as it is about to end."""

    models: Mapping[str, ServedModel]
    settings: Settings
    metrics: Metrics
    in_flight: int = 0
    draining: bool = False

    def find(self, name: str) -> ServedModel:
        """The served model of that name. Raises ApiError (404)."""
        if name not in self.models:
            raise ApiError(
                404,
                f"there is no model {repr_of(name)}: expected one of {', '.join(self.models)}",
                param="model",
                code="model_not_found",
            )
        return self.models[name]

    async def is_ready(self) -> bool:
        """Whether a request would be taken."""
        return not self.draining and not any(m.engine.closed for m in self.models.values())

    async def metrics_text(self) -> bytes:
        """All counts, as Prometheus reads them."""
        return self.metrics.text()

    async def cancel(self) -> None:
        """End what runs with an error, and take no more."""
        for served in self.models.values():
            await served.engine.close(finish=False)


def state_of(request: Request) -> ServerState:
    """The state of the application that a request came to."""
    state: ServerState = request.app.state.server
    return state
