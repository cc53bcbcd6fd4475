"""octavo serve: the OpenAI API over HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import typer

from octavo.cli.options import (
    ENGINE_OPTIONS,
    POLICY_OPTIONS,
    QUEUE_OPTIONS,
    Model,
    engine_config,
    setting_options,
    strings,
    takes,
)
from octavo.engine.config import EngineConfig
from octavo.server.config import ServeConfig
from octavo.settings import setting_infos

EXAMPLES = (
    "octavo serve smollm2",
    "octavo serve model.gguf --host 0.0.0.0 --port 8080 --kv-cache-memory 2GiB",
    "OCTAVO_API_KEY=secret octavo serve gemma3-270m --max-num-seqs 64",
)

SERVE_OPTIONS = setting_options(
    ServeConfig, "Server", (name for name, info in setting_infos(ServeConfig).items() if info.help)
)
# Of serving alone.
OFFLOAD_OPTIONS = setting_options(
    EngineConfig,
    "Engine",
    ("executor", "kv_offload_memory", "kv_offload_dir", "kv_offload_disk"),
    unset=True,
)


def serve_config(given: Mapping[str, Any]) -> ServeConfig:
    from octavo.server.api_keys import read_keys
    from octavo.tools.plan.slo import promised
    from octavo.tools.workload.metrics import parse_slo

    values: dict[str, Any] = {}
    for name, info in setting_infos(ServeConfig).items():
        if info.help:
            value = given[info.name or name]
            if info.name.startswith("disable_"):
                value = not value
            values[name] = strings(value) if isinstance(value, list) else value
    if (file := values["api_key_file"]) is not None:
        try:
            values["named_keys"] = read_keys(file)
        except OSError as error:
            raise ValueError(f"{file}: {error.strerror}") from None
    if values["slo"] is not None:
        values["slo"] = promised(parse_slo(values["slo"]))
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
    from octavo.server.model import public_name
    from octavo.server.process import run

    # Clients name the model as it was asked for here, but learn no path of this machine.
    if not config.served_model_name:
        config = replace(config, served_model_name=(public_name(model),))
    raise typer.Exit(run(resolve(model), engine, config))
