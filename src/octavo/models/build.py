"""A builder of Programs: what the layers of all decoder families share.

Values: ``x`` is the residual stream, ``h`` a row on its way into or out of half a layer.

`ModelConfig.residual_scale` scales what each half of a layer adds to the stream: x + r h. With
y = x / r that is y + h, and a norm of y equals the norm of x when its epsilon is divided by r²: so
the stream is kept as y, and nothing is multiplied at all.
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
    """Collect ops and the shapes of the weights they name, layer by layer."""

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
        self._index = 0
        self._prefix = ""

    def append(self, op: Op) -> None:
        """Write down an op, and the shapes of its weights."""
        self.ops.append(op)
        self.weights |= op.weight_shapes(self.widths, self.config)

    def embed(self) -> None:
        c = self.config
        self.append(Embed("token_embd", "x", c.embedding_scale / c.residual_scale))

    def layers(self) -> Iterator[Layer]:
        """Yield the config's layers; what is written meanwhile belongs to the current one."""
        for index, layer in enumerate(self.config.layers):
            self._index, self._prefix = index, f"layers.{index}."
            yield layer
        self._prefix = ""

    def norm(self, x: str, name: str, out: str, group: int = 0, scale: float = 1.0) -> None:
        eps = self.config.norm_eps
        if x == "x":
            eps /= self.config.residual_scale**2
        self.append(RmsNorm(x, self._prefix + name, out, eps, group, scale))

    def linear(self, x: str, name: str, out: str) -> None:
        weight = self._prefix + name
        bias = f"{weight}.bias" if name in self.config.biases else None
        self.append(Linear(x, weight, out, bias))

    def project_qkv(self, x: str) -> None:
        for out in "qkv":
            self.linear(x, f"attn_{out}", out)

    def attend(self, layer: Layer) -> None:
        """Write down attention, from q, k and v to h."""
        c, index = self.config, self._index
        self.append(RopeAndStoreKv("q", "k", "v", index, layer.rope))
        self.append(
            PagedAttention("q", "attn", index, c.attention_scale, layer.window, c.attention_softcap)
        )
        self.linear("attn", "attn_output", "h")

    def feed_forward(self, x: str, experts: Experts | None) -> None:
        """Write down a gated feed-forward layer, or experts, from x to h."""
        activation = self.config.activation
        if experts is None:
            self.linear(x, "ffn_gate", "gate")
            self.linear(x, "ffn_up", "up")
            self.append(GatedActivation("gate", "up", "gate", activation))
            self.linear("gate", "ffn_down", "h")
            return
        wide = experts.chosen * experts.intermediate_size
        self.widths |= {
            "router": experts.count,
            "route": 2 * experts.chosen,
            "expert_gate": wide,
            "expert_up": wide,
            "expert_out": experts.chosen * self.config.hidden_size,
        }

        def linear(x: str, name: str, out: str) -> None:
            self.append(ExpertLinear(x, "route", self._prefix + name, out, experts))

        self.linear(x, "ffn_gate_inp", "router")
        self.append(Route("router", "route", experts))
        linear(x, "ffn_gate_exps", "expert_gate")
        linear(x, "ffn_up_exps", "expert_up")
        self.append(GatedActivation("expert_gate", "expert_up", "expert_gate", activation))
        linear("expert_gate", "ffn_down_exps", "expert_out")
        self.append(Combine("expert_out", "route", "h", experts))

    def add(self) -> None:
        """Add h to the residual stream."""
        self.append(Add("x", "h", "x"))

    def head(self) -> Program:
        c = self.config
        self.norm("x", "output_norm", "x", scale=c.logits_scale)
        self.append(Logits("x", c.head, c.logits_softcap))
        return Program(c, tuple(self.ops), self.widths, self.weights)
