"""Compares Octavo's tokenizers of GGUF files with llama.cpp's published vectors.

    python benchmarks/llama_cpp_vectors.py LLAMA_CPP [--only NAME …] [--record FILE]

LLAMA_CPP is a checkout of llama.cpp (MIT), in whose models/ folder lie vocabularies
(ggml-vocab-*.gguf), texts (.inp) and the ids that each model's own tokenizer makes of them (.out).
A vocabulary that Octavo does not read is listed with the reason.

``--record`` writes what tests/loader/test_tokenizer.py needs: of each byte-level
vocabulary the tokens that occur and the merges that make them, and the texts' tokens.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from octavo.loader.base import CheckpointError
from octavo.loader.gguf import GgufFile
from octavo.loader.gguf_tokenizer import USER_DEFINED, gguf_tokenizer

SEPARATOR = "\n__ggml_vocab_test__\n"  # behind each text
Cases = list[tuple[str, list[int]]]


def vectors(path: Path) -> Cases:
    """The texts beside a vocabulary, and their ids without BOS."""
    whole = path.with_name(path.name + ".inp").read_bytes().decode()
    texts = whole.removesuffix(SEPARATOR).split(SEPARATOR)
    lines = path.with_name(path.name + ".out").read_text().splitlines()
    ids = [[int(each) for each in line.split()] for line in lines]
    if len(ids) != len(texts):
        raise SystemExit(f"{path}: {len(texts)} texts and {len(ids)} lines of ids")
    return list(zip(texts, ids, strict=True))


def merges_of(token: str, ranks: dict[tuple[str, str], int]) -> Iterator[tuple[str, str]]:
    """Those that make the token of its characters, in order."""
    parts = list(token)
    while len(parts) > 1:
        pairs = [(ranks.get(pair, len(ranks)), at) for at, pair in enumerate(pairwise(parts))]
        rank, at = min(pairs)
        if rank == len(ranks):
            return
        yield parts[at], parts[at + 1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def recorded(file: GgufFile, tokens: list[str], cases: Cases) -> dict[str, Any]:
    lines = file.strings("tokenizer.ggml.merges")
    assert lines is not None
    pairs = [tuple(line.split(" ", 1)) for line in lines.text()]
    ranks: dict[tuple[str, str], int] = {(a, b): rank for rank, (a, b) in enumerate(pairs)}
    used = sorted({token_id for _, ids in cases for token_id in ids})
    types = file.numbers("tokenizer.ggml.token_type")
    assert types is not None
    needed: Iterable[tuple[str, str]] = {
        pair for token_id in used for pair in merges_of(tokens[token_id], ranks)
    }
    return {
        "pre": file.get("tokenizer.ggml.pre", str, "default"),
        "merges": [" ".join(pair) for pair in sorted(needed, key=lambda pair: ranks[pair])],
        "tokens": [tokens[token_id] for token_id in used],
        "added": [at for at, token_id in enumerate(used) if types[token_id] == USER_DEFINED],
        "cases": [[used.index(token_id) for token_id in ids] for _, ids in cases],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("checkout", type=Path, nargs="?", help="of llama.cpp")
    parser.add_argument("--only", action="append", help="a vocabulary, such as qwen2")
    parser.add_argument("--record", type=Path)
    args = parser.parse_args()
    if args.checkout is None:
        print("no checkout of llama.cpp is given: nothing is compared")
        return 0
    wrong = 0
    found: dict[str, Any] = {"texts": [], "vocabularies": {}}
    for path in sorted((args.checkout / "models").glob("ggml-vocab-*.gguf")):
        name = path.stem.removeprefix("ggml-vocab-")
        if args.only and name not in args.only:
            continue
        if not path.with_name(path.name + ".out").exists():
            print(f"{name}: no vectors")
            continue
        file = GgufFile(path)
        strings = file.strings("tokenizer.ggml.tokens")
        tokens = [] if strings is None else strings.text()
        try:
            tokenizer = gguf_tokenizer(file, len(tokens))
        except CheckpointError as error:
            print(f"{name}: not read: {str(error).partition(': ')[2]}")
            continue
        cases = vectors(path)
        different = 0
        for text, ids in cases:
            got = tokenizer.encode(text, add_special_tokens=False)
            if got != ids:
                different += 1
                print(f"  {text[:60]!r}\n    expected {ids[:24]}\n    got      {got[:24]}")
        print(f"{name}: {len(cases)} texts, {different} with other ids")
        wrong += different
        if file.get("tokenizer.ggml.model", str) == "gpt2":
            for text, _ in cases:
                if text not in found["texts"]:
                    found["texts"].append(text)
            numbers = [found["texts"].index(text) for text, _ in cases]
            found["vocabularies"][name] = recorded(file, tokens, cases) | {"texts": numbers}
    if args.record:
        args.record.write_text(json.dumps(found, separators=(",", ":")) + "\n")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
