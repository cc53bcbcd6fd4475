"""Names that people give to models: those of presets, which are shapes, and where their weights
are.
"""

from __future__ import annotations

# Preset -> its repository on Hugging Face, of the instruct model where there is one.
HUB_IDS = {
    "llama-2-7b": "meta-llama/Llama-2-7b-chat-hf",
    "llama-2-13b": "meta-llama/Llama-2-13b-chat-hf",
    "llama-2-70b": "meta-llama/Llama-2-70b-chat-hf",
    "llama-3-8b": "meta-llama/Meta-Llama-3-8B-Instruct",
    "llama-3-70b": "meta-llama/Meta-Llama-3-70B-Instruct",
    "llama-3.1-8b": "meta-llama/Llama-3.1-8B-Instruct",
    "llama-3.1-70b": "meta-llama/Llama-3.1-70B-Instruct",
    "llama-3.1-405b": "meta-llama/Llama-3.1-405B-Instruct",
    "llama-3.2-1b": "meta-llama/Llama-3.2-1B-Instruct",
    "llama-3.2-3b": "meta-llama/Llama-3.2-3B-Instruct",
    "llama-3.3-70b": "meta-llama/Llama-3.3-70B-Instruct",
    "smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "smollm2-360m": "HuggingFaceTB/SmolLM2-360M-Instruct",
    "smollm2-1.7b": "HuggingFaceTB/SmolLM2-1.7B-Instruct",
    "smollm3-3b": "HuggingFaceTB/SmolLM3-3B",
    "mistral-7b-v0.1": "mistralai/Mistral-7B-Instruct-v0.1",
    "mistral-7b-v0.3": "mistralai/Mistral-7B-Instruct-v0.3",
    "mistral-nemo-12b": "mistralai/Mistral-Nemo-Instruct-2407",
    "mistral-small-24b": "mistralai/Mistral-Small-24B-Instruct-2501",
    "mistral-small-3.2-24b": "mistralai/Mistral-Small-3.2-24B-Instruct-2506",
    "ministral-3-3b": "mistralai/Ministral-3-3B-Instruct-2512",
    "ministral-3-8b": "mistralai/Ministral-3-8B-Instruct-2512",
    "ministral-3-14b": "mistralai/Ministral-3-14B-Instruct-2512",
    "mixtral-8x7b": "mistralai/Mixtral-8x7B-Instruct-v0.1",
    "mixtral-8x22b": "mistralai/Mixtral-8x22B-Instruct-v0.1",
    "qwen2.5-0.5b": "Qwen/Qwen2.5-0.5B-Instruct",
    "qwen2.5-1.5b": "Qwen/Qwen2.5-1.5B-Instruct",
    "qwen2.5-3b": "Qwen/Qwen2.5-3B-Instruct",
    "qwen2.5-7b": "Qwen/Qwen2.5-7B-Instruct",
    "qwen2.5-14b": "Qwen/Qwen2.5-14B-Instruct",
    "qwen2.5-32b": "Qwen/Qwen2.5-32B-Instruct",
    "qwen2.5-72b": "Qwen/Qwen2.5-72B-Instruct",
    "qwen3-0.6b": "Qwen/Qwen3-0.6B",
    "qwen3-1.7b": "Qwen/Qwen3-1.7B",
    "qwen3-4b": "Qwen/Qwen3-4B",
    "qwen3-8b": "Qwen/Qwen3-8B",
    "qwen3-14b": "Qwen/Qwen3-14B",
    "qwen3-32b": "Qwen/Qwen3-32B",
    "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B",
    "qwen3-235b-a22b": "Qwen/Qwen3-235B-A22B",
    "qwen3.5-0.8b": "Qwen/Qwen3.5-0.8B",
    "qwen3.5-4b": "Qwen/Qwen3.5-4B",
    "qwen3.5-9b": "Qwen/Qwen3.5-9B",
    "qwen3.5-27b": "Qwen/Qwen3.5-27B",
    "qwen3.5-35b-a3b": "Qwen/Qwen3.5-35B-A3B",
    "qwen3-next-80b-a3b": "Qwen/Qwen3-Next-80B-A3B-Instruct",
    "gemma-2-2b": "google/gemma-2-2b-it",
    "gemma-2-9b": "google/gemma-2-9b-it",
    "gemma-2-27b": "google/gemma-2-27b-it",
    "gemma-3-270m": "google/gemma-3-270m-it",
    "gemma-3-1b": "google/gemma-3-1b-it",
    "gemma-4-e2b": "google/gemma-4-E2B-it",
    "gemma-4-e4b": "google/gemma-4-E4B-it",
    "gemma-4-12b": "google/gemma-4-12B-it",
    "gemma-4-26b-a4b": "google/gemma-4-26B-A4B-it",
    "gemma-4-31b": "google/gemma-4-31B-it",
    "gpt-oss-20b": "openai/gpt-oss-20b",
    "gpt-oss-120b": "openai/gpt-oss-120b",
    "phi-3-mini": "microsoft/Phi-3-mini-4k-instruct",
    "phi-3-medium": "microsoft/Phi-3-medium-4k-instruct",
    "phi-4": "microsoft/phi-4",
    "phi-4-mini": "microsoft/Phi-4-mini-instruct",
    "granite-3.3-2b": "ibm-granite/granite-3.3-2b-instruct",
    "granite-3.3-8b": "ibm-granite/granite-3.3-8b-instruct",
    "granite-4.0-h-micro": "ibm-granite/granite-4.0-h-micro",
    "granite-4.0-h-tiny": "ibm-granite/granite-4.0-h-tiny",
    "granite-4.0-h-small": "ibm-granite/granite-4.0-h-small",
    "olmo-2-7b": "allenai/OLMo-2-1124-7B-Instruct",
    "olmo-2-13b": "allenai/OLMo-2-1124-13B-Instruct",
    "olmo-2-32b": "allenai/OLMo-2-0325-32B-Instruct",
    "olmo-3-7b": "allenai/Olmo-3-7B-Instruct",
    "olmo-3-32b": "allenai/Olmo-3-32B-Think",
    "command-r7b": "CohereLabs/c4ai-command-r7b-12-2024",
    "lfm2-350m": "LiquidAI/LFM2-350M",
    "lfm2-700m": "LiquidAI/LFM2-700M",
    "lfm2-1.2b": "LiquidAI/LFM2-1.2B",
    "lfm2-2.6b": "LiquidAI/LFM2-2.6B",
    "lfm2-8b-a1b": "LiquidAI/LFM2-8B-A1B",
    "deepseek-v2-lite": "deepseek-ai/DeepSeek-V2-Lite-Chat",
    "deepseek-v3": "deepseek-ai/DeepSeek-V3",
    "kimi-k2": "moonshotai/Kimi-K2-Instruct",
    "mistral-small-4": "mistralai/Mistral-Small-4-119B-2603",
    "glm-4.7-flash": "zai-org/GLM-4.7-Flash",
}

_ENDINGS = ("-hf", "-chat", "-instruct", "-it", "-base")


def preset(name: str) -> str | None:
    """The preset that a name means: case, separators, and endings such as -instruct, -chat, -it,
    -base and -hf do not matter. None: no preset.
    """
    plain = name.lower().replace("_", "-").replace(" ", "-")
    for ending in _ENDINGS:
        plain = plain.removesuffix(ending)
    return _PLAIN.get(bare(plain))


def bare(name: str) -> str:
    """Without case and separators, which people do not remember."""
    return name.lower().replace("-", "").replace("_", "").replace(" ", "")


_PLAIN = {bare(name): name for name in HUB_IDS}
