"""Request bodies: read within a limit, decoded strictly.

JSON allows what no request means and what does harm later: a key given twice (the last one would
win silently), NaN and Infinity as Python writes them, numbers that overflow to infinity, escapes
that are half a character. All are refused here, once, for every route.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from json.decoder import JSONArray  # type: ignore[attr-defined]
from json.scanner import py_make_scanner  # type: ignore[attr-defined]
from typing import Any, TypeVar

import msgspec
from starlette.types import Receive

from octavo.server.errors import ApiError, ClientGone, draining, too_many
from octavo.server.workers import SMALL

T = TypeVar("T")

_TIMEOUT = 120.0  # seconds for the whole body
_IN_FLIGHT = 64 << 20  # bytes of all large bodies together; or two of the longest
_IN_FLIGHT_SMALL = 64 << 20  # bytes of all bodies' beginnings
_LONGEST_NUMBER = 1000  # characters
_CONTAINERS = 1 << 16  # lists and objects in a body at most
_AT_ONCE = 1 << 16  # of these, or quotation marks, in what C may scan in one go; no more than there
_AT = re.compile(r"^(?P<what>.*?)(?: - at `(?P<path>(?:key in )?\$.*)`)?$", re.DOTALL)


class Bodies:
    """Reads bodies, each within a limit, and all that are being read or worked on within a limit
    of memory. Used on the event loop's thread only.
    """

    def __init__(self, limit: int) -> None:
        """``limit``: bytes that one body may have."""
        self._limit = limit
        self._draining = False
        self._receiving: set[asyncio.Timeout] = set()
        self.free = max(_IN_FLIGHT, 2 * limit)  # bytes
        self.free_small = _IN_FLIGHT_SMALL

    def drain(self) -> None:
        """Refuse what is still being received, and what will come."""
        self._draining = True
        for receiving in self._receiving:
            with suppress(RuntimeError):  # it has come, or its time is over just now
                receiving.reschedule(0.0)

    @asynccontextmanager
    async def read(self, headers: Mapping[bytes, bytes], receive: Receive) -> AsyncIterator[bytes]:
        """Read a body, which counts until the context is left.

        Raises `ApiError` 408, 413, 415, 429 or 503, and `ClientGone`.
        """
        if self._draining:
            raise draining()
        size = _declared(headers)
        if size > self._limit:
            raise _too_long(self._limit)  # what comes of it is read away by the connection
        # Only what has come counts: nobody keeps others out by announcing a body. The first bytes
        # of each body have room of their own, so that large bodies keep no small one out.
        if size - SMALL > self.free:
            raise _no_room()
        held, more = 0, True
        parts: list[bytes] = []
        receiving = asyncio.timeout(_TIMEOUT)
        self._receiving.add(receiving)
        try:
            async with receiving:
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    parts.append(message.get("body", b""))
                    more = message.get("more_body", False)
                    now = held + len(parts[-1])
                    if now > self._limit:
                        raise _too_long(self._limit)
                    self._hold(held, now)
                    held = now
            body = b"".join(parts)
            parts.clear()
            del message  # it has the last part
            yield body
        except TimeoutError:
            if not receiving.expired():  # of the work on the body
                raise
            if self._draining:
                raise draining() from None
            raise ApiError(
                408,
                f"the body did not come within {_TIMEOUT:g} s",
                headers={"Connection": "close"},
            ) from None
        finally:
            self._receiving.discard(receiving)
            self._hold(held, 0)

    def _hold(self, before: int, now: int) -> None:
        """Count ``now`` bytes of a body that had ``before``. Raises a 429 if there is no room."""
        small = min(SMALL, now) - min(SMALL, before)
        large = now - before - small
        if large > self.free or small > self.free_small:
            raise _no_room()
        self.free -= large
        self.free_small -= small


def _no_room() -> ApiError:
    return too_many("too many bytes of request bodies are being read", None, "capacity")


def _declared(headers: Mapping[bytes, bytes]) -> int:
    """Return the length that the head declares, or 0. Raises `ApiError` 415 unless it is JSON."""
    said = headers.get(b"content-type", b"")
    media = said.split(b";")[0].strip().lower()
    # Requiring the name also keeps out what a browser may post to another origin unasked. There is
    # only one type: what follows a comma is another.
    if media != b"application/json" or b"," in said:
        raise ApiError(415, "the Content-Type must be application/json")
    encoding = headers.get(b"content-encoding", b"").decode("latin-1")
    if {each.strip().lower() for each in encoding.split(",")} - {"", "identity"}:
        raise ApiError(
            415,
            f"Content-Encoding: {encoding} is not supported, a body is sent as it is",
            headers={"Accept-Encoding": "identity"},
        )
    size = headers.get(b"content-length", b"")
    return int(size) if size.isdigit() else 0


def _too_long(limit: int) -> ApiError:
    return ApiError(
        413, f"the request body is longer than {limit} bytes", headers={"Connection": "close"}
    )


def decode_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object in ``body``. Raises `ApiError` 400.

    Other threads run meanwhile: no single call into C keeps the interpreter's lock for longer than
    it takes to copy the body a few times.
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


def convert(value: object, to: type[T], at: str = "") -> T:
    """Return ``value``, the field ``at`` (or all) of a request, as the type ``to``.

    Raises `ApiError` 400 naming the field at fault.
    """
    try:
        return msgspec.convert(value, to)
    except msgspec.ValidationError as error:
        match = _AT.match(str(error))
        assert match
        what, path = match["what"], match["path"] or ""
        param = at + path.removeprefix("key in ").removeprefix("$")
        param = param.removeprefix(".")
        param = param.replace("[...]", "")  # somewhere in a map: its name must do
        if missing := re.search("missing required field `(.*)`", what):
            param = f"{param}.{missing[1]}" if param else missing[1]
            raise ApiError(400, f"{param} is missing", param) from None
        what = what.replace("`", "").replace(" | null", "").replace("Expected", "expected", 1)
        raise ApiError(400, f"{param}: {what}" if param else what, param or None) from None
    except RecursionError:
        raise ApiError(400, "the request body is nested too deeply") from None


class _Decoder(json.JSONDecoder):
    """Decodes one text.

    The scanner in C calls back into Python for each number and each object, where other threads get
    their turn, but neither for lists nor for strings. A text that may have very many of these is
    scanned in Python, which is slow but holds nobody up.
    """

    def __init__(self, text: str) -> None:
        # It may have half a surrogate pair. Looking for one character is fast, for three it is not.
        self.suspicious = "\\" in text and ("\\ud" in text or "\\uD" in text)
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
        _check_number(digits)
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
        """Refuse more lists and objects than any request has: the garbage collector would hold up
        everyone.
        """
        self._containers += 1
        if self._containers > _CONTAINERS:
            raise ApiError(400, f"the request body has more than {_CONTAINERS} lists and objects")


def _integer(digits: str) -> int:
    _check_number(digits)
    return int(digits)


def _check_number(digits: str) -> None:
    if len(digits) > _LONGEST_NUMBER:
        raise ApiError(
            400, f"a number in the body has {len(digits)} digits, more than {_LONGEST_NUMBER}"
        )


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
