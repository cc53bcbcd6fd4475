"""The shape of a decoder-only transformer, independent of any file format."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from math import inf


class Activation(Enum):
    """The gate's non-linearity in a gated feed-forward layer."""

    SILU = "silu"  # SwiGLU
    GELU_TANH = "gelu_tanh"  # GeGLU with the tanh approximation


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding of one layer kind (Su et al., 2021).

    The angle of dimension pair i at position p is ``p * scale * theta**(-2i/dim) / factors[i]``.
    """

    theta: float
    dim: int  # leading dimensions of each head that are rotated
    interleaved: bool  # pairs (2i, 2i+1) (GGUF "norm") or (i, i+dim/2) ("neox")
    scale: float = 1.0  # position scale: 1/factor for linear scaling
    factors: tuple[float, ...] = ()  # per-pair divisors (Llama-3), dim/2 of them, or none


@dataclass(frozen=True, slots=True)
class Layer:
    """What may differ from one layer to the next."""

    rope: Rope
    window: int | None = None  # sliding window in tokens, the query included; None = global


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything a family file needs to write down its Program.

    Sizes are element counts. Validated on construction (`ValueError` naming the field), so that
    nothing downstream divides by zero or allocates nonsense.
    """

    family: str  # "llama", "gemma3", ...
    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    context_length: int
    norm_eps: float
    activation: Activation
    attention_scale: float  # multiplies q·k
    tied_embeddings: bool
    layers: tuple[Layer, ...] = field(repr=False)
    embedding_scale: float = 1.0
    attention_softcap: float = 0.0  # cap * tanh(x / cap); 0 = none
    logits_softcap: float = 0.0
    biases: frozenset[str] = frozenset()  # projections of every layer with a bias: "attn_q", …
    name: str = ""

    def __post_init__(self) -> None:
        for name, low, high in (
            ("vocab_size", 1, 1 << 24),
            ("hidden_size", 1, 1 << 17),
            ("num_heads", 1, 1024),
            ("num_kv_heads", 1, 1024),
            ("head_dim", 2, 1024),
            ("intermediate_size", 1, 1 << 20),
            ("context_length", 1, 1 << 27),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise ValueError(f"{name} is {value}, outside {low} to {high}")
        if not 1 <= len(self.layers) <= 512:
            raise ValueError(f"number of layers is {len(self.layers)}, outside 1 to 512")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if not 0.0 < self.norm_eps < 1.0:
            raise ValueError(f"norm_eps is {self.norm_eps}, outside 0 to 1")
        for name in ("attention_scale", "embedding_scale"):
            value = getattr(self, name)
            if not 0.0 < value < inf:
                raise ValueError(f"{name} is {value}, not a positive number")
        for name in ("attention_softcap", "logits_softcap"):
            value = getattr(self, name)
            if not 0.0 <= value < inf:
                raise ValueError(f"{name} is {value}, not a number from 0")
        for index, layer in enumerate(self.layers):
            if layer.window is not None and layer.window < 1:
                raise ValueError(f"layer {index}: window is {layer.window}, below 1")
            rope = layer.rope
            if not 2 <= rope.dim <= self.head_dim or rope.dim % 2:
                raise ValueError(f"layer {index}: rope dim {rope.dim} does not fit the head")
            if not (0.0 < rope.theta < inf and 0.0 < rope.scale < inf):
                raise ValueError(
                    f"layer {index}: rope theta {rope.theta} and scale {rope.scale} "
                    "are not both positive numbers"
                )
            if not all(0.0 < factor < inf for factor in rope.factors):
                raise ValueError(f"layer {index}: a rope factor is not a positive number")
            if rope.factors and len(rope.factors) != rope.dim // 2:
                raise ValueError(
                    f"layer {index}: {len(rope.factors)} rope factors for {rope.dim // 2} pairs"
                )
