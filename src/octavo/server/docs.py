"""``/openapi.json``, made of the table of routes and their structs, and ``/docs``, which needs no
other server.
"""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from octavo import __version__
from octavo.server import protocol
from octavo.server.config import ServeConfig
from octavo.server.protocol import json

if TYPE_CHECKING:
    from octavo.server.routes import HttpRoute

HTML = "text/html; charset=utf-8"


def openapi(routes: Iterable[HttpRoute], config: ServeConfig) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document."""
    routes = [route for route in routes if route.summary]
    types = [each for route in routes for each in (route.request, route.response) if each]
    types.append(protocol.ErrorAnswer)
    shown, components = msgspec.json.schema_components(
        types, ref_template="#/components/schemas/{name}"
    )
    schemas = dict(zip(types, shown, strict=True))
    paths = {route.path: {route.method.lower(): _operation(route, schemas)} for route in routes}
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
        for route in routes:
            if not route.open:
                paths[route.path][route.method.lower()]["security"] = [{"key": []}]
    return document


def _operation(route: HttpRoute, schemas: dict[Any, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}}
    if route.response is not None:
        content = _json(schemas[route.response])
    if "stream" in getattr(route.request, "__struct_fields__", ()):
        content["text/event-stream"] = {"schema": {"type": "string"}}
    operation: dict[str, Any] = {
        "summary": route.summary,
        "responses": {
            "200": {"description": "OK", "content": content},
            "default": {
                "description": "An error object; its code is the HTTP status.",
                "content": _json(schemas[protocol.ErrorAnswer]),
            },
        },
    }
    if route.request is not None:
        operation["requestBody"] = {"required": True, "content": _json(schemas[route.request])}
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "query", "schema": schema} for name, schema in route.query.items()
    ]
    if route.prefix:
        name = route.path.removeprefix(route.prefix).strip("{}")
        schema = {"type": "string"}
        parameters.append({"name": name, "in": "path", "required": True, "schema": schema})
    if parameters:
        operation["parameters"] = parameters
    return operation


def _json(schema: Any) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


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


def page(document: dict[str, Any]) -> bytes:
    """Return an OpenAPI document as a page of HTML."""
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
            parameters = operation.get("parameters", ())
            rows = {f"{each['name']} ({each['in']})": each["schema"] for each in parameters}
            required: list[str] = []
            if body := operation.get("requestBody"):
                name = body["content"]["application/json"]["schema"]["$ref"].rsplit("/", 1)[1]
                required = schemas[name].get("required", [])
                rows |= schemas[name]["properties"]
            if rows:
                parts.append("<details open><summary>Fields</summary><table>")
                for field, schema in rows.items():
                    needed = "required" if field in required else ""
                    parts.append(
                        f"<tr><td><code>{html.escape(field)}</code><td>"
                        f"{html.escape(_type_text(schema))}<td>{needed}"
                    )
                parts.append("</table></details>")
    return "".join(parts).encode()


def _type_text(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(_type_text(each) for each in schema["anyOf"])
    if "$ref" in schema:
        return str(schema["$ref"].rsplit("/", 1)[1])
    kind = str(schema.get("type", "any"))
    if kind == "array" and isinstance(schema.get("items"), dict):
        return f"list of ({_type_text(schema['items'])})"
    return kind
