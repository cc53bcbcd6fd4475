"""A tokenizer of bytes, a template and an engine that a test drives by hand."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.engine.engine import Observer
from octavo.engine.outputs import Delta, TokenLogprobs
from octavo.engine.stats import EngineStats
from octavo.engine.stream import EngineDead
from octavo.loader.base import ChatTemplateError
from octavo.scheduler.admission import Forecast
from octavo.scheduler.request import AdmissionError, FinishReason, Outcome, Request, RequestRecord
from octavo.server.model import ServedModel

BOS, EOS = 256, 257
VOCAB = 258
MODEL = "tiny"


class ByteTokenizer:
    """Token i < 256 is byte i; 256 begins a text, 257 ends a turn."""

    vocab_size = VOCAB
    eos_token_ids = frozenset({EOS})

    def __init__(self, add_bos: bool = False) -> None:
        self.bos_token_id = BOS if add_bos else None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = []
        for index, part in enumerate(text.split("<eos>")):
            ids += ([EOS] if index else []) + list(part.encode())
        return [BOS, *ids] if add_special_tokens and self.bos_token_id is not None else ids

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        parts = (
            self.token_bytes(token)
            if token < 256
            else (b"" if skip_special_tokens else self.token_text(token).encode())
            for token in token_ids
        )
        return b"".join(parts).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b""

    def token_text(self, token_id: int) -> str:
        if token_id >= 256:
            return {BOS: "<bos>", EOS: "<eos>"}[token_id]
        return bytes([token_id]).decode(errors="replace")

    def is_special(self, token_id: int) -> bool:
        return token_id >= 256


class PlainTemplate:
    """``role:content`` lines; wants roles to alternate, as many templates do."""

    def check(self) -> None:
        """It can be used."""

    def render(self, messages: list[dict[str, object]], **kwargs: object) -> str:
        roles = [message["role"] for message in messages if message["role"] != "system"]
        if any(a == b for a, b in itertools.pairwise(roles)):
            raise ChatTemplateError("Conversation roles must alternate")
        lines = [f"{message['role']}:{message['content']}\n" for message in messages]
        if kwargs.get("shout"):
            lines = [line.upper() for line in lines]
        return "".join(lines) + ("assistant:" if kwargs["add_generation_prompt"] else "")


def served_model(**changes: Any) -> ServedModel:
    facts: dict[str, Any] = {
        "names": (MODEL, "alias"),
        "tokenizer": ByteTokenizer(),
        "chat_template": PlainTemplate(),
        "max_model_len": 512,
        "root": "tiny.gguf",
    }
    return ServedModel(**(facts | changes))


class FakeStream(AsyncIterator[Delta]):
    def __init__(self, engine: FakeEngine, request: Request) -> None:
        self.request = request
        self.request_id = request.request_id
        self.record = RequestRecord(
            request_id=request.request_id,
            arrival=time.monotonic(),
            prompt_tokens=len(request.prompt_token_ids),
            n=request.params.n,
            max_tokens=request.params.max_tokens,
            scheduling=request.scheduling,
        )
        self.queue: asyncio.Queue[Delta | Exception | None] = asyncio.Queue()
        self._engine = engine
        self._made = [0] * request.params.n

    def __aiter__(self) -> FakeStream:
        return self

    async def __anext__(self) -> Delta:
        item = await self.queue.get()
        if item is None:
            raise StopAsyncIteration
        if isinstance(item, Exception):
            raise item
        return item

    def abort(self) -> None:
        if self.record.outcome is None:
            self._engine.aborted.append(self.request_id)
            self.end(FinishReason.ABORT, Outcome.ABORTED)

    def end(self, reason: FinishReason, outcome: Outcome, error: str | None = None) -> None:
        record = self.record
        record.outcome, record.error = outcome, error
        record.finished = time.monotonic()
        record.finish_reasons = [reason] * record.n
        for choice in range(record.n):
            last = record if choice == record.n - 1 else None
            self.queue.put_nowait(
                Delta(self.request_id, choice, "", [], finish_reason=reason, record=last)
            )
        self.leave()

    def leave(self) -> None:
        self.queue.put_nowait(None)
        self._engine.streams.remove(self)
        for observer in self._engine.observers:
            observer.on_end(self.record)

    def step(self) -> None:
        """One token for each choice."""
        record, params = self.record, self.request.params
        now = time.monotonic()
        record.scheduled = record.scheduled or now
        first = record.first_token is None
        record.first_token = record.first_token or now
        record.last_token = now
        said = self._engine.text.encode()
        limit = params.max_tokens or len(said)
        prompt_logprobs = None
        if first and params.prompt_logprobs is not None:
            ids = self.request.prompt_token_ids
            prompt_logprobs = [None, *(_logprobs(i, params.prompt_logprobs) for i in ids[1:])]
        for choice in range(params.n):
            token = said[self._made[choice] % len(said)]
            self._made[choice] += 1
            record.completion_tokens += 1
            self._engine.generated += 1
            reason = None
            if self._made[choice] >= limit:
                reason = FinishReason.LENGTH if params.max_tokens else FinishReason.STOP
            last = reason is not None and choice == params.n - 1
            if last:
                record.outcome = Outcome.FINISHED
                record.finished = now
                record.finish_reasons = [reason] * params.n
            logprobs = None
            if params.logprobs is not None:
                logprobs = [_logprobs(token, params.logprobs)]
            self.queue.put_nowait(
                Delta(
                    self.request_id,
                    choice,
                    chr(token),
                    [token],
                    logprobs=logprobs,
                    finish_reason=reason,
                    prompt_logprobs=prompt_logprobs if choice == 0 else None,
                    record=record if last else None,
                    at=now,
                )
            )
        if record.outcome is not None:
            self.leave()


def _logprobs(token: int, top: int) -> TokenLogprobs:
    others = tuple((i, -0.5 - i) for i in range(97, 97 + top))
    return TokenLogprobs(token, float("-inf") if token == ord("b") else -1.5, 2, others)


@dataclass
class FakeEngine:
    """Says ``text`` to everyone. ``auto``: steps by itself; else a test calls `step`."""

    text: str = "Hello, world"
    auto: bool = True
    pause: float = 0.0  # seconds between tokens
    max_model_len: int = 512
    queue_full: int | None = None  # refuse when so many are running
    fair_queue: int | None = None
    alive: bool = True
    draining: bool = False
    streams: list[FakeStream] = field(default_factory=list)
    submitted: list[Request] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    observers: list[Observer] = field(default_factory=list)
    generated: int = 0
    unsent: int = 0
    prompt_tokens: int = 0
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def check_room(self, pending: int = 0, asks: RequestRecord | None = None) -> None:
        if self.queue_full is not None and len(self.streams) + pending >= self.queue_full:
            raise AdmissionError("the queue is full", retryable=True, retry_after=2.5)

    def forecast(self) -> Forecast:
        return Forecast(2.5, 3.0, 0.1)

    def check(self, request: Request) -> Request:
        request.params.validated(VOCAB)
        prompt, wanted = len(request.prompt_token_ids), request.params.max_tokens or 1
        if prompt + wanted > self.max_model_len:
            raise AdmissionError(
                f"the prompt has {prompt} tokens and max_tokens is {wanted}: together more than "
                f"the context of {self.max_model_len}",
                "max_tokens" if prompt < self.max_model_len else "prompt",
            )
        return request

    def reject(self, requests: Sequence[Request], error: ValueError) -> None: ...

    def submit_all(self, requests: Sequence[Request]) -> list[FakeStream]:
        if not self.alive:
            raise EngineDead("the engine thread has stopped")
        if self.draining:
            raise AdmissionError("the engine is draining", retryable=True)
        self.check_room(len(requests) - 1)
        return [self._submit(request) for request in requests]

    def _submit(self, request: Request) -> FakeStream:
        self.prompt_tokens += len(request.prompt_token_ids)
        stream = FakeStream(self, request)
        self.submitted.append(request)
        self.streams.append(stream)
        if self.auto:
            task = asyncio.get_running_loop().create_task(self._run(stream))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return stream

    def observe(self, observer: Observer) -> None:
        self.observers.append(observer)

    async def _run(self, stream: FakeStream) -> None:
        while stream.record.outcome is None:
            stream.step()
            await asyncio.sleep(self.pause)

    def step(self) -> None:
        for stream in list(self.streams):
            stream.step()

    def die(self) -> None:
        self.alive = False
        for stream in self.streams:
            stream.queue.put_nowait(EngineDead("the engine thread has stopped"))

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self.streams),
            kv_blocks=100,
            generation_tokens=self.generated,
            prompt_tokens=self.prompt_tokens,
        )

    async def drain(self, timeout: float | None = None) -> bool:
        self.draining = True
        deadline = time.monotonic() + (timeout or 0)
        while self.streams and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        clean = not self.streams
        for stream in list(self.streams):
            stream.end(FinishReason.ABORT, Outcome.ABORTED)
        return clean


def events(text: str) -> list[Any]:
    """The events of a stream; each is one line of JSON, the last is [DONE]."""
    parts = text.split("\n\n")
    assert parts.pop() == ""
    assert all(part.startswith("data: ") and "\n" not in part for part in parts)
    assert parts.pop() == "data: [DONE]"
    return [json.loads(part.removeprefix("data: ")) for part in parts]
