"""Shared by all rooms: the real models, from the cache that `make test` fills; and how property
tests draw: the same examples each time, so that a red run is the change's fault; others in `make
long`, which says how to repeat one that failed. An engine that a test leaves running is ended
before the next; a test that passes must not leave one.
"""

import asyncio
import gc
import os
import threading
from collections.abc import Generator, Iterator
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from hypothesis import Phase, settings

import blas  # noqa: F401
from octavo.engine.async_engine import AsyncEngine
from octavo.loader import apart, pull
from patience import PATIENCE

os.environ.pop("COLUMNS", None)  # pytest-xdist sets it; no output here depends on a terminal

settings.register_profile("search", deadline=None)
settings.register_profile("steady", deadline=None, derandomize=True)
# Of mutants.py: a failure is all that it wants to know, and not the shortest example.
settings.register_profile(
    "once", settings.get_profile("steady"), phases=(Phase.explicit, Phase.generate)
)
settings.load_profile("steady")

# A server in the test's own loop answers when it gets to it, in httpx's five seconds or later.
for _method in (httpx.AsyncClient.__init__, httpx.Client.__init__, httpx.get, httpx.post):
    assert "timeout" in _method.__kwdefaults__
    _method.__kwdefaults__["timeout"] = PATIENCE

assert 10.0 <= apart.START_SECONDS < PATIENCE
apart.START_SECONDS = PATIENCE  # a busy machine takes its time to start a process


def pytest_sessionstart(session: pytest.Session) -> None:
    """Before several processes run tests, measure this machine's limits, once for each build of
    the kernels. Beside other tests that would take minutes and find too little.
    """
    if getattr(session.config.option, "numprocesses", None) and not hasattr(
        session.config, "workerinput"
    ):
        with suppress(ImportError):
            from octavo.machine.limits import Limits

            Limits.stored()


def pytest_collection_finish() -> None:
    """Keep all that was imported from the collector: each engine that is loaded has it make a full
    pass.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    if not gc.get_freeze_count():  # an engine was closed
        gc.collect(1)
        gc.freeze()


_passed = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call":
        item.stash[_passed] = report.passed
    return report


@pytest.fixture(autouse=True)
def _no_engine_runs_on(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Or it would take time from the tests behind, and hold back their garbage collector."""
    begun: list[AsyncEngine] = []
    start = AsyncEngine.start

    async def noted(engine: AsyncEngine) -> None:
        begun.append(engine)
        await start(engine)

    monkeypatch.setattr(AsyncEngine, "start", noted)
    yield
    left = [engine for engine in begun if engine._holds_back]  # nobody has stopped them
    for engine in left:
        engine.hang_timeout = min(5.0, engine.hang_timeout)  # it may hang
        _stop(engine)
    if left and request.node.stash.get(_passed, False):
        pytest.fail("left an engine running")


def _stop(engine: AsyncEngine) -> None:
    """In a thread of its own: there may be a loop in this one."""
    stopped: Future[None] = Future()

    def stop() -> None:
        try:
            asyncio.run(engine.stop())
        except BaseException as error:
            stopped.set_exception(error)
        else:
            stopped.set_result(None)

    threading.Thread(target=stop, daemon=True).start()
    stopped.result(PATIENCE)


def _model(name: str) -> Path:
    if path := pull.cached(name):
        return path
    if os.environ.get("OCTAVO_TEST_MODELS") == "required":
        pytest.fail(f"{name} is not in the cache: octavo pull {name}")
    pytest.skip(f"{name} is not in the cache: octavo pull {name}")


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct, Q4_1, as a GGUF file."""
    return _model("smollm2")


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    """Gemma 3 270M, Q4_K_M, as a GGUF file."""
    return _model("gemma3-270m")
