"""Devices: published figures under forgiving names, shares that predictions assume, figures by
hand.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from octavo.execute.cost import Arithmetic
from octavo.plan.hardware import PUBLISHED, Device, device, published


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
    assert len({gpu.name for gpu in PUBLISHED.values()}) == 13


def test_predictions_take_a_share_of_what_is_published() -> None:
    gpu = published("h100")
    roof, taken = gpu.rates(0), gpu.predicted(0)
    assert taken.bytes_per_second == pytest.approx(0.8 * roof.bytes_per_second)
    for unit in Arithmetic:
        assert taken.peak(unit) == pytest.approx(0.6 * roof.peak(unit))
    assert "60 % of the peak operations and 80 % of the bandwidth" in gpu.assumption
    plain = gpu.assuming(1.0, 1.0)
    assert plain.predicted(0) == roof
    assert plain.assumption == ""
    with pytest.raises(ValueError, match=r"--compute-share is 1\.5, outside 1e-06 to 1"):
        gpu.assuming(compute=1.5)
    with pytest.raises(ValueError, match="--bandwidth-share is nan"):
        gpu.assuming(bandwidth=float("nan"))


def test_figures_by_hand_are_taken_as_they_are() -> None:
    own = found("memory=48,bf16=470,capacity=64")
    assert own.memory_bytes == 64 << 30
    assert own.predicted(0) == own.rates(0)
    assert own.standing == "given, not measured"
    assert found("memory=48,bf16=470").memory_bytes is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h900", "device 'h900' is not known; known are machine, rtx-3090, .*mi300x, or figures"),
        ("", "device '' is not known"),
        ("memory=48", "at least one of int8, bf16, fp32 are needed"),
        ("memory=48,int8=1,capacity=-3", "capacity=-3 is not from 0.001 to 1e.09 GiB"),
        ("memory=nan,int8=1", "memory=nan is not from"),
        ("speed=3", "neither machine nor figures"),
    ],
)
def test_what_is_no_device_is_one_error(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        found(text)
