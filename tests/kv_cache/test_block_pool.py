"""The pool against a plain model of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from octavo.kv_cache.block_pool import BlockPool


class Pool(RuleBasedStateMachine):
    """``free`` lists the free blocks in the order in which they must be handed out."""

    @initialize(num_blocks=st.integers(1, 6))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool[bool](num_blocks)
        self.free = list(range(num_blocks))
        self.refs: dict[int, int] = {}
        self.cached: set[int] = set()  # free ones with content

    @rule()
    def allocate(self) -> None:
        if not self.free:
            with pytest.raises(RuntimeError, match="in use"):
                self.pool.allocate()
            return
        block = self.pool.allocate()
        assert block == self.free.pop(0)
        self.refs[block] = 1
        self.cached.discard(block)

    @precondition(lambda self: self.refs or self.cached)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted({*self.refs, *self.cached})))
        self.pool.share(block)
        self.refs[block] = self.refs.get(block, 0) + 1
        if block in self.cached:
            self.cached.remove(block)
            self.free.remove(block)

    @precondition(lambda self: self.refs)
    @rule(data=st.data(), keep=st.booleans())
    def release(self, data: st.DataObject, keep: bool) -> None:
        block = data.draw(st.sampled_from(sorted(self.refs)))
        self.pool.contents[block] = keep or None
        self.pool.release(block)
        self.refs[block] -= 1
        if self.refs[block] == 0:
            del self.refs[block]
            self.free.insert(len(self.free) if keep else 0, block)
            if keep:
                self.cached.add(block)

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check()
            assert self.pool.num_free == len(self.free)
            assert self.pool.num_used == len(self.refs)


TestPool = Pool.TestCase


def test_a_block_given_back_twice_is_an_error() -> None:
    pool = BlockPool[bool](2)
    block = pool.allocate()
    pool.release(block)
    with pytest.raises(RuntimeError, match="more often"):
        pool.release(block)


@given(st.integers(-5, 0))
def test_a_pool_needs_a_block(num_blocks: int) -> None:
    with pytest.raises(ValueError, match="cannot hold"):
        BlockPool(num_blocks)


def test_check_finds_a_lost_block() -> None:
    pool = BlockPool[bool](3)
    pool.refs[1] = 1
    with pytest.raises(RuntimeError, match="block 1"):
        pool.check()
