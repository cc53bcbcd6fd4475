"""The protocol of executors: what the scheduler hands over for a step, and what comes back.

Everything that the engine, speculation, calibration and the samplers need of an executor is here.
Nobody asks which executor it is: what one can do is in its `Capabilities`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol, TypedDict, Unpack

import numpy as np
import numpy.typing as npt

from octavo.kv_cache.layout import KvDtype, KvLayout
from octavo.kv_cache.state_batch import StateBatch
from octavo.loader.base import CheckpointError
from octavo.models.program import PagedAttention, Program, RopeAndStoreKv, RotateQueries
from octavo.models.recurrence import Recurrence

if TYPE_CHECKING:
    from octavo.executor.cost import CostModel, Rates
    from octavo.loader.base import Checkpoint, Weight
    from octavo.machine.limits import Limits
    from octavo.sampling.sampler import Sampler

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


@dataclass(slots=True)
class Batch:
    """One step as flat arrays: T tokens of S sequences, decode rows and prefill chunks alike.

    The tokens of a sequence are contiguous and at consecutive positions; those of a decoding one
    are its last and the drafts after it. A position may come again with another token, when a draft
    was rejected: what the cache held there is written over. ``block_tables`` is the
    scheduler's own persistent array, updated in place; entry [g, slot, p // block_size] is the
    block of position p in group g, -1 where a window has given it back or nothing is allocated.
    """

    token_ids: Int32  # [T]
    positions: Int32  # [T]
    seq_offsets: Int32  # [S + 1]; sequence s owns tokens seq_offsets[s] … seq_offsets[s + 1] - 1
    seq_slots: Int32  # [S], the row of each sequence in block_tables
    block_tables: Int32  # [groups, max sequences, max blocks a sequence]
    logits_rows: Int32  # [L], ascending indices into the T tokens
    copies: Int32  # [C, 2] (source block, destination block), done before anything else
    state: StateBatch | None = None  # None: no layer is recurrent

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def kept(self) -> Batch:
        """Return a copy of sizes and positions that outlives the next step, which reuses them."""
        return replace(
            self,
            positions=self.positions.copy(),
            seq_offsets=self.seq_offsets.copy(),
            logits_rows=self.logits_rows.copy(),
        )


def slice_rows(max_logits_rows: int, vocab_size: int) -> int:
    """Return how many rows of logits are held at a time: 32 MiB of them, at least 32, in eights.

    The head's weights are read once a slice, which the arithmetic hides for so many rows.
    """
    return min(max_logits_rows, max(32, (32 << 20) // (4 * vocab_size) // 8 * 8))


class StepResult(NamedTuple):
    """``logits`` is [rows, vocab] and belongs to the executor: valid until it computes again.

    They are None from an executor that samples itself: its own sampler (`Executor.new_sampler`)
    then draws from the step. A large vocabulary times many sequences is more memory than an
    executor may want to hold: then these are the first of the L rows only, and
    ``logits_from(row)`` computes as many from that row on, in the same memory; ``row`` is a
    multiple of their number. ``hidden`` [L, width] are the rows that all the logits are made of,
    behind the last norm, from an executor that was asked to keep them, or [T, width] those of all
    tokens; valid as long.
    """

    logits: Float32 | None
    duration: float  # seconds: measured or predicted
    logits_from: Callable[[int], Float32] | None = None
    hidden: Float32 | None = None


class RegionTime(NamedTuple):
    """What the threads do between two meetings, or what one does in turn for some of the rows."""

    name: str
    ops: tuple[int, ...]  # of the program, that it computes: indices
    seconds: float


class Profiled(NamedTuple):
    """What steps took, region by region in the order they run in."""

    regions: list[RegionTime]
    num_meetings: int  # how many times the threads met in the last step
    last_meeting: float  # when they met last: seconds of `time.perf_counter`, the steady clock


class ExecutorSizes(TypedDict):
    """The sizes that an executor is made for."""

    num_blocks: int
    max_tokens: int  # most tokens a batch may have
    max_logits_rows: int  # most rows a batch may want logits of
    max_seqs: int
    max_blocks_per_seq: int


class LoadOptions(ExecutorSizes, total=False):
    """Sizes, and settings that have a default."""

    threads: int | None  # None: as many as the process may use
    isa: str | None  # an instruction-set tier; None: the best
    keep_hidden: bool  # steps give `StepResult.hidden`
    all_hidden: bool  # … of all tokens
    digest: bool  # make `Executor.digest`
    state_log_rows: int  # tokens whose inputs of recurrent layers can be kept (`StateBatch.log`)
    rates: Rates  # of a simulated machine


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an executor can do. Without a capability, its methods raise `Unsupported`."""

    name: str
    kv_dtypes: tuple[KvDtype, ...]  # of its cache
    numerics: int = 0  # raised with each change after which equal inputs give other bits
    tier: str = ""  # instruction set that the bits depend on, too
    computes: bool = True  # else steps give no logits, and blocks hold nothing
    hidden_rows: bool = False  # steps can give `StepResult.hidden`
    added_programs: bool = False  # `add_program`, and `companion` for a draft model
    drafts_rows: bool = False  # `start_draft`


class Unsupported(ValueError):
    """An executor was asked for what its `Capabilities` exclude."""


class Executor(Protocol):
    """Computes steps over an arena of KV blocks that it owns.

    An executor inherits from this protocol, and with it a refusal of what it does not define.
    """

    capabilities: Capabilities
    layout: KvLayout
    num_blocks: int
    max_tokens: int
    max_logits_rows: int
    threads: int
    costs: CostModel  # of the model's own program
    weight_bytes: int  # of all programs' weights, as they are held
    digest: bytes  # of what decides the numbers: weights, numerics, tier; b"" if not asked for

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        program: Program,
        layout: KvLayout,
        **options: Unpack[LoadOptions],
    ) -> Executor:
        """Return an executor of a model, in memory.

        Raises `CheckpointError` for weights that do not fit the program and `ValueError` for
        settings that cannot be honoured.
        """
        ...

    @classmethod
    def held_bytes(
        cls, weights: Iterable[Weight], program: Program, source: str, isa: str | None
    ) -> int:
        """Return the bytes that its own copy of the weights will take.

        Raises `CheckpointError`, naming ``source``, for a weight that it cannot take.
        """
        ...

    def execute(self, batch: Batch, program: int = 0, rows: Float32 | None = None) -> StepResult:
        """Compute a step. ``program`` is one that was added, ``rows`` [T, width] what its `Input`
        takes. Raises `ValueError` naming what is wrong with the batch, before anything is computed.
        """
        ...

    def new_sampler(self, vocab_size: int) -> Sampler:
        """Return a sampler of this executor's steps. It may share the executor's threads."""
        ...

    def export_blocks(self, blocks: Int32, into: Bytes | None = None) -> Bytes:
        """Return a copy of the blocks' bytes [len(blocks), block_bytes]: in ``into`` (contiguous)
        or else in memory of its own.
        """
        ...

    def import_blocks(self, blocks: Int32, data: Bytes) -> None:
        """Overwrite the blocks with ``data`` [len(blocks), block_bytes]."""
        ...

    def close(self) -> None:
        """Give back threads and memory. Logits handed out before keep theirs until they go."""
        ...

    # Programs for drafters

    def add_program(
        self,
        program: Program,
        weights: Mapping[str, Weight] | None = None,
        *,
        keep_hidden: bool = False,
        ids: Sequence[int] = (),
    ) -> int:
        """Add another computation with the same cache, threads and weights; return its number.

        Roles that are loaded already are not loaded again; ``weights`` has the others, which are
        copied. Its logits may be fewer than the vocabulary's; ``ids`` are the tokens that they
        stand for, which `start_draft` needs. Room for activations is shared, so a program takes
        little memory beside its own weights. Raises `CheckpointError` for weights that do not fit
        the program, and `ValueError` for weights that are not needed, attention of another shape,
        or ``ids`` that are not a token for each of the logits.
        """
        self._refuse("add programs")

    def drop_program(self) -> None:
        """Forget the program that was added last; what it has brought of weights stays.

        Raises `ValueError` if none was added.
        """
        self._refuse("add programs")

    def costs_of(self, program: int) -> CostModel:
        """Return the costs of an added program."""
        self._refuse("add programs")

    def companion(
        self,
        checkpoint: Checkpoint,
        program: Program,
        layout: KvLayout,
        **sizes: Unpack[ExecutorSizes],
    ) -> Executor:
        """Return an executor of another model on the same threads: the two never compute at the
        same time.
        """
        self._refuse("run a second model")

    def execute_rows(
        self, program: int, rows: Float32, token_ids: Int32 | None = None
    ) -> StepResult:
        """Return logits of all ``rows`` [T, width], from an added program that has an `Input` and
        no attention. ``token_ids`` [T]: for one with an `Embed`, too.
        """
        wanted = np.arange(len(rows), dtype=np.int32)
        none = np.empty(0, np.int32)
        tables, copies = none.reshape(0, 0, 0), none.reshape(0, 2)
        tokens = none if token_ids is None else token_ids
        batch = Batch(tokens, none, none, none, tables, wanted, copies)
        return self.execute(batch, program, np.ascontiguousarray(rows, np.float32))

    def start_draft(
        self,
        programs: Sequence[int],
        rows: Float32,
        numbers: list[int],
        token_ids: list[int],
        most: list[int],
        least: float,
    ) -> None:
        """Begin to guess tokens one behind another from the ``rows`` of those ``numbers`` and
        ``token_ids``, up to ``most`` of them each, on threads that have nothing to do while the
        caller goes on; `finish_draft` returns the result. Nothing given is kept. Whatever else is
        computed, measured or added cancels it first.

        Each token is the likeliest by an added program, which has an `Input`, no attention and
        ``ids``: the first by the first of ``programs`` and so on, more by the last. One that keeps
        hidden rows has the next go on from them. A draft whose probability as a whole is down to
        ``least`` ends. Raises `ValueError` naming what does not fit together, before anything is
        computed.
        """
        self._refuse("draft from hidden rows")

    def finish_draft(self) -> list[tuple[list[int], float]] | None:
        """Return, of what was started, each row's tokens and how probable the first is; None where
        nothing was started, or it was cancelled.
        """
        self._refuse("draft from hidden rows")

    def cancel_draft(self) -> None:
        """Drop what was started. If it is under way, this waits for it all the same."""
        self._refuse("draft from hidden rows")

    # Measuring

    def measure_limits(self) -> Limits:
        """Measure what the machine can do at best on these threads, in a second or two."""
        self._refuse("measure the machine")

    def start_profile(self) -> None:
        """Time every region of the steps from here on (some 30 ns each)."""
        self._refuse("profile steps")

    def profile(self) -> Profiled:
        """Return the times since `start_profile`."""
        self._refuse("profile steps")

    def _refuse(self, what: str) -> NoReturn:
        raise Unsupported(f"the {self.capabilities.name} executor cannot {what}")


def check_weights(program: Program, weights: Mapping[str, Any], source: str) -> None:
    """Raise `CheckpointError`, naming ``source``, for weights whose shapes do not fit the
    program.
    """
    for role, shape in program.weights.items():
        each = weights.get(role)
        if each is None:
            raise CheckpointError(f"{source}: the model has no weight {role}")
        if each.shape != shape:
            name = getattr(each, "name", role)
            raise CheckpointError(f"{source}: {name} has shape {each.shape}, not {shape}")


def check_added(
    program: Program,
    weights: Collection[str],
    held: Collection[str],
    layout: KvLayout,
    num_heads: int,
) -> None:
    """Raise `ValueError` for what `Executor.add_program` refuses. ``weights`` are the roles brought
    along, ``held`` those loaded already, ``layout`` and ``num_heads`` are of the model's own
    program.
    """
    if unneeded := [role for role in weights if role not in program.weights]:
        raise ValueError(f"the program has no weight {unneeded[0]}")
    if twice := [role for role in weights if role in held]:
        raise ValueError(f"the weight {twice[0]} is loaded already")
    groups = {layer: group for group in layout.groups for layer in group.layers}
    stores = any(isinstance(op, RopeAndStoreKv) for op in program.ops)
    for op in program.ops:
        match op:
            case PagedAttention() | RopeAndStoreKv():
                group = groups.get(op.layer)
                fits = group is not None and (
                    (op.kv_heads, op.head_dim) == (group.kv_heads, group.head_dim)
                )
            case RotateQueries():
                fits = any(op.head_dim == group.head_dim for group in layout.groups)
            case Recurrence():
                _check_state(op, layout)
                continue
            case _:
                continue
        if not fits or (stores and program.config.num_heads != num_heads):
            raise ValueError("the program's attention has another shape than the cache")


def _check_state(op: Recurrence, layout: KvLayout) -> None:
    """Raise `ValueError` for a recurrence of another shape than the state of its layer."""
    parts = () if layout.state is None else layout.state.parts_of(op.layer)
    wanted = [(1, op.shape.taps - 1, op.shape.channels)]
    if op.shape.matrix is not None:
        wanted.append(op.shape.matrix)
    if [(part.heads, part.depth, part.width) for part in parts] != wanted:
        raise ValueError(f"the program's recurrence in layer {op.layer} has another state")
