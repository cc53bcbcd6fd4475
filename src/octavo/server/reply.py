"""An answer in the making: what a route must write of it, and what is counted of it."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from functools import cached_property
from typing import Literal

from octavo.engine.outputs import Delta, TokenLogprobs
from octavo.scheduler.request import FinishReason, RequestRecord
from octavo.server.errors import ApiError
from octavo.server.model import ServedModel
from octavo.server.prompts import Prompt
from octavo.server.protocol import GenerateRequest
from octavo.server.responses import (
    CompletionTokensDetails,
    PromptTokensDetails,
    TokenShower,
    Usage,
    json,
)


class Output:
    """One choice of an answer that is sent whole."""

    __slots__ = ("finish_reason", "logprobs", "prompt_logprobs", "stop_reason", "text", "token_ids")

    def __init__(self) -> None:
        self.text: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None

    def add(self, delta: Delta) -> None:
        self.text.append(delta.text)
        self.token_ids += delta.token_ids
        if delta.logprobs:
            self.logprobs += delta.logprobs
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self.stop_reason = delta.stop_reason

    @property
    def size(self) -> int:
        """About how much there is to write: what takes time is each token's text, and each of its
        alternatives'.
        """
        size = len(self.text)
        for entries in (self.logprobs, self.prompt_logprobs or ()):
            if entries:
                size += len(entries) * (2 + len(entries[-1].top if entries[-1] else ()))
        return size

    @property
    def finish(self) -> Literal["stop", "length"] | None:
        """The reason as the API says it. Other ends are errors and have no choice to be in."""
        if self.finish_reason is FinishReason.STOP:
            return "stop"
        return "length" if self.finish_reason is FinishReason.LENGTH else None


class Reply(ABC):
    """How one request's answer is written. Choice ``index`` is prompt × n + sequence."""

    def __init__(
        self,
        model: ServedModel,
        request: GenerateRequest,
        prompts: list[Prompt],
        *,
        prefix: str,
        chunk_object: str,
        force_usage: bool,
    ) -> None:
        if request.stream_options is not None:
            if not request.stream:
                raise ApiError(400, "stream_options needs stream to be true", "stream_options")
            if request.stream_options.include_obfuscation:
                raise ApiError(
                    400,
                    "stream_options.include_obfuscation is not supported by this server",
                    "stream_options.include_obfuscation",
                )
        options = request.stream_options
        self.id = f"{prefix}-{uuid.uuid4().hex}"
        self.model = model
        self.request = request
        self.prompts = prompts
        self.n = request.n or 1
        self.created = int(time.time())
        self.include_usage = force_usage or bool(options and options.include_usage)
        self.continuous_usage = bool(options and options.continuous_usage_stats)
        self.records: list[RequestRecord] = []  # the live ones, once submitted
        self.shower = TokenShower(
            model,
            as_ids=bool(request.return_tokens_as_token_ids),
            specials_in_text=request.skip_special_tokens is False,
        )
        head = json.encode(
            {
                "id": self.id,
                "object": chunk_object,
                "created": self.created,
                "model": model.name,
            }
        )
        self._head = b"data: " + head[:-1] + b',"choices":['

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n

    @abstractmethod
    def chunk(self, index: int, delta: Delta) -> bytes:
        """The events that tell of ``delta``; b"" if there is nothing to tell yet."""

    @abstractmethod
    def whole(self, outputs: list[Output]) -> bytes:
        """The body of an answer that is not streamed."""

    def event(self, choice: bytes, extra: bytes = b"") -> bytes:
        """One choice's chunk; ``extra`` is further members of the object, each after a comma."""
        return b"".join((self._head, choice, b"]", extra, self.usage_member(), b"}\n\n"))

    def usage_member(self) -> bytes:
        """The usage every chunk carries: so far, null, or none, as was asked."""
        if self.continuous_usage:
            return b',"usage":' + json.encode(self._so_far.usage())
        return b',"usage":null' if self.include_usage else b""

    def usage_event(self) -> bytes:
        return self._head + b'],"usage":' + json.encode(self.usage()) + b"}\n\n"

    def usage(self) -> Usage:
        return Usage.of(self.records, predictions=self.request.return_prediction_details)

    def count(self, index: int, delta: Delta) -> None:
        if self.continuous_usage:
            self._so_far.count(index // self.n, len(delta.token_ids))

    @cached_property
    def _so_far(self) -> UsageSoFar:
        return UsageSoFar(self.records, predictions=bool(self.request.return_prediction_details))


class UsageSoFar:
    """The usage of an answer that is being sent. What a delta adds is what has changed of its own
    prompt, so that it costs the same however many prompts there are.
    """

    def __init__(self, records: list[RequestRecord], *, predictions: bool) -> None:
        self._records = records
        self._predictions = predictions
        self._prompt = sum(record.prompt_tokens for record in records)
        self._sent = 0  # the engine may be ahead of what is sent
        self._counted = [(0, 0, 0)] * len(records)  # of each: cached, drafted, accepted
        self._cached = self._drafted = self._accepted = 0

    def count(self, prompt: int, tokens: int) -> None:
        self._sent += tokens
        record, before = self._records[prompt], self._counted[prompt]
        now = (record.cached_tokens, record.draft_tokens, record.accepted_tokens)
        if now != before:
            self._counted[prompt] = now
            self._cached += now[0] - before[0]
            self._drafted += now[1] - before[1]
            self._accepted += now[2] - before[2]

    def usage(self) -> Usage:
        usage = Usage(
            self._prompt, self._sent, self._prompt + self._sent, PromptTokensDetails(self._cached)
        )
        if self._predictions:
            usage.completion_tokens_details = CompletionTokensDetails(
                self._accepted, self._drafted - self._accepted
            )
        return usage
