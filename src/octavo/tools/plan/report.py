"""A simulation's figures: as a mapping for programs, as tables for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from octavo.engine.stats import EngineStats
from octavo.machine.memory import as_size
from octavo.tools.plan.band import Doubt, band, uncertain
from octavo.tools.plan.capacity import Capacity
from octavo.tools.plan.load_replay import QUEUE_FULL, SHED
from octavo.tools.plan.saturation import Saturation, saturation
from octavo.tools.plan.series import GAUGES
from octavo.tools.plan.simulation import Simulation
from octavo.tools.workload.metrics import Record, Totals, by_class, is_good, seconds, spread, totals
from octavo.words import number, plural

INTERVALS = 100
PERCENTILES = (50, 90, 95, 99)
LATENCIES = {
    "ttft_ms": "to the first token",
    "tpot_ms": "per output token",
    "itl_ms": "between tokens",
    "e2el_ms": "end to end",
    "queue_ms": "in the queue",
    "client_queue_ms": "held back by the client",
}
_COLUMNS = ("mean", "p50", "p90", "p95", "p99", "max")
ROWS = 10  # of the table over time


def figures(
    simulation: Simulation,
    goodput: Mapping[str, float],
    price: float | None = None,
    *,
    capacity: Capacity | None = None,
    doubt: Doubt | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """All figures; none of them depends on how fast the simulation ran. ``goodput``: limits in
    milliseconds by metric; ``price``: of the device an hour; ``capacity``: of the engine, for
    `saturation`; ``doubt``: of its speed, for an error band.
    """
    engine, series = simulation.engine, simulation.series
    records = simulation.replay.records
    load = totals(records, simulation.replay.duration, goodput)
    duration = load.duration
    stats = engine.stats()
    means, most = series.means(), dict(zip(GAUGES, series.most, strict=True))
    blocks = max(stats.kv_blocks, 1)
    verdict = saturation(simulation, capacity)
    unsure = None if doubt is None else band(simulation, doubt, goodput, verdict, progress)
    return {
        **_described(simulation),
        "requests": load.requests,
        "completed": load.completed,
        "rejected": sum(record.reason in ("rejected", QUEUE_FULL, SHED) for record in records),
        "failed": sum(record.reason == "failed" for record in records),
        "reasons": _reasons(records),
        "duration": duration,
        "last_arrival": series.span,
        "total_input_tokens": load.input_tokens,
        "total_output_tokens": load.output_tokens,
        "request_throughput": load.request_throughput,
        "output_throughput": load.output_throughput,
        "total_token_throughput": load.token_throughput,
        "slo": {f"{name}_ms": limit for name, limit in goodput.items()},
        "good": load.good,
        "request_goodput": load.goodput,
        **{name: load.spread(_metric(name), PERCENTILES) for name in LATENCIES},
        "classes": {
            name: _class(found) for name, found in by_class(records, duration, goodput).items()
        },
        "saturated": verdict.saturated,
        "headroom": verdict.headroom,
        "saturation": verdict._asdict(),
        "error_band": unsure,
        "near_saturation": "" if doubt is None else uncertain(verdict, doubt),
        "steps": stats.steps,
        "busy": 1 - simulation.replay.idle / duration,
        "mean_step_ms": 1e3 * (duration - simulation.replay.idle) / max(stats.steps, 1),
        "tokens_per_step": stats.computed_tokens / max(stats.steps, 1),
        "running": {"mean": means["running"], "max": most["running"]},
        "waiting": {"mean": means["waiting"], "max": most["waiting"]},
        "kv_usage": {
            "mean": means["kv_blocks_used"] / blocks,
            "max": most["kv_blocks_used"] / blocks,
        },
        "kv_waste": series.waste(),
        "preemptions": stats.preemptions,
        "prefix_queries": stats.prefix_queries,
        "prefix_hits": stats.prefix_hits,
        "prefix_hit_rate": stats.prefix_hits / max(stats.prefix_queries, 1),
        "speculation": _speculation(stats),
        "cost": None if price is None else _cost(price, load),
        "over_time": _over_time(simulation, goodput, INTERVALS),
        "over_tenths": _over_time(simulation, goodput, ROWS),
    }


def _class(load: Totals) -> dict[str, Any]:
    """Return the figures of one class of the load."""
    return {
        "requests": load.requests,
        "completed": load.completed,
        "good": load.good,
        "attainment": load.attainment,
        "output_throughput": load.output_throughput,
        **{f"{name}_ms": load.spread(name, PERCENTILES) for name in ("ttft", "tpot", "e2el")},
    }


def _metric(name: str) -> str:
    """Return the name that workload.metrics has for one of `LATENCIES`."""
    return "client_queue_time" if name == "client_queue_ms" else name.removesuffix("_ms")


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
            "itl_target": config.itl_target,
            "scheduling_policy": limits.scheduling_policy,
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


def _cost(price: float, load: Totals) -> dict[str, float | None]:
    """What the device's time costs, for each million of output tokens and 1,000 good requests."""
    spent, tokens, good = price * load.duration / 3600, load.output_tokens, load.good
    return {
        "price_per_hour": price,
        "total": spent,
        "per_million_output_tokens": 1e6 * spent / tokens if tokens else None,
        "per_thousand_good_requests": 1e3 * spent / good if good else None,
    }


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


def _over_time(simulation: Simulation, goodput: Mapping[str, float], count: int) -> dict[str, Any]:
    """``count`` equal parts of the time: means over each; percentiles of the requests that arrived
    in it (with --max-concurrency: that were sent).
    """
    parts = simulation.series.intervals(count)
    records = simulation.replay.records
    width = parts["time"][0]
    at = np.array([record.start for record in records])
    part = np.minimum((at / width).astype(np.int64), count - 1) if len(records) else at
    blocks = max(simulation.engine.stats().kv_blocks, 1)
    unfilled = parts.pop("kv_unfilled_blocks")
    used = parts.pop("kv_blocks_used")
    hits, queries = parts.pop("prefix_hits"), parts.pop("prefix_queries")
    parts["kv_usage"] = [each / blocks for each in used]
    parts["kv_waste"] = [a / b if b else 0.0 for a, b in zip(unfilled, used, strict=True)]
    parts["prefix_hit_rate"] = [a / b if b else 0.0 for a, b in zip(hits, queries, strict=True)]
    parts["output_throughput"] = [n / width for n in parts.pop("generation_tokens")]
    parts["computed_throughput"] = [n / width for n in parts.pop("computed_tokens")]
    chosen: list[list[Record]] = [[] for _ in range(count)]
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
    found = spread(seconds(name, [record for record in records if record.success]), (percentile,))
    return None if found is None else found[f"p{percentile}"]


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
    if result["classes"]:
        limits += ", or its class's own"
    lines = [
        f"{result['model']}: {number(result['parameters'] / 1e9, 3)} G parameters, "
        f"{number(result['weight_bytes'] / 1e9)} GB of weights ({result['format']})",
        f"on {result['device']}: {source}",
        f"KV cache: {as_size(settings['kv_cache_bytes'])} of {settings['kv_cache_dtype']}, "
        f"{settings['kv_blocks']:,} blocks of {settings['block_size']} tokens "
        f"(memory utilization {settings['memory_utilization']:g}); context "
        f"{settings['max_model_len']:,}",
        f"a step: up to {settings['max_num_seqs']:,} sequences and "
        f"{settings['max_num_batched_tokens']:,} tokens; " + _techniques(settings),
        "",
        f"requests      {completed:,} of {requests:,} served{_refused(result)}, "
        f"{plural(round(mean_in), 'token')} in and {mean_out:.0f} out on average; "
        f"the last arrives after {_short(result['last_arrival'])} s, all is done after "
        f"{_short(result['duration'])}",
        f"throughput    {result['output_throughput']:,.1f} output tokens/s, "
        f"{result['total_token_throughput']:,.1f} in all; "
        f"{result['request_throughput']:.3f} requests/s",
        f"goodput       {result['request_goodput']:.3f} requests/s within {limits}: "
        f"{100 * result['good'] / max(requests, 1):.1f} % of all",
        f"saturated     {'YES' if result['saturated'] else 'no'}: {result['saturation']['why']}",
        *([f"headroom      {room}"] if (room := Saturation(**result["saturation"]).room) else []),
        "",
        f"{'ms':<24}"
        + "".join(f"{name:>10}" for name in ("mean", "p50", "p90", "p95", "p99", "max")),
    ]
    for name, title in LATENCIES.items():
        found = result[name]
        if found is None or (name == "client_queue_ms" and not found["max"]):
            continue
        short = "" if "queue" in name else name.removesuffix("_ms").upper()
        label = f"{short:<5}{title:<19}" if len(title) < 19 else f"{title:<24}"
        lines.append(label + "".join(f"{_ms(found[each]):>10}" for each in _COLUMNS))
    if result["error_band"] is not None:
        lines += ["", *error_band_lines(result["error_band"])]
    lines += _table_of_classes(result["classes"])
    running, waiting, usage = result["running"], result["waiting"], result["kv_usage"]
    lines += [
        "",
        f"running       {running['mean']:.1f} sequences on average, {running['max']:.0f} at most; "
        f"in the queue {waiting['mean']:.1f} and {waiting['max']:.0f}",
        f"KV cache      {100 * usage['mean']:.1f} % in use on average, {100 * usage['max']:.1f} % "
        f"at most; waste {100 * result['kv_waste']:.2f} % (allocated, not filled)",
        f"prefix cache  {100 * result['prefix_hit_rate']:.1f} % of prompt tokens found; "
        f"{plural(result['preemptions'], 'preemption')}",
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
            f"cost          {number(cost['total'])} at {cost['price_per_hour']:g} an hour"
            + (f"; {number(each)} a million output tokens" if each is not None else "")
            + (f", {number(good)} a thousand good requests" if good is not None else "")
        )
    lines += ["", *_table_over_time(result)]
    for reason in result["reasons"]:
        lines.append(
            f"! {reason['count']} x {reason['reason']}: request {reason['request']}: "
            f"{reason['example']}"
        )
    notices = [result["near_saturation"]] if result["near_saturation"] else []
    lines += [f"! {notice}" for notice in (*notices, *result["notices"])]
    return "\n".join(lines)


def error_band_lines(found: Mapping[str, Any]) -> list[str]:
    """The ends of medians and 99th percentiles, under what they rest on."""
    shown = []
    for name in ("ttft_ms", "tpot_ms", "e2el_ms"):
        for which in ("p50", "p99"):
            if (ends := found[name][which]) is not None:
                title = f"{name.removesuffix('_ms').upper()} {which}"
                shown.append(f"{title} {_ms(ends[0])} to {_ms(ends[1])}")
    lines = [
        f"error band: everything may take {1 / found['faster']:.2f} to {found['slower']:.2f} times "
        f"as long ({found['basis']}):",
        *(f"  {', '.join(shown[first : first + 2])} ms" for first in range(0, len(shown), 2)),
    ]
    if (ends := found["headroom"]) is not None:
        lines.append(f"  headroom {number(ends[0], 3)} to {number(ends[1], 3)} ×")
    return lines


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


def _table_of_classes(classes: Mapping[str, Mapping[str, Any]]) -> list[str]:
    if not classes:
        return []
    lines = [
        "",
        f"{'class':<14}{'requests':>9}{'served':>8}{'good':>9}{'out tok/s':>11}{'TTFT p50':>10}"
        f"{'TTFT p99':>10}{'TPOT p50':>10}{'TPOT p99':>10}",
    ]
    for name, found in classes.items():
        times = [
            "-" if found[metric] is None else _ms(found[metric][percentile])
            for metric in ("ttft_ms", "tpot_ms")
            for percentile in ("p50", "p99")
        ]
        lines.append(
            f"{name:<14}{found['requests']:>9,}{found['completed']:>8,}"
            f"{100 * found['attainment']:>7.1f} %{found['output_throughput']:>11,.1f}"
            + "".join(f"{each:>10}" for each in times)
        )
    return lines


def _ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 10_000 else f"{value:.2f}"


def _short(seconds: float) -> str:
    """Whole ones, but of few the first two digits."""
    return f"{seconds:.0f}" if seconds >= 10 else number(seconds, 2)


def _table_over_time(result: Mapping[str, Any]) -> list[str]:
    over = result["over_tenths"]
    came = "sent" if result["saturation"]["held"] else "arrived"
    lines = [
        f"{'until':>9}{came:>9}{'running':>9}{'queue':>8}{'KV use':>8}{'out tok/s':>11}"
        f"{'TTFT p50':>10}{'TTFT p99':>10}{'TPOT p50':>10}{'good':>7}"
    ]
    for row, until in enumerate(over["time"]):
        arrived, good = over["arrived"][row], over["good"][row]
        times = [over[name][row] for name in ("ttft_ms_p50", "ttft_ms_p99", "tpot_ms_p50")]
        lines.append(
            f"{_short(until):>7} s{arrived:>9,}{over['running'][row]:>9.1f}"
            f"{over['waiting'][row]:>8.1f}{100 * over['kv_usage'][row]:>6.1f} %"
            f"{over['output_throughput'][row]:>11,.0f}"
            + "".join(f"{'-' if each is None else _ms(each):>10}" for each in times)
            + (f"{100 * good / arrived:>5.0f} %" if arrived else f"{'-':>7}")
        )
    lines.append(
        f"(times are those of the requests that {'were sent' if came == 'sent' else came} then)"
    )
    return lines
