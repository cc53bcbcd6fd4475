"""octavo calibrate: what this machine takes for a model's steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cli.console import json_text, now_and_then, on_stderr
from octavo.cli.fold import show_report
from octavo.cli.options import ENGINE_OPTIONS, Model, engine_config, takes
from octavo.machine.others import MUCH
from octavo.words import number, plural

if TYPE_CHECKING:
    from octavo.engine.calibration import Calibration
    from octavo.engine.config import EngineConfig

EXAMPLES = (
    "octavo calibrate smollm2",
    "octavo calibrate smollm2 --refresh",
    "octavo calibrate model.gguf --threads 4 --kv-cache-dtype int8",
    "octavo calibrate smollm2 --json",
)


@takes(engine=(ENGINE_OPTIONS, engine_config))
def command(
    model: Model,
    engine: EngineConfig,
    refresh: Annotated[
        bool,
        typer.Option(
            "--refresh",
            help="Keep the stored calibration and see in 3 seconds how fast the machine is now.",
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print it as one JSON object, in seconds and units.")
    ] = False,
) -> None:
    """Fit the cost model to this machine, in under a minute.

    The engine runs a scripted load; bandwidths, rates and overheads are fitted to its steps'
    times and stored, for octavo simulate, octavo tune and a server's metrics to predict with. Run
    it on an otherwise idle machine. Where others share the machine its speed drifts: --refresh,
    just before predicting, stores beside the calibration how many times as long memory and
    processor take now.
    """
    from octavo.engine.calibration import Calibration, CalibrationKey
    from octavo.engine.config import SettingsError
    from octavo.engine.load import load_engine
    from octavo.loader import load
    from octavo.loader.pull import resolve
    from octavo.tools.plan.calibrating import check_settings, measure, refreshed

    check_settings(engine)
    checkpoint = load(resolve(model))
    stored = None
    if refresh:
        stored = Calibration.load(CalibrationKey.of_checkpoint(checkpoint, engine))
        if stored is None:
            raise SettingsError(
                f"there is no calibration of {model} with these settings to refresh: run octavo "
                "calibrate without --refresh"
            )
    with on_stderr() as progress:
        progress("loading the model")
        loaded = load_engine(checkpoint, engine)
        try:
            if stored is not None:
                progress("seeing how fast the machine is")
                calibration = refreshed(stored, loaded)
            else:
                calibration = measure(loaded, progress=now_and_then(progress))
        finally:
            loaded.engine.close()
    try:
        if as_json:
            typer.echo(json_text(calibration.as_dict(), indent=2))
        elif refresh:
            show_report(f"{calibration.name}: {calibration.standing}")
        else:
            show_report(as_text(calibration))
    finally:  # also when nobody reads on
        typer.echo(f"stored in {calibration.save()}", err=True)
        if warning := disturbance(calibration, refresh):
            typer.echo(f"! {warning}", err=True)


def disturbance(calibration: Calibration, refresh: bool) -> str:
    """What is to be said of others that used the machine meanwhile."""
    from octavo.tools.plan.calibrating import disturbed

    moment = calibration.moment
    if refresh and moment is not None:
        if moment.others <= MUCH:
            return ""
        return (
            f"others took {moment.others:.0%} of the processor meanwhile: what was seen is the "
            "machine beside them, and holds while they go on"
        )
    if not (reason := disturbed(calibration)):
        return ""
    return (
        f"the machine was busy: {reason}. Predictions will be off; run it again "
        "when the machine is idle"
    )


def as_text(calibration: Calibration) -> str:
    """For people."""
    from octavo.executor.cost import Arithmetic

    rates, limits, key = calibration.rates, calibration.limits, calibration.key
    kv, attention = rates.kv_bytes_per_second or 0.0, rates.attention_ops_per_second or 0.0
    share = rates.ops_per_second / limits.ops_per_second
    lines = [
        f"{calibration.name} on {key.cpu}, {plural(key.threads, 'thread')}, "
        f"{calibration.tier}, {calibration.date}",
        f"{calibration.steps} steps in {calibration.seconds:.0f} s; a mean step takes "
        f"{calibration.held_up:.3f} times as long as one that nobody held up",
        "",
        f"{'parameter':<42}{'fitted':>10}{'':8}{'limit':>8}{'share':>8}{'±':>6}",
    ]

    def row(what: str, value: float, unit: str, name: str, limit: float | None = None) -> None:
        beside = f"{number(limit):>8}{value / limit:>8.0%}" if limit else " " * 16
        deviation = calibration.deviations.get(name)
        spread = "" if deviation is None else f"{deviation:>6.0%}"
        lines.append(f"  {what:<40}{number(value):>10} {unit:<7}{beside}{spread}")

    memory = limits.bytes_per_second / 1e9
    row("reading weights", rates.bytes_per_second / 1e9, "GB/s", "bytes_per_second", memory)
    for unit in limits.units:
        row(
            f"matrices, {unit}",
            rates.peak(unit) / 1e9,
            "Gop/s",
            "share_of_peak" if unit is Arithmetic.INT8 else "",
            limits.peak(unit) / 1e9,
        )
    row("knee: 1 adds the two, ∞ takes the longer", rates.knee, "", "knee")
    row("unpacking for 8 rows, in rows", rates.unpacking, "rows", "unpacking")
    row("attention, reading", kv / 1e9, "GB/s", "kv_bytes_per_second", memory)
    row("attention, computing", attention / 1e9, "Gop/s", "attention_ops_per_second")
    row("a step", rates.step_overhead * 1e6, "µs", "step_overhead")
    row("more, of two tokens and up", rates.batch_overhead * 1e6, "µs", "batch_overhead")
    row("each row of logits", rates.row_overhead * 1e6, "µs", "row_overhead")
    row("each chunk of a prompt", rates.chunk_overhead * 1e6, "µs", "chunk_overhead")
    lines += [
        "",
        f"{'steps that the fit has not seen':<42}{'steps':>7}{'ms':>10}{'bias':>9}{'error':>8}",
    ]
    lines += [
        f"  {error.kind:<40}{error.steps:>7}{error.seconds * 1e3:>10.2f}{error.bias:>+9.1%}"
        f"{error.error:>8.1%}"
        for error in calibration.errors
    ]
    lines += [
        "",
        f"median error of a step: {calibration.error:.1%} (matrices run at {share:.0%} of the "
        "peak). Medians; bias: predicted above measured.",
    ]
    return "\n".join(lines)
