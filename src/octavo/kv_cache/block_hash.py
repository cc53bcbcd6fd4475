"""Hashes that name a cached block outside its engine: a chain of digests over the tokens.

The prefix index keys its nodes by Python's keyed hash, which means nothing to another process and
is only as good as the comparison of token ids behind it. Where that comparison is not possible, in
a connector, a block is named by a digest for which nobody can find a second text (BLAKE2b, RFC
7693): over what the engine computes with, the request's salt, and all tokens up to the block's end.
"""

from __future__ import annotations

from hashlib import blake2b

from octavo.kv_cache.prefix_index import Node

Key = tuple[bytes, int]  # the hash of all tokens up to the block's end, and the layer group

DIGEST_BYTES = 32


def root(engine: bytes, salt: bytes) -> bytes:
    """Return the hash of no tokens yet. ``engine`` is the digest of everything besides the tokens
    that decides what a block holds: weights, their formats, numerics, the cache's layout.
    """
    return _digest(len(engine).to_bytes(8, "little") + engine + salt, b"root")


def after(parent: bytes, tokens: bytes) -> bytes:
    """Return the hash of the prefix ``parent`` and the ``tokens`` of the next block."""
    return _digest(parent + tokens, b"block")


class BlockHashes:
    """The hashes of one engine's blocks, each computed once."""

    def __init__(self, engine: bytes) -> None:
        self._engine = engine
        self._roots: dict[bytes, bytes] = {}

    def root(self, salt: bytes) -> bytes:
        known = self._roots.get(salt)
        if known is None:
            if len(self._roots) > 1000:
                self._roots.clear()
            known = self._roots[salt] = root(self._engine, salt)
        return known

    def of(self, node: Node) -> bytes:
        """Return the hash of all tokens up to the node's end."""
        chain = []
        at: Node | None = node
        while at is not None and at.digest is None:
            chain.append(at)
            at = at.parent
        for each in reversed(chain):
            if each.parent is None:
                each.digest = self.root(each.tokens)
            else:
                assert each.parent.digest is not None
                each.digest = after(each.parent.digest, each.tokens)
        assert node.digest is not None
        return node.digest


def _digest(content: bytes, person: bytes) -> bytes:
    return blake2b(content, digest_size=DIGEST_BYTES, person=person).digest()
