"""A generation over HTTP: submit, watch the client, send what comes, count it once.

The two generate routes differ in how they read a body and write an answer (`Reply`); the way in
between is here.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import NamedTuple

from starlette.types import Receive, Scope, Send

from octavo.engine.async_engine import AsyncEngine
from octavo.engine.outputs import Delta
from octavo.engine.stream import EngineDead, Stream
from octavo.sampling.params import InvalidParameter
from octavo.scheduler.request import (
    AdmissionError,
    FinishReason,
    LatencyTarget,
    Request,
    RequestRecord,
)
from octavo.server.body import Bodies, Watch, unless_gone
from octavo.server.config import ServeConfig
from octavo.server.deltas import Gaps, Together
from octavo.server.errors import (
    ApiError,
    ClientGone,
    TooMany,
    as_api_error,
    draining,
    is_fault_of_client,
)
from octavo.server.exchange import Exchange
from octavo.server.gate import send_json
from octavo.server.keys import ApiKey
from octavo.server.metrics import Metrics
from octavo.server.protocol import LABELS, Slo
from octavo.server.quota import Charge
from octavo.server.refusals import Cost, Refusals
from octavo.server.reply import Output, Reply
from octavo.server.workers import SMALL, Kind, Workers
from octavo.server.writer import DirectWrite, Writer, keep_alive

log = logging.getLogger(__name__)

# Of an answer, beyond which it would hold up others' tokens to write it in one go.
_LARGE = 2000
DONE = b"data: [DONE]\n\n"
# What a body has that may have terms of its own; letters may be written as escapes.
_TERMS = b'"slo"', rb"\u006", rb"\u007"
_PRIORITY = re.compile(rb'"priority"\s*:\s*(-?[0-9]{1,10})')


class Prepared(NamedTuple):
    """A body read and checked: what to run and how to answer. ``aliases``: what the client calls
    a field that the engine knows by another name.
    """

    requests: list[Request]
    reply: Reply
    aliases: dict[str, str]


_Read = tuple[Prepared, ApiError | ValueError | None]  # and why it is refused, if it is


class Generate:
    """A generate route. ``prepare`` reads a body in a worker thread, so that neither a large body
    nor a long prompt holds up other clients' tokens. It raises what `as_api_error` knows.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        config: ServeConfig,
        metrics: Metrics,
        bodies: Bodies,
        workers: Workers,
        refusals: Refusals,
        prepare: Callable[[bytes], Prepared],
        kind: Kind,
    ) -> None:
        self._engine = engine
        self._config = config
        self._metrics = metrics
        self._bodies = bodies
        self._workers = workers
        self._refusals = refusals
        self._prepare = prepare
        self._kind = kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange.of(scope)
        if self._engine.draining:
            raise draining()
        charge: Charge | None = None
        cost = Cost()
        try:
            # Before a byte of the body is read, for that is quick however busy everyone is.
            if exchange.account is not None:
                charge = exchange.account.open()
            self._engine.check_room(self._workers.pending)
            await self._run(scope, receive, send, exchange, charge, cost)
        except (ApiError, InvalidParameter, AdmissionError) as error:
            # Its traceback has the frames that hold the body, and all that came of it.
            if is_fault_of_client(error.with_traceback(None)):
                if charge is not None:
                    charge.fault(cost.size)
                await self._refusals.pay(exchange.client, cost, receive)
            raise
        except ClientGone:
            if charge is not None and cost.size and not exchange.submitted:
                charge.fault(cost.size)  # it has been read all the same
            raise
        finally:
            if charge is not None:
                charge.close()

    async def _run(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        exchange: Exchange,
        charge: Charge | None,
        cost: Cost,
    ) -> None:
        key = None if exchange.account is None else exchange.account.key
        prepared, refused = await self._read(scope, receive, key, cost)
        streams: list[Stream] = []

        def abort() -> None:
            for stream in streams:
                stream.abort()

        watch = Watch(receive, abort)
        try:
            exchange.answer_id = prepared.reply.id
            exchange.asked = prepared.reply.request
            exchange.model = prepared.reply.model.name
            exchange.labels = {
                name: value
                for name in LABELS
                if (value := getattr(prepared.reply.request, name)) is not None
            }
            if charge is not None and refused is None:
                charge.prompts([len(each.prompt_token_ids) for each in prepared.requests])
            try:
                streams += self._submit(prepared, refused)
            except EngineDead:
                exchange.submitted = True
                raise
            exchange.submitted = True
            prepared.reply.records = [stream.record for stream in streams]
            exchange.records = prepared.reply.records
            if charge is not None:
                charge.of(exchange.records)
            if prepared.reply.request.stream:
                writer = Writer(send, DirectWrite.of(scope))
                failure = await self._stream(prepared.reply, streams, watch, writer)
                exchange.error_type = failure.type if failure is not None else ""
            else:
                await self._whole(prepared.reply, streams, watch, send)
        finally:
            del refused  # if it is what is raised, it holds this frame, as everywhere below
            abort()  # what did not come to its end, for nobody reads it any more
            await watch.close()

    async def _read(self, scope: Scope, receive: Receive, key: ApiKey | None, cost: Cost) -> _Read:
        async with self._bodies.read(Exchange.of(scope).headers, receive) as body:
            cost.size = len(body)
            # Others have come meanwhile; and who asks for no latency of its own is known by now, at
            # its most urgent. Large bodies are not searched here, where all others wait.
            asks, large = None, len(body) > SMALL
            priorities = [] if large else [int(found) for found in _PRIORITY.findall(body)]
            if not (large or any(term in body for term in _TERMS)) and (
                priorities or b'"priority"' not in body
            ):
                asks = RequestRecord("", time.monotonic(), 0, target=self._target(None, key))
                if key is not None:
                    asks.client, asks.weight, asks.priority = key.name, key.weight, key.priority
                asks.priority = min([asks.priority, *priorities])
            self._engine.check_room(self._workers.pending, asks)
            work = partial(cost.work, partial(self._checked, key))
            return await unless_gone(receive, self._workers.run(work, body, self._kind))

    def _checked(self, key: ApiKey | None, body: bytes) -> _Read:
        """In a worker thread: what is asked, and why it can never be answered where that is so."""
        prepared = self._prepare(body)
        try:
            self._on_terms(prepared, key)
            requests = [self._engine.check(request) for request in prepared.requests]
        except (ApiError, InvalidParameter, AdmissionError) as error:
            # Its traceback has the frame of the worker, who has what is returned.
            return prepared, error.with_traceback(None)
        return prepared._replace(requests=requests), None

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
                request.cache_salt = key.salted(request.cache_salt)

    def _target(self, asked: Slo | None, key: ApiKey | None) -> LatencyTarget | None:
        """By what the request, its key and the server say, in this order."""
        own = None if asked is None else asked.target()
        of_key = None if key is None else key.target
        return LatencyTarget.first_of(own, of_key, self._config.slo)

    def _submit(self, prepared: Prepared, refused: ApiError | ValueError | None) -> list[Stream]:
        """All of an answer's requests or, when one is refused, none."""
        try:
            if refused is not None:
                if not isinstance(refused, ApiError):
                    self._engine.reject(prepared.requests, refused)
                raise refused
            return self._engine.submit_all(prepared.requests)
        except (InvalidParameter, AdmissionError) as error:
            if self._engine.draining:
                raise draining() from None
            error.param = prepared.aliases.get(error.param or "", error.param)
            raise
        finally:
            del refused

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
            try:
                raise failure
            finally:
                del failure
        large = sum(output.size for output in outputs) > _LARGE
        body = await asyncio.to_thread(reply.whole, outputs) if large else reply.whole(outputs)
        await send_json(send, 200, body)

    async def _stream(
        self, reply: Reply, streams: list[Stream], watch: Watch, writer: Writer
    ) -> ApiError | None:
        """Returns the error that ended the stream, as its client was told."""
        beat = keep_alive(writer, self._config.sse_keep_alive_interval)
        failure: ApiError | None = None

        def pass_on(index: int, delta: Delta) -> bool:
            """What most deltas need, where nobody has to wait for anything."""
            if delta.finish_reason is not None or watch.gone or not writer.ready:
                return False
            reply.count(index, delta)
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
                reply.count(index, delta)
                chunk = reply.chunk(index, delta)
                if chunk:
                    await writer.write(chunk)
        except Exception as error:
            failure = as_api_error(error).with_traceback(None)  # which holds this frame
        finally:
            if beat is not None:
                beat.cancel()
            for stream in streams:
                stream.at_once = None
        if watch.gone:
            raise ClientGone
        if failure is not None:
            if not writer.begun:
                try:
                    raise failure
                finally:
                    del failure
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
        gaps, together = Gaps(self._metrics.inter_token.observe), Together(streams)

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
                return draining()
            return ApiError(500, "the request was aborted")
        if delta.finish_reason in (FinishReason.SHED, FinishReason.REPLACED):
            why = record.error or "the request was dropped from the queue"
            return TooMany(why, self._engine.forecast().wait, delta.finish_reason.value)
        if delta.finish_reason is FinishReason.ERROR:
            log.error("request %s failed: %s", delta.request_id, record.error)
            return ApiError(500, "the request failed in the engine; the server's log says more")
        return None
