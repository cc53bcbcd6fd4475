"""Llama (Touvron et al., 2023) and what shares its architecture: Llama 2 and 3, SmolLM2, Mistral.

Pre-norm decoder: RMS norm, grouped-query attention with rotary positions, RMS norm, SwiGLU.
"""

from __future__ import annotations

from octavo.model.config import ModelConfig
from octavo.model.program import (
    Add,
    Embed,
    GatedActivation,
    Linear,
    Logits,
    Op,
    PagedAttention,
    Program,
    RmsNorm,
    RopeAndStoreKv,
)


def program(c: ModelConfig) -> Program:
    q_size, kv_size = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    widths = {
        "x": c.hidden_size,  # the residual stream
        "h": c.hidden_size,
        "q": q_size,
        "k": kv_size,
        "v": kv_size,
        "attn": q_size,
        "gate": c.intermediate_size,
        "up": c.intermediate_size,
    }
    ops: list[Op] = [Embed("token_embd", "x", c.embedding_scale)]
    weights: dict[str, tuple[int, ...]] = {"token_embd": (c.vocab_size, c.hidden_size)}

    def norm(x: str, weight: str, out: str) -> None:
        weights[weight] = (c.hidden_size,)
        ops.append(RmsNorm(x, weight, out, c.norm_eps))

    for index, layer in enumerate(c.layers):
        prefix = f"layers.{index}."

        def linear(x: str, name: str, out: str, prefix: str = prefix) -> None:
            weight, bias = prefix + name, None
            weights[weight] = (widths[out], widths[x])
            if name in c.biases:
                bias = f"{weight}.bias"
                weights[bias] = (widths[out],)
            ops.append(Linear(x, weight, out, bias))

        norm("x", prefix + "attn_norm", "h")
        linear("h", "attn_q", "q")
        linear("h", "attn_k", "k")
        linear("h", "attn_v", "v")
        ops.append(RopeAndStoreKv("q", "k", "v", index, layer.rope))
        ops.append(
            PagedAttention("q", "attn", index, c.attention_scale, layer.window, c.attention_softcap)
        )
        linear("attn", "attn_output", "h")
        ops.append(Add("x", "h", "x"))
        norm("x", prefix + "ffn_norm", "h")
        linear("h", "ffn_gate", "gate")
        linear("h", "ffn_up", "up")
        ops.append(GatedActivation("gate", "up", "gate", c.activation))
        linear("gate", "ffn_down", "h")
        ops.append(Add("x", "h", "x"))

    norm("x", "output_norm", "x")
    head = "token_embd" if c.tied_embeddings else "output"
    weights[head] = (c.vocab_size, c.hidden_size)
    ops.append(Logits("x", head, c.logits_softcap))
    return Program(c, tuple(ops), widths, weights)
