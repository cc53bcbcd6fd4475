"""The process's log on stderr: lines for people, or objects of JSON for collectors."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

FORMATS = ("text", "json")


def set_up_logging(level: str, server: str = "text", access: str | None = None) -> None:
    """``server`` and ``access`` are of `FORMATS`: of all lines, and of those about requests, which
    are as the others if that is None.
    """
    handler = _handler(server)
    logger = logging.getLogger("octavo")
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(level.upper())
    requests = logging.getLogger("octavo.access")
    requests.handlers = [_handler(access or server)]
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


def _handler(kind: str) -> logging.Handler:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        JsonFormatter()
        if kind == "json"
        else logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    )
    return handler
