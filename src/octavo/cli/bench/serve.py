"""octavo bench serve: a load on any server of the OpenAI API, and what it felt like."""

from __future__ import annotations

import math
import os
import re
from errno import ENOENT
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.console import json_text, writing
from octavo.cli.fold import show_report
from octavo.cli.load import (
    DATASET,
    DATASET_OPTIONS,
    GOODPUT_OPTION,
    MOST_REQUESTS,
    TRAFFIC,
    TRAFFIC_OPTIONS,
    demand_settings,
)
from octavo.cli.options import check_file, check_folder, json_object, option, takes
from octavo.sampling.params import parameters

if TYPE_CHECKING:
    from collections.abc import Mapping

    from octavo.tools.bench.load.benchmark import Settings

EXAMPLES = (
    "octavo bench serve --random-input-len 128 --random-output-len 64 --num-prompts 64",
    "octavo bench serve --request-rate 4 --num-prompts 200 --goodput ttft:500 tpot:50",
    "octavo bench serve --dataset-name prefix_repetition --max-concurrency 16 --num-prompts 100",
    "octavo bench serve --dataset-name azure --dataset-path trace.csv --trace-duration 60",
)


_SERVER, _SAMPLING, _RESULT = "Server", "Sampling", "Result"

SERVER_OPTIONS = [
    option(
        "backend", str, "openai",
        "openai or vllm: completions; openai-chat: chat completions.", _SERVER,
        "--backend", "--endpoint-type",
    ),
    option("base_url", str | None, None, "Instead of host and port; https works.", _SERVER),
    option("host", str, "127.0.0.1", "The server's address.", _SERVER),
    option("port", int, 8000, "The server's port.", _SERVER, min=1, max=65535),
    option(
        "endpoint", str | None, None, "API route.", _SERVER,
        show_default="/v1/completions, or /v1/chat/completions for openai-chat",
    ),
    option(
        "header", list[str], [], "Send this with each request, as NAME=VALUE.", _SERVER,
    ),
    option("insecure", bool, False, "Do not check certificates.", _SERVER, "--insecure"),
    option(
        "model", str | None, None, "The model.", _SERVER,
        show_default="the first that the server lists",
    ),
    option(
        "served_model_name", str | None, None, "Its name in the API.", _SERVER,
        show_default="--model",
    ),
    option(
        "tokenizer", str | None, None,
        "Whose tokens prompts are counted in: tokenizer.json, GGUF file or model name.", _SERVER,
        show_default="the server's /tokenize",
    ),
    option(
        "prompt_format", str, "auto",
        "ids: prompts as token ids; text; auto: ids where the server takes them.", _SERVER,
    ),
    option(
        "ready_check_timeout_sec", float, 0.0, "Wait so long for the server to be ready.",
        _SERVER, min=0,
    ),
    option(
        "request_timeout_sec", float, 21600.0, "A request that takes longer has failed.",
        _SERVER, min=0.001,
    ),
]  # fmt: skip

_SAMPLED = {
    name: row.kind.http_type
    for name, row in parameters().items()
    if row.native and row.kind.http_type in (int, float) and name not in ("min_tokens", "seed")
}

SAMPLING_OPTIONS = [
    option(
        "ignore_eos", bool | None, None, "Ask for answers of full length.", _SAMPLING,
        show_default="for random prompts and traces",
    ),
    *(
        option(name, kind | None, None, f"Send {name}.", _SAMPLING)
        for name, kind in _SAMPLED.items()
    ),
    option(
        "extra_body", str | None, None, "Fields for each request, as a JSON object.", _SAMPLING,
        parser=json_object, metavar="JSON",
    ),
]  # fmt: skip

LOAD_OPTIONS = [
    option(
        "num_prompts", int | None, None, "Requests.", DATASET, min=1, max=MOST_REQUESTS,
        show_default="a minute's worth for this server, at most 1000; of a trace all in the window",
    )
    if parameter.name == "num_prompts"
    else parameter
    for parameter in DATASET_OPTIONS
]  # fmt: skip

WARMUP_OPTIONS = [
    option(
        "num_warmups", int, 0, "Send the first request so often before.", TRAFFIC, min=0
    ),
]  # fmt: skip

RESULT_OPTIONS = [
    option(
        "percentile_metrics", str, "ttft,tpot,itl",
        "Also e2el, client_queue_time, e2el_including_client_queue.", _RESULT, metavar="NAMES",
    ),
    option("metric_percentiles", str, "99", "Such as 50,90,99.", _RESULT, metavar="LIST"),
    GOODPUT_OPTION,
    option("label", str | None, None, "A name for this run.", _RESULT),
    option("metadata", list[str], [], "Goes into the result, as NAME=VALUE.", _RESULT),
    option("disable_tqdm", bool, False, "Show no progress.", _RESULT, "--disable-tqdm"),
    option("save_result", bool, False, "Write the result to a file.", _RESULT, "--save-result"),
    option(
        "save_detailed", bool, False, "With each request's times, lengths, text and error.",
        _RESULT, "--save-detailed",
    ),
    option(
        "append_result", bool, False, "Add the result to the file as a line.", _RESULT,
        "--append-result",
    ),
    option("result_dir", Path | None, None, "The file's folder.", _RESULT, metavar="FOLDER"),
    option(
        "result_filename", str | None, None, "The file's name.", _RESULT,
        show_default="from label, rate, model and date",
    ),
    option("as_json", bool, False, "Print the result as one JSON object.", _RESULT, "--json"),
]  # fmt: skip


def pairs(name: str, texts: list[str]) -> dict[str, str]:
    """NAME=VALUE each."""
    found = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise ValueError(f"--{name} {text!r} is not NAME=VALUE")
        found[key.strip()] = value.strip()
    return found


def spread(values: dict[str, Any], more: list[str]) -> None:
    """vLLM lets --goodput, --header and --metadata take several words; here the words after the
    first arrive as arguments, and each goes back to the option of its form.
    """
    for word in more:
        form = ("goodput",) if re.match(r"\w+:[^=]*$", word) else ("header", "metadata")
        given = [name for name in form if values[name]]
        if len(given) != 1:
            raise ValueError(
                f"{word!r} belongs to no option"
                + (" or to several: repeat --header and --metadata" if given else "")
            )
        values[given[0]].append(word)
    values["goodput"] = [pair for text in values["goodput"] for pair in re.split(r"[\s,]+", text)]


def settings(values: Mapping[str, Any]) -> Settings:
    """Raises `ValueError` for values that do not go together."""
    from octavo.tools.bench.load import client
    from octavo.tools.bench.load.benchmark import Settings
    from octavo.tools.workload import metrics

    headers = pairs("header", values["header"])
    if (key := os.environ.get("OPENAI_API_KEY")) and "authorization" not in map(str.lower, headers):
        headers["Authorization"] = f"Bearer {key}"
    host = f"[{values['host']}]" if ":" in values["host"] else values["host"]
    for name in _SAMPLED:
        if values[name] is not None and not math.isfinite(values[name]):
            raise ValueError(f"--{name.replace('_', '-')} is {values[name]}, which JSON cannot say")
    if values["prompt_format"] not in ("auto", "ids", "text"):
        raise ValueError(f"--prompt-format {values['prompt_format']!r} is none of auto, ids, text")
    built = Settings(
        **demand_settings(values),
        **{name: values[name] for name in _AS_THEY_ARE},
        base_url=values["base_url"] or f"http://{host}:{values['port']}",
        headers=headers,
        sampling={name: values[name] for name in _SAMPLED},
        extra_body=values["extra_body"] or {},
        metrics=tuple(metrics.parse_metrics(values["percentile_metrics"])),
        percentiles=tuple(metrics.parse_percentiles(values["metric_percentiles"])),
        goodput=metrics.parse_goodput(values["goodput"]),
        metadata=pairs("metadata", values["metadata"]),
        progress=not values["disable_tqdm"],
    )
    built.check()
    client.Client(client.Endpoint.of(built.url), headers)  # refuses what is no URL or header
    return built


_AS_THEY_ARE = (
    "backend", "endpoint", "insecure", "model", "served_model_name", "tokenizer", "prompt_format",
    "ready_check_timeout_sec", "request_timeout_sec", "num_warmups", "ignore_eos", "label",
    "save_detailed",
)  # fmt: skip


@takes(
    values=(
        SERVER_OPTIONS
        + LOAD_OPTIONS
        + TRAFFIC_OPTIONS
        + WARMUP_OPTIONS
        + SAMPLING_OPTIONS
        + RESULT_OPTIONS,
        dict,
    ),
)
def command(
    values: dict[str, Any],
    more: Annotated[
        list[str] | None,
        typer.Argument(
            help="Further values of --goodput, --header or --metadata, in vLLM's way.",
            metavar="VALUE",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Load a server and measure what its clients would feel.

    Options and result are those of vllm bench serve; OPENAI_API_KEY is sent if set. Requests leave
    at their own times whether or not others have been answered. Ctrl-C reports what has been.
    """
    try:
        spread(values, more or [])
        asked = settings(values)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None

    import uvloop

    from octavo.tools.bench.load import benchmark, load_report

    if asked.dataset_path is not None and not asked.dataset_path.exists():
        raise FileNotFoundError(ENOENT, os.strerror(ENOENT), str(asked.dataset_path))
    folder = values["result_dir"] or Path()
    name = values["result_filename"] or ""
    saved = values["save_result"] or values["append_result"]
    if saved:  # before an hour of load
        path = folder / (name or "result")
        check_folder(path.parent)
        if name and path.parent.is_dir():
            check_file(path, "")

    try:
        result = uvloop.run(benchmark.benchmark(asked))
    except benchmark.LoadError as error:
        typer.echo(f"octavo: {error}", err=True)
        raise typer.Exit(1) from None
    short = benchmark.without_requests(result)
    kept = result if asked.save_detailed else short
    try:
        if values["as_json"]:
            typer.echo(json_text(kept))
        else:
            show_report(load_report.table(short, list(asked.metrics)))
    finally:  # also when nobody reads on
        if saved:
            path = folder / (name or benchmark.file_name(asked, result))
            path.parent.mkdir(parents=True, exist_ok=True)
            append = values["append_result"]
            with writing(path, append=append) as file:
                benchmark.save(file, kept, append=append)
            typer.echo(f"result in {path}", err=True)
    if result["interrupted"]:
        raise typer.Exit(130)
    if not result["completed"]:
        raise typer.Exit(1)
