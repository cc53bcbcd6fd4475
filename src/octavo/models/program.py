"""A model's computation, written once and read by every executor.

A Program is a straight list of ops over named values. Each value is a matrix of shape
[tokens, width]; the number of tokens is the only free dimension. A name is a buffer: it may be
written again, also by an op that reads it (``x = x + h``). Ops name their weights by role
(``layers.3.attn_q``); the weights themselves come from the checkpoint. The native executor lowers
a Program to kernels, the cost executor counts its bytes and operations.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.models.config import Activation, Experts, ModelConfig, Rope


@dataclass(frozen=True, slots=True)
class Embed:
    """out[t] = scale * weight[token_ids[t]]."""

    weight: str
    out: str
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Input:
    """out = the rows that a step brings with its tokens, or in place of tokens."""

    out: str


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """out = x / sqrt(mean(x²) + eps) * (scale * weight), over groups of ``group`` elements.

    A group of 0 is the whole row.

    With ``group`` = head_dim it is the per-head q/k norm; the weight then has ``group`` elements.
    """

    x: str
    weight: str
    out: str
    eps: float
    group: int = 0
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Linear:
    """out = x @ weight.T (+ bias); weight is [out_features, in_features]."""

    x: str
    weight: str
    out: str
    bias: str | None = None


@dataclass(frozen=True, slots=True)
class RopeAndStoreKv:
    """Rotate q and k in place by position; write k and v to the sequence's block of ``layer``."""

    q: str
    k: str
    v: str
    layer: int
    rope: Rope


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """out = softmax(softcap(scale * q·k)) v over the cached keys of each token's own sequence.

    A query at position p sees keys max(0, p - window + 1) … p (all of 0 … p without a window).
    """

    q: str
    out: str
    layer: int
    scale: float
    window: int | None = None
    softcap: float = 0.0


@dataclass(frozen=True, slots=True)
class Activate:
    """out = activation(x)."""

    x: str
    out: str
    activation: Activation


@dataclass(frozen=True, slots=True)
class GatedActivation:
    """out = activation(gate) * up."""

    gate: str
    up: str
    out: str
    activation: Activation


@dataclass(frozen=True, slots=True)
class Route:
    """out[t] = the ``experts.chosen`` experts with the largest ``logits`` of a token, largest first
    and of equal ones the first, then their weights: softmax over all experts or, renormalized, over
    the chosen.

    What follows up to `Combine` is of these choices; there is no other `Route` in between.
    """

    logits: str  # as wide as there are experts
    out: str
    experts: Experts


@dataclass(frozen=True, slots=True)
class ExpertLinear:
    """out[t, j] = x[t, j] @ weight[e].T, where e is the j-th choice of token t.

    ``x`` is one row a token for all its experts, or a row for each of them side by side, as ``out``
    is. The experts' matrices, each [out_features, in_features], are called ``weight.0``, …
    """

    x: str
    route: str
    weight: str
    out: str
    experts: Experts

    @property
    def weights(self) -> tuple[str, ...]:
        return tuple(f"{self.weight}.{index}" for index in range(self.experts.count))


@dataclass(frozen=True, slots=True)
class Combine:
    """out[t] = sum of x[t, j] by the weights of the token's choices, in their order."""

    x: str
    route: str
    out: str
    experts: Experts


@dataclass(frozen=True, slots=True)
class Add:
    """out = x + y."""

    x: str
    y: str
    out: str


@dataclass(frozen=True, slots=True)
class Logits:
    """logits = softcap(x[rows that want logits] @ weight.T); the last op of a Program."""

    x: str
    weight: str
    softcap: float = 0.0


Op = (
    Embed
    | Input
    | RmsNorm
    | Linear
    | RopeAndStoreKv
    | PagedAttention
    | Activate
    | GatedActivation
    | Route
    | ExpertLinear
    | Combine
    | Add
    | Logits
)


@dataclass(frozen=True, slots=True)
class Program:
    """``widths`` gives every value's elements per token; ``weights`` every weight's shape."""

    config: ModelConfig
    ops: tuple[Op, ...]
    widths: dict[str, int]
    weights: dict[str, tuple[int, ...]]  # role -> shape, outermost first ([out, in] for matrices)
