"""A simulation's figures: as a mapping for programs, as tables for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.plan.replay import QUEUE_FULL
from octavo.plan.saturation import saturation
from octavo.plan.simulation import Simulation
from octavo.workload.metrics import Record, all_gaps, is_good

INTERVALS = 100
PERCENTILES = (50, 90, 95, 99)
LATENCIES = {
    "ttft_ms": "time to first token",
    "tpot_ms": "time per output token",
    "itl_ms": "between tokens",
    "e2el_ms": "end to end",
    "queue_ms": "waiting in the queue",
}


def figures(simulation: Simulation, goodput: Mapping[str, float]) -> dict[str, Any]:
    """All figures; nothing in it depends on the machine that simulates. ``goodput``: limits in
    milliseconds by metric.
    """
    engine, series = simulation.engine, simulation.series
    records, duration = simulation.replay.records, max(simulation.replay.duration, 1e-9)
    done = [record for record in records if record.success]
    good = sum(is_good(record, goodput) for record in done)
    total_input = sum(record.prompt_len for record in done)
    total_output = sum(record.output_tokens for record in done)
    stats = engine.stats()
    columns = series.columns()
    used = columns["kv_blocks_used"] / max(stats.kv_blocks, 1)
    verdict = saturation(records, series)
    return {
        "requests": len(records),
        "completed": len(done),
        "rejected": sum(record.reason in ("rejected", QUEUE_FULL) for record in records),
        "failed": sum(record.reason == "failed" for record in records),
        "reasons": _reasons(records),
        "duration": duration,
        "last_arrival": series.span,
        "total_input_tokens": total_input,
        "total_output_tokens": total_output,
        "request_throughput": len(done) / duration,
        "output_throughput": total_output / duration,
        "total_token_throughput": (total_input + total_output) / duration,
        "slo": {f"{name}_ms": limit for name, limit in goodput.items()},
        "good": good,
        "request_goodput": good / duration,
        **_latencies(done),
        "saturated": verdict.saturated,
        "saturation": verdict._asdict(),
        "steps": stats.steps,
        "busy": 1 - simulation.replay.idle / duration,
        "mean_step_ms": 1e3 * (duration - simulation.replay.idle) / max(stats.steps, 1),
        "tokens_per_step": stats.computed_tokens / max(stats.steps, 1),
        "running": {"mean": _mean(columns["running"]), "max": _most(columns["running"])},
        "waiting": {"mean": _mean(columns["waiting"]), "max": float(series.peak_waiting)},
        "kv_usage": {"mean": _mean(used), "max": _most(used)},
        "kv_waste": series.waste(),
        "preemptions": stats.preemptions,
        "prefix_queries": stats.prefix_queries,
        "prefix_hits": stats.prefix_hits,
        "prefix_hit_rate": stats.prefix_hits / max(stats.prefix_queries, 1),
        "over_time": _over_time(simulation, goodput),
    }


def _mean(values: npt.NDArray[np.float64]) -> float:
    return float(values.mean()) if len(values) else 0.0


def _most(values: npt.NDArray[np.float64]) -> float:
    return float(values.max()) if len(values) else 0.0


def _reasons(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Why requests were not served, the most frequent reason first, with an example."""
    counts = Counter(record.reason for record in records if record.reason)
    examples = {record.reason: record for record in reversed(records) if record.reason}
    return [
        {
            "reason": reason,
            "count": count,
            "request": examples[reason].index,
            "example": examples[reason].detail,
        }
        for reason, count in counts.most_common()
    ]


def _latencies(done: Sequence[Record]) -> dict[str, dict[str, float] | None]:
    seconds = {
        "ttft_ms": np.array([record.ttft for record in done]),
        "tpot_ms": np.array([record.tpot for record in done if record.output_tokens > 1]),
        "itl_ms": all_gaps(done),
        "e2el_ms": np.array([record.latency for record in done]),
        "queue_ms": np.array([record.waited for record in done]),
    }
    return {name: spread(values * 1e3) for name, values in seconds.items()}


def spread(values: npt.NDArray[np.float64]) -> dict[str, float] | None:
    """Mean, percentiles and the like; None of nothing."""
    if not len(values):
        return None
    percentiles = np.percentile(values, PERCENTILES)
    return {
        "mean": float(values.mean()),
        **{f"p{p}": float(v) for p, v in zip(PERCENTILES, percentiles, strict=True)},
        "max": float(values.max()),
        "std": float(values.std()),
    }


def _over_time(simulation: Simulation, goodput: Mapping[str, float]) -> dict[str, Any]:
    """`INTERVALS` equal parts of the time; requests count where they arrive."""
    parts = simulation.series.intervals(INTERVALS)
    records = simulation.replay.records
    width = parts["time"][0]
    at = np.array([record.start for record in records])
    part = np.minimum((at / width).astype(np.int64), INTERVALS - 1) if len(records) else at
    blocks = max(simulation.engine.stats().kv_blocks, 1)
    unfilled = parts.pop("kv_unfilled_blocks")
    used = parts.pop("kv_blocks_used")
    hits, queries = parts.pop("prefix_hits"), parts.pop("prefix_queries")
    parts["kv_usage"] = [each / blocks for each in used]
    parts["kv_waste"] = [a / b if b else 0.0 for a, b in zip(unfilled, used, strict=True)]
    parts["prefix_hit_rate"] = [a / b if b else 0.0 for a, b in zip(hits, queries, strict=True)]
    parts["output_throughput"] = [n / width for n in parts.pop("generation_tokens")]
    parts["computed_throughput"] = [n / width for n in parts.pop("computed_tokens")]
    chosen = [[] for _ in range(INTERVALS)]  # type: list[list[Record]]
    for index, record in zip(part.tolist(), records, strict=True):
        chosen[int(index)].append(record)
    parts["arrived"] = [len(each) for each in chosen]
    for name in ("ttft", "tpot"):
        for percentile in (50, 99):
            parts[f"{name}_ms_p{percentile}"] = [
                _percentile(name, percentile, each) for each in chosen
            ]
    parts["good"] = [sum(r.success and is_good(r, goodput) for r in each) for each in chosen]
    return parts


def _percentile(name: str, percentile: int, records: Sequence[Record]) -> float | None:
    """Milliseconds; None where no request has it."""
    values = [
        getattr(record, name)
        for record in records
        if record.success and (name != "tpot" or record.output_tokens > 1)
    ]
    return 1e3 * float(np.percentile(values, percentile)) if values else None
