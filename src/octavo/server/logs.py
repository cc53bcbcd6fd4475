"""The process's log on stderr: lines for people, or objects of JSON for collectors.

A thread writes it. Code that logs, above all the event loop, does not wait for the log's reader: a
terminal that is held, a collector that hangs.
"""

from __future__ import annotations

import json
import logging
import queue
import sys
import threading
import time
from contextlib import suppress
from datetime import UTC, datetime
from logging.handlers import QueueHandler
from typing import TextIO

FORMATS = ("text", "json")

_MOST = 10_000  # lines that wait to be written
_LAST_LINES_S = 1.0  # time for these when the process ends


def set_up_logging(level: str, server: str = "text", access: str | None = None) -> None:
    """Log to stderr. ``server`` and ``access`` are of `FORMATS`: that of all lines, and that of
    lines about requests (None: the same).
    """
    lines: queue.Queue[logging.LogRecord] = queue.Queue(_MOST)
    handler, requests = _Handler(lines, server), _Handler(lines, access or server)
    threading.Thread(
        target=_write, args=(sys.stderr, lines, handler, requests), daemon=True
    ).start()
    warnings = max(logging.WARNING, logging.getLevelName(level.upper()))
    for name, its_handler, its_level in (
        ("octavo", handler, level.upper()),
        ("octavo.access", requests, None),
        ("uvicorn.error", handler, warnings),
        ("opentelemetry", handler, warnings),
    ):
        logger = logging.getLogger(name)
        logger.handlers = [its_handler]
        logger.propagate = False
        if its_level is not None:
            logger.setLevel(its_level)


class JsonFormatter(logging.Formatter):
    """Writes one object a line, in ASCII: nothing in a message can end the line, for any reader.
    What a record knows beside its message (``extra={"facts": …}``) are members of the object.
    """

    def format(self, record: logging.LogRecord) -> str:
        said: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        facts = getattr(record, "facts", None)
        said |= {"message": record.getMessage()} if facts is None else facts
        if record.exc_info:
            said["exception"] = self.formatException(record.exc_info)
        return json.dumps(said, default=str)


class _Handler(QueueHandler):
    """Formats lines for the log's thread. Drops those for which there is no room."""

    def __init__(self, lines: queue.Queue[logging.LogRecord], kind: str) -> None:
        super().__init__(lines)
        text = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
        self.setFormatter(JsonFormatter() if kind == "json" else text)
        self._lines = lines
        self._dropped = 0
        self._count = threading.Lock()  # logging.shutdown holds the handler's own while it flushes

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self._lines.put_nowait(record)
        except queue.Full:
            with self._count:
                self._dropped += 1

    def told_of_dropped(self) -> logging.LogRecord | None:
        """Return a line that says how many were dropped since the last one, if any were."""
        with self._count:
            dropped, self._dropped = self._dropped, 0
        if not dropped:
            return None
        message = f"{dropped} lines of this log were dropped: they were not read in time"
        record = logging.LogRecord(__name__, logging.WARNING, __file__, 0, message, None, None)
        return self.prepare(record)  # type: ignore[no-any-return]

    def flush(self) -> None:
        """Wait until all is written, or nobody reads it."""
        deadline = time.monotonic() + _LAST_LINES_S
        while self._lines.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(0.001)


def _write(stream: TextIO, lines: queue.Queue[logging.LogRecord], *sources: _Handler) -> None:
    """Write the lines of ``sources``, which have formatted them. Runs in the log's thread, under no
    handler's lock, for which `logging.shutdown` would wait while this waits for a reader.
    """
    while True:
        record = lines.get()
        for line in (record, *(source.told_of_dropped() for source in sources)):
            if line is not None:
                with suppress(Exception):  # there is no reader any more, or no stream
                    stream.write(f"{line.msg}\n")
                    stream.flush()
        lines.task_done()
