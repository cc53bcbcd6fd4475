"""Types of the C++ module; a section a file of kernels/bind/."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

# bind/linear.cpp

def linear(
    data: npt.NDArray[np.uint8],
    format: int,
    n: int,
    x: npt.NDArray[np.float32],
    isa: str = "",
) -> npt.NDArray[np.float32]: ...
def dequantize(
    data: npt.NDArray[np.uint8], format: int, n: int, k: int, isa: str = ""
) -> npt.NDArray[np.float32]: ...
def packed_bytes(format: int, n: int, k: int, isa: str = "") -> int: ...

# bind/merges.cpp

def merge_cuts(
    text: npt.NDArray[np.uint32],
    offsets: npt.NDArray[np.int64],
    ranks: npt.NDArray[np.int32],
    usable: npt.NDArray[np.uint8],
) -> npt.NDArray[np.int32]: ...

# bind/sampler.cpp

class SamplerState:
    def __init__(
        self,
        *,
        vocab_size: int,
        prompt_token_ids: Sequence[int],
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
        presence_penalty: float,
        frequency_penalty: float,
        repetition_penalty: float,
        logit_bias: Sequence[tuple[int, float]],
        allowed_token_ids: Sequence[int] | None,
        banned_token_ids: Sequence[int],
        stop_token_ids: Sequence[int],
        min_tokens: int,
        logprobs: int,
        seed: int,
        choice: int,
    ) -> None: ...
    @property
    def num_generated(self) -> int: ...
    def record(self, token_id: int) -> None: ...
    def rewind(self, count: int) -> None: ...
    def fork(self, choice: int) -> SamplerState: ...
    def uniform(self, position: int) -> float: ...

_Logprobs = tuple[int, float, int, tuple[tuple[int, float], ...]]

class Sampler:
    def __init__(self, vocab_size: int, isa: str) -> None: ...
    def sample(
        self,
        logits: npt.NDArray[np.float32] | None,
        rows: Sequence[int],
        states: Sequence[object],
    ) -> tuple[list[int], list[_Logprobs | None] | None, dict[int, str]]: ...
    def prompt_logprobs(
        self,
        logits: npt.NDArray[np.float32] | None,
        rows: Sequence[int],
        token_ids: Sequence[int],
        top: int,
    ) -> list[_Logprobs]: ...

def philox(counter: Sequence[int], key: Sequence[int]) -> list[int]: ...
