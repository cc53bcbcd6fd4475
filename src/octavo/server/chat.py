"""``/v1/chat/completions``: a conversation goes on."""

from __future__ import annotations

from octavo.engine.outputs import Delta
from octavo.sampling.params import InvalidParameter
from octavo.scheduler.request import Request
from octavo.server.config import ServeConfig
from octavo.server.errors import ApiError
from octavo.server.generate import Prepared
from octavo.server.model import ServedModel
from octavo.server.prompts import Prompt, chat_prompt
from octavo.server.protocol import ChatRequest, read
from octavo.server.reply import Output, Reply
from octavo.server.responses import (
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatMessage,
    json,
)
from octavo.server.sampling import sampling_params


def prepare(model: ServedModel, config: ServeConfig, body: bytes) -> Prepared:
    """Raises `ApiError`, `InvalidParameter`."""
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
    params = sampling_params(
        request,
        model.sampling_defaults,
        choices=n,
        max_tokens=max_tokens,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
    )
    role = config.response_role
    if request.continue_final_message:
        role = str(request.messages[-1]["role"])
    request.messages = []  # which are in ``prompt`` now
    reply = ChatReply(
        model, request, prompt, role=role, force_usage=config.enable_force_include_usage
    )
    engine_request = Request(
        request_id=reply.id,
        prompt_token_ids=prompt.token_ids,
        params=params,
        priority=request.priority or 0,
        cache_salt=request.cache_salt,
    )
    aliases = {"prompt": "messages", "logprobs": "top_logprobs", "max_tokens": max_tokens_name}
    return Prepared([engine_request], reply, aliases)


class ChatReply(Reply):
    def __init__(
        self,
        model: ServedModel,
        request: ChatRequest,
        prompt: Prompt,
        *,
        role: str,
        force_usage: bool,
    ) -> None:
        super().__init__(
            model,
            request,
            [prompt],
            prefix="chatcmpl",
            chunk_object="chat.completion.chunk",
            force_usage=force_usage,
        )
        self._role = role
        self._wants_logprobs = bool(request.logprobs)
        self._plain = not self._wants_logprobs and not request.return_token_ids
        self._begun: set[int] = set()

    def chunk(self, index: int, delta: Delta) -> bytes:
        events = []
        if index not in self._begun:
            self._begun.add(index)
            events.append(self._first(index, delta))
        if self._plain and delta.finish_reason is None:
            if delta.text:
                events.append(
                    self.event(
                        b'{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null}'
                        % (index, json.encode(delta.text))
                    )
                )
        else:
            events.append(self.event(json.encode(self._choice_chunk(index, delta))))
        return b"".join(events)

    def whole(self, outputs: list[Output]) -> bytes:
        choices = []
        for index, output in enumerate(outputs):
            logprobs = None
            if self._wants_logprobs:
                logprobs = ChatLogprobs(self.shower.chat_logprobs(output.logprobs))
            choice = ChatChoice(
                index=index,
                message=ChatMessage(role=self._role, content="".join(output.text)),
                logprobs=logprobs,
                finish_reason=output.finish,
                stop_reason=output.stop_reason,
            )
            if self.request.return_token_ids:
                choice.token_ids = output.token_ids
            choices.append(choice)
        answer = ChatCompletion(
            id=self.id,
            created=self.created,
            model=self.model.name,
            choices=choices,
            usage=self.usage(),
        )
        if self.request.return_token_ids:
            answer.prompt_token_ids = self.prompts[0].token_ids.tolist()
        for output in outputs:  # one of them has the prompt's
            if output.prompt_logprobs is not None:
                answer.prompt_logprobs = self.shower.prompt_logprobs(output.prompt_logprobs)
        return json.encode(answer)

    def _first(self, index: int, delta: Delta) -> bytes:
        """Says whose turn it is; carries what belongs to the prompt."""
        extra = b""
        if self.request.return_token_ids and len(self._begun) == 1:
            extra += b',"prompt_token_ids":' + json.encode(self.prompts[0].token_ids.tolist())
        if self.request.prompt_logprobs is not None and delta.prompt_logprobs is not None:
            shown = self.shower.prompt_logprobs(delta.prompt_logprobs)
            extra += b',"prompt_logprobs":' + json.encode(shown)
        return self.event(
            b'{"index":%d,"delta":{"role":%b,"content":""},"logprobs":null,"finish_reason":null}'
            % (index, json.encode(self._role)),
            extra,
        )

    def _choice_chunk(self, index: int, delta: Delta) -> dict[str, object]:
        logprobs = None
        if self._wants_logprobs and delta.logprobs:
            logprobs = ChatLogprobs(self.shower.chat_logprobs(delta.logprobs))
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
        return choice
