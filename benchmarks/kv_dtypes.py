"""What smaller numbers in the KV cache hold, and what they cost in fidelity.

    python benchmarks/kv_dtypes.py [--model NAME=PATH] [--tokens 8000] [--context 2048] [--json F]

For each model and KV dtype: bytes a token, tokens in the same memory relative to bf16, and how far
the next-token distributions are from those of the engine with an fp16 cache, the most precise one,
on the default text of `octavo fidelity` (octavo/tools/quantize/fidelity.py): KL in nats, in
windows of ``--context`` tokens, at every position. The row of bf16 is what rounding alone moves.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from _models import models
from _script import as_script
from octavo import loader
from octavo.executor.native.executor import NativeExecutor
from octavo.kv_cache.layout import KvDtype, KvLayout
from octavo.loader.base import Checkpoint
from octavo.models.families import program
from octavo.tools.quantize import fidelity
from octavo.tools.quantize.distance import Fidelity

CHUNK = 128  # tokens a step


def served(checkpoint: Checkpoint, dtype: KvDtype, context: int) -> fidelity.Served:
    """An executor with room for one sequence."""
    layout = KvLayout.of(checkpoint.config, dtype=dtype)
    blocks = -(-context // layout.block_size)
    executor = NativeExecutor(
        checkpoint,
        program(checkpoint.config),
        layout,
        num_blocks=blocks * len(layout.groups),
        max_tokens=CHUNK,
        max_logits_rows=CHUNK,
        max_seqs=1,
        max_blocks_per_seq=blocks,
    )
    tables = (len(layout.groups), 1, blocks)
    return fidelity.Served(executor, checkpoint.config.vocab_size, tables, str(dtype))


def rows(name: str, path: Path, tokens: int, context: int) -> list[dict[str, Any]]:
    checkpoint = loader.load(path)
    context = min(context, checkpoint.config.context_length)
    text = fidelity.windows(
        checkpoint.tokenizer, fidelity.default_text(), context, "the default text", tokens
    )
    reference = served(checkpoint, KvDtype.FP16, context)
    out = []
    for dtype in (KvDtype.BF16, KvDtype.INT8, KvDtype.INT4):
        model = served(checkpoint, dtype, context)
        found = Fidelity.of(fidelity.compare(model, reference, text, threads=2))
        model.executor.close()
        size = model.executor.layout.bytes_per_token
        out.append(
            {
                "model": name,
                "kv_cache_dtype": str(dtype),
                "bytes_per_token": size,
                "tokens_against_bf16": KvLayout.of(checkpoint.config).bytes_per_token / size,
                "positions": found.positions,
                "kl_mean": found.kl_mean,
                "kl_standard_error": found.kl_standard_error,
                "kl_p99": found.kl_p99,
                "top1_agreement": found.top1_agreement,
                "perplexity": found.perplexity,
                "reference_perplexity": found.reference_perplexity,
            }
        )
    reference.executor.close()
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", action="append", help="NAME=PATH of a checkpoint")
    parser.add_argument("--tokens", type=int, default=8000, help="of the text")
    parser.add_argument("--context", type=int, default=2048, help="tokens a window")
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()
    found = []
    print(
        f"{'model':14} {'dtype':5} {'bytes/token':>11} {'tokens ×':>8} {'mean KL':>9} "
        f"{'± s.e.':>8} {'p99 KL':>8} {'top-1 %':>7} {'perplexity':>10} {'(fp16)':>8}"
    )
    for name, path in models(args.model).items():
        for row in rows(name, path, args.tokens, args.context):
            found.append(row)
            print(
                f"{name:14} {row['kv_cache_dtype']:5} {row['bytes_per_token']:11} "
                f"{row['tokens_against_bf16']:8.2f} {row['kl_mean']:9.2e} "
                f"{row['kl_standard_error']:8.1e} {row['kl_p99']:8.1e} "
                f"{100 * row['top1_agreement']:7.2f} {row['perplexity']:10.3f} "
                f"{row['reference_perplexity']:8.3f}",
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    as_script(main)
