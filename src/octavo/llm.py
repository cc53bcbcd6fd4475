"""The engine for scripts and notebooks, with vLLM's interface."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

from octavo.engine.config import EngineConfig
from octavo.engine.load import LoadedEngine, load_engine
from octavo.engine.outputs import Delta, TokenLogprobs
from octavo.engine.sampling_defaults import sampling_defaults
from octavo.loader.base import TokenizerError, require_chat
from octavo.sampling.params import InvalidParameter, SamplingParams
from octavo.scheduler.request import AdmissionError, Request, RequestRecord

Prompt = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, Any]


class Logprob(NamedTuple):
    """The natural-log probability of a token at a position."""

    logprob: float
    rank: int  # 1 = most likely
    decoded_token: str


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's n answers."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None  # with logprobs only
    logprobs: list[dict[int, Logprob]] | None = None  # one a token: itself and the alternatives
    finish_reason: str | None = None  # "stop" or "length"; "abort" or "error" if cut off
    stop_reason: str | int | None = None  # the stop string or stop token id that ended it


@dataclass(slots=True)
class RequestOutput:
    """The answers to one prompt. Outputs are in the order of the prompts."""

    request_id: str
    prompt: str | None  # None when token ids were given
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    finished: bool = False
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    metrics: RequestRecord | None = None  # times and counts


class GenerationError(RuntimeError):
    """Some requests failed while running; the others are complete. ``outputs`` has all of them."""

    def __init__(self, failed: Sequence[RequestOutput], outputs: list[RequestOutput]) -> None:
        first = failed[0]
        super().__init__(
            f"{len(failed)} of {len(outputs)} requests failed; prompt {outputs.index(first)}: "
            f"{first.metrics and first.metrics.error}"
        )
        self.outputs = outputs


class LLM:
    """A loaded model and its engine, for one thread.

    ``model`` is a known name, a GGUF file or its folder, or a Hugging Face id; ``engine`` are
    `EngineConfig`'s options. ``generation_config`` says where requests without sampling_params get
    their parameters: from the model's own files ("auto"), from nowhere ("vllm"), or from a folder
    with a generation_config.json; ``override_generation_config`` replaces single values. Raise
    `CheckpointError` or `SettingsError`.

        with LLM("smollm2") as llm:
            for output in llm.generate(["The capital of France is"], SamplingParams(temperature=0)):
                print(output.outputs[0].text)
    """

    def __init__(
        self,
        model: str | Path | LoadedEngine,
        *,
        generation_config: str = "auto",
        override_generation_config: Mapping[str, Any] | None = None,
        **engine: Any,
    ) -> None:
        if isinstance(model, LoadedEngine):
            if engine:
                raise TypeError(f"{', '.join(engine)}: the engine is loaded already")
            self.loaded = model
        else:
            from octavo.loader.pull import resolve

            self.loaded = load_engine(resolve(str(model)), EngineConfig(**engine))
        self._engine = self.loaded.engine
        self._tokenizer = self.loaded.checkpoint.tokenizer
        self._generation_config = generation_config, override_generation_config
        self._next_id = 0
        self._busy = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the memory back. Afterwards the object cannot be used."""
        self._engine.close()

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters of requests without sampling_params, by the model's
        generation_config.json or GGUF file. Raise `CheckpointError` if a value there cannot be
        honoured.
        """
        defaults, _ = sampling_defaults(self.loaded.checkpoint, *self._generation_config)
        return SamplingParams(**defaults)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts, all in one batch; the outputs are in the prompts' order.

        A prompt is text, a list of token ids, or vLLM's ``{"prompt": …}`` or
        ``{"prompt_token_ids": …}``. ``sampling_params`` is one for all or one a prompt; None: the
        model's own (`get_default_sampling_params`).
        ``use_tqdm`` shows a progress bar on standard error. Everything is checked before anything
        runs: `InvalidParameter`, `AdmissionError`. Ctrl-C aborts all requests and raises.
        `GenerationError` if some fail while running.
        """
        requests = self._requests(_prompt_list(prompts), sampling_params)
        outputs = [
            RequestOutput(
                request_id=request.request_id,
                prompt=text,
                prompt_token_ids=list(request.prompt_token_ids),
                outputs=[CompletionOutput(index) for index in range(request.params.n)],
            )
            for text, request in requests
        ]
        with _bar(len(outputs), use_tqdm) as report:
            for index, delta in self._run([request for _, request in requests]):
                self._absorb(outputs[index], delta)
                report(delta)
        failed = [output for output in outputs if output.metrics and output.metrics.error]
        if failed:
            raise GenerationError(failed, outputs)
        return outputs

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        control_tokens_in_content: bool = False,
    ) -> list[RequestOutput]:
        """Answer a conversation, or several, through the model's chat template.

        A conversation is a list of ``{"role": …, "content": …}``. What spells a control token in
        it (``<|im_end|>``) is text unless ``control_tokens_in_content``. Raises
        `ChatTemplateError` with the template's message, and what `generate` raises.
        """
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts = [
            self.chat_prompt(
                conversation,  # type: ignore[arg-type]
                control_tokens_in_content=control_tokens_in_content,
                **(chat_template_kwargs or {}),
            )
            for conversation in conversations
        ]
        return self.generate(
            [{"prompt": text, "prompt_token_ids": token_ids} for text, token_ids in prompts],
            sampling_params,
            use_tqdm=use_tqdm,
        )

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Generator[tuple[int, Delta]]:
        """Do as `generate`, but yield (index of the prompt, delta) as they come, for all prompts.

        Closing the generator aborts what still runs; so does Ctrl-C, which then raises.
        """
        requests = [
            request for _, request in self._requests(_prompt_list(prompts), sampling_params)
        ]
        return self._run(requests)

    def chat_prompt(
        self,
        messages: Sequence[Message],
        *,
        control_tokens_in_content: bool = False,
        **kwargs: Any,
    ) -> tuple[str, list[int]]:
        """Return a conversation as prompt text and token ids; ``kwargs`` are the template's."""
        text = require_chat(self.loaded.checkpoint).render(
            [dict(message) for message in messages],
            **{"add_generation_prompt": True} | kwargs,
        )
        marked = str(text) if control_tokens_in_content else text
        # The template writes the special tokens itself.
        return str(text), self._encode(marked, "messages", add_special_tokens=False)

    def _encode(self, text: str, param: str, *, add_special_tokens: bool = True) -> list[int]:
        try:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except UnicodeEncodeError as error:
            raise InvalidParameter(
                param, f"a prompt is no Unicode text: {error.reason} at {error.start}"
            ) from None
        except TokenizerError as error:
            raise InvalidParameter(param, str(error)) from None

    def _requests(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[tuple[str | None, Request]]:
        """Return the prompts as checked requests, with their text where there is one."""
        fit = params is None  # a default max_tokens is cut to what the context leaves
        if params is None:
            params = self.get_default_sampling_params()
        if isinstance(params, SamplingParams):
            params = [params] * len(prompts)
        if len(params) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts but {len(params)} sampling_params")
        requests = []
        for prompt, one in zip(prompts, params, strict=True):
            text, token_ids = self._tokenize(prompt)
            room = self.loaded.max_model_len - len(token_ids)
            if fit and one.max_tokens is not None and 0 < room < one.max_tokens:
                one = replace(one, max_tokens=room)
            request = Request(request_id=str(self._next_id), prompt_token_ids=token_ids, params=one)
            self._next_id += 1
            requests.append((text, self._engine.check(request)))
        return requests

    def _tokenize(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        text: str | None = None
        token_ids: Sequence[int] | None = None
        if isinstance(prompt, str):
            text = prompt
        elif isinstance(prompt, Mapping):
            unknown = set(prompt) - {"prompt", "prompt_token_ids"}
            if unknown or not prompt:
                raise ValueError(
                    "a prompt has prompt or prompt_token_ids, not "
                    + (", ".join(sorted(unknown)) or "nothing")
                )
            text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        else:
            token_ids = prompt
        if token_ids is None:
            token_ids = self._encode(text or "", "prompt")
        if not token_ids:
            raise InvalidParameter("prompt", "a prompt has no tokens")
        return text, [int(token_id) for token_id in token_ids]

    def _run(self, requests: Sequence[Request]) -> Generator[tuple[int, Delta]]:
        """Yield (index of the request, delta) as they come.

        Ctrl-C takes effect between steps, so that the engine is never left in the middle of one;
        leaving early aborts what still runs.
        """
        if self._busy:
            raise RuntimeError("an LLM does one call at a time; give all prompts to one generate()")
        self._busy = True
        index = {request.request_id: number for number, request in enumerate(requests)}
        waiting = list(reversed(requests))
        running: set[str] = set()
        with _ctrl_c() as interrupted:
            try:
                while waiting or running:
                    while waiting and self._admit(waiting[-1], running):
                        waiting.pop()
                    for delta in self._engine.step():
                        if delta.record is not None:
                            running.discard(delta.request_id)
                        yield index[delta.request_id], delta
                    if interrupted():
                        raise KeyboardInterrupt
            finally:
                for request_id in running:
                    self._engine.abort(request_id)
                while self._engine.has_work():
                    self._engine.step()  # delivers the aborted requests' last deltas
                self._busy = False

    def _admit(self, request: Request, running: set[str]) -> bool:
        try:
            self._engine.add_request(request)
        except AdmissionError as error:
            if error.retryable and running:  # the queue is full: run what is in it first
                return False
            raise
        running.add(request.request_id)
        return True

    def _absorb(self, output: RequestOutput, delta: Delta) -> None:
        choice = output.outputs[delta.choice]
        choice.text += delta.text
        choice.token_ids += delta.token_ids
        if delta.logprobs is not None:
            choice.logprobs = (choice.logprobs or []) + [
                self._named(entry) for entry in delta.logprobs
            ]
            choice.cumulative_logprob = (choice.cumulative_logprob or 0.0) + sum(
                entry.logprob for entry in delta.logprobs
            )
        if delta.prompt_logprobs is not None:
            output.prompt_logprobs = [
                entry and self._named(entry) for entry in delta.prompt_logprobs
            ]
        if delta.finish_reason is not None:
            choice.finish_reason = delta.finish_reason.value
            choice.stop_reason = delta.stop_reason
        if delta.record is not None:
            output.finished = True
            output.metrics = delta.record
            output.num_cached_tokens = delta.record.cached_tokens

    def _named(self, entry: TokenLogprobs) -> dict[int, Logprob]:
        name = self._tokenizer.token_text
        chosen = {entry.token_id: Logprob(entry.logprob, entry.rank, name(entry.token_id))}
        return chosen | {
            token_id: Logprob(logprob, rank, name(token_id))
            for rank, (token_id, logprob) in enumerate(entry.top, 1)
        }


def _prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return the prompts as a list. A list of integers is one prompt of token ids."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if prompts and all(isinstance(item, int) for item in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


@contextmanager
def _ctrl_c() -> Iterator[Callable[[], bool]]:
    """Note Ctrl-C instead of raising in the middle of a step. The second one raises at once.

    Outside the main thread Python delivers no signals, and nothing is noted.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    pressed = False

    def note(number: int, frame: object) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    previous = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, previous)


@contextmanager
def _bar(total: int, shown: bool) -> Iterator[Callable[[Delta], None]]:
    """Show progress in requests and tokens per second, on standard error."""
    if not shown:
        yield lambda delta: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[speed]}"),
    )
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("prompts", total=total, speed="")
        start = time.monotonic()
        read = written = 0

        def report(delta: Delta) -> None:
            nonlocal read, written
            written += len(delta.token_ids)
            if delta.record is not None:
                read += delta.record.prompt_tokens
            seconds = time.monotonic() - start
            bar.update(
                task,
                advance=delta.record is not None,
                speed=f"in {read / seconds:.0f} tok/s, out {written / seconds:.0f} tok/s",
            )

        yield report
