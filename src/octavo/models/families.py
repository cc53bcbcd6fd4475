"""The model families: what the layers of each architecture are made of."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

from octavo.models.build import Builder
from octavo.models.config import ModelConfig
from octavo.models.program import Program


def decoder(
    c: ModelConfig,
    *,
    norm_before: bool = True,
    norm_after: bool = False,
    qk_norm: Literal["head", "row"] | None = None,
) -> Program:
    """Return the Program of a decoder: layers of attention and feed-forward, each half with a norm
    before it, or after it on its way into the residual stream, or both. ``qk_norm``: q and k are
    normalised head by head, or over their whole width.
    """
    b = Builder(c)
    b.embed()
    half_input = "h" if norm_before else "x"
    for layer in b.layers():
        if norm_before:
            b.norm("x", "attn_norm", "h")
        b.project_qkv(half_input)
        if qk_norm is not None:
            group = c.head_dim if qk_norm == "head" else 0
            b.norm("q", "attn_q_norm", "q", group)
            b.norm("k", "attn_k_norm", "k", group)
        b.attend(layer)
        if norm_after:
            b.norm("h", "post_attention_norm", "h")
        b.add()
        if norm_before:
            b.norm("x", "ffn_norm", "h")
        b.feed_forward(half_input, layer.experts)
        if norm_after:
            b.norm("h", "post_ffw_norm", "h")
        b.add()
    return b.head()


FAMILIES: dict[str, Callable[[ModelConfig], Program]] = {
    # Llama (Touvron et al., 2023): pre-norm decoder, RMS norm, grouped-query attention with rotary
    # positions, SwiGLU. So are Llama 2 and 3, SmolLM and Mistral (with a window).
    "llama": decoder,
    # Yang et al., 2024. Biases on q, k and v.
    "qwen2": decoder,
    # Yang et al., 2025.
    "qwen3": partial(decoder, qk_norm="head"),
    # Gemma Team, 2024. Embeddings scaled by sqrt(hidden), GeGLU, soft-caps on attention scores and
    # logits, and a sliding window on every other layer. The checkpoint's norm weights already
    # include Gemma's "+ 1".
    "gemma2": partial(decoder, norm_after=True),
    # Gemma Team, 2025; text only. No soft-caps, and five sliding-window layers for every global
    # one, each kind with its own rotary base.
    "gemma3": partial(decoder, norm_after=True, qk_norm="head"),
    # Abdin et al., 2024. Stores fused matrices, which its checkpoints' readers split.
    "phi3": decoder,
    # Granite Team, 2024. Multipliers of the embedding, of attention, of the logits, and of what
    # each half of a layer adds.
    "granite": decoder,
    # Team OLMo, 2024.
    "olmo2": partial(decoder, norm_before=False, norm_after=True, qk_norm="row"),
    # Jiang et al., 2024. Sparse experts in place of every feed-forward layer.
    "mixtral": decoder,
    # Yang et al., 2025. Sparse experts in place of some feed-forward layers.
    "qwen3moe": partial(decoder, qk_norm="head"),
}


def program(config: ModelConfig, max_model_len: int | None = None) -> Program:
    """Return the Program of a model, for sequences of up to ``max_model_len`` tokens (None: as many
    as it admits by default).

    The length matters only to rotary positions that depend on it (`Rope.for_length`). Raises
    `ValueError` when the family is not supported.
    """
    if config.family not in FAMILIES:
        supported = ", ".join(FAMILIES)
        raise ValueError(
            f"model family {config.family!r} is not supported; supported are {supported}"
        )
    return FAMILIES[config.family](config.for_length(max_model_len or config.default_length))
