"""How close an engine's next-token distributions are to transformers in float32 on the same file.

    python benchmarks/fidelity.py reference --model smollm2=PATH   # torch, transformers, gguf
    python benchmarks/fidelity.py llama.cpp --model smollm2=PATH   # llama-cpp-python
    python benchmarks/fidelity.py octavo    --model smollm2=PATH   # this repository
    python benchmarks/fidelity.py report    --model smollm2=PATH [--json FILE]

Each half runs in whatever environment has what it needs and leaves its result in the cache folder
(``--cache``, build/peers). Without arguments: Octavo's half and the report, for the pulled models
whose reference is there. The texts are those of tests/oracle/texts, cut into sequences of up to 704
tokens (more than Gemma 3 270M's window), at most ``--positions`` tokens; every position counts. All
engines get the same token ids, written by the reference half.

For each position: KL(p || q) in nats with p from transformers and q from the engine, over the whole
vocabulary; whether both rank the same token first; and the engine's own negative log-likelihood
of the token that follows. The reference's logprobs are kept as float32: 1 GB for SmolLM2, 6 GB for
Gemma 3 270M at 6,000 positions.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

ORACLE = Path(__file__).resolve().parent.parent / "tests" / "oracle"
sys.path.insert(0, str(ORACLE))

from _models import CACHE, models  # noqa: E402

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Int32 = npt.NDArray[np.int32]
Logits = Callable[[Path, list[Int32]], Iterator[Float32]]  # [tokens, vocab] for each sequence

LENGTH = 704  # tokens a sequence
TEXTS = ("reference", "code", "alice", "tongues", "jargon")
ROWS = 64  # rows compared at a time, so that float64 copies stay small


def log_softmax(logits: Float32) -> Float64:
    """Row-wise natural-log probabilities in float64."""
    x = logits.astype(np.float64)
    x -= x.max(axis=-1, keepdims=True)
    x -= np.log(np.exp(x).sum(axis=-1, keepdims=True))
    return x


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
            part = log_softmax(logits[start : start + ROWS])
            store[row : row + len(part)] = part
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
    """Octavo's native executor, one sequence at a time in chunks, straight from its arena."""
    from octavo import checkpoint as checkpoints
    from octavo.execute.batch import Batch
    from octavo.execute.native import NativeExecutor
    from octavo.kv.layout import KvLayout
    from octavo.model import families

    chunk = 128
    checkpoint = checkpoints.load(path)
    layout = KvLayout.of(checkpoint.config)
    longest = max(map(len, sequences))
    blocks = -(-longest // layout.block_size)
    groups = len(layout.groups)
    executor = NativeExecutor(
        checkpoint,
        families.program(checkpoint.config),
        layout,
        num_blocks=blocks * groups,
        max_tokens=chunk,
        max_logits_rows=chunk,
        logits_slice=chunk,
        max_seqs=1,
        max_blocks_per_seq=blocks,
        threads=2,
    )
    tables = np.arange(groups * blocks, dtype=np.int32).reshape(groups, 1, blocks)
    for sequence in sequences:
        rows = []
        for start in range(0, len(sequence), chunk):
            ids = np.ascontiguousarray(sequence[start : start + chunk])
            count = len(ids)
            result = executor.execute(
                Batch(
                    token_ids=ids,
                    positions=np.arange(start, start + count, dtype=np.int32),
                    seq_offsets=np.array([0, count], np.int32),
                    seq_slots=np.zeros(1, np.int32),
                    block_tables=tables,
                    logits_rows=np.arange(count, dtype=np.int32),
                    copies=np.zeros((0, 2), np.int32),
                )
            )
            assert result.logits is not None
            rows.append(np.array(result.logits, np.float32))
        yield np.concatenate(rows)
    executor.close()


ENGINES: dict[str, Logits] = {"llama.cpp": llama_cpp_logits, "octavo": octavo_logits}


def compare(path: Path, name: str, cache: Path, engine: str) -> None:
    """Stores KL, agreement and NLL of every position of one engine."""
    sequences = load_sequences(cache, name)
    store = np.load(reference_path(cache, name), mmap_mode="r")
    kl: list[float] = []
    agree: list[bool] = []
    nll: list[float] = []
    reference_nll: list[float] = []
    row = 0
    began = time.monotonic()
    for sequence, logits in zip(sequences, ENGINES[engine](path, sequences), strict=True):
        for start in range(0, len(sequence), ROWS):
            q = log_softmax(logits[start : start + ROWS])
            p = store[row : row + len(q)].astype(np.float64)
            row += len(q)
            kl += (np.exp(p) * (p - q)).sum(axis=1).tolist()
            agree += (p.argmax(axis=1) == q.argmax(axis=1)).tolist()
            following = sequence[start + 1 : start + 1 + len(q)]
            index = np.arange(len(following))
            nll += (-q[index, following]).tolist()
            reference_nll += (-p[index, following]).tolist()
    np.savez_compressed(
        cache / f"{name}.{engine}.npz",
        kl=np.array(kl),
        agree=np.array(agree),
        nll=np.array(nll),
        reference_nll=np.array(reference_nll),
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
            kl, agree = data["kl"], data["agree"]
            out["engines"][engine] = {
                "positions": len(kl),
                "mean_kl_nats": float(kl.mean()),
                "mean_kl_standard_error": float(kl.std(ddof=1) / np.sqrt(len(kl))),
                "median_kl_nats": float(np.median(kl)),
                "p99_kl_nats": float(np.quantile(kl, 0.99)),
                "max_kl_nats": float(kl.max()),
                "top1_agreement_percent": float(100 * agree.mean()),
                "perplexity": float(np.exp(data["nll"].mean())),
                "reference_perplexity": float(np.exp(data["reference_nll"].mean())),
            }
    engines = out["engines"]
    if len(engines) == len(ENGINES):
        ours, theirs = engines["octavo"], engines["llama.cpp"]
        out["kl_ratio"] = ours["mean_kl_nats"] / theirs["mean_kl_nats"]
        out["top1_difference_points"] = (
            ours["top1_agreement_percent"] - theirs["top1_agreement_percent"]
        )
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
                f"{result['model']:14} {engine:10} {f['positions']:9} {f['mean_kl_nats']:10.3e} "
                f"{f['mean_kl_standard_error']:9.1e} {f['p99_kl_nats']:9.2e} "
                f"{f['top1_agreement_percent']:8.2f} {f['perplexity']:10.3f} "
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
    sys.exit(main())
