"""Devices: published figures under forgiving names, shares that predictions assume, figures by
hand.
"""

from contextlib import nullcontext
from typing import Any

import pytest

from octavo.executor.cost import Arithmetic
from octavo.kv_cache.layout import KvLayout
from octavo.tools.plan.gpu import FITTED, RUNTIME_BYTES
from octavo.tools.plan.hardware import PUBLISHED, Device, device, published
from octavo.tools.plan.quantization import in_scheme
from octavo.tools.plan.roofline import roofline
from octavo.tools.plan.schemes import scheme
from octavo.tools.plan.subject import Subject


def found(text: str) -> Device:
    return device(text, lambda: nullcontext(lambda _: None))


@pytest.mark.parametrize(
    "text", ["H100", "h100", "NVIDIA H100", "H100 SXM 80 GB", "h100-sxm", "nvidia_h100"]
)
def test_names_are_forgiven_their_spelling(text: str) -> None:
    assert found(text) is PUBLISHED["h100"]


def test_the_usual_gpus_are_known() -> None:
    for text in (
        *("RTX 3090", "rtx4090", "RTX-5090", "T4", "L4", "L40S", "A10", "A100-40GB", "a100 80gb"),
        *("A100", "H100", "H200", "B200", "MI300X"),
    ):
        gpu = published(text)
        assert gpu.source
        assert not gpu.measured
        assert gpu.standing == f"published, not measured ({gpu.source})"
        assert gpu.memory_bytes is not None
        # Drivers show somewhat less than vendors' gigabytes, of whichever kind they are.
        gigabytes = float(gpu.name.split()[-2])
        assert 0.91 * gigabytes * 2**30 < gpu.memory_bytes <= gigabytes * 2**30
        peaks = gpu.peaks()
        assert peaks["fp32"] < peaks["bf16"] == peaks["fp16"] < peaks["int8"] <= 4.1 * peaks["bf16"]
        assert peaks.get("fp8", peaks["int8"]) <= peaks["int8"]
    assert len({gpu.name for gpu in PUBLISHED.values()}) == 14


def test_predictions_take_a_share_of_what_is_published() -> None:
    gpu = published("h100")
    roof, taken = gpu.rates(0), gpu.predicted(0, launches=100)
    assert taken.bytes_per_second == pytest.approx(FITTED.bandwidth * roof.bytes_per_second)
    for unit in Arithmetic:
        share = FITTED.narrow if unit in ("int8", "fp8") else FITTED.compute
        assert taken.peak(unit) == pytest.approx(share * roof.peak(unit))
    overhead = FITTED.step_seconds + 100 * FITTED.launch_seconds
    assert taken.step_overhead == pytest.approx(overhead)
    assert "of the peak operations" in gpu.assumption
    assert "fitted to published runs" in gpu.assumption
    # An A100 multiplies fp8 weights in 16 bits: their share is that of 16 bits.
    a100 = published("a100")
    assert a100.predicted(0).peak(Arithmetic.FP8) == a100.predicted(0).peak(Arithmetic.BF16)
    own = gpu.assuming(0.5, 0.25)
    assert own.predicted(0).peak(Arithmetic.INT8) == 0.5 * roof.peak(Arithmetic.INT8)
    assert own.predicted(0).bytes_per_second == 0.25 * roof.bytes_per_second
    assert "fitted" not in own.assumption
    with pytest.raises(ValueError, match=r"--compute-share is 1\.5, outside 1e-06 to 1"):
        gpu.assuming(compute=1.5)
    with pytest.raises(ValueError, match="--bandwidth-share is nan"):
        gpu.assuming(bandwidth=float("nan"))


def test_figures_by_hand_are_taken_as_they_are() -> None:
    own = found("memory=48,bf16=470,capacity=64")
    assert own.memory_bytes == 64 << 30
    assert own.predicted(0) == own.rates(0)
    assert own.standing.startswith("given as a CPU's, not measured; fp16 as bf16, fp32 as bf16")
    assert not own.gpu
    assert found("memory=48,bf16=470").memory_bytes is None


@pytest.mark.parametrize(
    ("text", "peaks"),
    [
        ("memory=1,fp16=2", {"fp16": 2, "bf16": 2, "int8": 2, "fp32": 2}),
        ("memory=1,bf16=2,fp32=1", {"fp16": 2, "bf16": 2, "int8": 2, "fp32": 1}),
        ("memory=1,fp16=2,fp32=1", {"fp16": 2, "bf16": 2, "int8": 2, "fp32": 1}),
        ("memory=1,fp16=2,bf16=3,int8=4,fp8=5,int4=9", {"bf16": 3, "int8": 4, "fp8": 5, "int4": 9}),
        ("memory=1,fp32=1", {"fp16": 1, "bf16": 1, "int8": 1, "fp32": 1}),
    ],
)
def test_a_unit_that_is_not_given_runs_on_another(text: str, peaks: dict[str, float]) -> None:
    """Half precision of either kind is one, and never fp32's where there is one."""
    given = found(text)
    assert {name: given.peaks()[name] / 1e9 for name in peaks} == pytest.approx(peaks)
    for unit in ("fp16", "bf16", "int8"):
        assert (f"{unit} as " in given.standing) is (f"{unit}=" not in text)


def test_figures_of_a_gpu_are_predicted_as_one() -> None:
    for text in ("memory=1,bf16=2,int8=4,kind=gpu", "memory=1,fp16=1", "memory=1,fp8=1"):
        assert found(text).gpu
        assert found(text).assumption == published("h100").assumption
    for text in ("memory=1,fp16=1,kind=cpu", "memory=48,int8=940,bf16=470"):
        assert not found(text).gpu
        assert found(text).assumption == ""


def test_what_a_gpu_leaves_is_vllms_share_without_its_runtime() -> None:
    gpu = published("h100")
    assert gpu.usable_bytes(0.9) == int(0.9 * (81559 << 20)) - RUNTIME_BYTES
    assert found("memory=1,int8=1,capacity=8").usable_bytes(0.9) == 8 << 30


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h900", "device 'h900' is not known; known are machine, rtx-3090, .*mi300x, or figures"),
        ("", "device '' is not known"),
        ("memory=48", "at least one of int4, int8, fp8, fp16, bf16, fp32 are needed"),
        ("memory=48,int8=1,int8=2", "int8 is given twice"),
        ("memory=48,int8=1,kind=tpu", "neither kind=cpu nor kind=gpu"),
        ("memory=48,int8=1,capacity=-3", "capacity=-3 is not from 0.001 to 1e.09 GiB"),
        ("memory=nan,int8=1", "memory=nan is not from"),
        ("speed=3", "neither machine nor figures"),
    ],
)
def test_what_is_no_device_is_one_error(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        found(text)


def ttft(subject: str, gpu: Device, format: str, **more: Any) -> float:
    """Seconds of a prompt of 2,048 tokens."""
    model = Subject.find(subject)
    stored = in_scheme(model, scheme(format), scheme("bf16"))
    layout = KvLayout.of(model.program.config)
    found = roofline(
        model, stored, gpu, layout=layout, contexts=(), sequences=(), prompts=(2048,), **more
    )
    return found.prefill[0].seconds


@pytest.mark.parametrize("format", ["awq", "gptq", "q4_0", "q4_k", "q8_0", "mxfp4"])
def test_weights_of_few_bits_are_widened_on_gpus(format: str) -> None:
    """A prompt takes as long as in 16 bits: published is 133 ms of Llama 2 7B on an A100
    (TensorRT-LLM), and Llama 3 8B has 7.7 % more weights in its layers.
    """
    a100 = published("a100")
    wide = ttft("llama-3-8b", a100, "bf16")
    assert 0.120 < wide < 0.165
    assert wide * 0.9 < ttft("llama-3-8b", a100, format) <= wide
    # This engine's CPUs multiply in int8.
    cpu = found("memory=2039,int8=624000,bf16=312000,kind=cpu")
    assert ttft("llama-3-8b", cpu, format) < 0.6 * ttft("llama-3-8b", cpu, "bf16")


def test_eight_bits_for_activations_too_are_a_scheme_of_their_own() -> None:
    h100, a100 = published("h100"), published("a100")
    assert ttft("llama-3-8b", h100, "fp8") < 0.85 * ttft("llama-3-8b", h100, "bf16")
    assert ttft("llama-3-8b", a100, "w8a8") < 0.85 * ttft("llama-3-8b", a100, "bf16")
    wide = ttft("llama-3-8b", a100, "bf16")
    assert ttft("llama-3-8b", a100, "fp8") == pytest.approx(wide, rel=0.05), "no fp8 units"
    assert ttft("llama-3-8b", h100, "awq", quantized=Arithmetic.INT8) < 0.85 * ttft(
        "llama-3-8b", h100, "awq"
    )
