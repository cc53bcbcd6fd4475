"""The process's log on stderr: lines for people, or objects of JSON for collectors.

A thread writes it. Whoever logs, the event loop before all, does not wait for whoever reads the
log: a terminal that is held, a collector that hangs.
"""

from __future__ import annotations

import json
import logging
import queue
import sys
import threading
import time
from datetime import UTC, datetime
from typing import TextIO

FORMATS = ("text", "json")

_MOST = 10_000  # lines that wait to be written
_LAST_LINES = 1.0  # seconds for these when the process ends


def set_up_logging(level: str, server: str = "text", access: str | None = None) -> None:
    """``server`` and ``access`` are of `FORMATS`: of all lines, and of those about requests, which
    are as the others if that is None.
    """
    lines = Lines(sys.stderr)
    handler = _Handler(lines, server)
    logger = logging.getLogger("octavo")
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(level.upper())
    requests = logging.getLogger("octavo.access")
    requests.handlers = [_Handler(lines, access or server)]
    requests.propagate = False
    for name in ("uvicorn.error", "opentelemetry"):
        noisy = logging.getLogger(name)
        noisy.handlers = [handler]
        noisy.propagate = False
        noisy.setLevel(max(logging.WARNING, logging.getLevelName(level.upper())))


class JsonFormatter(logging.Formatter):
    """One object a line, in ASCII: nothing in a message can end the line, for any reader. What a
    line knows beside its message (``extra={"facts": …}``) are members of the object.
    """

    def format(self, record: logging.LogRecord) -> str:
        said: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        facts = getattr(record, "facts", None)
        if facts is None:
            said["message"] = record.getMessage()
        else:
            said |= facts
        if record.exc_info:
            said["exception"] = self.formatException(record.exc_info)
        return json.dumps(said, default=str)


class Lines:
    """Writes lines to ``stream`` in a thread. Those for which there is no room are dropped, and a
    line says how many.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._waiting: queue.Queue[tuple[str, logging.Formatter]] = queue.Queue(_MOST)
        self._dropped = 0
        self._lock = threading.Lock()  # of that number
        threading.Thread(target=self._run, name="octavo-log", daemon=True).start()

    def put(self, line: str, formatter: logging.Formatter) -> None:
        """``formatter``: for what may have to be said of lines like this one."""
        try:
            self._waiting.put_nowait((line, formatter))
        except queue.Full:
            with self._lock:
                self._dropped += 1

    def flush(self, timeout: float) -> None:
        """Wait until all is written, or nobody reads it."""
        deadline = time.monotonic() + timeout
        while self._waiting.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(0.001)

    def _run(self) -> None:
        while True:
            line, formatter = self._waiting.get()
            self._write(line)
            with self._lock:
                dropped, self._dropped = self._dropped, 0
            if dropped:
                self._write(formatter.format(_told_of(dropped)))
            self._waiting.task_done()

    def _write(self, line: str) -> None:
        try:
            self._stream.write(line + "\n")
            self._stream.flush()
        except (OSError, ValueError):  # there is no reader any more, or no stream
            pass


def _told_of(dropped: int) -> logging.LogRecord:
    message = f"{dropped} lines of this log were dropped: they were not read in time"
    return logging.LogRecord(__name__, logging.WARNING, __file__, 0, message, None, None)


class _Handler(logging.Handler):
    def __init__(self, lines: Lines, kind: str) -> None:
        super().__init__()
        self._lines = lines
        self.formatter: logging.Formatter = (
            JsonFormatter()
            if kind == "json"
            else logging.Formatter("%(asctime)s %(levelname)s %(message)s")
        )

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._lines.put(self.format(record), self.formatter)
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        self._lines.flush(_LAST_LINES)
