"""The routes that generate nothing: models, tokens, probes, metrics."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo import __version__
from octavo.engine.async_engine import AsyncEngine
from octavo.scheduler.request import AdmissionError, RequestRecord
from octavo.server.body import Bodies, unless_gone
from octavo.server.errors import ApiError, is_fault_of_client, unavailable
from octavo.server.exchange import Exchange
from octavo.server.gate import send_json
from octavo.server.metrics import Metrics
from octavo.server.model import ServedModel
from octavo.server.prompts import chat_prompt
from octavo.server.protocol import DetokenizeRequest, TokenizeRequest, read
from octavo.server.refusals import Cost, Refusals
from octavo.server.responses import (
    Detokenized,
    ModelCard,
    ModelList,
    Tokenized,
    Version,
    json,
)
from octavo.server.workers import Kind, Workers


def answer(value: object) -> Response:
    return Response(json.encode(value), media_type="application/json")


class Models:
    def __init__(self, model: ServedModel) -> None:
        self._cards = {
            name: ModelCard(
                id=name,
                created=model.created,
                root=model.root,
                max_model_len=model.max_model_len,
            )
            for name in model.names
        }

    async def list(self, request: HttpRequest) -> Response:
        return answer(ModelList(data=list(self._cards.values())))

    async def get(self, request: HttpRequest) -> Response:
        name = request.path_params["model"]
        if name not in self._cards:
            raise ApiError(404, f"the model {name!r} does not exist here", "model")
        return answer(self._cards[name])


class Probes:
    """``/live`` asks: is the process beyond help? ``/ready``: would it take a request now?"""

    def __init__(self, engine: AsyncEngine, workers: Workers) -> None:
        """``workers``: those that read what is to be generated."""
        self._engine = engine
        self._workers = workers

    async def live(self, request: HttpRequest) -> Response:
        if not self._engine.alive:
            raise ApiError(503, "the engine has stopped or hangs")
        return answer({"status": "ok"})

    async def ready(self, request: HttpRequest) -> Response:
        if self._engine.draining:
            raise unavailable("the server is shutting down")
        answer = await self.live(request)
        try:
            ordinary = RequestRecord("", time.monotonic(), 0)
            self._engine.check_room(self._workers.pending, ordinary)
        except AdmissionError as error:
            raise unavailable(str(error)) from None
        return answer


class Worker:
    """A POST route whose work, from reading the JSON on, is done in a worker thread."""

    def __init__(
        self,
        bodies: Bodies,
        workers: Workers,
        refusals: Refusals,
        work: Callable[[bytes], object],
        kind: Kind,
    ) -> None:
        self._bodies = bodies
        self._workers = workers
        self._refusals = refusals
        self._work = work
        self._kind = kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        cost, exchange = Cost(), Exchange.of(scope)
        try:
            async with self._bodies.read(exchange.headers, receive) as body:
                cost.size = len(body)
                work = partial(cost.work, self._encoded)
                answer = await unless_gone(receive, self._workers.run(work, body, self._kind))
        except ApiError as error:
            if is_fault_of_client(error.with_traceback(None)):
                await self._refusals.pay(exchange.client, cost, receive)
            raise
        await send_json(send, 200, answer)

    def _encoded(self, body: bytes) -> bytes:
        return json.encode(self._work(body))


def tokenize(model: ServedModel, body: bytes) -> Tokenized:
    request = read(body, TokenizeRequest, model.longest_list)
    model.check_name(request.model)
    if (request.prompt is None) == (request.messages is None):
        raise ApiError(400, "give either prompt or messages", "prompt")
    if request.prompt is not None:
        for name in ("add_generation_prompt", "continue_final_message", "chat_template_kwargs"):
            if getattr(request, name) is not None:
                raise ApiError(400, f"{name} needs messages", name)
        token_ids = model.encode(
            request.prompt, "prompt", add_special_tokens=request.add_special_tokens is not False
        )
    else:
        assert request.messages is not None
        token_ids = chat_prompt(model, request.messages, request).token_ids.tolist()
    shown = None
    if request.return_token_strs:
        shown = [model.shown.text(token_id) for token_id in token_ids]
    return Tokenized(len(token_ids), model.max_model_len, token_ids, shown)


def detokenize(model: ServedModel, body: bytes) -> Detokenized:
    request = read(body, DetokenizeRequest, model.longest_list)
    model.check_name(request.model)
    model.check_ids(request.tokens, "tokens")
    return Detokenized(model.tokenizer.decode(request.tokens, skip_special_tokens=False))


async def version(request: HttpRequest) -> Response:
    return answer(Version(__version__))


class MetricsRoute:
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        accept = Exchange.of(scope).headers.get(b"accept", b"").decode("latin-1")
        body, content_type = self._metrics.exposition(accept)
        await Response(body, headers={"content-type": content_type})(scope, receive, send)
