"""What GPUs take beside their published peaks, fitted to published runs.

benchmarks/gpu_fit.py fits the constants to benchmarks/gpu_runs.json, which has each run with its
source, and prints the errors. A test holds the constants to the fit.
"""

from __future__ import annotations

from typing import NamedTuple


class Shares(NamedTuple):
    """How fast serving engines are on a GPU, as shares of its data sheet and time of their own."""

    bandwidth: float  # of the memory's
    compute: float  # of the peak in 16 and 32 bits
    narrow: float  # of the peak in 8 bits
    knee: float  # how far reading and arithmetic overlap (`Rates.knee`)
    step_seconds: float  # of a step: scheduling, sampling, waiting for the last kernel
    launch_seconds: float  # of an operation of the Program: launching it, filling the GPU, draining


FITTED = Shares(
    bandwidth=0.949,
    compute=0.707,
    narrow=0.456,
    knee=1.38,
    step_seconds=0.000209,
    launch_seconds=6.04e-6,
)
# How far predictions are off on a source that the fit has not seen: the median, and nine tenths.
TYPICAL_ERROR, LARGE_ERROR = 0.14, 0.39

# What a runtime holds on a GPU beside weights, activations and cache: the CUDA context, libraries'
# workspaces, CUDA graphs. vLLM logs non_torch_memory of 0.33 GiB (issue 14452) to 1.79 GiB (pull
# request 10511), and CUDA graphs of 0.17 to 0.36 GiB.
RUNTIME_BYTES = 1 << 30
