"""The application as Ray Serve has it: `application` makes it from a configuration file,

    serve run configs/ray/serve-tiny.yaml

of replicas, and of fronts that Ray's HTTP proxy hands requests to.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import sys
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from fastapi import FastAPI, Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from ray import serve
from ray.exceptions import RayActorError, RayError
from ray.serve import Application
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    RayServeException,
    ReplicaUnavailableError,
)
from ray.serve.handle import DeploymentHandle
from starlette.responses import Response as ResponseForwarding
from starlette.types import Message, Receive, Scope, Send

from d2f.errors import InputError
from d2f.quiet import quiet
from decode.cli import DecoderSettings, read_settings, say
from decode.server.app import create_app, new_app, router, router_about_models, router_tokenization
from decode.server.middleware import ID_HEADER, Record, read_body, set_up_logs
from decode.server.models import (
    ServedModel,
    Settings,
    check_models,
    check_outlines,
    load_models,
    settings_of,
)
from decode.server.options import Options, parse
from decode.server.protocol import RETRY_SECONDS, ApiError, as_api_error
from decode.server.run import SWITCH_SECONDS
from decode.server.state import Metrics, ServerState, state_of
from decode.server.stream import SlowClientError, event_line, watched
from decode.workers import ray_session

# A replica: the application in a process that Ray Serve starts, watches and replaces.

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

    options: the command line (`decode.server.options`). Which adapter the model has may
    be Ray's `user_config` instead, ``{"adapter": NAME}``: it can change while requests run.
    """

    def __init__(self, options: Options):
        self._options = options
        self._app: FastAPI | None = None
        sys.setswitchinterval(SWITCH_SECONDS)

    async def reconfigure(self, config: dict[str, Any]) -> None:
        """Load what `user_config` says, as `reload` does. Raises InputError."""
        if set(config) - {"adapter"}:
            raise InputError(f"user_config: expected adapter alone, got {', '.join(config)}")
        adapter = config.get("adapter", self._options.adapter)
        if adapter is not None and len(self._options.named) > 1:
            raise InputError(f"adapter is for one model, got {len(self._options.named)}")
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
        options = replace(self._options)  # `load` changes what it is given
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


# The counts of several replicas as those of one server, at its /metrics.

ANSWERS = "d2f_http_responses"  # what clients were sent, which the front knows


def together(front: str, replicas: Mapping[str, str]) -> bytes:
    """One text of several in Prometheus' format. replicas: the text of each by its name, which its
    samples get as label ``replica``; of the front's own there are the answers alone."""
    registry = CollectorRegistry()
    registry.register(_Together(front, replicas))
    return generate_latest(registry)


class _Together(Collector):
    def __init__(self, front: str, replicas: Mapping[str, str]):
        self._front = front
        self._replicas = replicas

    def collect(self) -> Iterator[Metric]:
        count = len(self._replicas)
        yield GaugeMetricFamily("d2f_replicas", "Replicas that answered.", value=count)
        yield from (one for one in text_string_to_metric_families(self._front) if _counts(one))
        families: dict[str, Metric] = {}
        for replica, text in self._replicas.items():
            for found in text_string_to_metric_families(text):
                if _counts(found):
                    continue
                family = families.setdefault(
                    found.name, Metric(found.name, found.documentation, found.type)
                )
                for one in found.samples:
                    family.add_sample(one.name, one.labels | {"replica": replica}, one.value)
        yield from families.values()


def _counts(family: Metric) -> bool:
    """Whether it counts answers."""
    return family.name.startswith(ANSWERS)


# A request's way to a replica, and its answer's way back.
#
# ::
#
#     client --> front --> Ray's router --> Replica.answer --> the application
#     client <-- front <------------------- messages of ASGI <--
#
# A replica sends nothing before it has some of an answer. One that dies until then has sent
# nothing,
# so that another one can be asked, once: a request that no replica survives ends with the second.

GRACE_SECONDS = 2.0  # more than a replica's own limit, so that it is the one to say what happened


class ForwardedAnswer(ResponseForwarding):
    """The answer of a replica. A client that leaves, or does not read for `Settings.send_seconds`,
    cancels it there. Raises ApiError where the client was sent nothing, else the error is the last
    chunk of a stream; SlowClientError."""

    def __init__(
        self,
        replicas: DeploymentHandle,
        call: Call,
        settings: Settings,
        under_way: set[ForwardedAnswer],
    ):
        """under_way: those that `stop` may be called of, of which it is one while it is sent."""
        self.background = None  # all that FastAPI reads of it
        self._asked = replicas.options(method_name="answer", stream=True)
        self._call = call
        self._settings = settings
        self._under_way = under_way
        self._began: Message | None = None  # the head, once it was sent
        self._whole = False  # whether the last of it was sent
        self._end: asyncio.Future[ApiError] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record: Record = scope["d2f.record"]
        self._end = asyncio.get_running_loop().create_future()
        work = asyncio.create_task(self._forward(record, send))
        self._under_way.add(self)

        def leave() -> None:
            if not self._whole:  # after it, everyone leaves
                work.cancel()

        try:
            with watched(receive, leave):
                done: set[asyncio.Future[Any]] = {work, self._end}
                await asyncio.wait(done, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._under_way.discard(self)
            work.cancel()
            await asyncio.wait({work})
        error = self._end.result() if self._end.done() else None
        if error is None and work.cancelled():
            record.error = "the client left"
        elif error is None:
            error = work.result()
        if error is not None and self._began is None:
            raise error
        if error is not None:
            record.error = error.message
            await self._send_last(error, send)

    def stop(self, error: ApiError) -> None:
        """Have the client told this in place of what is still to come."""
        if self._end is not None and not self._end.done():
            self._end.set_result(error)

    async def _forward(self, record: Record, send: Send) -> ApiError | None:
        """Send what the replica does; the error that ended it, which the client is not told yet."""
        loop, settings = asyncio.get_running_loop(), self._settings
        try:
            async with (
                asyncio.timeout(settings.request_seconds + GRACE_SECONDS) as limit,
                aclosing(self._messages()) as messages,
            ):
                async for message in messages:
                    if message["type"] == TOLD:
                        record.told = message["fields"]
                        continue
                    limit.reschedule(loop.time() + settings.send_seconds)
                    self._began = self._began or message
                    self._whole = message["type"].endswith("body") and not message.get("more_body")
                    await send(message)
                    limit.reschedule(None)
        except TimeoutError as error:
            if self._began is not None:
                raise SlowClientError("the client did not read") from error
            return as_api_error(error)
        except Exception as error:
            return _as_api_error(error)
        return None

    async def _messages(self) -> AsyncGenerator[Message, None]:
        for is_last in (False, True):
            began = False
            replies: Any = self._asked.remote(self._call)
            try:
                async for messages in replies:
                    began = True
                    for message in messages:
                        yield message
                return
            except RayActorError:
                if began or is_last:
                    raise
            finally:
                replies.cancel()

    async def _send_last(self, error: ApiError, send: Send) -> None:
        """End a stream with an error. Anything else that has begun is cut off."""
        assert self._began is not None
        headers = dict(self._began["headers"])
        if not headers.get(b"content-type", b"").startswith(b"text/event-stream"):
            raise RuntimeError(f"an answer was cut off: {error.message}")
        body = event_line(error.content)
        async with asyncio.timeout(self._settings.send_seconds):
            await send({"type": "http.response.body", "body": body, "more_body": False})


def _as_api_error(error: Exception) -> ApiError:
    wait = {"Retry-After": str(RETRY_SECONDS)}
    if isinstance(error, RayActorError):
        said = "the replica that computed the answer has ended; try again"
        return ApiError(503, said, code="replica_ended", headers=wait)
    if isinstance(error, BackPressureError):
        said = "there is no replica, and too many requests wait for one; try again"
        return ApiError(503, said, code="queue_full", headers=wait)
    if isinstance(error, DeploymentUnavailableError | ReplicaUnavailableError):
        return ApiError(503, "there is no replica; try again", code="not_ready", headers=wait)
    return as_api_error(error)


# What clients of several replicas meet: the paths, checks and log of one server. It holds no
# model; what needs one is a replica's to answer.

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
    for part in (router, router_about_models, router_tokenization):
        for route in part.routes:
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


MOST_WITHOUT_REPLICA = 1000  # requests that are not given to one yet, as for moments all are
MOST = 1_000_000  # calls at a time: the engines' own queues say what is too many
HEALTH_SECONDS = 2.0  # between looks at whether a replica lives
PREFIX_ROUTER = (  # of ray.serve.llm, which imports vLLM before it gives it
    "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router:"
    "PrefixCacheAffinityRouter"
)


def application(args: dict[str, Any]) -> Application:
    """The application for `serve run` and `serve deploy`. args: options of `decode.serve` without
    their dashes, ``{"model": "tiny-d2f", "max-batch": 8}``; a list gives one several times, true
    gives one that has no value. How many replicas there are, and what each has of a machine, is
    the configuration's ``deployments``. Raises InputError."""
    options = parse(command_line(args))
    if options.max_replicas is not None:
        raise InputError("args: how many replicas there are is num_replicas of the deployment")
    decoding = read_settings(options)
    check_models(options, decoding)
    check_outlines(options, decoding)
    front: Any = _Front  # Ray's decorators are typed as if they changed nothing
    return front.bind(options, replicas(options))


def replicas(options: Options, **more: Any) -> Application:
    """The deployment of the replicas alone. more: options of Ray's."""
    kept = replace(options, api_key=(), cors_origin=())
    settings: dict[str, Any] = {
        "user_config": {"adapter": options.adapter},
        "max_ongoing_requests": MOST,
        "max_queued_requests": MOST_WITHOUT_REPLICA,
        "graceful_shutdown_timeout_s": options.drain_seconds,
        "graceful_shutdown_wait_loop_s": 0.1,
        "health_check_period_s": HEALTH_SECONDS,
        "logging_config": {"enable_access_log": False},
    }
    if options.reuse_prefixes:
        settings["request_router_config"] = {
            "request_router_class": PREFIX_ROUTER,
            "request_router_kwargs": {
                "imbalanced_threshold": options.max_batch,
                "do_eviction": True,
            },
        }
    deployment: Any = serve.deployment(Replica, name="Replica", **settings | more)
    return deployment.bind(kept)


@serve.deployment(
    name="Front", max_ongoing_requests=MOST, logging_config={"enable_access_log": False}
)
@serve.ingress()
class _Front:
    def __init__(self, options: Options, handle: DeploymentHandle):
        self._options = options
        self._handle = handle

    def __serve_build_asgi_app__(self) -> FastAPI:
        options = self._options
        set_up_logs(options.log_format)
        settings = settings_of(options, allowed_hosts=("*",))
        return create_front(self._handle, settings, reads_prompts=options.reuse_prefixes)


def command_line(args: dict[str, Any]) -> list[str]:
    """``{"model": ["a", "b"], "verbose": True}``: ``--model a --model b --verbose``."""
    words = []
    for name, value in args.items():
        for one in value if isinstance(value, list) else [value]:
            words += [f"--{name}"] if one is True else [f"--{name}", str(one)]
    return words


# `decode.serve --replicas N`: replicas on Ray, and their front in this process.


def serve_replicas(
    options: Options,
    decoding: DecoderSettings,
    settings: Settings,
    listener: socket.socket,
) -> None:
    """Serve until a signal ends it; then nothing of it is left. Raises InputError."""
    check_outlines(options, decoding)
    assert options.max_replicas is not None
    flag = "--max-replicas" if options.replicas is None else "--replicas"
    gpus = options.replica_gpus
    if gpus is None:
        device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
        gpus = int(device == "cuda")
    os.environ.setdefault("RAY_worker_niceness", "0")  # clients wait: by default Ray's is 15
    with ray_session(options.ray_address, options.max_replicas, flag, gpus=gpus) as cores:
        from ray import serve

        from decode.server.run import run_server

        if not options.verbose:
            logging.getLogger("ray.serve").setLevel(logging.ERROR)
        say(f"starting {options.min_replicas} replicas, each with {cores} cores and {gpus} GPUs")
        name = f"d2f-{uuid.uuid4().hex[:8]}"  # others may use the cluster, too
        try:
            serve.start(proxy_location="Disabled")
            handle = _deploy(name, options, {"num_cpus": cores, "num_gpus": gpus})

            @asynccontextmanager
            async def lifespan(app: FastAPI) -> AsyncIterator[None]:
                loop, reloads = asyncio.get_running_loop(), set()
                loop.add_signal_handler(
                    signal.SIGHUP, lambda: reloads.add(loop.create_task(_reload(handle)))
                )
                yield

            app = create_front(
                handle, settings, reads_prompts=options.reuse_prefixes, lifespan=lifespan
            )
            set_up_logs(options.log_format)
            run_server(app, listener, options.drain_seconds)
        finally:
            serve.delete(name)


def _deploy(name: str, options: Options, each: dict[str, int]) -> Any:
    """Start the replicas, `each` with its share of the machine; their handle. Raises InputError."""
    from ray import serve

    assert options.min_replicas is not None and options.max_replicas is not None
    scaling: dict[str, Any] = {"num_replicas": options.max_replicas}
    if options.min_replicas < options.max_replicas:
        scaling = {
            "autoscaling_config": {
                "min_replicas": options.min_replicas,
                "max_replicas": options.max_replicas,
                "target_ongoing_requests": options.target_requests or options.max_batch,
            }
        }
    try:
        return serve.run(
            replicas(options, ray_actor_options=each, max_constructor_retry_count=1, **scaling),
            name=name,
            route_prefix=None,
        )
    except RuntimeError as error:
        said = [line for line in str(error).splitlines() if "Error: " in line] or [str(error)]
        raise InputError(f"no replica could be started: {said[-1].strip()}") from error


async def _reload(handle: Any) -> None:
    """Have all replicas load their models anew, and say how it went."""
    say("SIGHUP: loading the models anew")
    told = await handle.broadcast("reload").results_async(return_exceptions=True)
    failed = {str(one).strip().splitlines()[-1] for one in told if isinstance(one, Exception)}
    for error in failed:
        say(f"error: {error}; the former models stay")
    if not failed:
        say(f"{len(told)} replicas have loaded the models anew")
