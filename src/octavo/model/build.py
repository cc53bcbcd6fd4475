"""Writing a Program down: what the layers of all decoder families share.

Values: ``x`` is the residual stream, ``h`` a row on its way into or out of half a layer.
"""

from __future__ import annotations

from collections.abc import Iterator

from octavo.model.config import Layer, ModelConfig
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


class Builder:
    """Collects ops and the shapes of the weights they name, layer by layer."""

    def __init__(self, config: ModelConfig) -> None:
        c = self.config = config
        q_size, kv_size = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        self.widths = {
            "x": c.hidden_size,
            "h": c.hidden_size,
            "q": q_size,
            "k": kv_size,
            "v": kv_size,
            "attn": q_size,
            "gate": c.intermediate_size,
            "up": c.intermediate_size,
        }
        self.ops: list[Op] = []
        self.weights: dict[str, tuple[int, ...]] = {}
        self.eps = c.norm_eps
        self._index = 0
        self._prefix = ""

    def embed(self, scale: float) -> None:
        self.weights["token_embd"] = (self.config.vocab_size, self.config.hidden_size)
        self.ops.append(Embed("token_embd", "x", scale))

    def layers(self) -> Iterator[Layer]:
        """The config's layers; what is written meanwhile belongs to the one that is out."""
        for index, layer in enumerate(self.config.layers):
            self._index, self._prefix = index, f"layers.{index}."
            yield layer
        self._prefix = ""

    def norm(self, x: str, name: str, out: str, group: int = 0, scale: float = 1.0) -> None:
        weight = self._prefix + name
        self.weights[weight] = (group or self.widths[x],)
        self.ops.append(RmsNorm(x, weight, out, self.eps, group, scale))

    def linear(self, x: str, name: str, out: str) -> None:
        weight, bias = self._prefix + name, None
        self.weights[weight] = (self.widths[out], self.widths[x])
        if name in self.config.biases:
            bias = f"{weight}.bias"
            self.weights[bias] = (self.widths[out],)
        self.ops.append(Linear(x, weight, out, bias))

    def project_qkv(self, x: str) -> None:
        self.linear(x, "attn_q", "q")
        self.linear(x, "attn_k", "k")
        self.linear(x, "attn_v", "v")

    def attend(self, layer: Layer) -> None:
        """From q, k and v to h."""
        c, index = self.config, self._index
        self.ops.append(RopeAndStoreKv("q", "k", "v", index, layer.rope))
        self.ops.append(
            PagedAttention("q", "attn", index, c.attention_scale, layer.window, c.attention_softcap)
        )
        self.linear("attn", "attn_output", "h")

    def feed_forward(self, x: str) -> None:
        """A gated feed-forward layer, from x to h."""
        self.linear(x, "ffn_gate", "gate")
        self.linear(x, "ffn_up", "up")
        self.ops.append(GatedActivation("gate", "up", "gate", self.config.activation))
        self.linear("gate", "ffn_down", "h")

    def add(self) -> None:
        """h joins the residual stream."""
        self.ops.append(Add("x", "h", "x"))

    def head(self) -> Program:
        c = self.config
        self.norm("x", "output_norm", "x", scale=c.logits_scale)
        weight = "token_embd" if c.tied_embeddings else "output"
        self.weights[weight] = (c.vocab_size, c.hidden_size)
        self.ops.append(Logits("x", weight, c.logits_softcap))
        return Program(c, tuple(self.ops), self.widths, self.weights)
