"""The prefix index: what counts as a hit, and what remains when blocks are overwritten."""

from array import array

import pytest

from octavo.kv_cache.block_pool import BlockPool
from octavo.kv_cache.prefix_index import Node, PrefixIndex, chain_hash


def tokens(*ids: int) -> bytes:
    return array("i", ids).tobytes()


def added(index: PrefixIndex, parent: Node | None, content: bytes) -> Node:
    node = index.add(parent, content)
    assert node is not None
    return node


def test_a_chain_is_found_by_parent_and_tokens() -> None:
    pool = BlockPool[tuple[Node, int]](4)
    index = PrefixIndex(pool, 1)
    root = added(index, None, b"")
    first = added(index, root, tokens(1, 2))
    second = added(index, first, tokens(1, 2))
    index.put(second, 0, 3)
    assert index.find(None, b"") is root
    assert index.find(root, tokens(1, 2)) is first
    assert index.find(first, tokens(1, 2)) is second
    assert index.find(second, tokens(1, 2)) is None
    assert index.find(root, tokens(2, 1)) is None
    assert index.find(None, b"salt") is None
    assert pool.contents[3] == (second, 0)


@pytest.mark.parametrize("colliding", ["everything", "same parent"])
def test_a_forced_collision_is_refused_and_harmless(colliding: str) -> None:
    def hasher(parent: int, content: bytes) -> int:
        return 7 if colliding == "everything" else hash((parent, len(content)))

    index = PrefixIndex(BlockPool(8), 1, hasher=hasher)
    root = added(index, None, b"")
    if colliding == "everything":
        assert index.add(root, tokens(1, 2)) is None
        assert index.find(root, tokens(1, 2)) is None
        assert index.find(None, b"") is root
        return
    mine = added(index, root, tokens(1, 2))
    index.put(mine, 0, 0)
    assert index.add(root, tokens(3, 4)) is None
    assert index.find(root, tokens(3, 4)) is None
    assert index.find(root, tokens(1, 2)) is mine
    index.check()


def test_children_of_an_overwritten_block_do_not_come_to_another_prefix() -> None:
    """The parent's key is free again and taken by other tokens with the same hash."""
    index = PrefixIndex(
        BlockPool(8), 1, hasher=lambda parent, content: hash((parent, len(content)))
    )
    root = added(index, None, b"")
    index.pin(root)
    parent = added(index, root, tokens(1, 2))
    child = added(index, parent, tokens(5, 6))
    index.put(parent, 0, 0)
    index.put(child, 0, 1)
    index.forget(0)
    assert index.add(root, tokens(3, 4)) is None, "the child still needs its parent's identity"
    index.forget(1)
    other = added(index, root, tokens(3, 4))
    index.put(other, 0, 2)
    assert index.find(other, tokens(5, 6)) is None
    index.check()


def test_nothing_is_kept_for_blocks_that_are_gone() -> None:
    index = PrefixIndex(BlockPool(100), 2)
    node: Node | None = None
    for depth in range(50):
        node = added(index, node, tokens(depth))
        index.put(node, 0, 2 * depth)
        index.put(node, 1, 2 * depth + 1)
    assert len(index) == 50
    for block in range(100):
        index.forget(block)
        index.check()
    assert len(index) == 0


def test_a_pinned_node_outlives_its_blocks() -> None:
    index = PrefixIndex(BlockPool(2), 1)
    node = added(index, None, b"")
    index.pin(node)
    index.put(node, 0, 0)
    index.forget(0)
    assert index.find(None, b"") is node
    index.unpin(node)
    assert index.find(None, b"") is None


def test_the_hash_depends_on_every_part() -> None:
    assert len({chain_hash(p, c) for p in (0, 1) for c in (b"", b"a", b"b")}) == 6
