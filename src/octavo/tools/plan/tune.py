"""The settings of an engine that keep an SLO for the most requests a second, by simulation.

Every trial is the engine itself on a cost model, under the load (or a stretch of it). The settings
are discrete, so the search is, and it has no randomness: the same load and device give the same
answer.

1. *Successive halving* (Jamieson and Talwalkar, 2016) of a coarse grid: all its settings under a
   short stretch of the load, the busiest; the better quarter under a stretch four times as long;
   and so on to the whole load.
2. *Coordinate descent* on the whole load: from the best, one setting after the other is moved a
   step up or down as long as that is better, until no single step is.

A trial costs what it has simulated: one under a tenth of the load is a tenth of a trial.

Which is better: first a setting that keeps the SLO and keeps up with the load; of others the one
with more goodput (what differs by less than about 1 % is alike). Those that keep the SLO have all
the goodput that the load has to give, up to how soon the last answers end, and are not told apart
by it. Then the setting that rounds fewer numbers; then the lower latency (alike: about 5 %), which
is the 99th percentile nearest to its limit; then what is nearer to the engine's defaults. Where no
request is good latency comes before rounding.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from octavo.engine.config import DoesNotFit, SettingsError
from octavo.tools.plan.frontier import frontier
from octavo.tools.plan.sustained import arrival_rate, sustained
from octavo.tools.plan.tune_space import ROUNDS, Choice, Space, describe
from octavo.tools.plan.tune_trial import Report, Trials, TuneTrial, kept
from octavo.tools.workload.datasets import Sample
from octavo.words import number

KEEP = 4  # of so many settings one goes on to a stretch so many times as long
SHORTEST = 48  # requests of a stretch
SLOW = 20.0  # seconds of a trial from which one is told what to expect
GOODPUT_GRAIN, LATENCY_GRAIN = math.log(1.01), math.log(1.05)


@dataclass(frozen=True, slots=True)
class Tuned:
    """What the search found. Trials are of the whole load, in the order they were made."""

    best: TuneTrial
    default: TuneTrial | None  # None: the engine's defaults do not fit
    trials: list[TuneTrial]
    exact: TuneTrial | None  # the best of those that round no number further; None: none was tried
    impossible: dict[Choice, str]  # why a choice cannot be
    short_trials: int  # under a stretch of the load
    cost: float  # in trials of the whole load
    stopped: str | None  # why the search ended before it had nothing left to try
    frontier: list[TuneTrial]

    def with_best(self, best: TuneTrial) -> Tuned:
        """With this one, of the same choice, in place of the best."""

        def chosen(trial: TuneTrial) -> TuneTrial:
            return best if trial is self.best else trial

        return replace(
            self,
            best=best,
            default=self.default and chosen(self.default),
            trials=[*map(chosen, self.trials)],
            exact=self.exact and chosen(self.exact),
            frontier=[*map(chosen, self.frontier)],
        )


class Search:
    """The one search, of ``space``, by ``trials`` under the load ``samples``.

    ``budget``: how much to simulate, in runs of the whole load; ``seconds``: how long (then the
    answer depends on this machine's pace); ``report`` is told of every trial.
    """

    def __init__(
        self,
        trials: Trials,
        samples: Sequence[Sample],
        space: Space,
        *,
        budget: float = 40,
        seconds: float = math.inf,
        report: Report = lambda _: None,
    ) -> None:
        self.trials, self.samples, self.space, self.report = trials, samples, space, report
        self._budget, self._deadline = budget, time.monotonic() + seconds
        self._whole: dict[Choice, TuneTrial] = {}
        self._cost, self._short_trials = 0.0, 0
        self._stopped: str | None = None

    @property
    def arrival_rate(self) -> float:
        return arrival_rate(self.samples)

    # What is better

    def merit(self, trial: TuneTrial) -> tuple[float, ...]:
        """More is better. A total order, so that a search can be repeated."""
        figures, choice = trial.figures, trial.choice
        pressure = figures.pressure(self.trials.slo)
        near = _grain(pressure, LATENCY_GRAIN)
        last = (-self.space.distance(choice), -pressure)
        if not figures.good:
            return (-math.inf, -near, -choice.rounding, *last)
        if self.arrival_rate < math.inf and kept(trial, self.trials.slo):
            return (math.inf, -choice.rounding, -near, *last)
        return (_grain(figures.goodput, GOODPUT_GRAIN), -choice.rounding, -near, *last)

    # A trial

    def _run(self, choice: Choice, samples: Sequence[Sample]) -> TuneTrial | None:
        trial = self.trials.run(choice, samples)
        if trial is not None:
            self._cost += len(samples) / len(self.samples)
        return trial

    def try_whole(self, choice: Choice) -> TuneTrial | None:
        """Under the whole load, once; None where it cannot be or the budget is spent."""
        if choice not in self._whole and not self._over():
            trial = self._run(choice, self.samples)
            if trial is not None:
                self._whole[choice] = trial
                self._tell(choice)
        return self._whole.get(choice)

    def _in_time(self) -> bool:
        return time.monotonic() <= self._deadline

    def _over(self) -> bool:
        if self._cost + 1 > self._budget:
            self._stopped = self._stopped or f"{self._budget:g} trials were made"
        elif not self._in_time():
            self._stopped = self._stopped or "the time was up"
        return self._stopped is not None

    def _tell(self, choice: Choice) -> None:
        best = max(self._whole.values(), key=self.merit)
        self.report(
            f"{self._cost:.1f} of {self._budget:g} trials: {describe(choice)}: "
            f"{number(self._whole[choice].figures.goodput)} good requests/s; best so far "
            f"{number(best.figures.goodput)} ({describe(best.choice)})"
        )

    # The search

    def search(self) -> Tuned:
        started = time.monotonic()
        default = self.try_whole(self.space.default)
        if (each := time.monotonic() - started) > SLOW:
            self.report(
                f"a trial of all {len(self.samples)} requests takes {each:.0f} s here, and there "
                f"may be {self._budget:g}: fewer with --trials or --max-seconds, or a part of the "
                "load with --trace-duration"
            )
        candidates = [choice for choice in self.space.coarse() if self._possible(choice)]
        if not candidates:
            candidates = [choice for choice in self.space.all() if self._possible(choice)]
        if not candidates:
            reason = self.trials.setup(self.space.default)
            assert isinstance(reason, str)
            raise DoesNotFit(f"no setting fits {self.trials.device.name}; the default: {reason}")
        for choice in self._halved(candidates):
            self.try_whole(choice)
        if not self._whole:
            raise SettingsError(
                f"no trial could be made, {self._stopped}: allow more with --trials or "
                "--max-seconds"
            )
        self._descend(self.space.axes)
        best = max(self._whole.values(), key=self.merit)
        if best.choice.rounding:  # then what can be had without is of interest, too
            self._descend([name for name in self.space.axes if name not in ROUNDS], exact=True)
        trials = list(self._whole.values())
        return Tuned(
            max(trials, key=self.merit),
            default,
            trials,
            max(
                (trial for trial in trials if not trial.choice.rounding),
                key=self.merit,
                default=None,
            ),
            self.trials.impossible,
            self._short_trials,
            self._cost,
            self._stopped,
            frontier(trials, self.trials.slo),
        )

    def _possible(self, choice: Choice) -> bool:
        return not isinstance(self.trials.setup(choice), str)

    def _halved(self, candidates: list[Choice]) -> list[Choice]:
        """The better ones, under longer and longer stretches, best first: to be tried in whole."""
        count = len(self.samples)
        # What even the shortest stretches of would cost too much: those nearest to the default.
        most = max(KEEP, int(self._budget / 3 * count / min(SHORTEST, count)))
        candidates = sorted(candidates, key=self.space.distance)[:most]
        while len(candidates) > KEEP:
            # Each stretch may cost a sixth of what may be spent in all.
            share = self._budget / 6 / len(candidates)
            length = max(min(SHORTEST, count), int(count * share))
            if length >= count:
                break
            stretch = busiest(self.samples, length)
            tried = []
            for index, choice in enumerate(candidates):
                if not self._in_time():
                    self._stopped = "the time was up"
                    break
                self.report(
                    f"{index + 1} of {len(candidates)} settings under the busiest {length} of "
                    f"{count} requests: {describe(choice)}"
                )
                trial = self._run(choice, stretch)
                if trial is not None:
                    tried.append(trial)
                    self._short_trials += 1
            if not tried:
                break
            tried.sort(key=self.merit, reverse=True)
            candidates = [trial.choice for trial in tried[: -(-len(tried) // KEEP)]]
        return candidates

    def _descend(self, names: Iterable[str], *, exact: bool = False) -> None:
        """From the best, along these axes; ``exact``: from the best that rounds no number."""
        start = [trial for trial in self._whole.values() if not (exact and trial.choice.rounding)]
        if not start:
            return
        best = max(start, key=self.merit)
        improved = True
        while improved:
            improved = False
            for name in names:
                for by in (-1, 1):
                    while (near := self.space.step(best.choice, name, by)) is not None:
                        trial = self.try_whole(near)
                        if trial is None or self.merit(trial) <= self.merit(best):
                            break
                        best, improved = trial, True

    def sustained(self, trial: TuneTrial) -> list[tuple[float, TuneTrial]]:
        """Where the engine of a trial no longer keeps the SLO, as long as there is time."""
        return sustained(
            self.trials, trial, self.samples, in_time=self._in_time, report=self.report
        )


def _grain(value: float, width: float) -> float:
    if value <= 0 or math.isinf(value):
        return math.inf if value > 0 else -math.inf
    return float(round(math.log(value) / width))


def busiest(samples: Sequence[Sample], length: int) -> list[Sample]:
    """The ``length`` samples in a row with the most tokens a second, from time 0 on."""

    def rate(first: int) -> float:
        tokens = total[first + length] - total[first]
        return tokens / max((arrivals[first + length - 1] - arrivals[first]), 1e-9)

    arrivals = [sample.arrival or 0.0 for sample in samples]
    total = [0]
    for sample in samples:
        total.append(total[-1] + sample.prompt_len + sample.output_len)
    first = max(range(len(samples) - length + 1), key=rate)
    return [
        replace(sample, arrival=(sample.arrival or 0.0) - arrivals[first])
        for sample in samples[first : first + length]
    ]
