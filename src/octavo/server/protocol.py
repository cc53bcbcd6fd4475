"""The request bodies, field by field: what is honoured, what is a label, what is refused.

A field is one of three things, and there is no fourth:

- **honoured**: a field of the structs below;
- **a label** (`LABELS`): it never changes an answer; it is checked and goes to the log;
- **refused**: `NEUTRAL` lists fields that clients send although they ask for nothing by them. With
  one of the listed values they are accepted, for they then mean what this server does anyway. With
  any other value, and for every name not in this file, the request is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from octavo.sampling.params import (
    MAX_LOGIT_BIASES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    parameters,
)
from octavo.scheduler.request import LatencyTarget
from octavo.server.body import convert, decode_object
from octavo.server.counting import check_counts
from octavo.server.errors import ApiError

# What identifies the caller or the conversation to OpenAI; here it is only written to the log.
LABELS = ("user", "safety_identifier", "prompt_cache_key", "metadata")

_UNSET_VALUES: tuple[Any, ...] = (None,)
_NEUTRAL_EVERYWHERE: dict[str, tuple[Any, ...]] = {
    "store": (None, False),
    "service_tier": (None, "auto", "default"),
    "response_format": (None, {"type": "text"}),
    "prompt_cache_retention": _UNSET_VALUES,
    "prompt_cache_options": _UNSET_VALUES,
    "moderation": _UNSET_VALUES,
    "structured_outputs": _UNSET_VALUES,
    "guided_json": _UNSET_VALUES,
    "guided_regex": _UNSET_VALUES,
    "guided_choice": _UNSET_VALUES,
    "guided_grammar": _UNSET_VALUES,
    "use_beam_search": (None, False),
    "length_penalty": (None, 1, 1.0),
    "bad_words": (None, []),
    "truncate_prompt_tokens": _UNSET_VALUES,
    "spaces_between_special_tokens": (None, True),
    "logits_processors": _UNSET_VALUES,
    "kv_transfer_params": _UNSET_VALUES,
    "vllm_xargs": _UNSET_VALUES,
}
NEUTRAL_COMPLETION: dict[str, tuple[Any, ...]] = {
    **_NEUTRAL_EVERYWHERE,
    "suffix": (None, ""),
    "prompt_embeds": _UNSET_VALUES,
}
NEUTRAL_CHAT: dict[str, tuple[Any, ...]] = {
    **_NEUTRAL_EVERYWHERE,
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),  # there are no tools to choose from
    "parallel_tool_calls": (None, True, False),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "audio": _UNSET_VALUES,
    "modalities": (None, ["text"]),
    "prediction": _UNSET_VALUES,
    "reasoning_effort": _UNSET_VALUES,
    "include_reasoning": (None, True),
    "verbosity": _UNSET_VALUES,
    "web_search_options": _UNSET_VALUES,
    "documents": (None, []),
    "chat_template": _UNSET_VALUES,
    "echo": (None, False),
    "best_of": (None, 1),
}
# What a message may carry beside its role and content: clients send an answer back whole.
NEUTRAL_MESSAGE: dict[str, tuple[Any, ...]] = {
    "name": _UNSET_VALUES,
    "refusal": _UNSET_VALUES,
    "audio": _UNSET_VALUES,
    "annotations": (None, []),
    "tool_calls": (None, []),
    "tool_call_id": _UNSET_VALUES,
    "function_call": _UNSET_VALUES,
    "parsed": _UNSET_VALUES,
    "reasoning": _UNSET_VALUES,
    "reasoning_content": _UNSET_VALUES,
}

Label = Annotated[str, Meta(max_length=512)]


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # only false: chunks are never padded


Milliseconds = Annotated[float, Meta(ge=1e-3, le=1e9)]


class Slo(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What latency is promised, in milliseconds: to the first token, per token after it, to the
    end.
    """

    ttft: Milliseconds | None = None
    tpot: Milliseconds | None = None
    e2el: Milliseconds | None = None

    def target(self) -> LatencyTarget:
        def seconds(limit: float | None) -> float | None:
            return None if limit is None else limit / 1000

        return LatencyTarget(seconds(self.ttft), seconds(self.tpot), seconds(self.e2el))


if TYPE_CHECKING:

    class SamplingFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
        def __getattr__(self, name: str) -> Any: ...

else:
    # A field for each sampling parameter (sampling/params.py). `logprobs` means something else in
    # each endpoint, which has a field of its own for it.
    SamplingFields = msgspec.defstruct(
        "SamplingFields",
        [
            (name, row.kind.http_type | None, None)
            for name, row in parameters().items()
            if name != "logprobs"
        ],
        kw_only=True,
        forbid_unknown_fields=True,
    )


class GenerateRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """The fields that both ways to generate have. A null is the default."""

    model: str | None = None  # None: the model that is served
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    # vLLM's extensions
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] | None = None
    # Without NUL, which ends the salt of an API key (keys.py).
    cache_salt: Annotated[str, Meta(min_length=1, max_length=512, pattern=r"^[^\0]*$")] | None = (
        None
    )
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    return_prediction_details: bool | None = None  # in the usage: draft tokens accepted or not
    slo: Slo | None = None  # what this request is promised, in place of the server's own

    user: Label | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    metadata: (
        Annotated[
            dict[Annotated[str, Meta(max_length=64)], Label],
            Meta(max_length=16),
        ]
        | None
    ) = None


# What is in it is checked a list at a time: one call for all would hold up everyone.
Prompts = Annotated[
    list[Any],
    Meta(
        extra_json_schema={
            "items": {
                "anyOf": [
                    {"type": "string"},
                    {"type": "integer"},
                    {"type": "array", "items": {"type": "integer"}},
                ]
            }
        }
    ),
]


class CompletionRequest(GenerateRequest, kw_only=True, forbid_unknown_fields=True):
    """``prompt``: a text, its token ids, or a list of either."""

    prompt: str | Prompts
    best_of: int | None = None  # only the value of n
    echo: bool | None = None
    logprobs: int | None = None


class ChatRequest(GenerateRequest, kw_only=True, forbid_unknown_fields=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None  # the same as max_tokens
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Either ``prompt`` or ``messages``, which go through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None  # None: true for a prompt, false for messages
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    tokens: list[int]


# What a field of a long body may have, beside what its model could use (`most_values`).
_MOST_VALUES = {
    "logit_bias": MAX_LOGIT_BIASES,
    "stop": MAX_STOP_STRINGS,
    "stop_token_ids": MAX_STOP_TOKEN_IDS,
    "metadata": 16,
}
_OTHER_VALUES = 4096
_MOST_IDS = 1 << 20  # of all prompts of a request: as many as may wait


def most_values(each: int) -> dict[str, int]:
    """How many values each field of a request may have; ``each``: entries of a list."""
    ids = ("allowed_token_ids", "banned_token_ids", "tokens")
    return {
        **_MOST_VALUES,
        **dict.fromkeys(ids, each),
        "prompt": max(each, _MOST_IDS),
        "messages": each,
    }


_PROMPT: Any = str | int | list[int]  # or, where it is a number, a part of one
_LONG_LIST = 1 << 16  # entries; what is no longer is checked in a millisecond

R = TypeVar("R", bound=msgspec.Struct)

_NEUTRAL_OF: dict[type[msgspec.Struct], dict[str, tuple[Any, ...]]] = {
    CompletionRequest: NEUTRAL_COMPLETION,
    ChatRequest: NEUTRAL_CHAT,
    TokenizeRequest: {},
    DetokenizeRequest: {},
}


def parse(fields: dict[str, Any], to: type[R], longest: int = 0) -> R:
    """The request in ``fields``. Raises `ApiError` 400 naming what is unknown or not supported, and
    a list or map that has more than ``longest`` entries and is long: checking its entries would
    hold up everyone, for that is one call into C.
    """
    drop_neutral(fields, _NEUTRAL_OF[to], "")
    known = to.__struct_fields__
    for name in fields:
        if name not in known:
            raise ApiError(400, f"unknown parameter: {name}", name)
    most = max(longest, _LONG_LIST)
    for path, entries in _sizes(fields):
        if entries > most:
            raise ApiError(400, f"{path} has {entries} entries, more than {most}", path)
    request = convert(fields, to)
    if isinstance(request, CompletionRequest) and isinstance(request.prompt, list):
        _check_prompts(request.prompt)
    return request


def read(body: bytes, to: type[R], longest: int) -> R:
    """`parse` of what is in ``body``, which is counted before it is decoded."""
    each = max(longest, _LONG_LIST)
    check_counts(body, most_values(each), _OTHER_VALUES, each)
    return parse(decode_object(body), to, longest)


def _sizes(fields: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """Entries of what is checked in one call: each field, with all maps in it, and each list in
    one.
    """
    for name, value in fields.items():
        if isinstance(value, dict):
            yield name, len(value)
        elif isinstance(value, list):
            yield name, len(value) + sum(len(item) for item in value if isinstance(item, dict))
            for index, item in enumerate(value):
                if isinstance(item, list):
                    yield f"{name}[{index}]", len(item)


def _check_prompts(prompts: list[Any]) -> None:
    if not any(isinstance(item, list) for item in prompts):
        convert(prompts, list[str | int], "prompt")
        return
    for index, item in enumerate(prompts):
        convert(item, _PROMPT, f"prompt[{index}]")


def drop_neutral(fields: dict[str, Any], neutral: dict[str, tuple[Any, ...]], path: str) -> None:
    """Take out of ``fields`` what asks for nothing. Raises `ApiError` 400 for the rest."""
    for name in fields.keys() & neutral.keys():
        value = fields[name]
        # By type as well: 1 == True and 0 == False, but a number is no switch.
        if not any(type(value) is type(ok) and value == ok for ok in neutral[name]):
            raise ApiError(400, f"{path}{name} is not supported by this server", path + name)
        del fields[name]
