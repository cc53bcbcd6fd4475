"""Compares Octavo's tokenizer with transformers' on many varied strings.

    python benchmarks/tokenizer_check.py reference --model smollm2=PATH   # transformers
    python benchmarks/tokenizer_check.py octavo    --model smollm2=PATH [--json FILE]
    python benchmarks/tokenizer_check.py llama.cpp --model smollm2=PATH   # llama-cpp-python
    python benchmarks/tokenizer_check.py --folders FILE                   # unusual added tokens

Without arguments: Octavo's half, for the pulled models whose reference is in the cache folder
(``--cache``, build/peers).

The strings (12,000 by default, the same for the same seed) are those of tests/oracle/strings.py:
code, scripts of some fifty Unicode blocks, emoji with joiners, runs of white space, special tokens
as text, control characters, normalization forms, and mixtures. Only the reference half needs
transformers. Ids are compared without BOS, special tokens in the text recognised, and the text that
the ids decode to is compared too.

``--folders`` compares Octavo with AutoTokenizer on generated folders with unusual added tokens:
names, ids, and the text with special tokens and without. FILE is what
tests/oracle/record_odd_folders.py writes, of any seeds (``--first 1000 --count 500``); without one,
the 60 recorded there.

For a file whose ``tokenizer.ggml.pre`` is "smollm", transformers leaves out the model's splitting
of digits; the reference puts it back (see tests/oracle/record.py), and the number of strings on
which transformers as it stands differs is reported beside it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
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
    from octavo import loader

    tokenizer = loader.load(path).tokenizer

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


def compare_folders(file: Path) -> int:
    """How many folders differ."""
    from odd_folders import build

    from octavo.loader.base import CheckpointError
    from octavo.loader.hf_folder import HfFolder
    from octavo.loader.hf_tokenizer import hf_tokenizer

    recorded = json.loads(file.read_text())
    different = refused = 0
    for each in recorded:
        if "refused" in each:  # by transformers itself
            refused += 1
            continue
        with tempfile.TemporaryDirectory() as folder:
            texts = build(Path(folder), each["seed"])
            try:
                tokenizer = hf_tokenizer(HfFolder(Path(folder)), 1 << 16)
                got = [
                    [
                        tokenizer.encode(text),
                        tokenizer.decode(ids, skip_special_tokens=False),
                        tokenizer.decode(ids),
                    ]
                    for text, (ids, _, _) in zip(texts, each["cases"], strict=True)
                ]
            except CheckpointError as error:
                print(f"seed {each['seed']}: {error}")
                different += 1
                continue
        expected = [
            [ids, text, text if skipped is None else skipped]
            for ids, text, skipped in each["cases"]
        ]
        if got != expected or tokenizer.special_tokens_map != each["names"]:
            different += 1
            print(f"seed {each['seed']} ({each['class']}) differs")
    print(f"{len(recorded)} folders: {different} differ, {refused} refused by transformers")
    return different


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", nargs="*", default=["octavo"], help="reference or an engine")
    parser.add_argument("--model", action="append", help="NAME=PATH of a GGUF file")
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder for the reference")
    parser.add_argument("--count", type=int, default=12000)
    parser.add_argument("--show", type=int, default=5, help="differences to print")
    parser.add_argument("--json", help="file for the results")
    parser.add_argument(
        "--folders", type=Path, nargs="?", const=ORACLE / "odd_folders.json", metavar="FILE"
    )
    args = parser.parse_args()
    if args.folders is not None:
        return int(compare_folders(args.folders) > 0)
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
