"""``/v1/chat/completions``: continue a conversation."""

from __future__ import annotations

from typing import Any

from octavo.engine.outputs import Delta
from octavo.sampling.params import InvalidParameter
from octavo.server.config import ServeConfig
from octavo.server.errors import ApiError
from octavo.server.model import ServedModel
from octavo.server.protocol import (
    ChatChoice,
    ChatCompletion,
    ChatMessage,
    ChatRequest,
    json,
    read,
)
from octavo.server.reply import Reply, finish
from octavo.server.request_prompts import chat_prompt


def prepare(model: ServedModel, config: ServeConfig, body: bytes) -> Reply:
    """Read a body. Raises `ApiError`, `InvalidParameter`."""
    request = read(body, ChatRequest, model.longest_list)
    model.check_name(request.model)
    n = 1 if request.n is None else request.n
    if n > config.max_choices:
        raise ApiError(400, f"n {n} is more than {config.max_choices} choices", "n")
    max_tokens, max_tokens_name = request.max_tokens, "max_tokens"
    if request.max_completion_tokens is not None:
        if max_tokens not in (None, request.max_completion_tokens):
            raise InvalidParameter(
                "max_completion_tokens", "max_completion_tokens and max_tokens differ"
            )
        max_tokens, max_tokens_name = request.max_completion_tokens, "max_completion_tokens"
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidParameter("top_logprobs", "top_logprobs needs logprobs to be true")
    prompt = chat_prompt(model, request.messages, request)
    if max_tokens is None and (most := model.sampling_defaults.get("max_tokens")) is not None:
        max_tokens = model.fitting(most, len(prompt.token_ids))
    reply = ChatReply(model, config, request, [prompt], logprobs=bool(request.logprobs))
    params = reply.params(max_tokens, (request.top_logprobs or 0) if request.logprobs else None)
    reply.role = config.response_role
    if request.continue_final_message:
        reply.role = str(request.messages[-1]["role"])
    request.messages = []  # the prompt has them now
    reply.add_request(reply.answer.id, prompt, params)
    reply.aliases = {
        "prompt": "messages", "logprobs": "top_logprobs", "max_tokens": max_tokens_name
    }  # fmt: skip
    return reply


class ChatReply(Reply):
    prefix = "chatcmpl"
    chunk_object = "chat.completion.chunk"
    plain_choice = b'{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null}'
    role = "assistant"

    def first_chunk(self, index: int, delta: Delta) -> bytes:
        """Return an event that says who speaks, with what belongs to the prompt, and the choice's
        own.
        """
        extra = b""
        if self.request.return_token_ids and len(self._begun) == 1:
            extra += b',"prompt_token_ids":' + json.encode(self.prompts[0].token_ids.tolist())
        if self.request.prompt_logprobs is not None and delta.prompt_logprobs is not None:
            shown = self.display.prompt_logprobs(delta.prompt_logprobs)
            extra += b',"prompt_logprobs":' + json.encode(shown)
        role = (
            b'{"index":%d,"delta":{"role":%b,"content":""},"logprobs":null,"finish_reason":null}'
            % (index, json.encode(self.role))
        )
        return self.event(role, extra) + self.next_chunk(index, delta)

    def full_choice(self, index: int, delta: Delta) -> bytes:
        logprobs = None
        if self.wants_logprobs and delta.logprobs:
            logprobs = self.display.chat_logprobs(delta.logprobs)
        choice: dict[str, object] = {
            "index": index,
            "delta": {"content": delta.text} if delta.text or logprobs else {},
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason and delta.finish_reason.value,
        }
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        if self.request.return_token_ids:
            choice["token_ids"] = delta.token_ids
        return json.encode(choice)

    def whole_answer(self, outputs: list[Delta], **members: Any) -> ChatCompletion:
        choices, show = [], self.display.chat_logprobs
        for index, output in enumerate(outputs):
            choice = ChatChoice(
                index=index,
                message=ChatMessage(role=self.role, content=output.text),
                logprobs=show(output.logprobs or []) if self.wants_logprobs else None,
                finish_reason=finish(output.finish_reason),
                stop_reason=output.stop_reason,
            )
            if self.request.return_token_ids:
                choice.token_ids = output.token_ids
            choices.append(choice)
        answer = ChatCompletion(choices=choices, **members)
        if self.request.return_token_ids:
            answer.prompt_token_ids = self.prompts[0].token_ids.tolist()
        for output in outputs:  # one of them has the prompt's
            if output.prompt_logprobs is not None:
                answer.prompt_logprobs = self.display.prompt_logprobs(output.prompt_logprobs)
        return answer
