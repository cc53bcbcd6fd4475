"""A model's computation, written once and read by every executor.

A Program is a straight list of ops over named values. Each value is a matrix of shape
[tokens, width]; the number of tokens is the only free dimension. A name is a buffer: it may be
written again, also by an op that reads it (``x = x + h``). Ops name their weights by role
(``layers.3.attn_q``); the weights themselves come from the checkpoint.

An op is defined in one place (here, or in the file of the one family that has it): what it reads
and writes, the shapes of its weights, what it costs, and what it means (`Op.compute`, in numpy). An
op of rows (`RowOp`) also names the kernel that computes it. What is left is how the native executor
lowers the others to its kernels (executor/native/lower.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from octavo.models.config import Activation, Experts, ModelConfig, Rope

if TYPE_CHECKING:
    from octavo.models.recurrence import Recurrence

Float32 = npt.NDArray[np.float32]
Ids = npt.NDArray[np.integer]
Values = dict[str, Float32]  # [sequences, tokens, width] by name
Shapes = dict[str, tuple[int, ...]]  # by role, outermost first ([out, in] for matrices)

QUERIES = 256  # whose scores are held at a time: a long sequence needs no square of its length


class KeyValues(Protocol):
    """Where the tokens stand, what they attend to, and what those before have left."""

    def positions(self, tokens: int) -> Ids:
        """Return the positions of the values' tokens."""
        ...

    def store(self, layer: int, keys: Float32, values: Float32) -> None:
        """Keep the keys and values [sequences, tokens, KV width] of a layer."""
        ...

    def attend(self, queries: Float32, op: PagedAttention, sinks: Float32 | None = None) -> Float32:
        """Return what the queries find among all keys of their own sequence."""
        ...

    def recur(self, op: Recurrence, weights: Mapping[str, Float32], rows: Float32) -> Float32:
        """Return what tokens find in the states of their own sequences, which they change.
        ``rows`` [sequences, tokens, width] are the op's values side by side.
        """
        ...


@dataclass(slots=True)
class Evaluation:
    """What ops are computed on in numpy. Weights are in fp32, by role."""

    config: ModelConfig
    weights: Mapping[str, Float32]
    values: Values
    token_ids: Ids | None  # [sequences, tokens]
    kv: KeyValues


class Work(NamedTuple):
    """What an op moves and computes, whatever its tokens have before them."""

    ops: int = 0  # arithmetic operations a token
    weights: tuple[str, ...] = ()  # roles that a step reads whole
    row_of: str | None = None  # a role of which each token reads a row
    matrix: str | None = None  # the role whose format decides what multiplies
    experts: Experts | None = None  # ``weights`` are theirs: those that tokens go to are read
    state_bytes: int = 0  # of a sequence's state, which a step reads and writes once


class RowFunction(NamedTuple):
    """A kernel that makes a row of the output of a row of each input (tier/elementwise.cpp).

    ``weights`` are vectors of ``group`` elements, each multiplied by a factor beforehand.
    """

    kernel: str
    weights: tuple[tuple[str, float], ...] = ()
    numbers: tuple[float, ...] = ()
    group: int = 0  # elements of a row that the kernel takes at a time; 0: the whole row


class Op(ABC):
    """One step of a Program. ``READS`` and ``WRITES`` are the fields that name its values; one that
    it changes and nobody reads later need not be among them.
    """

    __slots__ = ()
    crosses_tokens: ClassVar[bool] = False  # a token's result depends on those before it
    READS: ClassVar[tuple[str, ...]] = ("x",)
    WRITES: ClassVar[tuple[str, ...]] = ("out",)

    @property
    def reads(self) -> tuple[str, ...]:
        """The values that it reads."""
        return tuple(getattr(self, field) for field in self.READS)

    @property
    def writes(self) -> tuple[str, ...]:
        """The values that it writes."""
        return tuple(getattr(self, field) for field in self.WRITES)

    def weight_shapes(self, widths: Mapping[str, int], config: ModelConfig) -> Shapes:
        """Return the shapes of its weights, where values are as wide as ``widths``."""
        return {}

    @abstractmethod
    def work(self, program: Program) -> Work | None:
        """Return its cost; None where that depends on the context (`PagedAttention`)."""

    @abstractmethod
    def compute(self, at: Evaluation) -> None:
        """Write its values from those that it reads."""


class RowOp(Op):
    """An op of each row by itself, from all it reads to one output, that a kernel computes."""

    __slots__ = ()
    label: ClassVar[str]  # in profiles

    @abstractmethod
    def row_function(self) -> RowFunction:
        """Return the kernel and what it takes."""


@dataclass(frozen=True, slots=True)
class Program:
    """``widths`` gives every value's elements per token; ``weights`` every weight's shape."""

    config: ModelConfig
    ops: tuple[Op, ...]
    widths: dict[str, int]
    weights: Shapes

    @property
    def last_crossing(self) -> int:
        """The index of the last op in which a token depends on others, else 0. Only rows that want
        logits go through the ops after it.
        """
        return max((i for i, op in enumerate(self.ops) if op.crosses_tokens), default=0)

    def roles(self, op: Op) -> tuple[str, ...]:
        """Return the roles of an op's weights."""
        return tuple(op.weight_shapes(self.widths, self.config))

    def elements(self, role: str) -> int:
        """Return how many numbers a weight has."""
        return prod(self.weights[role])


# --- tokens and rows -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Embed(Op):
    """out[t] = scale * weight[token_ids[t]]."""

    READS = ()

    weight: str
    out: str
    scale: float = 1.0

    def weight_shapes(self, widths: Mapping[str, int], config: ModelConfig) -> Shapes:
        return {self.weight: (config.vocab_size, widths[self.out])}

    def work(self, program: Program) -> Work:
        return Work(row_of=self.weight)

    def compute(self, at: Evaluation) -> None:
        if at.token_ids is None:
            raise ValueError("there is an embedding to do and there are no token ids")
        at.values[self.out] = at.weights[self.weight][at.token_ids] * np.float32(self.scale)


@dataclass(frozen=True, slots=True)
class Input(Op):
    """out = the rows that a step brings with its tokens, or in place of tokens."""

    READS = ()

    out: str

    def work(self, program: Program) -> Work:
        return Work()

    def compute(self, at: Evaluation) -> None:
        if self.out not in at.values:
            raise ValueError(f"there are no rows for {self.out}")


@dataclass(frozen=True, slots=True)
class RmsNorm(RowOp):
    """out = x / sqrt(mean(x²) + eps) * (scale * weight), over groups of ``group`` elements.

    A group of 0 is the whole row. With ``group`` = head_dim it is the per-head q/k norm; the weight
    then has ``group`` elements, or is as ``wide`` as the row. Without a weight nothing is
    multiplied.
    """

    label = "norm"

    x: str
    weight: str | None
    out: str
    eps: float
    group: int = 0
    scale: float = 1.0
    wide: bool = False

    def row_function(self) -> RowFunction:
        weights = () if self.weight is None else ((self.weight, self.scale),)
        return RowFunction("rms_norm", weights, (self.eps,), self.group)

    def weight_shapes(self, widths: Mapping[str, int], config: ModelConfig) -> Shapes:
        if self.weight is None:
            return {}
        size = widths[self.x] if self.wide else self.group or widths[self.x]
        return {self.weight: (size,)}

    def work(self, program: Program) -> Work:
        weights = () if self.weight is None else (self.weight,)
        return Work(4 * program.widths[self.x], weights)

    def compute(self, at: Evaluation) -> None:
        x = at.values[self.x]
        rows = x.reshape(*x.shape[:-1], -1, self.group or x.shape[-1])
        mean = np.square(rows).mean(axis=-1, keepdims=True)
        out: Float32 = rows / np.sqrt(mean + np.float32(self.eps))
        if self.weight is not None:
            weight = at.weights[self.weight] * np.float32(self.scale)
            out = out * (weight.reshape(rows.shape[-2:]) if self.wide else weight)
        at.values[self.out] = out.reshape(x.shape)


@dataclass(frozen=True, slots=True)
class LayerNorm(RowOp):
    """out = (x - mean(x)) / sqrt(variance(x) + eps) * (scale * weight), over groups of ``group``
    elements as in `RmsNorm` (Ba et al., 2016, without a bias).
    """

    label = "norm"

    x: str
    weight: str
    out: str
    eps: float
    group: int = 0
    scale: float = 1.0

    def row_function(self) -> RowFunction:
        return RowFunction("layer_norm", ((self.weight, self.scale),), (self.eps,), self.group)

    def weight_shapes(self, widths: Mapping[str, int], config: ModelConfig) -> Shapes:
        return {self.weight: (self.group or widths[self.x],)}

    def work(self, program: Program) -> Work:
        return Work(7 * program.widths[self.x], (self.weight,))

    def compute(self, at: Evaluation) -> None:
        x = at.values[self.x]
        rows = x.reshape(*x.shape[:-1], -1, self.group or x.shape[-1])
        centred = rows - rows.mean(axis=-1, keepdims=True)
        variance = np.square(centred).mean(axis=-1, keepdims=True)
        weight = at.weights[self.weight] * np.float32(self.scale)
        out: Float32 = centred / np.sqrt(variance + np.float32(self.eps)) * weight
        at.values[self.out] = out.reshape(x.shape)


@dataclass(frozen=True, slots=True)
class Scale(RowOp):
    """out = x * weight, which is one number."""

    label = "scale"

    x: str
    weight: str
    out: str

    def row_function(self) -> RowFunction:
        return RowFunction("scale", ((self.weight, 1.0),))

    def weight_shapes(self, widths: Mapping[str, int], config: ModelConfig) -> Shapes:
        return {self.weight: (1,)}

    def work(self, program: Program) -> Work:
        return Work(program.widths[self.x], (self.weight,))

    def compute(self, at: Evaluation) -> None:
        at.values[self.out] = at.values[self.x] * at.weights[self.weight]


@dataclass(frozen=True, slots=True)
class Slice(Op):
    """out = the elements of each row of x from ``first`` on, as many as ``out`` is wide."""

    x: str
    out: str
    first: int
    width: int

    def work(self, program: Program) -> Work:
        return Work()

    def compute(self, at: Evaluation) -> None:
        at.values[self.out] = at.values[self.x][..., self.first : self.first + self.width]


@dataclass(frozen=True, slots=True)
class Concat(Op):
    """out = each row of x and, behind it, the row of y, which is as wide."""

    READS = ("x", "y")

    x: str
    y: str
    out: str

    def work(self, program: Program) -> Work:
        return Work()

    def compute(self, at: Evaluation) -> None:
        at.values[self.out] = np.concatenate([at.values[self.x], at.values[self.y]], axis=-1)


@dataclass(frozen=True, slots=True)
class Add(RowOp):
    """out = x + y."""

    READS = ("x", "y")
    label = "add"

    x: str
    y: str
    out: str

    def row_function(self) -> RowFunction:
        return RowFunction("add")

    def work(self, program: Program) -> Work:
        return Work(program.widths[self.x])

    def compute(self, at: Evaluation) -> None:
        at.values[self.out] = at.values[self.x] + at.values[self.y]


@dataclass(frozen=True, slots=True)
class Multiply(RowOp):
    """out = x * y."""

    READS = ("x", "y")
    label = "multiply"

    x: str
    y: str
    out: str

    def row_function(self) -> RowFunction:
        return RowFunction("multiply")

    def work(self, program: Program) -> Work:
        return Work(program.widths[self.x])

    def compute(self, at: Evaluation) -> None:
        at.values[self.out] = at.values[self.x] * at.values[self.y]


@dataclass(frozen=True, slots=True)
class Activate(RowOp):
    """out = activation(x)."""

    label = "activate"

    x: str
    out: str
    activation: Activation

    def row_function(self) -> RowFunction:
        return RowFunction(self.activation.value)

    def work(self, program: Program) -> Work:
        return Work(9 * program.widths[self.x])

    def compute(self, at: Evaluation) -> None:
        at.values[self.out] = activate(at.values[self.x], self.activation)


@dataclass(frozen=True, slots=True)
class GatedActivation(RowOp):
    """out = activation(gate) * up.

    `Activation.SWIGLU_CLAMPED` with ``numbers`` α and limit is g sigmoid(α g) (u + 1), where g is
    the gate, at most the limit, and u is up within ± the limit.
    """

    READS = ("gate", "up")
    label = "gate"

    gate: str
    up: str
    out: str
    activation: Activation
    numbers: tuple[float, ...] = ()

    def row_function(self) -> RowFunction:
        return RowFunction(self.activation.value, numbers=self.numbers)

    def work(self, program: Program) -> Work:
        return Work(10 * program.widths[self.gate])

    def compute(self, at: Evaluation) -> None:
        gate, up = at.values[self.gate], at.values[self.up]
        if self.activation is Activation.SWIGLU_CLAMPED:
            alpha, limit = map(np.float32, self.numbers)
            gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
            at.values[self.out] = (up + np.float32(1.0)) * (gate * sigmoid(alpha * gate))
            return
        at.values[self.out] = activate(gate, self.activation) * up


@dataclass(frozen=True, slots=True)
class GateRow(Op):
    """out = sigmoid(gate[i]) * x, of each group i of ``group`` elements (0: the whole row)."""

    READS = ("x", "gate")

    x: str
    gate: str  # an element a group
    out: str
    group: int = 0

    def work(self, program: Program) -> Work:
        return Work(program.widths[self.x])

    def compute(self, at: Evaluation) -> None:
        x, gate = at.values[self.x], sigmoid(at.values[self.gate])
        groups = x.reshape(*gate.shape, self.group or x.shape[-1])
        at.values[self.out] = (groups * gate[..., np.newaxis]).reshape(x.shape)


def sigmoid(x: Float32) -> Float32:
    one = np.float32(1.0)
    with np.errstate(over="ignore"):  # to infinity, whose inverse is the 0 that is meant
        return (one / (one + np.exp(-x))).astype(np.float32, copy=False)


def activate(x: Float32, activation: Activation) -> Float32:
    if activation is Activation.SIGMOID:
        return sigmoid(x)
    one = np.float32(1.0)
    if activation is Activation.SILU:
        with np.errstate(over="ignore"):  # to infinity, whose inverse is the 0 that is meant
            return (x / (one + np.exp(-x))).astype(np.float32, copy=False)
    inner = np.float32(np.sqrt(2.0 / np.pi)) * (x + np.float32(0.044715) * x * x * x)
    return (np.float32(0.5) * x * (one + np.tanh(inner))).astype(np.float32, copy=False)


# --- matrices ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Linear(Op):
    """out = x @ weight.T (+ bias); weight is [out_features, in_features]."""

    x: str
    weight: str
    out: str
    bias: str | None = None

    def weight_shapes(self, widths: Mapping[str, int], config: ModelConfig) -> Shapes:
        outputs = widths[self.out]
        bias: Shapes = {} if self.bias is None else {self.bias: (outputs,)}
        return {self.weight: (outputs, widths[self.x])} | bias

    def work(self, program: Program) -> Work:
        weights = (self.weight,) if self.bias is None else (self.weight, self.bias)
        return Work(2 * program.elements(self.weight), weights, matrix=self.weight)

    def compute(self, at: Evaluation) -> None:
        out = multiply(at.values[self.x], at.weights[self.weight])
        at.values[self.out] = out if self.bias is None else out + at.weights[self.bias]


@dataclass(frozen=True, slots=True)
class Logits(Op):
    """logits = softcap(x[rows that want logits] @ weight.T); the last op of a Program.

    ``hidden`` is what is put by where hidden rows are kept: x, if not given.
    """

    WRITES = ()

    x: str
    weight: str
    softcap: float = 0.0
    hidden: str | None = None

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.x,) if self.hidden is None else (self.x, self.hidden)

    def weight_shapes(self, widths: Mapping[str, int], config: ModelConfig) -> Shapes:
        return {self.weight: (config.vocab_size, widths[self.x])}

    def work(self, program: Program) -> Work:
        return Work(2 * program.elements(self.weight), (self.weight,), matrix=self.weight)

    def compute(self, at: Evaluation) -> None:
        """Write ``values["logits"]``, of all rows."""
        found = multiply(at.values[self.x], at.weights[self.weight])
        at.values["logits"] = soft_cap(found, self.softcap)


def multiply(x: Float32, weight: Float32) -> Float32:
    """Return ``x @ weight.T``: all tokens of all sequences in one product."""
    out: Float32 = x.reshape(-1, x.shape[-1]) @ weight.T
    return out.reshape(*x.shape[:-1], len(weight))


def soft_cap(x: Float32, cap: float) -> Float32:
    if not cap:
        return x
    capped: Float32 = np.float32(cap) * np.tanh(x / np.float32(cap))
    return capped


# --- attention -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RopeAndStoreKv(Op):
    """Rotate q and k in place by position; write k and v to the sequence's block of ``layer``."""

    READS = ("q", "k", "v")
    WRITES = ("q",)

    q: str
    k: str
    v: str
    layer: int
    kv_heads: int
    head_dim: int
    rope: Rope

    def work(self, program: Program) -> Work:
        return Work(6 * (program.widths[self.q] + program.widths[self.k]))

    def compute(self, at: Evaluation) -> None:
        for name in (self.q, self.k):
            at.values[name] = rotate(at.values[name], self.head_dim, self.rope, at.kv)
        at.kv.store(self.layer, at.values[self.k], at.values[self.v])


@dataclass(frozen=True, slots=True)
class RotateQueries(Op):
    """Rotate q in place by position, in a layer that reads another layer's keys and values; as if
    the tokens were so many positions ``ahead``, 0 or 1.
    """

    READS = ("q",)
    WRITES = ("q",)

    q: str
    head_dim: int
    rope: Rope
    ahead: int = 0

    def work(self, program: Program) -> Work:
        return Work(6 * program.widths[self.q])

    def compute(self, at: Evaluation) -> None:
        q = at.values[self.q]
        at.values[self.q] = rotate(q, self.head_dim, self.rope, at.kv, self.ahead)


@dataclass(frozen=True, slots=True)
class ScaleByPosition(Op):
    """out = x * (1 + beta * log(1 + floor(position / original))): the temperature of attention, by
    which the queries of Llama 4 and Ministral 3 grow beyond the ``original`` context.
    """

    x: str
    out: str
    beta: float
    original: int

    def work(self, program: Program) -> Work:
        return Work(program.widths[self.x])

    def compute(self, at: Evaluation) -> None:
        x = at.values[self.x]
        times = at.kv.positions(x.shape[1]) // self.original
        factors = (1.0 + self.beta * np.log1p(times)).astype(np.float32)
        at.values[self.out] = x * factors[:, np.newaxis]


def rotate(x: Float32, head_dim: int, rope: Rope, kv: KeyValues, ahead: int = 0) -> Float32:
    """Return every head rotated to its token's position, or one ahead; angles are in float64."""
    heads = x.reshape(*x.shape[:2], -1, head_dim).copy()
    angles = (kv.positions(x.shape[1]) + ahead)[:, None, None] * rope.frequencies
    cosine = (rope.magnitude * np.cos(angles)).astype(np.float32, copy=False)
    sine = (rope.magnitude * np.sin(angles)).astype(np.float32, copy=False)
    half = rope.dim // 2
    first, second = slice(0, half), slice(half, rope.dim)
    if rope.interleaved:
        first, second = slice(0, rope.dim, 2), slice(1, rope.dim, 2)
    a, b = heads[..., first].copy(), heads[..., second].copy()
    heads[..., first] = a * cosine - b * sine
    heads[..., second] = a * sine + b * cosine
    return heads.reshape(x.shape)


@dataclass(frozen=True, slots=True)
class PagedAttention(Op):
    """out = softmax(softcap(scale * q·k)) v over the cached keys of each token's own sequence.

    A query at position p sees keys max(0, p - window + 1) … p (all of 0 … p without a window). A
    head's sink, if it has one, is a score in its softmax with a value of zero (Xiao et al., 2024).
    """

    READS = ("q",)
    crosses_tokens = True
    latent: ClassVar[bool] = False  # as of `Layer`

    q: str
    out: str
    layer: int  # whose keys and values they are
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    softcap: float = 0.0
    sinks: str | None = None  # [query heads]

    def weight_shapes(self, widths: Mapping[str, int], config: ModelConfig) -> Shapes:
        return {} if self.sinks is None else {self.sinks: (config.num_heads,)}

    def work(self, program: Program) -> None:
        """Nothing that is the same in any context: `CostModel` counts the keys that are seen."""

    def key_ops(self, num_heads: int) -> int:
        """Return the operations that a key costs a query of so many heads."""
        return 4 * num_heads * self.head_dim

    def compute(self, at: Evaluation) -> None:
        sinks = None if self.sinks is None else at.weights[self.sinks]
        at.values[self.out] = at.kv.attend(at.values[self.q], self, sinks)


def attend(
    q: Float32,
    k: Float32,
    v: Float32,
    op: PagedAttention,
    start: int = 0,
    first_key: int = 0,
    sinks: Float32 | None = None,
) -> Float32:
    """Return the causal attention of query heads on their group's KV head, some queries at a time.

    The first query is at position ``start``, the first key at ``first_key``; ``sinks`` are those of
    the query heads.
    """
    sequences, tokens, _ = q.shape
    out = np.empty_like(q)
    kv_heads, head_dim, stored_tokens = op.kv_heads, op.head_dim, k.shape[1]
    # [sequences, KV heads, (query heads of one,) tokens, head_dim]
    queries = q.reshape(sequences, tokens, kv_heads, -1, head_dim).transpose(0, 2, 3, 1, 4)
    keys = k.reshape(sequences, stored_tokens, kv_heads, 1, head_dim).transpose(0, 2, 3, 4, 1)
    stored = v.reshape(sequences, stored_tokens, kv_heads, 1, head_dim).transpose(0, 2, 3, 1, 4)
    result = out.reshape(sequences, tokens, kv_heads, -1, head_dim).transpose(0, 2, 3, 1, 4)
    for done in range(0, tokens, QUERIES):
        count = min(QUERIES, tokens - done)
        begin, end = start + done, start + done + count
        first = first_key if op.window is None else max(first_key, begin - op.window + 1)
        within = slice(first - first_key, end - first_key)
        scaled = (queries[..., done : done + count, :] * op.scale).astype(np.float32, copy=False)
        scores = soft_cap(scaled @ keys[..., within], op.softcap)
        distance = np.arange(begin, end)[:, None] - np.arange(first, end)[None, :]
        seen = distance >= 0
        if op.window is not None:
            seen &= distance < op.window
        scores += np.where(seen, np.float32(0.0), np.float32(-np.inf))
        top = scores.max(axis=-1, keepdims=True)
        if sinks is not None:
            sink = sinks.reshape(kv_heads, -1, 1, 1)
            top = np.maximum(top, sink)
        scores -= top
        np.exp(scores, out=scores)
        total = scores.sum(axis=-1, keepdims=True)
        if sinks is not None:
            total += np.exp(sink - top)
        result[..., done : done + count, :] = scores @ stored[..., within, :] / total
    return out


# --- experts -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Route(Op):
    """out[t] = the ``experts.chosen`` experts with the largest ``logits`` of a token, largest first
    and of equal ones the first, then their weights.

    An expert's share is the softmax over all experts, or the sigmoid, of its logit. With a ``bias``
    the largest shares plus biases are chosen. Weights are the shares of the chosen, divided by
    their sum (plus ``normalize_eps``) if they are renormalized, times ``scale`` and the expert's
    own of ``factors``.

    What follows up to `Combine` is of these choices; there is no other `Route` in between.
    """

    READS = ("logits",)

    logits: str  # as wide as there are experts
    out: str
    experts: Experts
    bias: str | None = None  # [experts]
    factors: str | None = None  # [experts]

    @property
    def _vectors(self) -> tuple[str, ...]:
        return tuple(role for role in (self.bias, self.factors) if role is not None)

    def weight_shapes(self, widths: Mapping[str, int], config: ModelConfig) -> Shapes:
        return dict.fromkeys(self._vectors, (widths[self.logits],))

    def work(self, program: Program) -> Work:
        return Work(4 * program.widths[self.logits], self._vectors)

    def compute(self, at: Evaluation) -> None:
        """Write each token's experts (as numbers), then their weights."""
        experts, logits = self.experts, at.values[self.logits]
        if experts.gating == "sigmoid":
            shares = sigmoid(logits)
        else:
            shares = np.exp(logits - logits.max(axis=-1, keepdims=True))
            shares /= shares.sum(axis=-1, keepdims=True)
        ranks = logits if self.bias is None else shares + at.weights[self.bias]
        chosen = np.argsort(-ranks, axis=-1, kind="stable")[..., : experts.chosen]
        picked = np.take_along_axis(shares, chosen, axis=-1)
        if experts.renormalize:
            picked /= picked.sum(axis=-1, keepdims=True) + np.float32(experts.normalize_eps)
        picked *= np.float32(experts.scale)
        if self.factors is not None:
            picked *= at.weights[self.factors][chosen]
        at.values[self.out] = np.concatenate([chosen.astype(np.float32), picked], axis=-1)


@dataclass(frozen=True, slots=True)
class ExpertLinear(Op):
    """out[t, j] = x[t, j] @ weight[e].T (+ bias[e]), where e is the j-th choice of token t.

    ``x`` is one row a token for all its experts, or a row for each of them side by side, as ``out``
    is. The experts' matrices, each [out_features, in_features], are called ``weight.0``, …, and
    their biases, if ``experts`` have any, ``weight.0.bias``, …
    """

    READS = ("x", "route")

    x: str
    route: str
    weight: str
    out: str
    experts: Experts

    @property
    def weights(self) -> tuple[str, ...]:
        return tuple(f"{self.weight}.{index}" for index in range(self.experts.count))

    @property
    def biases(self) -> tuple[str, ...]:
        return tuple(f"{role}.bias" for role in self.weights) if self.experts.biases else ()

    def weight_shapes(self, widths: Mapping[str, int], config: ModelConfig) -> Shapes:
        inner, hidden = self.experts.intermediate_size, config.hidden_size
        out_of_hidden = widths[self.x] == hidden and widths[self.out] == self.experts.chosen * inner
        shape = (inner, hidden) if out_of_hidden else (hidden, inner)
        return dict.fromkeys(self.weights, shape) | dict.fromkeys(self.biases, shape[:1])

    def work(self, program: Program) -> Work:
        first = self.weights[0]
        ops = 2 * program.elements(first) * self.experts.chosen
        return Work(ops, self.weights + self.biases, matrix=first, experts=self.experts)

    def compute(self, at: Evaluation) -> None:
        """Go expert by expert, over the tokens that chose it."""
        x, choices = at.values[self.x], at.values[self.route]
        outputs, inputs = at.weights[self.weights[0]].shape
        chosen, rows = slots(x, choices, self.experts, inputs)
        out = np.empty((*chosen.shape, outputs), np.float32)
        for expert, role in enumerate(self.weights):
            of = chosen == expert
            out[of] = rows[of] @ at.weights[role].T
            if self.experts.biases:
                out[of] += at.weights[self.biases[expert]]
        at.values[self.out] = out.reshape(*x.shape[:-1], -1)


@dataclass(frozen=True, slots=True)
class Combine(Op):
    """out[t] = sum of x[t, j] by the weights of the token's choices, in their order."""

    READS = ("x", "route")

    x: str
    route: str
    out: str
    experts: Experts

    def work(self, program: Program) -> Work:
        return Work(2 * program.widths[self.x])

    def compute(self, at: Evaluation) -> None:
        shares = at.values[self.route][..., self.experts.chosen :, np.newaxis]
        rows = at.values[self.x].reshape(*shares.shape[:-1], -1)
        at.values[self.out] = (shares * rows).sum(axis=-2)


def slots(
    x: Float32, choices: Float32, experts: Experts, inputs: int
) -> tuple[npt.NDArray[np.intp], Float32]:
    """Return, for every token's choices, which expert it is and what goes into it: [tokens, chosen]
    and [tokens, chosen, inputs].
    """
    chosen = choices[..., : experts.chosen].reshape(-1, experts.chosen).astype(np.intp)
    rows = x.reshape(len(chosen), -1, inputs)
    return chosen, np.broadcast_to(rows, (*chosen.shape, inputs))
