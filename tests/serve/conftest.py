from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
import pytest_asyncio
import uvloop
from serve_fakes import FakeEngine, served_model

from octavo.serve.app import create_app
from octavo.serve.config import ServeConfig
from octavo.serve.model import ServedModel
from patience import PATIENCE

# A server in the test's own loop answers when it gets to it, in httpx's five seconds or not.
for _method in (httpx.AsyncClient.__init__, httpx.Client.__init__, httpx.get, httpx.post):
    (_method.__kwdefaults__ or {})["timeout"] = PATIENCE


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """What the server runs on."""
    return {"uvloop": uvloop.new_event_loop}


MakeClient = Callable[..., httpx.AsyncClient]


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest_asyncio.fixture
async def make_client(engine: FakeEngine) -> AsyncIterator[MakeClient]:
    """Clients of an application around ``engine``; keywords are ServeConfig's, or ``model``."""
    clients: list[httpx.AsyncClient] = []

    def make(model: ServedModel | None = None, **config: Any) -> httpx.AsyncClient:
        app = create_app(engine, model or served_model(), ServeConfig(**config))
        transport = httpx.ASGITransport(app, raise_app_exceptions=True)
        client = httpx.AsyncClient(transport=transport, base_url="http://server")
        clients.append(client)
        return client

    yield make
    for client in clients:
        await client.aclose()


@pytest.fixture
def client(make_client: MakeClient) -> httpx.AsyncClient:
    return make_client()
