"""Request bodies: read within a limit, decoded strictly.

JSON allows what no request means and what bites later: a key given twice (the last one would win
silently), NaN and Infinity as Python writes them, numbers that overflow to infinity, escapes that
are half a character. All are refused here, once, for every route.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from json.decoder import JSONArray  # type: ignore[attr-defined]
from json.scanner import py_make_scanner  # type: ignore[attr-defined]
from typing import Any, TypeVar

import msgspec
from starlette.types import Receive

from octavo.serve.errors import ApiError, ClientGone

T = TypeVar("T")

_DISCARD = 64 << 20  # bytes of a body too long that are read away, so that the answer gets through
_TIMEOUT = 120.0  # seconds for the whole body
_CONTAINERS = 1 << 16  # lists and objects in a body at most
_AT_ONCE = 1 << 16  # of these, or quotation marks, in what C may scan in one go; no more than there
_AT = re.compile(r"^(?P<what>.*?)(?: - at `(?P<path>(?:key in )?\$.*)`)?$", re.DOTALL)


async def read_body(headers: Mapping[bytes, bytes], receive: Receive, limit: int) -> bytes:
    """The whole body, at most ``limit`` bytes.

    Raises `ApiError` 408, 413 or 415, `ClientGone`.
    """
    media = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
    # Asking for it by name also keeps out what a browser may post to another origin unasked.
    if media != b"application/json":
        raise ApiError(415, "the Content-Type must be application/json")
    declared = headers.get(b"content-length", b"")
    size = int(declared) if declared.isdigit() else 0
    too_long = ApiError(
        413, f"the request body is longer than {limit} bytes", headers={"Connection": "close"}
    )
    if size > limit and (size > _DISCARD or b"expect" in headers):
        raise too_long
    parts = []
    read = 0
    more = True
    try:
        async with asyncio.timeout(_TIMEOUT):
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                part = message.get("body", b"")
                read += len(part)
                if read <= limit:
                    parts.append(part)
                elif read > _DISCARD:
                    raise too_long
                else:
                    parts.clear()
                more = message.get("more_body", False)
    except TimeoutError:
        raise ApiError(
            408, f"the body did not come within {_TIMEOUT:g} s", headers={"Connection": "close"}
        ) from None
    if read > limit:
        raise too_long
    return b"".join(parts)


class Watch:
    """Notices that the client leaves, in every state of its request."""

    def __init__(self, receive: Receive, on_gone: Callable[[], None]) -> None:
        self.gone = False
        self._receive = receive
        self._on_gone = on_gone
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.leave()

    def leave(self) -> None:
        self.gone = True
        self._on_gone()

    async def close(self) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task


def decode_object(body: bytes) -> dict[str, Any]:
    """The JSON object in ``body``. Raises `ApiError` 400.

    Other threads go on meanwhile: no single call into C keeps the interpreter's lock for longer
    than it takes to copy the body a few times.
    """
    try:
        text = body.decode("utf-8")
        decoder = _Decoder(text)
        value = decoder.decode(text)
        if decoder.suspicious:
            _refuse_suspects(value, "")
    except UnicodeDecodeError:
        raise ApiError(400, "the request body is not UTF-8") from None
    except RecursionError:
        raise ApiError(400, "the request body is nested too deeply") from None
    except ValueError as error:
        raise ApiError(400, f"the request body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ApiError(400, "the request body must be a JSON object")
    return value


def convert(value: object, to: type[T]) -> T:
    """``value`` as a request struct. Raises `ApiError` 400 naming the field at fault."""
    try:
        return msgspec.convert(value, to)
    except msgspec.ValidationError as error:
        match = _AT.match(str(error))
        assert match
        what, path = match["what"], match["path"] or ""
        param = path.removeprefix("key in ").removeprefix("$").removeprefix(".")
        param = param.replace("[...]", "")  # somewhere in a map: its name must do
        if missing := re.search("missing required field `(.*)`", what):
            param = f"{param}.{missing[1]}" if param else missing[1]
            raise ApiError(400, f"{param} is missing", param) from None
        what = what.replace("`", "").replace(" | null", "").replace("Expected", "expected", 1)
        raise ApiError(400, f"{param}: {what}" if param else what, param or None) from None
    except RecursionError:
        raise ApiError(400, "the request body is nested too deeply") from None


class _Decoder(json.JSONDecoder):
    """Of one text. The scanner in C calls back into Python for each number and each object, where
    other threads get their turn, but neither for lists nor for strings: a text that may have very
    many of these is scanned in Python, as slowly as it likes.
    """

    def __init__(self, text: str) -> None:
        self.suspicious = "\\ud" in text or "\\uD" in text  # may have half a surrogate pair
        self._containers = 0
        super().__init__(
            object_pairs_hook=self._object,
            parse_int=_integer,
            parse_float=self._float,
            parse_constant=self._float,
        )
        if max(text.count("[") + text.count("{"), text.count('"')) > _AT_ONCE:
            self.parse_array = self._array
            self.scan_once = py_make_scanner(self)

    def _float(self, digits: str) -> float:
        value = float(digits)
        if not math.isfinite(value):
            self.suspicious = True
        return value

    def _array(self, *at: Any) -> Any:
        self._count()
        return JSONArray(*at)

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        self._count()
        value = dict(pairs)
        if len(value) != len(pairs):
            seen: set[str] = set()
            for key, _ in pairs:
                if key in seen:
                    raise ApiError(400, f"the key {key!r} is given twice", key)
                seen.add(key)
        return value

    def _count(self) -> None:
        """Of more lists and objects than any request has, the garbage collector would hold up
        everyone.
        """
        self._containers += 1
        if self._containers > _CONTAINERS:
            raise ApiError(400, f"the request body has more than {_CONTAINERS} lists and objects")


def _integer(digits: str) -> int:
    return int(digits)


def _refuse_suspects(value: object, path: str) -> None:
    if isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise ApiError(
                400, f"{path or 'a key'} has half a surrogate pair", path or None
            ) from None
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ApiError(
                400, f"{path or 'the body'} is {value}: not a finite number", path or None
            )
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _refuse_suspects(item, f"{path}[{index}]")
    elif isinstance(value, dict):
        for key, item in value.items():
            _refuse_suspects(key, "")
            _refuse_suspects(item, f"{path}.{key}" if path else key)
