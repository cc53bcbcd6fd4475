"""Names of blocks: equal for equal prefixes, in any process, and for nothing else."""

import subprocess
import sys

from octavo.kv_cache import block_hash


def chain(engine: bytes, salt: bytes, *blocks: bytes) -> bytes:
    name = block_hash.root(engine, salt)
    for block in blocks:
        name = block_hash.after(name, block)
    return name


def test_every_part_counts() -> None:
    names = {
        chain(b"e", b"s"),
        chain(b"es", b""),
        chain(b"", b"es"),
        chain(b"e", b"", b"s"),
        chain(b"e", b"s", b"ab"),
        chain(b"e", b"s", b"a", b"b"),
        chain(b"e", b"s", b"b", b"a"),
        chain(b"f", b"s", b"a", b"b"),
        chain(b"e", b"t", b"a", b"b"),
    }
    assert len(names) == 9


def test_the_same_in_another_process() -> None:
    code = (
        "from octavo.kv_cache.block_hash import after, root\n"
        "print(after(root(b'e', b's'), b'tokens').hex())"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == chain(b"e", b"s", b"tokens").hex()
