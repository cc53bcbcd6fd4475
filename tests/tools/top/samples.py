"""Samples of a server, as few words as a test needs."""

from typing import Any

from octavo.engine.snapshot import EngineSnapshot, PoolSnapshot
from octavo.scheduler.request import RequestSnapshot
from octavo.tools.top.source import Scrape, ScrapedMetrics

START = 1_700_000_000.0


def request(name: str, **more: Any) -> RequestSnapshot:
    facts: dict[str, Any] = {
        "client": "",
        "priority": 0,
        "state": "decode",
        "n": 1,
        "prompt_tokens": 120,
        "prompt_tokens_done": 120,
        "cached_tokens": 0,
        "output_tokens": 10,
        "max_tokens": 400,
        "age": 2.0,
        "queue_time": 0.01,
        "ttft": 0.25,
        "tokens_per_second": 20.0,
        "preemptions": 0,
        "on_target": None,
    }
    return RequestSnapshot(id=name, **(facts | more))


def sample(
    at: float,
    *,
    started: float = START,
    requests: list[RequestSnapshot] | None = None,
    pool: tuple[int, int, int] = (50, 30, 20),  # used, cached, free
    waste: float = 0.021,
    steps: int = 0,
    computed: int = 0,
    busy: float = 0.0,
    step_tokens: int = 0,
    step_seconds: float = 0.0,
    waiting: int = 0,
    waiting_tokens: int = 0,
    unlisted: int = 0,
    ttft: dict[float, float] | None = None,
    itl: dict[float, float] | None = None,
    predicted: tuple[float, float] | None = None,
    actual: tuple[float, float] | None = None,
    queries: float = 0.0,
    hits: float = 0.0,
    drafts: float = 0.0,
    accepted: float = 0.0,
    gauges: dict[str, float] | None = None,
    rejected: dict[str, float] | None = None,
    ended: dict[str, float] | None = None,
    draining: bool = False,
    **totals: float,
) -> Scrape:
    requests = requests or []
    used, cached, free = pool
    engine = EngineSnapshot(
        time=1000.0 + at,
        running=sum(row.state != "waiting" for row in requests),
        waiting=waiting,
        waiting_tokens=waiting_tokens,
        max_num_seqs=256,
        max_num_batched_tokens=512,
        steps=steps,
        computed_tokens=computed,
        step_tokens=step_tokens,
        step_seconds=step_seconds,
        busy_seconds=busy,
        pool=PoolSnapshot(used + cached + free, 16, used, cached, free, waste),
        requests=requests,
        unlisted=unlisted,
    )
    counts = ScrapedMetrics(started=started, gauges=gauges or {})
    counts.totals = totals | {
        "prefix_cache_queries": queries,
        "prefix_cache_hits": hits,
        "spec_decode_num_draft_tokens": drafts,
        "spec_decode_num_accepted_tokens": accepted,
    }
    counts.by_label = {"admission_rejections": rejected or {}, "request_success": ended or {}}
    for name, sums in (("predicted_step_time_seconds", predicted), ("step_time_seconds", actual)):
        if sums is not None:
            counts.sums[name] = sums
    for name, buckets in (
        ("time_to_first_token_seconds", ttft),
        ("inter_token_latency_seconds", itl),
    ):
        if buckets is not None:
            counts.buckets[name] = buckets
    return Scrape(START + 100 + at, "smollm2", "0.1.0", draining, engine, counts)
