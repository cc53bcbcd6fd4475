"""Undocumented parts of other packages that the server uses. Where an upgrade takes one away, this
test says so first, by name; pyproject.toml bounds the versions.
"""

import json.decoder
import json.scanner
from typing import Any

import pytest
import uvicorn
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState


async def app(scope: Any, receive: Any, send: Any) -> None: ...


# By module of the server: whose names it uses, and which.
USED: dict[str, list[tuple[Any, str]]] = {
    "body": [
        (json.decoder, "JSONArray"),
        (json.scanner, "py_make_scanner"),
        (json.JSONDecoder(), "parse_array scan_once"),
    ],
    "server": [(uvicorn.Server, "capture_signals serve")],
    "connection": [
        (
            HttpToolsProtocol,
            "connection_made connection_lost eof_received on_message_begin on_header "
            "on_headers_complete on_body on_message_complete on_response_complete shutdown "
            "pause_writing resume_writing",
        ),
        (
            HttpToolsProtocol(Config(app, lifespan="off"), ServerState(), {}),
            "parser loop transport flow cycle scope headers expect_100_continue server_state",
        ),
        (FlowControl, "pause_reading resume_reading"),
        (ServerState(), "total_requests"),
    ],
    "streaming": [
        (
            RequestResponseCycle(*[None] * 6, [], None, False, True, None),  # type: ignore
            "transport flow message_event disconnected keep_alive response_started "
            "response_complete chunked_encoding",
        ),
        (FlowControl(None), "write_paused"),  # type: ignore[arg-type]
    ],
}


@pytest.mark.parametrize("module", USED)
def test_the_names_are_there(module: str) -> None:
    missing = [
        f"{owner}.{name}"
        for owner, names in USED[module]
        for name in names.split()
        if not hasattr(owner, name)
    ]
    assert missing == []
