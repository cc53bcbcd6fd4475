"""AWQ: what is folded is the same function, and what comes out loses less than rounding."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from execute import tiny
from octavo.execute import reference
from octavo.model import families
from octavo.model.config import ModelConfig
from octavo.model.program import Linear, Program, RmsNorm
from octavo.quant.awq import awq, best_scale, fold
from octavo.quant.blocks import dequantize
from octavo.quant.calibrate import Moments
from octavo.quant.gptq import relative_loss
from octavo.quant.grid import Kind, Scheme, bf16, round_to_nearest
from octavo.quant.layers import split

Float32 = npt.NDArray[np.float32]
SCHEME = Scheme(4, 32, Kind.ASYMMETRIC)
MODELS = {
    "llama": tiny.config(),  # two query heads on a KV head
    "llama, every head its own": tiny.config(num_kv_heads=4),
    "qwen2": tiny.config("qwen2", biases=frozenset({"attn_q", "attn_k", "attn_v", "ffn_up"})),
    "gemma3": tiny.config("gemma3"),
    "olmo2": tiny.config("olmo2"),
    "biases": tiny.config(num_kv_heads=4, biases=frozenset({"attn_v", "attn_output", "ffn_up"})),
}
IDS = np.random.default_rng(8).integers(0, 70, (4, 24))


def weights_of(config: ModelConfig) -> dict[str, Float32]:
    """With a few inputs that are much larger than the others, as in real models."""
    checkpoint = tiny.checkpoint(config)
    weights = {role: np.array(dequantize(weight)) for role, weight in checkpoint.weights.items()}
    for role, value in weights.items():
        if role.endswith(("attn_norm", "ffn_norm")):
            value[::17] *= 8.0
    return weights


def moments_of(program: Program, weights: dict[str, Float32]) -> dict[str, Moments]:
    found: dict[str, Moments] = {}

    def seen(op: Linear, x: Float32) -> None:
        found.setdefault(op.weight, Moments(x.shape[-1])).add(x)

    reference.run(program.ops, program.config, weights, {}, IDS, seen)
    return found


def plain(_: str, values: Float32) -> Float32:
    return values


def eighth_bits(_: str, values: Float32) -> Float32:
    return bf16(values)


@pytest.mark.parametrize("stored", [plain, eighth_bits])
@pytest.mark.parametrize("name", MODELS)
def test_the_folded_model_is_the_same_function(name: str, stored: Any) -> None:
    program = families.program(MODELS[name])
    weights = weights_of(MODELS[name])
    expected = reference.logits(program, weights, IDS)
    moments = moments_of(program, weights)
    folded = dict(weights)
    count = 0
    for layer in split(program)[1]:
        own = {role: weights[role] for role in layer.weights}
        changed, scales = fold(SCHEME, layer, own, moments, stored)
        folded |= changed
        count += len(scales)
        for role in layer.weights:
            if role.endswith("norm") and changed[role] is not own[role]:
                assert np.array_equal(stored(role, changed[role]), changed[role])
    assert count >= 3  # otherwise nothing has been tried
    got = reference.logits(program, folded, IDS)
    assert np.abs(got - expected).max() < 2e-4 * np.abs(expected).max()


def test_what_may_be_scaled() -> None:
    """The input of o only where every query head has values of its own; that of olmo2's q, k and v
    is the residual stream."""
    makers = {}
    for name, config in MODELS.items():
        (layer, *_) = split(families.program(config))[1]
        makers[name] = [shared.maker for shared in layer.inputs]
        assert [shared.roles[0].split(".")[2] for shared in layer.inputs] == [
            "attn_q", "attn_output", "ffn_gate", "ffn_down",
        ]  # fmt: skip
        assert isinstance(makers[name][3], Linear)
        assert makers[name][3].out == "up"
    kinds = {name: [type(maker) for maker in found] for name, found in makers.items()}
    none = type(None)
    assert kinds["llama"][:3] == [RmsNorm, none, RmsNorm]
    assert kinds["llama, every head its own"][:3] == [RmsNorm, Linear, RmsNorm]
    assert kinds["olmo2"][:3] == [none, none, none]
    assert makers["biases"][1].out == "v"  # type: ignore[union-attr]


@pytest.mark.parametrize("name", MODELS)
def test_outputs_lose_less_than_by_rounding(name: str) -> None:
    program = families.program(MODELS[name])
    weights = weights_of(MODELS[name])
    moments = moments_of(program, weights)
    ratios = []
    for layer in split(program)[1]:
        own = {role: weights[role] for role in layer.weights}
        found, vectors = awq(SCHEME, layer, own, moments, plain)
        folded, scales = fold(SCHEME, layer, own, moments, plain)
        for shared in layer.inputs:
            scale = scales.get(shared.first, np.float32(1.0))
            for role in shared.roles:
                own_moments = moments[role].second / np.outer(scale, scale) if (
                    shared.first in scales
                ) else moments[role].second  # fmt: skip
                ours = relative_loss(folded[role], found[role].values(), own_moments)
                nearest = round_to_nearest(SCHEME, own[role]).values()
                ratios.append(ours / relative_loss(own[role], nearest, moments[role].second))
        assert set(vectors) <= {role for role in own if own[role].ndim == 1}
    assert np.mean(ratios) < 0.9
    assert max(ratios) < 1.2


def test_nothing_is_scaled_for_nothing() -> None:
    """Weights that are on their grids already."""
    moments = Moments(64)
    moments.add(np.eye(64, dtype=np.float32))
    weights = np.tile(np.arange(-7, 9, dtype=np.float32) / 8, (8, 4))
    assert np.array_equal(round_to_nearest(SCHEME, weights).values(), weights)
    assert best_scale(SCHEME, weights, moments) is None


def test_dead_inputs_get_a_scale_that_is_finite() -> None:
    moments = Moments(64)
    x = np.random.default_rng(1).normal(size=(50, 64)).astype(np.float32)
    x[:, [3, 60]] = 0.0
    moments.add(x)
    weights = np.random.default_rng(2).normal(size=(20, 64)).astype(np.float32)
    scale = best_scale(SCHEME, weights, moments)
    assert scale is None or (np.isfinite(scale).all() and (scale > 0).all())
