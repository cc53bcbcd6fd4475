"""The server's settings: how it listens, who may use it, and when it gives up."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.server.logs import FORMATS
from octavo.settings import check, setting

if TYPE_CHECKING:  # the command line reads the fields, and imports nothing heavy for them
    from octavo.scheduler.request import LatencyTarget
    from octavo.server.api_keys import ApiKey

_ALLOWED_HOST = re.compile(r"\*|(\*\.)?[\w-]+(\.[\w-]+)*\.?|\[[0-9A-Fa-f:.]+\]", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Names follow vLLM's flags where it has one. Sizes in bytes, times in seconds.

    Raises `ValueError` naming the field.
    """

    # fmt: off
    host: str = setting("127.0.0.1", "Address to listen on.")
    port: int = setting(8000, "Port to listen on; 0: any free one.", least=0, most=65535)
    uds: str | None = setting(  # a path; host and port are then not used
        None, "Listen on a Unix socket instead.", metavar="PATH")
    api_key: tuple[str, ...] = setting(  # any of them opens everything; none: no key is asked for
        (), "Serve only clients that send this key (repeatable).", envvar="OCTAVO_API_KEY")
    api_key_file: Path | None = setting(  # where the named keys come from, for messages
        None, "A JSON file of keys with names, weights, priorities, quotas and latency targets.",
        metavar="FILE")
    named_keys: tuple[ApiKey, ...] = ()  # keys, each with its name and limits
    share_prefix_cache: bool = setting(False,
        "Let all keys of --api-key-file share cached prefixes; else each has its own.",
        flags=("--share-prefix-cache",))
    # It holds for requests that bring no target and whose key has none.
    slo: LatencyTarget | None = setting(None,
        "Latency in ms that requests are promised which name none: ttft=500,tpot=50,e2el=9000.",
        metavar="KEY=MS,…")
    admit_within_slo: bool = setting(False,
        "Answer 429 at once to requests whose own latency target would be missed by prediction.",
        flags=("--admit-within-slo",))
    served_model_name: tuple[str, ...] = setting(  # the first is the one answers carry
        (), "The model's name in the API (repeatable).", show_default="the model argument")
    allowed_hosts: tuple[str, ...] = setting((),  # hosts.py
        "Names that Host headers may have beside the server's own; *.example.com, * (repeatable or "
        "a JSON list). Any where there are keys.")
    root_path: str = setting("", "Path prefix that a proxy in front strips.")
    generation_config: str = setting("auto",
        "Sampling defaults of requests: auto (the model's own), vllm (none), or a folder with a "
        "generation_config.json.", metavar="auto|vllm|DIR")
    override_generation_config: dict[str, Any] | None = setting(None,
        'Sampling defaults in place of those, as JSON: {"temperature": 0.6}.', parse="json_object",
        metavar="JSON", show_default="none")
    response_role: str = setting("assistant", "Role of the answers.")
    control_tokens_in_content: bool = setting(False,  # or else they are text (docs/serving.md)
        "Let the content of messages contain control tokens: whoever writes it can forge turns.",
        flags=("--control-tokens-in-content",))

    # Browsers of other origins: none unless named, for a page on the web could else use a
    # server that its visitor runs on loopback.
    allowed_origins: tuple[str, ...] = setting((), "CORS origins (repeatable or a JSON list).")
    allowed_methods: tuple[str, ...] = setting(("*",), "CORS methods (the same).")
    allowed_headers: tuple[str, ...] = setting(("*",), "CORS headers (the same).")
    allow_credentials: bool = setting(False, "CORS: let browsers send credentials.")

    enable_force_include_usage: bool = setting(False, "End every stream with its usage.")
    sse_keep_alive_interval: float = setting(0.0,
        "Seconds of silence before a stream gets a comment line; 0: none.", least=0)
    shutdown_timeout: float = setting(30.0,
        "Seconds that running requests may take to finish after SIGTERM.", least=0)
    max_request_bytes: int = setting(4 << 20, least=1)
    max_choices: int = setting(1024, least=1)  # prompts × n of one request
    # A client that takes nothing for so long is dropped.
    stream_write_timeout: float = setting(60.0, above=0)
    keep_alive_timeout: float = setting(75.0, above=0)  # an idle connection is closed after so long
    live_timeout: float = setting(60.0, above=0)  # /live fails when one step takes longer

    docs: bool = setting(True, "No /docs and /openapi.json.", name="disable_fastapi_docs")
    access_log: bool = setting(True, "No log line per request.", name="disable_uvicorn_access_log")
    access_log_format: str | None = setting(None, "Log line per request: text or json.",
        choices=FORMATS, metavar="FORMAT", show_default="as --log-format")
    otlp_traces_endpoint: str | None = setting(  # None: no traces
        None, "Send a trace of each generation to this OpenTelemetry collector: "
        "http://HOST:4318/v1/traces. Needs opentelemetry-sdk.", metavar="URL")
    log_format: str = setting("text", "Log lines: text or json.", choices=FORMATS, metavar="FORMAT")
    log_level: str = setting("info", "debug, info, warning, error or critical.",
        choices=("debug", "info", "warning", "error", "critical"), name="uvicorn_log_level",
        metavar="LEVEL")
    # fmt: on

    def __post_init__(self) -> None:
        from octavo.server.api_keys import SENDABLE, can_be_sent, check_distinct

        check(self)
        if not all(map(can_be_sent, self.api_key)):
            raise ValueError(f"api_key is not {SENDABLE}")
        check_distinct(self.keys)
        for name in self.allowed_hosts:
            if not _ALLOWED_HOST.fullmatch(name):
                raise ValueError(f"allowed_hosts has {name!r}: not a host's name, without a port")
        if any(not name for name in self.served_model_name):
            raise ValueError("served_model_name is empty")
        if not self.response_role:
            raise ValueError("response_role is empty")
        if self.root_path and not self.root_path.startswith("/"):
            raise ValueError(f"root_path is {self.root_path!r} and must start with /")
        if self.otlp_traces_endpoint is not None and not re.fullmatch(
            r"https?://[^/\s]+(/\S*)?", self.otlp_traces_endpoint
        ):
            raise ValueError(
                f"otlp_traces_endpoint is {self.otlp_traces_endpoint!r}, not a URL as of OTLP over "
                "HTTP: http://HOST:4318/v1/traces"
            )
        if self.allow_credentials and "*" in self.allowed_origins:
            raise ValueError("allow_credentials cannot go with an allowed_origins of *")

    @property
    def keys(self) -> tuple[ApiKey, ...]:
        """All API keys; none: no key is asked for."""
        from octavo.server.api_keys import unnamed

        keys = unnamed(self.api_key) + self.named_keys
        if self.share_prefix_cache:
            return tuple(replace(key, cache_salt="") for key in keys)
        return keys
