"""A builder of Programs: what the layers of all decoder families share.

Values: ``x`` is the residual stream, ``h`` a row on its way into or out of half a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

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

    def __init__(self, config: ModelConfig, norm: Callable[..., Op] = RmsNorm) -> None:
        """``norm`` takes what `RmsNorm` takes."""
        c = self.config = config
        self._norm = norm
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

    def append(self, op: Op) -> None:
        """Write down an op, and the shapes of its weights."""
        self.ops.append(op)
        self.weights |= op.weight_shapes(self.widths, self.config)

    def embed(self, scale: float) -> None:
        self.append(Embed("token_embd", "x", scale))

    def layers(self) -> Iterator[Layer]:
        """Yield the config's layers; what is written meanwhile belongs to the current one."""
        for index, layer in enumerate(self.config.layers):
            self._index, self._prefix = index, f"layers.{index}."
            yield layer
        self._prefix = ""

    def role(self, name: str) -> str:
        """Return the role of a weight: of the current layer, or of none."""
        return self._prefix + name

    def norm(self, x: str, name: str, out: str, group: int = 0, scale: float = 1.0) -> None:
        self.append(self._norm(x, self.role(name), out, self.eps, group, scale))

    def linear(self, x: str, name: str, out: str) -> None:
        weight = self.role(name)
        bias = f"{weight}.bias" if name in self.config.biases else None
        self.append(Linear(x, weight, out, bias))

    def project_qkv(self, x: str) -> None:
        self.linear(x, "attn_q", "q")
        self.linear(x, "attn_k", "k")
        self.linear(x, "attn_v", "v")

    def attend(self, layer: Layer, out: str = "h") -> None:
        """Write down attention, from q, k and v to ``out``."""
        c, index = self.config, self._index
        self.append(RopeAndStoreKv("q", "k", "v", index, layer.rope))
        self.append(
            PagedAttention("q", "attn", index, c.attention_scale, layer.window, c.attention_softcap)
        )
        self.linear("attn", "attn_output", out)

    def feed_forward(self, x: str, experts: Experts | None = None, out: str = "h") -> None:
        """Write down a gated feed-forward layer, or experts, from x to ``out``."""
        if experts is not None:
            self._sparse_feed_forward(x, experts, out)
            return
        self.linear(x, "ffn_gate", "gate")
        self.linear(x, "ffn_up", "up")
        self.append(GatedActivation("gate", "up", "gate", self.config.activation))
        self.linear("gate", "ffn_down", out)

    def _sparse_feed_forward(self, x: str, experts: Experts, out: str) -> None:
        wide = experts.chosen * experts.intermediate_size
        self.widths |= {
            "router": experts.count,
            "route": 2 * experts.chosen,
            "expert_gate": wide,
            "expert_up": wide,
            "expert_out": experts.chosen * self.config.hidden_size,
        }
        activation = self.config.activation

        def linear(x: str, name: str, out: str) -> None:
            self.append(ExpertLinear(x, "route", self.role(name), out, experts))

        self.linear(x, "ffn_gate_inp", "router")
        self.append(Route("router", "route", experts))
        linear(x, "ffn_gate_exps", "expert_gate")
        linear(x, "ffn_up_exps", "expert_up")
        self.append(GatedActivation("expert_gate", "expert_up", "expert_gate", activation))
        linear("expert_gate", "ffn_down_exps", "expert_out")
        self.append(Combine("expert_out", "route", out, experts))

    def add(self, h: str = "h") -> None:
        """Add a value to the residual stream."""
        self.append(Add("x", h, "x"))

    def head(self) -> Program:
        c = self.config
        self.norm("x", "output_norm", "x", scale=c.logits_scale)
        self.append(Logits("x", c.head, c.logits_softcap))
        return Program(c, tuple(self.ops), self.widths, self.weights)
