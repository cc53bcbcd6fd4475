"""Scripted servers, good and bad, to put a load on."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter, "Asked"], Awaitable[None]]
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
MODELS = b'{"data": [{"id": "m"}]}'


class Asked:
    """A request as the server read it."""

    def __init__(self, head: str, body: bytes) -> None:
        self.method, self.path, _ = head.split("\r\n")[0].split(" ")
        self.headers = dict(line.split(": ", 1) for line in head.split("\r\n")[1:])
        self.json: dict[str, Any] = json.loads(body) if body else {}


async def read(reader: asyncio.StreamReader) -> Asked | None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n"))[:-4].decode()
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    length = next(
        int(line[16:]) for line in head.split("\r\n") if line.lower().startswith("content-length: ")
    )
    return Asked(head, await reader.readexactly(length))


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def token(text: str = "a", finish: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": finish}]})


def usage(prompt: int, completion: int) -> bytes:
    return event(
        {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion}}
    )


def whole(status: str, body: bytes, more: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n{more}\r\n".encode() + body


class Scripted:
    """A server on a free port that answers /v1/models and leaves the rest to ``script``."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.asked: list[Asked] = []
        self.connections = 0
        self.tasks: set[asyncio.Task[Any]] = set()
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        try:
            while (asked := await read(reader)) and not writer.is_closing():
                self.asked.append(asked)
                if asked.path == "/v1/models":
                    writer.write(whole("200 OK", MODELS))
                elif asked.path in ("/tokenize", "/metrics"):
                    writer.write(whole("404 Not Found", b'{"error": {"message": "no route"}}'))
                else:
                    await self.script(reader, writer, asked)
                await writer.drain()
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self.tasks.discard(task)
            writer.close()

    @property
    def generations(self) -> list[Asked]:
        return [asked for asked in self.asked if asked.path.endswith("completions")]


@asynccontextmanager
async def serving_script(script: Script) -> AsyncIterator[Scripted]:
    server = Scripted(script)
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    try:
        yield server
    finally:
        listener.close()
        for task in list(server.tasks):
            task.cancel()


async def good(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, asked: Asked, pause: float = 0.0
) -> None:
    """As many tokens as were asked for, then usage."""
    wanted = asked.json.get("max_tokens") or asked.json["max_completion_tokens"]
    prompt = asked.json.get("prompt", "")
    if not asked.json.get("stream"):
        writer.write(whole("200 OK", b"{}"))
        return
    writer.write(HEAD)
    for index in range(wanted):
        writer.write(chunk(token("a", "length" if index == wanted - 1 else None)))
        if pause:
            await writer.drain()
            await asyncio.sleep(pause)
    length = len(prompt) if isinstance(prompt, list) else len(prompt.split())
    writer.write(chunk(usage(length, wanted)) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
