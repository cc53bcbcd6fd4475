"""Count the values of a body, field by field, before it is decoded.

Decoding hundreds of thousands of keys or numbers takes a second, even if they are refused then.
Counting them takes milliseconds: numpy looks at all bytes at once, and lets other threads run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from octavo.server.errors import ApiError

UNCOUNTED = 16 << 10  # bytes; whatever is in fewer of them is decoded as quickly as counted
_MOST_FIELDS = 256  # of a request; all that are known are fewer
_DEEPEST = 64  # lists and objects within each other
_STRUCTURE = np.zeros(256, dtype=bool)
_STRUCTURE[list(b"{}[],")] = True


def check_counts(body: bytes, most: Mapping[str, int], otherwise: int, most_entries: int) -> None:
    """Raise `ApiError` 400 naming the first field with too many values, at any depth: more than
    ``most`` says of it, or than ``otherwise`` where that says nothing, or more than
    ``most_entries`` at its outermost level.

    Also refuses too many fields, and too deep a nesting. What is not JSON is left to the decoder.
    """
    least = min(otherwise, *most.values())
    if len(body) < UNCOUNTED or sum(map(body.count, (b",", b"[", b"{"))) <= least:
        return
    data = np.frombuffer(body, dtype=np.uint8)
    quotes = _quotes(data)
    outside = np.ones(len(data), dtype=bool)
    inside = np.zeros(len(data) + 1, dtype=np.int8)
    opening, closing = quotes[::2], quotes[1::2]
    inside[opening] = 1
    inside[closing[: len(opening)]] = -1
    np.equal(np.cumsum(inside[:-1], dtype=np.int8), 0, out=outside)
    del inside
    at = np.flatnonzero(_STRUCTURE[data] & outside)
    kinds = data[at]
    steps = np.zeros(len(at), dtype=np.int32)
    steps[(kinds == ord("{")) | (kinds == ord("["))] = 1
    steps[(kinds == ord("}")) | (kinds == ord("]"))] = -1
    depths = np.cumsum(steps, dtype=np.int32)
    if len(depths) and depths.max() > _DEEPEST:
        raise ApiError(400, f"the request body is nested too deeply: more than {_DEEPEST} levels")
    # Where a field of the request ends: its commas, and the last brace.
    ends = np.flatnonzero((depths == 1) & (kinds == ord(",")))
    if len(ends) + 1 > _MOST_FIELDS:
        raise ApiError(400, f"the request has {len(ends) + 1} fields, more than {_MOST_FIELDS}")
    bounds = [0, *ends.tolist(), len(at)]
    for first, last in pairwise(bounds):
        # Each comma between two values, and each list or object, which may have one.
        if last - first <= least:
            continue
        own = steps[first + 1 : last]
        values = int(np.count_nonzero(own >= 0))
        entries = 1 + int(np.count_nonzero((own == 0) & (depths[first + 1 : last] == 2)))
        name = _name(body, int(at[first]) + 1)
        limit = most.get(name, otherwise)
        for count, allowed in ((values, limit), (entries, most_entries)):
            if count > allowed:
                raise ApiError(400, f"{name} has {count} entries, more than {allowed}", name)


def _quotes(data: npt.NDArray[np.uint8]) -> npt.NDArray[np.intp]:
    """Return where strings begin and end: the quotation marks that no backslash escapes."""
    quotes = np.flatnonzero(data == ord('"'))
    slashes = np.flatnonzero(data == ord("\\"))
    if not len(slashes):
        return quotes
    # A run of backslashes escapes what follows it if their number is odd.
    first = np.flatnonzero(np.diff(slashes, prepend=-2) != 1)
    lengths = np.diff(first, append=len(slashes))
    after = slashes[first] + lengths
    escaped = after[lengths % 2 == 1]
    return quotes[~np.isin(quotes, escaped, assume_unique=True)]


def _name(body: bytes, start: int) -> str:
    match = re.compile(rb'\s*"((?:[^"\\]|\\.){0,100})').match(body, start)
    return match[1].decode(errors="replace") if match else "a field"
