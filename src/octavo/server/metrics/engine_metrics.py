"""What the engine does and has done: `EngineStats`, read when Prometheus asks.

Every server has every metric, whatever it was asked to do: a dashboard finds each name, and a zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from octavo.engine.stats import EngineStats
from octavo.kv_cache.connectors import NAMES
from octavo.kv_cache.connectors.base import ConnectorStats
from octavo.server.metrics.metric_families import Readings


def _external_hits(stats: EngineStats) -> int:
    """Return the prompt tokens that were loaded by connectors."""
    return sum(stats.external_hits.values())


Figure = Callable[[ConnectorStats], float]


def _by_connector(stats: EngineStats, figure: Figure) -> dict[str, float]:
    """Return a figure of every connector, by name; 0 for those that the engine does not use."""
    absent = dict.fromkeys(NAMES, ConnectorStats())
    return {name: figure(each) for name, each in (absent | {**stats.connectors}).items()}


def _of_all(figure: Figure) -> Callable[[EngineStats], float]:
    """Return what reads a figure's sum over all connectors."""
    return lambda stats: sum(_by_connector(stats, figure).values())


def _copied_bytes(name: str) -> Callable[[EngineStats], Mapping[str, float]]:
    """Return what reads the bytes that a connector other than host memory has copied."""
    return lambda stats: {
        f"{NAMES[0]}_to_{name}": _by_connector(stats, lambda c: c.saved_bytes)[name],
        f"{name}_to_{NAMES[0]}": _by_connector(stats, lambda c: c.loaded_bytes)[name],
    }


GAUGES: Readings[EngineStats] = {
    "num_requests_running": ("Sequences in the batch.", lambda s: s.running),
    "num_requests_waiting": ("Sequences waiting, preempted ones too.", lambda s: s.waiting),
    "num_requests_paused": (
        "Sequences that do not go on because their clients do not read their output.",
        lambda s: s.paused,
    ),
    "num_prompt_tokens_waiting": ("Tokens of the sequences waiting.", lambda s: s.waiting_tokens),
    "kv_cache_usage_perc": ("Share of KV blocks in use, 0 to 1.", lambda s: s.kv_usage),
    "kv_cache_waste_perc": (
        "Share of allocated KV slots that hold no token, 0 to 1.",
        lambda s: s.kv_waste,
    ),
    "spec_decode_time_saved_seconds": (
        "Decode time saved by speculation, as steps' times tell; below 0 where it cost more.",
        lambda s: s.time_saved_seconds,
    ),
    "num_requests_waiting_by_reason": (
        "Sequences waiting, for room (capacity) or for blocks that are read from disk (deferred).",
        lambda s: {
            "capacity": s.waiting - s.waiting_deferred,
            "deferred": s.waiting_deferred,
        },
        "reason",
    ),
    "kv_cache_blocks": (
        "KV blocks by state: used (a sequence refers to it), cached (free, and usable by a prompt "
        "that begins alike), free.",
        lambda s: {
            "used": s.kv_blocks_used,
            "cached": s.kv_blocks_cached,
            "free": s.kv_blocks - s.kv_blocks_used - s.kv_blocks_cached,
        },
        "state",
    ),
    "state_snapshots": (
        "Snapshots of recurrent layers' states in the pool: a running sequence's last (rolling), "
        "or kept.",
        lambda s: s.state_snapshots,
        "kind",
    ),
    # Of steps with a target (--itl-target); without one there are none.
    "itl_target_seconds": (
        "What a step may take in which somebody decodes.",
        lambda s: s.itl_target_s or 0.0,
    ),
    "paced_step_spread": (
        "Standard deviation of actual to predicted time of the paced steps, of late.",
        lambda s: s.step_spread,
    ),
    "kv_offload_used_bytes": (
        "Bytes of KV that a tier holds.",
        lambda s: _by_connector(s, lambda c: c.used_bytes),
        "tier",
    ),
    "kv_offload_capacity_bytes": (
        "Bytes of KV that a tier may hold.",
        lambda s: _by_connector(s, lambda c: c.capacity_bytes),
        "tier",
    ),
}

COUNTERS: Readings[EngineStats] = {
    "prompt_tokens": ("Prompt tokens of scheduled requests.", lambda s: s.prompt_tokens),
    "generation_tokens": ("Tokens generated.", lambda s: s.generation_tokens),
    "prompt_tokens_cached": ("Prompt tokens not recomputed.", lambda s: s.prefix_hits),
    "prefix_cache_queries": ("Prompt tokens looked up.", lambda s: s.prefix_queries),
    "prefix_cache_hits": (
        "Prompt tokens found in the pool's blocks.",
        lambda s: s.prefix_hits - _external_hits(s),
    ),
    "num_preemptions": ("Preemptions.", lambda s: s.preemptions),
    "requests_admitted": ("Requests that were queued.", lambda s: s.admitted),
    "kv_cache_evictions": (
        "Cached blocks overwritten, whose prompts would have to be computed again.",
        lambda s: s.kv_evictions,
    ),
    "state_restores": (
        "Sequences that began with a snapshot of their recurrent layers' state.",
        lambda s: s.state_restores,
    ),
    "engine_steps": ("Steps the engine has run.", lambda s: s.steps),
    "engine_computed_tokens": (
        "Tokens put through the model, recomputed ones too.",
        lambda s: s.computed_tokens,
    ),
    "decode_steps": ("Steps in which somebody decoded.", lambda s: s.decode_steps),
    "decode_passes": ("Passes of decoding sequences.", lambda s: s.decode_passes),
    "spec_decode_num_drafts": ("Passes that checked a draft.", lambda s: s.drafts),
    "spec_decode_num_draft_tokens": ("Draft tokens checked.", lambda s: s.draft_tokens),
    "spec_decode_num_accepted_tokens": (
        "Draft tokens that became output.",
        lambda s: s.accepted_tokens,
    ),
    "spec_decode_drafting_seconds": ("Time waited for the drafter.", lambda s: s.drafting_seconds),
    "spec_decode_drafter_failures": (
        "Drafters given up on; there is no speculation since.",
        lambda s: s.drafter_failures,
    ),
    "prompt_tokens_by_source": (
        "Prompt tokens of scheduled requests, by where their keys and values came from.",
        lambda s: {
            "local_compute": s.prompt_tokens - s.prefix_hits,
            "local_cache_hit": s.prefix_hits - _external_hits(s),
            "external_kv_transfer": _external_hits(s),
        },
        "source",
    ),
    "prompt_tokens_cached_by_source": (
        "Prompt tokens not recomputed, by the tier of the cache that held them.",
        lambda s: {
            "device": s.prefix_hits - _external_hits(s),
            **dict.fromkeys(NAMES, 0),
            **s.external_hits,
        },
        "source",
    ),
    "spec_decode_num_accepted_tokens_per_pos": (
        "Draft tokens that became output, by their place in the draft.",
        lambda s: {str(at): count for at, count in enumerate(s.accepted_per_position or [0])},
        "position",
    ),
    "step_phase_seconds": (
        "Time of all steps, by phase; together the time that the engine was busy.",
        lambda s: {
            "schedule": s.schedule_seconds,
            "execute": s.step_seconds - s.schedule_seconds - s.sample_seconds - s.deliver_seconds,
            "sample": s.sample_seconds,
            "deliver": s.deliver_seconds,
        },
        "phase",
    ),
    # Of steps with a target (--itl-target); without one there are none.
    "late_steps": ("Steps with a target that took longer.", lambda s: s.late_steps),
    "paced_steps": (
        "Steps with prompts, whose size was chosen by the time they were predicted to take.",
        lambda s: s.paced_steps,
    ),
    "paced_step_seconds": (
        "Time that paced steps took, without copies of blocks from other tiers.",
        lambda s: s.paced_seconds,
    ),
    "paced_step_predicted_seconds": (
        "Time that paced steps were predicted to take, without copies of blocks from other tiers.",
        lambda s: s.predicted_seconds,
    ),
    # Of the connectors; all 0 where there are none.
    "external_prefix_cache_queries": (
        "Prompt tokens looked up in other tiers, those that the pool's blocks do not hold.",
        lambda s: s.prefix_queries - s.prefix_hits + _external_hits(s) if s.connectors else 0,
    ),
    "external_prefix_cache_hits": ("Prompt tokens found there.", lambda s: _external_hits(s)),
    "preempted_tokens_loaded": (
        "Tokens of preempted sequences loaded from another tier instead of computed again.",
        lambda s: s.swapped_tokens,
    ),
    "kv_offload_loading_seconds": (
        "Time that loading blocks into the pool took.",
        _of_all(lambda c: c.loading_seconds),
    ),
    "kv_offload_corrupted_blocks": (
        "Blocks on disk that were not what was written, and were dropped.",
        _of_all(lambda c: c.corrupted_blocks),
    ),
    "kv_offload_failed_reads": (
        "Blocks on disk that could not be read, and stay there.",
        _of_all(lambda c: c.failed_loads),
    ),
    "kv_offload_failed_writes": (
        "Blocks that could not be written to disk.",
        _of_all(lambda c: c.failed_saves),
    ),
    "kv_offload_not_worth_loading": (
        "Hits left alone because computing was predicted to be quicker.",
        _of_all(lambda c: c.skipped_hits),
    ),
    "kv_offload_blocks": (
        "Blocks copied between the pool (device) and host memory.",
        lambda s: {
            f"device_to_{NAMES[0]}": _by_connector(s, lambda c: c.saved_blocks)[NAMES[0]],
            f"{NAMES[0]}_to_device": _by_connector(s, lambda c: c.loaded_blocks)[NAMES[0]],
        },
        "transfer",
    ),
    "kv_offload_fetches": (
        "Requests that waited for the disk, and got all of it in time or computed the rest (late).",
        lambda s: {
            "in_time": _of_all(lambda c: c.loads_in_time)(s),
            "late": _of_all(lambda c: c.loads_late)(s),
        },
        "result",
    ),
    **{
        f"kv_offload_{name}_bytes": (
            f"Bytes copied between host memory and {name}.",
            _copied_bytes(name),
            "transfer",
        )
        for name in NAMES[1:]
    },
}
