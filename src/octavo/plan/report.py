"""A simulation's figures: as a mapping for programs, as tables for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.engine.engine import EngineStats
from octavo.plan.replay import QUEUE_FULL
from octavo.plan.saturation import saturation
from octavo.plan.simulation import Simulation
from octavo.workload.metrics import Record, all_gaps, is_good

INTERVALS = 100
PERCENTILES = (50, 90, 95, 99)
LATENCIES = {
    "ttft_ms": "to the first token",
    "tpot_ms": "per output token",
    "itl_ms": "between tokens",
    "e2el_ms": "end to end",
    "queue_ms": "in the queue",
}
_COLUMNS = ("mean", "p50", "p90", "p95", "p99", "max")
ROWS = 10  # of the table over time


def figures(
    simulation: Simulation, goodput: Mapping[str, float], price: float | None = None
) -> dict[str, Any]:
    """All figures; none of them depends on how fast the simulation ran. ``goodput``: limits in
    milliseconds by metric; ``price``: of the device an hour.
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
        **_described(simulation),
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
        "speculation": _speculation(stats),
        "cost": None if price is None else _cost(price, duration, total_output, good),
        "over_time": _over_time(simulation, goodput),
    }


def _described(simulation: Simulation) -> dict[str, Any]:
    """What was simulated."""
    setup, scheduler = simulation.setup, simulation.engine.scheduler
    plan, layout = setup.plan()
    limits, config = scheduler.config, setup.config
    return {
        "model": setup.subject.name,
        "parameters": setup.subject.parameters,
        "format": setup.stored.name,
        "weight_bytes": setup.stored.bytes,
        "device": setup.device.name,
        "measured": setup.device.measured,
        "memory_bytes": setup.device.memory_bytes,
        "settings": {
            "max_model_len": limits.max_model_len,
            "max_num_seqs": limits.max_num_seqs,
            "max_num_batched_tokens": limits.max_num_batched_tokens,
            "max_num_queued_reqs": limits.max_num_queued_reqs,
            "max_num_queued_tokens": limits.max_num_queued_tokens,
            "enable_prefix_caching": limits.enable_prefix_caching,
            "block_size": layout.block_size,
            "kv_cache_dtype": layout.dtype,
            "kv_cache_bytes": plan.kv_cache_bytes,
            "kv_blocks": plan.num_blocks,
            "capacity_tokens": plan.capacity_tokens,
            "memory_utilization": config.memory_utilization,
            "batching": limits.batching,
            "memory": limits.memory,
            "chunked_prefill": limits.chunked_prefill,
            "acceptance": setup.acceptance,
            "num_speculative_tokens": (
                config.speculation and config.speculation.num_speculative_tokens
            ),
        },
    }


def _speculation(stats: EngineStats) -> dict[str, float] | None:
    if not stats.drafts:
        return None
    return {
        "drafts": stats.drafts,
        "draft_tokens": stats.draft_tokens,
        "accepted_tokens": stats.accepted_tokens,
        "tokens_per_pass": 1 + stats.accepted_tokens / stats.drafts,
    }


def _cost(price: float, duration: float, tokens: int, good: int) -> dict[str, float | None]:
    """What the device's time costs, for each million of output tokens and 1,000 good requests."""
    spent = price * duration / 3600
    return {
        "price_per_hour": price,
        "total": spent,
        "per_million_output_tokens": 1e6 * spent / tokens if tokens else None,
        "per_thousand_good_requests": 1e3 * spent / good if good else None,
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


# --- for people ----------------------------------------------------------------------------------


def text(result: Mapping[str, Any]) -> str:
    """What `figures` has, with the notices."""
    settings = result["settings"]
    source = "as measured" if result["measured"] else "figures as published or given, not measured"
    requests, completed = result["requests"], result["completed"]
    mean_in = result["total_input_tokens"] / max(completed, 1)
    mean_out = result["total_output_tokens"] / max(completed, 1)
    limits = ", ".join(
        f"{name.removesuffix('_ms').upper()} {limit:g} ms" for name, limit in result["slo"].items()
    )
    lines = [
        f"{result['model']}: {result['parameters'] / 1e9:.3g} G parameters, "
        f"{result['weight_bytes'] / 1e9:.4g} GB of weights ({result['format']})",
        f"on {result['device']}: {source}",
        f"KV cache: {settings['kv_cache_bytes'] / 2**30:.4g} GiB of {settings['kv_cache_dtype']}, "
        f"{settings['kv_blocks']:,} blocks of {settings['block_size']} tokens "
        f"(memory utilization {settings['memory_utilization']:g}); context "
        f"{settings['max_model_len']:,}",
        f"a step: up to {settings['max_num_seqs']:,} sequences and "
        f"{settings['max_num_batched_tokens']:,} tokens; " + _techniques(settings),
        "",
        f"requests      {completed:,} of {requests:,} served{_refused(result)}, {mean_in:.0f} "
        f"tokens in and {mean_out:.0f} out on average; the last arrives after "
        f"{result['last_arrival']:.0f} s, all is done after {result['duration']:.0f}",
        f"throughput    {result['output_throughput']:,.1f} output tokens/s, "
        f"{result['total_token_throughput']:,.1f} in all; "
        f"{result['request_throughput']:.3f} requests/s",
        f"goodput       {result['request_goodput']:.3f} requests/s within {limits}: "
        f"{100 * result['good'] / max(requests, 1):.1f} % of all",
        f"saturated     {'YES' if result['saturated'] else 'no'}: {result['saturation']['why']}",
        "",
        f"{'ms':<24}"
        + "".join(f"{name:>10}" for name in ("mean", "p50", "p90", "p95", "p99", "max")),
    ]
    for name, title in LATENCIES.items():
        if (spread := result[name]) is not None:
            short = name.removesuffix("_ms").upper() if name != "queue_ms" else ""
            lines.append(
                f"{short:<5}{title:<19}" + "".join(f"{_ms(spread[each]):>10}" for each in _COLUMNS)
            )
    running, waiting, usage = result["running"], result["waiting"], result["kv_usage"]
    lines += [
        "",
        f"running       {running['mean']:.1f} sequences on average, {running['max']:.0f} at most; "
        f"in the queue {waiting['mean']:.1f} and {waiting['max']:.0f}",
        f"KV cache      {100 * usage['mean']:.1f} % in use on average, {100 * usage['max']:.1f} % "
        f"at most; waste {100 * result['kv_waste']:.2f} % (allocated, not filled)",
        f"prefix cache  {100 * result['prefix_hit_rate']:.1f} % of prompt tokens found; "
        f"{result['preemptions']:,} preemptions",
        f"steps         {result['steps']:,} of {result['mean_step_ms']:.2f} ms and "
        f"{result['tokens_per_step']:.1f} tokens on average; busy {100 * result['busy']:.0f} % of "
        "the time",
    ]
    if (speculation := result["speculation"]) is not None:
        lines.append(
            f"speculation   {speculation['tokens_per_pass']:.2f} tokens a pass with drafts; "
            f"{speculation['accepted_tokens']:,} of {speculation['draft_tokens']:,} draft tokens "
            "were right"
        )
    if (cost := result["cost"]) is not None:
        each = cost["per_million_output_tokens"]
        good = cost["per_thousand_good_requests"]
        lines.append(
            f"cost          {cost['total']:.4g} at {cost['price_per_hour']:g} an hour"
            + (f"; {each:.4g} a million output tokens" if each is not None else "")
            + (f", {good:.4g} a thousand good requests" if good is not None else "")
        )
    lines += ["", *_table_over_time(result)]
    for reason in result["reasons"]:
        lines.append(
            f"! {reason['count']} x {reason['reason']}: request {reason['request']}: "
            f"{reason['example']}"
        )
    lines += [f"! {notice}" for notice in result["notices"]]
    return "\n".join(lines)


def _refused(result: Mapping[str, Any]) -> str:
    return "".join(f", {result[name]:,} {name}" for name in ("rejected", "failed") if result[name])


def _techniques(settings: Mapping[str, Any]) -> str:
    kept = {True: "with", False: "without"}
    return (
        f"{settings['batching']} batching, "
        f"{'paged' if settings['memory'] == 'paged' else 'reserved'} memory, "
        f"{kept[settings['chunked_prefill']]} chunked prefill, "
        f"{kept[settings['enable_prefix_caching']]} prefix caching"
        + (
            ""
            if settings["acceptance"] is None
            else f", speculation right {100 * settings['acceptance']:g} % of the time"
        )
    )


def _ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 10_000 else f"{value:.2f}"


def _table_over_time(result: Mapping[str, Any]) -> list[str]:
    over = result["over_time"]
    each = INTERVALS // ROWS
    lines = [
        f"{'until':>9}{'arrived':>9}{'running':>9}{'queue':>8}{'KV use':>8}{'out tok/s':>11}"
        f"{'TTFT p50':>10}{'TTFT p99':>10}{'TPOT p50':>10}{'good':>7}"
    ]
    for row in range(ROWS):
        part = slice(row * each, (row + 1) * each)

        def mean(name: str, part: slice = part) -> float | None:
            values = [value for value in over[name][part] if value is not None]
            return sum(values) / len(values) if values else None

        arrived, good = sum(over["arrived"][part]), sum(over["good"][part])
        times = [mean(f"{name}") for name in ("ttft_ms_p50", "ttft_ms_p99", "tpot_ms_p50")]
        lines.append(
            f"{over['time'][part][-1]:>7.0f} s{arrived:>9,}{mean('running'):>9.1f}"
            f"{mean('waiting'):>8.1f}{100 * (mean('kv_usage') or 0):>6.1f} %"
            f"{mean('output_throughput'):>11,.0f}"
            + "".join(f"{'-' if each is None else _ms(each):>10}" for each in times)
            + (f"{100 * good / arrived:>5.0f} %" if arrived else f"{'-':>7}")
        )
    lines.append("(times are those of the requests that arrived then)")
    return lines
