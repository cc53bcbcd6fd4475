"""An engine that needs no model: tokens are bytes, and it answers a prompt by counting up."""

from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from faults import patch
from octavo.engine.config import EngineConfig
from octavo.engine.load import LoadedEngine
from octavo.engine.outputs import Delta, TokenLogprobs
from octavo.loader.base import ChatTemplateError
from octavo.sampling.params import InvalidParameter
from octavo.scheduler.request import AdmissionError, FinishReason, Outcome, Request, RequestRecord


class ByteTokenizer:
    """Token ids are bytes."""

    vocab_size = 256

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def token_text(self, token_id: int) -> str:
        return chr(token_id)


class PlainTemplate:
    """role: content, a line each. Refuses a conversation that does not start with the user."""

    def render(self, messages: list[dict[str, object]], **kwargs: object) -> str:
        if messages[0]["role"] not in ("user", "system"):
            raise ChatTemplateError("the user speaks first")
        lines = [f"{message['role']}: {message['content']}" for message in messages]
        return "\n".join(lines) + ("\nassistant: " if kwargs.get("add_generation_prompt") else "")


class CountingEngine:
    """Answers with the letters a, b, c … one a step, as many as max_tokens (4 if None).

    ``queue`` limits the requests in it; a prompt that starts with "fail" fails at its second
    token; ``on_step`` is called before each step.
    """

    def __init__(self, queue: int = 1000) -> None:
        self.queue = queue
        self.requests: dict[str, tuple[Request, RequestRecord, int]] = {}
        self.ended: deque[Delta] = deque()
        self.aborted: list[str] = []
        self.most_at_once = 0
        self.closed = False
        self.on_step = lambda: None

    def check(self, request: Request) -> Request:
        if request.params.temperature < 0:
            raise InvalidParameter("temperature", "temperature is below 0")
        if len(request.prompt_token_ids) > 1000:
            raise AdmissionError("the prompt has more than 1000 tokens")
        return request

    def add_request(self, request: Request) -> RequestRecord:
        if len(self.requests) >= self.queue:
            raise AdmissionError("the queue is full", retryable=True)
        record = RequestRecord(request.request_id, 0.0, len(request.prompt_token_ids))
        self.requests[request.request_id] = request, record, 0
        self.most_at_once = max(self.most_at_once, len(self.requests))
        return record

    def abort(self, request_id: str) -> bool:
        if request_id not in self.requests:
            return False
        _, record, _ = self.requests.pop(request_id)
        record.outcome = Outcome.ABORTED
        self.aborted.append(request_id)
        self.ended.append(
            Delta(request_id, 0, "", [], finish_reason=FinishReason.ABORT, record=record)
        )
        return True

    def has_work(self) -> bool:
        return bool(self.requests or self.ended)

    def step(self) -> list[Delta]:
        self.on_step()
        deltas = list(self.ended)
        self.ended.clear()
        for request_id, (request, record, count) in list(self.requests.items()):
            limit = request.params.max_tokens or 4
            fails = count == 1 and bytes(request.prompt_token_ids).startswith(b"fail")
            last = fails or count + 1 == limit
            if last:
                del self.requests[request_id]
                record.outcome = Outcome.FAILED if fails else Outcome.FINISHED
                record.error = "it was told to" if fails else None
            else:
                self.requests[request_id] = request, record, count + 1
            token_id = ord("a") + count % 26
            entry = TokenLogprobs(token_id, -0.5, 2, ((ord("z"), -0.25), (token_id, -0.5)))
            for choice in range(request.params.n):
                record.completion_tokens += not fails
                deltas.append(
                    Delta(
                        request_id,
                        choice,
                        "" if fails else chr(token_id),
                        [] if fails else [token_id],
                        [entry] if request.params.logprobs is not None else None,
                        (FinishReason.ERROR if fails else FinishReason.LENGTH) if last else None,
                        record=record if last and choice == request.params.n - 1 else None,
                    )
                )
        return deltas

    def close(self) -> None:
        self.closed = True


def loaded(engine: CountingEngine, *, chat: bool = True) -> LoadedEngine:
    """As `load_engine` would return it."""
    checkpoint: Any = SimpleNamespace(
        path=Path("counting.gguf"),
        tokenizer=ByteTokenizer(),
        chat_template=PlainTemplate() if chat else None,
        generation_config={},
    )
    return LoadedEngine(
        engine=cast(Any, engine),
        checkpoint=checkpoint,
        config=EngineConfig(),
        max_model_len=1000,
        num_blocks=1,
        kv_cache_bytes=1,
        weight_bytes=1,
        capacity_tokens=1,
        capacity_sequences=1.0,
    )


def noted_prompts(engine: CountingEngine) -> list[str]:
    """The prompts that reach the engine, added as they come."""
    prompts: list[str] = []
    check = engine.check

    def noting(request: Any) -> Any:
        prompts.append(bytes(request.prompt_token_ids).decode())
        return check(request)

    patch(engine, check=noting)
    return prompts
