"""What computing a part of a prompt would take: the cost model's word, at the speed of late."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from execute import tiny
from octavo.engine.recompute import Recomputing, _chunk, fastest
from octavo.execute.cost import CostModel, Rates
from octavo.kv.layout import KvLayout
from octavo.model.families import program

MODEL = tiny.config()
COSTS = CostModel(program(MODEL), KvLayout.of(MODEL))
RATES = Rates(1e9, 1e9, attention_ops_per_second=1e7)


def ran(recomputing: Recomputing, tokens: int, decodes: int, seconds: float) -> None:
    step = SimpleNamespace(
        scheduled=SimpleNamespace(batch=_chunk(0, tokens), decodes=[None] * decodes),
        started=1.0,
        ended=1.0 + seconds,
    )
    recomputing.on_step(cast(Any, step))


def predicted(start: int, tokens: int) -> float:
    return COSTS.step(_chunk(start, tokens), RATES).seconds


def test_it_is_the_cost_models_in_steps_of_the_engines_size() -> None:
    recomputing = Recomputing(COSTS, RATES, 100)
    assert recomputing.seconds(0, 80) == predicted(0, 80)
    total = predicted(50, 100) + predicted(150, 100) + predicted(250, 7)
    assert recomputing.seconds(50, 207) == pytest.approx(total)
    assert recomputing.seconds(400, 50) > recomputing.seconds(0, 50)  # more keys to attend to
    assert recomputing.per_token == predicted(0, 100) / 100


def test_it_follows_steps_with_prompts() -> None:
    recomputing = Recomputing(COSTS, RATES, 100)
    before, per_token = recomputing.seconds(0, 100), recomputing.per_token
    ran(recomputing, 63, 0, 3 * predicted(0, 63))  # too small to tell
    ran(recomputing, 100, 20, 3 * predicted(0, 100))  # too much of it was somebody else's
    assert recomputing.seconds(0, 100) == before
    for _ in range(40):
        ran(recomputing, 100, 1, 3 * predicted(0, 100))
    assert recomputing.seconds(0, 100) == pytest.approx(3 * before, rel=0.01)
    assert recomputing.per_token == pytest.approx(3 * per_token, rel=0.01)
    recomputing.calibrate(RATES)
    assert recomputing.seconds(0, 100) == before


def test_nothing_is_faster_than_the_fastest() -> None:
    assert Recomputing(COSTS, fastest(2), 100).seconds(0, 100) < predicted(0, 100)
