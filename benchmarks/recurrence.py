"""Delta nets beside the rest of a step, and beside what memory gives.

    python benchmarks/recurrence.py [--layers N] [--threads N] [--json]

A made-up Qwen 3.5 of 0.8 B's layers (random numbers in Q4_0): a prompt's chunk of 512 tokens, then
steps that decode 1, 8 and 32 sequences. Of the chunk, the share of the delta nets' seconds in all
layers' (at most 15 % is the design's); of a step, the bytes of states that it reads and writes,
beside what the machine reads in that time.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import numpy as np

from _script import as_script
from octavo.executor.base import Batch
from octavo.executor.native.executor import NativeExecutor
from octavo.kv_cache.layout import KvLayout
from octavo.kv_cache.state_batch import whole
from octavo.loader.base import Checkpoint, Tokenizer, Weight, WeightFormat
from octavo.models.config import Activation, Layer, ModelConfig, Rope
from octavo.models.families import program
from octavo.models.program import Shapes
from octavo.models.recurrence_shape import DeltaShape

CHUNK, SEQUENCES, BLOCK = 512, 32, 16
BUDGET = 0.15
STEPS = 20
SHAPE = DeltaShape(16, 16, 128, 128, 4, False)


@dataclass(frozen=True)
class Result:
    prefill_share: float  # of the delta nets, in the seconds of all layers
    prefill_us_per_token: float  # of the delta nets
    decode_share_of_limit: dict[int, float]  # by sequences: of the bandwidth, that states use
    bandwidth: float  # bytes a second, read


def made_up(layers: int) -> ModelConfig:
    """Return a model of so many layers, one in four with attention."""
    rope = Rope(1e7, 64, interleaved=False)
    kinds = [Layer(rope, recurrence=SHAPE) if (i + 1) % 4 else Layer(rope) for i in range(layers)]
    return ModelConfig(
        family="qwen35",
        vocab_size=4096,
        hidden_size=1024,
        num_heads=8,
        num_kv_heads=2,
        head_dim=256,
        intermediate_size=3584,
        context_length=2048,
        norm_eps=1e-6,
        activation=Activation.SILU,
        attention_scale=256**-0.5,
        tied_embeddings=True,
        layers=tuple(kinds),
    )


def random_weights(shapes: Shapes) -> dict[str, Weight]:
    rng = np.random.default_rng(0)
    weights = {}
    for role, shape in shapes.items():
        if len(shape) == 2:
            blocks = rng.integers(0, 256, (shape[0] * shape[1] // 32, 18), np.uint8)
            blocks[:, :2] = np.array([0.01], np.float16).view(np.uint8)
            weights[role] = Weight(role, WeightFormat.Q4_0, shape, blocks.reshape(-1))
            continue
        values = rng.normal(0.0, 0.3, shape).astype(np.float32)
        values = -np.exp(values) if role.endswith("ssm_a") else values
        weights[role] = Weight(role, WeightFormat.F32, shape, values.reshape(-1).view(np.uint8))
    return weights


class Machine:
    """An executor of the model, and batches for it."""

    def __init__(self, layers: int, threads: int | None) -> None:
        config = made_up(layers)
        self.layout = KvLayout.of(config, BLOCK)
        self.pages = self.layout.state_blocks
        self.blocks = CHUNK // BLOCK + 4  # of a sequence in each group
        self.first_page = SEQUENCES * self.blocks * len(self.layout.groups)
        compute = program(config)
        weights = random_weights(compute.weights)
        checkpoint = Checkpoint(Path("made up"), config, weights, cast(Tokenizer, None), None)
        self.executor = NativeExecutor(
            checkpoint,
            compute,
            self.layout,
            threads=threads,
            num_blocks=self.first_page + SEQUENCES * self.pages,
            max_tokens=CHUNK,
            max_logits_rows=SEQUENCES,
            max_seqs=SEQUENCES,
            max_blocks_per_seq=self.blocks,
        )
        count = len(self.layout.groups) * SEQUENCES * self.blocks
        self.tables = np.arange(count, dtype=np.int32).reshape(-1, SEQUENCES, self.blocks)

    def step(self, sequences: int, start: int, tokens: int) -> None:
        """Compute so many tokens of each of some sequences, from a position on."""
        offsets = np.arange(sequences + 1, dtype=np.int32) * tokens
        slots = np.arange(sequences, dtype=np.int32)
        starts = np.full(sequences, start, np.int32)
        batch = Batch(
            token_ids=np.random.default_rng(start).integers(0, 4096, offsets[-1]).astype(np.int32),
            positions=np.tile(np.arange(start, start + tokens, dtype=np.int32), sequences),
            seq_offsets=offsets,
            seq_slots=slots,
            block_tables=self.tables,
            logits_rows=offsets[1:] - 1,
            copies=np.zeros((0, 2), np.int32),
            state=whole(self.layout, starts, offsets, slots, self.first_page),
        )
        self.executor.execute(batch)

    def seconds(self) -> tuple[float, float]:
        """Return the seconds of delta nets and of all layers since the profile was started."""
        regions = self.executor.profile().regions
        nets = sum(region.seconds for region in regions if region.name.startswith("delta net"))
        return nets, sum(region.seconds for region in regions if region.name != "logits")


def measure(layers: int, threads: int | None) -> Result:
    machine = Machine(layers, threads)
    executor, state = machine.executor, machine.layout.state
    assert state is not None
    machine.step(1, 0, CHUNK)  # so that memory is there
    executor.start_profile()
    for _ in range(STEPS // 4):
        machine.step(1, 0, CHUNK)
    nets, all_layers = machine.seconds()
    bandwidth = executor.measure_limits().read[-1].rate.median
    shares = {}
    for sequences in (1, 8, SEQUENCES):
        machine.step(sequences, 0, 1)
        executor.start_profile()
        for position in range(1, STEPS + 1):
            machine.step(sequences, position, 1)
        moved = 2 * state.payload_bytes * sequences * STEPS
        shares[sequences] = moved / machine.seconds()[0] / bandwidth
    per_token = nets / (STEPS // 4) / CHUNK
    return Result(nets / all_layers, 1e6 * per_token, shares, bandwidth)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    result = measure(args.layers, args.threads)
    if args.json:
        print(json.dumps(asdict(result)))
        return
    over = "" if result.prefill_share <= BUDGET else f", above the budget of {BUDGET:.0%}"
    print(f"prefill: {result.prefill_share:.1%} of the layers' time{over}")
    print(f"         {result.prefill_us_per_token:.1f} us a token")
    for sequences, share in result.decode_share_of_limit.items():
        print(f"decode, {sequences:2} sequences: {share:.0%} of {result.bandwidth / 1e9:.1f} GB/s")


if __name__ == "__main__":
    as_script(main)
