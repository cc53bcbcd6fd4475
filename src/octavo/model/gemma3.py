"""Gemma 3 (Gemma Team, 2025), text only.

Against Llama: embeddings scaled by sqrt(hidden), q and k normalised a head, norms after attention
and feed-forward as well as before, GeGLU, and five sliding-window layers for every global one,
each kind with its own rotary base. The checkpoint's norm weights already include Gemma's "+ 1".
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

    def norm(x: str, weight: str, out: str, group: int = 0) -> None:
        weights[weight] = (group or c.hidden_size,)
        ops.append(RmsNorm(x, weight, out, c.norm_eps, group))

    for index, layer in enumerate(c.layers):
        prefix = f"layers.{index}."

        def linear(x: str, name: str, out: str, prefix: str = prefix) -> None:
            weights[prefix + name] = (widths[out], widths[x])
            ops.append(Linear(x, prefix + name, out))

        norm("x", prefix + "attn_norm", "h")
        linear("h", "attn_q", "q")
        linear("h", "attn_k", "k")
        linear("h", "attn_v", "v")
        norm("q", prefix + "attn_q_norm", "q", c.head_dim)
        norm("k", prefix + "attn_k_norm", "k", c.head_dim)
        ops.append(RopeAndStoreKv("q", "k", "v", index, layer.rope))
        ops.append(
            PagedAttention("q", "attn", index, c.attention_scale, layer.window, c.attention_softcap)
        )
        linear("attn", "attn_output", "h")
        norm("h", prefix + "post_attention_norm", "h")
        ops.append(Add("x", "h", "x"))
        norm("x", prefix + "ffn_norm", "h")
        linear("h", "ffn_gate", "gate")
        linear("h", "ffn_up", "up")
        ops.append(GatedActivation("gate", "up", "gate", c.activation))
        linear("gate", "ffn_down", "h")
        norm("h", prefix + "post_ffw_norm", "h")
        ops.append(Add("x", "h", "x"))

    norm("x", "output_norm", "x")
    head = "token_embd" if c.tied_embeddings else "output"
    weights[head] = (c.vocab_size, c.hidden_size)
    ops.append(Logits("x", head, c.logits_softcap))
    return Program(c, tuple(ops), widths, weights)
