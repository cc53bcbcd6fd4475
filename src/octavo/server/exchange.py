"""One HTTP request and its answer, as the layers of the server pass it along."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from starlette.types import Scope

from octavo.scheduler.request import RequestRecord
from octavo.server.keys import Account
from octavo.server.protocol import GenerateRequest

_KEY = "octavo.exchange"


@dataclass(slots=True)
class Exchange:
    """``records``: of what the engine was asked to generate for it, read by log and metrics."""

    request_id: str  # the client's X-Request-Id, else drawn
    method: str
    path: str  # below the root path
    headers: Mapping[bytes, bytes] = field(default_factory=dict)  # what is given twice is one list
    started: float = field(default_factory=time.monotonic)
    ended: float = 0.0
    status: int = 0  # 0: no answer has begun
    answer_id: str = ""  # cmpl-… or chatcmpl-…
    model: str = ""  # as answers call it; of generations only
    error_type: str = ""  # of the error object that was the answer, or ended it
    submitted: bool = False  # to the engine, whose records say how it ended
    refusal: str = ""  # why it was refused, if that is more than its status says
    cut_off: int = 0  # the status with which the connection ended it
    trace_id: str = ""  # hexadecimal, where the request is traced
    records: list[RequestRecord] = field(default_factory=list)
    asked: GenerateRequest | None = None  # a generation, once its body has been read
    labels: dict[str, object] = field(default_factory=dict)
    client_gone: bool = False
    account: Account | None = None  # whose key it came with; None: no key was asked for

    @property
    def client(self) -> str:
        """The name of the key it came with; "": it came with none."""
        return "" if self.account is None else self.account.key.name

    def attach(self, scope: Scope) -> None:
        scope[_KEY] = self

    @staticmethod
    def begun(scope: Scope) -> Exchange | None:
        return scope.get(_KEY)

    @staticmethod
    def of(scope: Scope) -> Exchange:
        exchange = scope[_KEY]
        assert isinstance(exchange, Exchange)
        return exchange
