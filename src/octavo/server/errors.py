"""Errors as OpenAI's clients read them: ``{"error": {message, type, param, code}}``.

The clients choose their exception by the HTTP status. ``code`` repeats it; ``type`` follows vLLM.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping

import msgspec

from octavo.engine.stream import EngineDead, OutputUnread
from octavo.loader.base import ChatTemplateError
from octavo.sampling.params import InvalidParameter
from octavo.scheduler.request import AdmissionError

log = logging.getLogger(__name__)

# By HTTP status: the error's type, and the metrics' reason where nothing more is known.
_STATUSES = {
    400: ("BadRequestError", "invalid"),
    401: ("AuthenticationError", "unauthorized"),
    403: ("PermissionDeniedError", "forbidden"),
    404: ("NotFoundError", "not_found"),
    405: ("MethodNotAllowedError", "invalid"),
    408: ("RequestTimeoutError", "timeout"),
    413: ("RequestTooLargeError", "invalid"),
    415: ("UnsupportedMediaTypeError", "invalid"),
    421: ("MisdirectedRequestError", "misdirected"),
    429: ("RateLimitError", "invalid"),
    431: ("RequestTooLargeError", "invalid"),
    499: ("BadRequestError", "gone"),
    500: ("InternalServerError", "error"),
    501: ("NotImplementedError", "invalid"),
    503: ("ServiceUnavailableError", "error"),
}
_LONGEST_MESSAGE = 2000  # characters; a message may quote the request
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+(?=>)")  # in Python's repr of an object
_LONGEST_WAIT_S = 3600.0  # the longest time that a prediction tells a client to wait


class ApiError(Exception):
    """An answer that is an error.

    ``param`` names the request field at fault. The metrics count the error under ``reason``.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        reason: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason or reason_of(status)
        self.message = message
        self.param = param
        self.headers = dict(headers or {})

    @property
    def type(self) -> str:
        return _STATUSES[self.status][0]

    def body(self) -> bytes:
        """Return the error object. It is valid JSON, whatever the message quotes."""
        return msgspec.json.encode(
            {
                "error": {
                    "message": _clean(self.message),
                    "type": self.type,
                    "param": None if self.param is None else _clean(self.param),
                    "code": self.status,
                }
            }
        )


class ClientGone(Exception):
    """The client has closed the connection, so that nobody is there to answer."""


def reason_of(status: int) -> str:
    """Return the reason of `REJECTIONS` (metrics/request_metrics.py) that a status alone tells."""
    return _STATUSES[status][1]


def too_many(message: str, wait_s: float | None, reason: str) -> ApiError:
    """Return a 429: the same request may succeed here in ``wait_s`` seconds (None: unknown), or at
    another server now. ``reason`` tells the metrics what there was too much of.

    OpenAI's clients wait for ``retry-after-ms`` if it is there, else for ``Retry-After``, which
    has whole seconds only.
    """
    wait_s = max(0.001, 1.0 if wait_s is None else wait_s)
    if reason != "quota":  # whose time is no prediction
        wait_s = min(wait_s, _LONGEST_WAIT_S)
    headers = {
        "Retry-After": str(math.ceil(wait_s)),
        "retry-after-ms": str(math.ceil(wait_s * 1000)),
    }
    return ApiError(429, message, headers=headers, reason=reason)


def draining() -> ApiError:
    """Return a 503: the server is shutting down."""
    return unavailable("the server is shutting down", close=True, reason="draining")


def unavailable(message: str, *, close: bool = False, reason: str | None = None) -> ApiError:
    """Return a 503: the same request may succeed later, here or at another server."""
    headers = {"Retry-After": "1"}
    if close:
        headers["Connection"] = "close"
    return ApiError(503, message, headers=headers, reason=reason)


def is_fault_of_client(error: Exception) -> bool:
    """Return whether every server would always refuse the same request."""
    if isinstance(error, AdmissionError):
        return not error.retryable
    return isinstance(error, InvalidParameter) or (
        isinstance(error, ApiError) and 400 <= error.status < 500 and error.status != 429
    )


def as_api_error(error: BaseException) -> ApiError:
    """Return what the client is told. Faults of the server are logged, not described to it."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, AdmissionError) and error.retryable:
        return too_many(str(error), error.retry_after, "capacity")
    if isinstance(error, InvalidParameter | AdmissionError):
        return ApiError(400, str(error), error.param)
    if isinstance(error, ChatTemplateError):
        return ApiError(400, str(error), "messages")
    if isinstance(error, OutputUnread):
        return unavailable(str(error))
    if isinstance(error, EngineDead):
        log.error("the engine is dead: %s", error)
        return ApiError(500, "the engine has stopped; nothing can be generated any more")
    log.error("unexpected error", exc_info=error)
    return ApiError(500, "internal error; the server's log says more")


def _clean(text: str) -> str:
    text = _ADDRESS.sub("", text)
    if len(text) > _LONGEST_MESSAGE:
        text = text[:_LONGEST_MESSAGE] + "…"
    return text.encode("utf-8", "replace").decode("utf-8")
