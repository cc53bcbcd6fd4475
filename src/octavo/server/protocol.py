"""The bodies of requests and answers, field by field.

A field of a request is one of three things:

- **honoured**: a field of the structs below. The fields of `SamplingFields` are passed on to
  `SamplingParams` (`sampling_params`).
- **a label** (`LABELS`): it is checked and logged, and never changes an answer.
- **refused**: the ``NEUTRAL_…`` tables list fields that clients send although they ask for nothing
  by them. They are accepted with one of the listed values, which mean what this server does anyway.
  Any other value, and every name not in this file, is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from octavo.engine.snapshot import EngineSnapshot
from octavo.sampling.params import (
    MAX_LOGIT_BIASES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    InvalidParameter,
    SamplingParams,
    parameters,
)
from octavo.scheduler.request import LatencyTarget, RequestRecord, SchedulingParams
from octavo.server.body import convert, decode_object
from octavo.server.counting import check_counts
from octavo.server.errors import ApiError

# What identifies the caller or the conversation to OpenAI; here it is only written to the log.
LABELS = ("user", "safety_identifier", "prompt_cache_key", "metadata")

Neutral = dict[str, tuple[Any, ...]]  # a field's values that ask for nothing


def _unset(*names: str) -> Neutral:
    """Return fields that may only be null."""
    return dict.fromkeys(names, (None,))


_NEUTRAL_EVERYWHERE: Neutral = {
    **_unset("prompt_cache_retention", "prompt_cache_options", "moderation"),
    **_unset("structured_outputs", "guided_json", "guided_regex", "guided_choice"),
    **_unset("guided_grammar", "truncate_prompt_tokens", "logits_processors"),
    **_unset("kv_transfer_params", "vllm_xargs"),
    "store": (None, False),
    "service_tier": (None, "auto", "default"),
    "response_format": (None, {"type": "text"}),
    "use_beam_search": (None, False),
    "length_penalty": (None, 1, 1.0),
    "bad_words": (None, []),
    "spaces_between_special_tokens": (None, True),
}
NEUTRAL_COMPLETION: Neutral = {
    **_NEUTRAL_EVERYWHERE,
    **_unset("prompt_embeds"),
    "suffix": (None, ""),
}
NEUTRAL_CHAT: Neutral = {
    **_NEUTRAL_EVERYWHERE,
    **_unset("audio", "prediction", "reasoning_effort", "verbosity", "web_search_options"),
    **_unset("chat_template"),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),  # there are no tools to choose from
    "parallel_tool_calls": (None, True, False),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
    "include_reasoning": (None, True),
    "documents": (None, []),
    "echo": (None, False),
    "best_of": (None, 1),
}
# What a message may carry beside its role and content: clients send an answer back whole.
NEUTRAL_MESSAGE: Neutral = {
    **_unset("name", "refusal", "audio", "tool_call_id", "function_call", "parsed", "reasoning"),
    **_unset("reasoning_content"),
    "annotations": (None, []),
    "tool_calls": (None, []),
}

Label = Annotated[str, Meta(max_length=512)]


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # only false: chunks are never padded


Milliseconds = Annotated[float, Meta(ge=1e-3, le=1e9)]


class RequestSlo(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The latency that is promised, in milliseconds: to the first token, per token after it, to the
    end.
    """

    ttft: Milliseconds | None = None
    tpot: Milliseconds | None = None
    e2el: Milliseconds | None = None

    def target(self) -> LatencyTarget:
        limits = (self.ttft, self.tpot, self.e2el)
        return LatencyTarget(*(None if limit is None else limit / 1000 for limit in limits))


RequestSlo.__name__ = "Slo"  # in /openapi.json, and so in the clients that are generated from it


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
    # Without NUL, which ends the salt of an API key (api_keys.py).
    cache_salt: Annotated[str, Meta(min_length=1, max_length=512, pattern=r"^[^\0]*$")] | None = (
        None
    )
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    return_prediction_details: bool | None = None  # in the usage: draft tokens accepted or not
    slo: RequestSlo | None = None  # what this request is promised, in place of the server's own

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


# Its content is checked one list at a time: one call for all would hold up everyone.
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
    """``prompt`` is a text, its token ids, or a list of either."""

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


# Answers. What OpenAI's API does not have is left out unless it was asked for.

json = msgspec.json.Encoder()
Finish = Literal["stop", "length"]


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    """Draft tokens that became output, and those checked in vain (not charged)."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET

    @staticmethod
    def of(records: list[RequestRecord], *, predictions: bool | None = False) -> Usage:
        usage = Usage(0, 0, 0, PromptTokensDetails(0))
        if predictions:
            usage.completion_tokens_details = CompletionTokensDetails(0, 0)
        for record in records:
            usage.add(
                record.prompt_tokens,
                record.completion_tokens,
                record.cached_tokens,
                record.draft_tokens,
                record.accepted_tokens,
            )
        return usage

    def add(self, prompt: int, completion: int, cached: int, drafted: int, accepted: int) -> None:
        self.prompt_tokens += prompt
        self.completion_tokens += completion
        self.total_tokens += prompt + completion
        self.prompt_tokens_details.cached_tokens += cached
        if self.completion_tokens_details is not UNSET:
            self.completion_tokens_details.accepted_prediction_tokens += accepted
            self.completion_tokens_details.rejected_prediction_tokens += drafted - accepted


class CompletionLogprobs(msgspec.Struct):
    text_offset: list[int]  # characters from the start of this choice's text
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatLogprob]


class PromptLogprob(msgspec.Struct):
    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]  # by token id; None for the first token


class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Finish | None
    stop_reason: str | int | None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class GenerateAnswer(msgspec.Struct, kw_only=True):
    """What every answer has, and every chunk of a streamed one."""

    id: str
    object: str
    created: int
    model: str


class Completion(GenerateAnswer, kw_only=True):
    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]
    usage: Usage


class ChatMessage(msgspec.Struct, kw_only=True):
    role: str
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish | None
    stop_reason: str | int | None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(GenerateAnswer, kw_only=True):
    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ModelCard(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "octavo"
    root: str
    parent: None = None
    max_model_len: int


class ModelList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Tokenized(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(msgspec.Struct):
    prompt: str


class Version(msgspec.Struct):
    version: str


class ServerStatus(msgspec.Struct):
    model: str
    version: str
    draining: bool
    engine: EngineSnapshot


class ErrorBody(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: int


class ErrorAnswer(msgspec.Struct):
    error: ErrorBody


# How many values a field of a long body may have, beside what its model could use (`most_values`).
_MOST_VALUES = {
    "logit_bias": MAX_LOGIT_BIASES,
    "stop": MAX_STOP_STRINGS,
    "stop_token_ids": MAX_STOP_TOKEN_IDS,
    "metadata": 16,
}
_OTHER_VALUES = 4096
_MOST_IDS = 1 << 20  # of all prompts of a request: as many as may wait


def most_values(each: int) -> dict[str, int]:
    """Return how many values each field of a request may have; ``each``: entries of a list."""
    longer = ("allowed_token_ids", "banned_token_ids", "tokens", "messages")
    return {**_MOST_VALUES, **dict.fromkeys(longer, each), "prompt": max(each, _MOST_IDS)}


_PROMPT: Any = str | int | list[int]  # or, where it is a number, a part of one
_LONG_LIST = 1 << 16  # entries; what is no longer is checked in a millisecond

R = TypeVar("R", bound=msgspec.Struct)

_NEUTRAL_OF: dict[type[msgspec.Struct], Neutral] = {
    CompletionRequest: NEUTRAL_COMPLETION,
    ChatRequest: NEUTRAL_CHAT,
}


def parse(fields: dict[str, Any], to: type[R], longest: int = 0) -> R:
    """Return the request in ``fields``.

    Raises `ApiError` 400 naming what is unknown or not supported, and any list or map that is long
    and has more than ``longest`` entries: checking its entries is one call into C, which would hold
    up everyone.
    """
    drop_neutral(fields, _NEUTRAL_OF.get(to, {}), "")
    refuse_unknown(fields, to.__struct_fields__, "")
    most = max(longest, _LONG_LIST)
    for path, entries in _sizes(fields):
        if entries > most:
            raise ApiError(400, f"{path} has {entries} entries, more than {most}", path)
    request = convert(fields, to)
    if isinstance(request, CompletionRequest) and isinstance(request.prompt, list):
        _check_prompts(request.prompt)
    return request


def read(body: bytes, to: type[R], longest: int) -> R:
    """Count what is in ``body``, then decode and `parse` it."""
    each = max(longest, _LONG_LIST)
    check_counts(body, most_values(each), _OTHER_VALUES, each)
    return parse(decode_object(body), to, longest)


def _sizes(fields: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield the path and the entries of what is checked in one call: each field with all maps in
    it, and each list in a field.
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


def drop_neutral(fields: dict[str, Any], neutral: Neutral, path: str) -> None:
    """Remove from ``fields`` what asks for nothing. Raises `ApiError` 400 for other values."""
    for name in fields.keys() & neutral.keys():
        value = fields[name]
        # By type as well: 1 == True and 0 == False, but a number is no switch.
        if not any(type(value) is type(ok) and value == ok for ok in neutral[name]):
            raise ApiError(400, f"{path}{name} is not supported by this server", path + name)
        del fields[name]


def refuse_unknown(fields: Mapping[str, Any], known: tuple[str, ...], path: str) -> None:
    """Raise `ApiError` 400 for the first name that is not ``known``."""
    for name in fields:
        if name not in known:
            raise ApiError(400, f"unknown parameter: {path}{name}", path + name)


# Parameters that are passed on as they are: each endpoint makes its own sense of the other two.
_SAMPLING = tuple(name for name in parameters() if name not in ("max_tokens", "logprobs"))
_TOKEN_LISTS = ("logit_bias", "allowed_token_ids", "banned_token_ids", "stop_token_ids")
# Entries of such lists, over all choices: each sequence keeps its own, and a short body can ask for
# a whole vocabulary in a thousand choices.
_MOST_TOKEN_ENTRIES = 1 << 20


def sampling_params(
    request: GenerateRequest,
    defaults: Mapping[str, Any],
    *,
    choices: int,
    max_tokens: int | None,
    logprobs: int | None,
) -> SamplingParams:
    """Return what the request says, or else ``defaults`` (the model's own) say.

    ``choices``: how many sequences will have these parameters. The engine validates them against
    the model. Raises `InvalidParameter`.
    """
    for name in _TOKEN_LISTS:
        count = len(getattr(request, name) or ())
        if count * choices > _MOST_TOKEN_ENTRIES:
            raise InvalidParameter(
                name,
                f"{name} has {count} tokens for each of {choices} choices: {count * choices}, "
                f"more than {_MOST_TOKEN_ENTRIES}",
            )
    fields: dict[str, Any] = {}
    for name in _SAMPLING:
        value = getattr(request, name)
        if value is None:
            value = defaults.get(name)
        elif isinstance(value, list):
            value = tuple(value)
        if value is not None:
            fields[name] = value
    if isinstance(request.stop, str):
        fields["stop"] = (request.stop,)
    if request.logit_bias is not None:
        fields["logit_bias"] = _logit_bias(request.logit_bias)
    return SamplingParams(max_tokens=max_tokens, logprobs=logprobs, **fields)


# Fields that are passed on as they are: those that both have.
_SCHEDULING = SchedulingParams.__dataclass_fields__.keys() & {*GenerateRequest.__struct_fields__}


def scheduling_params(request: GenerateRequest, *targets: LatencyTarget | None) -> SchedulingParams:
    """Return what the request says. A limit that it does not set is that of the first of
    ``targets`` that does.
    """
    given = {name: value for name in _SCHEDULING if (value := getattr(request, name)) is not None}
    own = None if request.slo is None else request.slo.target()
    return SchedulingParams(target=LatencyTarget.first_of(own, *targets), **given)


def _logit_bias(bias: dict[str, float]) -> dict[int, float]:
    """Return the biases by token id. JSON's keys are texts: "42" is token 42."""
    by_id: dict[int, float] = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise InvalidParameter("logit_bias", f"logit_bias: {key!r} is not a token id")
        if int(key) in by_id:
            raise InvalidParameter("logit_bias", f"logit_bias: token {int(key)} is given twice")
        by_id[int(key)] = value
    return by_id
