"""Block tables over the pool: hits, copy-on-write, windows, waste, sizes."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.checking import layout
from engine.connecting import eager_connectors
from octavo.kv_cache.cache import KvCache, peak_blocks
from octavo.kv_cache.prefix_lookup import NO_HIT


def cache(
    windows: tuple[int | None, ...] = (None,), num_blocks: int = 64, block_size: int = 4
) -> KvCache:
    return KvCache(layout(windows, block_size), num_blocks, max_seqs=8, max_blocks_per_seq=32)


def ids(count: int, first: int = 0) -> array[int]:
    return array("i", range(first, first + count))


def write(kv: KvCache, slot: int, tokens: array[int], count: int | None = None) -> None:
    """Put the sequence's tokens (or the next ``count``) through, as a step would."""
    missing = len(tokens) - int(kv.num_tokens[slot]) if count is None else count
    assert kv.reserve(slot, missing)
    kv.take_copies()
    kv.advance(slot, missing)
    kv.register(slot, tokens)
    kv.check()


class Nothing:
    """Blocks without content."""

    def export_blocks(self, blocks: Any, into: Any = None) -> Any:
        return into if into is not None else np.zeros((len(blocks), 1 << 20), np.uint8)

    def import_blocks(self, blocks: Any, data: Any) -> None:
        pass


def test_a_hit_in_host_memory_outlives_the_sequence_that_kept_its_node() -> None:
    kv = cache(num_blocks=3)
    connectors = eager_connectors(kv.layout, 8, disk=False)
    connectors.register_kv_caches(Nothing())
    kv.attach(connectors)
    twins = kv.open(), kv.open()
    for slot in twins:
        write(kv, slot, ids(5), 4)
    kv.close(twins[0])
    other = kv.open()
    write(kv, other, ids(8, first=100))  # overwrites the block that is known for the prefix
    connectors.transfer()
    kv.close(other)
    hit = kv.lookup(ids(5), None)
    assert (hit.num_tokens, len(hit.nodes), len(hit.missing)) == (4, 1, 1)
    kv.close(twins[1])
    kv.close(kv.open(hit))
    kv.check()


def test_a_closed_sequence_stays_usable_until_its_blocks_are_needed() -> None:
    kv = cache(num_blocks=6)
    slot = kv.open()
    write(kv, slot, ids(18))
    kv.close(slot)
    assert kv.pool.num_free == 6
    assert kv.lookup(ids(18), None).num_tokens == 16
    other = kv.open()
    write(kv, other, ids(12, first=100))  # takes the two unused blocks and the prefix's end
    assert kv.lookup(ids(18), None).num_tokens == 12
    kv.close(other)
    kv.check()


def test_a_fully_cached_prompt_leaves_only_its_last_token() -> None:
    kv = cache()
    slot = kv.open()
    write(kv, slot, ids(16))
    hit = kv.lookup(ids(16), None)
    assert hit.num_tokens == 15
    second = kv.open(hit)
    assert kv.capacity(second) >= 1
    assert kv.reserve(second, 1)
    copies = kv.take_copies()
    assert copies.tolist() == [[int(kv.tables[0, slot, 3]), int(kv.tables[0, second, 3])]]
    assert kv.tables[0, slot, :3].tolist() == kv.tables[0, second, :3].tolist()
    kv.check()


def test_a_fully_cached_prompt_fits_a_pool_without_a_spare_block() -> None:
    kv = cache(num_blocks=4)
    slot = kv.open()
    write(kv, slot, ids(16))
    kv.close(slot)
    slot = kv.open(kv.lookup(ids(16), None))
    assert kv.pool.num_free == 0
    assert kv.reserve(slot, 1)
    assert len(kv.take_copies()) == 0, "the block is its own again"
    assert kv.lookup(ids(16), None).num_tokens == 12
    kv.check()


def test_salts_isolate() -> None:
    kv = cache()
    slot = kv.open(salt="mine")
    write(kv, slot, ids(16))
    assert kv.lookup(ids(17), "mine").num_tokens == 16
    assert kv.lookup(ids(17), "yours").num_tokens == 0
    assert kv.lookup(ids(17), None).num_tokens == 0


def test_forks_share_until_they_write() -> None:
    kv = cache()
    slot = kv.open()
    write(kv, slot, ids(10))
    forks = [kv.fork(slot) for _ in range(3)]
    assert kv.pool.num_used == 3
    kv.check()
    for index, fork in enumerate(forks):
        write(kv, fork, ids(10) + array("i", [50 + index]))
    assert kv.pool.num_used == 6
    write(kv, slot, ids(11))  # the last owner writes in place
    assert kv.pool.num_used == 6
    for each in (slot, *forks):
        kv.close(each)
    kv.check()
    assert kv.pool.num_free == 64


def test_a_window_gives_blocks_back_and_a_hit_needs_only_what_it_still_sees() -> None:
    kv = cache((None, 6))
    slot = kv.open()
    for length in range(1, 41):
        write(kv, slot, ids(length))
    assert kv.tables[1, slot, :8].tolist() == [-1] * 8
    assert (kv.tables[0, slot, :10] >= 0).all()
    assert kv.held_blocks(slot) == 10 + 2
    kv.close(slot)
    # Overwrite what the window has given back: those blocks were released first.
    hit = kv.lookup(ids(41), None)
    assert hit.num_tokens == 40
    for node in hit.nodes[:8]:
        kv.index.forget(node.blocks[1])
    assert kv.lookup(ids(41), None).num_tokens == 40
    assert kv.lookup(ids(21), None).num_tokens == 0, "its window is gone"
    second = kv.open(kv.lookup(ids(41), None))
    assert kv.tables[1, second, :8].tolist() == [-1] * 8
    write(kv, second, ids(41))
    kv.close(second)
    kv.check()


def test_the_longest_prefix_that_all_groups_can_use() -> None:
    kv = cache((None, 6))
    slot = kv.open()
    write(kv, slot, ids(40))
    kv.close(slot)
    nodes = kv.lookup(ids(41), None).nodes
    kv.index.forget(nodes[7].blocks[1])  # the window of position 40 needs blocks 8 and 9
    assert kv.lookup(ids(41), None).num_tokens == 40
    kv.index.forget(nodes[8].blocks[1])
    assert kv.lookup(ids(41), None).num_tokens == 28
    kv.index.forget(nodes[3].blocks[0])
    assert kv.lookup(ids(41), None).num_tokens == 12


def test_without_prefix_caching_nothing_is_found_or_kept() -> None:
    kv = KvCache(layout(), 8, 2, 8, enable_prefix_caching=False)
    slot = kv.open()
    write(kv, slot, ids(32))
    assert kv.lookup(ids(33), None) == NO_HIT
    assert len(kv.index) == 0


def test_a_reservation_that_does_not_fit_changes_nothing() -> None:
    kv = cache(num_blocks=3)
    slot = kv.open()
    write(kv, slot, ids(5))
    before = kv.tables.copy()
    assert kv.capacity(slot) == 7
    assert not kv.reserve(slot, 8)
    assert (kv.tables == before).all()
    kv.check()
    assert kv.reserve(slot, 7)


@given(
    window=st.none() | st.integers(1, 40),
    block_size=st.integers(1, 17),
    length=st.integers(1, 90),
)
def test_peak_blocks_is_what_a_sequence_holds_at_most(
    window: int | None, block_size: int, length: int
) -> None:
    kv = KvCache(layout((window,), block_size), 100, 1, 100, enable_prefix_caching=False)
    slot = kv.open()
    peak = 0
    for position in range(length):
        if position % block_size == 0:
            assert kv.reserve(slot, 1)
        kv.advance(slot, 1)
        peak = max(peak, kv.held_blocks(slot))
    assert peak == peak_blocks(kv.layout, length)


def test_waste_is_the_share_of_allocated_slots_that_hold_nothing() -> None:
    kv = cache((None, None))
    assert kv.waste() == 0.0
    slot = kv.open()
    write(kv, slot, ids(9))
    assert kv.waste() == pytest.approx(3 / 12)
    write(kv, slot, ids(12))
    assert kv.waste() == 0.0


def test_check_finds_a_reference_too_many() -> None:
    kv = cache()
    slot = kv.open()
    write(kv, slot, ids(5))
    kv.pool.share(int(kv.tables[0, slot, 0]))
    with pytest.raises(RuntimeError, match="2 references counted, 1 in the tables"):
        kv.check()


def test_a_fully_cached_prompt_needs_the_window_of_its_last_token() -> None:
    kv = cache((None, 5))
    slot = kv.open()
    write(kv, slot, ids(40))
    kv.close(slot)
    nodes = kv.lookup(ids(40), None).nodes
    assert len(nodes) == 10
    kv.index.forget(nodes[8].blocks[1])  # position 39 sees 35 to 39, of blocks 8 and 9
    assert kv.lookup(ids(41), None).num_tokens == 40, "position 40 sees 36 to 40"
    assert kv.lookup(ids(40), None).num_tokens == 32


# Branches


def branched(windows: tuple[int | None, ...] = (None,), num_blocks: int = 64) -> KvCache:
    return KvCache(layout(windows, 4), num_blocks, 8, 32, max_branches=3)


def test_a_branch_copies_the_block_about_to_be_written_and_only_it() -> None:
    kv = branched((None, 6))
    slot = kv.open()
    write(kv, slot, ids(10))
    assert kv.reserve(slot, 3)
    before = kv.tables[:, slot].copy()
    used = kv.pool.num_used
    row = kv.branch(slot, 4)  # positions 10 to 13
    assert row is not None
    assert row >= 8
    copies = kv.take_copies().tolist()
    assert copies == [[int(kv.tables[g, slot, 2]), int(kv.tables[g, row, 2])] for g in range(2)]
    assert (kv.tables[:, slot] == before).all()
    assert (kv.tables[:, row, :2] == before[:, :2]).all()
    assert not np.isin(kv.tables[:, row, 2:4], before).any()
    assert (kv.tables[:, row, 4:] == -1).all()
    assert kv.pool.num_used == used + 4
    kv.check()
    kv.prune()
    assert kv.pool.num_used == used
    assert (kv.tables[:, row] == -1).all()
    kv.check()


def test_at_the_edge_of_a_block_a_branch_copies_nothing() -> None:
    kv = branched()
    slot = kv.open()
    write(kv, slot, ids(8))
    assert kv.reserve(slot, 1)
    assert kv.branch(slot, 1) is not None
    assert not len(kv.take_copies())
    kv.check()


def test_a_slot_goes_on_as_the_branch_it_adopts() -> None:
    kv = branched()
    slot = kv.open()
    write(kv, slot, ids(6))
    assert kv.reserve(slot, 9)
    one, other = kv.branch(slot, 6), kv.branch(slot, 5)
    assert one is not None
    assert other is not None
    taken = kv.tables[0, other, 1:3].tolist()
    kv.adopt(other)
    assert kv.tables[0, slot, 1:4].tolist() == [*taken, -1]
    kv.prune()
    kv.advance(slot, 5)
    kv.trim(slot)
    tokens = ids(6) + ids(5, first=50)
    kv.register(slot, tokens)
    kv.check()
    assert kv.num_branches == 0
    assert kv.pool.num_used == 3
    assert kv.lookup(tokens + ids(1), None).num_tokens == 8  # what was kept is shared …
    assert kv.lookup(ids(20), None).num_tokens == 4  # … and what was not is not


def test_without_blocks_or_rows_there_is_no_branch_and_nothing_changes() -> None:
    kv = branched(num_blocks=4)
    slot = kv.open()
    write(kv, slot, ids(6))
    assert kv.reserve(slot, 1)
    assert kv.branch(slot, 8) is None
    assert kv.pool.num_free == 2
    assert not len(kv.take_copies())
    assert kv.branch(slot, 1) is not None
    assert kv.branch(slot, 1) is not None
    assert kv.branch(slot, 1) is None
    kv.prune()
    kv = branched()
    slot = kv.open()
    write(kv, slot, ids(6))
    assert kv.reserve(slot, 1)
    assert [kv.branch(slot, 1) is None for _ in range(4)] == [False, False, False, True]
    kv.check()


def test_closing_a_slot_closes_its_branches_and_no_others() -> None:
    kv = branched()
    one, other = kv.open(), kv.open()
    for slot in one, other:
        write(kv, slot, ids(6, first=100 * slot))
        assert kv.reserve(slot, 1)
        assert kv.branch(slot, 3) is not None
    kv.close(one)
    assert kv.num_branches == 1
    kv.check()
    kv.close(other)
    assert kv.num_branches == 0
    assert kv.pool.num_used == 0
    assert kv.num_free_slots == 8
    kv.check()


def test_going_on_without_room_is_an_error_and_no_hole_in_the_tables() -> None:
    kv = cache(num_blocks=16)
    slots = np.array([kv.open(NO_HIT), kv.open(NO_HIT)], np.int32)
    tokens = [ids(100), ids(100, 1000)]
    for slot, token_ids in zip(slots.tolist(), tokens, strict=True):
        write(kv, slot, token_ids[:16])
    assert kv.max_steps(slots, 84) == 16
    with pytest.raises(RuntimeError, match="no block for position 32, after 16 of 17"):
        kv.advance_steps(slots, tokens, 17)
    kv.check()


@given(st.data())
def test_whatever_is_branched_and_adopted_the_content_is_right(data: st.DataObject) -> None:
    """Each block holds a list of tokens; what a slot's table shows is what was written to it."""
    windows = data.draw(st.sampled_from([(None,), (None, None), (5,), (None, 3)]))
    kv = branched(windows, num_blocks=24)
    content = np.full((24, 4), -1)
    texts: dict[int, list[int]] = {kv.open(): [] for _ in range(2)}
    fresh = iter(range(10_000))

    def put(row: int, start: int, tokens: list[int]) -> None:
        for at, token in enumerate(tokens, start):
            for block in kv.tables[:, row, at // 4].tolist():
                assert kv.pool.refs[block] == 1
                assert kv.pool.contents[block] is None
                content[block, at % 4] = token

    for _ in range(data.draw(st.integers(1, 12))):
        paths: dict[int, list[tuple[int, list[int]]]] = {}
        for slot, text in texts.items():
            count = data.draw(st.integers(1, 6))
            if len(text) + count > 100 or not kv.reserve(slot, count):
                continue
            paths[slot] = [(slot, [next(fresh) for _ in range(count)])]
        for slot in paths:
            for _ in range(data.draw(st.integers(0, 2))):
                size = data.draw(st.integers(1, 7))
                if (row := kv.branch(slot, size)) is not None:
                    paths[slot].append((row, [next(fresh) for _ in range(size)]))
        for source, destination in kv.take_copies().tolist():
            content[destination] = content[source]
        kv.check()
        for slot, rows in paths.items():
            for row, tokens in rows:
                put(row, len(texts[slot]), tokens)
        for slot, rows in paths.items():
            row, tokens = data.draw(st.sampled_from(rows))
            if row != slot:
                kv.adopt(row)
            kept = data.draw(st.integers(1, len(tokens)))
            texts[slot] += tokens[:kept]
            kv.advance(slot, kept)
        kv.prune()
        for slot in paths:
            kv.register(slot, array("i", texts[slot]))
            kv.trim(slot)
        kv.check()
        for slot, text in texts.items():
            for group, window in enumerate(windows):
                first = 0 if window is None else max(0, len(text) - window + 1)
                shown = [
                    int(content[kv.tables[group, slot, at // 4], at % 4])
                    for at in range(first, len(text))
                ]
                assert shown == text[first:]
    for slot in texts:
        kv.close(slot)
    assert kv.pool.num_used == 0
