"""Recurrent layers: against what their ops mean, and the same bits however a sequence is cut."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest

from executor import tiny
from octavo.executor.base import Batch
from octavo.executor.native.executor import NativeExecutor
from octavo.executor.reference.reference import ReferenceExecutor
from octavo.kv_cache.exchange_form import state_arrays
from octavo.kv_cache.layout import KvLayout
from octavo.kv_cache.state_batch import StateBatch
from octavo.loader.base import Checkpoint, Tokenizer, Weight, WeightFormat
from octavo.models.config import UNROTATED, Layer, ModelConfig
from octavo.models.program import Input, Linear, Logits, Op, Program
from octavo.models.recurrence import GatedDelta, Mamba2, Recurrence, ShortConv
from octavo.models.recurrence_shape import (
    DeltaShape,
    MambaShape,
    RecurrenceShape,
    ShortConvShape,
)

Float32 = npt.NDArray[np.float32]
TIERS = ("generic", "avx2", "avx512", "avx512_bf16")
SHAPES: dict[str, RecurrenceShape] = {
    "convolution of 3": ShortConvShape(40, 3),
    "convolution of 2": ShortConvShape(150, 2),
    "convolution of 7": ShortConvShape(16, 7),
    "delta net": DeltaShape(2, 4, 16, 16, 4, False),
    "delta net, tiled": DeltaShape(3, 6, 24, 8, 4, True),
    "delta net, one key head": DeltaShape(1, 4, 10, 24, 2, False),
    "delta net of 128": DeltaShape(2, 2, 128, 128, 4, False),
    "mamba": MambaShape(4, 16, 32, 1, 4),
    "mamba, groups": MambaShape(6, 24, 10, 2, 3),
    "mamba, odd": MambaShape(3, 8, 128, 3, 5),
}
TOKENS = 100
SEQUENCES = 4
ROOM = 6  # states of each
LOG = 40


def model(shape: RecurrenceShape, kv_heads: int) -> tuple[ModelConfig, Program, dict[str, Float32]]:
    """A program from rows [values of the recurrence] to what the recurrence finds."""
    rng = np.random.default_rng(7)
    out = shape.channels if shape.matrix is None else shape.matrix[0] * shape.matrix[2]
    config = tiny.config(
        "lfm2",
        vocab_size=out,
        num_heads=kv_heads,
        num_kv_heads=kv_heads,
        hidden_size=out,
        layers=(Layer(UNROTATED, recurrence=shape), Layer(UNROTATED)),
    )
    names = ["x", "first", "second"]
    op: Recurrence
    match shape:
        case ShortConvShape():
            op = ShortConv("x", "conv", "out", 0, shape, "conv.bias")
        case DeltaShape():
            op = GatedDelta("x", "first", "second", "conv", "out", 0, shape)
        case MambaShape():
            op = Mamba2("x", "first", "conv", "a", "d", "out", 0, shape, "conv.bias")
    gates = len(op.reads) - 1
    sizes = [shape.channels, *(shape.gates // gates for _ in range(gates))]
    widths = {"rows": sum(sizes), "out": out} | dict(zip(names, sizes, strict=False))
    selections, at = {}, 0
    ops: list[Op] = [Input("rows")]
    for name, size in zip(names, sizes, strict=False):
        selections[name] = np.eye(size, sum(sizes), at, dtype=np.float32)
        ops.append(Linear("rows", name, name))
        at += size
    ops += [op, Logits("out", "output")]
    shapes = {role: s for each in ops for role, s in each.weight_shapes(widths, config).items()}
    weights = selections | {"output": np.eye(out, dtype=np.float32)}
    for role in shapes.keys() - weights.keys():
        weights[role] = rng.normal(0.0, 0.6, shapes[role]).astype(np.float32)
    if "a" in weights:
        weights["a"] = -np.exp(weights["a"])
    return config, Program(config, tuple(ops), widths, shapes), weights


def rows_of(shape: RecurrenceShape, seed: int, tokens: int = TOKENS) -> Float32:
    """The values of so many tokens, side by side."""
    rng = np.random.default_rng(seed)
    x = rng.normal(0.0, 1.0, (tokens, shape.channels))
    gates = rng.uniform(0.05, 1.0, (tokens, shape.gates))
    return np.concatenate([x, gates], axis=1).astype(np.float32)


@dataclass
class Step:
    """Tokens of one sequence: those that are pending, then its own."""

    sequence: int
    start: int  # position of the first of its own
    rows: Float32
    read: int = -1
    stores: list[tuple[int, int]] = field(default_factory=list)  # applied tokens, place
    pending: list[int] = field(default_factory=list)
    log: dict[int, int] = field(default_factory=dict)  # row of the log, by token of its own


class Runner:
    """An executor of one recurrent layer, and places for states of its sequences."""

    def __init__(
        self, shape: RecurrenceShape, isa: str, threads: int = 1, kv_heads: int = 1
    ) -> None:
        config, program, weights = model(shape, kv_heads)
        self.layout = KvLayout.of(config)
        assert self.layout.state is not None
        self.pages = self.layout.state.pages
        stored = {
            role: Weight(role, WeightFormat.F32, w.shape, w.view(np.uint8).reshape(-1))
            for role, w in weights.items()
        }
        checkpoint = Checkpoint(Path("tiny"), config, stored, cast(Tokenizer, None), None)
        sizes: dict[str, Any] = {
            "num_blocks": 1 + SEQUENCES * ROOM * self.pages,
            "max_tokens": SEQUENCES * TOKENS,
            "max_logits_rows": SEQUENCES * TOKENS,
            "max_seqs": SEQUENCES,
            "max_blocks_per_seq": 64,
            "state_log_rows": LOG,
        }
        self.executor: NativeExecutor | ReferenceExecutor
        if isa == "reference":
            self.executor = ReferenceExecutor(checkpoint, program, self.layout, **sizes)
        else:
            try:
                self.executor = NativeExecutor(
                    checkpoint, program, self.layout, isa=isa, threads=threads, **sizes
                )
            except ValueError as error:
                pytest.skip(str(error))
        # Blocks hold anything before they are pages; places are spread over them.
        order = np.random.default_rng(threads).permutation(SEQUENCES * ROOM * self.pages) + 1
        self.places = order.reshape(-1, self.pages).astype(np.int32)
        dirt = np.full((len(order), self.layout.block_bytes), 0xA5, np.uint8)
        self.executor.import_blocks(order.astype(np.int32), dirt)

    def run(self, steps: list[Step]) -> list[Float32]:
        """What the tokens of each find."""
        batch = self.batch(steps)
        logits = self.executor.execute(batch, 0, np.concatenate([s.rows for s in steps])).logits
        assert logits is not None
        return np.split(logits.copy(), batch.seq_offsets[1:-1])

    def batch(self, steps: list[Step]) -> Batch:
        offsets = np.cumsum([0, *(len(step.rows) for step in steps)]).astype(np.int32)
        log = np.full(offsets[-1], -1, np.int32)
        for step, offset in zip(steps, offsets, strict=False):
            for token, row in step.log.items():
                log[offset + token] = row
        stores = [(i, *store) for i, step in enumerate(steps) for store in step.stores]
        return Batch(
            token_ids=np.zeros(0, np.int32),
            positions=np.concatenate(
                [np.arange(s.start, s.start + len(s.rows), dtype=np.int32) for s in steps]
            ),
            seq_offsets=offsets,
            seq_slots=np.array([step.sequence for step in steps], np.int32),
            block_tables=np.zeros((len(self.layout.groups), SEQUENCES, 64), np.int32),
            logits_rows=np.arange(offsets[-1], dtype=np.int32),
            copies=np.zeros((0, 2), np.int32),
            state=StateBatch(
                tables=self.places,
                reads=np.array([step.read for step in steps], np.int32),
                stores=np.array(stores, np.int32).reshape(-1, 3),
                pending_offsets=np.cumsum([0, *(len(s.pending) for s in steps)]).astype(np.int32),
                pending=np.array([row for s in steps for row in s.pending], np.int32),
                log=log,
            ),
        )

    def pages_of(self, place: int) -> npt.NDArray[np.uint8]:
        return self.executor.export_blocks(self.places[place])

    def state(self, place: int) -> list[bytes]:
        assert self.layout.state is not None
        arrays = state_arrays(self.layout.state, self.pages_of(place))
        return [array.tobytes() for array in arrays]

    def whole(self, rows: Float32) -> Float32:
        """What tokens find, all at once; the state behind them is in place 0."""
        (found,) = self.run([Step(0, 0, rows, stores=[(len(rows), 0)])])
        return found


@pytest.mark.parametrize("isa", ["reference", *TIERS])
@pytest.mark.parametrize("name", SHAPES)
def test_against_the_ops_meaning(name: str, isa: str) -> None:
    shape = SHAPES[name]
    _, program, weights = model(shape, 1)
    runner, rows = Runner(shape, isa, 2), rows_of(shape, 1)
    found = runner.whole(rows)
    (op,) = (op for op in program.ops if isinstance(op, Recurrence))
    exact = {role: values.astype(np.float64) for role, values in weights.items()}
    wanted, state = op.advance(cast(Any, exact), rows, op.initial)
    assert np.abs(found - wanted).max() < 2e-5 * wanted.std()
    assert runner.layout.state is not None
    inputs, *matrix = state_arrays(runner.layout.state, runner.pages_of(0))
    assert np.array_equal(inputs[0], state.inputs)
    if state.matrix is not None:
        assert np.abs(matrix[0] - state.matrix).max() < 2e-5 * state.matrix.std()


@dataclass
class Life:
    """A sequence on its way through steps."""

    sequence: int
    rows: Float32
    found: Float32
    done: int = 0  # tokens in the stored state
    pending: list[int] = field(default_factory=list)  # rows of the log behind it
    place: int = -1

    @property
    def start(self) -> int:
        return self.done + len(self.pending)

    @property
    def places(self) -> range:
        return range(self.sequence * ROOM, (self.sequence + 1) * ROOM)


@pytest.mark.parametrize("isa", ["reference", *TIERS])
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("seed", range(2))
def test_same_bits_however_a_sequence_is_cut(name: str, isa: str, seed: int) -> None:
    """Chunks, drafts of which some are right, states stored in place and elsewhere and once more
    on the way, neighbours, threads, sizes of pages.
    """
    shape, rng = SHAPES[name], np.random.default_rng(seed)
    alone = Runner(shape, isa)
    runner = Runner(shape, isa, threads=1 + seed * 2, kv_heads=(1, 16)[seed])
    lives = []
    for sequence in range(SEQUENCES):
        rows = rows_of(shape, 10 + sequence)
        lives.append(Life(sequence, rows, np.full_like(alone.whole(rows), np.nan)))
    while going := [life for life in lives if life.done < TOKENS]:
        pending = {row for life in lives for row in life.pending}
        log = [row for row in rng.permutation(LOG).tolist() if row not in pending]
        some = [life for life in going if rng.random() < 0.8] or going[:1]
        drawn = [drawn_step(life, log, rng) for life in some]
        results = runner.run([step for step, _ in drawn])
        for life, (step, right), found in zip(some, drawn, results, strict=True):
            # Of the drafts that are logged, the first are right.
            sure = len(step.rows) - len(step.log)
            life.found[life.start : life.start + sure + right] = found[: sure + right]
            *kept, (stored, life.place) = step.stores
            for applied, place in kept:
                alone.whole(life.rows[: life.done + applied])
                assert runner.state(place) == alone.state(0)
            life.done += stored
            life.pending = [*step.log.values()][:right]
    for life in lives:
        assert np.array_equal(alone.whole(life.rows), life.found)
        assert runner.state(life.place) == alone.state(0)
        if runner.layout == alone.layout:
            assert np.array_equal(runner.pages_of(life.place), alone.pages_of(0))


def drawn_step(life: Life, log: list[int], rng: np.random.Generator) -> tuple[Step, int]:
    """A step, and how many of its drafts are right."""
    left = TOKENS - life.start
    count = min(left, int(rng.choice([1, 1, 4, 17, 64, 90])))
    drafts = int(rng.integers(0, min(count, 5))) if count < left else 0
    right = int(rng.integers(0, drafts + 1))
    rows = life.rows[life.start : life.start + count].copy()
    rows[count - drafts + right :] *= 0.5
    step = Step(life.sequence, life.start, rows, life.place, pending=life.pending)
    step.log = {token: log.pop() for token in range(count - drafts, count)}
    stored = len(life.pending) + count - drafts
    others = [place for place in life.places if place != life.place]
    if stored > 1 and rng.random() < 0.5:
        step.stores.append((int(rng.integers(1, stored + 1)), others.pop()))
    in_place = life.place >= 0 and rng.random() < 0.5
    step.stores.append((stored, life.place if in_place else others[0]))
    return step, right


def test_a_step_that_stores_nothing_changes_nothing() -> None:
    """As that of a branch, which reads another's state and logs what it computes."""
    shape = SHAPES["delta net"]
    runner, rows = Runner(shape, "generic", 2), rows_of(shape, 3)
    found = runner.whole(rows)
    runner.run([Step(0, 0, rows[:20], stores=[(20, 0)])])
    before = runner.pages_of(0)
    branch = Step(1, 20, rows[20:90], read=0, log={i: i for i in range(1, 30)})
    (got,) = runner.run([branch])
    assert np.array_equal(got, found[20:90])
    assert np.array_equal(runner.pages_of(0), before)
    # What it has logged is applied to the state behind its first token.
    runner.run([Step(0, 20, rows[20:21], read=0, stores=[(1, 0)])])
    (after,) = runner.run([Step(0, 26, rows[26:], read=0, pending=[1, 2, 3, 4, 5])])
    assert np.array_equal(after, found[26:])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reads": np.array([ROOM * SEQUENCES], np.int32)}, "state that is read is 24"),
        ({"reads": np.array([-1], np.int32)}, "sequence 0 reads no state at position 8"),
        ({"stores": np.array([[0, 6, 0]], np.int32)}, "tokens of a stored state is 6, outside 0"),
        ({"stores": np.array([[1, 1, 0]], np.int32)}, "sequence of a stored state is 1"),
        ({"stores": np.array([[0, 4, 1], [0, 3, 2]], np.int32)}, "stored states are not in order"),
        ({"stores": np.array([[0, 5, -1]], np.int32)}, "place of a stored state is -1"),
        ({"pending": np.array([1, LOG], np.int32)}, f"pending row of the log is {LOG}"),
        ({"log": np.array([3, 1, -1], np.int32)}, "a row of the log is written twice"),
        ({"log": np.array([-2, -1, -1], np.int32)}, "row of the log is -2"),
        ({"log": np.array([-1, -1], np.int32)}, "state.log has 2 entries, not 3"),
        ({"pending_offsets": np.array([0, 1], np.int32)}, "do not run over all pending rows"),
        ({"tables": np.zeros((2, 1), np.int32)}, "entries, not"),
    ],
)
def test_states_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    shape = SHAPES["delta net"]
    runner = Runner(shape, "generic")
    step = Step(0, 10, rows_of(shape, 3, 3), 0, stores=[(5, 0)], pending=[1, 2])
    batch = runner.batch([step])
    assert batch.state is not None
    batch.state = replace(batch.state, **change)
    with pytest.raises(ValueError, match=message):
        runner.executor.execute(batch, 0, step.rows)


def test_pages_of_several_sequences_are_refused() -> None:
    shape = SHAPES["delta net"]
    runner, rows = Runner(shape, "generic"), rows_of(shape, 3, 3)
    runner.run([Step(0, 0, rows, stores=[(3, 0)])])
    writing = Step(0, 3, rows, 0, stores=[(3, 0)])
    for other in Step(1, 3, rows, 0), Step(1, 3, rows, 1, stores=[(3, 0)]):
        with pytest.raises(ValueError, match="a page of a stored state is another one's, too"):
            runner.run([writing, other])
    batch = runner.batch([writing])
    batch.state = None
    with pytest.raises(ValueError, match="recurrent layers, and the batch no states"):
        runner.executor.execute(batch, 0, rows)
