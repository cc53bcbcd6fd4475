"""AWQ: what is folded is the same function, and what comes out loses less than rounding."""

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from executor import tiny
from octavo.executor.reference import evaluate
from octavo.executor.reference.evaluate import WholeSequences
from octavo.loader.bind import ROUTER, ROUTERS
from octavo.loader.dequantize import dequantize
from octavo.models import families
from octavo.models.config import ModelConfig
from octavo.models.program import Program, Values, slots
from octavo.tools.quantize.awq_scaling import awq, best_scale, fold
from octavo.tools.quantize.calibrate import Moments
from octavo.tools.quantize.gptq_rounding import relative_loss
from octavo.tools.quantize.grid import CodeKind, Scheme, bf16, round_to_nearest
from octavo.tools.quantize.layers import LayerOps, Maker, SharedInput, split

Float32 = npt.NDArray[np.float32]
SCHEME = Scheme(4, 32, CodeKind.ASYMMETRIC)
MODELS = {
    "llama": tiny.config(),  # two query heads on a KV head
    "llama, every head its own": tiny.config(num_kv_heads=4),
    "qwen2": tiny.config("qwen2", biases=frozenset({"attn_q", "attn_k", "attn_v", "ffn_up"})),
    "gemma3": tiny.config("gemma3"),
    "olmo2": tiny.config("olmo2"),
    "shared caches": tiny.mixed(),
    "biases": tiny.config(num_kv_heads=4, biases=frozenset({"attn_v", "attn_output", "ffn_up"})),
}
SPARSE = {name: tiny.config(name) for name in tiny.SPARSE} | {
    "biases": tiny.config("mixtral", replace(tiny.EXPERTS, biases=True)),
    "shared": tiny.shared(),
    "shared ungated": tiny.shared(family="shared ungated"),
}
IDS = np.random.default_rng(8).integers(0, 70, (4, 24))


@pytest.fixture(autouse=True)
def shared_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, family in tiny.SHARED.items():
        monkeypatch.setitem(families.FAMILIES, name, family)


def weights_of(config: ModelConfig) -> dict[str, Float32]:
    """With a few inputs that are much larger than the others, as in real models."""
    checkpoint = tiny.checkpoint(config)
    weights = {role: np.array(dequantize(weight)) for role, weight in checkpoint.weights.items()}
    for role, value in weights.items():
        if role.endswith(("attn_norm", "ffn_norm")):
            value[::17] *= 8.0
    return weights


def inputs_of(
    program: Program, weights: dict[str, Float32]
) -> list[tuple[LayerOps, list[tuple[SharedInput, Moments | None]]]]:
    """Each layer with its inputs' moments."""
    before, layers = split(program)
    values, kv = Values(), WholeSequences()
    evaluate.run(before, program.config, weights, values, IDS)
    found = []
    for layer in layers:
        done, inputs = 0, list[tuple[SharedInput, Moments | None]]()
        for shared in layer.inputs:
            evaluate.run(layer.ops[done : shared.first], program.config, weights, values, kv=kv)
            done = shared.first
            x = values[shared.x]
            width = program.weights[shared.roles[0]][1]
            if shared.expert is not None:
                chosen, rows = slots(x, values[shared.route], tiny.EXPERTS, width)
                x = rows[chosen == shared.expert]
            moments = Moments(width)
            moments.add(x)
            inputs.append((shared, moments if moments.count else None))
        evaluate.run(layer.ops[done:], program.config, weights, values, kv=kv)
        found.append((layer, inputs))
    return found


def plain(_: str, values: Float32) -> Float32:
    return values


def eighth_bits(_: str, values: Float32) -> Float32:
    return bf16(values)


@pytest.mark.parametrize("stored", [plain, eighth_bits])
@pytest.mark.parametrize("name", MODELS | SPARSE)
def test_the_folded_model_is_the_same_function(name: str, stored: Any) -> None:
    config = (MODELS | SPARSE)[name]
    program = families.program(config)
    weights = weights_of(config)
    expected = evaluate.logits(program, weights, IDS)
    folded = dict(weights)
    count = 0
    for layer, inputs in inputs_of(program, weights):
        own = {role: weights[role] for role in layer.weights}
        changed, scales, _ = fold(SCHEME, own, inputs, stored)
        folded |= changed
        count += len(scales)
        for role in layer.weights:
            if role.endswith(("norm", ROUTER)) and changed[role] is not own[role]:
                assert np.array_equal(stored(role, changed[role]), changed[role])
    assert count >= 3  # otherwise nothing has been tried
    got = evaluate.logits(program, folded, IDS)
    error = np.abs(got - expected)
    if name in SPARSE and stored is eighth_bits:  # a router in few bits: some tokens go elsewhere
        assert np.median(error) < 5e-3 * expected.std()
    else:
        assert error.max() < 2e-4 * np.abs(expected).max()


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
        assert makers[name][3] == Maker("layers.0.ffn_up", bias_of(config, "ffn_up"), False)
    norms = {name: [each and each.norm for each in found[:3]] for name, found in makers.items()}
    assert norms["llama"] == [True, None, True]
    assert norms["llama, every head its own"] == [True, False, True]
    assert norms["olmo2"] == [None, None, None]
    assert makers["biases"][1] == Maker("layers.0.attn_v", "layers.0.attn_v.bias", False)


def test_values_that_another_layer_reads_are_not_scaled() -> None:
    """Every head of `mixed` may have keys and values of its own: those of layers 1 and 2 are
    also layers 4's and 3's.
    """
    mixed = tiny.mixed()
    layers = tuple(replace(layer, num_kv_heads=4) for layer in mixed.layers)
    _, found = split(families.program(replace(mixed, layers=layers)))
    makers = [layer.inputs[1].maker for layer in found]
    assert [layer.inputs[1].roles for layer in found[3:]] == [
        ("layers.3.attn_output",),
        ("layers.4.attn_output",),
    ]
    assert makers == [Maker("layers.0.attn_v", None, norm=False), *[None] * 4]


def bias_of(config: ModelConfig, name: str) -> str | None:
    return f"layers.0.{name}.bias" if name in config.biases else None


def test_what_may_be_scaled_of_experts() -> None:
    """The norm before them, with the router and all of them; each one's down through its up."""
    (layer, *_) = split(families.program(SPARSE["mixtral"]))[1]
    router = next(shared for shared in layer.inputs if shared.router)
    assert router.roles == ("layers.0.ffn_gate_inp",)
    assert router.maker == Maker("layers.0.ffn_norm", None, norm=True)
    parts = ("gate", "up")
    assert router.along == tuple(f"layers.0.ffn_{p}_exps.{e}" for p in parts for e in range(6))
    first = [shared for shared in layer.inputs if shared.expert == 3]
    assert [(shared.roles, shared.maker) for shared in first] == [
        (("layers.0.ffn_gate_exps.3", "layers.0.ffn_up_exps.3"), None),
        (("layers.0.ffn_down_exps.3",), Maker("layers.0.ffn_up_exps.3", None, norm=False)),
    ]
    assert not any(role.endswith(ROUTER) for role in layer.matrices)
    assert len(layer.matrices) == 4 + 3 * 6


def test_what_may_be_scaled_of_a_shared_expert() -> None:
    """Its matrices go with the experts': all through the norm before, with the gates. A router that
    reads something else has no part in it, and a norm before experts alone serves them all.
    """
    inputs = {name: split(families.program(SPARSE[name]))[1][0].inputs for name in SPARSE}
    router, dense = inputs["shared"][2:4]
    shared = tuple(f"layers.0.ffn_{part}_shexp" for part in ("gate", "up"))
    assert router.roles == ("layers.0.ffn_gate_inp_shexp", "layers.0.ffn_gate_inp")
    assert router.maker == Maker("layers.0.ffn_norm", None, norm=True)
    assert router.along == (*shared, *inputs["mixtral"][2].along)
    assert (dense.roles, dense.maker, dense.router) == (shared, None, False)
    down = next(each for each in inputs["shared"] if each.x == "shared_gate")
    assert down.maker == Maker("layers.0.ffn_up_shexp", None, norm=False)
    dense, _, router, first = inputs["shared ungated"][2:6]
    assert [each.maker for each in (dense, router, first)] == [None] * 3
    assert (router.roles, router.along) == (("layers.0.ffn_gate_inp",), ())
    assert first.x == dense.x == "h"
    biased = next(each for each in inputs["biases"] if each.expert == 3 and each.x != "h")
    up = "layers.0.ffn_up_exps.3"
    assert biased.maker == Maker(up, f"{up}.bias", norm=False)


@pytest.mark.parametrize("name", MODELS | SPARSE)
def test_outputs_lose_less_than_by_rounding(name: str) -> None:
    config = (MODELS | SPARSE)[name]
    program = families.program(config)
    weights = weights_of(config)
    ratios = []
    for layer, inputs in inputs_of(program, weights):
        own = {role: weights[role] for role in layer.weights}
        found, others = awq(SCHEME, layer, own, inputs, plain)
        folded, scales, _ = fold(SCHEME, own, inputs, plain)
        for shared, moments in inputs:
            if shared.router or moments is None:
                continue
            for role in shared.roles:
                second = moments.second
                if role in scales:
                    second = second / np.outer(scales[role], scales[role])
                ours = relative_loss(folded[role], found[role].values(), second)
                nearest = round_to_nearest(SCHEME, own[role]).values()
                ratios.append(ours / relative_loss(own[role], nearest, moments.second))
        assert all(own[role].ndim == 1 or role.endswith(ROUTERS) for role in others)
    assert np.mean(ratios) < 0.9
    assert name in SPARSE or max(ratios) < 1.2


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
