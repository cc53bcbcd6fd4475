"""The prefix index: which blocks already hold the keys and values of a token sequence.

Full blocks are chained: a node stands for the tokens of one block after one particular parent
node, and its key is a hash over (parent's key, token ids), starting from the salt. A hit counts
only if parent and token ids are the same, so that equal hashes of different prompts are harmless.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

Hash = Callable[[int, bytes], int]


def chain_hash(parent: int, content: bytes) -> int:
    """Python's keyed SipHash: not predictable from outside the process."""
    return hash((parent, content))


class Node:
    """One full block of tokens after one prefix, and the blocks that hold it, one a group."""

    __slots__ = ("blocks", "digest", "key", "parent", "refs", "tokens")

    def __init__(self, key: int, parent: Node | None, tokens: bytes, num_groups: int) -> None:
        self.key = key
        self.parent = parent
        self.tokens = tokens  # little-endian int32 ids; the salt at a root
        self.blocks = [-1] * num_groups
        self.digest: bytes | None = (
            None  # its name in other tiers (kv_cache/digest.py), once asked for
        )
        # Child nodes and running sequences that continue from here, and blocks that hold it.
        self.refs = 0

    @property
    def num_held(self) -> int:
        """Blocks that hold it."""
        return sum(block >= 0 for block in self.blocks)


class PrefixIndex:
    """Nodes by key, and for each block the node whose content it holds. Every operation is O(1)."""

    def __init__(self, num_blocks: int, num_groups: int, hasher: Hash = chain_hash) -> None:
        self.num_groups = num_groups
        self._hash = hasher
        self._nodes: dict[int, Node] = {}
        self._holder: list[tuple[Node, int] | None] = [None] * num_blocks

    def __len__(self) -> int:
        return len(self._nodes)

    def find(self, parent: Node | None, tokens: bytes) -> Node | None:
        """The node of ``tokens`` after ``parent`` (None: a root, with the salt as tokens)."""
        node = self._nodes.get(self._hash(parent.key if parent else 0, tokens))
        if node is None or node.parent is not parent or node.tokens != tokens:
            return None
        return node

    def add(self, parent: Node | None, tokens: bytes) -> Node | None:
        """Find or make; None if another prefix owns the key, and then nothing is cached."""
        key = self._hash(parent.key if parent else 0, tokens)
        node = self._nodes.get(key)
        if node is None:
            node = self._nodes[key] = Node(key, parent, tokens, self.num_groups)
            if parent is not None:
                parent.refs += 1
        elif node.parent is not parent or node.tokens != tokens:
            return None
        return node

    def child_key(self, parent: int, tokens: bytes) -> int:
        """The key of a node of ``tokens`` after one of that key; 0: a root."""
        return self._hash(parent, tokens)

    def has_key(self, key: int) -> bool:
        return key in self._nodes

    def holder(self, block: int) -> tuple[Node, int] | None:
        """The node and group whose content the block holds."""
        return self._holder[block]

    def held(self) -> Iterator[tuple[Node, int, int]]:
        """(node, group, block) of all that is cached."""
        for block, holder in enumerate(self._holder):
            if holder is not None:
                yield *holder, block

    def holds(self, block: int) -> bool:
        """Whether the block's content is cached, and the block therefore must not be written."""
        return self._holder[block] is not None

    def put(self, node: Node, group: int, block: int) -> None:
        """``block`` now holds the node's content for ``group``; a block already there stays."""
        if node.blocks[group] < 0:
            node.blocks[group] = block
            node.refs += 1
            self._holder[block] = node, group

    def forget(self, block: int) -> None:
        """The block is about to be overwritten."""
        holder = self._holder[block]
        if holder is not None:
            node, group = holder
            self._holder[block] = None
            node.blocks[group] = -1
            self.unpin(node)

    def pin(self, node: Node) -> None:
        """A sequence will add children to this node: keep it."""
        node.refs += 1

    def unpin(self, node: Node) -> None:
        node.refs -= 1
        while node.refs == 0:
            del self._nodes[node.key]
            if node.parent is None:
                return
            node = node.parent
            node.refs -= 1

    def check(self) -> None:
        """Blocks and nodes name each other; `RuntimeError` otherwise."""
        held = 0
        children = Counter(node.parent for node in self._nodes.values())
        for node in self._nodes.values():
            for group, block in enumerate(node.blocks):
                if block >= 0:
                    held += 1
                    if self._holder[block] != (node, group):
                        raise RuntimeError(f"block {block} does not know its prefix")
            if node.refs == 0:
                raise RuntimeError("a prefix without blocks, children or sequences is kept")
            if node.refs < children[node] + node.num_held:
                raise RuntimeError("a prefix has more blocks and children than were counted")
        if held != sum(holder is not None for holder in self._holder):
            raise RuntimeError("a block names a prefix that is gone")
