"""API keys with names: who asks, how urgent it is, what latency they are promised, how much they
may ask.

A key file is one JSON object: ``{"keys": [{"key": "sk-…", "name": "chat", …}, …]}``, its fields
those of `_Entry`; ``sha256`` (hexadecimal) stands for a key that the file should not tell. Names go
to the log and the metrics, keys never do.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from octavo.scheduler.policies.config import field_users
from octavo.scheduler.request import LatencyTarget
from octavo.server.body import convert, decode_object
from octavo.server.errors import ApiError, TooMany
from octavo.server.protocol import Slo
from octavo.server.quota import Charge, Quota
from octavo.words import plural

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_MOST_PRIORITY = 2**31
_MOST_BYTES = 64 << 20  # of a key file
SENDABLE = "1 or more visible ASCII characters"


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """``digest``: SHA-256 of the key. Raises `ValueError` naming the field, not the key."""

    name: str
    digest: bytes
    weight: float = 1.0  # of its share, where shares are fair
    priority: int = 0  # of its requests; lower runs first
    may_raise_priority: bool = False  # a request may always ask for less
    max_requests_per_minute: int | None = None
    max_tokens_per_minute: int | None = None  # of prompts and answers together
    target: LatencyTarget | None = None  # of requests that ask for none
    # Keys with the same salt share cached prefixes. None: the key's name, which stays the same when
    # the key is replaced and when the server starts again; "": with all that have no key.
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
        """The salt of a request with the ``cache_salt`` that its body asks for: no two pairs of
        key's salt and body's give the same one, since bodies' salts have no NUL.
        """
        own = self.name if self.cache_salt is None else self.cache_salt
        return f"{own}\0{asked or ''}" if own else asked

    def priority_of(self, asked: int | None) -> int:
        """Of a request that asks for a priority, or for none. Raises `ApiError` 403."""
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
    """Whether a header can carry the key (RFC 9110, 11.4)."""
    return re.fullmatch(r"[\x21-\x7e]+", key) is not None


def unnamed(keys: Iterable[str]) -> tuple[ApiKey, ...]:
    """Keys given without a file: named by their place, without limits. What they share is one
    cache, for they do not say that they are of several users.
    """
    return tuple(
        ApiKey(name=f"key-{place}", digest=digest(key.encode()), cache_salt="")
        for place, key in enumerate(keys, 1)
    )


class _Entry(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: str
    key: str | None = None
    sha256: str | None = None
    weight: float = 1.0
    priority: int = 0
    may_raise_priority: bool = False
    max_requests_per_minute: int | None = None
    max_tokens_per_minute: int | None = None
    slo: Slo | None = None
    cache_salt: Annotated[str, Meta(max_length=512)] | None = None

    def api_key(self) -> ApiKey:
        if (self.key is None) == (self.sha256 is None):
            raise ValueError(f"{self.name}: give either key or sha256")
        if self.key is not None:
            if not can_be_sent(self.key):
                raise ValueError(f"{self.name}: key is not {SENDABLE}")
            found = digest(self.key.encode())
        else:
            assert self.sha256 is not None
            if not _DIGEST.fullmatch(self.sha256.lower()):
                raise ValueError(f"{self.name}: sha256 is not 64 hexadecimal digits")
            found = bytes.fromhex(self.sha256)
        return ApiKey(
            name=self.name,
            digest=found,
            weight=self.weight,
            priority=self.priority,
            may_raise_priority=self.may_raise_priority,
            max_requests_per_minute=self.max_requests_per_minute,
            max_tokens_per_minute=self.max_tokens_per_minute,
            target=None if self.slo is None else self.slo.target(),
            cache_salt=self.cache_salt,
        )


class _File(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    keys: list[_Entry]


def read_keys(path: Path) -> tuple[ApiKey, ...]:
    """The keys of a key file. Raises `ValueError` naming the file and the field, never the key;
    `OSError`.
    """
    with path.open("rb") as file:
        content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise ValueError(f"{path}: more than {_MOST_BYTES} bytes is no key file")
    try:
        keys = tuple(entry.api_key() for entry in convert(decode_object(content), _File).keys)
    except ApiError as error:
        raise ValueError(f"{path}: {error.message.replace('the request body', 'it')}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if not keys:
        raise ValueError(f"{path}: there is no key in it")
    try:
        check_distinct(keys)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return keys


def in_effect(
    keys: tuple[ApiKey, ...], policy: str, file: Path | None
) -> tuple[tuple[ApiKey, ...], list[str]]:
    """The keys of ``file`` without what a scheduling policy does not look at, and a sentence for
    each field of which that is so.
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
    """Raises `ValueError` where two keys have one name, or one key two."""
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


class Account(Quota):
    """A key, and what is left of its quotas."""

    def __init__(self, key: ApiKey, ring: Keyring) -> None:
        super().__init__(key.name, key.max_requests_per_minute, key.max_tokens_per_minute)
        self.key = key
        self._ring = ring

    def open(self) -> Charge:
        self._ring.check_share(self, self.waiting, 1)
        return super().open()

    def check_prompts(self, waiting: int, prompts: Sequence[int]) -> None:
        self._ring.check_share(self, waiting, len(prompts))
        super().check_prompts(waiting, prompts)


class Keyring:
    """The accounts, by key. Bounded: one for each key, whoever asks."""

    def __init__(self, keys: Iterable[ApiKey], queue: int | None = None) -> None:
        """``queue``: how many requests may wait, if keys are to have fair shares of it."""
        # Looked up by digest: what the time of that tells is nothing of the key.
        self._accounts = {key.digest: Account(key, self) for key in keys}
        self._queue = queue

    def __bool__(self) -> bool:
        return bool(self._accounts)

    def find(self, key: bytes) -> Account | None:
        return self._accounts.get(digest(key))

    def check_share(self, account: Account, own: int, more: int) -> None:
        """One key alone fills no more than half of the queue, and of several each its part, so that
        there is room for the next: may ``more`` come to its ``own`` that wait? Raises `TooMany`, or
        `ApiError` 400 for more at once than it may ever have waiting.
        """
        if self._queue is None:
            return
        ever = max(1, self._queue // 2)
        if more > ever:
            raise ApiError(
                400,
                f"prompt has {more} prompts, more than the {ever} requests that a key may have "
                "waiting",
                "prompt",
            )
        others = sum(each is not account and each.waiting > 0 for each in self._accounts.values())
        most = max(1, self._queue // (others + 2))
        if own + more > most:
            come = "" if more == 1 else f"; with {more} more that is too many"
            raise TooMany(
                f"{plural(own, 'request')} of the key {account.key.name!r} "
                f"{'waits' if own == 1 else 'wait'}, of at most {most} while "
                f"{plural(others, 'other key', 'wait')}{come}",
                None,
                "capacity",
            )
