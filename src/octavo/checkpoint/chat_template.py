"""The chat template a model brings: a Jinja program from a stranger.

Jinja's sandbox keeps a template from reaching outside, but not from taking all time and memory:
``'a' * 10**10`` is one instruction. So templates run in a process of their own, whose memory is
limited by the kernel and which is killed when its time is over. A rendering costs a round trip
over a socket; the process starts with the first one.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from struct import Struct

from octavo.checkpoint.base import ChatTemplateError

WORKER = Path(__file__).with_name("template_worker.py")
LENGTH = Struct("<I")
START_SECONDS = 20.0  # for the process to start: importing on a machine busy loading weights


class JinjaChatTemplate:
    """Implements `octavo.checkpoint.base.ChatTemplate`. Thread-safe; renders one at a time.

    ``tokens`` are the checkpoint's special tokens by name (``bos_token``, ``eos_token``, …).
    ``seconds`` (of wall time), ``memory`` (bytes of address space) and ``characters`` (of output)
    limit one rendering. Templates see ``messages``, ``tokens``, ``add_generation_prompt`` and
    whatever else is passed, as JSON values.
    """

    def __init__(
        self,
        source: str,
        tokens: Mapping[str, str] | None = None,
        *,
        seconds: float = 2.0,
        memory: int = 512 << 20,
        characters: int = 8 << 20,
    ) -> None:
        self.source = source
        self._tokens = {"bos_token": "", "eos_token": ""} | dict(tokens or {})
        self._limits = {"seconds": seconds, "memory": memory, "characters": characters}
        self._seconds = seconds
        self._worker: _Worker | None = None
        self._lock = threading.Lock()

    def render(self, messages: list[dict[str, object]], **kwargs: object) -> str:
        """``add_generation_prompt`` is True unless given.

        Content that is a list of text parts reaches the template as one string, and a null content
        without tool calls as an empty one, because templates expect strings.
        """
        variables = {
            "add_generation_prompt": True,
            **self._tokens,
            **kwargs,
            "messages": [_with_text(message) for message in messages],
        }
        try:
            request = json.dumps(variables).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise ChatTemplateError(f"the messages are not JSON: {error}") from None
        with self._lock:
            answer = self._exchange(request)
        if "text" not in answer:
            raise ChatTemplateError(answer["error"])
        return answer["text"]

    def _exchange(self, request: bytes) -> dict[str, str]:
        if self._worker is not None and self._worker.ended:  # while idle: no rendering's fault
            self._drop_worker()
        if self._worker is None:
            self._worker = _Worker(self.source, self._limits)
            self._stop_worker = weakref.finalize(self, self._worker.stop)
        worker = self._worker
        try:
            worker.wait_until_ready()
            answer: dict[str, str] = json.loads(worker.call(request, self._seconds))
        except TimeoutError:
            error = f"the template ran longer than {self._seconds:g} s"
        except (OSError, EOFError):
            error = "the template's process died"
        else:
            return answer
        self._drop_worker()
        raise ChatTemplateError(error)

    def _drop_worker(self) -> None:
        self._stop_worker()
        self._worker = None


class _Worker:
    """The process and the socket to it."""

    def __init__(self, source: str, limits: dict[str, float]) -> None:
        self._ready = False
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(WORKER)],  # -P: no module of the current folder
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._hello = json.dumps({"source": source, "limits": limits}).encode()

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def wait_until_ready(self) -> None:
        if not self._ready:
            self.call(self._hello, START_SECONDS)
            self._ready = True

    def call(self, request: bytes, seconds: float) -> bytes:
        """Raises `TimeoutError`, and `OSError` or `EOFError` when the process is gone."""
        deadline = time.monotonic() + seconds
        self._socket.settimeout(seconds)
        self._socket.sendall(LENGTH.pack(len(request)) + request)
        (length,) = LENGTH.unpack(self._read(LENGTH.size, deadline))
        return self._read(length, deadline)

    def _read(self, size: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < size:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self._socket.settimeout(left)
            piece = self._socket.recv(size - len(data))
            if not piece:
                raise EOFError
            data += piece
        return bytes(data)

    def stop(self) -> None:
        self._socket.close()
        self._process.kill()
        self._process.wait()


def _with_text(message: dict[str, object]) -> dict[str, object]:
    content = message.get("content")
    if content is None and "content" in message and not message.get("tool_calls"):
        return {**message, "content": ""}
    if not isinstance(content, list):
        return message
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise ChatTemplateError(f"message content of type {kind!r} is not supported: only text")
        if not isinstance(text := part.get("text"), str):
            raise ChatTemplateError("a text part of a message's content has no text")
        texts.append(text)
    return {**message, "content": "\n".join(texts)}  # as vLLM and llama.cpp join them
