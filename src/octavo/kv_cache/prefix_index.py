"""The prefix index: which blocks hold the keys and values of which token sequence.

Full blocks are chained: a node stands for the tokens of one block after one particular parent
node, and its key is a hash over (parent's key, token ids), starting from the salt. A node is found
only if parent and token ids are equal, so that equal hashes of different prompts do no harm.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from octavo.kv_cache.block_pool import BlockPool

Hash = Callable[[int, bytes], int]


def chain_hash(parent: int, content: bytes) -> int:
    """Hash with Python's keyed SipHash, which cannot be predicted outside the process."""
    return hash((parent, content))


class Node:
    """One full block of tokens after one prefix, and the pool's blocks that hold it.

    Behind the groups of keys and values, group G + i is page i of the state of recurrent layers
    behind the node's last token.
    """

    __slots__ = ("blocks", "depth", "digest", "key", "pages", "parent", "refs", "tokens")

    def __init__(self, key: int, parent: Node | None, tokens: bytes, num_groups: int) -> None:
        self.key = key
        self.parent = parent
        self.tokens = tokens  # little-endian int32 ids; the salt at a root
        self.depth: int = 0 if parent is None else parent.depth + 1  # blocks up to its end
        self.blocks = [-1] * num_groups  # -1: no block holds it for the group
        self.pages: list[int] = []  # of its snapshot; -1: no block holds that page
        self.digest: bytes | None = None  # `block_hash.digest_of` it, once that was asked for
        # Child nodes and running sequences that continue from here, and blocks that hold it.
        self.refs = 0

    @property
    def num_held(self) -> int:
        """How many blocks hold it."""
        return sum(block >= 0 for block in self.blocks) + sum(page >= 0 for page in self.pages)

    def block(self, group: int) -> int:
        """Return the block that holds a group of it; -1: none does."""
        page = group - len(self.blocks)
        if page < 0:
            return self.blocks[group]
        return self.pages[page] if self.pages else -1


class PrefixIndex:
    """Nodes by key; the pool's blocks have a node and a group as content. Every operation is
    O(1).
    """

    def __init__(
        self,
        pool: BlockPool[tuple[Node, int]],
        num_groups: int,
        hasher: Hash = chain_hash,
        *,
        num_pages: int = 0,
    ) -> None:
        """``num_pages``: of the state of recurrent layers, if there are any."""
        self._contents = pool.contents
        self._num_groups = num_groups
        self._num_pages = num_pages
        self._hash = hasher
        # Called when a block begins (True) or ceases (False) to hold a node's content.
        self.on_change: Callable[[Node, int, bool], None] | None = None
        self._nodes: dict[int, Node] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def find(self, parent: Node | None, tokens: bytes) -> Node | None:
        """Return the node of ``tokens`` after ``parent`` (None: a root, the salt as tokens)."""
        node = self._nodes.get(self._hash(parent.key if parent else 0, tokens))
        if node is None or node.parent is not parent or node.tokens != tokens:
            return None
        return node

    def add(self, parent: Node | None, tokens: bytes) -> Node | None:
        """Find or make the node. Return None if another prefix has its key: it is not cached."""
        key = self._hash(parent.key if parent else 0, tokens)
        node = self._nodes.get(key)
        if node is None:
            node = self._nodes[key] = Node(key, parent, tokens, self._num_groups)
            if parent is not None:
                parent.refs += 1
        elif node.parent is not parent or node.tokens != tokens:
            return None
        return node

    def child_key(self, parent: int, tokens: bytes) -> int:
        """Return the key of a node of ``tokens`` after a node with key ``parent`` (0: a root)."""
        return self._hash(parent, tokens)

    def has_key(self, key: int) -> bool:
        return key in self._nodes

    def held(self) -> Iterator[tuple[Node, int, int]]:
        """Yield (node, group, block) for every cached block."""
        for block, content in enumerate(self._contents):
            if content is not None:
                yield *content, block

    def put(self, node: Node, group: int, block: int) -> None:
        """Enter ``block`` as holding the node's content for ``group``; a block already there
        stays.
        """
        if node.block(group) < 0:
            self._set(node, group, block)
            node.refs += 1
            self._contents[block] = node, group
            if self.on_change is not None:
                self.on_change(node, group, True)

    def forget(self, block: int) -> None:
        """Remove the block, which is about to be overwritten, if it holds anything."""
        content = self._contents[block]
        if content is not None:
            node, group = content
            self._contents[block] = None
            self._set(node, group, -1)
            if self.on_change is not None:
                self.on_change(node, group, False)
            self.unpin(node)

    def _set(self, node: Node, group: int, block: int) -> None:
        page = group - self._num_groups
        if page < 0:
            node.blocks[group] = block
            return
        node.pages = node.pages or [-1] * self._num_pages
        node.pages[page] = block
        if max(node.pages) < 0:
            node.pages = []

    def pin(self, node: Node) -> None:
        """Keep the node: a sequence will add children to it."""
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
        """Raise `RuntimeError` unless blocks and nodes refer to each other."""
        held = 0
        children = Counter(node.parent for node in self._nodes.values())
        for node in self._nodes.values():
            for group, block in enumerate((*node.blocks, *node.pages)):
                if block >= 0:
                    held += 1
                    if self._contents[block] != (node, group):
                        raise RuntimeError(f"block {block} does not know its prefix")
            if node.refs == 0:
                raise RuntimeError("a prefix without blocks, children or sequences is kept")
            if node.refs < children[node] + node.num_held:
                raise RuntimeError("a prefix has more blocks and children than were counted")
        if held != sum(content is not None for content in self._contents):
            raise RuntimeError("a block names a prefix that is gone")
