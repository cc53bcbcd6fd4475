"""octavo simulate: a load on a model and a device, before there is either."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from copy import copy
from inspect import Parameter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.console import json_text, now_and_then, on_stderr, writing
from octavo.cli.fold import show_report
from octavo.cli.load import GOODPUT_OPTION, SIMULATED_OPTIONS, demand, samples
from octavo.cli.options import (
    ENGINE_OPTIONS,
    POLICY_OPTIONS,
    QUEUE_OPTIONS,
    check_file,
    engine_config,
    named_flags,
    naming_flags,
    option,
    takes,
)
from octavo.cli.planned import (
    NAMES,
    Bits,
    EmbeddingFormat,
    GroupSize,
    LayersFormat,
    OnDevice,
    Price,
    Unit,
    chosen_scheme,
    embedding_scheme,
    unit,
)
from octavo.scheduler.policies.config import field_users
from octavo.tools.plan.defaults import GPU, engine_defaults
from octavo.words import plural

if TYPE_CHECKING:
    from octavo.engine.config import EngineConfig
    from octavo.engine.engine import Observer
    from octavo.tools.plan.hardware import Device
    from octavo.tools.workload.classes import LoadClass
    from octavo.tools.workload.demand import Demand

EXAMPLES = (
    "octavo simulate --trace azure.csv --model llama-3-8b --device h100",
    "octavo simulate --model llama-3-8b --device h100 --request-rate 20 --goodput ttft:500 tpot:50",
    "octavo simulate --trace mooncake.jsonl --model llama-3-8b --device h100 --max-input-len 8000",
    "octavo simulate --model smollm2 --request-rate 4 --num-prompts 200 --batching static",
    "octavo simulate --trace azure.csv --model llama-3-8b --device h100 --plot load.svg --json",
)

DEFAULT_GOODPUT = ("ttft:500", "tpot:50")

_NOT_SIMULATED = ("threads", "isa", "speculative_config", "max_logprobs", "seed")
_ON_GPUS = GPU._asdict()


def _with_gpu_default(parameter: Parameter) -> Parameter:
    """The same option, whose help also says what a GPU has."""
    (given,) = parameter.annotation.__metadata__
    info = copy(given)
    info.show_default = f"{info.show_default}; of a GPU {_ON_GPUS[parameter.name]:g}"
    kind = parameter.annotation.__origin__
    return parameter.replace(annotation=Annotated[kind, info])


def with_gpu_defaults(parameters: list[Parameter]) -> list[Parameter]:
    return [
        _with_gpu_default(parameter) if parameter.name in _ON_GPUS else parameter
        for parameter in parameters
    ]


_ENGINE_OPTIONS = [
    parameter
    for parameter in with_gpu_defaults(ENGINE_OPTIONS + POLICY_OPTIONS + QUEUE_OPTIONS)
    if parameter.name not in _NOT_SIMULATED
]

SLO_OPTION = option(
    "slo", str | None, None, "The same as octavo tune says it: ttft=500,tpot=50.", "Result",
    metavar="LIMITS", show_default="ttft=500,tpot=50",
)  # fmt: skip

_TECHNIQUE = "What each technique brings"
TECHNIQUE_OPTIONS = [
    option(
        "batching", str, "continuous",
        "static: the next batch is let in when the last of this one has ended.", _TECHNIQUE,
        metavar="KIND",
    ),
    option(
        "memory", str, "paged",
        "reserve: room for a request's longest answer is set aside when it is let in.",
        _TECHNIQUE, metavar="KIND",
    ),
    option(
        "max_tokens", int | None, None,
        "What each request allows for its answer; longer ones are cut.", _TECHNIQUE, min=1,
        show_default="what the context leaves",
    ),
    option(
        "enable_chunked_prefill", bool, True, "Put a long prompt through in parts.", _TECHNIQUE
    ),
    option(
        "speculative_acceptance", float | None, None,
        "Speculate, with guesses that are right so often, 0 to 1; guessing takes no time.",
        _TECHNIQUE, show_default="no speculation",
    ),
    option(
        "num_speculative_tokens", int | None, None, "Tokens of a draft.", _TECHNIQUE, min=1,
        show_default="what pays most",
    ),
]  # fmt: skip


def techniques(values: Mapping[str, Any]) -> dict[str, Any]:
    """Raises `ValueError` for what is no such technique."""
    for name, kinds in (("batching", ("continuous", "static")), ("memory", ("paged", "reserve"))):
        if values[name] not in kinds:
            raise ValueError(f"--{name} {values[name]!r} is neither {kinds[0]} nor {kinds[1]}")
    rate = values["speculative_acceptance"]
    if rate is not None and not 0 <= rate <= 1:  # nan neither
        raise ValueError(f"--speculative-acceptance is from 0 to 1, not {rate:g}")
    if rate is None and values["num_speculative_tokens"] is not None:
        raise ValueError("--num-speculative-tokens needs --speculative-acceptance")
    return dict(values)


@takes(
    engine=(_ENGINE_OPTIONS, lambda given: {k: v for k, v in given.items() if v is not None}),
    load=(SIMULATED_OPTIONS, demand),
    technique=(TECHNIQUE_OPTIONS, techniques),
    objectives=([GOODPUT_OPTION, SLO_OPTION], dict),
)
def command(
    engine: dict[str, Any],
    load: Demand,
    technique: dict[str, Any],
    objectives: dict[str, Any],
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="A preset (llama-3-8b), a config.json, a model's folder or file, or a name that "
            "octavo pull knows. No weights are needed.",
            show_default=False,
        ),
    ] = None,
    more: Annotated[
        list[str] | None,
        typer.Argument(
            help="The model, and further values of --goodput.",
            metavar="[MODEL] [KEY:MS]",
            show_default=False,
        ),
    ] = None,
    device: OnDevice = "machine",
    format: LayersFormat = None,
    bits: Bits = None,
    group_size: GroupSize = None,
    embedding_format: EmbeddingFormat = None,
    arithmetic: Unit = "auto",
    price: Price = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw it over time: .svg, .png or .pdf."),
    ] = None,
    timeline: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Steps and requests for ui.perfetto.dev or chrome://tracing (JSON).",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as one JSON object.")] = False,
) -> None:
    """Simulate a load on a model and a device.

    The engine's own scheduler, cache and limits run it; only the arithmetic is replaced, by what a
    cost model says that it takes. Same options, same result, to the last digit.
    """
    from octavo.engine.config import EngineConfig, SettingsError
    from octavo.tools.plan import hardware, report
    from octavo.tools.plan.band import doubt
    from octavo.tools.plan.capacity import capacity
    from octavo.tools.plan.simulation import Setup, simulate, weights_on
    from octavo.tools.plan.slo import promised
    from octavo.tools.plan.subject import Subject
    from octavo.tools.plan.timeline import Timeline

    try:
        model, limits = words(model, more or [])
        slo = service_level(objectives["goodput"] + limits, objectives["slo"])
        chosen = chosen_scheme(format, bits, group_size, False)
        edges = None if embedding_format is None else embedding_scheme(embedding_format)
        if "quantization" in engine and (chosen is not None or edges is not None):
            other = "--embedding-format" if chosen is None else "--format"
            raise ValueError(f"--quantization and {other} both say how weights are: give one")
        hardware.check(device)
        EngineConfig(**engine)  # refuses
    except ValueError as error:
        raise typer.BadParameter(named_flags(str(error), *NAMES)) from None
    for path, suffix in ((plot, None), (timeline, ".json")):
        if path is not None:
            check_file(path, suffix)
    asked, notices = samples(load)
    notices += cut_answers([sample.output_len for sample in asked], technique["max_tokens"])
    notices += without_effect(load.classes, engine.get("scheduling_policy", "fcfs"))
    subject = Subject.find(model)
    # Last of what is checked: this machine may have to be measured.
    with naming_flags():
        on = hardware.device(device, on_stderr)
    config, notes = configure(engine, technique, on, subject.program.config.context_length)
    notices += notes
    setup = Setup(
        subject,
        weights_on(on, subject, chosen, edges, config.quantization),
        on,
        config,
        unit(arithmetic),
        batching=technique["batching"],
        memory=technique["memory"],
        chunked_prefill=technique["enable_chunked_prefill"],
        acceptance=technique["speculative_acceptance"],
    )
    seen = Timeline() if timeline is not None else None
    observers: list[Observer] = [] if seen is None else [seen]
    try:
        with on_stderr() as show:
            tell = now_and_then(show)
            simulation = simulate(
                setup,
                asked,
                seed=load.seed,
                max_tokens=technique["max_tokens"],
                max_concurrency=load.max_concurrency,
                observers=observers,
                target=promised(slo),
                progress=lambda count: tell(f"{count} of {plural(len(asked), 'request')} ended"),
            )
    except ValueError as error:  # what the engine's rooms refuse
        raise SettingsError(str(error)) from None
    records = simulation.replay.records
    if not any(record.success for record in records):
        first = records[0]
        raise SettingsError(
            f"none of the {len(records)} requests could be served; request {first.index} was "
            f"{first.reason}: {first.detail}"
        )
    notices.append(setup.basis())
    with on_stderr() as show:
        tell = now_and_then(show)
        result = report.figures(
            simulation,
            slo,
            price,
            capacity=capacity(simulation, tell) if simulation.series.span else None,
            doubt=doubt(setup),
            progress=tell,
        )
    result["notices"] = notices
    try:
        show_report(json_text(result) if as_json else report.text(result), as_json=as_json)
    finally:  # also when nobody reads on
        if seen is not None and timeline is not None:
            with writing(timeline) as file:
                file.write_text(json.dumps(seen.trace(simulation), allow_nan=False))
        if plot is not None:
            from octavo.tools.plan.simulation_plot import draw

            with writing(plot) as file:
                draw(result, file)


def without_effect(classes: Sequence[LoadClass], policy: str) -> list[str]:
    """The notice of what classes have that the policy does not go by, so that one load can be
    put under several.
    """
    return [
        f"--class: {name} has no effect under --scheduling-policy {policy}"
        for name, default in (("priority", 0), ("weight", 1.0))
        if policy not in field_users(name)
        and any(getattr(each, name) != default for each in classes)
    ]


def cut_answers(lengths: list[int], most: int | None) -> list[str]:
    """The notice of answers that --max-tokens cuts, if there are any."""
    cut = 0 if most is None else sum(length > most for length in lengths)
    if most is None or not cut:
        return []
    asked = sum(min(length, most) for length in lengths)
    return [
        f"--max-tokens {most} cuts {cut} of {len(lengths)} answers ({sum(lengths)} tokens in the "
        f"load, {asked} asked)"
    ]


def words(model: str | None, given: list[str]) -> tuple[str, list[str]]:
    """The model, as an option or alone, and what belongs to --goodput, as vLLM has it. Raises
    `ValueError`.
    """
    limits = [word for word in given if re.match(r"[a-z]\w*:-?[\d.]", word)]
    models = [word for word in given if word not in limits] + ([model] if model else [])
    if len(models) != 1:
        raise ValueError(
            f"one model is simulated, not {' and '.join(models)}"
            if models
            else "which model? --model llama-3-8b, say"
        )
    return models[0], limits


def service_level(goodput: list[str], slo: str | None) -> dict[str, float]:
    """Limits in milliseconds by metric. Raises `ValueError`."""
    from octavo.tools.workload.metrics import parse_goodput, parse_slo

    if slo is not None and goodput:
        raise ValueError("--slo and --goodput are two names of one thing: give one")
    if slo is not None:
        return parse_slo(slo)
    pairs = [pair for text in goodput for pair in text.replace(",", " ").split()]
    return parse_goodput(pairs or DEFAULT_GOODPUT)


def configure(
    given: Mapping[str, Any], technique: Mapping[str, Any], device: Device, context: int
) -> tuple[EngineConfig, list[str]]:
    """The engine's settings, with a GPU's defaults where it is one, and notices. Raises
    `SettingsError`.
    """
    from octavo.engine.config import SettingsError

    values = engine_defaults(device.measured, device.gpu)._asdict() | dict(given)
    notices = []
    if not technique["enable_chunked_prefill"] and "max_num_batched_tokens" not in given:
        values["max_num_batched_tokens"] = values.get("max_model_len", context)
        notices.append(
            "without chunked prefill a step takes the longest prompt: "
            f"--max-num-batched-tokens {values['max_num_batched_tokens']}"
        )
    if technique["memory"] == "reserve":
        if values.get("enable_prefix_caching"):
            raise SettingsError("--memory reserve: what is reserved for one sequence is not shared")
        values["enable_prefix_caching"] = False
    if technique["speculative_acceptance"] is not None:
        # Which method it is matters to nobody: the drafter is a scripted one.
        values["speculative_config"] = {
            "method": "ngram",
            "num_speculative_tokens": technique["num_speculative_tokens"],
        }
    try:
        return engine_config(values), notices
    except ValueError as error:
        raise SettingsError(str(error)) from None
