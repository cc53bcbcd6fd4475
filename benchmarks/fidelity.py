"""How close an engine's next-token distributions are to transformers in float32 on the same file.

    python benchmarks/fidelity.py reference --model smollm2=PATH   # torch, transformers, gguf
    python benchmarks/fidelity.py llama.cpp --model smollm2=PATH   # llama-cpp-python
    python benchmarks/fidelity.py octavo    --model smollm2=PATH   # this repository
    python benchmarks/fidelity.py report    --model smollm2=PATH [--json FILE]

Each half runs in whatever environment has what it needs (of Octavo, the others need only its
sources: PYTHONPATH=src) and leaves its result in the cache folder
(``--cache``, build/peers). Without arguments: Octavo's half and the report, for the pulled models
whose reference is there. The texts are those of tests/oracle/texts, cut into sequences of up to 704
tokens (more than Gemma 3 270M's window), at most ``--positions`` tokens; every position counts. All
engines get the same token ids, written by the reference half, and are compared as `octavo fidelity`
compares a model with Octavo's own reference (octavo/tools/quantize/distance.py). The reference's
logprobs are kept as float32: 1 GB for SmolLM2, 6 GB for Gemma 3 270M at 6,000 positions.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

ORACLE = Path(__file__).resolve().parent.parent / "tests" / "oracle"
sys.path.insert(0, str(ORACLE))

from _models import CACHE, models  # noqa: E402
from _script import as_script  # noqa: E402
from octavo.tools.quantize.distance import Distances, Fidelity, distances  # noqa: E402

Float32 = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]
Logits = Callable[[Path, list[Int32]], Iterator[Float32]]  # [tokens, vocab] for each sequence

LENGTH = 704  # tokens a sequence
TEXTS = ("reference", "code", "alice", "tongues", "jargon")
ROWS = 64  # rows compared at a time, so that float64 copies stay small


def load_sequences(cache: Path, name: str) -> list[Int32]:
    with np.load(cache / f"{name}.ids.npz") as data:
        return [data[key] for key in data.files]


def reference_path(cache: Path, name: str) -> Path:
    return cache / f"{name}.reference.npy"


def reference(path: Path, name: str, cache: Path, positions: int) -> None:
    """Tokenizes the texts and stores transformers' float32 logprobs of every position."""
    import record  # tests/oracle

    tokenizer, _ = record.load_tokenizer(path)
    model = record.load_model(path)
    bos = [tokenizer.bos_token_id] if name.startswith("gemma") else []
    sequences: list[list[int]] = []
    left = positions
    for text in TEXTS:
        ids = record.encode(tokenizer, (ORACLE / "texts" / f"{text}.txt").read_text("utf-8"))
        step = LENGTH - len(bos)
        for start in range(0, len(ids), step):
            sequence = (bos + ids[start : start + step])[:left]
            if len(sequence) >= 32:
                sequences.append(sequence)
                left -= len(sequence)
    total = sum(map(len, sequences))
    arrays: dict[str, Any] = {f"s{i:03}": np.array(s, np.int32) for i, s in enumerate(sequences)}
    np.savez_compressed(cache / f"{name}.ids.npz", **arrays)
    store = np.lib.format.open_memmap(
        reference_path(cache, name), "w+", np.float32, (total, model.config.vocab_size)
    )
    row = 0
    for index, sequence in enumerate(sequences):
        logits = record.logits_of(model, sequence)
        for start in range(0, len(sequence), ROWS):
            part = logits[start : start + ROWS].astype(np.float64)
            part -= part.max(axis=1, keepdims=True)
            store[row : row + len(part)] = part - np.log(np.exp(part).sum(axis=1, keepdims=True))
            row += len(part)
        print(f"{name}: {index + 1}/{len(sequences)} sequences, {row}/{total} positions")
    store.flush()


def llama_cpp_logits(path: Path, sequences: list[Int32]) -> Iterator[Float32]:
    """llama-cpp-python with its defaults (f16 KV, batches of 512), logits of every position."""
    import llama_cpp

    model = llama_cpp.Llama(str(path), n_ctx=1024, logits_all=True, n_threads=2, verbose=False)
    for sequence in sequences:
        model.reset()
        model.eval(sequence.tolist())
        yield np.array(model.scores[: len(sequence)], np.float32)


def octavo_logits(path: Path, sequences: list[Int32]) -> Iterator[Float32]:
    """Octavo as it serves, one sequence at a time in chunks."""
    from octavo.engine.config import EngineConfig
    from octavo.tools.bench.drive import BatchShape, Drive
    from octavo.tools.quantize.fidelity import Served

    drive = Drive.load(path, EngineConfig(threads=2), [BatchShape(1, max(map(len, sequences)), 1)])
    shape = drive.engine.scheduler.kv.tables.shape
    served = Served(drive.executor, drive.engine.vocab_size, shape, str(path))
    served.begin(sequences)
    for index, sequence in enumerate(sequences):
        starts = range(0, len(sequence), served.most_rows)
        ends = (min(start + served.most_rows, len(sequence)) for start in starts)
        parts = [served.logits(index, *span).copy() for span in zip(starts, ends, strict=True)]
        yield np.concatenate(parts)
    drive.close()


ENGINES: dict[str, Logits] = {"llama.cpp": llama_cpp_logits, "octavo": octavo_logits}


def compare(path: Path, name: str, cache: Path, engine: str) -> None:
    """Stores KL, agreement and NLL of every position of one engine."""
    sequences = load_sequences(cache, name)
    store = np.load(reference_path(cache, name), mmap_mode="r")
    parts: list[Distances] = []
    row = 0
    began = time.monotonic()
    for sequence, logits in zip(sequences, ENGINES[engine](path, sequences), strict=True):
        for start in range(0, len(sequence), ROWS):
            q = logits[start : start + ROWS]
            p = np.asarray(store[row : row + len(q)])  # logarithms do as well as logits
            parts.append(distances(p, q, sequence[start + 1 : start + 1 + len(q)]))
            row += len(q)
    found = Distances(*(np.concatenate(values) for values in zip(*parts, strict=True)))
    np.savez_compressed(
        cache / f"{name}.{engine}.npz",
        **found._asdict(),
    )
    print(f"{name} {engine}: {row} positions in {time.monotonic() - began:.0f} s")


def summary(cache: Path, name: str) -> dict[str, Any]:
    """Figures of every engine that has run, and Octavo's against llama.cpp's."""
    out: dict[str, Any] = {"model": name, "engines": {}}
    for engine in ENGINES:
        file = cache / f"{name}.{engine}.npz"
        if not file.exists():
            continue
        with np.load(file) as data:
            names = Distances._fields
            out["engines"][engine] = asdict(Fidelity.of(Distances(*(data[n] for n in names))))
    engines = out["engines"]
    if len(engines) == len(ENGINES):
        ours, theirs = engines["octavo"], engines["llama.cpp"]
        out["kl_ratio"] = ours["kl_mean"] / theirs["kl_mean"]
        out["top1_difference_points"] = 100 * (ours["top1_agreement"] - theirs["top1_agreement"])
        out["passed"] = out["kl_ratio"] <= 1.1 and out["top1_difference_points"] >= -0.2
    return out


def report(chosen: dict[str, Path], cache: Path, file: str | None) -> bool:
    results = [found for name in chosen if (found := summary(cache, name))["engines"]]
    if not results:
        print(f"no results in {cache}; `reference`, then `octavo` or `llama.cpp`, make them")
        return True
    head = f"{'model':14} {'engine':10} {'positions':>9} {'mean KL':>10} {'± s.e.':>9}"
    print(f"{head} {'p99 KL':>9} {'top-1 %':>8} {'perplexity':>10} {'(fp32)':>8}")
    for result in results:
        for engine, f in result["engines"].items():
            print(
                f"{result['model']:14} {engine:10} {f['positions']:9} {f['kl_mean']:10.3e} "
                f"{f['kl_standard_error']:9.1e} {f['kl_p99']:9.2e} "
                f"{100 * f['top1_agreement']:8.2f} {f['perplexity']:10.3f} "
                f"{f['reference_perplexity']:8.3f}"
            )
        if "passed" in result:
            print(
                f"{result['model']:14} octavo / llama.cpp: KL ratio {result['kl_ratio']:.3f} "
                f"(at most 1.1), top-1 {result['top1_difference_points']:+.2f} points "
                f"(at least -0.2): {'passed' if result['passed'] else 'FAILED'}"
            )
    if file:
        Path(file).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return all(result.get("passed", True) for result in results)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", nargs="*", help="reference, llama.cpp, octavo or report")
    parser.add_argument("--model", action="append", help="NAME=PATH of a GGUF file")
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder for results")
    parser.add_argument("--positions", type=int, default=6000)
    parser.add_argument("--json", help="file for the report")
    args = parser.parse_args()
    unknown = set(args.what) - {"reference", *ENGINES, "report"}
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    chosen = models(args.model)
    args.cache.mkdir(parents=True, exist_ok=True)
    if not args.what:
        missing = [name for name in chosen if not reference_path(args.cache, name).exists()]
        for name in missing:
            print(f"{name}: no reference in {args.cache}; run the reference half first")
        chosen = {name: path for name, path in chosen.items() if name not in missing}
    passed = True
    for what in args.what or ["octavo", "report"]:
        if what == "report":
            passed = report(chosen, args.cache, args.json)
            continue
        for name, path in chosen.items():
            if what == "reference":
                reference(path, name, args.cache, args.positions)
            else:
                compare(path, name, args.cache, what)
    return 0 if passed else 1


if __name__ == "__main__":
    as_script(main)
