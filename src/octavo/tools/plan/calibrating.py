"""Measure how long this machine takes for a model's steps, and how fast it is now."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime

from octavo.engine.calibration import Calibration, CalibrationKey, Moment
from octavo.engine.config import EngineConfig, SettingsError
from octavo.engine.load import LoadedEngine
from octavo.executor.cost import Rates
from octavo.machine.others import MUCH, Others
from octavo.tools.plan.fitting import Observation, fit, slowness
from octavo.tools.plan.observing import PROBE_SECONDS, SECONDS, Unobservable, observe, probe

NOISY = 0.08  # median error of a step, above which others have been at work
OTHER = 1.4  # times as fast, or as slow: another machine than that of a calibration


def measure(
    loaded: LoadedEngine,
    *,
    seconds: float = SECONDS,
    seed: int = 0,
    progress: Callable[[str], None] = lambda _: None,
) -> Calibration:
    """Run a scripted load on an idle engine and fit to its steps; it takes under a minute.

    Raises `SettingsError` for an engine that speculates or has no prefix cache, and for one
    that cannot run the load or shows too little of itself.
    """
    check_settings(loaded.config)
    executor = loaded.engine.executor
    start, others = time.perf_counter(), Others()
    progress("measuring the machine's limits")
    limits = executor.measure_limits()
    roof = limits.rates(executor.threads, loaded.weight_bytes)
    observations = _observed(
        lambda: observe(loaded.engine, seconds=seconds, seed=seed, progress=progress)
    )
    progress("fitting")
    try:
        fitted = fit(executor.costs, observations, roof, executor.threads)
    except ValueError as error:
        raise SettingsError(f"cannot be calibrated: {error}") from None
    return Calibration(
        loaded.checkpoint.config.name or loaded.checkpoint.path.name,
        CalibrationKey.loaded(loaded),
        executor.capabilities.tier,
        datetime.now(UTC).isoformat(timespec="seconds"),
        len(observations),
        time.perf_counter() - start,
        fitted.rates,
        fitted.held_up,
        fitted.deviations,
        roof,
        fitted.errors,
        fitted.error,
        others=others.taken().share,
    )


def refreshed(
    calibration: Calibration,
    loaded: LoadedEngine,
    *,
    seconds: float = PROBE_SECONDS,
    seed: int = 0,
) -> Calibration:
    """Return the calibration with how fast the machine is now, from some seconds of a light load
    on the idle engine that it belongs to. Raises as `measure`.
    """
    check_settings(loaded.config)
    executor = loaded.engine.executor
    others = Others()
    steps = _observed(lambda: probe(loaded.engine, seconds=seconds, seed=seed))
    slow = slowness(executor.costs, steps, calibration.rates, calibration.held_up)
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return replace(calibration, moment=Moment(*slow, date, len(steps), others.taken().share))


def check_settings(config: EngineConfig) -> None:
    """Raise `SettingsError` for an engine that cannot be calibrated."""
    if config.speculation is not None:
        raise SettingsError("speculation changes what a step is: calibrate without it")
    if not config.enable_prefix_caching:
        raise SettingsError("steps are timed from cached prompts: prefix caching must be on")


def disturbed(calibration: Calibration) -> str:
    """Return what speaks against a calibration, since others used the machine; "": nothing."""
    found = []
    if calibration.others > MUCH:
        found.append(f"others took {calibration.others:.0%} of the processor meanwhile")
    if calibration.error > NOISY:
        found.append(
            f"a step's median error is {calibration.error:.0%}, on a quiet machine 1 to 3 %"
        )
    return ", and ".join(found)


def misfit(calibration: Calibration, limits: Rates) -> str:
    """Return why a calibration no longer fits a machine of these limits; "": it does."""
    changes = {
        "reading memory": limits.bytes_per_second / calibration.limits.bytes_per_second,
        "arithmetic": limits.ops_per_second / calibration.limits.ops_per_second,
    }
    for what, change in changes.items():
        if not 1 / OTHER < change < OTHER:
            return (
                f"{what} is {change:.2f} times as fast here as when it was calibrated: run "
                "octavo calibrate again"
            )
    return ""


def _observed(observing: Callable[[], list[Observation]]) -> list[Observation]:
    try:
        return observing()
    except Unobservable as error:
        raise SettingsError(f"the engine cannot run the load: {error}") from None
