"""A replica: the application in a process that Ray Serve starts, watches and replaces."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from ray import serve
from starlette.types import Message

from d2f.errors import InputError
from d2f.quiet import quiet
from decode.commands.decoder_settings import read_settings
from decode.server.app import create_app
from decode.server.load_models import load_models
from decode.server.request_frame import Record
from decode.server.run_server import SWITCH_SECONDS
from decode.server.served_model import ServedModel
from decode.server.settings import settings_of

TOLD = "d2f.told"  # the kind of message that has what the log is to say


@dataclass(frozen=True)
class Call:
    """A request: ASGI's scope without what cannot be sent, and its body. prompt: text that begins
    as the prompt does, which Ray's prefix-aware router reads."""

    scope: dict[str, Any]
    body: bytes
    prompt: str


class Replica:
    """Answers calls with the application of `decode.server.app`.

    options: the command line (`decode.commands.serve_flags.parse`). Which adapter the model has may
    be Ray's `user_config` instead, ``{"adapter": NAME}``: it can change while requests run.
    """

    def __init__(self, options: argparse.Namespace):
        self._options = options
        self._app: FastAPI | None = None
        sys.setswitchinterval(SWITCH_SECONDS)

    async def reconfigure(self, config: dict[str, Any]) -> None:
        """Load what `user_config` says, as `reload` does. Raises InputError."""
        if set(config) - {"adapter"}:
            raise InputError(f"user_config: expected adapter alone, got {', '.join(config)}")
        adapter = config.get("adapter", self._options.adapter)
        if adapter is not None and len(self._options.model) > 1:
            raise InputError(f"adapter is for one model, got {len(self._options.model)}")
        self._options.adapter = adapter
        await self.reload()

    async def reload(self) -> None:
        """Load the models, and take them for all requests from now on. Those that run keep the
        models that they began with, which go with the last of them. Raises InputError; the former
        models stay then."""
        models = await asyncio.to_thread(self._load)
        if self._app is None:
            self._app = create_app(models, settings_of(self._options, allowed_hosts=()))
        else:
            self._app.state.server.models.update({served.name: served for served in models})

    def _load(self) -> list[ServedModel]:
        options = argparse.Namespace(**vars(self._options))  # `load` changes what it is given
        with quiet(options.verbose):
            return load_models(options, read_settings(options))

    async def answer(self, call: Call) -> AsyncGenerator[list[Message], None]:
        """The messages of ASGI that answer a request, several where several are there, the first
        ones with some of the body; the last ones after what the log is to say (`TOLD`), as nobody
        may be there after them. Who leaves the loop is a client who left."""
        assert self._app is not None
        body = [{"type": "http.request", "body": call.body, "more_body": False}]
        left = asyncio.Event()
        sent: asyncio.Queue[Message | None] = asyncio.Queue()

        async def receive() -> Message:
            if body:
                return body.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        scope = dict(call.scope)
        running = asyncio.create_task(self._app(scope, receive, sent.put))
        running.add_done_callback(lambda _: sent.put_nowait(None))
        messages: list[Message] = []
        try:
            while (message := await sent.get()) is not None:
                messages.append(message)
                if sent.empty() and message.get("more_body"):
                    yield messages
                    messages = []
            record: Record = scope["d2f.record"]
            yield [{"type": TOLD, "fields": record.fields}, *messages]
        finally:
            left.set()
            await asyncio.wait({running})

    async def is_ready(self) -> bool:
        """Whether it takes requests."""
        return self._app is not None and await self._app.state.server.is_ready()

    async def metrics(self) -> tuple[str, str]:
        """Its name, and its counts as Prometheus reads them."""
        assert self._app is not None
        text = await self._app.state.server.metrics_text()
        return serve.get_replica_context().replica_id.unique_id, text.decode()

    async def check_health(self) -> None:
        """Raise where an engine has ended: Ray then starts another replica in this one's place."""
        if not await self.is_ready():
            raise RuntimeError("an engine has ended")
