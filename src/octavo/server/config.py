"""The server's settings: how it listens, who may use it, and when it gives up."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from octavo.scheduler.request import LatencyTarget
from octavo.server.api_keys import SENDABLE, ApiKey, can_be_sent, check_distinct, unnamed
from octavo.server.logs import FORMATS

_ALLOWED_HOST = re.compile(r"\*|(\*\.)?[\w-]+(\.[\w-]+)*\.?|\[[0-9A-Fa-f:.]+\]", re.ASCII)
LOG_LEVELS = ("debug", "info", "warning", "error", "critical")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Names follow vLLM's flags where it has one. Sizes in bytes, times in seconds.

    Raises `ValueError` naming the field.
    """

    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free one, printed at start
    uds: str | None = None  # a Unix socket's path; host and port are then not used
    # Names that a Host header may have beside the server's own (hosts.py); "*.example.com": those
    # below a name; "*": any.
    allowed_hosts: tuple[str, ...] = ()
    root_path: str = ""  # the path a proxy in front has stripped

    api_key: tuple[str, ...] = ()  # any of them opens everything; none: no key is asked for
    named_keys: tuple[ApiKey, ...] = ()  # the same, each with its name and limits
    api_key_file: Path | None = None  # where they come from, for messages
    share_prefix_cache: bool = False  # among all keys; else each named one has its own part of it
    served_model_name: tuple[str, ...] = ()  # the first is the one answers carry
    response_role: str = "assistant"
    # Where the sampling defaults of requests come from: the model's own files ("auto"), nowhere
    # ("vllm"), or a folder with a generation_config.json; and what replaces them.
    generation_config: str = "auto"
    override_generation_config: dict[str, Any] | None = None
    control_tokens_in_content: bool = False  # or else they are text there (docs/serving.md)

    # Browsers of other origins: none unless named, for a page on the web could else use a
    # server that its visitor runs on loopback.
    allowed_origins: tuple[str, ...] = ()
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False

    max_request_bytes: int = 4 << 20
    max_choices: int = 1024  # prompts × n of one request
    enable_force_include_usage: bool = False
    sse_keep_alive_interval: float = 0.0  # a comment line after so much silence; 0: none
    slo: LatencyTarget | None = None  # of requests whose own and whose key's say nothing
    admit_within_slo: bool = False  # refuse for now what would miss its own by prediction
    stream_write_timeout: float = 60.0  # a client that takes nothing for so long is dropped
    keep_alive_timeout: float = 75.0  # an idle connection is closed after so long
    live_timeout: float = 60.0  # /live fails when one step takes longer
    shutdown_timeout: float = 30.0  # running requests may finish for so long after SIGTERM

    docs: bool = True  # /docs and /openapi.json
    access_log: bool = True
    access_log_format: str | None = None  # text or json; None: as log_format
    log_format: str = "text"  # or json
    log_level: str = "info"
    otlp_traces_endpoint: str | None = None  # URL of an OpenTelemetry collector; None: no traces

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port is {self.port}, outside 0 to 65535")
        for name in ("max_request_bytes", "max_choices"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, below 1")
        for name in ("stream_write_timeout", "keep_alive_timeout", "live_timeout"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}, not above 0")
        for name in ("shutdown_timeout", "sse_keep_alive_interval"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}, below 0")
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
        if self.log_level not in LOG_LEVELS:
            raise ValueError(f"log_level is {self.log_level!r}, none of {', '.join(LOG_LEVELS)}")
        if self.log_format not in FORMATS:
            raise ValueError(f"log_format is {self.log_format!r}, neither text nor json")
        if self.access_log_format not in (None, *FORMATS):
            raise ValueError(
                f"access_log_format is {self.access_log_format!r}, neither text nor json"
            )
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
        keys = unnamed(self.api_key) + self.named_keys
        if self.share_prefix_cache:
            return tuple(replace(key, cache_salt="") for key in keys)
        return keys
