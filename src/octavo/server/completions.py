"""``/v1/completions``: continue a text."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

from octavo.engine.outputs import Delta, TokenLogprobs
from octavo.server.config import ServeConfig
from octavo.server.errors import ApiError
from octavo.server.logprobs import CompletionLogprobsWriter
from octavo.server.model import ServedModel
from octavo.server.protocol import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    json,
    read,
)
from octavo.server.reply import Reply, finish
from octavo.server.request_prompts import completion_prompts

_DEFAULT_MAX_TOKENS = 16


def prepare(model: ServedModel, config: ServeConfig, body: bytes) -> Reply:
    """Read a body. Raises `ApiError`, `InvalidParameter`."""
    longest = max(model.longest_list, config.max_choices)
    request = read(body, CompletionRequest, longest)
    model.check_name(request.model)
    n = 1 if request.n is None else request.n
    if request.best_of is not None and request.best_of != n:
        raise ApiError(400, f"best_of must equal n, which is {n}", "best_of")
    prompts = completion_prompts(
        model,
        request.prompt,
        add_special_tokens=request.add_special_tokens is not False,
        most=config.max_choices,
    )
    if len(prompts) * n > config.max_choices:
        raise ApiError(
            400, f"{len(prompts)} prompts × n {n} is more than {config.max_choices} choices", "n"
        )
    request.prompt = ""  # the prompts have it now
    logprobs = request.logprobs is not None
    reply = CompletionReply(model, config, request, prompts, logprobs=logprobs)
    if request.echo:
        reply.echo_prompts()
    params = reply.params(request.max_tokens, request.logprobs)
    if request.echo and params.prompt_logprobs is None:
        params = replace(params, prompt_logprobs=request.logprobs)
    for index, prompt in enumerate(prompts):
        max_tokens = request.max_tokens
        if max_tokens is None:
            most = min(_DEFAULT_MAX_TOKENS, model.sampling_defaults.get("max_tokens", inf))
            max_tokens = model.fitting(int(most), len(prompt.token_ids))
        own = replace(params, max_tokens=max_tokens)
        begun = reply.prompt_ends.get(index, b"")
        reply.add_request(f"{reply.answer.id}-{index}", prompt, own, begun)
    return reply


class CompletionReply(Reply):
    prefix = "cmpl"
    chunk_object = "text_completion"
    plain_choice = b'{"index":%d,"text":%b,"logprobs":null,"finish_reason":null,"stop_reason":null}'
    _echo: list[str] | None = None  # the prompts' texts, if they are to be in the answer

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._writers: dict[int, CompletionLogprobsWriter] = {}  # by choice
        self._prompt_logprobs: dict[int, list[TokenLogprobs | None]] = {}  # by prompt
        # By echoed prompt, the first bytes of a character that the answer completes.
        self.prompt_ends: dict[int, bytes] = {}

    def echo_prompts(self) -> None:
        """Begin each choice with its prompt's text, without a character that is not complete."""
        self._echo = []
        for place, (token_ids, text) in enumerate(self.prompts):
            if text is None:
                ids = token_ids.tolist()
                keep = self.request.skip_special_tokens is False
                text = self.model.tokenizer.decode(ids, skip_special_tokens=not keep)
                if end := self.display.begun(ids):
                    self.prompt_ends[place], text = end, text[:-1]
            self._echo.append(text)

    def first_chunk(self, index: int, delta: Delta) -> bytes:
        self._note_prompt_logprobs(index, delta)
        return self.event(json.encode(self._choice(index, delta, first=True)))

    def full_choice(self, index: int, delta: Delta) -> bytes:
        return json.encode(self._choice(index, delta, first=False))

    def whole_answer(self, outputs: list[Delta], **members: Any) -> Completion:
        for index, output in enumerate(outputs):
            self._note_prompt_logprobs(index, output)
        choices = [self._choice(index, each, first=True) for index, each in enumerate(outputs)]
        return Completion(choices=choices, **members)

    def _note_prompt_logprobs(self, index: int, output: Delta) -> None:
        """Keep what comes once a prompt, with its first delta, and belongs to all its choices."""
        if output.prompt_logprobs is not None:
            self._prompt_logprobs[index // self.n] = output.prompt_logprobs

    def _choice(self, index: int, output: Delta, *, first: bool) -> CompletionChoice:
        """Return a choice; ``first``: with what belongs to its prompt."""
        place = index // self.n
        text = output.text
        if first and self._echo is not None:
            text = self._echo[place] + text
        prompt_logprobs = self._prompt_logprobs.get(place) if first else None
        choice = CompletionChoice(
            index=index,
            text=text,
            logprobs=self._logprobs(index, output, prompt_logprobs),
            finish_reason=finish(output.finish_reason),
            stop_reason=output.stop_reason,
        )
        if self.request.return_token_ids:
            choice.token_ids = output.token_ids
            if first:
                choice.prompt_token_ids = self.prompts[place].token_ids.tolist()
        if self.request.prompt_logprobs is not None and prompt_logprobs is not None:
            choice.prompt_logprobs = self.display.prompt_logprobs(prompt_logprobs)
        return choice

    def _logprobs(
        self, index: int, output: Delta, prompt_logprobs: list[TokenLogprobs | None] | None
    ) -> CompletionLogprobs | None:
        if not self.wants_logprobs:
            return None
        place = index // self.n
        found = CompletionLogprobs([], [], [], [])
        if index not in self._writers:
            start = 0
            if self._echo is not None:
                start = len(self._echo[place])
                if prompt_logprobs is not None:
                    token_ids, text = self.prompts[place]
                    writer = (
                        CompletionLogprobsWriter(self.display)
                        if text is None
                        else CompletionLogprobsWriter.of_text(self.display, text, token_ids)
                    )
                    writer.write(token_ids, prompt_logprobs, found)
            begun = self.prompt_ends.get(place, b"")
            self._writers[index] = CompletionLogprobsWriter(self.display, start, begun)
        if output.logprobs:
            self._writers[index].write(output.token_ids, output.logprobs, found)
        return found if found.tokens else None
