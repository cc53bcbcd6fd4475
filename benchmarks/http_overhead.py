"""What HTTP adds to a token: the server's processor time with it, less the engine's without.

    python benchmarks/http_overhead.py [--json]

16 streams decode together on a cost executor whose steps take 5 ms, so that no token waits for the
next one and each is sent in a chunk of its own. Clients run in another process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import time
from multiprocessing.connection import Connection
from typing import Any

import uvloop

from _script import as_script
from octavo.engine.async_engine import AsyncEngine
from octavo.engine.clock import Clock
from octavo.engine.engine import Engine
from octavo.executor.base import Batch, StepResult
from octavo.executor.simulated.simulated import SimulatedExecutor
from octavo.kv_cache.layout import KvLayout
from octavo.models.families import program
from octavo.sampling.params import SamplingParams
from octavo.sampling.scripted import ScriptedSampler
from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.request import Request
from octavo.scheduler.scheduler import Scheduler
from octavo.server.app import App
from octavo.server.config import ServeConfig
from octavo.server.model import ServedModel
from octavo.server.server import bind, http_server
from step_overhead import Words, model

STREAMS, TOKENS, STEP_SECONDS = 16, 300, 0.005
PROMPT = list(range(64))


class Paced(SimulatedExecutor):
    def execute(self, batch: Batch) -> StepResult:
        time.sleep(STEP_SECONDS)
        return super().execute(batch)


class Template:
    def render(self, messages: list[dict[str, object]], **kwargs: object) -> str:
        return "a prompt"


def async_engine() -> AsyncEngine:
    config = model(windows=False)
    layout, words = KvLayout.of(config), Words()
    num_blocks = STREAMS * 64
    return AsyncEngine(
        Engine(
            Paced(program(config), layout, num_blocks=num_blocks),
            Scheduler(SchedulerConfig(max_model_len=1024, max_num_seqs=64), layout, num_blocks),
            ScriptedSampler(config.vocab_size),
            Clock(),
            vocab_size=config.vocab_size,
            tokenizer=words,
        )
    )


async def engine_alone(pipe: Connection) -> None:
    engine = async_engine()
    await engine.start()

    async def one(name: str) -> None:
        params = SamplingParams(max_tokens=TOKENS)
        async for _ in engine.submit(
            Request(request_id=name, prompt_token_ids=PROMPT, params=params)
        ):
            pass

    await asyncio.gather(*(one(f"warm {index}") for index in range(STREAMS)))
    before = time.process_time()
    await asyncio.gather(*(one(str(index)) for index in range(STREAMS)))
    pipe.send(time.process_time() - before)
    await engine.stop()


async def server(pipe: Connection) -> None:
    """Sends its port; for each message received, the processor time it has used."""
    engine = async_engine()
    await engine.start()
    config = ServeConfig(port=0, access_log=False)
    served = ServedModel(("words",), Words(), Template(), 1024)
    listener = bind(config)
    listener.listen()
    http = http_server(App(engine, served, config))
    running = asyncio.create_task(http.serve(sockets=[listener]))
    pipe.send(listener.getsockname()[1])
    while await asyncio.to_thread(pipe.recv):
        pipe.send(time.process_time())
    http.should_exit = True
    await running
    await engine.stop()


async def clients(port: int, path: str, body: dict[str, Any]) -> None:
    content = json.dumps(body | {"stream": True, "max_tokens": TOKENS}).encode()
    request = (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    ).encode() + content

    async def one() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        answer = await reader.read()
        writer.close()
        if not answer.startswith(b"HTTP/1.1 200") or b'"finish_reason":"length"' not in answer:
            raise RuntimeError(answer[:500].decode(errors="replace"))

    await asyncio.gather(*(one() for _ in range(STREAMS)))


def in_process(main: Any) -> tuple[Any, Connection]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    child = context.Process(target=run, args=(main, there))
    child.start()
    return child, here


def run(main: Any, pipe: Connection) -> None:
    uvloop.run(main(pipe))


def measure() -> dict[str, float]:
    """Processor microseconds a token: the engine's alone, and what each route adds."""
    child, pipe = in_process(engine_alone)
    alone = pipe.recv() / (STREAMS * TOKENS) * 1e6
    child.join()
    found = {"engine": alone}
    child, pipe = in_process(server)
    port = pipe.recv()
    for path, body in (
        ("/v1/completions", {"prompt": PROMPT}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ):
        asyncio.run(clients(port, path, body))
        times = []
        for step in range(2):
            pipe.send(True)
            times.append(pipe.recv())
            if step == 0:
                asyncio.run(clients(port, path, body))
        found[path] = (times[1] - times[0]) / (STREAMS * TOKENS) * 1e6 - alone
    pipe.send(False)
    child.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    found = measure()
    if arguments.json:
        print(json.dumps({"unit": "us of processor time a token", **found}))
        return
    print("| | µs of processor time a token |\n|---|---|")
    print(f"| the engine alone, {STREAMS} streams | {found.pop('engine'):.0f} |")
    for path, added in found.items():
        print(f"| {path} adds | {added:.0f} |")


if __name__ == "__main__":
    as_script(main)
