"""API keys with names: each may have a priority, a latency target, a share and quotas.

A key file is one JSON object, ``{"keys": [{"key": "sk-…", "name": "chat", …}, …]}``, with the
fields of `_KeyEntry`. ``sha256`` (hexadecimal) stands for a key that the file should not tell.
Names go to the log and the metrics; keys never do.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from octavo.scheduler.policies.config import field_users
from octavo.scheduler.request import LatencyTarget
from octavo.server.body import convert, decode_object
from octavo.server.errors import ApiError
from octavo.server.protocol import RequestSlo

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_MOST_PRIORITY = 2**31
_MOST_BYTES = 64 << 20  # of a key file
SENDABLE = "1 or more visible ASCII characters"


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """``digest`` is the SHA-256 of the key. Raises `ValueError` naming the field, not the key."""

    name: str
    digest: bytes
    weight: float = 1.0  # of its share, where shares are fair
    priority: int = 0  # of its requests; lower runs first
    may_raise_priority: bool = False  # a request may always ask for less
    max_requests_per_minute: int | None = None
    max_tokens_per_minute: int | None = None  # of prompts and answers together
    target: LatencyTarget | None = None  # of requests that ask for none
    # Keys with the same salt share cached prefixes. None: the key's name, which stays the same when
    # the key is replaced and when the server starts again; "": shared with all that have no key.
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(
                f"name {self.name!r} is not 1 to 64 letters, digits, dots, dashes or underscores"
            )
        if not 0 < self.weight < math.inf:
            raise ValueError(f"{self.name}: weight is {self.weight}, not above 0")
        if not -_MOST_PRIORITY <= self.priority < _MOST_PRIORITY:
            raise ValueError(f"{self.name}: priority is {self.priority}, beyond 32 bits")
        for field in ("max_requests_per_minute", "max_tokens_per_minute"):
            limit = getattr(self, field)
            if limit is not None and limit < 1:
                raise ValueError(f"{self.name}: {field} is {limit}, below 1")
        if self.cache_salt is not None and "\0" in self.cache_salt:
            raise ValueError(f"{self.name}: cache_salt has a NUL")

    def salted(self, asked: str | None) -> str | None:
        """Return the salt of a request whose body asks for the ``cache_salt`` ``asked``.

        No two pairs of a key's salt and a body's give the same one: bodies' salts have no NUL.
        """
        own = self.name if self.cache_salt is None else self.cache_salt
        return f"{own}\0{asked or ''}" if own else asked

    def priority_of(self, asked: int | None) -> int:
        """Return the priority of a request that asks for ``asked``. Raises `ApiError` 403."""
        if asked is None:
            return self.priority
        if asked < self.priority and not self.may_raise_priority:
            raise ApiError(
                403,
                f"priority {asked} is above this key's, which is {self.priority} (lower numbers "
                "run first)",
                "priority",
            )
        return asked


def can_be_sent(key: str) -> bool:
    """Return whether a header can carry the key (RFC 9110, 11.4)."""
    return re.fullmatch(r"[\x21-\x7e]+", key) is not None


def unnamed(keys: Iterable[str]) -> tuple[ApiKey, ...]:
    """Return keys given without a file: named by their place, without limits.

    They share one cache, since nothing says that they belong to several users.
    """
    return tuple(
        ApiKey(name=f"key-{place}", digest=digest(key.encode()), cache_salt="")
        for place, key in enumerate(keys, 1)
    )


class _KeyEntry(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: str
    key: str | None = None
    sha256: str | None = None
    weight: float = 1.0
    priority: int = 0
    may_raise_priority: bool = False
    max_requests_per_minute: int | None = None
    max_tokens_per_minute: int | None = None
    slo: RequestSlo | None = None
    cache_salt: Annotated[str, Meta(max_length=512)] | None = None

    def api_key(self) -> ApiKey:
        fields = msgspec.structs.asdict(self)
        key, sha256, slo = (fields.pop(name) for name in ("key", "sha256", "slo"))
        if (key is None) == (sha256 is None):
            raise ValueError(f"{self.name}: give either key or sha256")
        if key is not None and not can_be_sent(key):
            raise ValueError(f"{self.name}: key is not {SENDABLE}")
        if sha256 is not None and not _DIGEST.fullmatch(sha256.lower()):
            raise ValueError(f"{self.name}: sha256 is not 64 hexadecimal digits")
        found = bytes.fromhex(sha256) if key is None else digest(key.encode())
        return ApiKey(digest=found, target=None if slo is None else slo.target(), **fields)


class _KeyFile(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    keys: list[_KeyEntry]


def read_keys(path: Path) -> tuple[ApiKey, ...]:
    """Return the keys of a key file. Raises `OSError`, and `ValueError` naming the file and the
    field, never the key.
    """
    with path.open("rb") as file:
        content = file.read(_MOST_BYTES + 1)
    try:
        if len(content) > _MOST_BYTES:
            raise ValueError(f"more than {_MOST_BYTES} bytes is no key file")
        keys = tuple(entry.api_key() for entry in convert(decode_object(content), _KeyFile).keys)
        if not keys:
            raise ValueError("there is no key in it")
        check_distinct(keys)
    except ApiError as error:
        raise ValueError(f"{path}: {error.message.replace('the request body', 'it')}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return keys


def in_effect(
    keys: tuple[ApiKey, ...], policy: str, file: Path | None
) -> tuple[tuple[ApiKey, ...], list[str]]:
    """Return the keys of ``file`` without the fields that a scheduling policy ignores, and a
    sentence for each such field.
    """
    told = []
    for field, default in (("priority", 0), ("weight", 1.0)):
        users = field_users(field)
        names = [key.name for key in keys if getattr(key, field) != default]
        if names and policy not in users:
            told.append(
                f"{file or 'the named keys'}: {field} of {', '.join(names)} has no effect under "
                f"--scheduling-policy {policy}; it has one under --scheduling-policy "
                f"{' or '.join(users)}"
            )
            changed: dict[str, Any] = {field: default}
            keys = tuple(replace(key, **changed) for key in keys)
    return keys, told


def check_distinct(keys: Iterable[ApiKey]) -> None:
    """Raise `ValueError` if two entries have the same name, or the same key."""
    names: set[str] = set()
    digests: dict[bytes, str] = {}
    for key in keys:
        if key.name in names:
            raise ValueError(f"two keys have the name {key.name!r}")
        names.add(key.name)
        if key.digest in digests:
            raise ValueError(f"{digests[key.digest]!r} and {key.name!r} are the same key")
        digests[key.digest] = key.name


def digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
