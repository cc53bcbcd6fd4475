"""Float checkpoints rounded while they are loaded."""

from dataclasses import replace

import numpy as np
import pytest

from executor import reference, tiny
from executor.driving import Driver
from octavo.engine.config import EngineConfig
from octavo.executor.native.packing import held_bytes
from octavo.loader.base import Checkpoint, CheckpointError, Weight, WeightFormat
from octavo.loader.rounding import QUANTIZATIONS, rounded, summary
from octavo.models import families
from octavo.models.config import ModelConfig

FLOATS = [WeightFormat.F32, WeightFormat.F16, WeightFormat.BF16]
SPARSE = tiny.config("qwen3moe")


def matrices(checkpoint: Checkpoint) -> dict[str, Weight]:
    return {role: w for role, w in checkpoint.weights.items() if len(w.shape) == 2}


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("format", FLOATS)
def test_every_matrix_is_rounded_to_nearest(format: WeightFormat, quantization: str) -> None:
    source = tiny.checkpoint(tiny.config(tied_embeddings=False), format)
    result = rounded(source, quantization, threads=2)
    layers, heads = QUANTIZATIONS[quantization]
    for role, weight in matrices(result).items():
        scheme = heads if role in ("token_embd", "output") else layers
        before = source.weights[role]
        assert weight.format is scheme.format
        assert weight.stored.format == format.name
        assert weight.stored.nbytes == before.nbytes
        assert weight.nbytes == weight.data.nbytes
        exact, held = tiny.dequantize(before), tiny.dequantize(weight)
        ranges = np.stack(
            [
                np.ptp(np.append(row[at : at + weight.group], 0))
                for row in exact
                for at in range(0, weight.shape[1], weight.group)
            ]
        ).reshape(len(exact), -1)
        if scheme.symmetric:
            ranges *= 2
        levels = 255 if scheme.format is WeightFormat.I8 else 15
        steps = ranges[:, np.arange(weight.shape[1]) // weight.group] / levels
        # Half a step; a whole one for what clips at the end of the range.
        assert (np.abs(held - exact) <= 1.01 * steps).all()
        assert np.abs(held - exact).mean() <= 0.3 * steps.mean()
    for role in source.weights.keys() - matrices(source).keys():
        assert result.weights[role] is source.weights[role]


def test_rows_are_made_as_they_are_asked_for() -> None:
    result = rounded(tiny.checkpoint(tiny.config(), WeightFormat.BF16), "int4")
    for weight in matrices(result).values():
        whole = weight.data.reshape(weight.shape[0], -1)
        some = np.concatenate([weight.rows(0, 7), weight.rows(7, 8), weight.rows(8, len(whole))])
        assert np.array_equal(some, whole.reshape(-1))


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("config", [tiny.config(), SPARSE], ids=["llama", "qwen3moe"])
def test_the_model_runs_on_them(config: ModelConfig, quantization: str) -> None:
    result = rounded(tiny.checkpoint(config, WeightFormat.BF16), quantization)
    tokens = [int(t) for t in np.random.default_rng(2).integers(0, config.vocab_size, 40)]
    weights = {role: tiny.dequantize(weight) for role, weight in result.weights.items()}
    expected = reference.run(families.program(config), weights, tokens)
    driver = Driver(result, kv_dtype="fp16")
    differences = driver.run(tokens, [30, 1]) - expected
    # Half the rows: where two experts are as good, rounding the activations chooses another.
    errors = np.sqrt((differences**2).mean(axis=1)) / expected.std()
    assert np.median(errors) < 6e-2
    planned = sum(map(held_bytes, result.weights.values()))
    assert driver.executor.costs.weight_bytes == driver.executor.weight_bytes == planned


def test_what_stays_as_it_is_is_said() -> None:
    """Routers, and matrices whose inputs are no multiple of 32."""
    result = rounded(tiny.checkpoint(SPARSE, WeightFormat.F16), "int8")
    kept = [role for role, weight in matrices(result).items() if weight.format in FLOATS]
    assert kept == [role for role in result.weights if role.endswith("ffn_gate_inp")]
    assert f"; {len(kept)} of {len(matrices(result))} matrices as stored" in summary(result, "int8")
    odd = tiny.checkpoint(tiny.config(intermediate_size=50))
    result = rounded(odd, "int4")
    kept = [role for role, weight in matrices(result).items() if weight.format in FLOATS]
    assert kept == [f"layers.{i}.ffn_down" for i in range(3)]
    assert summary(result, "int4").endswith("; 3 of 22 matrices as stored")


def test_refusals() -> None:
    with pytest.raises(
        CheckpointError,
        match=r"int4 is for float weights, and tensor 'token_embd' "
        r"is quantized already \(Q8_0\)",
    ):
        rounded(tiny.checkpoint(tiny.config(), WeightFormat.Q8_0), "int4")
    good = tiny.checkpoint(tiny.config())
    weight = good.weights["layers.1.ffn_up"]
    data = weight.data.copy()
    data.view(np.float32)[64 * 20 + 3] = np.inf
    bad = replace(good, weights=good.weights | {weight.name: weight._replace(source=data)})
    result = rounded(bad, "int4")
    with pytest.raises(
        CheckpointError,
        match=r"tensor 'layers\.1\.ffn_up', from row 16 on: row 4 "
        "of 16 has a weight that is not finite",
    ):
        result.weights[weight.name].rows(16, 32)
    with pytest.raises(ValueError, match="quantization 'gptq' is not supported; int8 and int4"):
        EngineConfig(quantization="gptq")
