"""One benchmark from its settings to its result."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import msgspec

from octavo.tools.bench.load import speculation
from octavo.tools.bench.load.client import Client, Endpoint
from octavo.tools.bench.load.load_generator import BUSY, LATE, LATE_SHARE, LoadGenerator, Run
from octavo.tools.bench.load.load_report import DEFINITIONS, Progress
from octavo.tools.bench.load.streamed_answer import StreamedAnswer, error_message
from octavo.tools.bench.load.vocabulary import (
    COMMON,
    FEWEST_WORDS,
    NO_TOKENS,
    Ids,
    LocalTokenizer,
    ServerTokenizer,
    Tokens,
    Vocabulary,
    Words,
)
from octavo.tools.workload.datasets import Sample
from octavo.tools.workload.demand import DEFAULT_PROMPTS, TEXTS, Demand
from octavo.tools.workload.metrics import PER_REQUEST, Record, summarise

ENDPOINTS = {
    "openai": "/v1/completions",
    "vllm": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
}
SECONDS = 60.0  # that a load takes at most, where nobody says how many requests
FEWEST = 8
_REFUSALS = (400, 401, 403, 404, 422)
_WHOSE_KEY = "the key is what OPENAI_API_KEY says, or --header Authorization='Bearer KEY'"


class LoadError(Exception):
    """The benchmark cannot begin, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(Demand):
    """Fields are the command's options; times in seconds, goodput in ms."""

    backend: str = "openai"
    base_url: str = "http://127.0.0.1:8000"
    endpoint: str | None = None  # None: the backend's
    headers: Mapping[str, str] = field(default_factory=dict)
    insecure: bool = False
    model: str | None = None  # None: the first that the server lists
    served_model_name: str | None = None
    tokenizer: str | None = None  # None: the server's
    prompt_format: Literal["auto", "ids", "text"] = "auto"

    num_warmups: int = 0
    ready_check_timeout_sec: float = 0.0
    request_timeout_sec: float = 6 * 3600.0

    ignore_eos: bool | None = None  # None: on for random prompts and traces
    sampling: Mapping[str, Any] = field(default_factory=dict)  # what is not None is sent
    extra_body: Mapping[str, Any] = field(default_factory=dict)

    metrics: tuple[str, ...] = ("ttft", "tpot", "itl")
    percentiles: tuple[float, ...] = (99.0,)
    goodput: Mapping[str, float] = field(default_factory=dict)
    label: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    save_detailed: bool = False
    progress: bool = True

    def check(self) -> None:
        """Raises `ValueError` for what does not go together."""
        if self.backend not in ENDPOINTS:
            raise ValueError(
                f"--backend {self.backend!r} is none of {', '.join(ENDPOINTS)} (openai speaks to "
                "any server with /v1/completions, llama.cpp's and TGI's too)"
            )
        Demand.check(self)
        if self.dataset_name == "sharegpt" and self.tokenizer is None:
            raise ValueError("--dataset-name sharegpt needs --tokenizer")
        if self.prompt_format == "ids" and self.chat:
            raise ValueError("--prompt-format ids: a chat endpoint takes text only")
        if self.chat and self.sampling.get("logprobs") is not None:
            raise ValueError(
                "--logprobs is of completions; for chat: "
                """--extra-body '{"logprobs": true, "top_logprobs": 2}'"""
            )

    @property
    def chat(self) -> bool:
        return self.backend == "openai-chat"

    @property
    def url(self) -> str:
        """Clients of OpenAI's API write /v1 into the base URL, those of vLLM into the endpoint."""
        return self.base_url.rstrip("/").removesuffix("/v1")


async def benchmark(settings: Settings) -> dict[str, Any]:
    """Run it; returns the result, with the fields for each request. Raises `LoadError`."""
    client = Client(Endpoint.of(settings.url), settings.headers, insecure=settings.insecure)
    try:
        return await _Benchmark(settings, client).run()
    finally:
        await client.close()


def fitting(alone: float, rate: float) -> tuple[int, str]:
    """The number of requests of a run, and the reason: what the server answers in a minute one by
    one, at ``alone`` seconds each, and at most a minute's arrivals at ``rate`` a second.
    """
    bounds = {
        "what this server answers in a minute one by one, by the time of one": SECONDS
        / max(alone, 1e-3),
        "what comes in a minute": SECONDS * rate,
        "the most that are sent unasked": DEFAULT_PROMPTS,
    }
    why = min(bounds, key=lambda each: bounds[each])
    number = math.floor(bounds[why])
    return (number, why) if number >= FEWEST else (FEWEST, "the fewest that are sent unasked")


class _Benchmark:
    def __init__(self, settings: Settings, client: Client) -> None:
        self._settings = settings
        self._client = client
        self._notices: list[str] = []
        self._path = settings.endpoint or ENDPOINTS[settings.backend]
        if not self._path.startswith("/"):
            self._path = f"/{self._path}"
        ignore_eos = settings.ignore_eos
        if ignore_eos is None:
            ignore_eos = settings.dataset_name == "random" or settings.is_trace
        self._common: dict[str, Any] = {
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"ignore_eos": True} if ignore_eos else {}),
            **{name: value for name, value in settings.sampling.items() if value is not None},
            **settings.extra_body,
        }

    async def run(self) -> dict[str, Any]:
        settings = self._settings
        self._model_id, self._model_name = await self._model()
        try:
            tokens = await self._tokens()
            samples, notices = settings.samples(tokens.count)
        except ValueError as error:
            raise LoadError(str(error)) from None
        vocabulary = await self._vocabulary(tokens)

        def request(sample: Sample) -> bytes:
            prompt = vocabulary.prompt(sample, settings.seed)
            return self._request(prompt, sample.output_len)

        try:
            if settings.num_prompts is None and not settings.is_trace:
                number = await self._fitting(request(samples[-1]))
                samples, notices = replace(settings, num_prompts=number).samples(tokens.count)
            arrivals = settings.arrivals(samples)
        except ValueError as error:
            raise LoadError(str(error)) from None
        self._notices += notices
        progress = Progress(len(samples), enabled=settings.progress)
        load = LoadGenerator(
            self._client,
            samples,
            arrivals,
            request,
            max_concurrency=settings.max_concurrency,
            timeout=settings.request_timeout_sec,
            keep_text=settings.save_detailed,
            progress=progress,
        )
        if settings.num_warmups:
            answers = await load.warm(settings.num_warmups)
            if failed := [answer for answer in answers if not answer.success]:
                self._notices.append(
                    f"{len(failed)} of {len(answers)} warmups failed: "
                    f"{failed[0].reason}: {failed[0].detail}"
                )
        date = datetime.now()
        before = await self._speculation()
        run = await load.run()
        progress.close(run)
        self._judge(run, samples)
        result = self._result(run, samples, tokens.name, date)
        return result | speculation.fields(before, await self._speculation())

    async def _fitting(self, request: bytes) -> int:
        """How many requests to send where nobody says: see `fitting`."""
        answer = StreamedAnswer()
        answer.start = time.perf_counter()
        await self._client.exchange(request, answer, self._settings.request_timeout_sec)
        alone = answer.latency if answer.success else math.inf
        number, why = fitting(alone, self._settings.request_rate)
        self._notices.append(f"{number} requests: {why}; --num-prompts says another number")
        return number

    async def _speculation(self) -> speculation.Counts:
        """What the server's metrics say of it so far: nothing where it has none."""
        answer = await self._client.get("GET", "/metrics")
        if answer.reason or answer.status != 200:
            return {}
        return speculation.counts(answer.content.decode(errors="replace"))

    # --- what is asked -------------------------------------------------------------------------

    async def _model(self) -> tuple[str, str]:
        """(the model, its name in the API)."""
        settings = self._settings
        deadline = time.perf_counter() + settings.ready_check_timeout_sec
        while True:
            answer = await self._client.get("GET", "/v1/models")
            ready = not answer.reason and answer.status not in (502, 503, 504)
            left = deadline - time.perf_counter()
            if ready or left <= 0:
                break
            await asyncio.sleep(min(1.0, left))
        where = settings.url
        if answer.reason:
            nobody = answer.reason == "connection refused"
            detail = "(octavo serve MODEL starts a server)" if nobody else answer.detail
            raise LoadError(f"{where}: {answer.reason} {detail}".rstrip())
        if not ready and settings.ready_check_timeout_sec > 0:
            raise LoadError(
                f"{where}: not ready within {settings.ready_check_timeout_sec:g} s: "
                f"HTTP {answer.status} {error_message(answer.content)}"
            )
        # Some keys may ask a model, but not for the list.
        forbidden = answer.status in (401, 403)
        if forbidden and settings.model is None:
            said = f"HTTP {answer.status} {error_message(answer.content)}"
            raise LoadError(
                f"{where}/v1/models: {said}: {_WHOSE_KEY}; one that may not list the models needs "
                "--model"
            )
        try:
            if answer.status != 200:
                raise ValueError(f"HTTP {answer.status} {error_message(answer.content)}")
            listed = [model["id"] for model in msgspec.json.decode(answer.content)["data"]]
            if not listed:
                raise ValueError("the list is empty")
            if not all(isinstance(name, str) for name in listed):
                raise ValueError("a model without an id")
        except (msgspec.MsgspecError, ValueError, LookupError, TypeError) as error:
            if settings.model is None:
                raise LoadError(
                    f"{where}/v1/models does not say which model there is ({error}): give --model"
                ) from None
            listed = []
        model = listed[0] if settings.model is None else settings.model
        name = settings.served_model_name or model
        if (forbidden or (listed and name not in listed)) and (
            refusal := await self._refuses(name)
        ):
            if not listed:
                raise LoadError(f"{where}: {refusal}: {_WHOSE_KEY}")
            flag = "--model" if settings.served_model_name is None else "--served-model-name"
            raise LoadError(
                f"{where} does not serve {flag} {name}, but {', '.join(listed[:8])}"
                f"{', …' if len(listed) > 8 else ''} ({refusal})"
            )
        return model, name

    async def _refuses(self, name: str) -> str:
        """What the server says to a token asked of a model that it does not list, if it does not
        answer: some take any name.
        """
        return await self._refusal({"model": name, **self._asked("a", 1)}, _REFUSALS)

    async def _tokens(self) -> Tokens:
        """The tokenizer that was given, else the server's, else none."""
        settings = self._settings
        if settings.tokenizer is not None:
            return _local_tokenizer(settings.tokenizer).tokens(settings.tokenizer)
        if settings.dataset_name in TEXTS:
            return NO_TOKENS  # the texts are there, and the server counts them
        try:
            return await ServerTokenizer(self._client, "/tokenize", self._model_name).tokens()
        except OSError as error:
            raise LoadError(f"{settings.url}{error}") from None
        except ValueError as error:
            if settings.prompt_format == "ids":
                raise LoadError(f"--prompt-format ids: {error}; give --tokenizer") from None
            self._notices.append(f"{error} and there is no --tokenizer")
            return NO_TOKENS

    async def _vocabulary(self, tokens: Tokens) -> Vocabulary:
        """Token ids where they can be sent, else words."""
        settings = self._settings
        if settings.dataset_name in TEXTS:
            return Words(COMMON)
        if tokens.ids and not settings.chat and settings.prompt_format != "text":
            refusal = ""
            if settings.prompt_format == "auto":
                refusal = await self._refuses_ids(tokens.ids[-4:])
            if not refusal:
                return Ids(tokens.ids)
            self._notices.append(f"prompts are text: the server takes no token ids ({refusal})")
        words = tokens.words()
        if len(words) < FEWEST_WORDS:
            self._notices.append("prompts are common words: their lengths are about what was asked")
            words = COMMON
        return Words(words, tokens.special)

    async def _refuses_ids(self, ids: Sequence[int]) -> str:
        """What the server says to a prompt of a few token ids, if it does not take it."""
        body = self._body(list(ids), 1) | {"stream": False}
        body.pop("stream_options", None)
        return await self._refusal(body, (400, 415, 422))

    async def _refusal(self, body: dict[str, Any], statuses: Sequence[int]) -> str:
        answer = await self._client.get(
            "POST", self._path, msgspec.json.encode(body), self._settings.request_timeout_sec
        )
        if answer.reason or answer.status not in statuses:
            return ""
        return f"HTTP {answer.status}: {error_message(answer.content)}"

    def _asked(self, prompt: list[int] | str, output_len: int) -> dict[str, Any]:
        if self._settings.chat:
            messages = [{"role": "user", "content": prompt}]
            return {"messages": messages, "max_completion_tokens": output_len}
        return {"prompt": prompt, "max_tokens": output_len}

    def _body(self, prompt: list[int] | str, output_len: int) -> dict[str, Any]:
        return {"model": self._model_name, **self._asked(prompt, output_len), **self._common}

    def _request(self, prompt: list[int] | str, output_len: int) -> bytes:
        body = msgspec.json.encode(self._body(prompt, output_len))
        return self._client.request("POST", self._path, body)

    # --- what came of it -----------------------------------------------------------------------

    def _judge(self, run: Run, samples: list[Sample]) -> None:
        """Notices of whatever makes the figures other than they seem."""
        settings, notices = self._settings, self._notices
        late = run.lateness_ms
        own_clock = settings.is_trace or settings.ramp is not None
        if late["late_share"] > LATE_SHARE and (own_clock or not math.isinf(settings.request_rate)):
            notices.append(
                f"{late['late_share']:.1%} of the requests left more than {LATE * 1000:.0f} ms "
                "after their time: the load was not what was asked for"
            )
        if run.cpu > BUSY:
            notices.append(
                f"the load generator used {run.cpu:.0%} of a core: latencies contain its own delay"
            )
        if run.uncounted:
            notices.append(
                f"{run.uncounted} answers came without usage: their output tokens are events "
                "counted, their input tokens what was asked"
            )
        done = [record for record in run.records if record.success]
        asked = sum(samples[record.index].prompt_len for record in done)
        counted = sum(record.prompt_len for record in done)
        if asked != counted:
            notices.append(
                f"the server counted {counted} prompt tokens where {asked} were asked for"
                + (" (the chat template's are among them)" if settings.chat else "")
            )
        cached = sum(record.cached_tokens or 0 for record in done)
        if cached and settings.dataset_name == "random" and not settings.random_prefix_len:
            notices.append(
                f"{cached} of {counted} prompt tokens came from the server's cache: it has seen "
                "these prompts before (another --seed makes others)"
            )
        wanted = sum(samples[record.index].output_len for record in done)
        made = sum(record.output_tokens for record in done)
        if made < wanted:
            notices.append(f"answers ended early: {made} tokens of {wanted} asked for")
        if run.interrupted:
            notices.append(
                f"interrupted: {len(run.lateness)} of {len(samples)} requests had arrived"
            )

    def _result(
        self, run: Run, samples: list[Sample], tokenizer_id: str | None, date: datetime
    ) -> dict[str, Any]:
        settings = self._settings
        ramp = settings.ramp
        rate = settings.request_rate
        result: dict[str, Any] = {
            "date": date.strftime("%Y%m%d-%H%M%S"),
            "endpoint_type": settings.backend,
            "backend": settings.backend,
            "label": settings.label,
            "model_id": self._model_id,
            "tokenizer_id": tokenizer_id,
            "num_prompts": len(samples),
            **settings.metadata,
            "request_rate": "inf" if math.isinf(rate) else rate,
            "burstiness": settings.burstiness,
            "max_concurrency": settings.max_concurrency,
        }
        if ramp is not None:
            result["ramp_up_strategy"] = ramp.strategy
            result["ramp_up_start_rps"] = ramp.start
            result["ramp_up_end_rps"] = ramp.end
        result |= summarise(
            run.records,
            run.duration,
            goodput=settings.goodput,
            percentiles=settings.percentiles,
            metrics=settings.metrics,
        )
        result |= {
            "interrupted": run.interrupted,
            "unfinished": run.unfinished,
            "lateness": run.lateness_ms,
            "generator_cpu": run.cpu,
            "failures": reasons(record for record in run.records if not record.rejected),
            "rejections": reasons(record for record in run.records if record.rejected),
            "notices": self._notices,
            "definitions": DEFINITIONS,
        }
        return result


def reasons(records: Iterable[Record]) -> list[dict[str, Any]]:
    """Why they were not served, the most frequent first, each with its count and one example."""
    found: dict[str, dict[str, Any]] = {}
    for record in records:
        if not record.success:
            entry = found.setdefault(
                record.reason, {"reason": record.reason, "count": 0, "example": record.detail}
            )
            entry["count"] += 1
    return sorted(found.values(), key=lambda entry: -entry["count"])


def _local_tokenizer(name: str) -> LocalTokenizer:
    """A tokenizer.json, its folder, a model as `octavo serve` takes it, or a Hugging Face id."""
    path = Path(name).expanduser()
    if path.suffix == ".json" or (path / "tokenizer.json").exists():
        return LocalTokenizer(path)
    from octavo.loader import pull

    return LocalTokenizer(pull.resolve(name))


def without_requests(result: Mapping[str, Any]) -> dict[str, Any]:
    """The result less its fields for each request."""
    return {name: value for name, value in result.items() if name not in PER_REQUEST}


def file_name(settings: Settings, result: Mapping[str, Any]) -> str:
    """vLLM's, from what was run."""
    model = str(result["model_id"]).split("/")[-1]
    label = settings.label or settings.backend
    at_most = "" if settings.max_concurrency is None else f"-concurrency{settings.max_concurrency}"
    ramp = settings.ramp
    rate = (
        f"{settings.request_rate}qps"
        if ramp is None
        else f"ramp-up-{ramp.strategy}-{ramp.start:g}qps-{ramp.end:g}qps"
    )
    return f"{label}-{rate}{at_most}-{model}-{result['date']}.json"


def save(path: Path, result: Mapping[str, Any], *, append: bool) -> None:
    with path.open("a" if append else "w", encoding="utf-8") as file:
        if append and file.tell():
            file.write("\n")
        json.dump(result, file)
