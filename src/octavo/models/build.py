"""Writing a Program down: what the layers of all decoder families share.

Values: ``x`` is the residual stream, ``h`` a row on its way into or out of half a layer.
"""

from __future__ import annotations

from collections.abc import Iterator

from octavo.models.config import Experts, Layer, ModelConfig
from octavo.models.program import (
    Add,
    Combine,
    Embed,
    ExpertLinear,
    GatedActivation,
    Linear,
    Logits,
    Op,
    PagedAttention,
    Program,
    RmsNorm,
    RopeAndStoreKv,
    Route,
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

    def feed_forward(self, x: str, experts: Experts | None = None) -> None:
        """A gated feed-forward layer, or experts that are each one, from x to h."""
        if experts is not None:
            self._sparse_feed_forward(x, experts)
            return
        self.linear(x, "ffn_gate", "gate")
        self.linear(x, "ffn_up", "up")
        self.ops.append(GatedActivation("gate", "up", "gate", self.config.activation))
        self.linear("gate", "ffn_down", "h")

    def _sparse_feed_forward(self, x: str, experts: Experts) -> None:
        wide = experts.chosen * experts.intermediate_size
        self.widths |= {
            "router": experts.count,
            "route": 2 * experts.chosen,
            "expert_gate": wide,
            "expert_up": wide,
            "expert_out": experts.chosen * self.config.hidden_size,
        }
        activation = self.config.activation
        self.linear(x, "ffn_gate_inp", "router")
        self.ops.append(Route("router", "route", experts))
        self._expert_linear(x, "ffn_gate_exps", "expert_gate", experts)
        self._expert_linear(x, "ffn_up_exps", "expert_up", experts)
        self.ops.append(GatedActivation("expert_gate", "expert_up", "expert_gate", activation))
        self._expert_linear("expert_gate", "ffn_down_exps", "expert_out", experts)
        self.ops.append(Combine("expert_out", "route", "h", experts))

    def _expert_linear(self, x: str, name: str, out: str, experts: Experts) -> None:
        sizes = (experts.intermediate_size, self.config.hidden_size)
        op = ExpertLinear(x, "route", self._prefix + name, out, experts)
        shape = sizes[::-1] if out == "expert_out" else sizes
        self.weights |= dict.fromkeys(op.weights, shape)
        self.ops.append(op)

    def add(self) -> None:
        """h joins the residual stream."""
        self.ops.append(Add("x", "h", "x"))

    def head(self) -> Program:
        c = self.config
        self.norm("x", "output_norm", "x", scale=c.logits_scale)
        self.weights[c.head] = (c.vocab_size, c.hidden_size)
        self.ops.append(Logits("x", c.head, c.logits_softcap))
        return Program(c, tuple(self.ops), self.widths, self.weights)
