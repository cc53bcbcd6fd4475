"""Which Host headers are answered: no page of another name gets in by DNS rebinding."""

import asyncio
import socket
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from serve_fakes import FakeEngine, served_model
from serving import listening

from octavo.server.api_keys import ApiKey, digest
from octavo.server.app import App
from octavo.server.config import ServeConfig
from octavo.server.hosts import own_hosts
from octavo.server.routes import DOCS_ROUTES, ROUTES

MACHINE = socket.gethostname().lower()
EVIL = "evil.example"


async def nothing(*_: Any) -> None: ...


@pytest.mark.parametrize(
    ("config", "own", "strange"),
    [
        (
            {},
            "localhost LOCALHOST localhost. localhost:1 a.localhost 127.0.0.1 127.0.0.1:9 127.9.9.9"
            " [::1] [::1]:8000 [::ffff:127.0.0.1]",
            "evil.example localhost.evil.example evil.localhost.example 127.0.0.1.evil.example"
            " 192.168.1.5 0.0.0.0 [fe80::1] 127.1 2130706433 0x7f.1 evillocalhost a,b"
            " localhost:evil localhost@evil.example evil@localhost [::1 ::1.evil []",
        ),
        ({"host": "::1"}, "localhost [::1] 127.0.0.1", "evil.example [fe80::1]"),
        ({"host": "localhost"}, "localhost 127.0.0.1", f"evil.example x.{MACHINE}"),
        (
            {"host": "0.0.0.0"},
            f"localhost 10.0.0.1 10.0.0.1:80 [2001:db8::1] {MACHINE} {MACHINE.upper()}:80",
            f"evil.example evil.{MACHINE} {MACHINE}.evil.example",
        ),
        ({"host": "::"}, "[2001:db8::1] 10.0.0.1", "evil.example"),
        ({"host": ""}, "10.0.0.1", "evil.example a:b []"),
        ({"host": "gpu.lan"}, "gpu.lan GPU.lan. 10.0.0.1 localhost", "evil.example a.gpu.lan"),
        (
            {"allowed_hosts": ("chat.example", "*.corp.example")},
            "chat.example CHAT.example.:443 a.corp.example a.b.corp.example localhost 127.0.0.1",
            "evil.example corp.example evilcorp.example chat.example.evil.example a.chat.example",
        ),
        ({"allowed_hosts": ("*",)}, "evil.example 10.0.0.1 [::1", ""),
        ({"uds": "/tmp/x"}, "evil.example x", ""),
        ({"api_key": ("k",)}, "evil.example 10.0.0.1", ""),
        ({"api_key": ("k",), "allowed_hosts": ("a.example",)}, "a.example localhost", EVIL),
        (
            {"named_keys": (ApiKey(name="k", digest=digest(b"k")),), "host": "0.0.0.0"},
            "evil.example",
            "",
        ),
    ],
)
def test_whose_name_it_is(config: dict[str, Any], own: str, strange: str) -> None:
    is_own = own_hosts(ServeConfig(**config))
    assert [name for name in own.split() if not is_own(name)] == []
    assert [name for name in strange.split() if is_own(name)] == []
    assert is_own("") == is_own(EVIL)


async def test_what_is_no_request_has_no_host(engine: FakeEngine) -> None:
    app = App(engine, served_model(), ServeConfig())  # type: ignore[arg-type]
    messages = iter(({"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}))
    sent = []

    async def receive() -> Any:
        return next(messages)

    async def send(message: Any) -> None:
        sent.append(message["type"])

    await app({"type": "lifespan", "state": {}}, receive, send)
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


@pytest.mark.parametrize(
    "name", ["", "a b", "http://a", "a:80", "*.", "a.*", "**", "a/b", "[::1]:80"]
)
def test_bad_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="allowed_hosts"):
        ServeConfig(allowed_hosts=(name,))


async def test_every_route_is_closed_to_another_name(make_client: Any, engine: FakeEngine) -> None:
    """And to the question whether a page of another origin may ask."""
    client: httpx.AsyncClient = make_client(allowed_origins=("http://a.example",))
    own = {"origin": f"http://{EVIL}:8000", "host": EVIL}
    for path in (*(route.path for route in (*ROUTES, *DOCS_ROUTES)), "/nothing"):
        for method in ("GET", "POST", "OPTIONS", "BREW"):
            response = await client.request(method, path, headers=own)
            assert response.status_code == 421, path
            error = response.json()["error"]
            assert (error["code"], error["type"]) == (421, "MisdirectedRequestError")
            assert "--allowed-hosts" in error["message"]
            assert "access-control-allow-origin" not in response.headers
            assert response.headers["x-request-id"]
    asked = own | {"access-control-request-method": "POST"}
    assert (await client.options("/v1/models", headers=asked)).status_code == 421
    assert (await client.get("/v1/models")).status_code == 200
    assert not engine.submitted


@pytest.mark.parametrize(
    ("target", "head", "status"),
    [
        ("/live", "HTTP/1.1\r\nhost: localhost", 200),
        ("/live", "HTTP/1.0", 200),
        ("/live", f"HTTP/1.1\r\nhost: {EVIL}", 421),
        ("/live", f"HTTP/1.0\r\nhost: {EVIL}", 421),
        ("/live", "HTTP/1.1\r\nhost:", 421),
        ("/live", f"HTTP/1.1\r\nhost: {EVIL}\r\nupgrade: websocket\r\nconnection: upgrade", 421),
        # The target's host counts where it has one (RFC 9112, section 3.2.2).
        (f"http://{EVIL}/live", "HTTP/1.1\r\nhost: localhost", 421),
        (f"http://{EVIL}/live", "HTTP/1.0", 421),
        ("http://localhost/live", f"HTTP/1.1\r\nhost: {EVIL}", 200),
        (f"HTTP://LOCALHOST:80/live?a=http://{EVIL}/", "HTTP/1.1\r\nhost: localhost", 200),
        (f"http://localhost@{EVIL}/live", "HTTP/1.1\r\nhost: localhost", 400),
        ("http:///live", "HTTP/1.1\r\nhost: localhost", 400),
        (f"/live?http://{EVIL}/", "HTTP/1.1\r\nhost: localhost", 200),
    ],
)
async def test_on_the_wire(engine: FakeEngine, target: str, head: str, status: int) -> None:
    async with listening(engine, allowed_hosts=()) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(url).port)
        if "connection:" not in head:
            head += "\r\nconnection: close"
        writer.write(f"GET {target} {head}\r\n\r\n".encode())
        answer = await reader.readuntil(b"\r\n")
        writer.close()
    assert int(answer.split()[1]) == status, answer
