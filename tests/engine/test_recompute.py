"""The cost of computing a part of a prompt: what the predictor says, less a margin."""

import pytest

from executor import tiny
from executor.test_cost import batch
from octavo.engine.step_time import StepTimePredictor, guessed
from octavo.executor.cost import CostModel, Rates
from octavo.kv_cache.layout import KvLayout
from octavo.models.families import program

MODEL = tiny.config()
COSTS = CostModel(program(MODEL), KvLayout.of(MODEL))
RATES = Rates(1e9, 1e9, attention_ops_per_second=1e7)


def predicted(start: int, tokens: int) -> float:
    return COSTS.seconds(batch([(start, tokens)], rows=0), RATES)


def test_it_is_the_paces_in_steps_of_the_engines_size() -> None:
    pace = StepTimePredictor(COSTS, RATES)
    assert pace.seconds_alone(0, 80, 100) == pytest.approx(predicted(0, 80) * pace.margin)
    total = predicted(50, 100) + predicted(150, 100) + predicted(250, 7)
    assert pace.seconds_alone(50, 207, 100) == pytest.approx(total * pace.margin)
    assert pace.seconds_alone(400, 50, 100) > pace.seconds_alone(0, 50, 100)  # more keys to see
    assert pace.seconds_alone(0, 100, 100) == pytest.approx(predicted(0, 100) * pace.margin)


def test_it_follows_the_pace() -> None:
    pace = StepTimePredictor(COSTS, RATES)
    before = pace.seconds_alone(0, 100, 100)
    for _ in range(40):
        pace.learn(batch([(0, 100)], rows=0), 3 * predicted(0, 100))
    assert pace.seconds_alone(0, 100, 100) == pytest.approx(3 * predicted(0, 100), rel=0.1)
    pace.calibrate(RATES)
    assert pace.seconds_alone(0, 100, 100) == pytest.approx(before)


def test_a_guess_is_not_believed_to_be_too_slow() -> None:
    """A machine that is not known yet may be several times as fast as the guess."""
    known = StepTimePredictor(COSTS, guessed(2))
    unknown = StepTimePredictor(COSTS, guessed(2), measured=False)
    assert unknown.seconds_alone(0, 100, 100) < known.seconds_alone(0, 100, 100) / 5
