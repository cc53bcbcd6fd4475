"""Text that remembers who wrote it: the chat template, or whoever sent the messages.

A control token counts only where the template wrote it. So the strings of a rendering are of a
subclass of `str` that carries, for each character, where it comes from, through everything that
templates do with strings. What the subclass does not follow comes back as a plain `str`, whose
origin is then unknown. To the template all of them are strings like any other.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from string import Formatter
from typing import Any, SupportsIndex

from markupsafe import Markup, escape

TEMPLATE, CONTENT, UNKNOWN = b"\0", b"\1", b"\2"

_CONVERSION = re.compile(r"%%|%(?:\((\w+)\))?[#0\- +]*\d*(?:\.\d+)?[a-zA-Z]")

# Roles are part of the format: templates of some families make control tokens of them.
ROLES = frozenset(
    {"system", "user", "assistant", "tool", "developer", "function", "ipython", "model"}
)


class Text(str):
    """``origin`` has a byte for each character."""

    _origin: bytes

    def __new__(cls, text: str, origin: bytes | None = None) -> Text:
        self = super().__new__(cls, text)
        self._origin = origin_of(text) if origin is None else origin
        return self

    def __str__(self) -> str:
        return self

    def _part(self, start: int, end: int) -> Text:
        return Text(str.__getitem__(self, slice(start, end)), self._origin[start:end])

    def _parts(self, pieces: Iterable[str], gap: int = 0) -> list[Text]:
        """Pieces that follow each other, with ``gap`` characters between."""
        found, position = [], 0
        for piece in pieces:
            found.append(self._part(position, position + len(piece)))
            position += len(piece) + gap
        return found

    # ── Operators ───────────────────────────────────────────────────────────────────────────────

    def __getitem__(self, key: SupportsIndex | slice) -> Text:
        if not isinstance(key, slice):
            at = range(len(self))[key]
            return self._part(at, at + 1)
        return Text(str.__getitem__(self, key), self._origin[key])

    def __iter__(self) -> Iterator[Text]:
        return (self._part(at, at + 1) for at in range(len(self)))

    def __add__(self, other: str) -> Text:
        if hasattr(other, "__html__"):  # which escapes what is added to it
            return NotImplemented
        return Text(str.__add__(self, other), self._origin + origin_of(other))

    def __radd__(self, other: str) -> Text:
        return Text(str.__add__(other, self), origin_of(other) + self._origin)

    def __mul__(self, count: SupportsIndex) -> Text:
        return Text(str.__mul__(self, count), self._origin * count)

    __rmul__ = __mul__

    def __mod__(self, values: Any) -> str:
        text = str.__mod__(self, values)
        given = iter(values if isinstance(values, tuple) else (values,))
        parts: list[str] = []
        last = 0
        for found in _CONVERSION.finditer(self):
            parts.append(self._part(last, found.start()))
            last = found.end()
            if found[0] == "%%":
                parts.append(self._part(last - 1, last))
            else:
                name = found[1]
                value = next(given, None) if name is None else values.get(name)
                parts.append(like(value, str.__mod__(found[0], values if name else (value,))))
        return _if_equal(text, [*parts, self._part(last, len(self))])

    # ── Cutting ─────────────────────────────────────────────────────────────────────────────────

    def strip(self, chars: str | None = None, /) -> Text:
        return self.lstrip(chars).rstrip(chars)

    def lstrip(self, chars: str | None = None, /) -> Text:
        return self._part(len(self) - len(str.lstrip(self, chars)), len(self))

    def rstrip(self, chars: str | None = None, /) -> Text:
        return self._part(0, len(str.rstrip(self, chars)))

    def removeprefix(self, prefix: str, /) -> Text:
        return self._part(len(self) - len(str.removeprefix(self, prefix)), len(self))

    def removesuffix(self, suffix: str, /) -> Text:
        return self._part(0, len(str.removesuffix(self, suffix)))

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[Text]:  # type: ignore[override]
        return self._split(str.split(self, sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[Text]:  # type: ignore[override]
        return self._split(str.rsplit(self, sep, maxsplit), sep)

    def _split(self, pieces: list[str], sep: str | None) -> list[Text]:
        if sep is not None:
            return self._parts(pieces, len(sep))
        found, position = [], 0
        for piece in pieces:  # with white space between, of which no piece has any in front
            position = str.index(self, piece, position)
            found.append(self._part(position, position + len(piece)))
            position += len(piece)
        return found

    def splitlines(self, keepends: bool = False) -> list[Text]:  # type: ignore[override]
        lines = self._parts(str.splitlines(self, True))
        if keepends:
            return lines
        return [line._part(0, len(str.splitlines(line)[0])) for line in lines]

    def partition(self, sep: str, /) -> tuple[Text, Text, Text]:
        first, between, last = self._parts(str.partition(self, sep))
        return first, between, last

    def rpartition(self, sep: str, /) -> tuple[Text, Text, Text]:
        first, between, last = self._parts(str.rpartition(self, sep))
        return first, between, last

    # ── Joining ─────────────────────────────────────────────────────────────────────────────────

    def join(self, pieces: Iterable[str], /) -> Text:
        pieces = list(pieces)
        return Text(str.join(self, pieces), self._origin.join(map(origin_of, pieces)))

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> str:
        if not old:  # between all characters
            return str.replace(self, old, new, count)
        parts = self._split(str.split(self, old, count), old)
        return Text(new).join(parts)

    # ── Letters ─────────────────────────────────────────────────────────────────────────────────

    def _cased(self, change: Callable[[str], str]) -> str:
        text = change(self)
        if len(text) == len(self):
            return Text(text, self._origin)
        origin = b"".join(
            each * len(change(char))
            for char, each in zip(str.__iter__(self), _bytes(self._origin), strict=True)
        )
        return Text(text, origin if len(origin) == len(text) else CONTENT * len(text))

    def upper(self) -> str:
        return self._cased(str.upper)

    def lower(self) -> str:
        return self._cased(str.lower)

    def casefold(self) -> str:
        return self._cased(str.casefold)

    def title(self) -> str:
        return self._cased(str.title)

    def capitalize(self) -> str:
        return self._cased(str.capitalize)

    def swapcase(self) -> str:
        return self._cased(str.swapcase)


# Its errors are told to clients: "'str object' has no attribute 'x'".
Text.__module__, Text.__name__ = str.__module__, str.__name__


class Safe(Markup):
    """What the filter ``safe`` makes: a string that escapes what is added to it. Of whatever else
    is done to it the origin is unknown."""

    _origin: bytes

    def __new__(cls, text: Any = "", origin: bytes | None = None) -> Safe:
        self = super().__new__(cls, text)
        self._origin = UNKNOWN * len(self) if origin is None else origin
        return self

    def __str__(self) -> Text:
        return Text(str.__str__(self), self._origin)

    def __add__(self, other: str) -> Markup:  # type: ignore[override]
        if type(other) in (Text, Safe):
            right = _escaped(other)
            return Safe(str.__add__(self, right), self._origin + origin_of(right))
        return Markup(str.__str__(self)) + other

    def __radd__(self, other: str) -> Markup:  # type: ignore[override]
        if type(other) in (Text, Safe):
            left = _escaped(other)
            return Safe(str.__add__(left, self), origin_of(left) + self._origin)
        return other + Markup(str.__str__(self))


def _escaped(text: str) -> str:
    if not isinstance(text, Text):
        return str(text)
    return text._cased(lambda part: str.__str__(escape(str.__str__(part))))


def safe(value: Any) -> Markup:
    return Safe(value, origin_of(value)) if isinstance(value, str) else Markup(value)


def _bytes(origin: bytes) -> Iterator[bytes]:
    return (origin[at : at + 1] for at in range(len(origin)))


def like(value: object, text: str) -> Text:
    """``text``, which is ``value`` in another form: all content if the value is."""
    if isinstance(value, Text):
        if value == text:
            return value
        if not value._origin.strip(CONTENT):
            return Text(text, CONTENT * len(text))
    return Text(text)


def formatted(template: Text, text: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """``text`` is what `str.format` makes of the template with these arguments."""
    parts: list[str] = []
    number = 0
    origin = template._origin[:1]
    if template._origin.strip(origin):
        return text
    for literal, name, form, conversion in Formatter().parse(template):
        parts.append(Text(literal, origin * len(literal)))
        if name is None:
            continue
        if (
            form
            or conversion not in (None, "s")
            or not (name == "" or name.isdecimal() or name in kwargs)
        ):
            return text
        if name in kwargs:
            value = kwargs[name]
        else:
            value, number = args[int(name or number)], number + 1
        parts.append(like(value, str(value)))
    return _if_equal(text, parts)


def _if_equal(text: str, parts: list[str]) -> str:
    """The parts joined, if they are the text: else something in them is not as it is thought."""
    found = joined(parts)
    return found if found == text else text


def origin_of(text: str) -> bytes:
    return text._origin if isinstance(text, (Text, Safe)) else UNKNOWN * len(text)


@lru_cache(maxsize=4096)  # the same few in every rendering
def written(text: str) -> Text:
    """Text of the template's own."""
    return Text(text, TEMPLATE * len(text))


def constant(value: Any) -> Any:
    """A constant of the template, with all its strings as the template's own."""
    if type(value) is str:  # and not Markup
        return written(value)
    if isinstance(value, (list, tuple)):
        return type(value)(map(constant, value))
    if isinstance(value, dict):
        return {constant(key): constant(each) for key, each in value.items()}
    return value


def content(value: Any) -> Any:
    """JSON values with all their strings, keys too, as somebody else's."""
    if isinstance(value, str):
        return Text(value, CONTENT * len(value))
    if isinstance(value, list):
        return [content(each) for each in value]
    if isinstance(value, dict):
        return {content(key): content(each) for key, each in value.items()}
    return value


def message(value: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = content(value)
    if value.get("role") in ROLES:
        found["role"] = written(value["role"])
    return found


def joined(pieces: Iterable[Any]) -> Text:
    """As Jinja concatenates values."""
    texts = [str(piece) for piece in pieces]
    return Text("".join(texts), b"".join(map(origin_of, texts)))


def runs(origin: bytes) -> list[tuple[int, int]]:
    """(how many, which) for each run of characters of one origin."""
    return [(len(run[0]), run[0][0]) for run in re.finditer(b"\0+|\1+|\2+", origin)]
