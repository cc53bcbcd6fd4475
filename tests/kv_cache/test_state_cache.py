"""States of recurrent layers: who writes where, what is kept, and what becomes of drafts."""

from __future__ import annotations

from array import array
from itertools import chain
from random import Random

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.checking import layout
from engine.states import HashedStates
from octavo.kv_cache.cache import KvCache, peak_blocks
from octavo.kv_cache.snapshots import SnapshotKind
from octavo.kv_cache.state_batch import StateBatch

SIZE = 4  # tokens a block


def hashed(last: int, token: int) -> int:
    return (hash((last, token)) & 0xFFFFFFFFFFFF) | 1


class Texts:
    """Sequences over a cache, whose steps are applied to states that know their tokens."""

    def __init__(
        self,
        num_blocks: int = 64,
        pages: int = 3,
        *,
        caching: bool = True,
        snapshots: float = 0.5,
        log_rows: int = 16,
    ) -> None:
        self.kv = KvCache(
            layout((None,), SIZE, pages),
            num_blocks,
            max_seqs=6,
            max_blocks_per_seq=32,
            max_branches=2,
            enable_prefix_caching=caching,
            state_snapshots=snapshots,
            state_log_rows=log_rows,
        )
        assert self.kv.state is not None
        self.state = self.kv.state
        assert self.state.num_pages == pages
        self.content = np.zeros((num_blocks, 8), np.int64)
        self.hashes = HashedStates(self.content, pages, hashed)
        self.tokens: dict[int, array[int]] = {}

    def missing(self, slot: int) -> int:
        return len(self.tokens[slot]) - int(self.kv.num_tokens[slot])

    def open(self, tokens: array[int]) -> int:
        slot = self.kv.open(self.kv.lookup(tokens, None))
        self.tokens[slot] = tokens[:]
        return slot

    def fork(self, slot: int) -> int:
        child = self.kv.fork(slot)
        self.tokens[child] = self.tokens[slot][:]
        return child

    def close(self, slot: int) -> None:
        self.kv.close(slot)
        del self.tokens[slot]

    def step(
        self,
        decodes: list[int],
        chunks: dict[int, int] | None = None,
        drafts: dict[int, list[int]] | None = None,
        right: dict[int, int] | None = None,
        branches: dict[int, list[int]] | None = None,
        followed: tuple[int, ...] = (),
    ) -> StateBatch:
        """A step: of ``decodes`` the token that each lacks and its drafts, of which so many are
        ``right``, then ``chunks``, then a branch of ``branches``, which those in ``followed`` take.
        Drafts that are right become the sequence's; a token more is drawn.
        """
        kv, chunks, drafts = self.kv, chunks or {}, drafts or {}
        right, branches = right or {}, branches or {}
        rows = {slot: kv.branch(slot, 1 + len(guess)) for slot, guess in branches.items()}
        rows = {slot: row for slot, row in rows.items() if row is not None}
        slots = [*decodes, *chunks, *rows.values()]
        spans = [self.tokens[slot][-1:].tolist() + drafts.get(slot, []) for slot in decodes]
        for slot, size in chunks.items():
            start = int(kv.num_tokens[slot])
            spans.append(self.tokens[slot][start : start + size].tolist())
        spans += [[self.tokens[slot][-1], *branches[slot]] for slot in rows]
        offsets = np.cumsum([0, *map(len, spans)], dtype=np.int32)
        batch = self.state.plan(
            np.array(slots, np.int32),
            offsets,
            len(decodes),
            [len(self.tokens[slot]) for slot in chunks],
        )
        before = []
        for slot in [*decodes, *chunks, *rows]:
            value = 0
            for token in self.tokens[slot][: int(kv.num_tokens[slot])]:
                value = hashed(value, token)
            before.append(value)
        kv.take_copies()
        tokens = np.array([*chain.from_iterable(spans)], np.int32)
        for stores in self.hashes.advance(batch, offsets, tokens, before, kv.pool):
            for pages, state in stores:
                self.hashes.store(pages, state)
        for slot in followed:
            if slot in rows:
                kv.adopt(rows[slot])
        kv.prune()
        for slot in decodes:
            guess = branches[slot] if slot in followed and slot in rows else drafts.get(slot, [])
            run = guess[: right.get(slot, 0)]
            kv.advance(slot, 1 + len(run))
            self.tokens[slot].extend([*run, 7])
        for slot, size in chunks.items():
            kv.advance(slot, size)
        for slot in [*decodes, *chunks]:
            kv.register(slot, self.tokens[slot])
            kv.commit_state(slot)
            kv.trim(slot)
        kv.check()
        return batch

    def compute(self, slot: int, size: int | None = None) -> StateBatch:
        """A step with the next tokens that a sequence lacks."""
        size = self.missing(slot) if size is None else size
        assert self.kv.reserve(slot, size)
        return self.step([], {slot: size})

    def decode(
        self, *slots: int, drafts: dict[int, list[int]] | None = None, **more: dict[int, int]
    ) -> StateBatch:
        for slot in slots:
            assert self.kv.reserve(slot, 1 + len((drafts or {}).get(slot, [])))
        return self.step([*slots], drafts=drafts, **more)

    def ready(self, tokens: array[int]) -> int:
        """Open a sequence and compute all but its last token."""
        slot = self.open(tokens)
        if (size := self.missing(slot) - 1) > 0:
            self.compute(slot, size)
        return slot


def ids(count: int, first: int = 0) -> array[int]:
    return array("i", range(first, first + count))


def test_a_decode_writes_in_place_and_changes_nothing() -> None:
    texts = Texts()
    slot = texts.ready(ids(6))
    used = texts.kv.pool.num_used
    batch = texts.decode(slot)
    assert batch.reads.tolist() == [batch.stores[0, 2]]
    assert batch.stores[0, :2].tolist() == [0, 1]
    assert not batch.pending.size
    assert (batch.log == -1).all()
    assert texts.kv.pool.num_used == used


def test_a_snapshot_is_not_written() -> None:
    texts = Texts()
    slot = texts.ready(ids(9))  # its state is behind eight tokens, the end of a block
    pages = [*texts.state.pages_of(slot)]
    texts.decode(slot)
    assert not {*pages} & {*texts.state.pages_of(slot)}
    hit = texts.kv.lookup(ids(9), None)
    assert hit.num_tokens == 8
    assert hit.nodes[-1].pages == pages
    assert texts.kv.pool.num_used == 3 + 3


def test_without_room_a_snapshot_is_forgotten() -> None:
    texts = Texts(num_blocks=peak_blocks(layout((None,), SIZE, 3), 12))
    slot = texts.ready(ids(9))
    texts.decode(slot)
    assert texts.kv.lookup(ids(9), None).num_tokens == 0
    texts.decode(slot)
    texts.decode(slot)
    assert texts.kv.num_tokens[slot] == 11


def test_the_next_turn_computes_only_what_is_new() -> None:
    texts = Texts()
    slot = texts.ready(ids(10))
    for _ in range(7):
        texts.decode(slot)
    text = texts.tokens[slot]
    texts.close(slot)
    hit = texts.kv.lookup(text + ids(5, 50), None)
    assert hit.num_tokens == 16
    assert not hit.wanted
    again = texts.open(text + ids(5, 50))
    texts.compute(again)


def test_a_running_sequence_has_one_rolling_snapshot() -> None:
    texts = Texts()
    slot = texts.ready(ids(5))
    for _ in range(17):
        texts.decode(slot)
    snapshots = texts.state.snapshots
    assert snapshots.count(SnapshotKind.ROLLING) == 1
    assert snapshots.count(SnapshotKind.KEPT) == 1  # of the prompt's end
    texts.close(slot)
    assert snapshots.count(SnapshotKind.ROLLING) == 0
    assert snapshots.count(SnapshotKind.KEPT) == 2


def test_a_prompt_leaves_its_last_two_ends_of_blocks() -> None:
    texts = Texts()
    texts.close(texts.ready(ids(15)))
    for length, found in ((15, 12), (12, 8), (8, 0)):
        other = ids(length - 1) + ids(4, 90)  # as if another generation prompt followed
        assert texts.kv.lookup(other, None).num_tokens == found, length


def test_a_shared_prefix_is_kept_when_it_is_found_a_second_time() -> None:
    texts = Texts(num_blocks=200)
    texts.close(texts.ready(ids(16) + ids(30, 100)))
    second = ids(16) + ids(30, 200)
    hit = texts.kv.lookup(second, None)
    assert (hit.num_tokens, hit.wanted) == (0, 16)
    texts.close(texts.ready(second))
    assert texts.kv.lookup(ids(16) + ids(30, 300), None).num_tokens == 16


def test_who_joins_a_running_state_leaves_it_alone() -> None:
    """The one that runs has reserved for its step already, and would have written in place."""
    texts = Texts()
    slot = texts.ready(ids(9))
    assert texts.kv.reserve(slot, 1)
    hit = texts.kv.lookup(ids(12), None)
    assert hit.num_tokens == 8
    assert texts.kv.blocks_in_use(hit) == 2 - 3, "two blocks are shared, and a state is needed"
    other = texts.open(ids(12))
    assert texts.kv.reserve(other, 3)
    texts.step([slot], {other: 3})


@pytest.mark.parametrize("right", [0, 1, 3])
def test_drafts_are_applied_when_they_are_known_to_be_right(right: int) -> None:
    texts = Texts()
    slot = texts.ready(ids(6))
    first = texts.decode(slot, drafts={slot: [40, 41, 42]}, right={slot: right})
    assert first.stores[:, 1].tolist() == [1]
    assert (first.log >= 0).tolist() == [False, True, True, True]
    assert len(texts.state.free_log_rows) == 16 - right
    second = texts.decode(slot)
    assert second.pending.tolist() == first.log[1 : 1 + right].tolist()
    assert second.stores[-1, 1] == right + 1
    assert len(texts.state.free_log_rows) == 16


def test_a_boundary_among_applied_drafts_is_stored() -> None:
    texts = Texts()
    slot = texts.ready(ids(6))
    texts.decode(slot, drafts={slot: [40, 41, 42, 43]}, right={slot: 4})  # behind 6, then 4 drafts
    batch = texts.decode(slot)
    assert batch.stores[:, 1].tolist() == [2, 5]
    text = texts.tokens[slot]
    texts.close(slot)
    assert texts.kv.lookup(text, None).num_tokens == 8


def test_a_branch_that_is_followed_is_applied() -> None:
    texts = Texts()
    slot = texts.ready(ids(6))
    assert texts.kv.reserve(slot, 3)
    texts.step(
        [slot],
        drafts={slot: [40, 41]},
        branches={slot: [50, 51]},
        right={slot: 2},
        followed=(slot,),
    )
    assert texts.tokens[slot].tolist() == [*range(6), 50, 51, 7]
    texts.decode(slot)
    assert len(texts.state.free_log_rows) == 16


def test_a_draft_in_the_making_leaves_the_state_alone() -> None:
    texts = Texts(num_blocks=12)
    slot = texts.ready(ids(6))
    texts.decode(slot, drafts={slot: [40, 41, 42]}, right={slot: 2})
    slots, offsets = np.array([slot], np.int32), np.array([0, 1], np.int32)
    value = 0
    for token in texts.tokens[slot][:-1]:
        value = hashed(value, token)
    kept = texts.content[[*texts.state.pages_of(slot)]].copy()
    assert texts.state.lend(slot)
    for token in (texts.tokens[slot][-1], 60, 61):
        batch = texts.state.draft(slots, first=token == 7)
        assert batch.pending.size == (2 if token == 7 else 0)
        ((stored,),) = texts.hashes.advance(
            batch, offsets, np.array([token], np.int32), [value], texts.kv.pool
        )
        texts.hashes.store(*stored)
        value = hashed(value, token)
    texts.kv.check()
    texts.state.give_back(slot)
    assert np.array_equal(texts.content[[*texts.state.pages_of(slot)]], kept)
    texts.decode(slot)
    other = texts.ready(ids(8, 100))
    assert not texts.state.lend(slot), "no pages are left"
    texts.close(other)


def test_forks_write_states_of_their_own() -> None:
    texts = Texts()
    slot = texts.open(ids(6))
    texts.compute(slot)
    child = texts.fork(slot)
    texts.tokens[slot].append(20)
    texts.tokens[child].append(30)
    assert texts.kv.capacity(slot) > 0
    texts.decode(slot, child)
    assert not {*texts.state.pages_of(slot)} & {*texts.state.pages_of(child)}


def test_no_more_snapshots_than_their_share() -> None:
    texts = Texts(num_blocks=60, snapshots=0.1)  # 6 blocks: two snapshots
    for first in range(0, 600, 100):
        texts.close(texts.ready(ids(9, first)))
    assert texts.state.snapshots.count(SnapshotKind.KEPT) == 2
    assert texts.kv.lookup(ids(9, 500), None).num_tokens == 8
    assert texts.kv.lookup(ids(9, 100), None).num_tokens == 0
    for texts in (Texts(snapshots=0.0), Texts(caching=False)):
        texts.close(texts.ready(ids(9)))
        assert texts.kv.lookup(ids(9), None).num_tokens == 0
        assert not any(texts.kv.pool.contents) or not texts.state.snapshots.most


def test_half_a_snapshot_is_none() -> None:
    texts = Texts(num_blocks=12)
    texts.close(texts.ready(ids(9)))
    assert texts.kv.lookup(ids(9), None).num_tokens == 8
    other = texts.ready(ids(18, 100))
    assert texts.kv.lookup(ids(9), None).num_tokens == 0
    texts.close(other)
    texts.kv.check()


def test_steps_that_compute_nothing_leave_the_same_snapshots() -> None:
    one, many = Texts(), Texts()
    slots = [texts.ready(ids(6)) for texts in (one, many)]
    for _ in range(20):
        one.decode(slots[0])
    text = array("i", [*many.tokens[slots[1]], *[7] * 20])
    kv = many.kv
    assert kv.reserve(slots[1], 1)
    kv.advance_steps(np.array(slots[1:], np.int32), [text], 20)
    kv.check()
    for texts in (one, many):
        assert texts.kv.lookup(text + ids(9), None).num_tokens == 24
    assert one.kv.pool.num_used == kv.pool.num_used
    assert one.kv.pool.contents.count(None) == kv.pool.contents.count(None)


class States(RuleBasedStateMachine):
    """Whatever happens, each state that is read is behind the tokens that it should be."""

    @initialize(
        pages=st.integers(1, 4),
        spare=st.sampled_from((0, 1, 5, 40)),
        snapshots=st.sampled_from((0.0, 0.2, 1.0)),
        caching=st.sampled_from((True, True, False)),
        log_rows=st.sampled_from((0, 3, 12)),
    )
    def start(self, pages: int, spare: int, snapshots: float, caching: bool, log_rows: int) -> None:
        peak = peak_blocks(layout((None,), SIZE, pages), 40)
        self.peak = peak
        self.texts = Texts(
            peak + spare, pages, caching=caching, snapshots=snapshots, log_rows=log_rows
        )
        self.running: list[int] = []  # the oldest first
        self.rng = Random(pages + spare)

    @precondition(lambda self: len(self.running) < 5)
    @rule(text=st.integers(0, 2), length=st.integers(2, 24), tail=st.integers(0, 3))
    def begin(self, text: int, length: int, tail: int) -> None:
        kv, tokens = self.texts.kv, ids(length, 100 * text) + ids(tail, 500)
        hit = kv.lookup(tokens, None)
        if peak_blocks(kv.layout, len(tokens)) - kv.blocks_in_use(hit) <= kv.pool.num_free:
            self.running.append(self.texts.open(tokens))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.running))
        self.running.remove(slot)
        self.texts.close(slot)

    @precondition(lambda self: self.running and len(self.running) < 5)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.running))
        if self.texts.missing(slot) == 0:
            self.running.append(self.texts.fork(slot))

    def make_room(self, slot: int, count: int) -> bool:
        """Preempt the youngest until it fits; False: the slot is that one."""
        while not self.texts.kv.reserve(slot, count):
            victim = self.running.pop()
            self.texts.close(victim)
            if victim == slot:
                return False
        return True

    @precondition(lambda self: self.running)
    @rule(
        size=st.integers(1, 9),
        guesses=st.lists(st.integers(0, 3), max_size=5),
        right=st.integers(0, 5),
        other=st.none() | st.lists(st.integers(0, 3), min_size=1, max_size=3),
        follow=st.booleans(),
    )
    def step(
        self, size: int, guesses: list[int], right: int, other: list[int] | None, follow: bool
    ) -> None:
        texts, kv = self.texts, self.texts.kv
        decodes: list[int] = []
        chunks: dict[int, int] = {}
        for slot in self.running[:]:
            if slot not in self.running:
                continue
            missing = texts.missing(slot)
            if missing == 0:  # a prompt's end: it draws a token
                texts.tokens[slot].append(self.rng.randrange(3))
            if len(texts.tokens[slot]) >= 40:
                self.running.remove(slot)
                texts.close(slot)
            elif self.make_room(slot, min(missing, size) if missing > 1 else 1):
                if missing > 1:
                    chunks[slot] = min(missing, size)
                else:
                    decodes.append(slot)
        assert not self.running or decodes or chunks, "the oldest does not progress"
        assert kv.pool.num_blocks >= self.peak
        drafts: dict[int, list[int]] = {}
        room = len(texts.state.free_log_rows)
        for slot in decodes:
            count = min(len(guesses), room, 39 - len(texts.tokens[slot]))
            if count > 0 and kv.reserve(slot, 1 + count):
                drafts[slot] = guesses[:count]
                room -= count
        branches = {}
        if other is not None and drafts and room >= len(other):
            slot = next(iter(drafts))
            if len(texts.tokens[slot]) + len(other) < 40:
                branches[slot] = other
        followed = (*branches,) if follow else ()
        texts.step(
            decodes,
            chunks,
            drafts,
            {slot: min(right, len(other or ()) if slot in followed else 5) for slot in drafts},
            branches,
            followed,
        )

    @invariant()
    def consistent(self) -> None:
        if hasattr(self, "texts"):
            self.texts.kv.check()

    def teardown(self) -> None:
        if hasattr(self, "texts"):
            for slot in self.running:
                self.texts.close(slot)
            self.texts.kv.check()
            assert self.texts.kv.pool.num_used == 0


TestStates = States.TestCase
TestStates.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
