"""One HTTP request and its answer, as the layers of the server pass it along."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from weakref import ref

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from octavo.scheduler.request import RequestRecord
from octavo.server.protocol import LABELS, GenerateRequest
from octavo.server.quota import Account, Charge

# Under these names a scope has its `RequestContext`, and what becomes `RequestContext.cycle`.
CONTEXT = "octavo.context"
CYCLE = "octavo.cycle"


@dataclass(slots=True)
class RequestContext:
    request_id: str  # the client's X-Request-Id, else drawn
    method: str
    path: str  # below the root path
    headers: Mapping[bytes, bytes] = field(default_factory=dict)  # repeated ones joined by commas
    query: bytes = b""
    cycle: ref[RequestResponseCycle] | None = None  # uvicorn's; weak, for it holds the scope
    started: float = field(default_factory=time.monotonic)
    ended: float = 0.0
    status: int = 0  # 0: no answer has begun
    answer_id: str = ""  # cmpl-… or chatcmpl-…
    model: str = ""  # the name answers carry; set for generations only
    error_type: str = ""  # of the error object that was the answer, or ended it
    submitted: bool = False  # to the engine, whose records say how it ended
    refusal: str = ""  # why it was refused, if that is more than its status says
    cut_off: int = 0  # the status with which the connection ended it
    trace_id: str = ""  # hexadecimal, where the request is traced
    # Of what the engine was asked to generate; log, metrics and traces read them.
    records: list[RequestRecord] = field(default_factory=list)
    asked: GenerateRequest | None = None  # a generation, once its body has been read
    client_gone: bool = False
    account: Account | None = None  # of its API key; None: no key was asked for
    charge: Charge | None = None  # what it costs that account, from its beginning to its end
    body_bytes: int = 0  # of its body, once that has been read
    work_s: float = 0.0  # seconds that a thread has worked on the body

    @property
    def client(self) -> str:
        """The name of its API key, or ""."""
        return "" if self.account is None else self.account.key.name

    @property
    def labels(self) -> dict[str, object]:
        """The labels (`LABELS`) that the body gives."""
        given = {name: getattr(self.asked, name, None) for name in LABELS}
        return {name: value for name, value in given.items() if value is not None}
