"""Model families that Octavo knows by name and does not compute, and why."""

from __future__ import annotations

# Model types with latent attention, and GGUF's name for all of them (tools/plan/latent.py).
LATENT = frozenset(
    {"deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k2", "kimi_k25", "mistral4", "deepseek2"}
)
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
    **dict.fromkeys(sorted(LATENT), "latent attention is planned for only"),
    "granitemoe_swa": "Granite with windows and experts: it is not computed",
}


def refusal(kind: str, name: str, supported: str) -> str:
    """Return why a model is refused, by the ``kind`` of its name, that name, and those that are
    supported.
    """
    why = f": {REFUSED[name]}" if name in REFUSED else f"; supported are {supported}"
    return f"{kind} {name!r} is not supported{why}"
