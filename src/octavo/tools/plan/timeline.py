"""A simulation as a trace file, for Perfetto (ui.perfetto.dev) or chrome://tracing.

The Trace Event Format, as in tools/bench/trace.py: complete events ("X") with microseconds; those
of one thread that lie within each other are nested; and counters ("C"). The engine's steps are one
thread. Requests share lanes, each a thread: a lane is taken at arrival and given back at the end.
"""

from __future__ import annotations

import heapq
from itertools import pairwise
from typing import Any

from octavo.engine.engine import Step
from octavo.engine.leap import Leap
from octavo.scheduler.request import RequestRecord
from octavo.tools.plan.simulation import Simulation

MOST_STEPS = 100_000  # a browser opens no more with ease
_ENGINE, _REQUESTS = 1, 2  # processes


class Timeline:
    """An engine's observer."""

    def __init__(self) -> None:
        self._steps: list[dict[str, Any]] = []
        self._left_out = 0
        self._records: list[RequestRecord] = []

    def on_step(self, step: Step) -> None:
        scheduled = step.scheduled
        prompts = sum(chunk.size for chunk in scheduled.chunks)
        tokens = scheduled.batch.num_tokens
        self._add(step.started, step.ended, len(scheduled.decodes), prompts, tokens)

    def on_leap(self, leap: Leap) -> None:
        decodes = len(leap.decodes)
        for started, ended in pairwise(leap.times):
            self._add(started, ended, decodes, 0, decodes)

    def _add(self, started: float, ended: float, decodes: int, prompts: int, tokens: int) -> None:
        if len(self._steps) == MOST_STEPS:
            self._left_out += 1
            return
        parts = [f"decode {decodes}"] if decodes else []
        parts += [f"prefill {prompts}"] if prompts else []
        self._steps.append(
            _span(
                (_ENGINE, 1), " + ".join(parts), "step", started, ended,
                decodes=decodes, prompt_tokens=prompts, tokens=tokens,
            )
        )  # fmt: skip

    def on_end(self, record: RequestRecord) -> None:
        self._records.append(record)

    def trace(self, simulation: Simulation) -> dict[str, Any]:
        events = [
            _named("process_name", f"octavo simulate {simulation.setup.subject.name}", _ENGINE),
            _named("thread_name", "steps", _ENGINE),
            _named("process_name", "requests", _REQUESTS),
            *self._steps,
        ]
        blocks = max(simulation.engine.stats().kv_blocks, 1)
        for counter, gauge, unit in (
            ("running", "running", 1.0),
            ("waiting", "waiting", 1.0),
            ("KV cache %", "kv_blocks_used", 100 / blocks),
        ):
            for time, value in simulation.series.levels(gauge):
                events.append(
                    {"name": counter, "ph": "C", "ts": 1e6 * time, "pid": _ENGINE,
                     "args": {counter: unit * value}}
                )  # fmt: skip
        events += self._lanes()
        other = {"device": simulation.setup.device.name, "steps_left_out": self._left_out}
        return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}

    def _lanes(self) -> list[dict[str, Any]]:
        events = []
        free: list[int] = []
        taken: list[tuple[float, int]] = []  # until when, lane
        lanes = 0
        for record in sorted(self._records, key=lambda record: record.arrival):
            if record.finished is None or record.scheduled is None:
                continue
            while taken and taken[0][0] <= record.arrival:
                heapq.heappush(free, heapq.heappop(taken)[1])
            if not free:
                lanes += 1
                heapq.heappush(free, lanes)
            lane = heapq.heappop(free)
            heapq.heappush(taken, (record.finished, lane))
            where = (_REQUESTS, lane)
            events.append(
                _span(
                    where, f"request {record.request_id}", "request", record.arrival,
                    record.finished, prompt_tokens=record.prompt_tokens,
                    output_tokens=record.completion_tokens, cached_tokens=record.cached_tokens,
                    preemptions=record.preemptions,
                )
            )  # fmt: skip
            first = record.finished if record.first_token is None else record.first_token
            events.append(_span(where, "queue", "request", record.arrival, record.scheduled))
            events.append(_span(where, "prefill", "request", record.scheduled, first))
            events.append(_span(where, "decode", "request", first, record.finished))
        return events


def _span(
    where: tuple[int, int], name: str, category: str, start: float, end: float, **arguments: Any
) -> dict[str, Any]:
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "ts": 1e6 * start,
        "dur": 1e6 * (end - start),
        "pid": where[0],
        "tid": where[1],
        "args": arguments,
    }


def _named(what: str, name: str, process: int) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": process, "tid": 1, "args": {"name": name}}
