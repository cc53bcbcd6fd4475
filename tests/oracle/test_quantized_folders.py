"""Tiny quantized folders of GPTQModel, AutoGPTQ, AutoAWQ, llm-compressor, AutoRound, transformers,
compressed-tensors and ModelOpt, against what the packages' own code makes of them, and against
transformers' logits.
"""

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo import LLM, SamplingParams
from octavo.loader import load
from octavo.loader.dequantize import dequantize
from octavo.loader.rounding import FLOATS
from oracle.test_families import TIERS, assert_close, run
from oracle.tiny_folders import QUANTIZED, quantized_folder
from paths import ORACLE

FOLDERS = ORACLE / "quantized"
# Activations are quantized to 8 bits for every product, which transformers does not do.
DYNAMIC = (2.5e-2, 0.25)


def reference(name: str) -> tuple[dict[str, Any], list[int], Any]:
    with np.load(FOLDERS / name / "reference.npz") as data:
        return json.loads(str(data["meta"])), data["ids"].tolist(), data["logits"]


@pytest.mark.parametrize("name", QUANTIZED)
def test_every_number(name: str, tmp_path: Path) -> None:
    checkpoint = load(quantized_folder(name, tmp_path / name))
    assert checkpoint.quantization is not None
    quantized = [w for w in checkpoint.weights.values() if w.format not in FLOATS]
    assert any(weight.order is not None for weight in quantized) == ("order" in name)
    found = {w.name.rpartition(".")[0]: dequantize(w) for w in quantized}
    if sums := reference(name)[0]["crc32"]:
        assert {module: zlib.crc32(values.tobytes()) for module, values in found.items()} == sums
        return
    with np.load(FOLDERS / name / "reference.npz") as data:
        assert found.keys() == set(data) - {"ids", "logits", "meta"}
        for module, values in found.items():  # which the package rounds once more
            np.testing.assert_allclose(values, data[module], rtol=2.0**-22, atol=0)


@pytest.mark.parametrize("isa", TIERS)
@pytest.mark.parametrize("name", QUANTIZED)
def test_logits(name: str, isa: str, tmp_path: Path) -> None:
    _, ids, expected = reference(name)
    checkpoint = load(quantized_folder(name, tmp_path / name))
    got = run(checkpoint, isa, ids, [40, 1])
    assert_close(np.abs(got[-len(expected) :] - expected) / expected.std(), DYNAMIC)
    # Same bits however it is cut, and on however many threads.
    assert np.array_equal(run(checkpoint, isa, ids, [len(ids)], threads=2), got)


@pytest.mark.parametrize("name", ["gptqmodel-order", "autoawq", "llmcompressor-w8a8", "fp8-blocks"])
def test_generate(name: str, tmp_path: Path) -> None:
    """Through the whole engine: what may follow the recorded tokens, and how likely."""
    _, ids, expected = reference(name)
    last = expected[-1].astype(np.float64)
    logprobs = last - last.max() - np.log(np.exp(last - last.max()).sum())
    with LLM(quantized_folder(name, tmp_path / name), kv_cache_memory_bytes=1 << 20) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=20)
        output = llm.generate(ids, params, use_tqdm=False)[0].outputs[0]
    found = output.logprobs[0]
    assert len(found) >= 20
    difference = [abs(found[token].logprob - logprobs[token]) for token in found]
    assert max(difference) < DYNAMIC[1] * expected.std()
