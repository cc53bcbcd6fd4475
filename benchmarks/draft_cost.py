"""What drafts by multi-token prediction cost beside the steps that verify them.

    python benchmarks/draft_cost.py [--layers N] [--vocab N] [--threads N] [--json]

The made-up Qwen 3.5 of recurrence.py with a layer for multi-token prediction (random numbers in
Q4_0, so nothing is said of how often drafts are right). Seconds of a step that decodes 1, 8 and 32
sequences, of a pass that drafts a token for each of them, and of what the layer reads behind a
step; of a prompt's chunk of 512 tokens, with and without the layer.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import cast

import numpy as np

from _script import as_script
from octavo.executor.base import Batch, Float32
from octavo.executor.native.executor import NativeExecutor
from octavo.kv_cache.layout import KvLayout
from octavo.kv_cache.state_batch import whole
from octavo.loader.base import Checkpoint, Tokenizer
from octavo.models.config import ModelConfig
from octavo.models.families import mtp_program, mtp_shapes, program
from recurrence import BLOCK, CHUNK, SEQUENCES, STEPS, made_up, random_weights


@dataclass(frozen=True)
class Result:
    """Milliseconds, by sequences where there are several."""

    step: dict[int, float]
    draft: dict[int, float]  # a token for each
    reading: dict[int, float]  # what the step has computed
    chunk: float  # of a prompt, without the layer
    chunk_with_layer: float  # with its reading


class Model:
    """An executor of the model, with the layer or without."""

    def __init__(self, config: ModelConfig, threads: int | None, *, mtp: bool) -> None:
        self.layout = KvLayout.of(config, BLOCK, mtp=mtp)
        self.width, self.vocab = config.hidden_size, config.vocab_size
        blocks = CHUNK // BLOCK + 4  # of a sequence in each group
        self.first_page = SEQUENCES * blocks * len(self.layout.groups)
        compute = program(config)
        weights = random_weights(compute.weights)
        self.executor = NativeExecutor(
            Checkpoint(Path("made up"), config, weights, cast(Tokenizer, None), None),
            compute,
            self.layout,
            threads=threads,
            all_hidden=mtp,
            num_blocks=self.first_page + SEQUENCES * self.layout.state_blocks,
            max_tokens=CHUNK,
            max_logits_rows=SEQUENCES,
            max_seqs=SEQUENCES,
            max_blocks_per_seq=blocks,
        )
        if mtp:
            own = random_weights(mtp_shapes(config))
            self.layer = self.executor.add_program(mtp_program(config), own, keep_hidden=True)
        self.tables = np.arange(self.first_page, dtype=np.int32).reshape(-1, SEQUENCES, blocks)
        self.rows: Float32 = np.zeros((CHUNK, self.width), np.float32)

    def batch(self, sequences: int, start: int, tokens: int, *, logits: bool = True) -> Batch:
        """Return so many tokens of each of some sequences, from a position on."""
        offsets = np.arange(sequences + 1, dtype=np.int32) * tokens
        slots = np.arange(sequences, dtype=np.int32)
        starts = np.full(sequences, start, np.int32)
        ids = np.random.default_rng(start).integers(0, self.vocab, offsets[-1])
        return Batch(
            token_ids=ids.astype(np.int32),
            positions=np.tile(np.arange(start, start + tokens, dtype=np.int32), sequences),
            seq_offsets=offsets,
            seq_slots=slots,
            block_tables=self.tables,
            logits_rows=(offsets[1:] - 1)[: len(slots) * logits],
            copies=np.zeros((0, 2), np.int32),
            state=whole(self.layout, starts, offsets, slots, self.first_page),
        )

    def step(self, sequences: int, start: int, tokens: int) -> float:
        return self.executor.execute(self.batch(sequences, start, tokens)).duration

    def pass_of_layer(self, sequences: int, start: int, tokens: int, *, logits: bool) -> float:
        batch = self.batch(sequences, start, tokens, logits=logits)
        begun = time.perf_counter()
        self.executor.execute(batch, self.layer, self.rows[: batch.num_tokens])
        return time.perf_counter() - begun


def measure(config: ModelConfig, threads: int | None) -> Result:
    plain, model = (Model(config, threads, mtp=mtp) for mtp in (False, True))
    steps, drafts, readings = {}, {}, {}
    for count in (1, 8, SEQUENCES):
        places = range(STEPS)
        steps[count] = 1e3 * median(model.step(count, at, 1) for at in places)
        drafts[count], readings[count] = (
            1e3 * median(model.pass_of_layer(count, at, 1, logits=logits) for at in places)
            for logits in (True, False)
        )
    chunks: list[tuple[float, float]] = []
    for _ in range(STEPS // 4):  # in turns
        reading = model.pass_of_layer(1, 0, CHUNK, logits=False)
        chunks.append((plain.step(1, 0, CHUNK), model.step(1, 0, CHUNK) + reading))
    without, with_layer = (1e3 * median(times) for times in zip(*chunks, strict=True))
    return Result(steps, drafts, readings, without, with_layer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    config = replace(made_up(args.layers), vocab_size=args.vocab, mtp_layers=1)
    found = measure(config, args.threads)
    if args.json:
        print(json.dumps(asdict(found)))
        return
    for count, seconds in found.step.items():
        print(
            f"{count:2} sequences: a step {seconds:.1f} ms, a draft token {found.draft[count]:.2f} "
            f"({found.draft[count] / seconds:.0%}), reading {found.reading[count]:.2f}"
        )
    more = found.chunk_with_layer / found.chunk - 1.0
    print(f"{CHUNK} tokens of a prompt: {found.chunk:.0f} ms, with the layer {more:+.0%}")


if __name__ == "__main__":
    as_script(main)
