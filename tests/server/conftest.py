import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
import pytest_asyncio
import uvloop
from serve_fakes import FakeEngine, served_model

from octavo.server.app import App
from octavo.server.config import ServeConfig
from octavo.server.connection import Connection
from octavo.server.model import ServedModel


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """What the server runs on."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[Connection]:
    """The server's ends of all connections."""
    made, connections = Connection.connection_made, list[Connection]()

    def connection_made(self: Connection, transport: Any) -> None:
        made(self, transport)
        connections.append(self)

    monkeypatch.setattr(Connection, "connection_made", connection_made)
    return connections


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> bytearray:
    """All that a server has received and looked at."""
    receive, received = Connection.data_received, bytearray()

    def data_received(self: Connection, data: bytes) -> None:
        receive(self, data)
        received.extend(data)

    monkeypatch.setattr(Connection, "data_received", data_received)
    return received


MakeClient = Callable[..., httpx.AsyncClient]


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest_asyncio.fixture
async def make_client(engine: FakeEngine) -> AsyncIterator[MakeClient]:
    """Clients of an application around ``engine``; keywords are ServeConfig's, or ``model``."""
    clients: list[httpx.AsyncClient] = []

    def make(model: ServedModel | None = None, **config: Any) -> httpx.AsyncClient:
        app = App(engine, model or served_model(), ServeConfig(**config))  # type: ignore[arg-type]
        transport = httpx.ASGITransport(app, raise_app_exceptions=True)
        client = httpx.AsyncClient(transport=transport, base_url="http://localhost")
        clients.append(client)
        return client

    yield make
    for client in clients:
        await client.aclose()


@pytest.fixture
def client(make_client: MakeClient) -> httpx.AsyncClient:
    return make_client()
