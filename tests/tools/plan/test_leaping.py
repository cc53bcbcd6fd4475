"""A simulation that leaps is one that steps: records, counters and time series (the engine's own
test is tests/engine/test_leap.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from octavo.engine.config import EngineConfig
from octavo.engine.engine import Step
from octavo.engine.leap import Leap
from octavo.scheduler.request import RequestRecord
from octavo.tools.plan.hardware import PUBLISHED
from octavo.tools.plan.simulation import Setup, simulate, weights_on
from octavo.tools.plan.subject import Subject
from octavo.tools.plan.timeline import Timeline
from octavo.tools.workload.datasets import PREFIXES, RANDOM, Part, Sample


class Leapt:
    """Counts the leaps."""

    def __init__(self) -> None:
        self.leaps = 0

    def on_step(self, step: Step) -> None: ...

    def on_leap(self, leap: Leap) -> None:
        self.leaps += 1

    def on_end(self, record: RequestRecord) -> None: ...


SAMPLES = [
    Sample(
        300 + 40 * (index % 7),
        20 + 37 * (index % 5),
        (Part(PREFIXES + index % 3, 200), Part(RANDOM + index, 100 + 40 * (index % 7))),
    )
    for index in range(40)
]


@pytest.mark.parametrize(
    ("settings", "more"),
    [
        ({}, {}),
        ({"max_num_seqs": 4}, {"max_concurrency": 9}),
        ({"max_model_len": 1024, "kv_cache_memory_bytes": 330 << 20}, {}),
        ({"max_num_seqs": 8}, {"batching": "static"}),
        ({}, {"memory": "reserve", "max_tokens": 120}),
        ({}, {"apart": 1.7}),
    ],
)
def test_leaping_changes_nothing(settings: dict[str, Any], more: dict[str, Any]) -> None:
    subject, device = Subject.find("llama-3-8b"), PUBLISHED["h100"]
    config = EngineConfig(**{"memory_utilization": 0.9} | settings)
    apart = more.pop("apart", 0.031)
    samples = [replace(each, arrival=apart * index) for index, each in enumerate(SAMPLES)]
    techniques = {name: more.pop(name) for name in ("batching", "memory") if name in more}
    setup = Setup(subject, weights_on(device, subject), device, config, **techniques)
    results = []
    for leaps in (True, False):
        timeline, leapt = Timeline(), Leapt()
        run = simulate(setup, samples, observers=[timeline, leapt], leaps=leaps, **more)
        assert (leapt.leaps > 0) is leaps
        run.engine.check_integrity()
        columns = {name: column.tolist() for name, column in run.series.columns().items()}
        stats = run.engine.stats()
        gauges = run.series.most, run.series.means()
        results.append((run.replay, columns, stats, gauges, timeline.trace(run)))
    assert results[0] == results[1]
