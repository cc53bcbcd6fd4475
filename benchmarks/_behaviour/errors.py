"""What Python calls raise for what cannot be honoured: the error's name, text and parameter."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from _behaviour import models

_PARAMETERS: dict[str, list[Any]] = {
    "n": [0, 129, 1.5, True, "2"],
    "max_tokens": [0, -1, 2**31, 1.0, "x"],
    "min_tokens": [-1, 17, 2.0],
    "temperature": [-0.1, 101, math.nan, math.inf, "hot", True],
    "top_k": [-2, 1.5, "x"],
    "top_p": [0, -1, 1.1, math.nan],
    "min_p": [-0.1, 1.1],
    "presence_penalty": [-2.1, 2.1],
    "frequency_penalty": [-2.1, 2.1],
    "repetition_penalty": [0, 0.001, 101],
    "logit_bias": [{-1: 1.0}, {10**9: 1.0}, {1: 101.0}, {1: math.nan}, {"a": 1}, [1]],
    "allowed_token_ids": [(), (-1,), (10**9,), 7],
    "banned_token_ids": [(-1,), (10**9,), tuple(range(300))],
    "seed": [2**63, -(2**63) - 1, 1.5],
    "stop": [("",), ("x" * 257,), ("a",) * 33, (1,)],
    "stop_token_ids": [(-1,), (10**9,)],
    "include_stop_str_in_output": [1, "yes"],
    "ignore_eos": [0],
    "logprobs": [-1, 21, True],
    "prompt_logprobs": [-1, 21],
    "skip_special_tokens": [None],
    "no_such_parameter": [1],
}
_SETTINGS: dict[str, list[Any]] = {
    "max_model_len": [1, 10**9],
    "max_num_seqs": [0, 10**9],
    "max_num_batched_tokens": [0],
    "itl_target": [0, -1.0, math.inf],
    "scheduling_policy": ["", "lifo"],
    "priority_ageing": [-1.0, 0, 5.0],
    "fair_output_cost": [-1.0, 2.0],
    "best_effort_deadline": [-1.0, 5.0],
    "max_queue_time": [0, -1.0],
    "shed_late": [True],
    "block_size": [0, 8, 24],
    "kv_cache_memory_bytes": [0, 1, 1 << 50],
    "memory_utilization": [0, 1.5],
    "kv_cache_dtype": ["fp8", "", "int2"],
    "max_logprobs": [-1],
    "threads": [0],
    "isa": ["neon"],
    "quantization": ["int3", "fp8"],
    "kv_offload_memory": [0, 1 << 50],
    "kv_offload_disk": [0, 1 << 20],
    "kv_offload_dir": ["/proc/none"],
    "no_such_setting": [1],
    "speculative_config": [
        {},
        {"method": "telepathy"},
        {"method": 3},
        {"method": "ngram", "model": "x"},
        {"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 2},
        {"method": "ngram", "prompt_lookup_max": 16},
        {"method": "ngram", "num_speculative_tokens": 65},
        {"method": "ngram", "acceptance_method": "hope"},
        {"method": "suffix", "suffix_decoding_alternatives": 5},
        {"method": "suffix", "layers": [1]},
        {"method": "medusa"},
        {"method": "medusa", "model": "none/such"},
        {"method": "medusa", "model": "smollm2-heads"},
        {"method": "layer_skip"},
        {"method": "layer_skip", "layers": []},
        {"method": "layer_skip", "layers": [0, 7]},
        {"method": "draft_model"},
        {"model": "/none/such.gguf"},
        {"method": "none_such:Class"},
        {"method": "ngram", "typo": 1},
        "not JSON",
        7,
    ],
}
_TOGETHER: list[dict[str, Any]] = [
    {"kv_offload_memory": 1 << 20, "enable_prefix_caching": False},
    {"speculative_config": {"method": "ngram"}, "max_num_batched_tokens": 1},
    {"kv_cache_memory_bytes": 4096, "max_model_len": 256},
    {"quantization": "int8"},
]


def record(folder: Path, share: float) -> dict[str, Any]:
    found = {}
    for name, call in models.first(_cases(folder), share):
        try:
            call()
            found[name] = "is taken"
        except Exception as error:
            found[name] = told(error, folder)
    return found


def _cases(folder: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    from octavo import LLM, EngineConfig, SamplingParams, load_engine

    tiny = models.make("tiny-llama.gguf", folder)
    llm = LLM(tiny, kv_cache_memory_bytes=1 << 20)

    def asked(prompts: Any = ((1, 2, 3),), **given: Any) -> object:
        return llm.generate([*map(_listed, prompts)], SamplingParams(**given), use_tqdm=False)

    def loading(**given: Any) -> None:
        LLM(tiny, **{"kv_cache_memory_bytes": 1 << 20, "max_model_len": 64, **given}).close()

    for name, values in _PARAMETERS.items():
        for value in values:
            yield f"{name}={value!r}"[:80], lambda n=name, v=value: asked(**{n: v})
    yield "allowed and banned", lambda: asked(allowed_token_ids=(3,), banned_token_ids=(3,))
    yield "no prompt", lambda: asked([""])
    yield "no tokens", lambda: asked([[]])
    yield "an id beyond", lambda: asked([[10**6]])
    yield "a negative id", lambda: asked([[-1]])
    yield "too long", lambda: asked([[5] * 400])
    yield "too long with its answer", lambda: asked([[5] * 200], max_tokens=200)
    yield "no Unicode", lambda: asked(["\ud800"])
    yield "an unknown key", lambda: asked([{"prompt": "a", "images": []}])
    yield "two for three", lambda: llm.generate([[1], [2], [3]], [SamplingParams()] * 2)
    yield "no chat template", lambda: llm.chat([{"role": "user", "content": "hi"}])
    for name, values in _SETTINGS.items():
        for value in values:
            key = f"engine {name}={value!r}"
            yield key, lambda n=name, v=value: EngineConfig(**{n: v})
            yield f"{key}, loading", lambda n=name, v=value: loading(**{n: v})
    for given in _TOGETHER:
        yield f"engine {given}", lambda g=given: loading(**g)
    yield "no such file", lambda: load_engine("/none/such.gguf")
    yield "no such name", lambda: load_engine("no-such-model")
    yield "a folder without a model", lambda: load_engine(str(folder))
    broken = folder / "broken.gguf"
    content = Path(tiny).read_bytes()
    for name, cut in (("cut short", content[: len(content) // 2]), ("no GGUF", b"x" * 500)):
        yield name, lambda c=cut: (broken.write_bytes(c), load_engine(str(broken)))
    yield "loaded twice", lambda: LLM(load_engine(tiny), max_num_seqs=3)
    llm.close()


def _listed(prompt: Any) -> Any:
    return [*prompt] if isinstance(prompt, tuple) else prompt


def told(error: Exception, folder: Path) -> str:
    """Return name, parameter and text of an error without what is different at each start."""
    param = getattr(error, "param", None)
    of = "" if param is None else f" [{param}]"
    # What is free, and so what fits.
    text = re.sub(r"[\d.,]+ (?=[KMGT]iB)", "… ", str(error))
    return models.without_paths(f"{type(error).__name__}{of}: {text}", folder)
