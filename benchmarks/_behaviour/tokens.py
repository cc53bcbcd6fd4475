"""Tokens, texts and log-probability bits of requests through `octavo.LLM`."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _behaviour import errors, models

Prompt = str | list[int]
GREEDY = {"temperature": 0, "logprobs": 3, "max_tokens": 12}
DRAWN = {"temperature": 0.9, "top_p": 0.95, "logprobs": 2, "max_tokens": 12}
FORKED = {"n": 3, "temperature": 1.0, "top_k": 40, "logprobs": 1, "max_tokens": 8}


@dataclass
class Group:
    """Requests of one engine. ``batches`` are generated one after the other."""

    name: str
    model: str
    batches: list[list[tuple[Prompt, dict[str, Any]]]]
    settings: dict[str, Any] = field(default_factory=dict)
    cached: bool = True  # record how much the prefix cache had, where timing does not decide it


def groups(folder: Path) -> Iterator[Group]:
    rng = random.Random(15)
    yield from _families(rng)
    yield from _engines(rng, folder)
    yield from _drafters(rng)
    yield from _sampling(rng)


def _ids(rng: random.Random, count: int) -> list[int]:
    """Return ids that every tiny vocabulary has, with repetitions for those who look them up."""
    half = [rng.randrange(4, 60) for _ in range((count + 1) // 2)]
    return (half + half)[:count]


def _text(rng: random.Random, characters: int) -> str:
    text = "\n".join(models.texts())
    begin = rng.randrange(len(text) - characters)
    return text[begin : begin + characters]


def _asked(
    rng: random.Random, kinds: list[dict[str, Any]], length: int, *, ids: bool = False
) -> list[tuple[Prompt, dict[str, Any]]]:
    """Return a request of each kind, with a seed where it draws."""
    return [
        (
            _ids(rng, length) if ids else _text(rng, length * 4),
            kind if kind.get("temperature") == 0 else {"seed": rng.randrange(1 << 40)} | kind,
        )
        for kind in kinds
    ]


def _families(rng: random.Random) -> Iterator[Group]:
    two = [GREEDY, DRAWN]
    for path in models.files():
        kinds = [*two, FORKED, {"prompt_logprobs": 2} | GREEDY]
        yield Group(f"file {path.stem}", path.name, [_asked(rng, kinds, 40, ids=True)])
    for name in models.families():
        kinds = [*two, {"prompt_logprobs": 1} | DRAWN]
        yield Group(f"folder {name}", f"folder:{name}", [_asked(rng, kinds, 48, ids=True)])
        yield Group(f"bfloat16 {name}", f"bf16:{name}", [_asked(rng, [GREEDY], 32, ids=True)])
    for name, label in models.converted():
        asked = _asked(rng, [GREEDY], 40, ids=True)
        yield Group(f"gguf {name} {label}", f"gguf:{name}:{label}", [asked])
    for name in models.quantized():
        yield Group(f"quantized {name}", f"quantized:{name}", [_asked(rng, two, 32, ids=True)])
    for name in ("qwen3", "gemma3"):
        for rounding in ("int8", "int4"):
            settings = {"quantization": rounding}
            asked = _asked(rng, two, 32, ids=True)
            yield Group(f"{rounding} {name}", f"folder:{name}", [asked], settings)


def _engines(rng: random.Random, folder: Path) -> Iterator[Group]:
    three = [GREEDY, DRAWN, {"prompt_logprobs": 1} | GREEDY]
    for model in models.REAL:
        for dtype in ("auto", "bf16", "fp16", "int8", "int4"):
            settings = {"kv_cache_dtype": dtype}
            yield Group(f"kv {dtype} {model}", model, [_asked(rng, three, 60)], settings)
    for isa in ("generic", "avx2", "avx512", "avx512_bf16"):
        yield Group(f"isa {isa}", "smollm2", [_asked(rng, [GREEDY, DRAWN], 24)], {"isa": isa})
        asked = _asked(rng, [GREEDY], 24, ids=True)
        yield Group(f"isa {isa} k-quants", "tiny-llama-k.gguf", [asked], {"isa": isa})
    yield Group("one thread", "smollm2", [_asked(rng, three, 40)], {"threads": 1})
    long = [{**GREEDY, "max_tokens": 24}, {**DRAWN, "max_tokens": 24}]
    yield Group("past the window", "gemma3-270m", [_asked(rng, long, 620)], {"max_model_len": 1024})

    shared = _text(rng, 500)
    again = [(shared + _text(rng, 60), {**GREEDY, "max_tokens": 8}) for _ in range(6)]
    batches = [again[:2], again[2:4], again[4:]]
    for on in (True, False):
        settings = {"enable_prefix_caching": on}
        yield Group(f"prefix cache {'on' if on else 'off'}", "smollm2", batches, settings)
    tight = {"kv_cache_memory_bytes": 12 << 20, "max_model_len": 512}
    yield Group("host memory", "smollm2", batches, tight | {"kv_offload_memory": 32 << 20}, False)
    disk = {"kv_offload_dir": str(folder / "tier"), "kv_offload_disk": 256 << 20}
    for turn in ("first", "again"):
        yield Group(f"disk, {turn}", "smollm2", batches, tight | disk, False)

    many = [{**GREEDY, "max_tokens": 20}, {**DRAWN, "max_tokens": 20}, {**FORKED, "max_tokens": 16}]
    for budget in (16, 48, 2048):
        settings = {"max_num_batched_tokens": budget, "max_num_seqs": min(budget, 64)}
        yield Group(f"steps of {budget} tokens", "smollm2", [_asked(rng, many, 90)], settings)
    yield Group("steps of 5 ms", "smollm2", [_asked(rng, many, 90)], {"itl_target": 5.0})
    yield Group("preempted", "smollm2", [_asked(rng, many * 2, 60)], tight)
    yield Group("blocks of 32", "smollm2", [_asked(rng, many, 60)], {"block_size": 32})
    try:
        from octavo.scheduler.policies.config import POLICIES
    except ImportError:  # as in `Again`
        from octavo.schedule.policies.config import (  # type: ignore[import-not-found,no-redef]
            POLICIES,
        )
    for policy in POLICIES:
        settings = {"scheduling_policy": policy, "max_num_seqs": 6} | tight
        yield Group(f"policy {policy}", "smollm2", [_asked(rng, many * 2, 50)], settings)
    queue = {"max_num_queued_reqs": 1, "max_num_queued_tokens": 200, "max_num_seqs": 1}
    yield Group("a short queue", "smollm2", [_asked(rng, three, 30)], queue)
    unseeded = [(_text(rng, 80), DRAWN) for _ in range(3)]
    yield Group("seed of the engine", "smollm2", [unseeded], {"seed": 7})


class Again:
    """A drafter of a user's own, as docs/speculation.md shows one."""

    def __init__(self) -> None:
        self.last: dict[int, int] = {}

    def start(self, sequence: int, token_ids: Any, cache_salt: Any) -> None:
        self.last[sequence] = int(token_ids[-1])

    def extend(self, sequence: int, token_ids: Any) -> None:
        self.last[sequence] = int(token_ids[-1])

    def propose(self, sequences: Any, counts: Any) -> Any:
        try:
            from octavo.spec_decode.drafter import Draft
        except ImportError:  # the name before that
            from octavo.speculate.drafter import Draft  # type: ignore[import-not-found,no-redef]
        pairs = zip(sequences, counts, strict=True)
        return [Draft([self.last[sequence]] * count) for sequence, count in pairs]

    def end(self, sequence: int) -> None:
        del self.last[sequence]


def _drafters(rng: random.Random) -> Iterator[Group]:
    """Drafts have a fixed length where drawing depends on it: by rejection."""
    methods: dict[str, dict[str, Any]] = {
        "ngram": {"method": "ngram"},
        "ngram of 1 to 3": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3},
        "suffix": {"method": "suffix"},
        "suffix of answers": {"method": "suffix", "suffix_decoding_max_cached_requests": 8},
        "suffix, branches": {"method": "suffix", "suffix_decoding_alternatives": 2},
        "draft model": {"method": "draft_model", "model": "smollm2"},
        "medusa": {"method": "medusa", "model": "smollm2-heads"},
        "medusa alone": {"method": "medusa", "model": "smollm2-heads", "lookup": False},
        "layer skip": {"method": "layer_skip", "layers": [*range(8), *range(22, 30)]},
        "own class": {"method": f"{Again.__module__}:Again"},
    }
    repeated = "one two three four, one two three four, one two three"
    kinds = [GREEDY, DRAWN, {**FORKED, "n": 2}]
    for name, method in methods.items():
        asked = [*_asked(rng, kinds, 40), (repeated, {**GREEDY, "max_tokens": 24})]
        for acceptance in ("replay", "rejection"):
            config = method | {"acceptance_method": acceptance, "num_speculative_tokens": 3}
            settings = {"speculative_config": config, "max_model_len": 512}
            yield Group(f"{name} by {acceptance}", "smollm2", [asked], settings)
        if name in ("suffix", "draft model", "medusa"):
            settings = {"speculative_config": method, "max_model_len": 512}
            yield Group(f"{name}, any length", "smollm2", [asked], settings)
    for name in ("ngram", "suffix"):
        settings = {"speculative_config": {"method": name}}
        asked = [*_asked(rng, [GREEDY], 40), (repeated, {**DRAWN, "seed": 3})]
        yield Group(f"{name} gemma", "gemma3-270m", [asked], settings)
    tiny = {"method": "draft_model", "model": str(models.ORACLE / "tiny-llama.gguf")}
    settings = {"speculative_config": tiny}
    asked = _asked(rng, [GREEDY, DRAWN], 40, ids=True)
    yield Group("draft model tiny", "tiny-llama.gguf", [asked], settings)


def _sampling(rng: random.Random) -> Iterator[Group]:
    drawn = {"temperature": 1.0, "logprobs": 1, "max_tokens": 10}
    sweep: dict[str, list[Any]] = {
        "temperature": [1e-6, 0.2, 0.7, 1.5, 5.0, 100.0],
        "top_k": [-1, 1, 2, 10, 50, 1_000_000],
        "top_p": [0.01, 0.3, 0.8, 0.999],
        "min_p": [0.02, 0.2, 0.9, 1.0],
        "presence_penalty": [-2.0, 0.5, 2.0],
        "frequency_penalty": [-2.0, 0.5, 2.0],
        "repetition_penalty": [0.5, 1.1, 2.0],
        "logit_bias": [{260: 100.0}, {260: -100.0, 28: 3.5}],
        "allowed_token_ids": [(28, 30, 198, 260), (42,)],
        "banned_token_ids": [(260, 28, 30), (198,)],
        "seed": [0, -1, 2**63 - 1],
        "stop": [(" the",), (".", "\n"), ("zzz",)],
        "stop_token_ids": [(260, 28), (30,)],
        "min_tokens": [3, 10],
        "n": [1, 2, 5],
        "logprobs": [None, 0, 20],
        "prompt_logprobs": [0, 5],
        "max_tokens": [1, 17],
        "ignore_eos": [True],
        "skip_special_tokens": [False],
    }
    swept = []
    for name, values in sweep.items():
        for value in values:
            seed = {} if name == "seed" else {"seed": rng.randrange(1 << 30)}
            swept.append((_text(rng, 90), {**drawn, **seed, name: value}))
    together = [
        {"top_k": 30, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.2},
        {"presence_penalty": 1.0, "frequency_penalty": 0.7, "logit_bias": {198: 2.0}},
        {"stop": (" of",), "include_stop_str_in_output": True},
        {"stop": (" of",), "include_stop_str_in_output": True, "min_tokens": 6},
        {"temperature": 0, "repetition_penalty": 1.3, "prompt_logprobs": 2},
        {"n": 4, "stop": (" a", " the"), "top_p": 0.7},
        {"allowed_token_ids": tuple(range(200, 900)), "banned_token_ids": (260, 284), "top_k": 5},
    ]
    swept += [(_text(rng, 120), {**drawn, "seed": 11 + at, **p}) for at, p in enumerate(together)]
    spoken = ["", " ", "\n\n", "naïve café", "你好，世界", "🙂👩‍👩‍👧 emoji", "<|im_end|> spelled"]
    others = [(text, {**GREEDY, "max_tokens": 8}) for text in spoken[1:]]
    yield Group("sampling", "smollm2", [swept, others], {"max_num_seqs": 16})
    few = [(prompt, params) for prompt, params in swept if "allowed_token_ids" not in params]
    yield Group("sampling gemma", "gemma3-270m", [few[::5]], {"max_num_seqs": 8})


def record(folder: Path, share: float) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for group in models.first(groups(folder), share):
        try:
            found[group.name] = _answers(group, folder)
        except Exception as error:  # a refusal is a behaviour, too
            found[group.name] = errors.told(error, folder)
    if share == 1:
        found["calls"] = _calls(folder)
    return found


def _answers(group: Group, folder: Path) -> list[Any]:
    from octavo import LLM, SamplingParams

    settings = {"kv_cache_memory_bytes": 64 << 20, **group.settings}
    answers: list[Any] = []
    with LLM(models.make(group.model, folder), **settings) as llm:
        for batch in group.batches:
            prompts = [prompt for prompt, _ in batch]
            params = [SamplingParams(**given) for _, given in batch]
            outputs = llm.generate(prompts, params, use_tqdm=False)
            answers += [shown(output, cached=group.cached) for output in outputs]
    return answers


def shown(output: Any, *, cached: bool = True) -> dict[str, Any]:
    """Return a `RequestOutput` without its times, with floats as their bits in hexadecimal."""
    found: dict[str, Any] = {
        "prompt_token_ids": " ".join(map(str, output.prompt_token_ids)),
        "outputs": [
            {
                "text": each.text,
                "token_ids": " ".join(map(str, each.token_ids)),
                "logprobs": each.logprobs and [_logprobs(at) for at in each.logprobs],
                "sum": each.cumulative_logprob and float(each.cumulative_logprob).hex(),
                "finish": each.finish_reason,
                "stop": each.stop_reason,
            }
            for each in output.outputs
        ],
        "finished": output.finished,
    }
    if output.prompt_logprobs is not None:
        found["prompt_logprobs"] = [at and _logprobs(at) for at in output.prompt_logprobs]
    if cached:
        found["cached"] = output.num_cached_tokens
    return found


def _logprobs(at: Mapping[int, Any]) -> str:
    return ", ".join(
        f"{token_id} {each.decoded_token!r} #{each.rank} {float(each.logprob).hex()}"
        for token_id, each in at.items()
    )


def _calls(folder: Path) -> dict[str, Any]:
    """Record the other ways to ask: chats, streams, mappings, the model's own defaults."""
    from octavo import LLM, AsyncEngine, EngineConfig, SamplingParams, load_engine

    greedy = SamplingParams(temperature=0, max_tokens=12, logprobs=1)
    found: dict[str, Any] = {}
    question = {"role": "user", "content": "What is the capital of Japan?"}
    forging = {"role": "user", "content": "Say <|im_end|> and <|im_start|>."}
    system = {"role": "system", "content": "You are terse."}
    chats = [[question], [system, question], [forging], [system, forging]]
    with LLM("smollm2", kv_cache_memory_bytes=64 << 20, seed=5, max_model_len=1024) as llm:
        outputs = llm.chat(chats, greedy, use_tqdm=False)
        found["chat"] = [shown(output) for output in outputs]
        outputs = llm.chat(chats, greedy, use_tqdm=False, control_tokens_in_content=True)
        found["chat with control tokens"] = [shown(output) for output in outputs]
        found["chat prompt"] = llm.chat_prompt([system, question], add_generation_prompt=False)
        found["defaults"] = str(llm.get_default_sampling_params())
        outputs = llm.generate("Once upon", use_tqdm=False)
        found["without parameters"] = [shown(output) for output in outputs]
        prompts = [{"prompt": "The sea"}, {"prompt_token_ids": [504, 2988]}]
        found["mappings"] = [shown(each) for each in llm.generate(prompts, greedy, use_tqdm=False)]
        streamed = list(llm.stream(["One, two,", "Red, green,"], greedy))
        found["stream"] = [
            "".join(delta.text for which, delta in streamed if which == index) for index in (0, 1)
        ]
    with LLM(models.make("talking", folder), override_generation_config={"top_k": 3}) as llm:
        found["overridden defaults"] = str(llm.get_default_sampling_params())
    loaded = load_engine("smollm2", EngineConfig(kv_cache_memory_bytes=64 << 20))
    found["loaded"] = [loaded.max_model_len, loaded.num_blocks, loaded.capacity_tokens]
    with LLM(loaded) as llm:
        found["loaded before"] = [shown(*llm.generate("The sky is", greedy, use_tqdm=False))]
    found["async methods"] = sorted(n for n in dir(AsyncEngine) if not n.startswith("_"))
    return found
