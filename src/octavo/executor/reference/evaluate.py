"""A Program in numpy, in fp32: the plain meaning of what the other executors compute.

It computes the ops in the order they are listed, so it is also where a layer can be looked into:
`run` takes any stretch of ops, on the values that it finds. Weights come as fp32 arrays by role.
Values are [sequences, tokens, width]. Every sequence starts at position 0 and is whole, unless a
`KeyValues` says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt

from octavo.models import program as model
from octavo.models.config import Activation, Experts, ModelConfig, Rope
from octavo.models.program import Op, Program

Float32 = npt.NDArray[np.float32]
Ids = npt.NDArray[np.integer]
Values = dict[str, Float32]

QUERIES = 256  # whose scores are held at a time: a long sequence needs no square of its length


class KeyValues(Protocol):
    """Where the tokens stand, and what they attend to."""

    def positions(self, tokens: int) -> Ids:
        """Return the positions of the values' tokens."""
        ...

    def store(self, layer: int, keys: Float32, values: Float32) -> None:
        """Keep the keys and values [sequences, tokens, KV width] of a layer."""
        ...

    def attend(self, queries: Float32, head_dim: int, op: model.PagedAttention) -> Float32:
        """Return what the queries find among all keys of their own sequence."""
        ...


class WholeSequences:
    """Implements `KeyValues` for sequences that start at 0 and end with the values."""

    def __init__(self) -> None:
        self._stored: dict[int, tuple[Float32, Float32]] = {}

    def positions(self, tokens: int) -> Ids:
        return np.arange(tokens)

    def store(self, layer: int, keys: Float32, values: Float32) -> None:
        self._stored[layer] = keys, values

    def attend(self, queries: Float32, head_dim: int, op: model.PagedAttention) -> Float32:
        return attend(queries, *self._stored[op.layer], head_dim, op)


def logits(
    program: Program, weights: Mapping[str, Float32], token_ids: Ids
) -> npt.NDArray[np.float32]:
    """[sequences, tokens, vocab]: the logits of every position of token_ids [sequences, tokens]."""
    values: Values = {}
    run(program.ops, program.config, weights, values, token_ids)
    return values["logits"]


def run(
    ops: Iterable[Op],
    config: ModelConfig,
    weights: Mapping[str, Float32],
    values: Values,
    token_ids: Ids | None = None,
    kv: KeyValues | None = None,
) -> None:
    """Execute ``ops`` in order, on and into ``values``; `Logits` writes ``values["logits"]``.

    ``token_ids`` [sequences, tokens] are for an `Embed`; the rows for an `Input` are among the
    ``values``, under its name.
    """
    kv = kv or WholeSequences()
    for op in ops:
        match op:
            case model.Embed():
                if token_ids is None:
                    raise ValueError("there is an embedding to do and there are no token ids")
                values[op.out] = weights[op.weight][token_ids] * np.float32(op.scale)
            case model.Input():
                if op.out not in values:
                    raise ValueError(f"there are no rows for {op.out}")
            case model.RmsNorm():
                values[op.out] = rms_norm(values[op.x], weights[op.weight], op)
            case model.Linear():
                out = linear(values[op.x], weights[op.weight])
                values[op.out] = out if op.bias is None else out + weights[op.bias]
            case model.RopeAndStoreKv():
                for name in (op.q, op.k):
                    at = kv.positions(values[name].shape[1])
                    values[name] = rotate(values[name], config.head_dim, op.rope, at)
                kv.store(op.layer, values[op.k], values[op.v])
            case model.PagedAttention():
                values[op.out] = kv.attend(values[op.q], config.head_dim, op)
            case model.Activate():
                values[op.out] = activate(values[op.x], op.activation)
            case model.GatedActivation():
                values[op.out] = activate(values[op.gate], op.activation) * values[op.up]
            case model.Route():
                values[op.out] = route(values[op.logits], op.experts)
            case model.ExpertLinear():
                values[op.out] = expert_linear(values[op.x], values[op.route], weights, op)
            case model.Combine():
                shares = values[op.route][..., op.experts.chosen :, np.newaxis]
                rows = values[op.x].reshape(*shares.shape[:-1], -1)
                values[op.out] = (shares * rows).sum(axis=-2)
            case model.Add():
                values[op.out] = values[op.x] + values[op.y]
            case model.Logits():
                found = linear(values[op.x], weights[op.weight])
                values["logits"] = soft_cap(found, op.softcap)


def linear(x: Float32, weight: Float32) -> Float32:
    """All tokens of all sequences in one product."""
    out: Float32 = x.reshape(-1, x.shape[-1]) @ weight.T
    return out.reshape(*x.shape[:-1], len(weight))


def rms_norm(x: Float32, weight: Float32, op: model.RmsNorm) -> Float32:
    rows = x.reshape(*x.shape[:-1], -1, op.group or x.shape[-1])
    mean = np.square(rows).mean(axis=-1, keepdims=True)
    out: Float32 = rows / np.sqrt(mean + np.float32(op.eps)) * (weight * np.float32(op.scale))
    return out.reshape(x.shape)


def rotate(x: Float32, head_dim: int, rope: Rope, positions: Ids) -> Float32:
    """Return every head of ``x`` rotated to its token's position; angles are in float64."""
    heads = x.reshape(*x.shape[:2], -1, head_dim).copy()
    frequencies = rope.scale * rope.theta ** (-2.0 * np.arange(rope.dim // 2) / rope.dim)
    if rope.factors:
        frequencies = frequencies / np.array(rope.factors)
    angles = positions[:, None, None] * frequencies
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


def attend(
    q: Float32,
    k: Float32,
    v: Float32,
    head_dim: int,
    op: model.PagedAttention,
    start: int = 0,
    first_key: int = 0,
) -> Float32:
    """Return the causal attention of query heads on their group's KV head, some queries at a time.

    The first query is at position ``start``, the first key at ``first_key``.
    """
    sequences, tokens, _ = q.shape
    out = np.empty_like(q)
    kv_heads, stored_tokens = k.shape[-1] // head_dim, k.shape[1]
    # [sequences, KV heads, (query heads of one,) tokens, head_dim]
    queries = q.reshape(sequences, tokens, kv_heads, -1, head_dim).transpose(0, 2, 3, 1, 4)
    keys = k.reshape(sequences, stored_tokens, kv_heads, 1, head_dim).transpose(0, 2, 3, 4, 1)
    stored = v.reshape(sequences, stored_tokens, kv_heads, 1, head_dim).transpose(0, 2, 3, 1, 4)
    result = out.reshape(sequences, tokens, kv_heads, -1, head_dim).transpose(0, 2, 3, 1, 4)
    for done in range(0, tokens, QUERIES):
        count = min(QUERIES, tokens - done)
        begin, end = start + done, start + done + count
        first = first_key if op.window is None else max(first_key, begin - op.window + 1)
        seen_keys = slice(first - first_key, end - first_key)
        scaled = (queries[..., done : done + count, :] * op.scale).astype(np.float32, copy=False)
        scores: Float32 = scaled @ keys[..., seen_keys]
        if op.softcap:
            scores = soft_cap(scores, op.softcap)
        distance = np.arange(begin, end)[:, None] - np.arange(first, end)[None, :]
        seen = distance >= 0
        if op.window is not None:
            seen &= distance < op.window
        scores += np.where(seen, np.float32(0.0), np.float32(-np.inf))
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        total = scores.sum(axis=-1, keepdims=True)
        result[..., done : done + count, :] = scores @ stored[..., seen_keys, :] / total
    return out


def route(logits: Float32, experts: Experts) -> Float32:
    """Each token's experts (as numbers), then their weights."""
    chosen = np.argsort(-logits, axis=-1, kind="stable")[..., : experts.chosen]
    shares = np.exp(logits - logits.max(axis=-1, keepdims=True))
    shares /= shares.sum(axis=-1, keepdims=True)
    picked = np.take_along_axis(shares, chosen, axis=-1)
    if experts.renormalize:
        picked /= picked.sum(axis=-1, keepdims=True)
    return np.concatenate([chosen.astype(np.float32), picked], axis=-1)


def expert_linear(
    x: Float32, choices: Float32, weights: Mapping[str, Float32], op: model.ExpertLinear
) -> Float32:
    """Expert by expert, over the tokens that chose it."""
    outputs, inputs = weights[op.weights[0]].shape
    chosen, rows = slots(x, choices, op.experts, inputs)
    out = np.empty((*chosen.shape, outputs), np.float32)
    for expert, role in enumerate(op.weights):
        of = chosen == expert
        out[of] = rows[of] @ weights[role].T
    return out.reshape(*x.shape[:-1], -1)


def slots(
    x: Float32, choices: Float32, experts: Experts, inputs: int
) -> tuple[npt.NDArray[np.intp], Float32]:
    """Of every token's choices, which expert it is and what goes into it: [tokens, chosen] and
    [tokens, chosen, inputs]."""
    chosen = choices[..., : experts.chosen].reshape(-1, experts.chosen).astype(np.intp)
    rows = x.reshape(len(chosen), -1, inputs)
    return chosen, np.broadcast_to(rows, (*chosen.shape, inputs))


def activate(x: Float32, activation: Activation) -> Float32:
    one = np.float32(1.0)
    if activation is Activation.SILU:
        with np.errstate(over="ignore"):  # to infinity, whose inverse is the 0 that is meant
            return (x / (one + np.exp(-x))).astype(np.float32, copy=False)
    inner = np.float32(np.sqrt(2.0 / np.pi)) * (x + np.float32(0.044715) * x * x * x)
    return (np.float32(0.5) * x * (one + np.tanh(inner))).astype(np.float32, copy=False)


def soft_cap(x: Float32, cap: float) -> Float32:
    if not cap:
        return x
    capped: Float32 = np.float32(cap) * np.tanh(x / np.float32(cap))
    return capped
