"""Errors as OpenAI's clients read them: ``{"error": {message, type, param, code}}``.

The clients choose their exception by the HTTP status; ``code`` repeats it, ``type`` follows vLLM.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping

import msgspec
from starlette.exceptions import HTTPException

from octavo.engine.stream import EngineDead, OutputUnread
from octavo.loader.base import ChatTemplateError
from octavo.sampling.params import InvalidParameter
from octavo.scheduler.request import AdmissionError

log = logging.getLogger(__name__)

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    421: "MisdirectedRequestError",
    429: "RateLimitError",
    431: "RequestTooLargeError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
}
# Why an answer is an error, for the metrics, where nothing more is known than its status.
_REASONS = {
    401: "unauthorized",
    403: "forbidden",
    404: "not_found",
    408: "timeout",
    421: "misdirected",
    499: "gone",
}
_LONGEST_MESSAGE = 2000  # characters; a message may quote the request
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+(?=>)")  # in what Python writes of an object
_LONGEST_WAIT = 3600.0  # seconds that a client is told to wait, by prediction


class ApiError(Exception):
    """An answer that is an error; ``param`` names the request field at fault, and ``reason`` is
    what the metrics count it under.
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
        return _TYPES.get(self.status, "BadRequestError")

    def body(self) -> bytes:
        """The error object; always valid JSON, whatever the message quotes."""
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


class TooMany(ApiError):
    """429: the same request may succeed here in ``wait`` seconds (None: that is not known), or at
    another server now. ``reason``, for the metrics, is what there was too much of.

    OpenAI's clients wait for ``retry-after-ms`` where it is there, else for ``Retry-After``, which
    has whole seconds only.
    """

    def __init__(self, message: str, wait: float | None, reason: str) -> None:
        wait = max(0.001, 1.0 if wait is None else wait)
        if reason != "quota":  # whose time is no prediction
            wait = min(wait, _LONGEST_WAIT)
        headers = {
            "Retry-After": str(math.ceil(wait)),
            "retry-after-ms": str(math.ceil(wait * 1000)),
        }
        super().__init__(429, message, headers=headers, reason=reason)


class ClientGone(Exception):
    """The client has closed the connection; nobody is there to answer."""


def reason_of(status: int) -> str:
    """One of `REJECTIONS` in serve/metrics."""
    return _REASONS.get(status, "invalid" if status < 500 or status == 501 else "error")


def draining() -> ApiError:
    """503: the server is shutting down."""
    return unavailable("the server is shutting down", close=True, reason="draining")


def unavailable(message: str, *, close: bool = False, reason: str | None = None) -> ApiError:
    """503: the same request may succeed later, here or at a neighbour."""
    headers = {"Retry-After": "1"}
    if close:
        headers["Connection"] = "close"
    return ApiError(503, message, headers=headers, reason=reason)


def is_fault_of_client(error: Exception) -> bool:
    """Whether the same request would be refused always and everywhere."""
    if isinstance(error, AdmissionError):
        return not error.retryable
    return isinstance(error, InvalidParameter) or (
        isinstance(error, ApiError) and 400 <= error.status < 500 and error.status != 429
    )


def as_api_error(error: BaseException) -> ApiError:
    """What the client is told. Faults of the server are logged and not described to it."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidParameter):
        return ApiError(400, str(error), error.param)
    if isinstance(error, AdmissionError):
        if error.retryable:
            return TooMany(str(error), error.retry_after, "capacity")
        return ApiError(400, str(error), error.param)
    if isinstance(error, ChatTemplateError):
        return ApiError(400, str(error), "messages")
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, error.detail, headers=error.headers)
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
