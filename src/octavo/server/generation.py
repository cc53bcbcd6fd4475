"""A generation over HTTP: read the body, submit, watch the client, send what comes.

The two generate routes differ in how they read a body and write an answer (`Reply`). Everything in
between is here.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from starlette.types import Receive, Send

from octavo.engine.outputs import Delta
from octavo.engine.stream import EngineDead, Stream, joined
from octavo.sampling.params import InvalidParameter
from octavo.scheduler.request import AdmissionError, FinishReason, RequestRecord, SchedulingParams
from octavo.server.config import ServeConfig
from octavo.server.context import RequestContext
from octavo.server.errors import ApiError, ClientGone, as_api_error, draining, too_many
from octavo.server.model import ServedModel
from octavo.server.protocol import GenerateRequest, scheduling_params
from octavo.server.reply import Reply, size
from octavo.server.streaming import MergedStream, Writer, send_whole
from octavo.server.workers import SMALL, DisconnectWatch, Kind, work_on

if TYPE_CHECKING:
    from octavo.server.app import App

log = logging.getLogger(__name__)

_LARGE = 2000  # size of an answer beyond which writing it at once would hold up others' tokens
_MOST_PARTS = 64  # that are joined: many small objects cost the garbage collector time
DONE = b"data: [DONE]\n\n"
# A body that asks for a latency of its own has one of these; letters may be written as escapes.
_LATENCY = b'"slo"', rb"\u006", rb"\u007"
_PRIORITY = re.compile(rb'"priority"\s*:\s*(-?[0-9]{1,10})')

Prepare = Callable[[ServedModel, ServeConfig, bytes], Reply]


class GenerateCall:
    """One request to a generate route, from its body to the end of its answer."""

    def __init__(
        self, app: App, context: RequestContext, receive: Receive, send: Send, prepare: Prepare
    ) -> None:
        """``prepare`` reads a body in a worker thread, so that neither a large body nor a long
        prompt holds up other clients' tokens. It raises what `as_api_error` knows.
        """
        self._app = app
        self._engine = app.engine
        self._context = context
        self._receive = receive
        self._send = send
        self._prepare = prepare
        self._key = None if context.account is None else context.account.key
        self._streams: list[Stream] = []

    async def run(self, kind: Kind) -> None:
        context = self._context
        if self._engine.draining:
            raise draining()
        # Before a byte of the body is read: this is quick, however busy the server is.
        if context.account is not None:
            context.charge = context.account.open()
        self._engine.check_room(self._app.workers.pending)
        reply, refused = await self._read(kind)
        watch = DisconnectWatch(self._receive, self._abort)
        try:
            context.answer_id, context.asked = reply.answer.id, reply.request
            context.model = reply.model.name
            if context.charge is not None and refused is None:
                context.charge.prompts([len(each.prompt_token_ids) for each in reply.requests])
            self._submit(reply, refused)
            observe = self._app.metrics.inter_token.observe
            merged = MergedStream(self._streams, reply.n, observe)
            write = self._stream if reply.request.stream else self._whole
            await write(reply, merged, watch)
        finally:
            del refused  # if it is what is raised, it holds this frame, as everywhere below
            self._abort()  # what has not ended: nobody reads it any more
            await watch.close()

    def _abort(self) -> None:
        for stream in self._streams:
            stream.abort()

    async def _read(self, kind: Kind) -> tuple[Reply, ApiError | ValueError | None]:
        """Return the request, and why it is refused, if it is."""
        app, context = self._app, self._context
        async with app.bodies.read(context.headers, self._receive) as body:
            # Others have come meanwhile.
            self._engine.check_room(app.workers.pending, self._outline(body))
            return await work_on(body, self._checked, kind, app.workers, context, self._receive)

    def _outline(self, body: bytes) -> RequestRecord | None:
        """Return what can be told of a request before its body is decoded, at its most urgent;
        None: nothing can.
        """
        # Large bodies are not searched here, where all others wait.
        if len(body) > SMALL or any(term in body for term in _LATENCY):
            return None
        priorities = [int(found) for found in _PRIORITY.findall(body)]
        if not priorities and b'"priority"' in body:
            return None
        asked = self._scheduling(GenerateRequest())
        asked = replace(asked, priority=min([asked.priority, *priorities]))
        return RequestRecord("", time.monotonic(), 0, scheduling=asked)

    def _checked(self, body: bytes) -> tuple[Reply, ApiError | ValueError | None]:
        """Return the request, and why it can never be answered, if so. Runs in a worker thread."""
        reply = self._prepare(self._app.model, self._app.config, body)
        try:
            scheduling = self._scheduling(reply.request)
            for request in reply.requests:
                request.scheduling = scheduling
            reply.requests = [self._engine.check(request) for request in reply.requests]
        except (ApiError, InvalidParameter, AdmissionError) as error:
            # Its traceback has the frame of the worker, who has what is returned.
            return reply, error.with_traceback(None)
        return reply, None

    def _scheduling(self, request: GenerateRequest) -> SchedulingParams:
        """Return what the request, its key and the server say, in this order."""
        key = self._key
        if key is None:
            return scheduling_params(request, self._app.config.slo)
        asked = scheduling_params(request, key.target, self._app.config.slo)
        return replace(
            asked,
            client=key.name,
            weight=key.weight,
            priority=key.priority_of(request.priority),
            cache_salt=key.salted(asked.cache_salt),
        )

    def _submit(self, reply: Reply, refused: ApiError | ValueError | None) -> None:
        """Submit all of an answer's requests or, when one is refused, none."""
        context = self._context
        try:
            if refused is not None:
                if not isinstance(refused, ApiError):
                    self._engine.reject(reply.requests, refused)
                raise refused
            self._streams += self._engine.submit_all(reply.requests)
        except EngineDead:
            context.submitted = True
            raise
        except (InvalidParameter, AdmissionError) as error:
            if self._engine.draining:
                raise draining() from None
            error.param = reply.aliases.get(error.param or "", error.param)
            raise
        finally:
            del refused
        context.submitted = True
        context.records = reply.records = [stream.record for stream in self._streams]
        if context.charge is not None:
            context.charge.of(context.records)

    async def _whole(self, reply: Reply, merged: MergedStream, watch: DisconnectWatch) -> None:
        deltas: list[list[Delta]] = [[] for _ in range(len(reply.prompts) * reply.n)]
        num_apart = [0] * len(deltas)  # how many of a choice's last parts have not been joined
        failure: ApiError | None = None
        to_write = 0
        async for index, delta in merged:
            parts = deltas[index]
            parts.append(delta)
            num_apart[index] += 1
            if num_apart[index] == _MOST_PARTS:  # not those before: it would copy them each time
                parts[-_MOST_PARTS:] = joined(parts[-_MOST_PARTS:])
                num_apart[index] = 0
            to_write += size(delta)
            if failure is None and not watch.gone:
                failure = self._failure(delta, reply.records[index // reply.n])
                if failure is not None:
                    self._abort()
        if watch.gone:
            raise ClientGone
        if failure is not None:
            try:
                raise failure
            finally:
                del failure
        large = to_write > _LARGE
        body = await asyncio.to_thread(reply.whole, deltas) if large else reply.whole(deltas)
        await send_whole(self._send, body)

    async def _stream(self, reply: Reply, merged: MergedStream, watch: DisconnectWatch) -> None:
        cycle = self._context.cycle
        writer = Writer(self._send, None if cycle is None else cycle())
        beat: asyncio.Task[None] | None = None
        if interval := self._app.config.sse_keep_alive_interval:
            beat = asyncio.create_task(writer.keep_alive(interval))
        failure: ApiError | None = None

        def at_once(place: int, record: RequestRecord, delta: Delta) -> bool:
            """Write what most deltas bring, if nothing has to wait for anything."""
            if merged.behind or delta.finish_reason is not None or watch.gone or not writer.ready:
                return False
            index = place * reply.n + delta.choice
            if chunk := reply.chunk(index, delta):
                writer.write_now(chunk)
            merged.count(index, record, delta)
            return True

        for place, stream in enumerate(self._streams):
            stream.at_once = partial(at_once, place, stream.record)
        try:
            async for index, delta in merged:
                if watch.gone or failure is not None:
                    continue  # ends soon; its record still counts
                failure = self._failure(delta, reply.records[index // reply.n])
                if failure is not None:
                    for stream in self._streams:
                        stream.at_once = None
                        stream.abort()
                elif chunk := reply.chunk(index, delta):
                    await writer.write(chunk)
        except Exception as error:
            failure = as_api_error(error).with_traceback(None)  # which holds this frame
        finally:
            if beat is not None:
                beat.cancel()
            for stream in self._streams:
                stream.at_once = None
        if watch.gone:
            raise ClientGone
        if failure is not None and not writer.begun:
            try:
                raise failure
            finally:
                del failure
        end = DONE
        if failure is not None:
            end = b"data: " + failure.body() + b"\n\n" + DONE
        elif reply.include_usage:
            end = reply.usage_event() + DONE
        await writer.write(end, last=True)
        if watch.gone:
            raise ClientGone
        if failure is not None:
            self._context.error_type = failure.type

    def _failure(self, delta: Delta, record: RequestRecord) -> ApiError | None:
        """Return what to tell a client whose request neither it nor the model ended."""
        reason = delta.finish_reason
        if reason is FinishReason.ABORT:
            return draining() if self._engine.draining else ApiError(500, "the request was aborted")
        if reason is FinishReason.SHED or reason is FinishReason.REPLACED:
            why = record.error or "the request was dropped from the queue"
            return too_many(why, self._engine.forecast().wait, reason.value)
        if reason is FinishReason.ERROR:
            log.error("request %s failed: %s", delta.request_id, record.error)
            return ApiError(500, "the request failed in the engine; the server's log says more")
        return None
