"""Limits of all connections together: their number, and the bytes that they leave unread.

A connection that waits for its client (between requests, or for the rest of one) can be closed to
make room for another. One whose answer is being made cannot. Used on the event loop's thread only.
"""

from __future__ import annotations

import logging
import os
import resource
import time
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.server.connection import Connection

log = logging.getLogger(__name__)

_MOST = 16384  # connections: an idle one costs some 10 KB
_BACKLOG = 2048
_MOST_UNSENT = 256 << 20  # bytes of answers that clients have not taken, all together
_SAID_AGAIN_S = 60.0  # after this time the log repeats what goes on

# Why a connection was closed although its client had not asked for it.
CLOSED = ("no_room", "not_read", "unsent_total")


def raise_file_limit() -> int:
    """Raise the soft limit of open files to the hard one. Returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = hard if hard != resource.RLIM_INFINITY else max(soft, 1 << 20)
    with suppress(OSError, ValueError):  # what is there must do
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


class Clients:
    def __init__(self, most: int = _MOST, backlog: int = _BACKLOG) -> None:
        """``backlog``: connections that may wait to be accepted."""
        self.most = most
        self.backlog = backlog
        self.closed: Counter[str] = Counter(dict.fromkeys(CLOSED, 0))  # by reason
        self._open: set[Connection] = set()
        self._idle: dict[Connection, None] = {}  # the longest idle first
        self._stalled: dict[Connection, None] = {}  # do not read; the longest first
        self._said = -_SAID_AGAIN_S

    @classmethod
    def of_files(cls, files: int) -> Clients:
        """Return the limits that a limit of ``files`` allows: they leave room for other files, and
        for connections that are accepted in one go before any is closed for them.
        """
        left = max(2, files - len(os.listdir("/proc/self/fd")))
        backlog = max(1, min(_BACKLOG, left // 4))
        return cls(max(1, min(_MOST, left - 2 * backlog)), backlog)

    def __len__(self) -> int:
        return len(self._open)

    @property
    def unsent(self) -> int:
        """Bytes that clients have not taken, of those that lag by more than a little."""
        return sum(client.unsent for client in self._stalled)

    def opened(self, client: Connection) -> None:
        self._open.add(client)
        if len(self._open) > self.most:
            self._make_room(client)
        self.idle(client)

    def lost(self, client: Connection) -> None:
        self._open.discard(client)
        self._idle.pop(client, None)
        self._stalled.pop(client, None)

    def idle(self, client: Connection) -> None:
        """Note that it waits for its client from now on."""
        self._idle.pop(client, None)
        if client in self._open:
            self._idle[client] = None

    def busy(self, client: Connection) -> None:
        self._idle.pop(client, None)

    def stalled(self, client: Connection) -> None:
        """Note that its client takes less than is to be sent."""
        self._stalled.setdefault(client)
        while self.unsent > _MOST_UNSENT:
            longest = next(iter(self._stalled))
            log.warning(
                "%d MiB of answers are not read by their clients: the one that has not read for "
                "the longest time is dropped, with %d bytes",
                self.unsent >> 20,
                longest.unsent,
            )
            self.drop(longest, "unsent_total")

    def reads(self, client: Connection) -> None:
        self._stalled.pop(client, None)

    def drop(self, client: Connection, reason: str) -> None:
        self._stalled.pop(client, None)
        self.closed[reason] += 1
        client.drop()

    def _make_room(self, newcomer: Connection) -> None:
        now = time.monotonic()
        if now - self._said >= _SAID_AGAIN_S:
            self._said = now
            log.warning(
                "%d connections are open, the most there may be (by the limit of open files): "
                "each new one takes the place of the one that has been idle for the longest time",
                self.most,
            )
        self.closed["no_room"] += 1
        loser = next(iter(self._idle), newcomer)
        self._idle.pop(loser, None)
        loser.make_room()
