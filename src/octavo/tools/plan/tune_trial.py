"""One choice of `octavo tune` tried: the engine with these settings, simulated under a load."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from octavo.engine.cache_plan import CachePlan
from octavo.engine.config import EngineConfig
from octavo.executor.cost import Rates
from octavo.spec_decode.config import SpeculativeConfig
from octavo.tools.plan.band import band, doubt, uncertain
from octavo.tools.plan.capacity import capacity
from octavo.tools.plan.hardware import Device
from octavo.tools.plan.quantization import StoredWeights
from octavo.tools.plan.saturation import Saturation, saturation
from octavo.tools.plan.simulation import Setup, check_simulated, simulate, weights_on
from octavo.tools.plan.slo import Figures, Slo, promised
from octavo.tools.plan.subject import Subject
from octavo.tools.plan.tune_space import AS_IT_PAYS, Choice, describe
from octavo.tools.workload.datasets import Sample
from octavo.words import plural

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class TuneTrial:
    """A choice under the whole load or a part of it."""

    choice: Choice
    config: EngineConfig  # that `octavo serve` would be given
    plan: CachePlan
    figures: Figures
    preemptions: int
    saturated: bool  # work comes faster than it is done
    refusal: str  # why the first request that was not served was not; "": all were
    # Of a trial that is looked into (`Trials.run`): `figures` of tools/plan/report.py has the same.
    verdict: Saturation | None = None
    error_band: dict[str, Any] | None = None
    near_saturation: str = ""

    @property
    def headroom(self) -> float | None:
        return None if self.verdict is None else self.verdict.headroom


def met(figures: Figures, slo: Slo) -> bool:
    """By the load as a whole, and by each of its classes."""
    return min(figures.attainment, *figures.classes.values(), math.inf) >= slo.attainment


def kept(trial: TuneTrial, slo: Slo) -> bool:
    """Whether it is met by an engine that keeps up with the load: of one that does not, latencies
    grow as long as the load lasts.
    """
    return met(trial.figures, slo) and not trial.saturated


class Trials:
    """How choices are tried: settings of ``base`` that a choice does not have stay as they are.

    ``usual``: the quantization whose calibration stands in where there is none. ``acceptance``: how
    often a guess is right, for choices that speculate; ``max_concurrency``: most requests in
    flight; ``watch`` is told of requests that have ended. Raises `SettingsError` for speculation
    that is not simulated.
    """

    def __init__(
        self,
        subject: Subject,
        device: Device,
        slo: Slo,
        base: EngineConfig,
        *,
        usual: str | None = None,
        seed: int = 0,
        acceptance: float | None = None,
        max_concurrency: int | None = None,
        watch: Report = lambda _: None,
    ) -> None:
        check_simulated(base.speculation)
        self.subject, self.device, self.slo, self.base = subject, device, slo, base
        self.acceptance, self.max_concurrency = acceptance, max_concurrency
        self.seed, self.watch, self._usual = seed, watch, usual
        self._weights: dict[str, StoredWeights] = {}
        self._setups: dict[Choice, tuple[Setup, CachePlan] | str] = {}

    @property
    def impossible(self) -> dict[Choice, str]:
        """The choices that were asked for and cannot be, with the reason."""
        return {choice: why for choice, why in self._setups.items() if isinstance(why, str)}

    def setup(self, choice: Choice) -> tuple[Setup, CachePlan] | str:
        """How a choice would be served, or why it cannot be."""
        if choice not in self._setups:
            try:
                self._setups[choice] = self._setup(choice)
            except ValueError as error:
                self._setups[choice] = str(error)
        return self._setups[choice]

    def _setup(self, choice: Choice) -> tuple[Setup, CachePlan]:
        if choice.max_num_batched_tokens < choice.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens {choice.max_num_batched_tokens} is below max_num_seqs "
                f"{choice.max_num_seqs}"
            )
        quantization = choice.config_quantization
        if choice.quantization not in self._weights:
            self._weights[choice.quantization] = weights_on(
                self.device, self.subject, quantization=quantization
            )
        config = replace(
            self.base,
            max_num_seqs=choice.max_num_seqs,
            max_num_batched_tokens=choice.max_num_batched_tokens,
            memory_utilization=choice.memory,
            kv_cache_dtype=choice.kv_cache_dtype,
            quantization=quantization,
            speculative_config=self._speculation(choice),
        )
        setup = Setup(
            self.subject,
            self._weights[choice.quantization],
            self.device,
            config,
            acceptance=None if choice.speculation == "off" else self.acceptance,
            uncalibrated=self._carried,
        )
        plan, _ = setup.plan()
        # By its size the cache has as many blocks wherever it is started; a share would not.
        pinned = replace(
            config,
            kv_cache_memory_bytes=plan.kv_cache_bytes,
            memory_utilization=EngineConfig().memory_utilization,
        )
        setup = replace(setup, config=pinned)
        return setup, setup.plan()[0]

    def _speculation(self, choice: Choice) -> SpeculativeConfig | None:
        """With the method of ``base``, or n-grams."""
        if choice.speculation == "off":
            return None
        count = None if choice.speculation == AS_IT_PAYS else int(choice.speculation)
        method = self.base.speculation or SpeculativeConfig(method="ngram")
        return replace(method, num_speculative_tokens=count)

    @cached_property
    def _carried(self) -> Rates | None:
        """The rates that were calibrated for the usual formats, for those that nobody has
        calibrated: on the machine's limits alone they would always win. None: there are none.
        """
        if not self.device.measured:
            return None
        config = replace(self.base, speculative_config=None)
        stored = weights_on(self.device, self.subject, quantization=self._usual)
        found = Setup(self.subject, stored, self.device, config).calibration()
        return None if found is None else found.current

    def basis(self, choice: Choice) -> str:
        """What the predictions for a choice that can be rest on."""
        found = self.setup(choice)
        assert not isinstance(found, str)
        return found[0].basis()

    def run(
        self, choice: Choice, samples: Sequence[Sample], *, thorough: bool = False
    ) -> TuneTrial | None:
        """The samples put through the engine of that choice; None where it cannot be. ``thorough``:
        with its capacity and the error band of its figures, which takes some runs more.
        """
        possible = self.setup(choice)
        if isinstance(possible, str):
            return None
        setup, plan = possible
        count = len(samples)
        span = max(sample.arrival or 0.0 for sample in samples)
        done = simulate(
            setup,
            samples,
            seed=self.seed,
            max_concurrency=self.max_concurrency,
            target=promised(self.slo.limits),
            progress=lambda ended: self.watch(
                f"{describe(choice)}: {ended} of {plural(count, 'request')} ended"
            ),
        )
        records = done.replay.records
        found = saturation(done, capacity(done, self.watch) if thorough and span else None)
        unsure = doubt(setup)
        return TuneTrial(
            choice,
            setup.config,
            plan,
            Figures.of(records, done.replay.duration, self.slo),
            done.engine.stats().preemptions,
            found.saturated,
            next((record.detail for record in records if record.reason), ""),
            found if thorough else None,
            band(done, unsure, self.slo.limits, found, self.watch) if thorough else None,
            uncertain(found, unsure) if thorough else "",
        )
