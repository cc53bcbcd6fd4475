"""Drawn loads, some of which an engine can serve: does the simulator say which?

    python benchmarks/saturation.py [--loads 300] [--seed 0] [--jobs 1] [--json]

Models, devices, seats, token budgets, policies, prefix sharing, chunked and whole prompts, static
batches, reserved memory, lengths (fixed, uniform, exponential, lognormal, one request of twenty
times the length) and arrivals (regular, Poisson, gamma, bursts, calm and busy times in turn, a
client that holds requests back) are drawn with a seed; the rate is 0.3 to 3 times the capacity,
evenly in logarithms.

Truth does not use what the verdict does:

- *Capacity* is the rate at which a long queue of the same requests is let in, turn after turn.
- *Work* is the tokens that are left of all requests in the system, a prompt's and an answer's in
  the seconds that each takes in two such queues: of the requests as they are, and of their prompts
  with answers of one token.
- *The load is played twice*, the second time right behind the first (in static batches six times:
  a batch with a long answer takes many times as long as others). It is beyond saturation if work in
  the system has grown by more than a tenth over the second half, from the last arrival of one turn
  to the last of another (and by more than 2 % of a turn's work: single requests are no growth). So
  the load's beginning, a burst at its end, and where its last request happens to come are the same
  on both sides.

Also shown is how often the verdict agrees with the growth of work in the one load as it is, by more
than a tenth of what came in over its second half: there a burst that comes last is growth.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from octavo.engine.config import EngineConfig
from octavo.scheduler.policies.config import POLICIES
from octavo.tools.plan.capacity import capacity
from octavo.tools.plan.hardware import device
from octavo.tools.plan.quantization import StoredWeights
from octavo.tools.plan.saturation import saturation
from octavo.tools.plan.simulation import Setup, simulate, weights_on
from octavo.tools.plan.subject import Subject
from octavo.tools.workload.classes import LoadClass
from octavo.tools.workload.datasets import PREFIXES, RANDOM, Part, Sample
from octavo.tools.workload.metrics import Record

MODELS = (
    ("smollm2-135m", "memory=10,int8=150,bf16=80,fp32=37,capacity=16"),
    ("gemma-3-1b", "memory=40,int8=900,bf16=450,fp32=200,capacity=32"),
    ("llama-3-8b", "h100"),
    ("llama-3-8b", "a10"),
    ("llama-2-7b", "a100-40gb"),
)
LENGTHS = ("fixed", "uniform", "exponential", "lognormal", "one long")
ARRIVALS = ("regular", "poisson", "gamma", "bursts", "calm and busy", "held back")
NEAR = 0.95, 1.05  # of capacity, between which nothing is promised
FAR = 1.3  # times capacity, beyond which, up and down, nothing may be wrong
GROWN, LEAST = 0.1, 0.02
CLASSES = (
    LoadClass("many", 0.5, clients=2),
    LoadClass("few", 0.5, clients=3, priority=1, weight=2.0),
)
_TURN = 1 << 90


class Load(NamedTuple):
    setup: Setup
    samples: list[Sample]
    times: np.ndarray  # [samples] of arrival, in mean intervals
    most: int | None  # that the client lets be in flight
    share: float  # of capacity
    lengths: str
    arrivals: str


@dataclass(frozen=True)
class Row:
    seed: int
    lengths: str
    arrivals: str
    batching: str
    memory: str
    policy: str
    seats: int
    requests: int
    share: float  # of capacity, as measured here
    headroom: float  # as the simulator says
    saturated: bool  # the verdict
    grows: bool  # the truth
    grew: bool  # in the one load, bursts and all

    @property
    def wrong(self) -> bool:
        return self.saturated is not self.grows

    @property
    def near(self) -> bool:
        return NEAR[0] <= self.share <= NEAR[1]

    @property
    def far(self) -> bool:
        return not 1 / FAR <= self.share <= FAR


@cache
def _placed(model: str, on: str) -> tuple[Subject, StoredWeights, Any]:
    subject, where = Subject.find(model), device(on, _silent)
    return subject, weights_on(where, subject), where


def _silent() -> Any:
    raise RuntimeError("no device here is measured")


def drawn(seed: int, requests: tuple[int, int] = (80, 120), seats: int = 6) -> Load:
    """``requests``: fewest and most; ``seats``: at most 2 to this power."""
    rng = np.random.default_rng((0x5A7, seed))
    subject, stored, where = _placed(*MODELS[rng.integers(len(MODELS))])
    most_seats = int(2 ** rng.integers(2, seats + 1))
    policy = str(rng.choice(("fcfs", *POLICIES)))
    memory = "reserve" if rng.random() < 0.1 else "paged"
    batching = "static" if rng.random() < 0.1 else "continuous"
    chunked = bool(rng.random() < 0.85)
    budget = max(most_seats, int(2 ** rng.integers(8, 12))) if chunked else 8192
    # A load lasts for several answers, or it is over before the engine has filled up.
    count = max(int(np.exp(rng.uniform(*np.log(requests)))), 5 * most_seats)
    lengths, arrivals = str(rng.choice(LENGTHS)), str(rng.choice(ARRIVALS))
    shared = int(rng.choice((0, 0, 1, 6)))  # prefixes that prompts have in common
    prefix = int(rng.integers(32, 512)) if shared else 0
    prompts = _lengths(rng, lengths, float(np.exp(rng.uniform(*np.log((16, 300))))), count)
    answers = _lengths(rng, lengths, float(np.exp(rng.uniform(*np.log((8, 50))))), count)
    samples = []
    for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        parts: tuple[Part, ...] = (Part(RANDOM + 1 + index, prompt),)
        if shared:
            parts = (Part(PREFIXES + int(rng.integers(shared)), prefix), *parts)
        kind = CLASSES[rng.integers(2)] if POLICIES[policy].request_fields else None
        client = int(rng.integers(2)) if kind else 0
        samples.append(
            Sample(prefix + prompt, answer, parts, arrival=0.0, kind=kind, client=client)
        )
    times = np.cumsum(_gaps(rng, arrivals, count))
    config = EngineConfig(
        max_model_len=4096,
        memory_utilization=0.9,
        max_num_seqs=most_seats,
        max_num_batched_tokens=budget,
        scheduling_policy=policy,  # type: ignore[arg-type]
        enable_prefix_caching=memory == "paged",
    )
    return Load(
        Setup(
            subject, stored, where, config,
            batching=batching, memory=memory, chunked_prefill=chunked,  # type: ignore[arg-type]
        ),
        samples,
        times * count / times[-1],
        int(rng.integers(2, 2 * most_seats + 1)) if arrivals == "held back" else None,
        float(np.exp(rng.uniform(*np.log((0.3, 3.0))))),
        lengths,
        arrivals,
    )  # fmt: skip


def _lengths(rng: np.random.Generator, kind: str, mean: float, count: int) -> list[int]:
    match kind:
        case "uniform":
            found = rng.uniform(0.2 * mean, 1.8 * mean, count)
        case "exponential":
            found = mean * rng.exponential(1, count)
        case "lognormal":
            found = mean * rng.lognormal(-0.5, 1.0, count)
        case _:
            found = np.full(count, mean)
    if kind == "one long":
        found[rng.integers(count)] *= 20
    cut: list[int] = np.clip(found, 2, 1900).astype(int).tolist()
    return cut


def _gaps(rng: np.random.Generator, kind: str, count: int) -> np.ndarray:
    match kind:
        case "regular":
            return np.ones(count)
        case "gamma":
            return rng.gamma(0.3, 1 / 0.3, count)
        case "bursts":
            size = int(rng.integers(3, 12))
            return np.where(np.arange(count) % size == 0, size * rng.exponential(1, count), 0.0)
        case "calm and busy":
            busy = np.arange(count) // max(1, count // 12) % 2 == 0
            return rng.exponential(1, count) * np.where(busy, 0.5, 1.5)
    return rng.exponential(1, count)


# --- the truth -----------------------------------------------------------------------------------


def turns(samples: Sequence[Sample], count: int, times: np.ndarray | None = None) -> list[Sample]:
    """The load so often, one behind the other, with tokens of its own in each; all at once, or at
    ``times`` [samples] in seconds.
    """
    return [
        replace(
            sample,
            parts=tuple(Part(part.key + turn * _TURN, part.length) for part in sample.parts),
            arrival=0.0 if times is None else float(times[index] + turn * times[-1]),
        )
        for turn in range(count)
        for index, sample in enumerate(samples)
    ]


def let_in(setup: Setup, samples: Sequence[Sample], most: int | None) -> float:
    """Requests a second of a long queue of them."""
    count, seats = len(samples), setup.config.max_num_seqs
    seats = min(seats, most or seats)
    more = 8 if setup.batching == "static" else 4
    queue = turns(samples, max(more, 2 + math.ceil(2 * seats / count)))
    done = simulate(setup, queue, max_concurrency=min(4 * seats + 2, most or len(queue)))
    admitted = sorted(record.start + record.waited for record in done.replay.records)
    first = max(count // 2, seats + seats // 2)
    whole = (len(admitted) - 1 - first) // count * count
    return whole / (admitted[first + whole] - admitted[first])


@dataclass(frozen=True)
class Costs:
    """Seconds of a token."""

    prompt: float
    answer: float

    def of(self, record: Record) -> float:
        return _computed(record) * self.prompt + record.output_tokens * self.answer

    def left(self, records: Sequence[Record], time: float) -> float:
        """Work in the system, what the client holds back included."""
        seconds = 0.0
        for record in records:
            if record.start - record.queue_time < time <= record.start + record.latency:
                given = np.cumsum([record.start + record.ttft, *record.itl])
                share = np.count_nonzero(given < time) / len(given)
                seconds += (1 - share) * record.output_tokens * self.answer
                if not share:
                    seconds += _computed(record) * self.prompt
        return seconds


def _computed(record: Record) -> int:
    return record.prompt_len - (record.cached_tokens or 0)


def study(seed: int, **how: Any) -> Row:
    load = drawn(seed, **how)
    setup, samples, most = load.setup, load.samples, load.most
    can = let_in(setup, samples, most)
    only_prompts = let_in(setup, [replace(sample, output_len=1) for sample in samples], most)
    times = load.times / (load.share * can)
    span = float(times[-1])
    done = simulate(setup, turns(samples, 1, times), max_concurrency=most)
    verdict = saturation(done, capacity(done))
    assert verdict.headroom is not None

    records = done.replay.records
    prompt, answer = (
        float(np.mean([of(record) for record in records]))
        for of in (_computed, lambda record: record.output_tokens)
    )
    costs = Costs(1 / only_prompts / prompt, max(0.0, 1 / can - 1 / only_prompts) / answer)
    half = 3 if setup.batching == "static" else 1
    played = simulate(setup, turns(samples, 2 * half, times), max_concurrency=most).replay.records
    first, second = (costs.left(played, time) for time in (half * span, 2 * half * span))
    work = sum(map(costs.of, records))
    came = sum(costs.of(r) for r in records if r.start - r.queue_time > span / 2)
    middle, end = (costs.left(records, time) for time in (span / 2, span))
    return Row(
        seed, load.lengths, load.arrivals, setup.batching, setup.memory,
        setup.config.scheduling_policy, setup.config.max_num_seqs, len(samples), load.share,
        verdict.headroom, verdict.saturated,
        bool(second > (1 + GROWN) * first and second - first > LEAST * work),
        bool(end - middle > GROWN * came),
    )  # fmt: skip


# --- for people ----------------------------------------------------------------------------------


def table(rows: Sequence[Row]) -> list[str]:
    lines = [
        "| of capacity | loads | grow | said to | wrong | in the one load |",
        "|---|---|---|---|---|---|",
    ]
    edges = (0.3, 0.6, 1 / FAR, NEAR[0], NEAR[1], FAR, 2.0, 3.0)
    for low, high in pairwise(edges):
        some = [row for row in rows if low <= row.share < high]
        lines.append(
            f"| {low:.2f} to {high:.2f} | {len(some)} | {sum(row.grows for row in some)} | "
            f"{sum(row.saturated for row in some)} | {sum(row.wrong for row in some)} | "
            f"{sum(row.saturated is not row.grew for row in some)} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--loads", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0, help="of the first")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    rows: list[Row] = []
    with ProcessPoolExecutor(arguments.jobs) as pool:
        for row in pool.map(study, range(arguments.seed, arguments.seed + arguments.loads)):
            rows.append(row)
            print(f"\r{len(rows)} of {arguments.loads} loads", end="", file=sys.stderr)
            if row.wrong and not row.near:
                print(f"\nwrong: {row}", file=sys.stderr)
    print(file=sys.stderr)
    counted = [row for row in rows if not row.near]
    wrong = [row for row in counted if row.wrong]
    errors = [abs(1 / row.headroom / row.share - 1) for row in rows]
    summary = {
        "loads": len(rows),
        "outside": len(counted),
        "wrong": len(wrong) / max(len(counted), 1),
        "wrong_far": sum(row.far for row in wrong),
        "in_the_one_load": sum(r.saturated is not r.grew for r in counted) / max(len(counted), 1),
        "headroom_error": {f"p{p}": float(np.percentile(errors, p)) for p in (50, 90)},
    }
    if arguments.json:
        print(json.dumps({"rows": [asdict(row) for row in rows], **summary}))
        return
    print("\n".join(table(rows)))
    print(
        f"\n{len(wrong)} of {len(counted)} loads outside {NEAR[0]:g} to {NEAR[1]:g} of capacity "
        f"are judged wrongly: {summary['wrong']:.1%}; beyond {FAR:g} times, {summary['wrong_far']}"
    )
    print(
        f"against growth in the one load as it is: {summary['in_the_one_load']:.1%}; headroom is "
        f"off by {np.median(errors):.1%} (median), {np.percentile(errors, 90):.1%} (nine of ten)"
    )


if __name__ == "__main__":
    main()
