"""Options that say what is asked and when: the same for servers under load and for simulations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.cli.options import option

if TYPE_CHECKING:
    from octavo.tools.workload.datasets import Sample
    from octavo.tools.workload.demand import Demand

DATASET, TRAFFIC = "Dataset", "Traffic"
MOST_REQUESTS, MOST_TOKENS = 10**6, 10**8  # of a load, and of a prompt or an answer

DATASET_OPTIONS = [
    option(
        "dataset_name", str, "random",
        "random, prefix_repetition, custom, sharegpt, azure, mooncake, result or trace (any of "
        "these three).",
        DATASET,
    ),
    option("dataset_path", Path | None, None, "The dataset's file.", DATASET, metavar="FILE"),
    option(
        "num_prompts", int | None, None, "Requests.", DATASET, min=1, max=MOST_REQUESTS,
        show_default="1000; of a trace all in the window",
    ),
    option("seed", int, 0, "Same seed, same prompts and arrivals.", DATASET, min=0),
    option(
        "input_len", int | None, None, "The same as --random-input-len.", DATASET,
        min=0, max=MOST_TOKENS,
    ),
    option(
        "output_len", int | None, None, "Answer length, of any dataset but traces.", DATASET,
        min=1, max=MOST_TOKENS,
    ),
    option("random_input_len", int, 1024, "Prompt tokens.", DATASET, min=0, max=MOST_TOKENS),
    option("random_output_len", int, 128, "Answer tokens.", DATASET, min=1, max=MOST_TOKENS),
    option(
        "random_range_ratio", float, 0.0, "Lengths are uniform in length * (1 +- this).", DATASET
    ),
    option(
        "random_prefix_len", int, 0, "Tokens before each prompt, the same for all.", DATASET,
        min=0, max=MOST_TOKENS,
    ),
    option(
        "prefix_repetition_prefix_len", int, 256, "Shared tokens.", DATASET,
        min=0, max=MOST_TOKENS,
    ),
    option(
        "prefix_repetition_suffix_len", int, 256, "Tokens of its own.", DATASET,
        min=0, max=MOST_TOKENS,
    ),
    option(
        "prefix_repetition_num_prefixes", int, 10, "Different prefixes.", DATASET,
        min=1, max=MOST_REQUESTS,
    ),
    option(
        "prefix_repetition_output_len", int, 128, "Answer tokens.", DATASET,
        min=1, max=MOST_TOKENS,
    ),
    option(
        "custom_output_len", int, 256, "Answer tokens; -1: each line's output_tokens.", DATASET,
        min=-1, max=MOST_TOKENS,
    ),
    option(
        "sharegpt_output_len", int | None, None, "Answer tokens.", DATASET, min=1, max=MOST_TOKENS,
        show_default="the conversation's own",
    ),
    option(
        "disable_shuffle", bool, False, "Keep a dataset's order.", DATASET, "--disable-shuffle"
    ),
    option(
        "no_oversample", bool, False, "Do not repeat prompts of a short file.", DATASET,
        "--no-oversample",
    ),
    option(
        "trace_start", float, 0.0, "Begin at this second of a trace.", DATASET
    ),
    option(
        "trace_duration", float, math.inf, "Replay so many seconds of a trace.", DATASET,
        show_default="to its end",
    ),
    option("trace_speedup", float, 1.0, "2: a trace runs in half its time.", DATASET),
    option(
        "max_input_len", int | None, None, "Cut a trace's prompts to so many tokens.", DATASET,
        min=1, max=MOST_TOKENS,
    ),
    option(
        "max_output_len", int | None, None, "Cut a trace's answers to so many tokens.", DATASET,
        min=1, max=MOST_TOKENS,
    ),
]  # fmt: skip

TRAFFIC_OPTIONS = [
    option(
        "request_rate", float, math.inf, "Requests a second; inf: all at once.", TRAFFIC,
        show_default="inf",
    ),
    option(
        "burstiness", float, 1.0,
        "1: a Poisson process; below: burstier; above: more regular (gamma intervals).", TRAFFIC,
    ),
    option(
        "ramp_up_strategy", str | None, None, "Let the rate rise: linear or exponential.", TRAFFIC
    ),
    option("ramp_up_start_rps", float | None, None, "From this rate.", TRAFFIC),
    option("ramp_up_end_rps", float | None, None, "To this rate.", TRAFFIC),
    option(
        "max_concurrency", int | None, None, "Most requests in flight; others wait their turn.",
        TRAFFIC, min=1,
    ),
]  # fmt: skip

GOODPUT_OPTION = option(
    "goodput", list[str], [],
    "Limits in ms that make a request good: ttft:500 tpot:50 e2el:9000.", "Result",
    metavar="KEY:MS",
)  # fmt: skip


def demand_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `octavo.tools.workload.demand.Demand`. Raises `ValueError`."""
    from octavo.tools.workload import arrivals, traces

    strategy = values["ramp_up_strategy"]
    ramp = None
    if strategy is not None:
        if strategy not in ("linear", "exponential"):
            raise ValueError(f"--ramp-up-strategy {strategy!r} is neither linear nor exponential")
        if values["ramp_up_start_rps"] is None or values["ramp_up_end_rps"] is None:
            raise ValueError("--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps")
        ramp = arrivals.Ramp(strategy, values["ramp_up_start_rps"], values["ramp_up_end_rps"])
    elif values["ramp_up_start_rps"] is not None or values["ramp_up_end_rps"] is not None:
        raise ValueError("--ramp-up-start-rps and --ramp-up-end-rps need --ramp-up-strategy")
    arrivals.check(values["request_rate"], values["burstiness"], ramp)
    window = traces.Window(
        start=values["trace_start"],
        duration=values["trace_duration"],
        speedup=values["trace_speedup"],
        max_input_len=values["max_input_len"],
        max_output_len=values["max_output_len"],
        most=values["num_prompts"],
    )
    window.check()
    lengths = {name: values[name] for name in _LENGTHS}
    if values["input_len"] is not None:
        lengths["random_input_len"] = values["input_len"]
    if values["output_len"] is not None:
        lengths |= {name: values["output_len"] for name in _LENGTHS if name.endswith("output_len")}
    return {
        **lengths,
        **{name: values[name] for name in _AS_THEY_ARE},
        "window": window,
        "ramp": ramp,
    }


_LENGTHS = (
    "random_input_len", "random_output_len", "prefix_repetition_output_len", "custom_output_len",
    "sharegpt_output_len",
)  # fmt: skip
_AS_THEY_ARE = (
    "dataset_name", "dataset_path", "num_prompts", "seed", "random_range_ratio",
    "random_prefix_len", "prefix_repetition_prefix_len", "prefix_repetition_suffix_len",
    "prefix_repetition_num_prefixes", "disable_shuffle", "no_oversample", "request_rate",
    "burstiness", "max_concurrency",
)  # fmt: skip


# --- of simulations ------------------------------------------------------------------------------

_OF_TEXTS = {
    "custom_output_len": 256, "sharegpt_output_len": None, "disable_shuffle": False,
    "no_oversample": False,
}  # fmt: skip

SIMULATED_OPTIONS = [
    option(
        "classes", list[str], [],
        "A kind of requests (repeatable): its share of them, clients=N, weight= and priority= of "
        "each, and its own ttft=, tpot=, e2el= in ms, or slo=none.", TRAFFIC, "--class",
        metavar="NAME:KEY=VALUE,…", show_default="all are alike",
    ),
    option(
        "trace", Path | None, None,
        "Recorded arrivals: an Azure or Mooncake trace, or what octavo bench serve "
        "--save-detailed wrote.", DATASET, metavar="FILE", show_default="synthetic requests",
    ),
    *(
        parameter
        for parameter in DATASET_OPTIONS + TRAFFIC_OPTIONS
        if parameter.name not in (*_OF_TEXTS, "dataset_name", "dataset_path")
    ),
    option(
        "dataset_name", str | None, None,
        "random, prefix_repetition; of a trace: azure, mooncake, result.", DATASET,
        show_default="random; of a trace what its first line says",
    ),
    option("dataset_path", Path | None, None, "The same as --trace.", DATASET, metavar="FILE"),
]  # fmt: skip


def demand(values: Mapping[str, Any]) -> Demand:
    """What `SIMULATED_OPTIONS` say. Raises `ValueError` for values that do not go together."""
    from octavo.tools.workload.classes import parse_classes
    from octavo.tools.workload.demand import TEXTS, Demand

    given = dict(values) | _OF_TEXTS
    classes = parse_classes(given.pop("classes"))
    trace = given.pop("trace")
    if trace is not None and given["dataset_path"] is not None:
        raise ValueError("--trace and --dataset-path are two names of one thing: give one")
    path = given["dataset_path"] = trace or given["dataset_path"]
    if given["dataset_name"] is None:
        given["dataset_name"] = "random" if path is None else "trace"
    if given["dataset_name"] in TEXTS:
        raise ValueError(
            f"--dataset-name {given['dataset_name']} has texts, whose tokens a tokenizer would "
            "have to count: give what octavo bench serve --save-detailed wrote of them as --trace"
        )
    built = Demand(**demand_settings(given), classes=classes)
    built.check()
    return built


def samples(demand: Demand) -> tuple[list[Sample], list[str]]:
    """The requests of a simulation with their arrivals, and notices. Raises `SettingsError`."""
    from octavo.engine.config import SettingsError

    try:
        return demand.timed(len, strict=True)
    except ValueError as error:
        raise SettingsError(str(error)) from None
