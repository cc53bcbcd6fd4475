"""The paged cache of all sequences: block tables over one pool, shared prefixes, copy-on-write.

A sequence has a slot: its row in ``tables``. The cache knows nothing of requests; the scheduler
tells it which positions it is about to write (`reserve`), and afterwards that they are written
(`advance`). For the time of a step a slot may have branches, each a row of its own, in which it
goes on otherwise (`branch`); of these the slot takes one over or none.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

import numpy as np
import numpy.typing as npt

from octavo.kv_cache.finding import NO_HIT, Finder, Hit
from octavo.kv_cache.layout import KvLayout
from octavo.kv_cache.loading import Loading, ToLoad
from octavo.kv_cache.pool import BlockPool
from octavo.kv_cache.prefix import Hash, Node, PrefixIndex, chain_hash
from octavo.kv_cache.read_ahead import ReadAhead, ReadingAhead
from octavo.kv_cache.tiers import Tiers

Int32 = npt.NDArray[np.int32]


def peak_blocks(layout: KvLayout, num_tokens: int) -> int:
    """Most blocks a sequence of ``num_tokens`` positions ever holds, written one by one."""
    return sum(
        peak_of_window(group.window, num_tokens, layout.block_size) for group in layout.groups
    )


def peak_of_window(window: int | None, num_tokens: int, block_size: int) -> int:
    """The same of one group. A window of w tokens spans at most ceil((w - 1) / block_size) + 1
    blocks; None: all are kept.
    """
    total = -(-num_tokens // block_size)
    return total if window is None else min(total, -(-(window - 1) // block_size) + 1)


@dataclass(frozen=True, slots=True)
class _Branch:
    """The blocks before ``first`` are the slot's, those from there to ``end`` its own."""

    slot: int
    first: int
    end: int


class KvCache:
    """Block tables, pool and prefix index, kept consistent.

    ``tables`` [groups, slots + branches, blocks] int32 is updated in place; entry [g, slot, b] is
    the block of positions b * block_size … in group g, -1 where nothing is allocated or where a
    window has given the block back. ``num_tokens`` [slots] int32 counts the positions written.

    A block that several sequences refer to, or whose content is in the prefix index, is never
    written: `reserve` first copies it (``copies``, in order, before anything else in the step).
    """

    def __init__(
        self,
        layout: KvLayout,
        num_blocks: int,
        max_seqs: int,
        max_blocks_per_seq: int,
        *,
        max_branches: int = 0,
        enable_prefix_caching: bool = True,
        hasher: Hash = chain_hash,
    ) -> None:
        self.tiers: Tiers | None = None  # of the prefix cache, beyond the pool
        self.layout = layout
        self.block_size = layout.block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.tables: Int32 = np.full(
            (len(layout.groups), max_seqs + max_branches, max_blocks_per_seq), -1, dtype=np.int32
        )
        self.num_tokens: Int32 = np.zeros(max_seqs, dtype=np.int32)
        self.num_blocks: Int32 = np.zeros(max_seqs, dtype=np.int32)  # allocated, given back or not
        self._windows = tuple(group.window for group in layout.groups)
        self._sliding = [
            (group, window) for group, window in enumerate(self._windows) if window is not None
        ]
        self._num_blocks = num_blocks
        self._hasher = hasher
        self.clear()

    def clear(self) -> None:
        """All blocks and slots are free and nothing is cached, whatever was."""
        num_groups, num_rows, _ = self.tables.shape
        max_seqs = len(self.num_tokens)
        self.tables.fill(-1)
        self.num_tokens.fill(0)
        self.num_blocks.fill(0)
        self.pool = BlockPool(self._num_blocks)
        self.index = PrefixIndex(self._num_blocks, num_groups, self._hasher)
        self._finder = Finder(self.index, self.layout, self.tiers)
        self.copies: list[tuple[int, int]] = []
        self.shared_tails: set[int] = set()  # slots whose next write may fall into a shared block
        self._first = [[0] * max_seqs for _ in range(num_groups)]  # first block not given back
        self._tip: list[Node | None] = [None] * max_seqs  # node of the last registered block
        self._registered = [0] * max_seqs  # blocks registered or taken from the index
        self._slots = list(range(max_seqs - 1, -1, -1))
        self._rows = list(range(num_rows - 1, max_seqs - 1, -1))  # for branches
        self._branches: dict[int, _Branch] = {}  # by row
        self.loading = Loading(self.tiers)
        if self.tiers is not None:
            self.tiers.forget()

    def extend(self, tiers: Tiers) -> None:
        """Keep what the pool has no room for in other tiers. Raises `ValueError`."""
        if not self.enable_prefix_caching:
            raise ValueError("the prefix cache is off: it has no other tiers")
        self.tiers = self._finder.tiers = tiers
        self.loading = Loading(tiers)

    # Sizes

    @property
    def num_free_slots(self) -> int:
        return len(self._slots)

    def peak_blocks(self, num_tokens: int) -> int:
        """Most blocks a sequence of ``num_tokens`` positions holds, written one by one."""
        return peak_blocks(self.layout, num_tokens)

    @property
    def num_branches(self) -> int:
        return len(self._branches)

    def held_blocks(self, slot: int) -> int:
        end = int(self.num_blocks[slot])
        return sum(end - first[slot] for first in self._first) - self.loading.num_blocks(slot)

    def waste(self) -> float:
        """Allocated but unfilled slots ÷ allocated slots (0 when nothing is allocated)."""
        allocated = self.pool.num_used * self.block_size
        unfilled = int(self.num_blocks.sum()) * self.block_size - int(self.num_tokens.sum())
        return min(1.0, unfilled * len(self._windows) / allocated) if allocated else 0.0

    # Beginning and end of a sequence

    def lookup(self, tokens: array[int], salt: str | None) -> Hit:
        """The longest cached prefix that every group can use, with what is worth loading of it."""
        return self._finder.lookup(tokens, salt) if self.enable_prefix_caching else NO_HIT

    @property
    def reading(self) -> ReadingAhead | None:
        """Who reads from disk, where there is one."""
        return None if self.tiers is None else self.tiers.reading

    def read_ahead(self, tokens: array[int], salt: str | None, now: float) -> ReadAhead | None:
        """Begin to read from disk what is worth it of a prompt that will be looked up later, and
        is worth waiting for. None if nothing is.
        """
        return self._finder.read_ahead(tokens, salt, now)

    def blocks_in_use(self, hit: Hit) -> int:
        """How many of the hit's blocks others refer to, so that sharing them costs nothing."""
        refs = self.pool.refs
        return sum(
            node.blocks[group] >= 0 and refs[node.blocks[group]] > 0
            for group, first in enumerate(self._finder.first_needed(hit.num_tokens))
            for node in hit.nodes[first:]
        )

    def open(self, hit: Hit = NO_HIT, salt: str | None = None, *, at_once: bool = True) -> int:
        """Take a slot, and the hit's blocks with it: those in other tiers too if ``at_once``, else
        as they are asked for (`load`).
        """
        slot = self._slots.pop()
        count = hit.num_blocks
        nodes = self._nodes(hit, salt) if hit.beyond else hit.nodes
        if self.enable_prefix_caching:
            tip = nodes[-1] if count else self.index.add(None, (salt or "").encode())
            if tip is not None:  # nor may anything of it go when blocks are taken for the rest
                self.index.pin(tip)
            self._tip[slot] = tip
            self._registered[slot] = count
        self.num_blocks[slot] = count
        self.num_tokens[slot] = hit.num_tokens
        to_load: list[ToLoad] = []
        for group, first in enumerate(self._finder.first_needed(hit.num_tokens)):
            self._first[group][slot] = min(first, count)
            for position in range(first, count):
                block = nodes[position].blocks[group]
                if block < 0:
                    to_load.append(ToLoad(position, nodes[position], group))
                else:
                    self.pool.share(block)
                    self.tables[group, slot, position] = block
        if count * self.block_size > hit.num_tokens:
            self.shared_tails.add(slot)
        self.loading.begin(slot, to_load)
        if to_load and at_once:
            self.load(slot, len(to_load))
        if hit.left_alone and self.tiers is not None:
            self.tiers.worth.left_alone += 1
        return slot

    def _nodes(self, hit: Hit, salt: str | None) -> list[Node]:
        """Of a hit of which some blocks are in other tiers."""
        node = self.index.add(None, (salt or "").encode())
        nodes: list[Node] = []
        for content, digest in hit.beyond:
            node = None if node is None else self.index.add(node, content)
            if node is None:
                raise RuntimeError("a prefix that was found has no place in the index")
            node.digest = digest
            nodes.append(node)
        return nodes

    def load(self, slot: int, count: int) -> int:
        """Get ``count`` of the blocks of the slot's hit that it waits for (``loading``): until it
        has all of them, it cannot go on. So many blocks must be free. Returns how many of them the
        next step will begin by filling: not those that others have had filled meanwhile.
        """
        tiers, filling = self.tiers, 0
        assert tiers is not None
        for (position, node, group), key in self.loading.take(slot, count):
            block = node.blocks[group]
            if block >= 0:
                self.pool.share(block)
            else:
                block = self._allocate()
                tiers.load(key, block, self.copies)
                self.index.put(node, group, block)
                filling += 1
            self.tables[group, slot, position] = block
        return filling

    def seconds_to_load(self, slot: int) -> float:
        """What each of these is expected to take, with what is overwritten for it."""
        assert self.tiers is not None
        empty = self.pool.num_free - self.pool.num_cached
        overwriting = empty < self.loading.num_blocks(slot)
        return self.tiers.worth.seconds_to_load(overwriting=overwriting)

    def fork(self, slot: int) -> int:
        """A new slot with the same content; all blocks are shared."""
        child = self._slots.pop()
        count = int(self.num_blocks[slot])
        self.num_blocks[child] = count
        self.num_tokens[child] = self.num_tokens[slot]
        for group, first in enumerate(self._first):
            first[child] = first[slot]
            row = self.tables[group, slot, first[slot] : count]
            self.tables[group, child, first[slot] : count] = row
            for block in row.tolist():
                self.pool.share(block)
        self.shared_tails.update((slot, child))
        tip = self._tip[child] = self._tip[slot]
        self._registered[child] = self._registered[slot]
        if tip is not None:
            self.index.pin(tip)
        return child

    def close(self, slot: int) -> None:
        """Give the slot, its branches and blocks back; what is cached stays usable, its beginning
        longest.
        """
        for row in [row for row, branch in self._branches.items() if branch.slot == slot]:
            self._drop(row)
        self.loading.end(slot)
        count = int(self.num_blocks[slot])
        for group, first in enumerate(self._first):
            for block in self.tables[group, slot, first[slot] : count][::-1].tolist():
                if block >= 0:  # it may not have been loaded yet
                    self.pool.release(block, keep=self.index.holds(block))
            first[slot] = 0
        self.tables[:, slot, :count] = -1
        self.num_blocks[slot] = 0
        self.num_tokens[slot] = 0
        self._registered[slot] = 0
        self.shared_tails.discard(slot)
        tip = self._tip[slot]
        if tip is not None:
            self._tip[slot] = None
            self.index.unpin(tip)
        self._slots.append(slot)

    # A step

    def room(self, slot: int) -> int:
        """How many further positions could be reserved now (their blocks are free)."""
        size = self.block_size
        groups = len(self._windows)
        free = self.pool.num_free
        if slot in self.shared_tails:
            # A cached block of this sequence alone frees itself when it is copied.
            copied = sum(self.pool.refs[block] > 1 for block in self._tail(slot))
            if copied > free:
                return 0
            free -= copied
        free += self._outside_window(slot)
        slack = int(self.num_blocks[slot]) * size - int(self.num_tokens[slot])
        return slack + free // groups * size

    def reserve(self, slot: int, count: int) -> bool:
        """Make the next ``count`` positions writable: all of them, or nothing changes and False.

        Blocks that the first of them no longer sees through a window are given back.
        """
        if self.room(slot) < count:
            return False
        size = self.block_size
        start = int(self.num_tokens[slot])
        self._leave_behind(slot, start)
        if slot in self.shared_tails:
            self.shared_tails.discard(slot)
            for group, block in enumerate(self._tail(slot)):
                if self._must_copy(block):
                    # Released first: when it is the only free block it is handed back as it is.
                    self.pool.release(block, keep=True)
                    copy = self._allocate()
                    self.tables[group, slot, start // size] = copy
                    if copy != block:
                        self.copies.append((block, copy))
        held, end = int(self.num_blocks[slot]), -(-(start + count) // size)
        if end > held:
            groups = len(self._windows)
            blocks = [self._allocate() for _ in range((end - held) * groups)]
            self.tables[:, slot, held:end] = np.array(blocks).reshape(-1, groups).T
            self.num_blocks[slot] = end
        return True

    def take_copies(self) -> Int32:
        """The [C, 2] (source, destination) copies of this step."""
        if not self.copies:
            return NO_COPIES
        copies = np.array(self.copies, dtype=np.int32)
        self.copies.clear()
        return copies

    def advance(self, slot: int, count: int) -> None:
        """The next ``count`` positions have been written."""
        self.num_tokens[slot] += count

    def steps_of_room(self, slots: Int32, limit: int) -> int:
        """How often, ``limit`` at most, all of the slots [sequences] could go on by a position with
        the blocks that are free now.
        """
        starts, held = self.num_tokens[slots], self.num_blocks[slots]
        free = self.pool.num_free // len(self._windows)

        def more(steps: int) -> int:
            return int(np.maximum(-(-(starts + steps) // self.block_size) - held, 0).sum())

        if more(limit) <= free:
            return limit
        return bisect_right(range(limit), free, key=more) - 1

    def go_on(self, slots: Int32, tokens: Sequence[array[int]], steps: int) -> None:
        """All of the slots [sequences] by a position, and that ``steps`` times, at most
        `steps_of_room`: `reserve` for those at the beginning of a block, `advance`, `register` for
        those at the end of one. ``tokens`` are each slot's sequence's, those to come included.
        Nothing is done where nothing comes of it, but what is done is done in the order of single
        steps: it decides which blocks are handed out and which stay cached.
        """
        starts = self.num_tokens[slots]
        size = self.block_size
        edges = [
            (step, index)  # a block ends before the step, the next begins with it
            for index, first in enumerate((-starts % size).tolist())
            for step in range(first, steps + 1, size)
        ]
        edges.sort()
        for step, group in groupby(edges, key=itemgetter(0)):
            here = [(int(slots[index]), tokens[index], int(starts[index])) for _, index in group]
            if step:
                for slot, token_ids, start in here:
                    self.num_tokens[slot] = start + step
                    self.register(slot, token_ids)
            if step < steps:
                for slot, _, _ in here:
                    if not self.reserve(slot, 1):
                        raise RuntimeError(
                            f"slot {slot} has no block for position {self.num_tokens[slot]}, "
                            f"after {step} of {steps} steps that were taken to have room"
                        )
        self.num_tokens[slots] = starts + steps

    def settle(self, slot: int) -> None:
        """Give back what was reserved and does not count as written (rejected drafts), and what the
        next position no longer sees: the slot then holds no more than one written one by one.
        """
        start = int(self.num_tokens[slot])
        held = -(-start // self.block_size)
        for position in range(int(self.num_blocks[slot]) - 1, held - 1, -1):
            for group in range(len(self._windows)):
                block = int(self.tables[group, slot, position])
                self.tables[group, slot, position] = -1
                self.pool.release(block, keep=self.index.holds(block))
        self.num_blocks[slot] = held
        self._leave_behind(slot, start)

    # Branches, for the time of a step

    def branch(self, slot: int, count: int) -> int | None:
        """A row of ``tables`` in which the slot goes on otherwise, its next ``count`` positions
        writable; None where rows or blocks do not suffice. The slot, whose next position is
        reserved, stays as it is: what it has written so far both read, and of the block that it is
        about to write the branch gets a copy.
        """
        size = self.block_size
        start = int(self.num_tokens[slot])
        first, end = start // size, -(-(start + count) // size)
        groups = len(self._windows)
        if not self._rows or (end - first) * groups > self.pool.num_free:
            return None
        row = self._rows.pop()
        self.tables[:, row, :first] = self.tables[:, slot, :first]
        for position in range(first, end):
            for group in range(groups):
                self.tables[group, row, position] = self._allocate()
        if start % size:
            sources, copies = self.tables[:, slot, first], self.tables[:, row, first]
            self.copies += zip(sources.tolist(), copies.tolist(), strict=True)
        self._branches[row] = _Branch(slot, first, end)
        return row

    def adopt(self, row: int) -> None:
        """The branch's slot goes on as in the branch, which is no more."""
        branch = self._branches.pop(row)
        slot, first, end = branch.slot, branch.first, branch.end
        for group in range(len(self._windows)):
            for block in self.tables[group, slot, first : int(self.num_blocks[slot])].tolist():
                self.pool.release(block, keep=self.index.holds(block))
        self.tables[:, slot, first:] = self.tables[:, row, first:]
        self.num_blocks[slot] = end
        self._free_row(row, end)

    def prune(self) -> None:
        """Give all branches back."""
        for row in [*self._branches]:
            self._drop(row)

    def _drop(self, row: int) -> None:
        branch = self._branches.pop(row)
        for block in self.tables[:, row, branch.first : branch.end].ravel().tolist():
            self.pool.release(block, keep=False)
        self._free_row(row, branch.end)

    def _free_row(self, row: int, end: int) -> None:
        self.tables[:, row, :end] = -1
        self._rows.append(row)

    def register(self, slot: int, tokens: array[int]) -> None:
        """Enter the slot's newly filled blocks into the prefix index. ``tokens`` are the
        sequence's, at least those written.
        """
        tip = self._tip[slot]
        if tip is None:
            return
        size, index = self.block_size, self.index
        first, full = self._registered[slot], int(self.num_tokens[slot]) // size
        content = tokens[first * size : full * size].tobytes()
        stride = size * tokens.itemsize
        writing = None if self.tiers is None else self.tiers.writing
        last = tip
        for at, blocks in enumerate(self.tables[:, slot, first:full].T.tolist()):
            node = index.add(last, content[at * stride : (at + 1) * stride])
            if node is None:
                self._tip[slot] = None
                break
            for group, block in enumerate(blocks):
                if block >= 0:
                    index.put(node, group, block)
                    if writing is not None:
                        writing.filled(node, group, block)
            last = node
        else:
            self._tip[slot] = last
        # Nodes between are kept by their children.
        index.pin(last)
        index.unpin(tip)
        if self._tip[slot] is None:
            index.unpin(last)
        self._registered[slot] = full

    # Inside

    def _leave_behind(self, slot: int, start: int) -> None:
        """Give back the blocks that a query at ``start`` no longer sees through its window."""
        for group, window in self._sliding:
            first = self._first[group]
            while first[slot] < self._keep_from(slot, start, window):
                block = int(self.tables[group, slot, first[slot]])
                self.tables[group, slot, first[slot]] = -1
                self.pool.release(block, keep=self.index.holds(block))
                first[slot] += 1

    def _keep_from(self, slot: int, start: int, window: int) -> int:
        """First block to keep: the window's first, and never past what is allocated."""
        needed = max(0, start - window + 1) // self.block_size
        return min(needed, int(self.num_blocks[slot]))

    def _outside_window(self, slot: int) -> int:
        """Blocks that `reserve` would free: nobody else refers to them."""
        start = int(self.num_tokens[slot])
        refs = self.pool.refs
        free = 0
        for group, window in self._sliding:
            first = self._first[group][slot]
            row = self.tables[group, slot, first : self._keep_from(slot, start, window)]
            free += sum(refs[block] == 1 for block in row.tolist())
        return free

    def _tail(self, slot: int) -> list[int]:
        """The block of the next position in each group, if it is allocated already."""
        position = int(self.num_tokens[slot]) // self.block_size
        if position >= self.num_blocks[slot]:
            return []
        blocks: list[int] = self.tables[:, slot, position].tolist()
        return blocks

    def _must_copy(self, block: int) -> bool:
        return self.pool.refs[block] > 1 or self.index.holds(block)

    def _allocate(self) -> int:
        block = self.pool.allocate()
        if self.tiers is not None:
            self.tiers.spill(block, self.index)
        self.index.forget(block)
        return block

    def check(self) -> None:
        """Pool, tables and index agree; `RuntimeError` otherwise. For tests and idle moments."""
        self.pool.check()
        self.index.check()
        for slot, (position, node, group) in self.loading:
            if slot in self._slots or self.tables[group, slot, position] >= 0:
                raise RuntimeError(f"slot {slot}: what is there is still to be loaded")
            if node.refs == node.num_held:
                raise RuntimeError(f"slot {slot}: a block is to be loaded for nobody")
        held = [self.tables[:, : len(self.num_tokens)].ravel()]
        for row, branch in self._branches.items():
            held.append(self.tables[:, row, branch.first : branch.end].ravel())
            beginning = self.tables[:, (row, branch.slot), : branch.first]
            if (beginning[:, 0] != beginning[:, 1]).any():
                raise RuntimeError("a branch has another beginning than its slot")
        named = np.concatenate(held)
        blocks, counts = np.unique(named[named >= 0], return_counts=True)
        refs = np.zeros(self.pool.num_blocks, dtype=np.int64)
        refs[blocks] = counts
        wrong = np.flatnonzero(refs != np.array(self.pool.refs))
        if len(wrong):
            block = int(wrong[0])
            raise RuntimeError(
                f"block {block}: {self.pool.refs[block]} references counted, "
                f"{refs[block]} in the tables"
            )
        idle = self._slots
        if self.num_blocks[idle].any() or self.num_tokens[idle].any():
            raise RuntimeError("a closed slot still holds blocks")
        if (self.num_tokens > self.num_blocks * self.block_size).any():
            raise RuntimeError("a sequence has more tokens than slots")


NO_COPIES: Int32 = np.empty((0, 2), dtype=np.int32)
