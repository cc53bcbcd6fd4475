"""The shape of a decoder-only transformer, independent of any file format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from math import inf
from typing import Literal

import numpy as np
import numpy.typing as npt

from octavo.models.recurrence_shape import RecurrenceShape, recurrence_fault

MAX_EXPERTS = 1024
MAX_LAYERS = 512


class Activation(Enum):
    """The gate's non-linearity in a gated feed-forward layer."""

    SILU = "silu"  # SwiGLU
    GELU_TANH = "gelu_tanh"  # GeGLU with the tanh approximation
    SWIGLU_CLAMPED = "swiglu_clamped"  # gpt-oss's: see `GatedActivation`
    SIGMOID = "sigmoid"  # of gates on the output of attention


@dataclass(frozen=True, slots=True)
class LongRope:
    """Other divisors when sequences may be longer than in training (Ding et al., 2024)."""

    original: int  # tokens of context in training
    factors: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class DynamicNtk:
    """A base that grows with the length, from the context of training on (as `transformers`)."""

    original: int  # tokens of context in training
    factor: float


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding of one layer kind (Su et al., 2021).

    The angle of dimension pair i at position p is ``p * scale * theta**(-2i/dim) / factors[i]``;
    the rotated dimensions are multiplied by ``magnitude``. Where scaling depends on how long a
    sequence is (``by_length``), `for_length` says what holds.
    """

    theta: float
    dim: int  # leading dimensions of each head that are rotated
    interleaved: bool  # pairs (2i, 2i+1) (GGUF "norm") or (i, i+dim/2) ("neox")
    scale: float = 1.0  # of positions: 1/factor for linear scaling; 0: nothing is rotated
    # Divisors of the pairs (Llama-3, YaRN), dim/2 of them, or none; inf: it is not rotated.
    factors: tuple[float, ...] = ()
    magnitude: float = 1.0  # of queries and keys alike (YaRN, LongRoPE)
    by_length: LongRope | DynamicNtk | None = None

    @property
    def rotated(self) -> int:
        """The dimensions of each head that a position changes."""
        return self.dim if self.scale else 0

    @property
    def frequencies(self) -> npt.NDArray[np.float64]:
        """The angle of each pair that a position adds; [dim / 2]."""
        pairs = np.arange(self.dim // 2)
        frequencies = self.scale * self.theta ** (-2.0 * pairs / self.dim)
        return frequencies / np.asarray(self.factors) if self.factors else frequencies

    def for_length(self, length: int) -> Rope:
        """Return the rotation for an engine whose longest sequence has ``length`` tokens.

        It is fixed once: a key already in the cache must not depend on what comes after it.
        """
        match self.by_length:
            case LongRope(original, factors) if length > original:
                return replace(self, factors=factors, by_length=None)
            case DynamicNtk(original, factor) if length > original:
                growth = factor * length / original - (factor - 1.0)
                theta = self.theta * growth ** (self.dim / (self.dim - 2))
                return replace(self, theta=theta, by_length=None)
        return replace(self, by_length=None)


UNROTATED = Rope(theta=1.0, dim=2, interleaved=False, scale=0.0)  # of layers without positions


@dataclass(frozen=True, slots=True)
class Experts:
    """A sparse feed-forward layer: a router sends each token to a few gated ones (Shazeer et al.,
    2017).
    """

    count: int
    chosen: int  # experts a token
    intermediate_size: int  # of each
    renormalize: bool  # the chosen ones' shares add up to one
    gating: Literal["softmax", "sigmoid"] = "softmax"  # makes shares of the router's logits
    normalize_eps: float = 0.0  # sigmoid only: added to the sum that the shares are divided by
    scale: float = 1.0  # multiplies the shares
    # Each expert's share has a bias when experts are chosen, not when they are weighed (Wang et
    # al., 2024).
    selection_bias: bool = False
    biases: bool = False  # of the experts' matrices

    def expected(self, tokens: int) -> float:
        """Return how many distinct experts so many tokens go to, if all choices are equally likely:
        E (1 - (1 - k/E)^n).
        """
        missed: float = (1.0 - self.chosen / self.count) ** tokens
        return self.count * (1.0 - missed)


@dataclass(frozen=True, slots=True)
class Layer:
    """What may differ from one layer to the next."""

    rope: Rope
    window: int | None = None  # sliding window in tokens, the query included; None = global
    experts: Experts | None = None  # in place of a dense feed-forward layer; alike in all layers
    shared_expert: int = 0  # width of the expert that every token goes to besides; 0: there is none
    num_kv_heads: int | None = None  # None: the model's
    head_dim: int | None = None  # None: the model's
    keys_as_values: bool = False  # it has no projection to values: they are what keys are made of
    intermediate_size: int | None = None  # of the dense feed-forward layer; None: the model's
    shares: int | None = None  # an earlier layer, whose keys and values it reads: it has none
    recurrence: RecurrenceShape | None = None  # in place of attention
    latent: bool = False  # a token's key is its value, too; planned for, and computed by no program


@dataclass(frozen=True, slots=True)
class Temperature:
    """How queries grow with their position: see `ScaleByPosition`."""

    beta: float
    original: int  # tokens of context in training


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
    temperature: Temperature | None = None
    logits_softcap: float = 0.0
    residual_scale: float = 1.0  # multiplies what a layer's halves add to the residual stream
    logits_scale: float = 1.0
    per_layer_input: int = 0  # elements that each layer gets of a token's embedding; 0: none
    biases: frozenset[str] = frozenset()  # projections of every layer with a bias: "attn_q", …
    mtp_layers: int = 0  # layers for multi-token prediction behind the model's own: `mtp_layer`
    sandwich_norms: bool = False  # behind each half of a layer, too
    head_gates: bool = False  # on what each head of attention finds
    sinks: bool = False  # of attention: a score a head, to which no value belongs
    swiglu_alpha: float = 1.702  # of `Activation.SWIGLU_CLAMPED`
    swiglu_limit: float = 7.0
    name: str = ""
    fixed_from: int | None = None  # the `default_length` of the model that `for_length` fixed

    @property
    def head(self) -> str:
        """The role of the matrix that logits come from."""
        return "token_embd" if self.tied_embeddings else "output"

    def __post_init__(self) -> None:
        for name, low, high in (
            ("vocab_size", 1, 1 << 24),
            ("hidden_size", 1, 1 << 17),
            ("num_heads", 1, 1024),
            ("num_kv_heads", 1, 1024),
            ("head_dim", 2, 1024),
            ("intermediate_size", 1, 1 << 20),
            ("context_length", 1, 1 << 27),
            ("per_layer_input", 0, 1 << 16),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise ValueError(f"{name} is {value}, outside {low} to {high}")
        if not 1 <= len(self.layers) <= MAX_LAYERS:
            raise ValueError(f"number of layers is {len(self.layers)}, outside 1 to {MAX_LAYERS}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if not 0.0 < self.norm_eps < 1.0:
            raise ValueError(f"norm_eps is {self.norm_eps}, outside 0 to 1")
        for name in (
            *("attention_scale", "embedding_scale", "residual_scale", "logits_scale"),
            *("swiglu_alpha", "swiglu_limit"),
        ):
            value = getattr(self, name)
            if not 1e-18 <= value <= 1e18:  # products of two stay within fp32
                raise ValueError(f"{name} is {value}, outside 1e-18 to 1e18")
        for name in ("attention_softcap", "logits_softcap"):
            value = getattr(self, name)
            if not 0.0 <= value < inf:
                raise ValueError(f"{name} is {value}, not a number from 0")
        if self.temperature is not None:
            beta, original = self.temperature.beta, self.temperature.original
            if not 0.0 < beta < 1e6 or original < 1:
                raise ValueError(f"temperature of attention by {beta} from {original} tokens on")
        if len({layer.experts for layer in self.layers} - {None}) > 1:
            raise ValueError("layers differ in their experts")
        if len({layer.shared_expert for layer in self.layers} - {0}) > 1:
            raise ValueError("layers differ in the width of their shared experts")
        for layer in dict.fromkeys(self.layers):
            if fault := _fault(layer, self.num_heads, *self.heads_of(layer)):
                raise ValueError(f"layer {self.layers.index(layer)}: {fault}")
        if all(layer.recurrence is not None for layer in self.layers):
            raise ValueError(
                "no layer has attention: models of recurrent layers only are not supported"
            )
        for index, layer in enumerate(self.layers):
            if layer.shares is not None and (fault := self._sharing_fault(index, layer.shares)):
                raise ValueError(f"layer {index}: {fault}")

    def _sharing_fault(self, index: int, other: int) -> str | None:
        """Return why a layer cannot read the keys and values of another."""
        if not 0 <= other < index:
            return f"it shares the cache of layer {other}, which is not an earlier one"
        layer, owner = self.layers[index], self.layers[other]
        if owner.shares is not None or owner.recurrence is not None:
            return f"it shares the cache of layer {other}, which has none"
        if (layer.window, self.heads_of(layer)) != (owner.window, self.heads_of(owner)):
            return f"it shares the cache of layer {other}, whose window or heads differ"
        if layer.rope != owner.rope:
            return f"it shares the cache of layer {other}, whose rotary positions differ"
        return None

    def heads_of(self, layer: Layer) -> tuple[int, int]:
        """Return how many KV heads a layer has, and how wide its heads are."""
        return (
            self.num_kv_heads if layer.num_kv_heads is None else layer.num_kv_heads,
            self.head_dim if layer.head_dim is None else layer.head_dim,
        )

    @property
    def default_length(self) -> int:
        """The longest sequence unless a longer one is asked for. It is the context of training
        where longer sequences change the rotary positions of all, else the whole context.
        """
        if self.fixed_from is not None:
            return self.fixed_from
        rules = (layer.rope.by_length for layer in self.layers)
        return min([self.context_length, *(rule.original for rule in rules if rule is not None)])

    def rope_of_length(self, length: int) -> str | None:
        """Describe the rotary positions for up to ``length`` tokens, if they depend on it."""
        rule = next((each.rope.by_length for each in self.layers if each.rope.by_length), None)
        if rule is None:
            return None
        name = "LongRoPE" if isinstance(rule, LongRope) else "dynamic NTK"
        if length <= rule.original:
            longer = "" if rule.original >= self.context_length else "; longer ones need others"
            return f"{name}, positions of sequences of up to {rule.original} tokens{longer}"
        return (
            f"{name}, positions of sequences of {length} tokens for all, although training had "
            f"{rule.original}: short ones lose by it"
        )

    @property
    def mtp_layer(self) -> Layer:
        """What a layer for multi-token prediction is like: the last one with attention."""
        return next(layer for layer in reversed(self.layers) if layer.recurrence is None)

    @property
    def experts(self) -> Experts | None:
        """The experts of the layers that have any."""
        return next((layer.experts for layer in self.layers if layer.experts is not None), None)

    def for_length(self, length: int) -> ModelConfig:
        """Return the model with the rotary positions of sequences of up to ``length`` tokens."""
        if all(layer.rope.by_length is None for layer in self.layers):
            return self
        layers = (replace(layer, rope=layer.rope.for_length(length)) for layer in self.layers)
        return replace(self, layers=tuple(layers), fixed_from=self.default_length)


def share_caches(layers: Sequence[Layer], count: int) -> tuple[Layer, ...]:
    """Return the layers of which the last ``count`` read the keys and values of the last one before
    them that sees as much. Raise `ValueError` where there is none.
    """
    if not 0 <= count < len(layers):
        raise ValueError(f"{count} of {len(layers)} layers are to share caches")
    own = len(layers) - count
    last = {layer.window: index for index, layer in enumerate(layers[:own])}
    for index, layer in enumerate(layers[own:], start=own):
        if layer.window not in last:
            raise ValueError(f"none of the first {own} layers sees as much as layer {index}")
    return tuple(
        layer if index < own else replace(layer, shares=last[layer.window], keys_as_values=False)
        for index, layer in enumerate(layers)
    )


def _fault(layer: Layer, num_heads: int, num_kv_heads: int, head_dim: int) -> str | None:
    """Return what is wrong with a layer, whose heads are given."""
    rope, experts = layer.rope, layer.experts
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        return f"num_kv_heads {num_kv_heads} does not divide num_heads {num_heads}"
    if not 2 <= head_dim <= 1024:
        return f"head_dim is {head_dim}, outside 2 to 1024"
    if head_dim % 2:
        return f"head_dim is {head_dim}, which is odd"
    if layer.intermediate_size is not None and not 1 <= layer.intermediate_size <= 1 << 20:
        return f"intermediate_size is {layer.intermediate_size}, outside 1 to {1 << 20}"
    if layer.window is not None and layer.window < 1:
        return f"window is {layer.window}, below 1"
    if layer.recurrence is not None:
        if layer.window is not None or layer.shares is not None:
            return "it is recurrent, and has a window or shares a cache"
        if fault := recurrence_fault(layer.recurrence):
            return fault
    if experts is not None:
        size = experts.intermediate_size
        if not 1 <= experts.count <= MAX_EXPERTS:
            return f"{experts.count} experts, outside 1 to {MAX_EXPERTS}"
        if not 1 <= experts.chosen <= experts.count:
            return f"a token goes to {experts.chosen} of {experts.count} experts"
        if not 1 <= size <= 1 << 20:
            return f"experts' intermediate_size is {size}, outside 1 to {1 << 20}"
        if experts.gating not in ("softmax", "sigmoid"):
            return f"experts' gating is {experts.gating!r}, neither softmax nor sigmoid"
        most = 1.0 if experts.gating == "sigmoid" else 0.0
        if not 0.0 <= experts.normalize_eps <= most:
            eps = experts.normalize_eps
            return f"experts' normalize_eps is {eps}, outside 0 to {most:g} for {experts.gating}"
        if not 1e-18 <= experts.scale <= 1e18:
            return f"experts' scale is {experts.scale}, outside 1e-18 to 1e18"
    if not 0 <= layer.shared_expert <= 1 << 20:
        return f"shared_expert is {layer.shared_expert}, outside 0 to {1 << 20}"
    if not 2 <= rope.dim <= head_dim or rope.dim % 2:
        return f"rope dim {rope.dim} does not fit the head"
    for name in ("theta", "scale", "magnitude"):
        value = getattr(rope, name)
        if not 0.0 < value < inf and (name, value) != ("scale", 0.0):
            return f"rope {name} {value} is not a positive number"
    later: tuple[float, ...] = ()
    match rope.by_length:
        case LongRope(original, later):
            if original < 1:
                return f"rope original context {original}"
        case DynamicNtk(original, factor):
            if original < 1 or not 1.0 <= factor < inf or rope.dim < 4:
                return (
                    f"dynamic rope of {rope.dim} dimensions grows by {factor} from {original} "
                    "tokens on"
                )
    for factors in (rope.factors, later):
        if not all(factor > 0.0 for factor in factors):
            return "a rope factor is not a positive number"
        if factors and len(factors) != rope.dim // 2:
            return f"{len(factors)} rope factors for {rope.dim // 2} pairs"
    return None
