"""The paged cache of all sequences: block tables over one pool, shared prefixes, copy-on-write.

A sequence has a slot: its row in ``tables``. The cache knows nothing of requests; the scheduler
tells it which positions it is about to write (`reserve`), and afterwards that they are written
(`advance`). During a step a slot may have branches, each with a row of its own, in which it has
other next tokens (`branch`); after the step, at most one branch replaces the slot's own blocks.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import itemgetter

import numpy as np
import numpy.typing as npt

from octavo.kv_cache.block_hash import Key, digest_of
from octavo.kv_cache.block_pool import BlockPool
from octavo.kv_cache.connectors.manager import ConnectorManager
from octavo.kv_cache.connectors.prefetch import Prefetch, Prefetcher
from octavo.kv_cache.events import DEVICE, EventQueue, Subscriber
from octavo.kv_cache.layout import KvLayout, peak_of_window
from octavo.kv_cache.prefix_index import Hash, Node, PrefixIndex, chain_hash
from octavo.kv_cache.prefix_lookup import NO_HIT, Hit, PrefixLookup
from octavo.kv_cache.snapshots import SnapshotKind, Snapshots
from octavo.kv_cache.state_cache import StateCache

Int32 = npt.NDArray[np.int32]


def peak_blocks(layout: KvLayout, num_tokens: int) -> int:
    """Return the most blocks that a sequence of ``num_tokens`` positions ever holds if they are
    written one by one, those of its state included.
    """
    return layout.state_blocks + sum(
        peak_of_window(group.window, num_tokens, layout.block_size) for group in layout.groups
    )


class KvCache:
    """Block tables, pool and prefix index, kept consistent.

    ``tables`` [groups, slots + branches, blocks] int32 is updated in place; entry [g, slot, b] is
    the block of positions b * block_size … in group g, -1 where nothing is allocated or where a
    window has given the block back. ``num_tokens`` [slots] int32 counts the positions written.

    A block that several sequences refer to, or whose content is in the prefix index, is never
    written: `reserve` first has it copied (``copies``, in order, before all else in the step).
    ``state`` has the states of recurrent layers, if there are any.
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
        state_snapshots: float = 0.5,
        state_log_rows: int = 0,
        hasher: Hash = chain_hash,
    ) -> None:
        """``state_snapshots``: the share of the blocks that snapshots may take. ``state_log_rows``:
        of drafts, in the executor's log.
        """
        self.connectors: ConnectorManager | None = None  # the prefix cache beyond the pool
        self.events = EventQueue()
        self._engine = b""  # what names blocks (`block_hash.root`): of connectors, if there are any
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
        self._max_branches = max_branches
        self._state_snapshots = state_snapshots if enable_prefix_caching else 0.0
        self._state_log_rows = state_log_rows
        self.num_restored_states = 0  # of sequences that have begun with a snapshot
        self._num_blocks = num_blocks
        self._hasher = hasher
        self.clear()

    def clear(self) -> None:
        """Free all blocks and slots and empty the prefix index, whatever their state."""
        num_groups, num_rows, _ = self.tables.shape
        max_seqs = len(self.num_tokens)
        self.tables.fill(-1)
        self.num_tokens.fill(0)
        self.num_blocks.fill(0)
        self.pool = BlockPool[tuple[Node, int]](self._num_blocks)
        num_pages = self.layout.state_blocks
        self.index = PrefixIndex(self.pool, num_groups, self._hasher, num_pages=num_pages)
        self.state = None if self.layout.state is None else self._new_state(num_pages)
        self.index.on_change = self._publish if self.events.subscribers else None
        self._prefixes = PrefixLookup(self.index, self.layout, self.connectors)
        self.copies: list[tuple[int, int]] = []
        self.shared_tails: set[int] = set()  # slots whose next write may fall into a shared block
        self._first = [[0] * max_seqs for _ in range(num_groups)]  # first block not given back
        self._tip: list[Node | None] = [None] * max_seqs  # node of the last registered block
        self._registered = [0] * max_seqs  # blocks registered or taken from the index
        self._slots = list(range(max_seqs - 1, -1, -1))
        self._rows = list(range(num_rows - 1, max_seqs - 1, -1))  # for branches
        # For each branch, by row: its slot, its first own block (those before are the slot's), and
        # the end of its blocks.
        self._branches: dict[int, tuple[int, int, int]] = {}
        # For each slot that waits for blocks of its hit: position, node and group of each block, in
        # order. Host memory keeps them pinned, once for each slot.
        self._to_load: dict[int, deque[tuple[int, Node, int]]] = {}
        if self.connectors is not None:
            self.connectors.forget()
        self.events.cleared(DEVICE)

    def _new_state(self, num_pages: int) -> StateCache:
        most = int(self._state_snapshots * self._num_blocks / num_pages)
        size = self.block_size
        return StateCache(
            num_pages,
            self.pool,
            Snapshots(self.pool, self.index, most, self.connectors, size),
            self._allocate,
            self.num_tokens,
            block_size=size,
            max_branches=self._max_branches,
            log_rows=self._state_log_rows,
        )

    def attach(self, connectors: ConnectorManager) -> None:
        """Keep blocks for which the pool has no space in ``connectors``. Raise `ValueError`."""
        if not self.enable_prefix_caching:
            raise ValueError("the prefix cache is off, so it cannot have connectors")
        self.connectors = self._prefixes.connectors = connectors
        self._engine = connectors.engine
        if self.state is not None:
            self.state.snapshots.connectors = connectors
        for connector in connectors.all:
            connector.events = self.events

    def subscribe(self, subscriber: Subscriber) -> None:
        """Deliver events of all later changes, of the pool and of connectors, to ``subscriber``."""
        self.events.subscribe(subscriber)
        self.index.on_change = self._publish

    def _publish(self, node: Node, group: int, stored: bool) -> None:
        """Put the event that a block of the pool begins or ceases to hold a node's content."""
        if not self.events.subscribers:  # all have failed
            self.index.on_change = None
            return
        key, parent = self._key(node, group), node.parent
        if not stored:
            self.events.removed(key, DEVICE)
            return
        above = None
        if parent is not None and parent.parent is not None:
            above = digest_of(parent, self._engine)
        tokens = tuple(array("i", node.tokens))
        self.events.stored(key, DEVICE, above, tokens, self.block_size)

    def _key(self, node: Node, group: int) -> Key:
        return digest_of(node, self._engine), group

    # Sizes

    @property
    def num_free_slots(self) -> int:
        return len(self._slots)

    def peak_blocks(self, num_tokens: int) -> int:
        return peak_blocks(self.layout, num_tokens)

    @property
    def num_branches(self) -> int:
        return len(self._branches)

    def held_blocks(self, slot: int) -> int:
        """Return the blocks that a slot refers to. While it changes from one state to another, only
        one of the two counts.
        """
        end = int(self.num_blocks[slot])
        held = sum(end - first[slot] for first in self._first) - self.num_to_load(slot)
        return held + (0 if self.state is None else self.state.held_blocks(slot))

    def count_snapshots(self) -> dict[str, int]:
        """Return how many snapshots of recurrent layers' states the pool has, by kind."""
        state = self.state
        return {kind.value: state.snapshots.count(kind) if state else 0 for kind in SnapshotKind}

    def waste(self) -> float:
        """Return allocated but unfilled positions ÷ allocated ones (0 if none is allocated)."""
        states = 0 if self.state is None else self.state.num_blocks
        allocated = (self.pool.num_used - states) * self.block_size
        unfilled = int(self.num_blocks.sum()) * self.block_size - int(self.num_tokens.sum())
        return min(1.0, unfilled * len(self._windows) / allocated) if allocated else 0.0

    # Beginning and end of a sequence

    def lookup(self, tokens: array[int], salt: str | None) -> Hit:
        """Return the longest cached prefix that every group can use (`PrefixLookup.lookup`)."""
        return self._prefixes.lookup(tokens, salt) if self.enable_prefix_caching else NO_HIT

    @property
    def prefetcher(self) -> Prefetcher | None:
        return None if self.connectors is None else self.connectors.prefetcher

    def prefetch(self, tokens: array[int], salt: str | None, now: float) -> Prefetch | None:
        """Start to load what a prompt will need when it is looked up (`PrefixLookup.prefetch`)."""
        return self._prefixes.prefetch(tokens, salt, now)

    def blocks_in_use(self, hit: Hit) -> int:
        """Return how many of the hit's blocks others refer to, so that sharing them is free. Who
        shares a state has to write another: that is no saving, and it costs those who have it the
        same.
        """
        refs = self.pool.refs
        shared = sum(
            node.blocks[group] >= 0 and refs[node.blocks[group]] > 0
            for group, first in enumerate(self._prefixes.first_needed(hit.num_tokens))
            for node in hit.nodes[first:]
        )
        if self.state is not None and 0 < hit.num_blocks == len(hit.nodes):
            shared -= self.state.needed_by_others(hit.nodes[-1])
        return shared

    def open(self, hit: Hit = NO_HIT, salt: str | None = None, *, at_once: bool = True) -> int:
        """Take a slot with the hit's blocks. Load those that the pool does not hold if ``at_once``,
        or else when `load` is called. Return the slot.
        """
        slot = self._slots.pop()
        count = hit.num_blocks
        nodes = [] if hit.beyond else [*hit.nodes]
        if self.enable_prefix_caching:
            tip = nodes[-1] if nodes else self.index.add(None, (salt or "").encode())
            for content, digest in hit.beyond:
                tip = None if tip is None else self.index.add(tip, content)
                if tip is None:
                    raise RuntimeError("a prefix that was found cannot be entered into the index")
                tip.digest = digest
                nodes.append(tip)
            if tip is not None:  # allocating blocks for the rest must not remove it
                self.index.pin(tip)
            self._tip[slot] = tip
            self._registered[slot] = count
        self.num_blocks[slot] = count
        self.num_tokens[slot] = hit.num_tokens
        to_load: deque[tuple[int, Node, int]] = deque()
        for group, first in enumerate(self._prefixes.first_needed(hit.num_tokens)):
            self._first[group][slot] = min(first, count)
            for position in range(first, count):
                block = nodes[position].blocks[group]
                if block < 0:
                    to_load.append((position, nodes[position], group))
                else:
                    self.pool.share(block)
                    self.tables[group, slot, position] = block
        if self.state is not None:
            self.state.open(slot, nodes[-1] if count else None, hit.wanted)
            if count:
                self.num_restored_states += 1
                first_page = len(self._windows)
                to_load.extend(
                    (count - 1, nodes[-1], first_page + page)
                    for page, block in enumerate(self.state.pages_of(slot))
                    if block < 0
                )
        if count * self.block_size > hit.num_tokens:
            self.shared_tails.add(slot)
        if self.connectors is not None:
            for _, node, group in to_load:
                self.connectors.staging.pin(self._key(node, group))
            if to_load:
                self._to_load[slot] = to_load
                if at_once:
                    self.load(slot, len(to_load))
            self.connectors.staging.counters.skipped_hits += hit.skipped
        return slot

    def num_to_load(self, slot: int) -> int:
        """Return how many blocks of its hit the slot waits for. It cannot continue before it has
        all of them.
        """
        return len(self._to_load.get(slot, ()))

    def load(self, slot: int, count: int) -> int:
        """Load ``count`` of the blocks that the slot waits for. As many blocks must be free. Return
        how many the next step will fill first: not those that were filled for other slots.
        """
        connectors, to_load, filling = self.connectors, self._to_load[slot], 0
        assert connectors is not None
        for _ in range(count):
            position, node, group = to_load.popleft()
            key, block = self._key(node, group), node.block(group)
            page = group - len(self._windows)
            # Whoever refers to a page of a state may have reckoned with being the only one.
            if block >= 0 and (page < 0 or not self.pool.refs[block]):
                self.pool.share(block)
            else:
                block = self._allocate()
                connectors.load(key, block, self.copies)
                self.index.put(node, group, block)
                filling += 1
            if page < 0:
                self.tables[group, slot, position] = block
            else:
                assert self.state is not None
                self.state.put_page(slot, page, block)
                if self.pool.contents[block] is not None:
                    self.state.snapshots.use(node)
            connectors.staging.unpin(key)
        if not to_load:
            del self._to_load[slot]
        return filling

    def seconds_to_load(self, slot: int) -> float:
        """Return the seconds that each of these is expected to take, saving of a block that is
        overwritten for it included.
        """
        assert self.connectors is not None
        empty = self.pool.num_free - self.pool.num_cached
        overwriting = empty < self.num_to_load(slot)
        return self.connectors.cost.seconds_to_load(overwriting=overwriting)

    def fork(self, slot: int) -> int:
        """Take and return a slot with the same content; all blocks are shared."""
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
        if self.state is not None:
            self.state.fork(slot, child)
        tip = self._tip[child] = self._tip[slot]
        self._registered[child] = self._registered[slot]
        if tip is not None:
            self.index.pin(tip)
        return child

    def close(self, slot: int) -> None:
        """Give back the slot, its branches and blocks. What is cached stays usable, the beginning
        for the longest time.
        """
        for row in [row for row, (of, _, _) in self._branches.items() if of == slot]:
            self._drop(row)
        for _, node, group in self._to_load.pop(slot, ()):
            assert self.connectors is not None
            self.connectors.staging.unpin(self._key(node, group))
        count = int(self.num_blocks[slot])
        for group, first in enumerate(self._first):
            self._release(self.tables[group, slot, first[slot] : count][::-1])
            first[slot] = 0
        if self.state is not None:
            self.state.close(slot)
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

    def capacity(self, slot: int) -> int:
        """Return how many further positions could be reserved now."""
        size = self.block_size
        groups = len(self._windows)
        free = self.pool.num_free
        if slot in self.shared_tails:
            # A cached block of this sequence only is free once it is copied.
            copied = sum(self.pool.refs[block] > 1 for block in self._tail(slot))
            if copied > free:
                return 0
            free -= copied
        free += self._outside_window(slot)
        if self.state is not None and (free := free - self.state.missing(slot)) < 0:
            return 0
        slack = int(self.num_blocks[slot]) * size - int(self.num_tokens[slot])
        return slack + free // groups * size

    def reserve(self, slot: int, count: int) -> bool:
        """Make the next ``count`` positions writable. Return False and change nothing if that is
        not possible for all. Give back blocks that the first of them no longer sees in its window.
        """
        if self.capacity(slot) < count:
            return False
        size = self.block_size
        start = int(self.num_tokens[slot])
        self._leave_window(slot, start)
        if self.state is not None:
            self.state.reserve(slot)
        if slot in self.shared_tails:
            self.shared_tails.discard(slot)
            for group, block in enumerate(self._tail(slot)):
                if self.pool.refs[block] > 1 or self.pool.contents[block] is not None:
                    # Release it first: if it is the only free block, it is handed out as it is.
                    self.pool.release(block)
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
        """Return and clear the [C, 2] (source, destination) copies of this step."""
        if not self.copies:
            return NO_COPIES
        copies = np.array(self.copies, dtype=np.int32)
        self.copies.clear()
        return copies

    def advance(self, slot: int, count: int) -> None:
        """Count the next ``count`` positions as written."""
        self.num_tokens[slot] += count

    def commit_state(self, slot: int) -> None:
        """Take over what a step has done to the slot's state, after `advance` and `register`."""
        if self.state is not None:
            self.state.commit(slot, lambda position: self._node_at(slot, position))

    def _node_at(self, slot: int, position: int) -> Node | None:
        """Return the node of the slot's block that ends at ``position``; None if it is not in the
        prefix index.
        """
        node = self._tip[slot]
        for _ in range(self._registered[slot] - position // self.block_size):
            node = None if node is None else node.parent
        return node

    def max_steps(self, slots: Int32, limit: int) -> int:
        """Return for how many steps, at most ``limit``, all ``slots`` [sequences] could write one
        position a step with the blocks that are free now.
        """
        starts, held = self.num_tokens[slots], self.num_blocks[slots]
        free = self.pool.num_free // len(self._windows)

        def more(steps: int) -> int:
            return int(np.maximum(-(-(starts + steps) // self.block_size) - held, 0).sum())

        if more(limit) <= free:
            return limit
        return bisect_right(range(limit), free, key=more) - 1

    def advance_steps(self, slots: Int32, tokens: Sequence[array[int]], steps: int) -> None:
        """Advance all ``slots`` [sequences] by one position in each of ``steps`` steps, at most
        `max_steps`. ``tokens``: each slot's sequence, tokens to come included.

        `reserve` at the beginning of a block and `register` at its end are called in the order of
        single steps, which decides which blocks are handed out and which stay cached, and so is
        what becomes of states there. All other calls are left out because they change nothing.
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
                self._pass_steps([slot for slot, _, _ in here], 0)
            if step < steps:
                for slot, _, _ in here:
                    if not self.reserve(slot, 1):
                        raise RuntimeError(
                            f"slot {slot} has no block for position {self.num_tokens[slot]}, "
                            f"after {step} of {steps} steps that blocks should suffice for"
                        )
                self._pass_steps([slot for slot, _, _ in here], 1)
        self.num_tokens[slots] = starts + steps

    def _pass_steps(self, slots: Sequence[int], tokens: int) -> None:
        """Do with states what the step does that ends ``tokens`` behind those that are counted, in
        which nothing computes.
        """
        if self.state is None:
            return
        for slot in slots:
            self.state.begin(slot, int(self.num_tokens[slot]) + tokens)
        for slot in slots:
            self.num_tokens[slot] += tokens
            self.commit_state(slot)
            self.num_tokens[slot] -= tokens

    def trim(self, slot: int) -> None:
        """Give back blocks that were reserved and not written (rejected drafts), and blocks that
        the next position no longer sees: as if all positions had been written one by one.
        """
        start = int(self.num_tokens[slot])
        held = -(-start // self.block_size)
        rejected = self.tables[:, slot, held : int(self.num_blocks[slot])]
        self._release(rejected.T[::-1])
        rejected.fill(-1)
        self.num_blocks[slot] = held
        self._leave_window(slot, start)

    # Branches, during a step

    def branch(self, slot: int, count: int) -> int | None:
        """Take and return a row of ``tables`` with the slot's content and its own next ``count``
        positions writable; None if there are not enough rows or blocks. The slot, whose next
        position must be reserved, does not change. Both read what it has written so far; the branch
        gets a copy of the block that is written next.
        """
        size = self.block_size
        start = int(self.num_tokens[slot])
        first, end = start // size, -(-(start + count) // size)
        groups = len(self._windows)
        needed = (end - first) * groups
        if self.state is not None:
            needed += self.state.needed_for_branch(slot)
        if not self._rows or needed > self.pool.num_free:
            return None
        row = self._rows.pop()
        if self.state is not None:
            self.state.branch(slot, row)
        self.tables[:, row, :first] = self.tables[:, slot, :first]
        for position in range(first, end):
            for group in range(groups):
                self.tables[group, row, position] = self._allocate()
        if start % size:
            sources, copies = self.tables[:, slot, first], self.tables[:, row, first]
            self.copies += zip(sources.tolist(), copies.tolist(), strict=True)
        self._branches[row] = slot, first, end
        return row

    def adopt(self, row: int) -> None:
        """Replace the slot's own blocks by the branch's, and give the branch's row back."""
        slot, first, end = self._branches.pop(row)
        self._release(self.tables[:, slot, first : int(self.num_blocks[slot])])
        self.tables[:, slot, first:] = self.tables[:, row, first:]
        self.num_blocks[slot] = end
        if self.state is not None:
            self.state.adopt(row)
        self._free_row(row, end)

    def prune(self) -> None:
        """Give all branches back."""
        for row in [*self._branches]:
            self._drop(row)

    def _drop(self, row: int) -> None:
        _, first, end = self._branches.pop(row)
        self._release(self.tables[:, row, first:end])
        if self.state is not None:
            self.state.drop(row)
        self._free_row(row, end)

    def _free_row(self, row: int, end: int) -> None:
        self.tables[:, row, :end] = -1
        self._rows.append(row)

    def register(self, slot: int, tokens: array[int]) -> None:
        """Enter the slot's newly filled blocks into the prefix index. ``tokens``: of the sequence,
        at least those written.
        """
        tip = self._tip[slot]
        if tip is None:
            return
        size, index = self.block_size, self.index
        first, full = self._registered[slot], int(self.num_tokens[slot]) // size
        content = tokens[first * size : full * size].tobytes()
        stride = size * tokens.itemsize
        filled = None if self.connectors is None else self.connectors.filled
        last = tip
        for at, blocks in enumerate(self.tables[:, slot, first:full].T.tolist()):
            node = index.add(last, content[at * stride : (at + 1) * stride])
            if node is None:
                self._tip[slot] = None
                break
            for group, block in enumerate(blocks):
                if block >= 0:
                    index.put(node, group, block)
                    if filled is not None:
                        filled.append((node, group, block))
            last = node
        else:
            self._tip[slot] = last
        # Nodes in between are kept by their children.
        index.pin(last)
        index.unpin(tip)
        if self._tip[slot] is None:
            index.unpin(last)
        self._registered[slot] = full

    # Inside

    def _release(self, blocks: Int32) -> None:
        """Give back blocks, in this order; -1 is a block that has not been loaded."""
        for block in blocks.ravel().tolist():
            if block >= 0:
                self.pool.release(block)

    def _leave_window(self, slot: int, start: int) -> None:
        """Give back the blocks that a query at ``start`` no longer sees in its window."""
        for group, window in self._sliding:
            first = self._first[group]
            if (end := self._keep_from(slot, start, window)) > first[slot]:
                left = self.tables[group, slot, first[slot] : end]
                self._release(left)
                left.fill(-1)
                first[slot] = end

    def _keep_from(self, slot: int, start: int, window: int) -> int:
        """Return the first block to keep: the window's first, at most the end of the allocated."""
        needed = max(0, start - window + 1) // self.block_size
        return min(needed, int(self.num_blocks[slot]))

    def _outside_window(self, slot: int) -> int:
        """Return how many blocks `reserve` would free: those without another reference."""
        start = int(self.num_tokens[slot])
        refs = self.pool.refs
        free = 0
        for group, window in self._sliding:
            first = self._first[group][slot]
            row = self.tables[group, slot, first : self._keep_from(slot, start, window)]
            free += sum(refs[block] == 1 for block in row.tolist())
        return free

    def _tail(self, slot: int) -> list[int]:
        """Return the block of the next position in each group, if it is allocated already."""
        position = int(self.num_tokens[slot]) // self.block_size
        if position >= self.num_blocks[slot]:
            return []
        blocks: list[int] = self.tables[:, slot, position].tolist()
        return blocks

    def _allocate(self) -> int:
        block = self.pool.allocate()
        if (content := self.pool.contents[block]) is not None:
            node, group = content
            if self.state is not None and group >= len(self._windows):
                self.state.snapshots.overwrite(node)
                return block
            if self.connectors is not None:
                self.connectors.save_overwritten(block, node, group)
            self.index.forget(block)
        return block

    def check(self, prefetches: Iterable[Prefetch] = ()) -> None:
        """Raise `RuntimeError` unless pool, tables, index and connectors agree. ``prefetches``: of
        all waiting requests.
        """
        self.pool.check()
        self.index.check()
        for slot, to_load in self._to_load.items():
            for position, node, group in to_load:
                if slot in self._slots or self._block(group, slot, position) >= 0:
                    raise RuntimeError(f"slot {slot}: a block to be loaded is there already")
                if node.refs == node.num_held:
                    raise RuntimeError(f"slot {slot}: a block is to be loaded for nobody")
        if self.connectors is not None:
            self.connectors.check(prefetches, sum(map(len, self._to_load.values())))
        held = [self.tables[:, : len(self.num_tokens)].ravel()]
        for row, (slot, first, end) in self._branches.items():
            held.append(self.tables[:, row, first:end].ravel())
            beginning = self.tables[:, (row, slot), :first]
            if (beginning[:, 0] != beginning[:, 1]).any():
                raise RuntimeError("a branch and its slot begin with different blocks")
        if self.state is not None:
            self.state.check()
            held.append(np.fromiter(self.state.held(), np.int32))
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

    def _block(self, group: int, slot: int, position: int) -> int:
        if (page := group - len(self._windows)) < 0:
            return int(self.tables[group, slot, position])
        assert self.state is not None
        return self.state.pages_of(slot)[page]


NO_COPIES: Int32 = np.empty((0, 2), dtype=np.int32)
