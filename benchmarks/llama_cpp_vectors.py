"""Compares Octavo's tokenizers of GGUF files with llama.cpp's published vectors.

    python benchmarks/llama_cpp_vectors.py LLAMA_CPP [--only NAME …]

LLAMA_CPP is a checkout of llama.cpp (MIT), in whose models/ folder lie vocabularies
(ggml-vocab-*.gguf), texts (.inp) and the ids that each model's own tokenizer makes of them (.out).
A vocabulary that Octavo does not read is listed with the reason.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from octavo.checkpoint.base import CheckpointError
from octavo.checkpoint.gguf import GgufFile
from octavo.checkpoint.gguf_tokenizer import gguf_tokenizer

SEPARATOR = "\n__ggml_vocab_test__\n"  # between texts


def vectors(path: Path) -> list[tuple[str, list[int]]]:
    """The texts beside a vocabulary, and their ids without BOS."""
    whole = path.with_name(path.name + ".inp").read_bytes().decode()
    texts = whole.removesuffix(SEPARATOR).split(SEPARATOR)
    lines = path.with_name(path.name + ".out").read_text().splitlines()
    ids = [[int(each) for each in line.split()] for line in lines]
    if len(ids) != len(texts):
        raise SystemExit(f"{path}: {len(texts)} texts and {len(ids)} lines of ids")
    return list(zip(texts, ids, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--only", action="append", help="a vocabulary, such as qwen2")
    args = parser.parse_args()
    wrong = 0
    for path in sorted((args.checkout / "models").glob("ggml-vocab-*.gguf")):
        name = path.stem.removeprefix("ggml-vocab-")
        if args.only and name not in args.only:
            continue
        if not path.with_name(path.name + ".out").exists():
            print(f"{name}: no vectors")
            continue
        file = GgufFile(path)
        try:
            tokens = file.strings("tokenizer.ggml.tokens")
            tokenizer = gguf_tokenizer(file, 0 if tokens is None else len(tokens))
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
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
