"""octavo serve: the OpenAI API over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from octavo.cli.options import (
    ENGINE_OPTIONS,
    POLICY_OPTIONS,
    Model,
    amount,
    engine_config,
    json_object,
    option,
    strings,
    takes,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from octavo.engine.config import EngineConfig
    from octavo.server.config import ServeConfig

EXAMPLES = (
    "octavo serve smollm2",
    "octavo serve model.gguf --host 0.0.0.0 --port 8080 --kv-cache-memory 2GiB",
    "OCTAVO_API_KEY=secret octavo serve gemma3-270m --max-num-seqs 64",
)

_SERVER = "Server"
_LOG_LEVELS = "debug, info, warning, error or critical."

SERVE_OPTIONS = [
    option("host", str, "127.0.0.1", "Address to listen on.", _SERVER),
    option("port", int, 8000, "Port to listen on; 0: any free one.", _SERVER),
    option("uds", str | None, None, "Listen on a Unix socket instead.", _SERVER, metavar="PATH"),
    option(
        "api_key", list[str], [], "Serve only clients that send this key (repeatable).", _SERVER,
        envvar="OCTAVO_API_KEY",
    ),
    option(
        "api_key_file", Path | None, None,
        "A JSON file of keys with names, weights, priorities, quotas and latency targets.", _SERVER,
        metavar="FILE",
    ),
    option(
        "share_prefix_cache", bool, False,
        "Let all keys of --api-key-file share cached prefixes; else each has its own.", _SERVER,
        "--share-prefix-cache",
    ),
    option(
        "slo", str | None, None,
        "Latency in ms that requests are promised which name none: ttft=500,tpot=50,e2el=9000.",
        _SERVER, metavar="KEY=MS,…",
    ),
    option(
        "admit_within_slo", bool, False,
        "Answer 429 at once to requests whose own latency target would be missed by prediction.",
        _SERVER, "--admit-within-slo",
    ),
    option(
        "served_model_name", list[str], [], "The model's name in the API (repeatable).", _SERVER,
        show_default="the model argument",
    ),
    option(
        "allowed_hosts", list[str], [],
        "Names that Host headers may have beside the server's own; *.example.com, * (repeatable or "
        "a JSON list). Any where there are keys.", _SERVER,
    ),
    option("root_path", str, "", "Path prefix that a proxy in front strips.", _SERVER),
    option(
        "generation_config", str, "auto",
        "Sampling defaults of requests: auto (the model's own), vllm (none), or a folder with a "
        "generation_config.json.", _SERVER, metavar="auto|vllm|DIR",
    ),
    option(
        "override_generation_config", str | None, None,
        'Sampling defaults in place of those, as JSON: {"temperature": 0.6}.', _SERVER,
        parser=json_object, metavar="JSON", show_default="none",
    ),
    option("response_role", str, "assistant", "Role of the answers.", _SERVER),
    option(
        "control_tokens_in_content", bool, False,
        "Let the content of messages contain control tokens: whoever writes it can forge turns.",
        _SERVER, "--control-tokens-in-content",
    ),
    option(
        "allowed_origins", list[str], [], "CORS origins (repeatable or a JSON list).", _SERVER
    ),
    option("allowed_methods", list[str], ["*"], "CORS methods (the same).", _SERVER),
    option("allowed_headers", list[str], ["*"], "CORS headers (the same).", _SERVER),
    option("allow_credentials", bool, False, "CORS: let browsers send credentials.", _SERVER),
    option(
        "enable_force_include_usage", bool, False, "End every stream with its usage.", _SERVER
    ),
    option(
        "sse_keep_alive_interval", float, 0.0,
        "Seconds of silence before a stream gets a comment line; 0: none.", _SERVER,
    ),
    option(
        "shutdown_timeout", float, 30.0,
        "Seconds that running requests may take to finish after SIGTERM.", _SERVER,
    ),
    option(
        "disable_fastapi_docs", bool, False, "No /docs and /openapi.json.", _SERVER,
        "--disable-fastapi-docs",
    ),
    option(
        "disable_uvicorn_access_log", bool, False, "No log line per request.", _SERVER,
        "--disable-uvicorn-access-log",
    ),
    option(
        "access_log_format", str | None, None, "Log line per request: text or json.", _SERVER,
        metavar="FORMAT", show_default="as --log-format",
    ),
    option(
        "otlp_traces_endpoint", str | None, None,
        "Send a trace of each generation to this OpenTelemetry collector: "
        "http://HOST:4318/v1/traces. Needs opentelemetry-sdk.", _SERVER, metavar="URL",
    ),
    option("log_format", str, "text", "Log lines: text or json.", _SERVER, metavar="FORMAT"),
    option("uvicorn_log_level", str, "info", _LOG_LEVELS, _SERVER, metavar="LEVEL"),
]  # fmt: skip

QUEUE_OPTIONS = [
    option(
        "max_num_queued_reqs", int | None, None, "Requests that may wait; the next gets a 429.",
        "Engine", show_default="4 x --max-num-seqs",
    ),
    option(
        "max_num_queued_tokens", int | None, None,
        "Prompt tokens that may wait; the next gets a 429.", "Engine", show_default="1Mi",
    ),
    option(
        "max_logprobs", int | None, None, "Most alternatives a request may ask for.", "Engine",
        show_default="20",
    ),
    option(
        "seed", int | None, None, "Seed of requests that bring none.", "Engine",
        show_default="random",
    ),
]  # fmt: skip


# Of serving alone.
OFFLOAD_OPTIONS = [
    option(
        "executor", str | None, None, "For developers: native, reference or simulated.", "Engine",
        show_default="native", hidden=True,
    ),
    option(
        "kv_offload_memory", str | None, None,
        "Host memory for blocks of the prefix cache that the KV cache has no room for: 4GiB.",
        "Engine", parser=amount, metavar="SIZE", show_default="none",
    ),
    option(
        "kv_offload_dir", str | None, None,
        "Folder for them, too: a prefix cache that outlives the server.", "Engine",
        metavar="DIR", show_default="none",
    ),
    option(
        "kv_offload_disk", str | None, None, "Most bytes of files in --kv-offload-dir.", "Engine",
        parser=amount, metavar="SIZE", show_default="16GiB, or half of what is free and its own",
    ),
]  # fmt: skip


def serve_config(given: Mapping[str, Any]) -> ServeConfig:
    from octavo.server.api_keys import read_keys
    from octavo.server.config import ServeConfig
    from octavo.tools.plan.slo import promised
    from octavo.tools.workload.metrics import parse_slo

    values = dict(given)
    for name in ("api_key", "served_model_name", "allowed_hosts", "allowed_origins",
                 "allowed_methods", "allowed_headers"):  # fmt: skip
        values[name] = strings(values[name])
    if (file := values["api_key_file"]) is not None:
        try:
            values["named_keys"] = read_keys(file)
        except OSError as error:
            raise ValueError(f"{file}: {error.strerror}") from None
    if values["slo"] is not None:
        values["slo"] = promised(parse_slo(values["slo"]))
    values["docs"] = not values.pop("disable_fastapi_docs")
    values["access_log"] = not values.pop("disable_uvicorn_access_log")
    values["log_level"] = values.pop("uvicorn_log_level")
    return ServeConfig(**values)


@takes(
    engine=(ENGINE_OPTIONS + POLICY_OPTIONS + QUEUE_OPTIONS + OFFLOAD_OPTIONS, engine_config),
    config=(SERVE_OPTIONS, serve_config),
)
def command(model: Model, engine: EngineConfig, config: ServeConfig) -> None:
    """Serve the OpenAI API over HTTP.

    SIGTERM or Ctrl-C stops it, once running requests have finished (--shutdown-timeout).
    """
    from dataclasses import replace

    from octavo.loader.pull import resolve
    from octavo.server import run
    from octavo.server.model import public_name

    # Clients name the model as it was asked for here, but learn no path of this machine.
    if not config.served_model_name:
        config = replace(config, served_model_name=(public_name(model),))
    raise typer.Exit(run(resolve(model), engine, config))
