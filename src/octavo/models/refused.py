"""Model families that Octavo knows by name and does not compute, and why."""

from __future__ import annotations

_LATENT = "its latent attention (one compressed key and value for all heads) is not computed"
_DEEPSEEK = f"DeepSeek V2 or V3, or a model of the same architecture: {_LATENT}"
# By ``model_type`` of config.json, or GGUF's architecture.
REFUSED = {
    **dict.fromkeys(
        ("gemma3n", "gemma3n_text"),
        "Gemma 3n: its four residual streams and sparse activations are not computed; use a Gemma "
        "4 of the E series in its place",
    ),
    **dict.fromkeys(
        ("cohere2_moe", "cohere2moe"),
        "Cohere 2 with experts: its averaging of shared experts is not computed; use Command R7B "
        "(cohere2) in its place",
    ),
    "mistral4": f"Mistral 4: {_LATENT}; use a Ministral 3 or Mistral Small 3 in its place",
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "deepseek2"), _DEEPSEEK),
    "glm4_moe_lite": f"GLM 4 Lite: {_LATENT}",
    "granitemoe_swa": "Granite with windows and experts: it is not computed",
}


def refusal(kind: str, name: str, supported: str) -> str:
    """Return why a model is refused, by the ``kind`` of its name, that name, and those that are
    supported.
    """
    why = f": {REFUSED[name]}" if name in REFUSED else f"; supported are {supported}"
    return f"{kind} {name!r} is not supported{why}"
