"""Make token ids of a request's text or messages. Everything here runs in a worker thread."""

from __future__ import annotations

import re
import uuid
from array import array
from typing import Any, NamedTuple

from octavo.loader.base import ChatTemplateError, head
from octavo.server.errors import ApiError
from octavo.server.model import ServedModel
from octavo.server.protocol import (
    NEUTRAL_MESSAGE,
    ChatRequest,
    TokenizeRequest,
    drop_neutral,
    refuse_unknown,
)

_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
# Settings that a template gets in any case; a request may not set them another way.
_TAKEN = frozenset({"self", "messages", "tools", "documents", "add_generation_prompt"})


class Prompt(NamedTuple):
    token_ids: array[int]  # numbers and not objects, for it stays as long as its request waits
    text: str | None  # as the client gave it; None: it gave ids


def completion_prompts(
    model: ServedModel, prompt: str | list[Any], *, add_special_tokens: bool, most: int
) -> list[Prompt]:
    """Return the prompts of a text, of token ids, or of a list of either, which may have ``most``.

    Raises `ApiError` 400.
    """
    if isinstance(prompt, str):
        return [_from_text(model, prompt, "prompt", add_special_tokens)]
    if not prompt:
        raise ApiError(400, "prompt is empty", "prompt")
    if all(isinstance(item, int) for item in prompt):
        return [_from_ids(model, prompt, "prompt")]
    kinds = {type(item) for item in prompt}
    if len(kinds) > 1 or int in kinds:
        raise ApiError(
            400, "prompt must be a text, token ids, or a list of only one of these", "prompt"
        )
    if len(prompt) > most:
        raise ApiError(400, f"prompt has {len(prompt)} prompts, more than {most}", "prompt")
    return [
        _from_text(model, item, f"prompt[{index}]", add_special_tokens)
        if isinstance(item, str)
        else _from_ids(model, item, f"prompt[{index}]")
        for index, item in enumerate(prompt)
    ]


def chat_prompt(
    model: ServedModel, messages: list[dict[str, Any]], request: ChatRequest | TokenizeRequest
) -> Prompt:
    """Render the messages with the model's template, as ``request`` says. Raises `ApiError` 400."""
    continue_final_message = bool(request.continue_final_message)
    template_kwargs = request.chat_template_kwargs or {}
    if model.chat_template is None:
        raise ApiError(
            400, "this model has no chat template; use /v1/completions with a prompt", "messages"
        )
    if not messages:
        raise ApiError(400, "messages is empty", "messages")
    for name in template_kwargs:
        if name in _TAKEN:
            path = f"chat_template_kwargs.{name}"
            raise ApiError(400, f"{path} is not a setting of the template", path)
    add_generation_prompt = request.add_generation_prompt
    if add_generation_prompt is None:
        add_generation_prompt = not continue_final_message
    elif add_generation_prompt and continue_final_message:
        raise ApiError(
            400,
            "continue_final_message cannot go with add_generation_prompt",
            "continue_final_message",
        )
    plain = [
        _plain(message, f"messages[{index}]", model.name) for index, message in enumerate(messages)
    ]
    model.check_length(sum(len(message["content"]) for message in plain), "messages")
    mark = uuid.uuid4().hex  # no conversation contains it
    said = plain[-1]["content"].rstrip()
    space = plain[-1]["content"][len(said) :]
    if continue_final_message:
        plain[-1]["content"] = said + mark + space + " "
    try:
        text = model.chat_template.render(
            [dict(message) for message in plain],
            add_generation_prompt=add_generation_prompt,
            **template_kwargs,
        )
    except ChatTemplateError as error:
        raise ApiError(400, str(error), "messages") from None
    if continue_final_message:
        # Cut after the last message, so that the model continues it.
        end = text.rfind(mark)
        if end < 0:
            raise ApiError(
                400,
                "continue_final_message: the template does not show the last message as it is",
                "continue_final_message",
            )
        kept = text.startswith(space + " ", end + len(mark))  # else the template trims messages
        text = head(text, end, space if kept else "")
    # A plain string has lost the marks of where the template's own control tokens are.
    shown = str(text) if model.control_tokens_in_content else text
    return _from_text(model, shown, "messages", bool(request.add_special_tokens))


def _from_text(model: ServedModel, text: str, param: str, add_special_tokens: bool) -> Prompt:
    token_ids = model.encode(text, param, add_special_tokens=add_special_tokens)
    if not token_ids:
        raise ApiError(400, f"{param} has no tokens", param)
    return Prompt(array("i", token_ids), str(text))


def _from_ids(model: ServedModel, token_ids: list[int], param: str) -> Prompt:
    if not token_ids:
        raise ApiError(400, f"{param} has no tokens", param)
    model.check_ids(token_ids, param)
    return Prompt(array("i", token_ids), None)


def _plain(message: dict[str, Any], path: str, model: str) -> dict[str, str]:
    """Return role and content as text. Raises `ApiError` 400 naming what else a message carries."""
    message = dict(message)
    drop_neutral(message, NEUTRAL_MESSAGE, path + ".")
    refuse_unknown(message, ("role", "content"), path + ".")
    role = message.get("role")
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        raise ApiError(400, f"{path}.role must be a name such as user", f"{path}.role")
    content = message.get("content")
    if isinstance(content, list):
        # As vLLM and llama.cpp join them, and as the Python API does.
        content = "\n".join(
            _text_of(part, f"{path}.content[{index}]", model) for index, part in enumerate(content)
        )
    if not isinstance(content, str):
        raise ApiError(
            400, f"{path}.content must be a text or a list of text parts", f"{path}.content"
        )
    return {"role": role, "content": content}


def _text_of(part: object, path: str, model: str) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        reason = f"only text parts are supported, not {kind!r:.40}: of {model} the language model"
        raise ApiError(400, f"{path}.type: {reason} alone is loaded", f"{path}.type")
    refuse_unknown(part, ("type", "text"), path + ".")
    text = part.get("text")
    if not isinstance(text, str):
        raise ApiError(400, f"{path}.text must be a text", f"{path}.text")
    return text
