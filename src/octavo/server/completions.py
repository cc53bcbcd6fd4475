"""``/v1/completions``: a text goes on."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from octavo.engine.outputs import Delta, TokenLogprobs
from octavo.scheduler.request import Request
from octavo.server.config import ServeConfig
from octavo.server.errors import ApiError
from octavo.server.generate import Prepared
from octavo.server.model import ServedModel
from octavo.server.prompts import Prompt, completion_prompts
from octavo.server.protocol import CompletionRequest, read
from octavo.server.reply import Output, Reply
from octavo.server.responses import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionLogprobsWriter,
    extend,
    json,
)
from octavo.server.sampling import sampling_params

_DEFAULT_MAX_TOKENS = 16


def prepare(model: ServedModel, config: ServeConfig, body: bytes) -> Prepared:
    """Raises `ApiError`, `InvalidParameter`."""
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
    request.prompt = ""  # which is in ``prompts`` now
    reply = CompletionReply(model, request, prompts, force_usage=config.enable_force_include_usage)
    params = sampling_params(
        request,
        model.sampling_defaults,
        choices=len(prompts) * n,
        max_tokens=request.max_tokens,
        logprobs=request.logprobs,
    )
    if request.echo and params.prompt_logprobs is None:
        params = replace(params, prompt_logprobs=request.logprobs)
    requests = []
    for index, prompt in enumerate(prompts):
        max_tokens = request.max_tokens
        if max_tokens is None:
            most = min(_DEFAULT_MAX_TOKENS, model.sampling_defaults.get("max_tokens", inf))
            max_tokens = model.fitting(int(most), len(prompt.token_ids))
        requests.append(
            Request(
                request_id=f"{reply.id}-{index}",
                prompt_token_ids=prompt.token_ids,
                params=replace(params, max_tokens=max_tokens),
                priority=request.priority or 0,
                cache_salt=request.cache_salt,
                begun=reply.begun[index],
            )
        )
    return Prepared(requests, reply, {})


class CompletionReply(Reply):
    def __init__(
        self,
        model: ServedModel,
        request: CompletionRequest,
        prompts: list[Prompt],
        *,
        force_usage: bool,
    ) -> None:
        super().__init__(
            model,
            request,
            prompts,
            prefix="cmpl",
            chunk_object="text_completion",
            force_usage=force_usage,
        )
        self._wants_logprobs = request.logprobs is not None
        self._plain = not self._wants_logprobs and not request.return_token_ids
        self._begun: set[int] = set()
        self._logprobs: dict[int, CompletionLogprobsWriter] = {}
        self._prompt_logprobs: dict[int, list[TokenLogprobs | None]] = {}  # by prompt
        self._echo: list[str] | None = None
        # Of each prompt that is echoed, the first bytes of a character that the answer completes.
        self.begun = [b""] * len(prompts)
        if request.echo:
            self._echo = [self._echoed(index) for index in range(len(prompts))]

    def _echoed(self, index: int) -> str:
        """A prompt's text, without a character that is not complete."""
        token_ids, text = self.prompts[index]
        if text is not None:
            return text
        ids = token_ids.tolist()
        keep = self.request.skip_special_tokens is False
        text = self.model.tokenizer.decode(ids, skip_special_tokens=not keep)
        self.begun[index] = self.shower.begun(ids)
        return text[:-1] if self.begun[index] else text

    def chunk(self, index: int, delta: Delta) -> bytes:
        first = index not in self._begun
        if self._plain and delta.finish_reason is None and not first:
            if not delta.text:
                return b""
            return self.event(
                b'{"index":%d,"text":%b,"logprobs":null,"finish_reason":null,"stop_reason":null}'
                % (index, json.encode(delta.text))
            )
        self._begun.add(index)
        output = Output()
        output.add(delta)
        self._note_prompt_logprobs(index, output)
        return self.event(json.encode(self._choice(index, output, first=first)))

    def whole(self, outputs: list[Output]) -> bytes:
        for index, output in enumerate(outputs):
            self._note_prompt_logprobs(index, output)
        return json.encode(
            Completion(
                id=self.id,
                created=self.created,
                model=self.model.name,
                choices=[
                    self._choice(index, output, first=True) for index, output in enumerate(outputs)
                ],
                usage=self.usage(),
            )
        )

    def _note_prompt_logprobs(self, index: int, output: Output) -> None:
        """They come once a prompt, with its first delta, and belong to all of its choices."""
        if output.prompt_logprobs is not None:
            self._prompt_logprobs[index // self.n] = output.prompt_logprobs

    def _choice(self, index: int, output: Output, *, first: bool) -> CompletionChoice:
        """``first``: with what belongs to the choice's prompt."""
        prompt = index // self.n
        text = "".join(output.text)
        if first and self._echo is not None:
            text = self._echo[prompt] + text
        prompt_logprobs = self._prompt_logprobs.get(prompt) if first else None
        choice = CompletionChoice(
            index=index,
            text=text,
            logprobs=self._take_logprobs(index, output, prompt_logprobs),
            finish_reason=output.finish,
            stop_reason=output.stop_reason,
        )
        if self.request.return_token_ids:
            choice.token_ids = output.token_ids
            if first:
                choice.prompt_token_ids = self.prompts[prompt].token_ids.tolist()
        if self.request.prompt_logprobs is not None and prompt_logprobs is not None:
            choice.prompt_logprobs = self.shower.prompt_logprobs(prompt_logprobs)
        return choice

    def _take_logprobs(
        self, index: int, output: Output, prompt_logprobs: list[TokenLogprobs | None] | None
    ) -> CompletionLogprobs | None:
        if not self._wants_logprobs:
            return None
        prompt = index // self.n
        taken = None
        if index not in self._logprobs:
            start = 0
            if self._echo is not None:
                start = len(self._echo[prompt])
                if prompt_logprobs is not None:
                    token_ids, text = self.prompts[prompt]
                    writer = (
                        CompletionLogprobsWriter(self.shower)
                        if text is None
                        else CompletionLogprobsWriter.of_text(self.shower, text, token_ids)
                    )
                    taken = writer.take(token_ids, prompt_logprobs)
            self._logprobs[index] = CompletionLogprobsWriter(self.shower, start, self.begun[prompt])
        if output.logprobs:
            taken = extend(taken, self._logprobs[index].take(output.token_ids, output.logprobs))
        return taken
