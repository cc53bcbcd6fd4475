"""A prediction tried: the same load on the live engine, in real time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from octavo.engine.load import EngineConfig, load_engine
from octavo.plan.replay import replay
from octavo.plan.slo import Figures, Slo
from octavo.workload.datasets import Part, Sample

_WARM_UP = Sample(64, 8, (Part(0, 64),), arrival=0.0)


def confirmed(
    model: str,
    config: EngineConfig,
    samples: Sequence[Sample],
    slo: Slo,
    seed: int,
    max_concurrency: int | None,
    report: Callable[[str], None],
) -> Figures:
    """The samples at their times on an engine of that model, which is loaded for it; at most
    ``max_concurrency`` of them at once.

    Raises what `load_engine` does.
    """
    report(f"loading {model}")
    loaded = load_engine(model, config)
    engine = loaded.engine
    try:
        replay(engine, [_WARM_UP], seed=seed)  # its pages are touched, its threads started
        seconds = max(sample.arrival or 0.0 for sample in samples)
        count = len(samples)
        done = replay(
            engine,
            samples,
            seed=seed,
            max_concurrency=max_concurrency,
            progress=lambda ended: report(
                f"live: {ended} of {count} requests have ended; the last arrives after "
                f"{seconds:.0f} s"
            ),
        )
    finally:
        engine.close()
    return Figures.of(done.records, done.duration, slo)
