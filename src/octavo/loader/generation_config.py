"""What a GGUF file says of sampling, as generation_config.json would say it."""

from __future__ import annotations

from typing import Any

from octavo.loader.gguf import GgufFile

# llama.cpp's keys behind ``general.sampling.``, and transformers' names.
_OF_GGUF = {
    "temp": ("temperature", float),
    "top_k": ("top_k", int),
    "top_p": ("top_p", float),
    "min_p": ("min_p", float),
    "penalty_repeat": ("repetition_penalty", float),
}


def of_gguf(file: GgufFile) -> dict[str, Any]:
    """The keys of a GGUF file under transformers' names."""
    found = {}
    for key, (name, kind) in _OF_GGUF.items():
        value = file.get(f"general.sampling.{key}", kind, None)
        if value is not None:
            found[name] = value
    return found
