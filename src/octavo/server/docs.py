"""``/openapi.json`` from the structs themselves, and ``/docs``, which needs no other server."""

from __future__ import annotations

import html
from functools import cache
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from octavo import __version__
from octavo.server import protocol, responses
from octavo.server.config import ServeConfig
from octavo.server.inspection import MOST_LISTED, RequestList
from octavo.server.responses import json

_SSE = "text/event-stream"

# path, method, what it does, request, response (None: plain text)
_OPERATIONS: list[tuple[str, str, str, Any, Any]] = [
    ("/v1/models", "get", "List what is served.", None, responses.ModelList),
    ("/v1/models/{model}", "get", "One of them.", None, responses.ModelCard),
    (
        "/v1/completions",
        "post",
        "Go on with a text.",
        protocol.CompletionRequest,
        responses.Completion,
    ),
    (
        "/v1/chat/completions",
        "post",
        "Go on with a conversation.",
        protocol.ChatRequest,
        responses.ChatCompletion,
    ),
    ("/tokenize", "post", "Text to tokens.", protocol.TokenizeRequest, responses.Tokenized),
    ("/detokenize", "post", "Tokens to text.", protocol.DetokenizeRequest, responses.Detokenized),
    ("/health", "get", "200 while the engine lives.", None, dict[str, str]),
    ("/live", "get", "200 unless the engine has stopped or hangs.", None, dict[str, str]),
    ("/ready", "get", "200 while new requests are admitted.", None, dict[str, str]),
    ("/metrics", "get", "Prometheus metrics.", None, None),
    (
        "/requests",
        "get",
        "What the engine is at, request by request, without any text; limit: how many to list.",
        None,
        RequestList,
    ),
    ("/version", "get", "The server's version.", None, responses.Version),
]


def docs_routes(config: ServeConfig) -> list[Route]:
    """Both are made when they are first asked for: most servers never are."""
    document = cache(lambda: openapi(config))
    page = cache(lambda: _page(document()))

    async def openapi_json(request: HttpRequest) -> Response:
        return Response(json.encode(document()), media_type="application/json")

    async def docs(request: HttpRequest) -> Response:
        return HTMLResponse(page())

    return [
        Route("/openapi.json", openapi_json, methods=["GET"]),
        Route("/docs", docs, methods=["GET"]),
    ]


def openapi(config: ServeConfig) -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    types = [t for *_, request, response in _OPERATIONS for t in (request, response) if t]
    shown, components = msgspec.json.schema_components(
        [*types, responses.ErrorAnswer], ref_template="#/components/schemas/{name}"
    )
    of = dict(zip([*types, responses.ErrorAnswer], shown, strict=True))
    error = {
        "description": "An error object; its code is the HTTP status.",
        "content": {"application/json": {"schema": of[responses.ErrorAnswer]}},
    }
    paths: dict[str, Any] = {}
    for path, method, what, request, response in _OPERATIONS:
        content: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}}
        if response is not None:
            content = {"application/json": {"schema": of[response]}}
        if request in (protocol.CompletionRequest, protocol.ChatRequest):
            content[_SSE] = {"schema": {"type": "string"}}
        operation: dict[str, Any] = {
            "summary": what,
            "responses": {
                "200": {"description": "OK", "content": content},
                "default": error,
            },
        }
        if request is not None:
            operation["requestBody"] = {
                "required": True,
                "content": {"application/json": {"schema": of[request]}},
            }
        if "{model}" in path:
            operation["parameters"] = [
                {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
            ]
        if path == "/requests":
            number = {"type": "integer", "minimum": 0, "maximum": MOST_LISTED}
            operation["parameters"] = [{"name": "limit", "in": "query", "schema": number}]
        if config.keys and path not in ("/health", "/live", "/ready"):
            operation["security"] = [{"key": []}]
        paths[path] = {method: operation}
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "Octavo",
            "version": __version__,
            "description": "The OpenAI API over open-weight models. " + _policy_text(),
        },
        "paths": paths,
        "components": {"schemas": components},
    }
    if config.root_path:
        document["servers"] = [{"url": config.root_path}]
    if config.keys:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return document


def _policy_text() -> str:
    neutral = protocol.NEUTRAL_COMPLETION | protocol.NEUTRAL_CHAT
    return (
        "A field that is unknown or not supported is refused by name. Labels, which never change "
        f"an answer: {', '.join(protocol.LABELS)}. Accepted only with a value that asks for "
        "nothing: "
        + "; ".join(
            f"{name} ({', '.join(json.encode(value).decode() for value in values)})"
            for name, values in sorted(neutral.items())
        )
        + "."
    )


def _page(document: dict[str, Any]) -> str:
    schemas = document["components"]["schemas"]
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><title>Octavo API</title>",
        "<style>body{font:16px/1.5 system-ui;max-width:60em;margin:2em auto;padding:0 1em}"
        "code{background:#8882;padding:0 .2em}td{padding:.1em 1em .1em 0;vertical-align:top}"
        "summary{cursor:pointer}</style>",
        f"<h1>Octavo {html.escape(__version__)}</h1>",
        f"<p>{html.escape(document['info']['description'])}</p>",
        "<p>The same as <a href=openapi.json>openapi.json</a>.</p>",
    ]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            parts.append(
                f"<h2><code>{method.upper()} {html.escape(path)}</code></h2>"
                f"<p>{html.escape(operation['summary'])}</p>"
            )
            body = operation.get("requestBody")
            if body:
                name = body["content"]["application/json"]["schema"]["$ref"].rsplit("/", 1)[1]
                required = schemas[name].get("required", [])
                parts.append("<details open><summary>Fields</summary><table>")
                for field, schema in schemas[name]["properties"].items():
                    needed = "required" if field in required else ""
                    parts.append(
                        f"<tr><td><code>{html.escape(field)}</code><td>"
                        f"{html.escape(_type_text(schema))}<td>{needed}"
                    )
                parts.append("</table></details>")
    return "".join(parts)


def _type_text(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(_type_text(each) for each in schema["anyOf"])
    if "$ref" in schema:
        return str(schema["$ref"].rsplit("/", 1)[1])
    kind = str(schema.get("type", "any"))
    if kind == "array" and isinstance(schema.get("items"), dict):
        return f"list of ({_type_text(schema['items'])})"
    return kind
