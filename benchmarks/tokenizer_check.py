"""Compares Octavo's tokenizer with transformers' on many varied strings.

    python benchmarks/tokenizer_check.py reference --model smollm2=PATH   # transformers
    python benchmarks/tokenizer_check.py octavo    --model smollm2=PATH [--json FILE]
    python benchmarks/tokenizer_check.py llama.cpp --model smollm2=PATH   # llama-cpp-python

Without arguments: Octavo's half, for the pulled models whose reference is in the cache folder
(``--cache``, build/peers).

The strings (12,000 by default, the same for the same seed) are those of tests/oracle/strings.py:
code, scripts of some fifty Unicode blocks, emoji with joiners, runs of white space, special tokens
as text, control characters, normalization forms, and mixtures. Only the reference half needs
transformers. Ids are compared without BOS, special tokens in the text recognised, and the text that
the ids decode to is compared too.

For a file whose ``tokenizer.ggml.pre`` is "smollm", transformers leaves out the model's splitting
of digits; the reference puts it back (see tests/oracle/record.py), and the number of strings on
which transformers as it stands differs is reported beside it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ORACLE = Path(__file__).resolve().parent.parent / "tests" / "oracle"
sys.path.insert(0, str(ORACLE))

from strings import generate  # noqa: E402

from _models import CACHE, models  # noqa: E402
from _script import as_script  # noqa: E402

Encode = Callable[[str], list[int]]
Decode = Callable[[list[int]], str]
SEED = 7


def strings_path(cache: Path, name: str) -> Path:
    return cache / f"{name}.strings.json"


def reference(path: Path, name: str, cache: Path, count: int) -> None:
    """Writes ``{name}.strings.json``: [text, ids, decoded] of every string."""
    import record  # tests/oracle
    import transformers

    tokenizer, correction = record.load_tokenizer(path)
    plain = transformers.AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    cases = []
    changed = 0
    for text in generate(count, SEED):
        ids = record.encode(tokenizer, text)
        decoded = tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False)
        cases.append([text, ids, decoded])
        changed += record.encode(plain, text) != ids
    head = {"transformers": transformers.__version__, "correction": correction, "changed": changed}
    out = {"meta": head, "cases": cases}
    strings_path(cache, name).write_text(json.dumps(out), encoding="utf-8")
    print(f"{name}: {len(cases)} strings; uncorrected transformers differs on {changed}")


def octavo(path: Path) -> tuple[Encode, Decode]:
    from octavo import checkpoint as checkpoints

    tokenizer = checkpoints.load(path).tokenizer

    def encode(text: str) -> list[int]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        return list(ids)

    return encode, lambda ids: tokenizer.decode(ids, skip_special_tokens=False)


def llama_cpp(path: Path) -> tuple[Encode, Decode]:
    import llama_cpp as library

    model = library.Llama(str(path), vocab_only=True, verbose=False)

    def encode(text: str) -> list[int]:
        return list(model.tokenize(text.encode(), add_bos=False, special=True))

    def decode(ids: list[int]) -> str:
        text: str = model.detokenize(ids, special=True).decode("utf-8", errors="replace")
        return text

    return encode, decode


ENGINES = {"octavo": octavo, "llama.cpp": llama_cpp}


def compare(path: Path, name: str, cache: Path, engine: str, show: int) -> dict[str, Any]:
    data = json.loads(strings_path(cache, name).read_text(encoding="utf-8"))
    encode, decode = ENGINES[engine](path)
    wrong: list[tuple[str, list[int], list[int]]] = []
    undecoded: list[tuple[str, str]] = []
    began = time.perf_counter()
    for text, ids, decoded in data["cases"]:
        got = encode(text)
        if got != ids:
            wrong.append((text, ids, got))
        text_back = decode(ids)
        if text_back != decoded:
            undecoded.append((decoded, text_back))
    seconds = time.perf_counter() - began
    count = len(data["cases"])
    print(
        f"{name} {engine}: {count} strings, {len(wrong)} with other ids, {len(undecoded)} decoded "
        f"otherwise, {seconds:.1f} s"
    )
    for text, ids, got in wrong[:show]:
        print(f"  {text[:60]!r}\n    expected {ids[:24]}\n    got      {got[:24]}")
    for expected, text in undecoded[:show]:
        print(f"  decoded {text[:60]!r}\n  expected {expected[:60]!r}")
    return {
        "model": name,
        "engine": engine,
        "strings": count,
        "different_ids": len(wrong),
        "different_decoded": len(undecoded),
        "uncorrected_transformers_different": data["meta"]["changed"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", nargs="*", default=["octavo"], help="reference or an engine")
    parser.add_argument("--model", action="append", help="NAME=PATH of a GGUF file")
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder for the reference")
    parser.add_argument("--count", type=int, default=12000)
    parser.add_argument("--show", type=int, default=5, help="differences to print")
    parser.add_argument("--json", help="file for the results")
    args = parser.parse_args()
    unknown = set(args.what) - {"reference", *ENGINES}
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    args.cache.mkdir(parents=True, exist_ok=True)
    results = []
    for name, path in models(args.model).items():
        if "reference" not in args.what and not strings_path(args.cache, name).exists():
            print(f"{name}: no reference in {args.cache}; run the reference half first")
            continue
        for what in args.what:
            if what == "reference":
                reference(path, name, args.cache, args.count)
            else:
                results.append(compare(path, name, args.cache, what, args.show))
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return int(any(r["different_ids"] for r in results if r["engine"] == "octavo"))


if __name__ == "__main__":
    as_script(main)
