"""Ops of recurrent layers: what they compute from a token and the state that others have left.

Each `Recurrence` is sequential over tokens, in fp32, so that what a token leaves depends on the
state and on that token only, and a sequence may be cut anywhere.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import ClassVar, NamedTuple

import numpy as np

from octavo.models.config import Activation, ModelConfig
from octavo.models.program import (
    Evaluation,
    Float32,
    Op,
    Program,
    RowFunction,
    RowOp,
    Shapes,
    Work,
    activate,
)
from octavo.models.recurrence_shape import (
    DeltaShape,
    MambaShape,
    RecurrenceShape,
    ShortConvShape,
)

UNIT_EPS = np.float32(1e-6)  # added to the square of what a delta net divides keys and queries by


@dataclass(frozen=True, slots=True)
class Softplus(RowOp):
    """out = log(1 + e^(x + bias))."""

    label = "softplus"

    x: str
    bias: str
    out: str

    def row_function(self) -> RowFunction:
        return RowFunction("softplus", ((self.bias, 1.0),))

    def weight_shapes(self, widths: Mapping[str, int], config: ModelConfig) -> Shapes:
        return {self.bias: (widths[self.x],)}

    def work(self, program: Program) -> Work:
        return Work(20 * program.widths[self.x], (self.bias,))

    def compute(self, at: Evaluation) -> None:
        at.values[self.out] = _softplus(at.values[self.x] + at.weights[self.bias])


@dataclass(frozen=True, slots=True)
class DecayGate(RowOp):
    """out = e^(a log(1 + e^(x + bias))): how much of its state a head keeps."""

    label = "decay"

    x: str
    bias: str
    a: str  # negative
    out: str

    def row_function(self) -> RowFunction:
        return RowFunction("decay", ((self.bias, 1.0), (self.a, 1.0)))

    def weight_shapes(self, widths: Mapping[str, int], config: ModelConfig) -> Shapes:
        return dict.fromkeys((self.bias, self.a), (widths[self.x],))

    def work(self, program: Program) -> Work:
        return Work(30 * program.widths[self.x], (self.bias, self.a))

    def compute(self, at: Evaluation) -> None:
        step = _softplus(at.values[self.x] + at.weights[self.bias])
        at.values[self.out] = np.exp(at.weights[self.a] * step)


class RecurrentState(NamedTuple):
    """What a layer knows of the tokens before: the last inputs of its convolution [taps - 1,
    channels], the oldest first, and matrices [heads, depth, width] if it has any.
    """

    inputs: Float32
    matrix: Float32 | None


class Recurrence(Op):
    """An op that goes through the tokens of a sequence one by one.

    Its first value is what the convolution reads; the others, if any, are numbers a head.
    """

    __slots__ = ()
    crosses_tokens = True
    label: ClassVar[str]  # in profiles
    layer: int
    shape: RecurrenceShape
    weight: str
    bias: str | None
    out: str

    @abstractmethod
    def advance(
        self, weights: Mapping[str, Float32], rows: Float32, state: RecurrentState
    ) -> tuple[Float32, RecurrentState]:
        """Return what the tokens find and the state behind the last. ``rows`` [tokens, channels +
        gates] are its values side by side.
        """

    @property
    def initial(self) -> RecurrentState:
        """The state before the first token: zeros."""
        shape = self.shape
        inputs = np.zeros((shape.taps - 1, shape.channels), np.float32)
        matrix = None if shape.matrix is None else np.zeros(shape.matrix, np.float32)
        return RecurrentState(inputs, matrix)

    def weight_shapes(self, widths: Mapping[str, int], config: ModelConfig) -> Shapes:
        shape = self.shape
        bias: Shapes = {} if self.bias is None else {self.bias: (shape.channels,)}
        return {self.weight: (shape.channels, 1, shape.taps)} | bias

    def work(self, program: Program) -> Work:
        shape = self.shape
        numbers = prod(shape.matrix or (0,))
        ops = 2 * shape.taps * shape.channels + self._matrix_ops() * numbers
        state_bytes = 4 * ((shape.taps - 1) * shape.channels + numbers)
        weights = tuple(self.weight_shapes(program.widths, program.config))
        return Work(ops, weights, state_bytes=state_bytes)

    def _matrix_ops(self) -> int:
        """Return the arithmetic operations a token for each number of the matrices."""
        return 0

    def compute(self, at: Evaluation) -> None:
        rows = np.concatenate([at.values[name] for name in self.reads], axis=-1)
        at.values[self.out] = at.kv.recur(self, at.weights, rows)

    def _convolved(
        self, weights: Mapping[str, Float32], inputs: Float32, state: RecurrentState
    ) -> tuple[Float32, Float32]:
        """Return the results of the causal convolution, and the inputs to remember."""
        weight, tokens = weights[self.weight], len(inputs)
        seen = np.concatenate([state.inputs, inputs])
        out = np.zeros_like(inputs)
        if self.bias is not None:
            out += weights[self.bias]
        for tap in range(self.shape.taps):
            out = out + weight[:, 0, tap] * seen[tap : tap + tokens]
        return out, seen[tokens:]


@dataclass(frozen=True, slots=True)
class ShortConv(Recurrence):
    """out[t] = bias + sum of weight[:, j] * x[t - taps + 1 + j], over the taps j (LFM2)."""

    label = "convolution"

    x: str
    weight: str
    out: str
    layer: int
    shape: ShortConvShape
    bias: str | None = None

    def advance(
        self, weights: Mapping[str, Float32], rows: Float32, state: RecurrentState
    ) -> tuple[Float32, RecurrentState]:
        out, inputs = self._convolved(weights, rows, state)
        return out, RecurrentState(inputs, None)


@dataclass(frozen=True, slots=True)
class GatedDelta(Recurrence):
    """Gated delta net (Yang et al., 2025, equation 10): S = g S (I - beta k kᵀ) + beta v kᵀ,

    x is [q | k | v] before a convolution and SiLU; q and k are then scaled to length one, q also by
    key_dim^-1/2. ``decay`` (g) and ``beta`` have a number for each value head.
    """

    READS = ("x", "decay", "beta")
    label = "delta net"

    x: str
    decay: str
    beta: str
    weight: str
    out: str
    layer: int
    shape: DeltaShape
    bias: str | None = None

    def _matrix_ops(self) -> int:
        return 7  # two products of two, and an update of three

    def advance(
        self, weights: Mapping[str, Float32], rows: Float32, state: RecurrentState
    ) -> tuple[Float32, RecurrentState]:
        s = self.shape
        x, gates = rows[:, : s.channels], rows[:, s.channels :]
        mixed, inputs = self._convolved(weights, x, state)
        mixed = activate(mixed, Activation.SILU)
        keys = s.key_heads * s.key_dim
        q, k = (
            _unit(part.reshape(-1, s.key_heads, s.key_dim))
            for part in (mixed[:, :keys], mixed[:, keys : 2 * keys])
        )
        v = mixed[:, 2 * keys :].reshape(-1, s.value_heads, s.value_dim)
        heads = np.arange(s.value_heads)
        ratio = s.value_heads // s.key_heads
        key_head = heads % s.key_heads if s.tiled else heads // ratio
        q, k = q[:, key_head] * np.float32(s.key_dim**-0.5), k[:, key_head]
        decay, beta = gates[:, : s.value_heads], gates[:, s.value_heads :]
        assert state.matrix is not None
        matrix, out = state.matrix, np.empty_like(v)
        for t in range(len(rows)):
            matrix = decay[t, :, None, None] * matrix
            change = (v[t] - np.einsum("hkv,hk->hv", matrix, k[t])) * beta[t, :, None]
            matrix = matrix + k[t, :, :, None] * change[:, None, :]
            out[t] = np.einsum("hkv,hk->hv", matrix, q[t])
        return out.reshape(len(rows), s.value_heads * s.value_dim), RecurrentState(inputs, matrix)


@dataclass(frozen=True, slots=True)
class Mamba2(Recurrence):
    """Mamba-2 (Dao and Gu, 2024): S = e^(dt a) S + B (dt x), out = Sᵀ C + d x.

    x is [x | B | C] before a convolution and SiLU. ``dt``, ``a`` and ``d`` have a number a head.
    """

    READS = ("x", "dt")
    label = "mamba"

    x: str
    dt: str
    weight: str
    a: str
    d: str
    out: str
    layer: int
    shape: MambaShape
    bias: str | None = None

    def weight_shapes(self, widths: Mapping[str, int], config: ModelConfig) -> Shapes:
        heads = (self.shape.heads,)
        # A zero-argument super() does not work in a class with slots.
        return Recurrence.weight_shapes(self, widths, config) | {self.a: heads, self.d: heads}

    def _matrix_ops(self) -> int:
        return 5  # an update of three, and a product of two

    def advance(
        self, weights: Mapping[str, Float32], rows: Float32, state: RecurrentState
    ) -> tuple[Float32, RecurrentState]:
        s = self.shape
        mixed, inputs = self._convolved(weights, rows[:, : s.channels], state)
        mixed = activate(mixed, Activation.SILU)
        wide = s.heads * s.head_dim
        x = mixed[:, :wide].reshape(-1, s.heads, s.head_dim)
        b, c = (
            part.reshape(-1, s.groups, s.state).repeat(s.heads // s.groups, axis=1)
            for part in np.split(mixed[:, wide:], 2, axis=1)
        )
        dt = rows[:, s.channels :]
        decay = np.exp(dt * weights[self.a])
        assert state.matrix is not None
        matrix, out = state.matrix, np.empty_like(x)
        for t in range(len(rows)):
            step = dt[t, :, None] * x[t]
            matrix = decay[t, :, None, None] * matrix + b[t, :, :, None] * step[:, None, :]
            out[t] = np.einsum("hnp,hn->hp", matrix, c[t]) + weights[self.d][:, None] * x[t]
        return out.reshape(len(rows), wide), RecurrentState(inputs, matrix)


def _softplus(x: Float32) -> Float32:
    result: Float32 = np.logaddexp(np.float32(0.0), x)
    return result


def _unit(x: Float32) -> Float32:
    square = np.square(x).sum(axis=-1, keepdims=True)
    unit: Float32 = x / np.sqrt(square + UNIT_EPS)
    return unit
