"""octavo simulate: a load on a model and a device, before there is either."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.console import now_and_then, on_stderr
from octavo.cli.load import DATASET_OPTIONS, TRAFFIC_OPTIONS, demand_settings
from octavo.cli.options import ENGINE_OPTIONS, engine_config, option, takes
from octavo.cli.serve import QUEUE_OPTIONS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from octavo.engine.load import EngineConfig
    from octavo.workload.demand import Demand

EXAMPLES = (
    "octavo simulate --trace azure.csv --model llama-3-8b --device h100",
    "octavo simulate --model llama-3-8b --device h100 --request-rate 20 --goodput ttft:500 tpot:50",
    "octavo simulate --trace mooncake.jsonl --model config.json --device h100 --json",
)

DEFAULT_GOODPUT = ("ttft:500", "tpot:50")
# Where EngineConfig's defaults are for the cores beside which a server runs: of a GPU all memory is
# the engine's, and steps are short enough to take more tokens.
GPU_MEMORY_UTILIZATION = 0.9
GPU_MAX_NUM_BATCHED_TOKENS = 2048

_NOT_SIMULATED = ("threads", "isa", "quantization", "speculative_config", "max_logprobs", "seed")
_OWN_ENGINE = [
    parameter
    for parameter in ENGINE_OPTIONS + QUEUE_OPTIONS
    if parameter.name not in _NOT_SIMULATED
]
_TEXTS_ONLY = (
    "custom_output_len", "sharegpt_output_len", "disable_shuffle", "no_oversample",
)  # fmt: skip
_LOAD = [
    option(
        "trace", Path | None, None,
        "Recorded arrivals: an Azure or Mooncake trace, or a detailed result of octavo bench "
        "serve.", "Dataset", metavar="FILE", show_default="synthetic requests",
    ),
    *(
        parameter
        for parameter in DATASET_OPTIONS + TRAFFIC_OPTIONS
        if parameter.name not in _TEXTS_ONLY
    ),
]  # fmt: skip


def demand(values: Mapping[str, Any]) -> Demand:
    """Raises `ValueError` for values that do not go together."""
    from octavo.workload.demand import TEXTS, Demand

    given = dict(values) | dict.fromkeys(_TEXTS_ONLY[:2]) | dict.fromkeys(_TEXTS_ONLY[2:], False)
    given["custom_output_len"] = 256
    trace = given.pop("trace")
    if trace is not None:
        if given["dataset_path"] is not None:
            raise ValueError("--trace and --dataset-path are two names of one thing: give one")
        given["dataset_path"] = trace
        if given["dataset_name"] == "random":
            given["dataset_name"] = "trace"
    if given["dataset_name"] in TEXTS:
        raise ValueError(
            f"--dataset-name {given['dataset_name']} has texts, whose tokens only a tokenizer "
            "could count: octavo bench serve --save-detailed writes a result that has them counted"
        )
    built = Demand(**demand_settings(given))
    built.check()
    return built


@takes(
    engine=(_OWN_ENGINE, lambda given: {k: v for k, v in given.items() if v is not None}),
    load=(_LOAD, demand),
)
def command(
    engine: dict[str, Any],
    load: Demand,
    model: Annotated[
        str,
        typer.Option(
            help="A preset, a config.json, a model's folder or file, a name that octavo pull "
            "knows. Weights are not needed.",
            show_default=False,
        ),
    ],
    device: Annotated[str, typer.Option(metavar="DEVICE", help="")] = "machine",
    as_json: Annotated[bool, typer.Option("--json", help="Print it as one JSON object.")] = False,
) -> None:
    """Simulate a load: the engine's own scheduler and cache, with a cost model for arithmetic.

    A simulated second is no real one.
    """
    from octavo.plan import hardware, report, schemes
    from octavo.plan.quantization import as_stored, in_scheme
    from octavo.plan.simulation import Setup, simulate
    from octavo.plan.subject import Subject
    from octavo.workload.metrics import parse_goodput

    try:
        on = hardware.device(device, on_stderr)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    subject = Subject.find(model)
    bf16 = schemes.scheme("bf16")
    stored = as_stored(subject) or in_scheme(subject, bf16, bf16)
    if not on.measured:
        engine.setdefault("memory_utilization", GPU_MEMORY_UTILIZATION)
        engine.setdefault("max_num_batched_tokens", GPU_MAX_NUM_BATCHED_TOKENS)
    config: EngineConfig = engine_config(engine)
    samples, notices = load.timed(lambda text: len(text), strict=True)
    setup = Setup(subject, stored, on, config)
    with on_stderr() as show:
        tell = now_and_then(show)
        simulation = simulate(
            setup,
            samples,
            seed=load.seed,
            progress=lambda count: tell(f"{count} of {len(samples)} requests have ended"),
        )
    goodput = parse_goodput(DEFAULT_GOODPUT)
    result = report.figures(simulation, goodput)
    typer.echo(json.dumps(result | {"notices": notices}))
