"""A builder of Programs: what the layers of all decoder families share.

Values: ``x`` is the residual stream, ``h`` a row on its way into or out of half a layer. Where a
layer's heads are not the model's, its values of another width are other values: ``q@512``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from octavo.models.config import Activation, Experts, Layer, ModelConfig
from octavo.models.program import (
    Add,
    Combine,
    Embed,
    ExpertLinear,
    GatedActivation,
    GateRow,
    Linear,
    Logits,
    Op,
    PagedAttention,
    Program,
    RmsNorm,
    RopeAndStoreKv,
    RotateQueries,
    Route,
    ScaleByPosition,
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
        self.index = 0  # of the current layer
        self._prefix = ""
        self._layer: Layer | None = None

    def append(self, op: Op) -> None:
        """Write down an op, and the shapes of its weights."""
        self.ops.append(op)
        self.weights |= op.weight_shapes(self.widths, self.config)

    def embed(self, scale: float) -> None:
        self.append(Embed("token_embd", "x", scale))

    def layers(self) -> Iterator[Layer]:
        """Yield the config's layers; what is written meanwhile belongs to the current one."""
        for index, layer in enumerate(self.config.layers):
            self.enter(index, layer)
            yield layer
        self._prefix, self._layer = "", None

    def enter(self, index: int, layer: Layer, within: str = "") -> None:
        """Make a layer the current one; its roles begin with ``within``."""
        self.index, self._prefix, self._layer = index, f"{within}layers.{index}.", layer

    def role(self, name: str) -> str:
        """Return the role of a weight: of the current layer, or of none."""
        return self._prefix + name

    def value(self, name: str) -> str:
        """Return the name of a value as wide as the current layer has it."""
        layer, c = self._layer, self.config
        if layer is None:
            return name
        kv_heads, head_dim = c.heads_of(layer)
        if name in ("q", "attn"):
            width = c.num_heads * head_dim
        elif name in ("k", "v"):
            width = kv_heads * head_dim
        elif name in ("gate", "up"):
            width = layer.intermediate_size or c.intermediate_size
        else:
            return name
        if self.widths[name] == width:
            return name
        own = f"{name}@{width}"
        self.widths[own] = width
        return own

    def norm(self, x: str, name: str, out: str, group: int = 0, scale: float = 1.0) -> None:
        x, out = self.value(x), self.value(out)
        self.append(self._norm(x, self.role(name), out, self.eps, group, scale))

    def linear(self, x: str, name: str, out: str) -> None:
        weight = self.role(name)
        bias = f"{weight}.bias" if name in self.config.biases else None
        self.append(Linear(self.value(x), weight, self.value(out), bias))

    def project_qkv(self, x: str, layer: Layer) -> None:
        """Write down the projections to q and, unless the layer has none, to k and v."""
        self.linear(x, "attn_q", "q")
        if layer.shares is None:
            self.linear(x, "attn_k", "k")
            if not layer.keys_as_values:
                self.linear(x, "attn_v", "v")

    def norm_qk(self, layer: Layer, *, by_head: bool) -> None:
        """Write down norms of q and, if the layer has any, k: of each head or of all together."""
        group = self.config.heads_of(layer)[1] if by_head else 0
        self.norm("q", "attn_q_norm", "q", group)
        if layer.shares is None:
            self.norm("k", "attn_k_norm", "k", group)

    def attend(self, layer: Layer, out: str = "h", gate: str | None = None, ahead: int = 0) -> None:
        """Write down attention, from q, k and v to ``out``. ``gate`` is a value as wide as q, or
        with a number a head, whose sigmoid its result is multiplied by. ``ahead``: of queries on
        another layer's keys.
        """
        c, (kv_heads, head_dim) = self.config, self.config.heads_of(layer)
        q, k, v, attn = map(self.value, ("q", "k", "v", "attn"))
        if layer.shares is None:
            source = self.index
            self.append(RopeAndStoreKv(q, k, v, source, kv_heads, head_dim, layer.rope))
        else:
            source = layer.shares
            self.append(RotateQueries(q, head_dim, layer.rope, ahead))
        if c.temperature is not None:
            self.append(ScaleByPosition(q, q, c.temperature.beta, c.temperature.original))
        scale, softcap = c.attention_scale, c.attention_softcap
        sinks = self.role("attn_sinks") if c.sinks else None
        self.append(
            PagedAttention(q, attn, source, kv_heads, head_dim, scale, layer.window, softcap, sinks)
        )
        if gate is not None and self.widths[gate] == c.num_heads:
            self.append(GateRow(attn, gate, attn, head_dim))
        elif gate is not None:
            self.append(GatedActivation(gate, attn, attn, Activation.SIGMOID))
        self.linear("attn", "attn_output", out)

    def feed_forward(self, x: str, experts: Experts | None = None, out: str = "h") -> None:
        """Write down a gated feed-forward layer, or experts, from x to ``out``."""
        if experts is not None:
            self.sparse_feed_forward(x, experts, out)
            return
        gate, up = self.value("gate"), self.value("up")
        self.linear(x, "ffn_gate", gate)
        self.linear(x, "ffn_up", up)
        self.gate(gate, up)
        self.linear(gate, "ffn_down", out)

    def gate(self, gate: str, up: str) -> None:
        """Write down the activation of ``gate``, times ``up``, in place of it."""
        c = self.config
        numbers: tuple[float, ...] = ()
        if c.activation is Activation.SWIGLU_CLAMPED:
            numbers = c.swiglu_alpha, c.swiglu_limit
        self.append(GatedActivation(gate, up, gate, c.activation, numbers))

    def shared_expert(self, x: str, width: int, *, gate: bool, out: str = "shared") -> None:
        """Write down the expert that every token goes to, from x to ``out``; with a ``gate`` of one
        number a token.
        """
        self.widths |= {out: self.config.hidden_size, "shared_gate": width, "shared_up": width}
        self.linear(x, "ffn_gate_shexp", "shared_gate")
        self.linear(x, "ffn_up_shexp", "shared_up")
        if gate:
            self.widths["shared_share"] = 1
            self.linear(x, "ffn_gate_inp_shexp", "shared_share")
        self.gate("shared_gate", "shared_up")
        self.linear("shared_gate", "ffn_down_shexp", out)
        if gate:
            self.append(GateRow(out, "shared_share", out))

    def add_feed_forward(self, layer: Layer, *, shared_gate: bool) -> None:
        """Write down a layer's feed-forward half, from h, and add it to x: experts or a gated
        layer, and the expert that every token goes to, if there is one, with a gate or without.
        """
        if layer.shared_expert:
            self.shared_expert("h", layer.shared_expert, gate=shared_gate)
        self.feed_forward("h", layer.experts)
        if layer.shared_expert:
            self.add("shared")
        self.add()

    def sparse_feed_forward(
        self,
        x: str,
        experts: Experts,
        out: str = "h",
        *,
        router: str | None = None,
        factors: str | None = None,
    ) -> None:
        """Write down experts from x to ``out``.

        ``router`` is the value that chooses them (x, if not given), ``factors`` the weight with a
        factor of each expert's share.
        """
        wide = experts.chosen * experts.intermediate_size
        self.widths |= {
            "router": experts.count,
            "route": 2 * experts.chosen,
            "expert_gate": wide,
            "expert_up": wide,
            "expert_out": experts.chosen * self.config.hidden_size,
        }

        def linear(x: str, name: str, out: str) -> None:
            self.append(ExpertLinear(x, "route", self.role(name), out, experts))

        self.linear(router or x, "ffn_gate_inp", "router")
        bias = self.role("exp_probs_b.bias") if experts.selection_bias else None
        own = None if factors is None else self.role(factors)
        self.append(Route("router", "route", experts, bias, own))
        linear(x, "ffn_gate_exps", "expert_gate")
        linear(x, "ffn_up_exps", "expert_up")
        self.gate("expert_gate", "expert_up")
        linear("expert_gate", "ffn_down_exps", "expert_out")
        self.append(Combine("expert_out", "route", out, experts))

    def add(self, h: str = "h") -> None:
        """Add a value to the residual stream."""
        self.append(Add("x", h, "x"))

    def head(self, norm: str = "output_norm") -> Program:
        """Write down the last norm and the logits, and return the Program."""
        c = self.config
        self.norm("x", norm, "x", scale=c.logits_scale)
        self.append(Logits("x", c.head, c.logits_softcap))
        return self.program()

    def program(self) -> Program:
        """Return all that is written."""
        used = {name for op in self.ops for name in (*op.reads, *op.writes)}
        widths = {name: width for name, width in self.widths.items() if name in used}
        return Program(self.config, tuple(self.ops), widths, self.weights)
