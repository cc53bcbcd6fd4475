"""AWQ: inputs that matter are made smaller and their weights larger, so that rounding hurts less.

Lin et al., "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration", 2023.
Where linear layers share an input, its channels are divided by scales s = a^r (a: the channel's
mean magnitude), or a^r / w^(1-r) (w: its weights' mean magnitude within their groups), and the
weights multiplied by them; the exponent r is searched on a grid. Whatever makes the input takes the
division over (a norm's weight, the rows of a projection), so that the model stays the same
function. Then each group's range is clipped to what loses least.

The loss is the layers' mean squared output error on the calibration text, which the second moments
of the inputs give exactly: tr(E M Eᵀ) for an error E of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from octavo.tools.quantize.calibrate import Moments
from octavo.tools.quantize.grid import Float32, Float64, Quantized, Scheme, round_to_nearest
from octavo.tools.quantize.layers import LayerOps, Maker, SharedInput

EXPONENTS = 20  # from 0 to below 1
ROWS = 512  # of the matrices, evenly spread, on which scales are compared

# A norm or a router as its layout will give it back: they may be stored in few bits.
Stored = Callable[[str, Float32], Float32]


# What a layer's inputs were on the calibration text, in the layer's order; None: of an expert that
# has seen too little of it.
Inputs = Iterable[tuple[SharedInput, Moments | None]]


class Folded(NamedTuple):
    """A layer's weights with the scales folded in, still the same function. By the role of each
    matrix: the ``scales`` of its inputs, where there are any; the ``blocks`` [groups, size, size]
    around the diagonal of its inputs' second moments before."""

    weights: dict[str, Float32]
    scales: dict[str, Float32]
    blocks: dict[str, Float64]


def awq(
    scheme: Scheme,
    layer: LayerOps,
    weights: Mapping[str, Float32],
    inputs: Inputs,
    stored: Stored,
) -> tuple[dict[str, Quantized], dict[str, Float32]]:
    """A layer's matrices, scaled and rounded, and what was scaled with them and is not rounded:
    vectors, and a router."""
    folded = fold(scheme, weights, inputs, stored)
    found = {}
    for shared in layer.inputs:
        for role in shared.roles:
            if shared.router:
                continue
            # Scores are a product of two roundings: clipping q and k does harm.
            scored = role.rpartition(".")[2] in ("attn_q", "attn_k")
            clip = None if scored else _scaled_blocks(folded, role)
            found[role] = round_to_nearest(scheme, folded.weights[role], clip)
    others = {
        role: value
        for role, value in folded.weights.items()
        if role not in found and value is not weights[role]
    }
    return found, others


def fold(scheme: Scheme, weights: Mapping[str, Float32], inputs: Inputs, stored: Stored) -> Folded:
    """A layer's weights with the best scales folded in.

    Scales before experts are one for all: they are searched on the rows of all tokens, and on as
    many rows of the experts' matrices as one of them has.
    """
    folded = Folded(dict(weights), {}, {})
    for shared, moments in inputs:
        if moments is None:
            continue
        if not shared.router:
            folded.blocks.update(dict.fromkeys(shared.roles, _blocks(scheme, moments)))
        if shared.maker is None:
            continue
        searched = shared.along or shared.roles
        step = len(searched) if shared.router else 1
        stacked = np.concatenate([folded.weights[role][::step] for role in searched])
        scale = best_scale(scheme, stacked, moments)
        if scale is None:
            continue
        scale = _divide(folded.weights, shared.maker, scale, stored)
        for role in (*shared.roles, *shared.along):
            folded.weights[role] = folded.weights[role] * scale
            folded.scales[role] = scale
        if shared.router:
            for role in shared.roles:
                folded.weights[role] = stored(role, folded.weights[role])
    return folded


def _blocks(scheme: Scheme, moments: Moments) -> Float64:
    second, size = moments.second, scheme.size(len(moments.second))
    return np.stack([second[at : at + size, at : at + size] for at in range(0, len(second), size)])


def _scaled_blocks(folded: Folded, role: str) -> Float64 | None:
    """Return those of the inputs as they are once the scales are folded in."""
    blocks, scale = folded.blocks.get(role), folded.scales.get(role)
    if blocks is None or scale is None:
        return blocks
    by_group = scale.reshape(len(blocks), -1)
    return blocks / (by_group[:, :, None] * by_group[:, None, :])


def best_scale(scheme: Scheme, weights: Float32, moments: Moments) -> Float32 | None:
    """The scales [in] with the least loss, or None where none is better than no scales."""
    shares = _group_shares(scheme, weights)
    weights = weights[:: -(-len(weights) // ROWS)]
    gram = (moments.second / max(float(np.trace(moments.second)), 1e-30)).astype(np.float32)

    def loss(scaled: Float32) -> float:
        error = scaled - weights
        return float(((error @ gram) * error).sum(dtype=np.float64))

    least, best = loss(round_to_nearest(scheme, weights).values()), None
    for scale in _candidates(moments.magnitude, shares):
        its = loss(round_to_nearest(scheme, weights * scale).values() / scale)
        if its < least:
            least, best = its, scale
    return best


def _group_shares(scheme: Scheme, weights: Float32) -> Float64:
    """Return every input's mean magnitude of weights, as a share of the largest in its group."""
    blocks = np.abs(weights).reshape(len(weights), -1, scheme.size(weights.shape[1]))
    most = np.maximum(blocks.max(axis=2, keepdims=True), 1e-12)
    shares: Float64 = (blocks / most).mean(axis=0, dtype=np.float64)
    return shares.reshape(-1)


def _candidates(magnitude: Float64, share: Float64) -> Iterator[Float32]:
    for exponent in np.arange(EXPONENTS) / EXPONENTS:
        for divisor in (1.0, np.maximum(share, 1e-6) ** (1.0 - exponent)):
            scale = np.maximum(np.maximum(magnitude, 1e-8) ** exponent / divisor, 1e-4)
            scale = scale / np.sqrt(scale.max() * scale.min())
            if np.isfinite(scale).all() and scale.min() > 1e-4 and scale.max() < 1e4:
                yield scale.astype(np.float32)


def _divide(folded: dict[str, Float32], maker: Maker, scale: Float32, stored: Stored) -> Float32:
    """Divides what ``maker`` puts out by (nearly) ``scale``, and says by what exactly."""
    if not maker.norm:
        folded[maker.weight] = folded[maker.weight] / scale[:, None]
        if maker.bias is not None:
            folded[maker.bias] = folded[maker.bias] / scale
        return scale
    before = folded[maker.weight]
    after = stored(maker.weight, before / scale)
    usable = (before != 0.0) & (after != 0.0)
    exact = np.divide(before, after, out=np.ones_like(scale), where=usable)
    folded[maker.weight] = np.where(usable, after, before)
    return exact
