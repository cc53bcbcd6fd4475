"""The chat template a model brings: a Jinja program from a stranger, run in a sandbox."""

from __future__ import annotations

import json
from datetime import datetime
from typing import NoReturn

import jinja2
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from octavo.checkpoint.base import ChatTemplateError


class JinjaChatTemplate:
    """Implements `octavo.checkpoint.base.ChatTemplate`. Thread-safe.

    The environment is the one Hugging Face templates are written for: ``raise_exception``,
    ``strftime_now``, a ``tojson`` that leaves characters alone, loop controls, and the
    ``{% generation %}`` tag, which marks text for training and is nothing here.
    """

    def __init__(self, source: str, *, bos_token: str = "", eos_token: str = "") -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
        )
        environment.filters["tojson"] = _tojson
        environment.globals |= {"raise_exception": _raise, "strftime_now": _strftime_now}
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the model's chat template does not parse: {error}") from None

    def render(self, messages: list[dict[str, object]], **kwargs: object) -> str:
        """``add_generation_prompt`` is True unless given; other names reach the template as is."""
        variables = {"add_generation_prompt": True, **self._tokens, **kwargs}
        messages = [_with_text(message) for message in messages]
        try:
            return self._template.render(messages=messages, **variables)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(str(error)) from None
        except Exception as error:
            raise ChatTemplateError(
                f"the model's chat template failed: {type(error).__name__}: {error}"
            ) from None


def _with_text(message: dict[str, object]) -> dict[str, object]:
    """The message with content parts joined into one string, as text-only templates expect it."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise ChatTemplateError(f"message content of type {kind!r} is not supported: only text")
        texts.append(str(part.get("text", "")))
    return {**message, "content": "".join(texts)}


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which a prompt is not."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


class _Generation(Extension):
    tags = {"generation"}  # noqa: RUF012 - Jinja's own interface

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
