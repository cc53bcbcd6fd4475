"""An executor that knows what every cache slot must hold, and a sampler that needs no logits."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from engine.states import HashedStates, WrongContent
from octavo.engine.clock import Clock, VirtualClock
from octavo.engine.engine import Engine
from octavo.engine.step_time import StepTimePredictor
from octavo.executor.base import Batch, Float32, Int32, StepResult
from octavo.executor.cost import CostModel, Rates
from octavo.kv_cache.connectors.manager import ConnectorManager
from octavo.kv_cache.layout import KvDtype, KvGroup, KvLayout
from octavo.kv_cache.prefix_index import Hash, chain_hash
from octavo.kv_cache.state_layout import StateLayout
from octavo.models.config import Activation, Layer, ModelConfig, Rope
from octavo.models.families import program
from octavo.models.recurrence_shape import ShortConvShape
from octavo.sampling.params import SamplingParams
from octavo.sampling.sampler import Sampled, TokenLogprobs
from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.sequence import Sequence as Seq
from octavo.spec_decode.speculator import Speculator

VOCAB = 64


def layout(
    windows: Sequence[int | None] = (None,), block_size: int = 16, state_pages: int = 0
) -> KvLayout:
    groups = tuple(KvGroup((index,), window, 1, 2) for index, window in enumerate(windows))
    plain = KvLayout(groups, block_size, KvDtype.BF16)
    if not state_pages:
        return plain

    def state(channels: int) -> StateLayout:
        return StateLayout.of({len(groups): ShortConvShape(channels, 2)}, plain.block_bytes)

    channels = 16
    while state(channels).pages < state_pages:
        channels += 16
    return replace(plain, state=state(channels))


def model(windows: Sequence[int | None], vocab_size: int = 5) -> ModelConfig:
    """A tiny one whose layers have these windows."""
    rope = Rope(10000.0, 4, interleaved=True)
    return ModelConfig(
        family="llama",
        vocab_size=vocab_size,
        hidden_size=12,
        num_heads=3,
        num_kv_heads=1,
        head_dim=4,
        intermediate_size=20,
        context_length=256,
        norm_eps=1e-5,
        activation=Activation.SILU,
        attention_scale=0.5,
        tied_embeddings=True,
        layers=tuple(Layer(rope, window) for window in windows),
    )


class Crash(RuntimeError):
    pass


@dataclass
class FakeState:
    seed: int
    choice: int
    tokens: list[int] = field(default_factory=list)

    @property
    def num_generated(self) -> int:
        return len(self.tokens)

    def record(self, token_id: int) -> None:
        self.tokens.append(token_id)

    def rewind(self, count: int) -> None:
        del self.tokens[len(self.tokens) - count :]

    def fork(self, choice: int) -> FakeState:
        return FakeState(self.seed, choice, self.tokens[:])


class FakeSampler:
    """Tokens are a function of (seed, choice, position), as with counter-based random numbers.

    ``vocab`` small makes different requests generate the same tokens, and so share blocks. A seed
    in ``broken`` gives no token from so many on, as a row that is not a number would.
    """

    def __init__(self, vocab: int = VOCAB) -> None:
        self.vocab = vocab
        self.broken: dict[int, int] = {}
        self.fail_after: int | None = None  # so many draws from now, once
        self.fail_state = False  # the next state cannot be made

    def new_state(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        stop_token_ids: Collection[int],
        choice: int = 0,
    ) -> FakeState:
        if self.fail_state:
            self.fail_state = False
            raise MemoryError("injected")
        return FakeState(params.seed or 0, choice)

    def draw(self, state: FakeState) -> int:
        mixed = (state.seed * 1_000_003 + state.choice * 7919 + state.num_generated) * 2654435761
        return (mixed >> 7) % self.vocab

    def sample(self, logits: object, rows: Sequence[int], states: Sequence[FakeState]) -> Sampled:
        tokens, errors = [], {}
        for index, state in enumerate(states):
            if self.fail_after is not None:
                self.fail_after -= 1
                if self.fail_after < 0:
                    self.fail_after = None
                    raise Crash("injected")
            if state.num_generated >= self.broken.get(state.seed, 1 << 30):
                errors[index] = "the logits are not numbers"
                tokens.append(-1)
            else:
                token = self.draw(state)
                state.record(token)
                tokens.append(token)
        return Sampled(tokens, None, errors)

    def verify(
        self,
        logits: object,
        rows: Sequence[int],
        states: Sequence[FakeState],
        guesses: Sequence[int],
        drawn_from: Sequence[object],
    ) -> Sampled:
        """A target that is certain of each token accepts it and gives no other."""
        assert len(rows) == len(states) == len(guesses) == len(drawn_from)
        tokens = [-1] * len(states)
        errors: dict[int, str] = {}
        ended: set[int] = set()
        for index, (state, guess) in enumerate(zip(states, guesses, strict=True)):
            if id(state) not in ended:
                sampled = self.sample(logits, rows[index : index + 1], [state])
                (tokens[index],) = sampled.token_ids
                if sampled.errors:
                    errors[index] = sampled.errors[0]
                if tokens[index] != guess:
                    ended.add(id(state))
        return Sampled(tokens, None, errors)

    def prompt_logprobs(
        self, logits: object, rows: Sequence[int], token_ids: Sequence[int], top: int
    ) -> list[TokenLogprobs]:
        assert len(rows) == len(token_ids)
        return [TokenLogprobs(token, -1.0, 1, ()) for token in token_ids]


class CheckingExecutor:
    """Keeps in every slot of every block a hash of all the tokens up to there, and checks before
    each query that every key it sees is the one its own tokens demand. States are
    `HashedStates`.
    """

    def __init__(
        self,
        kv_layout: KvLayout,
        num_blocks: int,
        *,
        max_tokens: int,
        max_logits_rows: int,
        duration: float = 0.001,
    ) -> None:
        self.layout = kv_layout
        self.num_blocks = num_blocks
        self.max_tokens = max_tokens
        self.max_logits_rows = max_logits_rows
        self.duration = duration
        self.crashes: list[str] = []  # of the next steps: "before", "half", "after" it was computed
        self.fail_logits = False  # the next slice of logits cannot be computed
        self.fail_transfer = ""  # "export" or "import": the next one fails
        self.slice_rows: int | None = None  # rows of logits held at a time; None: none are
        self.poison: int | None = None  # a step with this token crashes
        self.during: Callable[[], None] = lambda: None  # runs between schedule and commit
        self.steps = 0
        numbers = max(kv_layout.block_size, kv_layout.block_bytes // 8)
        self.content = np.zeros((num_blocks, numbers), dtype=np.int64)
        pages = kv_layout.state_blocks
        self.states = HashedStates(self.content, pages, self._hash) if pages else None
        self.scheduler: Scheduler | None = None
        self._prefixes: dict[int, tuple[Seq, list[int]]] = {}

    def expected(self, seq: Seq, draft: Sequence[int] = ()) -> npt.NDArray[np.int64]:
        """The hash of every prefix of the sequence's tokens, and of the draft behind them."""
        known, hashes = self._prefixes.get(id(seq), (seq, []))
        if known is not seq:
            hashes = []
        last = hashes[-1] if hashes else 0
        for token in seq.token_ids[len(hashes) :]:
            last = self._hash(last, token)
            hashes.append(last)
        if len(self._prefixes) > 4096:
            self._prefixes.clear()
        self._prefixes[id(seq)] = (seq, hashes)
        guessed = []
        for token in draft:
            last = self._hash(last, token)
            guessed.append(last)
        return np.array(hashes + guessed, dtype=np.int64)

    @staticmethod
    def _hash(last: int, token: int) -> int:
        return (hash((last, token)) & 0x3FFFFFFFFFFFFFFF) | 1

    def execute(self, batch: Batch) -> StepResult:
        self.steps += 1
        crash = self.crashes.pop() if self.crashes else None
        if crash == "before":
            raise Crash("injected")
        try:
            result = self._execute(batch, crash)
        except AssertionError as error:
            raise WrongContent("the batch is malformed") from error
        if crash is not None:
            raise MemoryError("injected")
        return result

    def _execute(self, batch: Batch, crash: str | None) -> StepResult:
        kv = self.scheduler.kv
        size = self.layout.block_size
        offsets = batch.seq_offsets.tolist()
        assert 0 < batch.num_tokens <= self.max_tokens
        assert len(batch.logits_rows) <= self.max_logits_rows
        assert (np.diff(batch.logits_rows) > 0).all()
        assert offsets[0] == 0
        assert offsets[-1] == batch.num_tokens == len(batch.positions)
        assert len(set(batch.seq_slots.tolist())) == len(batch.seq_slots) == len(offsets) - 1
        for source, destination in batch.copies.tolist():
            self.content[destination] = self.content[source]
        step = self.scheduler._scheduled
        drafts = dict(zip(step.decodes, step.drafts or (), strict=False))
        running = self.scheduler.decoding + self.scheduler.prefilling
        by_slot = {seq.slot: (seq, drafts.get(seq, [])) for seq in running}
        branched = [
            (branch.slot, (step.decodes[index], branch.token_ids))
            for index, branches in step.branches.items()
            for branch in branches
        ]
        assert not by_slot.keys() & dict(branched).keys()
        by_slot |= branched
        assert len(branched) <= len(kv.tables[0]) - len(kv.num_tokens)
        spans = []
        for index, slot in enumerate(batch.seq_slots.tolist()):
            begin, end = offsets[index], offsets[index + 1]
            seq, draft = by_slot[slot]
            start = int(batch.positions[begin])
            stop = start + end - begin
            assert batch.positions[begin:end].tolist() == list(range(start, stop))
            known = seq.token_ids[start:].tolist() + draft
            assert batch.token_ids[begin:end].tolist() == known[: stop - start]
            if draft:
                assert stop == len(seq.token_ids) + len(draft)
                assert len(draft) < seq.num_to_come
            hashes = self.expected(seq, draft)
            spans.append((slot, start, stop, hashes))
        states: list[list[tuple[Int32, int]]] = [[] for _ in spans]
        assert (batch.state is None) == (self.states is None)
        if self.states is not None and batch.state is not None:
            before = [int(hashes[start - 1]) if start else 0 for _, start, _, hashes in spans]
            states = self.states.advance(
                batch.state, batch.seq_offsets, batch.token_ids, before, kv.pool
            )
            written = {page for each in states for pages, _ in each for page in pages.tolist()}
            assert not written & {*batch.block_tables[:, batch.seq_slots].ravel().tolist()}
        for index, (slot, start, stop, hashes) in enumerate(spans):
            if (crash == "half" or self.poison in batch.token_ids) and index % 2:
                continue  # a crash may leave a step half done
            for group in range(len(self.layout.groups)):
                for position in range(start, stop):
                    block = int(batch.block_tables[group, slot, position // size])
                    if block < 0 or kv.pool.refs[block] != 1 or kv.pool.contents[block]:
                        raise WrongContent(f"position {position} is written to block {block}")
                    self.content[block, position % size] = hashes[position] + group
            for pages, state in states[index]:
                assert self.states is not None
                self.states.store(pages, state)
        if crash == "half" or self.poison in batch.token_ids:
            raise Crash("injected")
        for slot, start, stop, hashes in spans:
            for group, kind in enumerate(self.layout.groups):
                first = 0 if kind.window is None else max(0, start - kind.window + 1)
                row = batch.block_tables[group, slot, first // size : -(-stop // size)]
                if (row < 0).any():
                    raise WrongContent(f"a key that position {start} sees was given back")
                keys = self.content[row, :size].reshape(-1)[first % size :][: stop - first]
                if not np.array_equal(keys, hashes[first:stop] + group):
                    raise WrongContent(f"positions {first} to {stop - 1} hold another prefix")
        self.during()
        return self._logits(len(batch.logits_rows))

    def _logits(self, total: int) -> StepResult:
        size = self.slice_rows
        if size is None:
            return StepResult(None, self.duration)

        def rows_from(row: int) -> Float32:
            if row % size or not 0 <= row < total:
                raise WrongContent(f"logits from row {row} of {total}, {size} at a time")
            if self.fail_logits:
                self.fail_logits = False
                raise Crash("injected")
            return np.zeros((min(size, total - row), 1), np.float32)

        return StepResult(np.zeros((size, 1), np.float32), self.duration, rows_from)

    def export_blocks(
        self, blocks: Int32, into: npt.NDArray[np.uint8] | None = None
    ) -> npt.NDArray[np.uint8]:
        self._transfer("export")
        data = self.content[blocks].view(np.uint8)
        if into is None:
            return data
        into[:] = data
        return into

    def import_blocks(self, blocks: Int32, data: npt.NDArray[np.uint8]) -> None:
        self._transfer("import")
        self.content[blocks] = data.view(np.int64)

    def _transfer(self, way: str) -> None:
        if self.fail_transfer == way:
            self.fail_transfer = ""
            raise Crash("injected")

    def close(self) -> None:
        pass


def build(
    *,
    windows: Sequence[int | None] = (None,),
    block_size: int = 16,
    num_blocks: int = 64,
    max_model_len: int = 256,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    max_logits_rows: int | None = None,
    itl_target: float | None = None,  # ms
    max_branches: int = 0,
    enable_prefix_caching: bool = True,
    max_num_queued_reqs: int | None = None,
    max_num_queued_tokens: int | None = None,
    vocab: int = VOCAB,
    hasher: Hash = chain_hash,
    connectors: ConnectorManager | None = None,
    clock: Clock | None = None,
    eos: Collection[int] = (),
    duration: float = 0.001,
    seed: int | None = None,
    speculator: Speculator | None = None,
    batching: Literal["continuous", "static"] = "continuous",
    memory: Literal["paged", "reserve"] = "paged",
    chunked_prefill: bool = True,
    state_pages: int = 0,
    state_log_rows: int = 0,
    state_snapshots: float = 0.5,
    **of_policy: Any,
) -> Engine:
    """An engine over the checking executor; ``engine.executor`` is it."""
    config = SchedulerConfig(
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_logits_rows=max_logits_rows,
        itl_target=itl_target,
        max_branches=max_branches,
        enable_prefix_caching=enable_prefix_caching,
        max_num_queued_reqs=max_num_queued_reqs,
        max_num_queued_tokens=max_num_queued_tokens,
        batching=batching,
        memory=memory,
        chunked_prefill=chunked_prefill,
        state_log_rows=state_log_rows,
        state_snapshots=state_snapshots,
        **of_policy,
    )
    kv_layout = layout(windows, block_size, state_pages)
    scheduler = Scheduler(config, kv_layout, num_blocks, hasher=hasher)
    if connectors is not None:
        scheduler.kv.attach(connectors)
    executor = CheckingExecutor(
        kv_layout,
        num_blocks,
        max_tokens=max_num_batched_tokens,
        max_logits_rows=config.logits_rows,
        duration=duration,
    )
    executor.scheduler = scheduler
    pace: StepTimePredictor | None = None
    if itl_target is not None:
        # Guesses that are far off: each step takes ``duration``.
        costs = CostModel(program(model(windows)), kv_layout)
        pace = StepTimePredictor(costs, Rates(1e7, 1e8, 1e-5), measured=False)
    return Engine(
        executor,
        scheduler,
        FakeSampler(vocab),
        clock or VirtualClock(),
        vocab_size=VOCAB,
        eos_token_ids=eos,
        seed=seed,
        speculator=speculator,
        step_times=pace,
    )
