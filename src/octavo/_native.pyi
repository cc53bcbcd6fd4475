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
    group: int = 0,
) -> npt.NDArray[np.float32]: ...
def dequantize(
    data: npt.NDArray[np.uint8], format: int, n: int, k: int, isa: str = "", group: int = 0
) -> npt.NDArray[np.float32]: ...
def packed_bytes(format: int, n: int, k: int, isa: str = "", group: int = 0) -> int: ...

# bind/merges.cpp

def merge_cuts(
    text: npt.NDArray[np.uint32],
    offsets: npt.NDArray[np.int64],
    ranks: npt.NDArray[np.int32],
    usable: npt.NDArray[np.uint8],
) -> npt.NDArray[np.int32]: ...

# bind/quantize.cpp

def quantize(
    data: npt.NDArray[np.uint8],
    source: int,
    rows: int,
    k: int,
    format: int,
    group: int,
    symmetric: bool = False,
    pool: ThreadPool | None = None,
) -> npt.NDArray[np.uint8]: ...

# bind/sampler.cpp

class SamplerState:
    def __init__(
        self,
        *,
        vocab_size: int,
        prompt_token_ids: Sequence[int],
        **options: object,  # those of kernels/sampler_state.h, each of them
    ) -> None: ...
    @property
    def num_generated(self) -> int: ...
    def record(self, token_id: int) -> None: ...
    def rewind(self, count: int) -> None: ...
    def fork(self, choice: int) -> SamplerState: ...
    def uniform(self, position: int, stream: int = 0) -> float: ...

_Logprobs = tuple[int, float, int, tuple[tuple[int, float], ...]]

class Sampler:
    def __init__(self, vocab_size: int, isa: str, pool: ThreadPool | None) -> None: ...
    def sample(
        self,
        logits: npt.NDArray[np.float32] | None,
        rows: Sequence[int],
        states: Sequence[object],
    ) -> tuple[list[int], list[_Logprobs | None] | None, dict[int, str]]: ...
    def verify(
        self,
        logits: npt.NDArray[np.float32] | None,
        rows: Sequence[int],
        states: Sequence[object],
        guesses: Sequence[int],
        drawn_from: Sequence[npt.NDArray[np.float32] | None],
    ) -> tuple[list[int], list[_Logprobs | None] | None, dict[int, str]]: ...
    def probabilities(
        self,
        logits: npt.NDArray[np.float32] | None,
        rows: Sequence[int],
        states: Sequence[object],
        out: npt.NDArray[np.float32],
    ) -> None: ...
    def prompt_logprobs(
        self,
        logits: npt.NDArray[np.float32] | None,
        rows: Sequence[int],
        token_ids: Sequence[int],
        top: int,
    ) -> list[_Logprobs]: ...

def philox(counter: Sequence[int], key: Sequence[int]) -> list[int]: ...

# bind/runtime.cpp

class Value:
    def __init__(self, offset: int, stride: int, local: bool, first: int) -> None: ...

class Prepared:
    def __init__(self, offset: int, local: bool) -> None: ...

class EmbedStep:
    def __init__(self, matrix: int, out: Value, scale: float) -> None: ...

class InputStep:
    def __init__(self, out: Value, width: int) -> None: ...

class FunctionStep:
    def __init__(
        self,
        name: str,
        inputs: Sequence[Value],
        weights: Sequence[int],
        numbers: Sequence[float],
        out: Value,
        width: int,
        group: int,
    ) -> None: ...

class PrepareStep:
    def __init__(self, x: Value, format: int, k: int, out: Prepared, order: int) -> None: ...

class AngleStep:
    def __init__(self, rope: int, out: Value, ahead: int) -> None: ...

class RopeStoreStep:
    def __init__(
        self, q: Value, k: Value, v: Value, angles: Value, rope: int, group: int, layer: int
    ) -> None: ...

class RotateStep:
    def __init__(self, q: Value, angles: Value, rope: int, heads: int, head_dim: int) -> None: ...

class ScaleByPositionStep:
    def __init__(self, x: Value, out: Value, width: int, beta: float, original: int) -> None: ...

class GatherStep:
    def __init__(self, x: Value, out: Value, width: int) -> None: ...

class ConcatStep:
    def __init__(self, x: Value, y: Value, out: Value, width: int) -> None: ...

class KeepStep:
    def __init__(self, x: Value, width: int) -> None: ...

class GateStep:
    def __init__(self, x: Value, gate: Value, out: Value, width: int, group: int) -> None: ...

class RouteStep:
    def __init__(self, logits: Value, routing: int, bias: int, factors: int) -> None: ...

class SpreadStep:
    def __init__(
        self, rows: Prepared, format: int, k: int, routing: int, slots: Prepared
    ) -> None: ...

class PrepareEachStep:
    def __init__(
        self,
        x: Value,
        of_slots: bool,
        format: int,
        k: int,
        routing: int,
        orders: Sequence[int],
        slots: Prepared,
    ) -> None: ...

class CombineStep:
    def __init__(self, slots: Value, routing: int, out: Value, width: int) -> None: ...

RowStep = (
    EmbedStep
    | InputStep
    | FunctionStep
    | PrepareStep
    | AngleStep
    | RopeStoreStep
    | RotateStep
    | ScaleByPositionStep
    | GatherStep
    | ConcatStep
    | KeepStep
    | GateStep
    | RouteStep
    | SpreadStep
    | PrepareEachStep
    | CombineStep
)

class RowsRegion:
    def __init__(self, steps: Sequence[RowStep]) -> None: ...

class LinearPart:
    def __init__(self, matrix: int, activations: Prepared, out: Value, bias: int) -> None: ...

class LinearRegion:
    def __init__(self, parts: Sequence[LinearPart], accumulate: bool) -> None: ...

class AttentionRegion:
    def __init__(
        self,
        q: Value,
        out: Value,
        group: int,
        layer: int,
        scale: float,
        softcap: float,
        sinks: int,
        heads: int,
    ) -> None: ...

class ShortConvShape: ...

class DeltaShape:
    def __init__(
        self, key_heads: int, value_heads: int, key_dim: int, value_dim: int, tiled: bool
    ) -> None: ...

class MambaShape:
    def __init__(
        self, heads: int, head_dim: int, state: int, groups: int, a: int, d: int
    ) -> None: ...

class RecurrentLayer:
    def __init__(
        self,
        shape: ShortConvShape | DeltaShape | MambaShape,
        inputs: int,
        matrix: int,
        x: Value,
        gates: Sequence[Value],
        weight: int,
        bias: int,
    ) -> None: ...

class RecurrentRegion:
    def __init__(self, layer: RecurrentLayer, out: Value) -> None: ...

class HistoryRegion:
    def __init__(self, layer: RecurrentLayer) -> None: ...

class LogitsRegion:
    def __init__(self, matrix: int, activations: Prepared, softcap: float) -> None: ...

class SortRegion:
    def __init__(self, routing: int) -> None: ...

class SlotsRegion:
    def __init__(self, routing: int, steps: Sequence[RowStep]) -> None: ...

class ExpertsPart:
    def __init__(
        self, matrices: Sequence[int], activations: Prepared, out: Value, biases: Sequence[int]
    ) -> None: ...

class ExpertsRegion:
    def __init__(self, routing: int, parts: Sequence[ExpertsPart]) -> None: ...

Region = (
    RowsRegion
    | LinearRegion
    | AttentionRegion
    | RecurrentRegion
    | HistoryRegion
    | LogitsRegion
    | SortRegion
    | SlotsRegion
    | ExpertsRegion
)

class ThreadPool:
    def __init__(self, threads: int) -> None: ...
    @property
    def size(self) -> int: ...

class Runtime:
    def __init__(
        self,
        *,
        isa: str,
        pool: ThreadPool,
        max_tokens: int,
        max_logits_rows: int,
        logits_slice: int,
        max_seqs: int,
        max_blocks_per_seq: int,
        num_blocks: int,
        vocab_size: int,
        groups: Sequence[tuple[int, int, int, int]],
        block_size: int,
        block_bytes: int,
        num_heads: int,
        kv_kind: int,
        state: tuple[int, int, int, int, Sequence[tuple[int, int, int, int, int]]] | None,
    ) -> None: ...
    @property
    def pool(self) -> ThreadPool: ...
    @property
    def isa(self) -> str: ...
    @property
    def block_bytes(self) -> int: ...
    @property
    def weight_bytes(self) -> int: ...
    @property
    def arena_bytes(self) -> int: ...
    def activation_bytes(self, format: int, k: int) -> int: ...
    def same_activations(self, a: int, b: int) -> bool: ...
    def packed_bytes(self, format: int, n: int, k: int, group: int) -> int: ...
    def allocate_weights(self, bytes: int) -> None: ...
    def add_matrix(self, format: int, n: int, k: int, group: int) -> int: ...
    def pack_rows(
        self, matrix: int, first: int, last: int, data: npt.NDArray[np.uint8]
    ) -> None: ...
    def add_order(self, order: Sequence[int]) -> int: ...
    def add_vector(self, values: Sequence[float]) -> int: ...
    def scale_vector(self, vector: int, factor: float) -> int: ...
    def add_rope(
        self, dim: int, interleaved: bool, frequencies: Sequence[float], magnitude: float
    ) -> int: ...
    def add_routing(
        self,
        experts: int,
        chosen: int,
        sigmoid: bool,
        renormalize: bool,
        normalize_eps: float,
        scale: float,
    ) -> int: ...
    def slots_row_bytes(self, experts: int, chosen: int, slot_bytes: int) -> int: ...
    def allocate_activations(self, row_bytes: int, local_row_bytes: int) -> None: ...
    def add_program(
        self, regions: Sequence[tuple[str, bool, Region]], ids: Sequence[int]
    ) -> int: ...
    def drop_program(self) -> None: ...
    def step(
        self,
        token_ids: npt.NDArray[np.int32],
        positions: npt.NDArray[np.int32],
        seq_offsets: npt.NDArray[np.int32],
        seq_slots: npt.NDArray[np.int32],
        block_tables: npt.NDArray[np.int32],
        logits_rows: npt.NDArray[np.int32],
        copies: npt.NDArray[np.int32],
        program: int,
        rows: npt.NDArray[np.float32] | None,
        state: tuple[npt.NDArray[np.int32], ...] | None,
    ) -> npt.NDArray[np.float32]: ...
    def start_draft(
        self,
        programs: Sequence[int],
        rows: npt.NDArray[np.float32],
        numbers: Sequence[int],
        token_ids: Sequence[int],
        most: Sequence[int],
        least: float,
    ) -> None: ...
    def finish_draft(self) -> list[tuple[list[int], float]] | None: ...
    def cancel_draft(self) -> None: ...
    def hidden(self) -> npt.NDArray[np.float32]: ...
    def logits(self, first: int) -> npt.NDArray[np.float32]: ...
    def transfer(
        self, blocks: npt.NDArray[np.int32], data: npt.NDArray[np.uint8], to_arena: bool
    ) -> None: ...
    @property
    def num_jobs(self) -> int: ...
    @property
    def last_meeting(self) -> float: ...
    def set_profiling(self, on: bool) -> None: ...
    def reset_profile(self) -> None: ...
    def profile(self, program: int) -> list[tuple[str, float]]: ...

# bind/machine_limits.cpp

def peak_loops() -> list[tuple[str, str]]: ...
def read_loops() -> list[tuple[str, int, bool]]: ...
def measure_peak(pool: ThreadPool, loop: int, seconds: float, repetitions: int) -> list[float]: ...
def measure_barrier(pool: ThreadPool, jobs: int, repetitions: int) -> list[float]: ...

class ReadBuffer:
    def __init__(self, pool: ThreadPool, bytes: int) -> None: ...
    @property
    def size(self) -> int: ...
    def measure(
        self,
        pool: ThreadPool,
        loop: int,
        ahead: int,
        bytes: int,
        seconds: float,
        repetitions: int,
    ) -> list[float]: ...
