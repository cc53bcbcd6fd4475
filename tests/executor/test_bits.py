"""Same sequence, same bits: alone or in company, whole or in chunks, on any threads and blocks."""

import ctypes.util
import platform
from functools import cache, lru_cache

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from executor import tiny
from executor.driving import Driver, Float32
from octavo.kv_cache.layout import KvDtype
from octavo.loader.base import Checkpoint, WeightFormat
from octavo.models.config import Activation, Experts, Layer, Rope

MODELS = {
    "llama F32": (tiny.config(), WeightFormat.F32),
    "llama Q4_0": (tiny.config(), WeightFormat.Q4_0),
    "llama I3, in orders": (tiny.config(), WeightFormat.I3),
    "llama I4, in orders": (tiny.config(), WeightFormat.I4),
    "gemma3 I8, in orders": (tiny.config("gemma3"), WeightFormat.I8),
    "mixtral I4, in orders": (tiny.config("mixtral"), WeightFormat.I4),
    "mixtral IQ2_XS": (tiny.broad("mixtral"), WeightFormat.IQ2_XS),
    "gemma3 IQ1_S": (tiny.broad("gemma3"), WeightFormat.IQ1_S),
    "llama IQ3_S": (tiny.broad(), WeightFormat.IQ3_S),
    "llama TQ2_0": (tiny.broad(), WeightFormat.TQ2_0),
    "mixtral E4M3": (tiny.config("mixtral"), WeightFormat.E4M3),
    "gemma3 NVFP4": (tiny.config("gemma3"), WeightFormat.NVFP4),
    "qwen3moe Q8_0": (tiny.config("qwen3moe", Experts(17, 4, 32, True)), WeightFormat.Q8_0),
    "llama F16, head of 20": (tiny.config(head_dim=20), WeightFormat.F16),
    "llama F16, sinks": (tiny.config(sinks=True), WeightFormat.F16),
    "gemma3 Q4_0, sinks": (tiny.config("gemma3", sinks=True), WeightFormat.Q4_0),
    "mixtral Q8_0, all of experts": (
        tiny.config(
            "mixtral",
            Experts(9, 3, 32, True, "sigmoid", 1e-6, 2.0, selection_bias=True, biases=True),
            activation=Activation.SWIGLU_CLAMPED,
        ),
        WeightFormat.Q8_0,
    ),
    "llama F16, heads of two widths": (tiny.mixed(), WeightFormat.F16),
    "gemma3 I8, heads of two widths": (tiny.mixed("gemma3"), WeightFormat.I8),
    "qwen3 Q8_0, heads of 32 to 512": (tiny.widths(), WeightFormat.Q8_0),
    "gemma4 E, BF16": (tiny.gemma4("e"), WeightFormat.BF16),
    "gemma4 Q8_0, experts": (tiny.gemma4("experts"), WeightFormat.Q8_0),
    "gemma4 Q4_0, keys as values": (tiny.gemma4("keys"), WeightFormat.Q4_0),
    "gemma3 Q8_0": (tiny.config("gemma3"), WeightFormat.Q8_0),
    "gemma3 BF16, window of 100": (
        tiny.config(
            "gemma3", layers=(Layer(Rope(1e4, 16, False), 100), Layer(Rope(1e6, 16, False)))
        ),
        WeightFormat.BF16,
    ),
}
PROMPTS = [1, 5, 16, 90, 300, 600]


@cache
def checkpoint(model: str) -> Checkpoint:
    return tiny.checkpoint(*MODELS[model])


# Those of one case of the test; all of them together hold gigabytes.
@lru_cache(maxsize=24)
def driver(model: str, isa: str, threads: int, kv_dtype: str = "auto") -> Driver:
    try:
        return Driver(
            checkpoint(model),
            isa=isa,
            threads=threads,
            kv_dtype=kv_dtype,
            num_blocks=2000,  # five sequences of the greatest length, in nine groups
            seed=threads,
        )
    except ValueError as error:
        pytest.skip(str(error))


def prompt(model: str, length: int) -> list[int]:
    vocab = MODELS[model][0].vocab_size
    return [int(t) for t in np.random.default_rng(length).integers(0, vocab, length)]


@lru_cache(maxsize=64)
def alone(model: str, isa: str, length: int, kv_dtype: str) -> Float32:
    return driver(model, isa, 1, kv_dtype).run(prompt(model, length))


@pytest.mark.parametrize("isa", ["generic", "avx2", "avx512", "avx512_bf16"])
@pytest.mark.parametrize("model", MODELS)
@settings(deadline=None, max_examples=3, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_same_bits_in_any_company(model: str, isa: str, data: st.DataObject) -> None:
    """Sequences of drawn lengths in drawn chunks, each against its run alone in one chunk."""
    lengths = data.draw(st.lists(st.sampled_from(PROMPTS), min_size=1, max_size=5))
    kv_dtype = data.draw(st.sampled_from(KvDtype.served()), label="kv_dtype")
    drawn = driver(model, isa, data.draw(st.sampled_from([1, 2, 3]), label="threads"), kv_dtype)
    sequences = [drawn.start(prompt(model, length)) for length in lengths]
    try:
        while running := [sequence for sequence in sequences if sequence.left]:
            work = []
            room = Driver.MAX_TOKENS
            for sequence in running:
                largest = min(sequence.left, room)
                if largest == 0:
                    continue
                count = data.draw(st.sampled_from([1, 2, 17, 64, 100, 300, largest]))
                work.append((sequence, min(count, largest)))
                room -= work[-1][1]
            drawn.step(work)
    finally:  # a draw may end the example, and the driver lives on
        for sequence in sequences:
            drawn.finish(sequence)
    for sequence, length in zip(sequences, lengths, strict=True):
        assert np.array_equal(np.array(sequence.logits), alone(model, isa, length, kv_dtype))


@pytest.mark.parametrize("threads", [2, 5])
def test_decode_of_a_long_context_on_threads(threads: int) -> None:
    """One token at a time, so that a context's chunks are spread over the threads."""
    tokens = prompt("llama F32", 600)
    for isa in "generic", "":
        expected = driver("llama F32", isa, 1).run(tokens)
        assert np.array_equal(driver("llama F32", isa, threads).run(tokens, [580, 1]), expected)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the constant below is x86's")
@pytest.mark.parametrize("threads", [1, 3])
def test_the_callers_rounding_changes_nothing(threads: int) -> None:
    """A thread's floating-point mode is its own; another library may have changed the caller's."""
    math = ctypes.CDLL(ctypes.util.find_library("m"))
    tokens = prompt("llama Q4_0", 90)
    expected = driver("llama Q4_0", "generic", 1).run(tokens)
    tested = driver("llama Q4_0", "generic", threads)
    assert math.fesetround(0x800) == 0  # FE_UPWARD
    try:
        got = tested.run(tokens, [40, 1])
        assert math.fegetround() == 0x800
    finally:
        math.fesetround(0)
    assert np.array_equal(got, expected)
