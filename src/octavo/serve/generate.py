"""A generation over HTTP: submit, watch the client, send what comes, count it once.

The two generate routes differ in how they read a body and write an answer (`Reply`); the way in
between is here.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Literal, NamedTuple

from starlette.types import Receive, Scope, Send

from octavo.engine.async_engine import AsyncEngine, Stream
from octavo.engine.outputs import Delta, TokenLogprobs
from octavo.sample.params import InvalidParameter
from octavo.schedule.request import (
    AdmissionError,
    FinishReason,
    LatencyTarget,
    Request,
    RequestRecord,
)
from octavo.serve.body import read_body
from octavo.serve.config import ServeConfig
from octavo.serve.connection import DirectWrite
from octavo.serve.errors import ApiError, ClientGone, TooMany, as_api_error, unavailable
from octavo.serve.exchange import Exchange
from octavo.serve.gate import headers_of, send_json
from octavo.serve.keys import ApiKey
from octavo.serve.metrics import Metrics
from octavo.serve.model import ServedModel
from octavo.serve.prompts import Prompt
from octavo.serve.protocol import LABELS, GenerateRequest, Slo
from octavo.serve.quota import Charge
from octavo.serve.responses import TokenShower, Usage, json
from octavo.serve.workers import Workers

log = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
_KEEP_ALIVE = b": keep-alive\n\n"
_SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies must not hold tokens back
]


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
        self._sent_tokens = 0

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
            return b',"usage":' + json.encode(self._usage_so_far())
        return b',"usage":null' if self.include_usage else b""

    def usage_event(self) -> bytes:
        return self._head + b'],"usage":' + json.encode(self.usage()) + b"}\n\n"

    def usage(self) -> Usage:
        return Usage.of(self.records, predictions=self.request.return_prediction_details)

    def count(self, delta: Delta) -> None:
        self._sent_tokens += len(delta.token_ids)

    def _usage_so_far(self) -> Usage:
        usage = self.usage()
        usage.completion_tokens = self._sent_tokens  # the engine may be ahead of what is sent
        usage.total_tokens = usage.prompt_tokens + self._sent_tokens
        return usage


class Prepared(NamedTuple):
    """A body read and checked: what to run and how to answer. ``aliases``: what the client calls
    a field that the engine knows by another name.
    """

    requests: list[Request]
    reply: Reply
    aliases: dict[str, str]


class Watch:
    """Notices that the client leaves, in every state of its request."""

    def __init__(self, receive: Receive, on_gone: Callable[[], None]) -> None:
        self.gone = False
        self._receive = receive
        self._on_gone = on_gone
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.leave()

    def leave(self) -> None:
        self.gone = True
        self._on_gone()

    async def close(self) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task


class Generate:
    """A generate route. ``prepare`` reads a body in a worker thread, so that neither a large body
    nor a long prompt holds up other clients' tokens. It raises what `as_api_error` knows.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        config: ServeConfig,
        metrics: Metrics,
        workers: Workers,
        prepare: Callable[[bytes], Prepared],
    ) -> None:
        self._engine = engine
        self._config = config
        self._metrics = metrics
        self._workers = workers
        self._prepare = prepare

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._engine.draining:
            raise self._draining()
        exchange = Exchange.of(scope)
        charge: Charge | None = None
        try:
            # Before a byte of the body is read, for that is quick however busy everyone is.
            if exchange.account is not None:
                charge = exchange.account.open()
            self._engine.check_room(self._workers.pending)
            await self._run(scope, receive, send, exchange, charge)
        except (AdmissionError, InvalidParameter) as error:
            retryable = isinstance(error, AdmissionError) and error.retryable
            self._metrics.rejected["capacity" if retryable else "invalid"].inc()
            raise
        except TooMany as error:
            if error.reason != "shed":  # the record of one that was shed says so
                self._metrics.rejected[error.reason].inc()
            raise
        finally:
            if charge is not None:
                charge.close()

    def _draining(self) -> ApiError:
        self._metrics.rejected["draining"].inc()
        return unavailable("the server is shutting down", close=True)

    async def _run(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        exchange: Exchange,
        charge: Charge | None,
    ) -> None:
        body = await read_body(headers_of(scope), receive, self._config.max_request_bytes)
        key = None if exchange.account is None else exchange.account.key
        # Others have come meanwhile; and who asks for nothing of its own is known by now.
        asks = None
        if b'"slo"' not in body and b'"priority"' not in body:
            asks = RequestRecord("", time.monotonic(), 0, target=self._target(None, key))
            if key is not None:
                asks.client, asks.priority = key.name, key.priority
        self._engine.check_room(self._workers.pending, asks)
        streams: list[Stream] = []

        def abort() -> None:
            for stream in streams:
                stream.abort()

        watch = Watch(receive, abort)
        try:
            prepared = await self._workers.run(self._prepare, body)
            if watch.gone:
                raise ClientGone
            exchange.answer_id = prepared.reply.id
            exchange.asked = prepared.reply.request
            exchange.model = prepared.reply.model.name
            exchange.labels = {
                name: value
                for name in LABELS
                if (value := getattr(prepared.reply.request, name)) is not None
            }
            self._on_terms(prepared, key)
            if charge is not None:
                charge.prompt(sum(map(_prompt_tokens, prepared.requests)))
            await self._submit(prepared, streams)
            prepared.reply.records = [stream.record for stream in streams]
            exchange.records = prepared.reply.records
            if charge is not None:
                charge.of(exchange.records)
            if prepared.reply.request.stream:
                writer = _Writer(
                    send, DirectWrite.of(scope), watch, self._config.stream_write_timeout
                )
                failure = await self._stream(prepared.reply, streams, watch, writer)
                exchange.error_type = failure.type if failure is not None else ""
            else:
                await self._whole(prepared.reply, streams, watch, send)
        finally:
            abort()  # what did not come to its end, for nobody reads it any more
            await watch.close()

    def _on_terms(self, prepared: Prepared, key: ApiKey | None) -> None:
        """Whose requests they are, how urgent, and promised what latency: as they say themselves,
        else as their key does, else as the server does.
        """
        asked = prepared.reply.request
        target = self._target(asked.slo, key)
        for request in prepared.requests:
            request.target = target
            if key is not None:
                request.client = key.name
                request.weight = key.weight
                request.priority = key.priority_of(asked.priority)

    def _target(self, asked: Slo | None, key: ApiKey | None) -> LatencyTarget | None:
        """Each limit as the first has it that has one."""
        promised: list[LatencyTarget | None] = [
            None if asked is None else asked.target(),
            None if key is None else key.target,
            self._config.slo,
        ]
        targets = [each for each in promised if each is not None]

        def first(limits: Iterable[float | None]) -> float | None:
            return next((limit for limit in limits if limit is not None), None)

        return LatencyTarget(*map(first, zip(*targets, strict=True))) if targets else None

    async def _submit(self, prepared: Prepared, streams: list[Stream]) -> None:
        """All of an answer's requests or, when one is refused, none."""
        try:
            for request in prepared.requests:
                streams.append(self._engine.submit(request))
        except (InvalidParameter, AdmissionError) as error:
            for stream in streams:
                stream.abort()
            async for _ in self._deltas(streams, prepared.reply.n):
                pass
            if self._engine.draining:
                raise self._draining() from None
            error.param = prepared.aliases.get(error.param or "", error.param)
            raise

    async def _whole(self, reply: Reply, streams: list[Stream], watch: Watch, send: Send) -> None:
        outputs = [Output() for _ in range(reply.num_choices)]
        failure: ApiError | None = None
        async for index, delta in self._deltas(streams, reply.n):
            outputs[index].add(delta)
            if failure is None and not watch.gone:
                failure = self._failure(delta, reply.records[index // reply.n])
                if failure is not None:
                    for stream in streams:
                        stream.abort()
        if watch.gone:
            raise ClientGone
        if failure is not None:
            raise failure
        await send_json(send, 200, reply.whole(outputs))

    async def _stream(
        self, reply: Reply, streams: list[Stream], watch: Watch, writer: _Writer
    ) -> ApiError | None:
        """Returns the error that ended the stream, as its client was told."""
        beat = _beat(writer, self._config.sse_keep_alive_interval)
        failure: ApiError | None = None

        def pass_on(index: int, delta: Delta) -> bool:
            """What most deltas need, where nobody has to wait for anything."""
            if delta.finish_reason is not None or watch.gone or not writer.ready:
                return False
            reply.count(delta)
            chunk = reply.chunk(index, delta)
            if chunk:
                writer.write_now(chunk)
            return True

        try:
            async for index, delta in self._deltas(streams, reply.n, pass_on):
                if watch.gone or failure is not None:
                    continue  # ends soon; its record still counts
                failure = self._failure(delta, reply.records[index // reply.n])
                if failure is not None:
                    for stream in streams:
                        stream.at_once = None
                        stream.abort()
                    continue
                reply.count(delta)
                chunk = reply.chunk(index, delta)
                if chunk:
                    await writer.write(chunk)
        except Exception as error:
            failure = as_api_error(error)
        finally:
            if beat is not None:
                beat.cancel()
            for stream in streams:
                stream.at_once = None
        if watch.gone:
            raise ClientGone
        if failure is not None:
            if not writer.begun:
                raise failure
            end = b"data: " + failure.body() + b"\n\n" + DONE
        elif reply.include_usage:
            end = reply.usage_event() + DONE
        else:
            end = DONE
        await writer.write(end, last=True)
        if watch.gone:
            raise ClientGone
        return failure

    async def _deltas(
        self, streams: list[Stream], n: int, pass_on: Callable[[int, Delta], bool] | None = None
    ) -> AsyncIterator[tuple[int, Delta]]:
        """Every stream's deltas as they come, with the choice they belong to, to the very end of
        each, but those that ``pass_on`` says it has taken. Counts them.
        """
        gaps, together = _Gaps(self._metrics.inter_token.observe), _Together(streams)

        def at_once(prompt: int, record: RequestRecord, delta: Delta) -> bool:
            index = prompt * n + delta.choice
            if together.behind or pass_on is None or not pass_on(index, delta):
                return False
            gaps.count(index, record, delta)
            return True

        if pass_on is not None:
            for prompt, stream in enumerate(streams):
                stream.at_once = partial(at_once, prompt, stream.record)
        async for prompt, delta in together:
            index = prompt * n + delta.choice
            gaps.count(index, streams[prompt].record, delta)
            yield index, delta

    def _failure(self, delta: Delta, record: RequestRecord) -> ApiError | None:
        """What to tell a client whose request ended although neither it nor the model ended it."""
        if delta.finish_reason is FinishReason.ABORT:
            if self._engine.draining:
                return unavailable("the server is shutting down", close=True)
            return ApiError(500, "the request was aborted")
        if delta.finish_reason is FinishReason.SHED:
            why = record.error or "the request has waited too long"
            return TooMany(why, self._engine.forecast().wait, "shed")
        if delta.finish_reason is FinishReason.ERROR:
            log.error("request %s failed: %s", delta.request_id, record.error)
            return ApiError(500, "the request failed in the engine; the server's log says more")
        return None


class _Gaps:
    """The times between the tokens of each choice, by the engine's clock: what waits here for a
    slow client is no latency of its own.
    """

    def __init__(self, observe: Callable[[float], None]) -> None:
        self._observe = observe
        self._last: dict[int, float] = {}  # when each choice had its last token

    def count(self, index: int, record: RequestRecord, delta: Delta) -> None:
        gaps = len(delta.token_ids)
        if not gaps:
            return
        now, before = record.last_token or 0.0, self._last.get(index)
        self._last[index] = now
        if before is None:
            before, gaps = record.first_token or now, gaps - 1
        for _ in range(gaps):
            self._observe((now - before) / gaps)


def _prompt_tokens(request: Request) -> int:
    return len(request.prompt_token_ids)


class _Writer:
    """Sends events, and gives up on a client that takes nothing for ``timeout`` seconds.

    The answer begins with the first of them: until then it can still be another one.
    """

    def __init__(
        self, send: Send, direct: DirectWrite | None, watch: Watch, timeout: float
    ) -> None:
        self._send = send
        self._direct = direct
        self._watch = watch
        self._timeout = timeout
        self._writing = False
        self.begun = False
        self.last_write = time.monotonic()

    @property
    def ready(self) -> bool:
        """Whether `write_now` may be called."""
        return self._direct is not None and self.begun and not self._writing and self._direct.ready

    def write_now(self, data: bytes) -> None:
        assert self._direct is not None
        self._direct.write(data)
        self.last_write = time.monotonic()

    async def write(self, data: bytes, *, last: bool = False) -> None:
        self._writing = True
        try:
            async with asyncio.timeout(self._timeout):
                if not self.begun:
                    self.begun = True
                    await self._send(
                        {"type": "http.response.start", "status": 200, "headers": _SSE_HEADERS}
                    )
                await self._send(
                    {"type": "http.response.body", "body": data, "more_body": not last}
                )
            self.last_write = time.monotonic()
        except TimeoutError:
            log.warning("a client took nothing for %g s and is dropped", self._timeout)
            self._watch.leave()
        finally:
            self._writing = False


def _beat(writer: _Writer, interval: float) -> asyncio.Task[None] | None:
    """Keeps a silent stream alive with comments, which clients skip."""
    if not interval:
        return None

    async def beat() -> None:
        while True:
            await asyncio.sleep(max(0.0, writer.last_write + interval - time.monotonic()))
            if time.monotonic() - writer.last_write >= interval:
                await writer.write(_KEEP_ALIVE)

    return asyncio.create_task(beat())


class _Together:
    """(which stream, its next delta), whichever comes first. One that fails ends all."""

    def __init__(self, streams: list[Stream]) -> None:
        self.behind = 0  # deltas that have left their streams and have not been dealt with
        self._streams = streams

    async def __aiter__(self) -> AsyncIterator[tuple[int, Delta]]:
        if len(self._streams) == 1:
            async for delta in self._streams[0]:
                yield 0, delta
            return
        # One place in the queue: what its reader has not taken waits, joined, in the engine's
        # stream.
        queue: asyncio.Queue[tuple[int, Delta] | Exception | None] = asyncio.Queue(1)

        async def pump(which: int, stream: Stream) -> None:
            try:
                async for delta in stream:
                    self.behind += 1
                    await queue.put((which, delta))
            except Exception as error:
                await queue.put(error)
            else:
                await queue.put(None)

        tasks = [
            asyncio.create_task(pump(which, stream)) for which, stream in enumerate(self._streams)
        ]
        try:
            running = len(tasks)
            while running:
                item = await queue.get()
                if item is None:
                    running -= 1
                elif isinstance(item, Exception):
                    raise item
                else:
                    yield item
                    self.behind -= 1
        finally:
            for task in tasks:
                task.cancel()
