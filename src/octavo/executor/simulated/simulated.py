"""An executor without memory or arithmetic: a step takes the seconds that the cost model predicts.

With a virtual clock, the engine on top of it is the simulator: scheduler and cache are the real
ones. On the real clock it stands in for a replica: it answers over HTTP, at the predicted pace,
with tokens that depend on the request's seed alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from hashlib import sha256
from itertools import repeat
from typing import Unpack

import numpy as np

from octavo.executor.base import (
    Batch,
    Bytes,
    Capabilities,
    Executor,
    Float32,
    Int32,
    LoadOptions,
    StepResult,
)
from octavo.executor.cost import CostModel, Rates
from octavo.kv_cache.layout import KvDtype, KvLayout
from octavo.loader.base import Checkpoint, Weight
from octavo.machine.cpu import usable_cpus
from octavo.models.program import Program
from octavo.sampling.scripted import ScriptedSampler


class SimulatedExecutor(Executor):
    """Implements `Executor`. ``sleeps``: `execute` returns after the predicted seconds, for a real
    clock; else at once. ``rates`` None: infinitely fast. ``costs`` None: of weights of two bytes,
    multiplied in fp32.
    """

    capabilities = Capabilities("simulated", tuple(KvDtype), computes=False)

    def __init__(
        self,
        program: Program,
        layout: KvLayout,
        *,
        num_blocks: int,
        rates: Rates | None = None,
        max_tokens: int = 512,
        max_logits_rows: int = 256,
        threads: int = 1,
        sleeps: bool = False,
        costs: CostModel | None = None,
    ) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.max_tokens = max_tokens
        self.max_logits_rows = max_logits_rows
        self.threads = threads
        self.rates = rates or Rates()
        self.weight_bytes = 0
        self.digest = sha256(repr(("simulated", program, layout)).encode()).digest()
        self.costs = costs or CostModel(program, layout)
        self._sleeps = sleeps
        self._free = self.rates == Rates()

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        program: Program,
        layout: KvLayout,
        **options: Unpack[LoadOptions],
    ) -> SimulatedExecutor:
        """Return one that takes as long as the native executor on a machine of ``rates``, by the
        real clock. It holds no weights and no cache.
        """
        from octavo.executor.native.packing import cost_model, held_bytes, tier_name

        isa, weights = options.get("isa"), checkpoint.weights
        held = {
            role: (weights[role].format, held_bytes(weights[role], isa)) for role in program.weights
        }
        return cls(
            program,
            layout,
            num_blocks=options["num_blocks"],
            rates=options.get("rates"),
            max_tokens=options["max_tokens"],
            max_logits_rows=options["max_logits_rows"],
            threads=options.get("threads") or usable_cpus()[0],
            sleeps=True,
            costs=cost_model(program, layout, held, tier_name(isa)),
        )

    @classmethod
    def held_bytes(
        cls, weights: Iterable[Weight], program: Program, source: str, isa: str | None
    ) -> int:
        return 0

    def execute(self, batch: Batch, program: int = 0, rows: Float32 | None = None) -> StepResult:
        began = time.perf_counter()
        seconds = 0.0 if self._free else self.costs.seconds(batch, self.rates)
        if self._sleeps:
            time.sleep(max(0.0, began + seconds - time.perf_counter()))
        return StepResult(None, seconds)

    def decode_seconds(self, positions: Int32) -> Iterator[float]:
        """Yield, without an end, how long `execute` takes for successive steps in which sequences,
        at first at ``positions`` [sequences], decode a token each.
        """
        return repeat(0.0) if self._free else self.costs.decode_seconds(positions, self.rates)

    def new_sampler(self, vocab_size: int) -> ScriptedSampler:
        return ScriptedSampler(vocab_size)

    def export_blocks(self, blocks: Int32, into: Bytes | None = None) -> Bytes:
        shape = len(blocks), self.layout.block_bytes
        return np.zeros(shape, np.uint8) if into is None else into

    def import_blocks(self, blocks: Int32, data: Bytes) -> None:
        pass

    def close(self) -> None:
        pass
