"""`octavo top` against a server that runs, and against what is none."""

import asyncio
import dataclasses
import json
import re
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import uvicorn
from serving import listening, real_engine, started

from octavo.tools.top import live
from octavo.tools.top.figures import ServerStats
from octavo.tools.top.source import Source, SourceError
from patience import PATIENCE, until
from tools.top.samples import sample

PROGRAM = "from octavo.cli import main; main()"


async def octavo_top(*arguments: str, **environment: str) -> tuple[int, str, str]:
    """In a process of its own: (exit code, what it printed, what it said went wrong)."""

    def run() -> subprocess.CompletedProcess[str]:
        import os

        return subprocess.run(
            [sys.executable, "-c", PROGRAM, "top", *arguments],
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
        )

    done = await asyncio.to_thread(run)
    return done.returncode, done.stdout, done.stderr


@asynccontextmanager
async def busy_server(**config: Any) -> AsyncIterator[str]:
    """Three requests run, one waits."""
    tokens = 100_000  # so many, at that pace, that it is busy for as long as one looks
    engine, _ = real_engine(pause=0.02, max_num_seqs=3, num_blocks=20_000, max_model_len=1 << 17)
    headers = {"Authorization": "Bearer k"}
    async with (
        started(engine),
        listening(engine, **config) as url,
        httpx.AsyncClient(base_url=url, headers=headers) as client,
    ):
        body = {"prompt": "a secret", "max_tokens": tokens, "ignore_eos": True, "stream": True}
        asked = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(4)]

        async def all_are_there() -> bool:
            requests = (await client.get("/requests")).json()["engine"]["requests"]
            return len(requests) == len(asked)

        await until(all_are_there, "the requests")
        yield url
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)


async def test_once_as_json() -> None:
    async with busy_server(api_key=("k",)) as url:
        for _ in range(5):  # until the server got its turn between the two looks
            code, out, err = await octavo_top(
                url, "--once", "--json", "--interval", "0.3", "--api-key", "k"
            )
            assert (code, err) == (0, "")
            [line] = out.splitlines()
            facts = json.loads(line)
            if facts["batch"]["output_tokens_per_second"]:
                break
    assert (facts["url"], facts["model"]) == (url, "tiny")
    assert (facts["running"], facts["waiting"], facts["waiting_tokens"]) == (3, 1, 8)
    assert [row["state"] for row in facts["requests"]] == ["decode"] * 3 + ["waiting"]
    assert facts["batch"]["tokens"] == pytest.approx(3)
    assert 0.02 < facts["batch"]["seconds"] < 5
    assert 0 < facts["batch"]["output_tokens_per_second"] < 3 / 0.02
    assert 0 < facts["batch"]["busy"] <= 1
    pool = facts["pool"]
    assert pool["used"] + pool["cached"] + pool["free"] == pool["blocks"] > pool["used"] > 0
    assert facts["window"] is None
    assert set(facts["rejected"]) >= {"capacity", "invalid"}
    assert "secret" not in out


async def test_a_pipe_gets_one_table() -> None:
    async with busy_server(api_key=("k",)) as url:
        code, out, err = await octavo_top(url + "/v1", "--interval", "0.2", OCTAVO_API_KEY="k")
    assert (code, err) == (0, "")
    assert "\x1b" not in out
    assert out.startswith(f"octavo top  tiny at {url}")
    assert "3 running of 3   1 waiting (8 tokens)" in out
    table = out[out.index("REQUEST") :]
    assert re.findall("decode|prefill|waiting", table) == ["decode"] * 3 + ["waiting"]


async def test_lines_of_json_go_on() -> None:
    shown: list[ServerStats] = []
    async with busy_server() as url:
        source = Source(url, None, 2, insecure=False)
        telling = asyncio.create_task(live.tell(source, 0.05, shown.append, pytest.fail))
        await until(lambda: len(shown) >= 3)
        telling.cancel()
        await source.close()
    assert [len(figures.engine.requests) for figures in shown[:3]] == [2, 2, 2]
    assert shown[0].engine.unlisted == 2
    assert shown[0].window is None
    assert shown[2].window is not None


async def test_lines_of_json_say_that_the_server_is_gone_and_end_when_it_will_not_answer() -> None:
    engine, _ = real_engine()
    told: list[ServerStats | str] = []

    async with started(engine):
        async with listening(engine, api_key=("k",)) as url:
            source = Source(url, "k", 0, insecure=False)
            telling = asyncio.create_task(live.tell(source, 0.02, told.append, told.append))
            await until(lambda: len(told) >= 2)
        port = int(url.rpartition(":")[2])
        told.clear()
        await until(lambda: len(told) >= 2)
        assert isinstance(told[1], str)
        async with listening(engine, port=port, api_key=("k",)):
            await until(lambda: isinstance(told[-1], ServerStats), "the server again")
        async with listening(engine, port=port, api_key=("another",)):
            with pytest.raises(SourceError, match="asks for a key"):
                await asyncio.wait_for(telling, PATIENCE)
        await source.close()


async def test_a_server_that_goes_away_and_comes_back() -> None:
    engine, _ = real_engine()
    async with started(engine):
        async with listening(engine) as url:
            source = Source(url, None, 10, insecure=False)
            assert (await source.read()).model == "tiny"
        with pytest.raises(SourceError, match=r"refused|closed") as away:
            await source.read()
        assert not away.value.final
        await source.close()


@pytest.mark.parametrize(("key", "code"), [(None, 1), ("wrong", 1), ("k", 0)])
async def test_the_key(key: str | None, code: int) -> None:
    async with busy_server(api_key=("k",)) as url:
        source = Source(url, key, 10, insecure=False)
        if code:
            with pytest.raises(SourceError, match="asks for a key") as refused:
                await source.read()
            assert refused.value.final
        else:
            assert len((await source.read()).engine.requests) == 4
        await source.close()


async def test_what_is_no_octavo_server() -> None:
    async def other(scope: Any, receive: Any, send: Any) -> None:
        status, body = found[scope["path"]]
        start = {"type": "http.response.start", "status": status, "headers": []}
        await send(start)
        await send({"type": "http.response.body", "body": body})

    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(other, lifespan="off", log_config=None))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    await until(lambda: server.started or task.done(), "the server")
    source = Source(f"http://127.0.0.1:{listener.getsockname()[1]}", None, 10, insecure=False)

    def pool(**changes: int) -> bytes:
        engine = dataclasses.asdict(sample(1.0).engine)
        engine["pool"] |= changes
        said = {"model": "m", "version": "1", "draining": False, "engine": engine}
        return json.dumps(said).encode()

    for requests, metrics, message in (
        ((404, b""), (200, b""), "no /requests there"),
        ((200, b"[]"), (200, b""), "does not answer as"),
        ((200, b'{"model": "m"}'), (200, b""), "does not answer as"),
        ((200, b"\xff\x00"), (200, b"octavo:"), "does not answer as"),
        ((200, b'{"x":' + b"[" * 100_000), (200, b""), "does not answer as"),
        ((200, pool()), (200, b"octavo:prompt_tokens_total 1e308\n"), "prompt_tokens_total is 1e"),
        ((200, pool()), (200, b"octavo:prompt_tokens_total -1\n"), "prompt_tokens_total is -1"),
        ((200, pool()), (200, b"octavo:prompt_tokens_total NaN\n"), "prompt_tokens_total is nan"),
        ((200, pool(blocks=0)), (200, b""), "there are 0 blocks"),
        ((200, pool(blocks=9, used=10)), (200, b""), "10 of 9 blocks are used"),
        ((200, pool(blocks=9, used=-5)), (200, b""), "-5 of 9 blocks are used"),
        ((200, pool(blocks=9, used=1, cached=10)), (200, b""), "10 of 9 blocks are cached"),
        ((200, pool(blocks=9, used=1, cached=1, free=-1)), (200, b""), "-1 of 9 blocks are free"),
        ((200, pool(block_size=0)), (200, b""), "blocks of 0 tokens"),
        ((200, pool(blocks=10**30)), (200, b""), "blocks is 1000"),
        ((200, pool(block_size=-(10**300))), (200, b""), "block_size is -1000"),
        ((500, b"no"), (200, b""), "/requests answers 500"),
    ):
        found = {"/requests": requests, "/metrics": metrics}
        with pytest.raises(SourceError, match=message):
            await source.read()
    await source.close()
    server.should_exit = server.force_exit = True
    await task


async def test_errors_are_a_line() -> None:
    code, out, err = await octavo_top("http://127.0.0.1:9")
    assert (code, out) == (1, "")
    assert err.startswith("octavo: http://127.0.0.1:9: connection refused")
    assert len(err.splitlines()) == 1
    code, _, err = await octavo_top("ftp://127.0.0.1")
    assert code == 2
    assert "is not a URL" in err
