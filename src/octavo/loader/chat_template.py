"""The chat template a model brings: a Jinja program from a stranger.

Jinja's sandbox keeps a template from reaching outside, but not from taking all time and memory:
``'a' * 10**10`` is one instruction. So templates run in a process of their own (`Apart`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from octavo.loader.apart import Apart, ApartError
from octavo.loader.base import ChatTemplate, ChatTemplateError, Rendered

_REASONING = ("reasoning_content", "thinking", "reasoning")  # names of the same field of a message


class JinjaChatTemplate:
    """Implements `octavo.loader.base.ChatTemplate`. Thread-safe.

    ``tokens`` are the checkpoint's special tokens by name (``bos_token``, ``eos_token``, …).
    ``seconds`` (of wall time), ``memory`` (bytes that a rendering may take) and ``characters`` (of
    output) limit one rendering. Templates see what transformers' `apply_chat_template` gives them:
    ``messages``, ``tools``, ``documents``, ``add_generation_prompt``, the tokens, and whatever else
    is passed, as JSON values.
    """

    def __init__(
        self,
        source: str,
        tokens: Mapping[str, str] | None = None,
        *,
        seconds: float = 2.0,
        memory: int = 512 << 20,
        characters: int = 8 << 20,
    ) -> None:
        self.source = source
        limits = {"seconds": seconds, "memory": memory, "characters": characters}
        self._hello = {"source": source, "tokens": dict(tokens or {}), "limits": limits}
        self._apart = self._process()

    def render(self, messages: list[dict[str, object]], **kwargs: object) -> Rendered:
        """``add_generation_prompt`` is True unless given.

        Content that is a list of text parts reaches the template as one string. As in transformers,
        a field that is null is left out, and reasoning is found under each name that it has had.
        """
        variables = {"tools": None, "documents": None, "add_generation_prompt": True} | kwargs
        plain = [_plain(message) for message in messages]
        try:
            request = json.dumps({"variables": variables, "messages": plain}).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise ChatTemplateError(f"the messages are not JSON: {error}") from None
        answer = self._ask(request, self._apart)
        origin = b"".join(bytes([kind]) * count for count, kind in answer["origin"])
        return Rendered(answer["text"], origin, "\0".join(_strings([variables, plain])))

    def check(self) -> None:
        """Raises `ChatTemplateError` for a template that can render nothing, with the reason."""
        # In a process that goes again: whoever never chats needs none.
        self._ask(b'{"check": true}', self._process())

    def _process(self) -> Apart:
        return Apart("octavo.loader.template_worker", self._hello, "template")

    def _ask(self, request: bytes, apart: Apart) -> dict[str, Any]:
        try:
            answer = apart.ask(request)
        except ApartError as error:
            raise ChatTemplateError(str(error)) from None
        if "error" in answer:
            raise ChatTemplateError(answer["error"])
        return answer


class NoChatTemplate:
    """In place of a template that the checkpoint has and that cannot be used: says why."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def render(self, messages: list[dict[str, object]], **kwargs: object) -> Rendered:
        raise ChatTemplateError(self.reason)


def problem(template: ChatTemplate | None) -> str | None:
    """Why the template can render nothing, if that is so."""
    if isinstance(template, NoChatTemplate):
        return template.reason
    if isinstance(template, JinjaChatTemplate):
        try:
            template.check()
        except ChatTemplateError as error:
            return str(error)
    return None


def several_templates(names: Iterable[str]) -> NoChatTemplate:
    """The template of a checkpoint that has some for several uses and none by default."""
    return NoChatTemplate(
        f"this model has several chat templates ({', '.join(sorted(names))}) and none called "
        "default: name one of them default, or give it as chat_template.jinja"
    )


def _plain(message: dict[str, object]) -> dict[str, object]:
    message = {key: value for key, value in message.items() if value is not None}
    reasoning = next((message[key] for key in _REASONING if key in message), None)
    if reasoning is not None:
        message = {"thinking": reasoning} | message | {"reasoning_content": reasoning}
    content = message.get("content")
    if not isinstance(content, list):
        return message
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise ChatTemplateError(f"message content of type {kind!r} is not supported: only text")
        if not isinstance(text := part.get("text"), str):
            raise ChatTemplateError("a text part of a message's content has no text")
        texts.append(text)
    return {**message, "content": "\n".join(texts)}  # as vLLM and llama.cpp join them


def _strings(value: object) -> Iterator[str]:
    """Everything in JSON values that is text."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from _strings(key)
            yield from _strings(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _strings(each)
