"""An answer as it streams in: server-sent events to times, token counts and an outcome.

Event streams follow the HTML standard, §9.2: lines end in LF, CR LF or CR; an empty line ends an
event; a line that begins with a colon is a comment. Each event's JSON is read once, into the few
fields wanted here, which costs about a microsecond.
"""

from __future__ import annotations

import asyncio
import time
from array import array

import msgspec


class EventSplitter:
    """Bytes, however they were cut on the way, to the data of whole events."""

    def __init__(self) -> None:
        self._rest = b""  # of a line
        self._data: list[bytes] = []  # of an event

    def feed(self, chunk: bytes) -> list[bytes]:
        # Nearly always: whole events of one data line each.
        if (
            not self._rest
            and not self._data
            and chunk.startswith(b"data: ")
            and chunk.endswith(b"\n\n")
            and b"\r" not in chunk
        ):
            events = chunk[6:-2].split(b"\n\ndata: ")
            if chunk.count(b"\n") == 2 * len(events):  # none within an event
                return events
        return self._lines(chunk)

    def _lines(self, chunk: bytes) -> list[bytes]:
        text = self._rest + chunk
        if b"\r" in text:
            tail = b""
            if text.endswith(b"\r"):  # its LF may be in the next chunk
                text, tail = text[:-1], b"\r"
            text = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n") + tail
        *lines, self._rest = text.split(b"\n")
        events = []
        for line in lines:
            if not line:
                if self._data:
                    events.append(b"\n".join(self._data))
                    self._data = []
                continue
            name, _, value = line.partition(b":")
            if name == b"data":
                self._data.append(value.removeprefix(b" "))
        return events


class _Delta(msgspec.Struct, gc=False):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    @property
    def said(self) -> str | None:
        return self.content or self.reasoning_content or self.reasoning


class _Choice(msgspec.Struct, gc=False):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Details(msgspec.Struct, gc=False):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    completion_tokens: int | None = None


class _Event(msgspec.Struct, gc=False):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw(b"")


_decode = msgspec.json.Decoder(_Event).decode
REJECTED = (429, 503)
_MOST_BODY = 1 << 16  # bytes of an answer that is an error


class StreamedAnswer:
    """One request from its sending to its end; times are ``time.perf_counter`` seconds.

    ``ttft``, ``latency`` and ``itl`` are measured as vLLM does: ``latency`` is to the last event
    with a token, ``itl`` the gaps between such events. ``reason`` is empty for a success.
    """

    __slots__ = (
        "_body", "_done", "_events", "_finished", "_last", "_text", "cached_tokens", "detail",
        "ended", "events", "itl", "output_tokens", "prompt_tokens", "queue_time",
        "reason", "rejected", "start", "status", "told", "ttft",
    )  # fmt: skip

    def __init__(self, *, keep_text: bool = False) -> None:
        self.start = self.queue_time = self.ttft = 0.0
        self.itl: array[float] = array("d")
        self.events = 0  # with a token
        self.prompt_tokens: int | None = None  # as the server counts
        self.output_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.status = 0
        self.reason = ""
        self.detail = ""
        self.rejected = False  # because there was too much to do: 429 or 503
        self.told = 0.0  # seconds from the sending, when it was
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._events = EventSplitter()
        self._last = 0.0
        self._done = self._finished = False
        self._body = b""
        self._text: list[str] | None = [] if keep_text else None

    @property
    def success(self) -> bool:
        return not self.reason

    @property
    def text(self) -> str:
        return "".join(self._text or ())

    def data(self, chunk: bytes, now: float) -> bool:
        """A piece of the body. False: the rest need not be read."""
        if self.status != 200:
            self._body += chunk[: _MOST_BODY - len(self._body)]
            return True
        # One frame for nearly every token: this runs thousands of times a second, on cold caches.
        for data in self._events.feed(chunk):
            try:
                event = _decode(data)
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                if data == b"[DONE]":
                    self._done = True
                    continue
                self.fail("malformed event", f"{error}: {data[:100].decode(errors='replace')}")
                return False
            if event.usage is not None:
                self._counted(event.usage)
            if bytes(event.error) not in (b"", b"null"):
                if not self.events:  # it was refused all the same
                    self.rejected = error_code(bytes(event.error)) in REJECTED
                self.fail("error event in the stream", error_message(bytes(event.error)))
                return False
            if not event.choices:
                continue
            choice = event.choices[0]
            text = choice.text
            if choice.delta is not None:
                text = choice.delta.said
                # Chat answers open with a role, which some servers send before there is a token.
                if not text and choice.delta.role is not None and choice.finish_reason is None:
                    continue
            if choice.finish_reason is not None:
                self._finished = True
            if self.events:
                self.itl.append(now - self._last)
            else:
                self.ttft = now - self.start
            self.events += 1
            self._last = now
            if self._text is not None and text:
                self._text.append(text)
        return True

    def _counted(self, usage: _Usage) -> None:
        if usage.prompt_tokens_details is not None:
            self.cached_tokens = usage.prompt_tokens_details.cached_tokens
        if usage.prompt_tokens is not None:
            self.prompt_tokens = usage.prompt_tokens
        if usage.completion_tokens is not None:
            self.output_tokens = usage.completion_tokens

    @property
    def latency(self) -> float:
        return self._last - self.start if self.events else 0.0

    def end(self) -> None:
        """The body is complete."""
        if self.status != 200:
            self.rejected = self.status in REJECTED
            self.fail(f"HTTP {self.status}", error_message(self._body))
        elif not self.events:
            self.fail(
                "no token in the answer", f"[DONE] {'came' if self._done else 'did not come'}"
            )
        elif not (self._done or self._finished):
            self.fail("stream ended early", f"after {self.events} events, without [DONE]")
        elif not self.ended.done():
            self.ended.set_result(None)

    def fail(self, reason: str, detail: str) -> None:
        if not self.ended.done():
            self.reason, self.detail = reason, detail[:300]
            self.told = time.perf_counter() - self.start
            self.ended.set_result(None)


def error_code(body: bytes) -> object:
    """OpenAI's ``error.code``, in or without its envelope; None where there is none."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return value.get("code") if isinstance(value, dict) else None


def error_message(body: bytes) -> str:
    """What an error says: OpenAI's ``error.message`` where it has one."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return " ".join(body.decode(errors="replace").split())[:300]
    for _ in range(2):
        if isinstance(value, dict):
            value = value.get("error", value.get("message", value.get("detail", value)))
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()[:300]
