"""Hashes that name a cached block outside its engine: a chain of digests over the tokens.

The prefix index keys its nodes by Python's keyed hash, which means nothing to another process and
is only as good as the comparison of token ids behind it. Where that comparison is not possible, in
a connector, a block is named by a digest for which nobody can find a second text (BLAKE2b, RFC
7693): over what the engine computes with, the request's salt, and all tokens up to the block's end.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b

from octavo.kv_cache.prefix_index import Node

Key = tuple[bytes, int]  # the hash of all tokens up to the block's end, and the layer group

DIGEST_BYTES = 32


@lru_cache(maxsize=1000)
def root(engine: bytes, salt: bytes) -> bytes:
    """Return the hash of no tokens yet. ``engine`` is the digest of everything besides the tokens
    that decides what a block holds: weights, their formats, numerics, the cache's layout.
    """
    return _digest(len(engine).to_bytes(8, "little") + engine + salt, b"root")


def after(parent: bytes, tokens: bytes) -> bytes:
    """Return the hash of the prefix ``parent`` and the ``tokens`` of the next block."""
    return _digest(parent + tokens, b"block")


def digest_of(node: Node, engine: bytes) -> bytes:
    """Return the hash of all tokens up to the node's end. The node keeps it."""
    missing = []
    at: Node | None = node
    while at is not None and at.digest is None:
        missing.append(at)
        at = at.parent
    digest = b"" if at is None or at.digest is None else at.digest
    for each in reversed(missing):
        digest = root(engine, each.tokens) if each.parent is None else after(digest, each.tokens)
        each.digest = digest
    return digest


def _digest(content: bytes, person: bytes) -> bytes:
    return blake2b(content, digest_size=DIGEST_BYTES, person=person).digest()
