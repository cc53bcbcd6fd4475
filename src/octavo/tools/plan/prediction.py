"""The cost model beside the live engine: what each step was predicted to take, and took."""

from __future__ import annotations

from collections.abc import Callable

from octavo.engine.engine import Engine, Step
from octavo.executor.cost import CostModel, Rates
from octavo.scheduler.request import RequestRecord

_GAIN = 0.02  # of a step, in the running figures


class Prediction:
    """Observes an engine. Figures are of the steps before the last: a step's time is known when it
    has been delivered. ``tell`` gets each step's seconds, predicted and actual.
    """

    tell: Callable[[float, float], None] = staticmethod(lambda predicted, actual: None)

    def __init__(
        self,
        engine: Engine,
        costs: CostModel,
        rates: Rates,
    ) -> None:
        self.predicted_seconds = 0.0
        self.actual_seconds = 0.0
        self.ratio = 1.0  # of actual to predicted, of late
        self.error = 0.0  # mean distance of predicted ÷ actual from 1, of late
        self.steps = 0
        self._engine, self._costs, self._rates = engine, costs, rates
        self._pending: float | None = None
        self._before = engine.step_seconds

    def on_step(self, step: Step) -> None:
        self._settle()
        self._pending = self._costs.seconds(step.scheduled.batch, self._rates)

    def on_end(self, record: RequestRecord) -> None:
        pass

    def _settle(self) -> None:
        before = self._engine.step_seconds
        predicted, actual = self._pending, before - self._before
        self._before = before
        if predicted is None or actual <= 0.0:  # none before, or it failed
            return
        self.predicted_seconds += predicted
        self.actual_seconds += actual
        self.steps += 1
        gain = max(_GAIN, 1 / self.steps)
        self.ratio += gain * (actual / predicted - self.ratio)
        self.error += gain * (abs(predicted / actual - 1) - self.error)
        self.tell(predicted, actual)
