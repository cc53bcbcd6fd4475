"""What the engine does and has done: `EngineStats`, read when Prometheus asks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from octavo.engine.engine import EngineStats
from octavo.serve.metrics.families import LABELS


class _Reading(NamedTuple):
    name: str
    what: str
    of: Callable[[EngineStats], float]


class _Readings(NamedTuple):
    """Several by a label's value."""

    name: str
    what: str
    label: str
    of: Callable[[EngineStats], Mapping[str, float]]


GAUGES = (
    _Reading("num_requests_running", "Sequences in the batch.", lambda s: s.running),
    _Reading("num_requests_waiting", "Sequences waiting, preempted ones too.", lambda s: s.waiting),
    _Reading(
        "num_prompt_tokens_waiting", "Tokens of the sequences waiting.", lambda s: s.waiting_tokens
    ),
    _Reading("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", lambda s: s.kv_usage),
    _Reading(
        "kv_cache_waste_perc",
        "Share of allocated KV slots that hold no token, 0 to 1.",
        lambda s: s.kv_waste,
    ),
    _Reading(
        "spec_decode_time_saved_seconds",
        "Decode time saved by speculation, as steps' times tell; below 0 where it cost more.",
        lambda s: s.time_saved_seconds,
    ),
)

COUNTERS = (
    _Reading("prompt_tokens", "Prompt tokens of scheduled requests.", lambda s: s.prompt_tokens),
    _Reading("generation_tokens", "Tokens generated.", lambda s: s.generation_tokens),
    _Reading("prompt_tokens_cached", "Prompt tokens not recomputed.", lambda s: s.prefix_hits),
    _Reading("prefix_cache_queries", "Prompt tokens looked up.", lambda s: s.prefix_queries),
    _Reading("prefix_cache_hits", "Prompt tokens found.", lambda s: s.prefix_hits),
    _Reading("num_preemptions", "Preemptions.", lambda s: s.preemptions),
    _Reading(
        "kv_cache_evictions",
        "Cached blocks overwritten, whose prompts would have to be computed again.",
        lambda s: s.kv_evictions,
    ),
    _Reading("engine_steps", "Steps the engine has run.", lambda s: s.steps),
    _Reading(
        "engine_computed_tokens",
        "Tokens put through the model, recomputed ones too.",
        lambda s: s.computed_tokens,
    ),
    _Reading("decode_passes", "Passes of decoding sequences.", lambda s: s.decode_passes),
    _Reading("spec_decode_num_drafts", "Passes that checked a draft.", lambda s: s.drafts),
    _Reading("spec_decode_num_draft_tokens", "Draft tokens checked.", lambda s: s.draft_tokens),
    _Reading(
        "spec_decode_num_accepted_tokens",
        "Draft tokens that became output.",
        lambda s: s.accepted_tokens,
    ),
    _Reading(
        "spec_decode_drafting_seconds", "Time the drafter took.", lambda s: s.drafting_seconds
    ),
    _Reading(
        "spec_decode_drafter_failures",
        "Drafters given up on; there is no speculation since.",
        lambda s: s.drafter_failures,
    ),
)

GAUGES_BY = (
    _Readings(
        "kv_cache_blocks",
        "KV blocks by state: used (a sequence refers to it), cached (free, and usable by a prompt "
        "that begins alike), free.",
        "state",
        lambda s: {
            "used": s.kv_blocks_used,
            "cached": s.kv_blocks_cached,
            "free": s.kv_blocks - s.kv_blocks_used - s.kv_blocks_cached,
        },
    ),
)

COUNTERS_BY = (
    _Readings(
        "prompt_tokens_by_source",
        "Prompt tokens of scheduled requests, by where their keys and values came from.",
        "source",
        lambda s: {
            "local_compute": s.prompt_tokens - s.prefix_hits,
            "local_cache_hit": s.prefix_hits,
        },
    ),
    _Readings(
        "prompt_tokens_cached_by_source",
        "Prompt tokens not recomputed, by the tier of the cache that held them.",
        "source",
        lambda s: {"device": s.prefix_hits},
    ),
    _Readings(
        "spec_decode_num_accepted_tokens_per_pos",
        "Draft tokens that became output, by their place in the draft.",
        "position",
        lambda s: {str(at): count for at, count in enumerate(s.accepted_per_position)},
    ),
    _Readings(
        "step_phase_seconds",
        "Time of all steps, by phase; together the time that the engine was busy.",
        "phase",
        lambda s: {
            "schedule": s.schedule_seconds,
            "execute": s.step_seconds - s.schedule_seconds - s.sample_seconds - s.deliver_seconds,
            "sample": s.sample_seconds,
            "deliver": s.deliver_seconds,
        },
    ),
)


class EngineCollector(Collector):
    def __init__(self, labels: tuple[str, ...], stats: Callable[[], EngineStats]) -> None:
        self._labels = labels
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        for reading in GAUGES:
            gauge = GaugeMetricFamily(f"octavo:{reading.name}", reading.what, labels=LABELS)
            gauge.add_metric(self._labels, reading.of(stats))
            yield gauge
        for reading in COUNTERS:
            counter = CounterMetricFamily(f"octavo:{reading.name}", reading.what, labels=LABELS)
            counter.add_metric(self._labels, reading.of(stats))
            yield counter
        for readings in GAUGES_BY:
            yield self._filled(GaugeMetricFamily, readings, stats)
        for readings in COUNTERS_BY:
            yield self._filled(CounterMetricFamily, readings, stats)

    def _filled(
        self,
        kind: type[GaugeMetricFamily | CounterMetricFamily],
        readings: _Readings,
        stats: EngineStats,
    ) -> Metric:
        family = kind(f"octavo:{readings.name}", readings.what, labels=(*LABELS, readings.label))
        for value, amount in readings.of(stats).items():
            family.add_metric((*self._labels, value), amount)
        return family
