"""octavo tune: the settings that keep an SLO for the most requests a second."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.console import json_text, now_and_then, on_stderr, writing
from octavo.cli.fold import show_report
from octavo.cli.load import SIMULATED_OPTIONS, demand, samples
from octavo.cli.options import (
    ENGINE_OPTIONS,
    POLICY_OPTIONS,
    Model,
    check_file,
    engine_flags,
    naming_flags,
    takes,
)
from octavo.cli.simulate import with_gpu_defaults, without_effect
from octavo.tools.plan.defaults import engine_defaults
from octavo.words import number, plural

if TYPE_CHECKING:
    from octavo.tools.plan.hardware import Device
    from octavo.tools.plan.slo import Figures, Slo
    from octavo.tools.plan.subject import Subject
    from octavo.tools.plan.tune import Search, Tuned
    from octavo.tools.plan.tune_space import Choice
    from octavo.tools.plan.tune_trial import TuneTrial
    from octavo.tools.workload.demand import Demand

EXAMPLES = (
    "octavo tune smollm2 --trace azure.csv --slo ttft=500,tpot=50 --trace-duration 60 --confirm",
    "octavo tune llama-3-8b --device h100 --trace azure.csv --slo ttft=500,tpot=25 --plot tune.png",
    "octavo tune config.json --device h100 --trace mooncake.jsonl --slo e2el=9000 --lossless",
)


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


@takes(
    engine=(with_gpu_defaults(ENGINE_OPTIONS + POLICY_OPTIONS), _given),
    load=(SIMULATED_OPTIONS, demand),
)
def command(
    model: Model,
    engine: dict[str, Any],
    load: Demand,
    slo: Annotated[
        str,
        typer.Option(
            metavar="LIMITS",
            help="What a good request keeps, in ms: ttft=500,tpot=50 (also e2el).",
            show_default=False,
        ),
    ],
    device: Annotated[
        str,
        typer.Option(metavar="DEVICE", help="machine (this one, measured), or a GPU such as h100."),
    ] = "machine",
    attainment: Annotated[
        float,
        typer.Option(
            "--slo-attainment", metavar="X", help="The share of requests that must be good."
        ),
    ] = 0.99,
    lossless: Annotated[
        bool,
        typer.Option("--lossless", help="Round neither weights nor cache further."),
    ] = False,
    speculative_acceptance: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="Search speculation, too, with guesses that are right so often, 0 to 1.",
            show_default="speculation is not searched",
        ),
    ] = None,
    trials: Annotated[
        int,
        typer.Option(metavar="N", min=1, help="How much to simulate, in runs of the whole load."),
    ] = 40,
    max_seconds: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", min=0, help="Stop after so long.", show_default="no limit"),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw the frontier: .svg, .png or .pdf."),
    ] = None,
    confirm: Annotated[
        bool,
        typer.Option(
            "--confirm",
            help="Replay the load on the live engine with the best settings, in real time, and "
            "compare.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as one JSON object.")] = False,
) -> None:
    """Find the settings that keep an SLO for the most requests.

    The most a second, by simulation. Searched: sequences and tokens of a step, memory and numbers
    of the KV cache, quantization, and speculation if you say how often guesses are right. Engine
    options that are given stay as they are. Exit code 0 also when no setting keeps the SLO.
    """
    from octavo.engine.config import EngineConfig
    from octavo.tools.plan import hardware, tune_plot
    from octavo.tools.plan.simulation import check_simulated, weights_on
    from octavo.tools.plan.slo import Slo
    from octavo.tools.plan.subject import Subject
    from octavo.tools.plan.tune import Search
    from octavo.tools.plan.tune_space import space
    from octavo.tools.plan.tune_trial import Trials
    from octavo.tools.workload.metrics import parse_slo

    with naming_flags("slo_attainment"):
        promise = Slo(parse_slo(slo), attainment)
        base = EngineConfig(**engine)
        check_simulated(base.speculation)
        rate = speculative_acceptance
        if rate is not None and not 0 <= rate <= 1:  # nan neither
            raise ValueError(f"--speculative-acceptance is from 0 to 1, not {rate:g}")
        if base.speculation is not None and rate is None:
            raise ValueError(
                "--speculative-config: how often its guesses are right, --speculative-acceptance "
                "has to say"
            )
        if confirm and rate is not None:
            raise ValueError(
                "--confirm replays prompts of random tokens, which no drafter guesses as often as "
                "--speculative-acceptance says: leave one of them out"
            )
        if confirm and device != "machine":
            raise ValueError(f"--confirm runs on this machine, and --device is {device}")
    if plot is not None:
        check_file(plot)
    asked, notices = samples(load)
    notices += without_effect(load.classes, base.scheduling_policy)
    subject = Subject.find(model)
    if confirm and subject.stored is None:
        raise typer.BadParameter(f"--confirm needs weights, and {model} is a shape without any")
    # Last of what is checked: this machine may have to be measured.
    with naming_flags():
        on = hardware.device(device, on_stderr)
        if on.memory_bytes is None:
            raise ValueError(f"--device {device}: how much memory has it? Add capacity=GiB")
    weights_on(on, subject)  # refuses what only a format could say
    memory, tokens = engine_defaults(on.measured, on.gpu)
    with naming_flags():
        searched = space(
            subject, on, engine, memory=memory, tokens=tokens, lossless=lossless, acceptance=rate
        )
    with on_stderr() as show:
        simulated = Trials(
            subject, on, promise, base,
            usual=searched.default.config_quantization, seed=load.seed, acceptance=rate,
            max_concurrency=load.max_concurrency, watch=now_and_then(show, 5.0),
        )  # fmt: skip
        search = Search(
            simulated, asked, searched,
            budget=trials, seconds=math.inf if max_seconds is None else max_seconds, report=show,
        )  # fmt: skip
        tuned = search.search()
        # The figures do not change: the same with what is known of its capacity.
        best = simulated.run(tuned.best.choice, asked, thorough=True)
        assert best is not None
        tuned = tuned.with_best(best)
        speeds = search.sustained(tuned.best)
    result = as_dict(model, subject, on, promise, search, tuned, speeds, notices)
    if confirm:
        from octavo.tools.plan.confirm import confirmed

        best = tuned.best
        with on_stderr() as show:
            live = confirmed(
                model, best.config, asked, promise, load.seed, load.max_concurrency, show
            )
            if live.calibration is not None:  # the same settings, at the speed of the moment
                live.calibration.save()
                best = simulated.run(best.choice, asked) or best
        basis = simulated.basis(best.choice)
        result["confirmed"] = comparison(best.figures, live.figures) | {"basis": basis}
    try:
        if as_json:
            typer.echo(json_text(result, indent=2))
        else:
            show_report(as_text(model, subject, on, promise, search, tuned, speeds, result))
    finally:  # also when nobody reads on
        if plot is not None:
            title = f"{subject.name} on {on.name}"
            with writing(plot) as file:
                tune_plot.draw(tuned, speeds, search.arrival_rate, promise, title, file)


# --- what was found ------------------------------------------------------------------------------


def serve_command(model: str, trial: TuneTrial) -> str:
    """The line that starts a server with a trial's settings."""
    from octavo.loader.pull import servable

    return shlex.join(["octavo", "serve", servable(model), *engine_flags(trial.config)])


def as_dict(
    model: str,
    subject: Subject,
    device: Device,
    slo: Slo,
    search: Search,
    tuned: Tuned,
    speeds: Sequence[tuple[float, TuneTrial]],
    notices: Sequence[str],
) -> dict[str, Any]:
    from octavo.tools.plan.tune_trial import met

    best = tuned.best
    return {
        "model": subject.name,
        "device": device.name,
        "measured": device.measured,
        "basis": search.trials.basis(best.choice),
        "slo": {f"{name}_ms": limit for name, limit in slo.limits.items()}
        | {"attainment": slo.attainment},
        "met": met(best.figures, slo),
        "saturated": best.saturated,
        "headroom": best.headroom,
        "saturation": best.verdict and best.verdict._asdict(),
        "error_band": best.error_band,
        "serve_command": serve_command(model, best),
        "predicted": best.figures.as_dict(),
        "settings": settings(best),
        "without_rounding": None
        if tuned.exact is None
        else trial_dict(tuned.exact, slo) | {"serve_command": serve_command(model, tuned.exact)},
        "default": None if tuned.default is None else trial_dict(tuned.default, slo),
        "frontier": [trial_dict(trial, slo) for trial in tuned.frontier],
        "tried": [trial_dict(trial, slo) for trial in tuned.trials],
        "impossible": [
            settings_of(choice) | {"why": why} for choice, why in tuned.impossible.items()
        ],
        "sustained": sustained(speeds, slo),
        "speeds": [
            {
                "speed": speed,
                "arriving": speed * search.arrival_rate,
                "met": met(trial.figures, slo),
                "saturated": trial.saturated,
                **trial.figures.as_dict(),
            }
            for speed, trial in speeds
        ],
        "short_trials": tuned.short_trials,
        "cost": tuned.cost,
        "stopped": tuned.stopped,
        "notices": list(notices),
    }


def sustained(speeds: Sequence[tuple[float, TuneTrial]], slo: Slo) -> float | None:
    """The highest speed of the load up to which the SLO was kept; None: at none that was tried."""
    from octavo.tools.plan.tune_trial import kept

    highest = None
    for speed, trial in speeds:
        if not kept(trial, slo):
            break
        highest = speed
    return highest


def settings(trial: TuneTrial) -> dict[str, Any]:
    return {
        "max_num_seqs": trial.config.max_num_seqs,
        "max_num_batched_tokens": trial.config.max_num_batched_tokens,
        "num_blocks": trial.plan.num_blocks,
        "kv_cache_memory_bytes": trial.plan.kv_cache_bytes,
        "kv_cache_dtype": trial.config.kv_cache_dtype,
        "quantization": trial.config.quantization,
        "speculation": trial.choice.speculation,
        "weight_bytes": trial.plan.weight_bytes,
    }


def settings_of(choice: Choice) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(choice)


def trial_dict(trial: TuneTrial, slo: Slo) -> dict[str, Any]:
    figures = trial.figures
    return (
        settings(trial)
        | figures.as_dict()
        | {
            "preemptions": trial.preemptions,
            "saturated": trial.saturated,
            "pressure": figures.pressure(slo) if figures.completed else None,
        }
    )


def comparison(predicted: Figures, measured: Figures) -> dict[str, Any]:
    """The live engine's figures, and by how much of them the prediction differs."""
    pairs = {
        name: (getattr(predicted, attribute), getattr(measured, attribute))
        for name, attribute in (
            ("request_goodput", "goodput"),
            ("request_throughput", "request_throughput"),
            ("output_throughput", "output_throughput"),
        )
    }
    for name in predicted.latencies:
        for which in ("p50", "p99"):
            pairs[f"{name}_ms_{which}"] = (
                getattr(predicted.latencies[name], which),
                getattr(measured.latencies[name], which),
            )
    return {
        "measured": measured.as_dict(),
        "error": {
            name: (guess - real) / real
            if real and math.isfinite(guess) and math.isfinite(real)
            else None
            for name, (guess, real) in pairs.items()
        },
        "pairs": {
            name: tuple(value if math.isfinite(value) else None for value in pair)
            for name, pair in pairs.items()
        },
    }


# --- for people ----------------------------------------------------------------------------------

_MOST_ROWS = 12  # of a table


def as_text(
    model: str,
    subject: Subject,
    device: Device,
    slo: Slo,
    search: Search,
    tuned: Tuned,
    speeds: Sequence[tuple[float, TuneTrial]],
    result: Mapping[str, Any],
) -> str:
    best = tuned.best
    samples = search.samples
    seconds = max(sample.arrival or 0.0 for sample in samples)
    limits = ", ".join(f"{name.upper()} {limit:g} ms" for name, limit in slo.limits.items())
    most = search.trials.max_concurrency
    lines = [
        *result["notices"],
        f"{subject.name} on {device.name}: {plural(len(samples), 'request')} in {seconds:.0f} s"
        + ("" if most is None else f", at most {most} at once")
        + f"; a good one keeps {limits}",
        "",
        *_verdict(tuned, slo),
        *_sustained_lines(speeds, search.arrival_rate, slo),
        "",
        *_table(tuned, slo),
        "",
        f"searched: {len(tuned.trials)} settings under the whole load, {tuned.short_trials} under "
        f"a part of it; {len(tuned.impossible)} cannot be"
        + (f"; ended because {tuned.stopped}" if tuned.stopped else ""),
        *(
            ["not searched: speculation (how often is a guess right? --speculative-acceptance)"]
            if search.trials.acceptance is None
            else []
        ),
        *_notes(subject, device, result["basis"], best),
        *(
            ["", "without rounding:", serve_command(model, tuned.exact)]
            if best.choice.rounding and tuned.exact is not None
            else []
        ),
        "",
        serve_command(model, best),
    ]
    if "confirmed" in result:
        lines += ["", *_confirmed_lines(result["confirmed"])]
    return "\n".join(lines)


def _verdict(tuned: Tuned, slo: Slo) -> list[str]:
    from octavo.tools.plan.report import error_band_lines
    from octavo.tools.plan.tune_trial import met

    figures = tuned.best.figures
    share = f"{number(100 * figures.attainment)} % of the requests are good"
    asked = f"{100 * slo.attainment:g} % asked for"
    lines = []
    best = tuned.best
    if met(figures, slo):
        held = "while these requests last the SLO is kept" if best.saturated else "the SLO is kept"
        lines.append(
            f"{held}: {share} ({asked}), {number(figures.goodput)} good requests/s, "
            f"{number(figures.output_throughput)} tokens/s"
        )
    else:
        lines.append(
            f"no setting keeps the SLO: with the best {share} ({asked}), "
            f"{number(figures.goodput)} good requests/s"
        )
        for name, limit in slo.limits.items():
            p99 = figures.latencies[name].p99
            if limit < p99 < math.inf:
                lines.append(
                    f"  {name.upper()} fails by {_ms(p99 - limit)} ms: the 99th percentile is "
                    f"{_ms(p99)} ms, the limit {limit:g} ms"
                )
        if refused := figures.requests - figures.completed:
            lines.append(f"  {plural(refused, 'request')} not served: {tuned.best.refusal}")
    if best.saturated:
        every = all(trial.saturated for trial in tuned.trials)
        settings = "every setting that was tried" if every else "the best"
        lines.append(
            f"  BEYOND SATURATION with {settings}: latencies grow as long as the load goes on"
        )
    if best.verdict is not None and best.verdict.room:
        lines.append(f"  headroom {best.verdict.room}")
    if best.error_band is not None:
        lines += [f"  {line}" for line in error_band_lines(best.error_band)]
    if best.near_saturation:
        lines.append(f"  {best.near_saturation}")
    default = tuned.default
    if default is None:
        lines.append("the engine's default settings do not fit this device")
    elif default.choice == tuned.best.choice:
        lines.append("these are the engine's defaults: no setting that was tried is better")
    else:
        too = "keep it, too" if met(default.figures, slo) else "do not keep it"
        lines.append(
            f"the engine's defaults {too}: {number(100 * default.figures.attainment)} % are good, "
            f"{number(default.figures.goodput)} a second"
        )
    return lines


def _sustained_lines(speeds: Sequence[tuple[float, TuneTrial]], rate: float, slo: Slo) -> list[str]:
    if not speeds:
        return ["all requests come at once: there is no rate of arrival to vary"]
    kept = sustained(speeds, slo)
    if kept is None and len(speeds) == 1 and not speeds[0][1].saturated:
        return ["more slowly it would not be kept either: these requests are refused at any rate"]
    if kept is None:
        return [f"not even {number(speeds[0][0], 3)} × this load keeps the SLO"]
    if len(speeds) == 1:
        return ["the load is too short to say what happens when it comes faster"]
    edge = "" if kept < speeds[-1][0] else " at least"
    return [
        f"with the best the SLO holds up to{edge} {number(kept, 2)} × this load, "
        f"{number(kept * rate, 3)} requests/s"
    ]


def _spread(trials: Sequence[TuneTrial]) -> list[TuneTrial]:
    """Some of them, first and last among them."""
    if len(trials) <= _MOST_ROWS:
        return list(trials)
    step = (len(trials) - 1) / (_MOST_ROWS - 1)
    return [trials[round(step * index)] for index in range(_MOST_ROWS)]


def _table(tuned: Tuned, slo: Slo) -> list[str]:
    """The best and what it is compared with, then the frontier."""
    names = list(slo.limits)
    speculates = any(trial.choice.speculation != "off" for trial in tuned.trials)
    head = (
        f"{'':<18}{'seqs':>5}{'tokens':>8}{'blocks':>9}{'kv':>6}{'weights':>9}"
        + (f"{'drafts':>12}" if speculates else "")
        + f"{'good':>9}{'a second':>10}{'tokens/s':>10}"
        + "".join(f"{f'{n.upper()} p50':>11}{'p99 ms':>10}" for n in names)
    )

    def row(label: str, trial: TuneTrial) -> str:
        config, figures = trial.config, trial.figures
        return (
            f"{label:<18}{config.max_num_seqs:>5}{config.max_num_batched_tokens:>8}"
            f"{trial.plan.num_blocks:>9}{config.kv_cache_dtype.replace('auto', 'bf16'):>6}"
            f"{config.quantization or 'as is':>9}"
            + (f"{trial.choice.speculation:>12}" if speculates else "")
            + f"{100 * figures.attainment:>7.4g} %{number(figures.goodput):>10}"
            f"{number(figures.output_throughput):>10}"
            + "".join(
                f"{_ms(figures.latencies[n].p50):>11}{_ms(figures.latencies[n].p99):>10}"
                for n in names
            )
        )

    lines = [head, row("best", tuned.best)]
    if tuned.exact is not None and tuned.exact is not tuned.best:
        lines.append(row("without rounding", tuned.exact))
    if tuned.default is not None and tuned.default is not tuned.best:
        lines.append(row("engine's defaults", tuned.default))
    lines.append("frontier: what no other beats in tokens a second and in every latency")
    shown = enumerate(_spread(tuned.frontier), 1)
    return [*lines, head, *(row(f"frontier {index}", trial) for index, trial in shown)]


def _ms(value: float) -> str:
    if math.isinf(value):  # nothing was served
        return "none"
    return f"{value:.0f}" if value >= 1000 else number(value)


def _notes(subject: Subject, device: Device, basis: str, best: TuneTrial) -> list[str]:
    lines = []
    if best.choice.rounding:
        lines.append(
            "the best rounds numbers further than they are stored, which changes answers: see what "
            "it costs with octavo fidelity, or search with --lossless"
        )
    lines.append(f"predictions: {basis}")
    if not device.measured:
        lines.append(
            "Octavo serves on CPUs: for this device the line below is what to ask of an engine "
            "with the same settings"
        )
    if subject.stored is None:
        lines.append(
            f"{subject.name} is a shape without weights: the line below fetches them from Hugging "
            "Face, or serves its folder, where they are there"
        )
    return lines


def _confirmed_lines(confirmed: Mapping[str, Any]) -> list[str]:
    lines = [
        f"on the live engine, the same load in real time; predicted as {confirmed['basis']}",
        f"{'':<20}{'predicted':>11}{'measured':>11}{'error':>9}",
    ]
    for name, pair in confirmed["pairs"].items():
        error = confirmed["error"][name]
        shown = "" if error is None else f"{100 * error:+.1f} %"
        figures = ("none" if value is None else f"{number(value)}" for value in pair)
        lines.append(
            f"{name.replace('_', ' '):<20}{''.join(f'{each:>11}' for each in figures)}{shown:>9}"
        )
    return lines
