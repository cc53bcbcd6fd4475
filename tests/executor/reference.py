"""What a Program means, in float64 and without a cache: the executors are compared with this."""

import numpy as np
import numpy.typing as npt

from octavo.models import program as model
from octavo.models.config import Activation, Experts, Rope

Floats = npt.NDArray[np.float64]


def run(
    program: model.Program, weights: dict[str, Floats], token_ids: list[int], kv: type = np.float16
) -> Floats:
    """[tokens, vocab]: the logits of every position of one sequence.

    Keys and values are rounded to ``kv``, as in the executor's cache.
    """
    values: dict[str, Floats] = {}
    cache: dict[int, tuple[Floats, Floats]] = {}
    positions = np.arange(len(token_ids))
    for op in program.ops:
        match op:
            case model.Embed(weight, out, scale):
                values[out] = weights[weight][token_ids] * scale
            case model.RmsNorm(x, weight, out, eps, group):
                rows = values[x].reshape(len(token_ids), -1, group or values[x].shape[1])
                mean = (rows**2).mean(axis=2, keepdims=True)
                normal = rows / np.sqrt(mean + eps)
                if weight is not None:
                    own = weights[weight].reshape(rows.shape[1:] if op.wide else -1)
                    normal = normal * op.scale * own
                values[out] = normal.reshape(values[x].shape)
            case model.LayerNorm(x, weight, out, eps):
                rows = values[x] - values[x].mean(axis=1, keepdims=True)
                variance = (rows**2).mean(axis=1, keepdims=True)
                values[out] = rows / np.sqrt(variance + eps) * weights[weight]
            case model.ScaleByPosition(x, out, beta, original):
                values[out] = values[x] * (1 + beta * np.log(1 + positions[:, None] // original))
            case model.Scale(x, weight, out):
                values[out] = values[x] * weights[weight]
            case model.Slice(x, out, first, width):
                values[out] = values[x][:, first : first + width]
            case model.Linear(x, weight, out, bias):
                values[out] = values[x] @ weights[weight].T
                if bias is not None:
                    values[out] = values[out] + weights[bias]
            case model.RotateQueries(q, head_dim, rope):
                values[q] = rotate(values[q], positions, head_dim, rope)
            case model.RopeAndStoreKv(q, k, v, layer, _, head_dim, rope):
                values[q] = rotate(values[q], positions, head_dim, rope)
                values[k] = rotate(values[k], positions, head_dim, rope)
                cache[layer] = (
                    values[k].astype(kv).astype(np.float64),
                    values[v].astype(kv).astype(np.float64),
                )
            case model.PagedAttention():
                keys, stored = cache[op.layer]
                sinks = None if op.sinks is None else weights[op.sinks]
                values[op.out] = attend(values[op.q], keys, stored, op.head_dim, op, sinks)
            case model.GatedActivation(gate, up, out, Activation.SWIGLU_CLAMPED, (alpha, limit)):
                g, u = np.minimum(values[gate], limit), np.clip(values[up], -limit, limit)
                values[out] = (u + 1.0) * g / (1.0 + np.exp(-alpha * g))
            case model.GatedActivation(gate, up, out, activation):
                values[out] = activate(values[gate], activation) * values[up]
            case model.GateRow(x, gate, out, group):
                shares = 1.0 / (1.0 + np.exp(-values[gate]))
                values[out] = values[x] * shares.repeat(group or values[x].shape[1], axis=1)
            case model.Route(logits, out, experts, bias, factors):
                values[out] = route(
                    values[logits],
                    experts,
                    np.zeros(experts.count) if bias is None else weights[bias],
                    np.ones(experts.count) if factors is None else weights[factors],
                )
            case model.ExpertLinear(x, route_, _, out, experts):
                choices = values[route_][:, : experts.chosen].astype(int)
                rows = values[x].reshape(len(token_ids), -1, weights[op.weights[0]].shape[1])
                rows = np.broadcast_to(rows, (len(rows), experts.chosen, rows.shape[2]))
                values[out] = np.array(
                    [
                        [weights[op.weights[e]] @ row for e, row in zip(*each, strict=True)]
                        for each in zip(choices, rows, strict=True)
                    ]
                )
                if experts.biases:
                    values[out] += np.array([weights[role] for role in op.biases])[choices]
                values[out] = values[out].reshape(len(rows), -1)
            case model.Combine(x, route_, out, experts):
                shares = values[route_][:, experts.chosen :]
                rows = values[x].reshape(len(token_ids), experts.chosen, -1)
                values[out] = (shares[:, :, None] * rows).sum(axis=1)
            case model.Add(x, y, out):
                values[out] = values[x] + values[y]
            case model.Logits(x, weight, softcap):
                logits: Floats = values[x] @ weights[weight].T
                return softcap * np.tanh(logits / softcap) if softcap else logits
    raise ValueError("the program computes no logits")


def route(logits: Floats, experts: Experts, bias: Floats, factors: Floats) -> Floats:
    """Each row's experts, then their weights."""
    if experts.gating == "sigmoid":
        shares = 1.0 / (1.0 + np.exp(-logits))
    else:
        shares = np.exp(logits - logits.max(axis=1, keepdims=True))
        shares /= shares.sum(axis=1, keepdims=True)
    chosen = np.argsort(-(shares + bias), axis=1, kind="stable")[:, : experts.chosen]
    picked = np.take_along_axis(shares, chosen, axis=1)
    if experts.renormalize:
        picked /= picked.sum(axis=1, keepdims=True) + experts.normalize_eps
    return np.concatenate([chosen, picked * experts.scale * factors[chosen]], axis=1)


def rotate(x: Floats, positions: npt.NDArray[np.int64], head_dim: int, rope: Rope) -> Floats:
    heads = x.reshape(len(x), -1, head_dim).copy()
    frequencies = rope.scale * rope.theta ** (-2.0 * np.arange(rope.dim // 2) / rope.dim)
    if rope.factors:
        frequencies = frequencies / np.array(rope.factors)
    angles = positions[:, None, None] * frequencies
    if rope.interleaved:
        first, second = slice(0, rope.dim, 2), slice(1, rope.dim, 2)
    else:
        first, second = slice(0, rope.dim // 2), slice(rope.dim // 2, rope.dim)
    a, b = heads[..., first].copy(), heads[..., second].copy()
    heads[..., first] = a * np.cos(angles) - b * np.sin(angles)
    heads[..., second] = a * np.sin(angles) + b * np.cos(angles)
    return heads.reshape(x.shape)


def attend(
    q: Floats,
    keys: Floats,
    values: Floats,
    head_dim: int,
    op: model.PagedAttention,
    sinks: Floats | None,
) -> Floats:
    queries = q.reshape(len(q), -1, head_dim).transpose(1, 0, 2)
    group = queries.shape[0] // (keys.shape[1] // head_dim)
    by_head = keys.reshape(len(keys), -1, head_dim).transpose(1, 0, 2).repeat(group, axis=0)
    stored = values.reshape(len(values), -1, head_dim).transpose(1, 0, 2).repeat(group, axis=0)
    scores = queries @ by_head.transpose(0, 2, 1) * op.scale
    if op.softcap:
        scores = op.softcap * np.tanh(scores / op.softcap)
    distance = np.arange(len(q))[:, None] - np.arange(len(keys))[None, :]
    seen = distance >= 0
    if op.window is not None:
        seen &= distance < op.window
    scores = np.where(seen, scores, -np.inf)
    if sinks is not None:  # as one more key, the last
        beside = np.broadcast_to(sinks[:, None, None], (*scores.shape[:2], 1))
        scores = np.concatenate([scores, beside], axis=2)
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    weights /= weights.sum(axis=2, keepdims=True)
    result: Floats = (weights[..., : len(keys)] @ stored).transpose(1, 0, 2).reshape(q.shape)
    return result


def activate(x: Floats, activation: Activation) -> Floats:
    if activation is Activation.SILU:
        return x / (1.0 + np.exp(-x))
    inner = np.sqrt(2.0 / np.pi) * (x + 0.044715 * x**3)
    result: Floats = 0.5 * x * (1.0 + np.tanh(inner))
    return result
