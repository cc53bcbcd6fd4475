"""A prediction tried: the same load on the live engine, in real time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from octavo.engine.calibration import Calibration
from octavo.engine.config import EngineConfig
from octavo.engine.load import LoadedEngine, load_engine
from octavo.tools.plan import calibrating
from octavo.tools.plan.load_replay import replay
from octavo.tools.plan.slo import Figures, Slo, promised
from octavo.tools.workload.datasets import Part, Sample
from octavo.words import plural

_WARM_UP = Sample(64, 8, (Part(0, 64),), arrival=0.0)


class Confirmed(NamedTuple):
    figures: Figures
    calibration: Calibration | None  # of the engine, refreshed just before; None: there is none


def confirmed(
    model: str,
    config: EngineConfig,
    samples: Sequence[Sample],
    slo: Slo,
    seed: int,
    max_concurrency: int | None,
    report: Callable[[str], None],
) -> Confirmed:
    """The samples at their times on an engine of that model, which is loaded for it; at most
    ``max_concurrency`` of them at once. Before, it is seen how fast the machine is now.

    Raises what `load_engine` does.
    """
    report(f"loading {model}")
    loaded = load_engine(model, config)
    engine = loaded.engine
    try:
        replay(engine, [_WARM_UP], seed=seed)  # its pages are touched, its threads started
        report("seeing how fast the machine is")
        calibration = _refreshed(loaded)
        seconds = max(sample.arrival or 0.0 for sample in samples)
        count = len(samples)
        done = replay(
            engine,
            samples,
            seed=seed,
            max_concurrency=max_concurrency,
            target=promised(slo.limits),
            progress=lambda ended: report(
                f"live: {ended} of {plural(count, 'request')} ended; the last arrives after "
                f"{seconds:.0f} s"
            ),
        )
    finally:
        engine.close()
    return Confirmed(Figures.of(done.records, done.duration, slo), calibration)


def _refreshed(loaded: LoadedEngine) -> Calibration | None:
    """Not of an engine whose steps are not those that are calibrated."""
    config = loaded.config
    if config.speculation is not None or not config.enable_prefix_caching:
        return None
    calibration = Calibration.of_engine(loaded)
    return None if calibration is None else calibrating.refreshed(calibration, loaded)
