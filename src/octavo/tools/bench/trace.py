"""A step's timeline as a trace file, for Perfetto (ui.perfetto.dev) or chrome://tracing.

The Trace Event Format: a JSON object whose ``traceEvents`` are complete events ("ph": "X") with
start and duration in microseconds; events of one thread that lie within each other are nested.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

from octavo.executor.base import RegionTime
from octavo.models.program import Program
from octavo.tools.bench.profile import Profile, Recorded, region_layers

_ID = {"pid": 1, "tid": 1}


def trace(profile: Profile, step: Recorded, program: Program) -> dict[str, Any]:
    """The step from zero on: its calls, within execute its layers, and within those the regions,
    each until the threads met.
    """
    events: list[dict[str, Any]] = [
        _named("process_name", f"octavo {profile.model}"),
        _named("thread_name", "engine"),
    ]

    def add(name: str, category: str, start: float, end: float, **arguments: Any) -> None:
        events.append(
            {
                "name": name,
                "cat": category,
                "ph": "X",
                "ts": (start - step.start) * 1e6,
                "dur": (end - start) * 1e6,
                "args": arguments,
                **_ID,
            }
        )

    add(
        f"step: {profile.kind} of {profile.tokens} tokens", "step", step.start, step.end,
        sequences=profile.sequences, context=profile.context, of_limit=profile.of_limit,
    )  # fmt: skip
    regions = _within_execute(step)
    for call in step.calls:
        add(call.name, "engine", call.start, call.end)
        if call.name != "execute":
            continue
        at = step.last_meeting - sum(region.seconds for region in regions)
        layers = region_layers(program, regions)
        for layer, group in groupby(zip(layers, regions, strict=True), lambda item: item[0]):
            ran = [region for _, region in group if region.seconds > 0]
            if layer is not None:
                add(f"layer {layer}", "layer", at, at + sum(region.seconds for region in ran))
            for region in ran:
                ops = [str(program.ops[op]) for op in region.ops]
                add(region.name, "region", at, at + region.seconds, ops=ops)
                at += region.seconds
    return {
        "traceEvents": events,
        "displayTimeUnit": "ns",
        "otherData": {"isa": profile.isa, "threads": profile.threads},
    }


def _within_execute(step: Recorded) -> list[RegionTime]:
    """The regions without the logits of later rows, which have calls of their own."""
    regions = step.regions[:]
    if later := step.spent("logits"):
        seconds = max(0.0, regions[-1].seconds - later)
        regions[-1] = regions[-1]._replace(seconds=seconds)
    return regions


def _named(what: str, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "args": {"name": name}, **_ID}
