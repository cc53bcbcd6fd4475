"""An answer in the making: what a route must write of it, and what is counted of it."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from typing import Any, ClassVar

from msgspec.structs import asdict

from octavo.engine.outputs import Delta
from octavo.engine.stream import joined
from octavo.sampling.params import SamplingParams
from octavo.scheduler.request import FinishReason, Request, RequestRecord
from octavo.server.config import ServeConfig
from octavo.server.errors import ApiError
from octavo.server.logprobs import TokenDisplay
from octavo.server.model import ServedModel
from octavo.server.protocol import (
    ChatCompletion,
    Completion,
    Finish,
    GenerateAnswer,
    GenerateRequest,
    Usage,
    json,
    sampling_params,
)
from octavo.server.request_prompts import Prompt


class Reply(ABC):
    """How one request's answer is written. Choice ``index`` is prompt × n + sequence."""

    prefix: ClassVar[str]  # of the answer's id
    chunk_object: ClassVar[str]
    plain_choice: ClassVar[bytes]  # most chunks' choice, with the index and the text as JSON

    def __init__(
        self,
        model: ServedModel,
        config: ServeConfig,
        request: GenerateRequest,
        prompts: list[Prompt],
        *,
        logprobs: bool,
    ) -> None:
        """``logprobs``: whether the answer has them."""
        options = request.stream_options
        if options is not None:
            if not request.stream:
                raise ApiError(400, "stream_options needs stream to be true", "stream_options")
            if options.include_obfuscation:
                name = "stream_options.include_obfuscation"
                raise ApiError(400, f"{name} is not supported by this server", name)
        self.answer = GenerateAnswer(
            id=f"{self.prefix}-{uuid.uuid4().hex}",
            object=self.chunk_object,
            created=int(time.time()),
            model=model.name,
        )
        self.model = model
        self.request = request
        self.prompts = prompts
        self.requests: list[Request] = []  # one a prompt, until they are submitted
        self.aliases: dict[str, str] = {}  # clients' names for the engine's parameters
        self.records: list[RequestRecord] = []  # the live ones, once submitted
        self.n = request.n or 1
        self.include_usage = config.enable_force_include_usage or bool(
            options and options.include_usage
        )
        self.wants_logprobs = logprobs
        self.display = TokenDisplay(
            model,
            as_ids=bool(request.return_tokens_as_token_ids),
            specials_in_text=request.skip_special_tokens is False,
        )
        self._plain = not logprobs and not request.return_token_ids
        self._begun: set[int] = set()  # choices of which a chunk has been sent
        self._usage_so_far: Usage | None = None  # where each chunk has it
        self._counted = [(0, 0, 0)] * len(prompts)  # in it: cached, drafted, accepted
        if options and options.continuous_usage_stats:
            self._usage_so_far = Usage.of([], predictions=request.return_prediction_details)
        self._head = b"data: " + json.encode(self.answer)[:-1] + b',"choices":['
        self._usage = b',"usage":null' if self.include_usage else b""

    def params(self, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """Return what the request and the model's defaults say. Raises `InvalidParameter`."""
        return sampling_params(
            self.request,
            self.model.sampling_defaults,
            choices=len(self.prompts) * self.n,
            max_tokens=max_tokens,
            logprobs=logprobs,
        )

    def add_request(
        self, request_id: str, prompt: Prompt, params: SamplingParams, begun: bytes = b""
    ) -> None:
        """Ask the engine for the answer to ``prompt``."""
        ids = prompt.token_ids
        self.requests.append(
            Request(request_id=request_id, prompt_token_ids=ids, params=params, begun=begun)
        )

    def chunk(self, index: int, delta: Delta) -> bytes:
        """Return the events that tell of ``delta``; b"" if there is nothing to tell yet."""
        if self._usage_so_far is not None:
            self._count(self._usage_so_far, index // self.n, len(delta.token_ids))
        if index not in self._begun:
            self._begun.add(index)
            return self.first_chunk(index, delta)
        return self.next_chunk(index, delta)

    def next_chunk(self, index: int, delta: Delta) -> bytes:
        """Return the events of a choice that has begun."""
        if not self._plain or delta.finish_reason is not None:
            return self.event(self.full_choice(index, delta))
        return (
            self.event(self.plain_choice % (index, json.encode(delta.text))) if delta.text else b""
        )

    @abstractmethod
    def first_chunk(self, index: int, delta: Delta) -> bytes:
        """Return the events with which a choice begins."""

    @abstractmethod
    def full_choice(self, index: int, delta: Delta) -> bytes:
        """Return a choice that has begun with all that is known of it."""

    @abstractmethod
    def whole_answer(self, outputs: list[Delta], **members: Any) -> Completion | ChatCompletion:
        """Return an answer that is not streamed; ``outputs``: all of each choice; ``members``: what
        every answer has.
        """

    def whole(self, deltas: list[list[Delta]]) -> bytes:
        """Return the body of an answer that is not streamed; ``deltas``: those of each choice."""
        outputs = [joined(each)[0] for each in deltas]
        members = asdict(self.answer)
        del members["object"]
        return json.encode(self.whole_answer(outputs, usage=self.usage(), **members))

    def event(self, choice: bytes, extra: bytes = b"") -> bytes:
        """Return one choice's chunk; ``extra``: further members of the object, after a comma."""
        usage = self._usage
        if self._usage_so_far is not None:
            usage = b',"usage":' + json.encode(self._usage_so_far)
        return b"".join((self._head, choice, b"]", extra, usage, b"}\n\n"))

    def usage_event(self) -> bytes:
        return self._head + b'],"usage":' + json.encode(self.usage()) + b"}\n\n"

    def usage(self) -> Usage:
        return Usage.of(self.records, predictions=self.request.return_prediction_details)

    def _count(self, usage: Usage, place: int, tokens: int) -> None:
        """Add what a delta of the prompt at ``place`` brings: its tokens, and what has changed of
        that prompt, so that it costs the same however many prompts there are.
        """
        record, before = self.records[place], self._counted[place]
        now = (record.cached_tokens, record.draft_tokens, record.accepted_tokens)
        self._counted[place] = now
        # Before the first delta, no prompt has been added. The engine may be ahead of what is sent.
        prompts = 0 if usage.prompt_tokens else sum(each.prompt_tokens for each in self.records)
        usage.add(prompts, tokens, *(new - old for new, old in zip(now, before, strict=True)))


def finish(reason: FinishReason | None) -> Finish | None:
    """Return how a choice ended as the API says it. Other ends are errors, without a choice."""
    if reason is FinishReason.STOP:
        return "stop"
    return "length" if reason is FinishReason.LENGTH else None


def size(delta: Delta) -> int:
    """Return about how much there is to write: a text, and each token with its alternatives."""
    size = 1
    for entries in (delta.logprobs, delta.prompt_logprobs):
        if entries:
            size += len(entries) * (2 + len(entries[-1].top if entries[-1] else ()))
    return size
