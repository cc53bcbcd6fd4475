"""All routes, in one table: `ROUTES`. The application, its documentation, the answers 404 and 405,
the labels of metrics and the levels of the access log come from it.

To add a route, write its handler, add its row, and put the structs of its request and answer
into protocol.py.
"""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from urllib.parse import parse_qsl

from starlette.types import Receive, Send

from octavo import __version__
from octavo.scheduler.request import AdmissionError, RequestRecord
from octavo.server import chat, completions, docs, protocol
from octavo.server.context import RequestContext
from octavo.server.errors import ApiError, unavailable
from octavo.server.generation import GenerateCall, Prepare
from octavo.server.model import ServedModel
from octavo.server.protocol import json
from octavo.server.request_prompts import chat_prompt
from octavo.server.workers import Kind, work_on

if TYPE_CHECKING:
    from octavo.server.app import App

# The query parameter of GET /requests: how many to list
_LIMIT: dict[str, Any] = {"type": "integer", "minimum": 0, "maximum": 1000, "default": 100}

# A handler returns its answer: an object for JSON, JSON as bytes, a body and its content type, or
# None if it has sent its answer itself. It raises what `as_api_error` knows.
Handler = Callable[["App", RequestContext, Receive, Send], Awaitable[object]]


class HttpRoute(NamedTuple):
    method: Literal["GET", "POST"]
    path: str  # or the beginning of several paths, before a parameter in braces
    handler: Handler
    summary: str = ""  # what it does, for the documentation; "": it is not listed there
    request: type[Any] | None = None  # its body
    response: Any = None  # its answer; None: plain text
    query: Mapping[str, Mapping[str, Any]] = {}  # schemas of its query parameters
    open: bool = False  # whether it needs no API key and its refusals are not counted: a probe
    polled: bool = False  # asked every few seconds: logged at level debug unless it fails

    @property
    def methods(self) -> tuple[str, ...]:
        return ("GET", "HEAD") if self.method == "GET" else (self.method,)

    @property
    def prefix(self) -> str:
        """What the paths begin with; "": there is only one path."""
        return self.path.partition("{")[0] if "{" in self.path else ""


def generate(prepare: Prepare, kind: Kind) -> Handler:
    async def handler(app: App, context: RequestContext, receive: Receive, send: Send) -> None:
        await GenerateCall(app, context, receive, send, prepare).run(kind)

    return handler


def in_thread(work: Callable[[ServedModel, bytes], object], kind: Kind) -> Handler:
    """Return a handler whose work, from reading the JSON on, is done in a worker thread."""

    async def handler(app: App, context: RequestContext, receive: Receive, send: Send) -> bytes:
        def encoded(body: bytes) -> bytes:
            return json.encode(work(app.model, body))

        async with app.bodies.read(context.headers, receive) as body:
            return await work_on(body, encoded, kind, app.token_workers, context, receive)

    return handler


def quick(answer: Callable[[App, RequestContext], object]) -> Handler:
    """Return the handler of an answer that is at hand."""

    async def handler(app: App, context: RequestContext, receive: Receive, send: Send) -> object:
        return answer(app, context)

    return handler


def list_models(app: App, context: RequestContext) -> protocol.ModelList:
    return protocol.ModelList(data=[_card(app.model, name) for name in app.model.names])


def get_model(app: App, context: RequestContext) -> protocol.ModelCard:
    name = context.path.removeprefix("/v1/models/")
    app.model.check_name(name)
    return _card(app.model, name)


def _card(model: ServedModel, name: str) -> protocol.ModelCard:
    return protocol.ModelCard(
        id=name, created=model.created, root=model.root, max_model_len=model.max_model_len
    )


def live(app: App, context: RequestContext) -> dict[str, str]:
    """Answer whether the process is beyond help."""
    if not app.engine.alive:
        raise ApiError(503, "the engine has stopped or hangs")
    return {"status": "ok"}


def ready(app: App, context: RequestContext) -> dict[str, str]:
    """Answer whether the server would take a request now."""
    if app.engine.draining:
        raise unavailable("the server is shutting down")
    answer = live(app, context)
    try:
        app.engine.check_room(app.workers.pending, RequestRecord("", time.monotonic(), 0))
    except AdmissionError as error:
        raise unavailable(str(error)) from None
    return answer


def metrics(app: App, context: RequestContext) -> tuple[bytes, str]:
    return app.metrics.exposition(context.headers.get(b"accept", b"").decode("latin-1"))


def version(app: App, context: RequestContext) -> protocol.Version:
    return protocol.Version(__version__)


async def list_requests(
    app: App, context: RequestContext, receive: Receive, send: Send
) -> protocol.ServerStatus:
    """Tell what the engine does, for `octavo top` and for operators' scripts: whose requests, for
    how long and how far, but never a prompt's or an answer's text or tokens.
    """
    seen = await app.snapshot.take(_limit(context.query))
    return protocol.ServerStatus(app.model.name, __version__, app.engine.draining, seen)


def _limit(query: bytes) -> int:
    """Return how many requests to list. Raises `ApiError` 400."""
    given = parse_qsl(query.decode("latin-1"), keep_blank_values=True)
    for name, _ in given:
        if name != "limit":
            raise ApiError(400, f"the query parameter {name[:100]!r} is not known", name[:100])
    if not given:
        return int(_LIMIT["default"])
    most: int = _LIMIT["maximum"]
    if len(given) > 1 or not re.fullmatch("[0-9]{1,4}", given[0][1], re.ASCII):
        raise ApiError(400, f"limit must be one number, 0 to {most}", "limit")
    if int(given[0][1]) > most:
        raise ApiError(400, f"limit is {given[0][1]}, above {most}", "limit")
    return int(given[0][1])


def tokenize(model: ServedModel, body: bytes) -> protocol.Tokenized:
    request = protocol.read(body, protocol.TokenizeRequest, model.longest_list)
    model.check_name(request.model)
    if request.messages is not None and request.prompt is None:
        token_ids = chat_prompt(model, request.messages, request).token_ids.tolist()
    elif request.prompt is not None and request.messages is None:
        for name in ("add_generation_prompt", "continue_final_message", "chat_template_kwargs"):
            if getattr(request, name) is not None:
                raise ApiError(400, f"{name} needs messages", name)
        special = request.add_special_tokens is not False
        token_ids = model.encode(request.prompt, "prompt", add_special_tokens=special)
    else:
        raise ApiError(400, "give either prompt or messages", "prompt")
    shown = [model.token_text(each) for each in token_ids] if request.return_token_strs else None
    return protocol.Tokenized(len(token_ids), model.max_model_len, token_ids, shown)


def detokenize(model: ServedModel, body: bytes) -> protocol.Detokenized:
    request = protocol.read(body, protocol.DetokenizeRequest, model.longest_list)
    model.check_name(request.model)
    model.check_ids(request.tokens, "tokens")
    return protocol.Detokenized(model.tokenizer.decode(request.tokens, skip_special_tokens=False))


_STATUS = dict[str, str]
ROUTES = (
    HttpRoute(
        "GET", "/v1/models", quick(list_models), "List what is served.",
        response=protocol.ModelList,
    ),
    HttpRoute(
        "GET", "/v1/models/{model}", quick(get_model), "One of them.",
        response=protocol.ModelCard,
    ),
    HttpRoute(
        "POST", "/v1/completions", generate(completions.prepare, "text"), "Go on with a text.",
        protocol.CompletionRequest, protocol.Completion,
    ),
    HttpRoute(
        "POST", "/v1/chat/completions", generate(chat.prepare, "chat"),
        "Go on with a conversation.", protocol.ChatRequest, protocol.ChatCompletion,
    ),
    HttpRoute(
        "POST", "/tokenize", in_thread(tokenize, "chat"), "Text to tokens.",
        protocol.TokenizeRequest, protocol.Tokenized,
    ),
    HttpRoute(
        "POST", "/detokenize", in_thread(detokenize, "text"), "Tokens to text.",
        protocol.DetokenizeRequest, protocol.Detokenized,
    ),
    HttpRoute(
        "GET", "/health", quick(live), "200 while the engine lives.",
        response=_STATUS, open=True, polled=True,
    ),
    HttpRoute("GET", "/ping", quick(live), open=True, polled=True),
    HttpRoute(
        "GET", "/live", quick(live), "200 unless the engine has stopped or hangs.",
        response=_STATUS, open=True, polled=True,
    ),
    HttpRoute(
        "GET", "/ready", quick(ready), "200 while new requests are admitted.",
        response=_STATUS, open=True, polled=True,
    ),
    HttpRoute("GET", "/metrics", quick(metrics), "Prometheus metrics.", polled=True),
    HttpRoute(
        "GET", "/requests", list_requests,
        "What the engine is at, request by request, without any text; limit: how many to list.",
        response=protocol.ServerStatus, polled=True,
        query={"limit": _LIMIT},
    ),
    HttpRoute(
        "GET", "/version", quick(version), "The server's version.",
        response=protocol.Version,
    ),
)  # fmt: skip
DOCS_ROUTES = (
    HttpRoute("GET", "/openapi.json", quick(lambda app, _: json.encode(app.openapi))),
    HttpRoute("GET", "/docs", quick(lambda app, _: (app.docs_page, docs.HTML))),
)
