"""Octavo: its native executor with hand-made batches for the kernels, and its own server."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

from _peers import worker
from _peers.base import Figure, Peer, Settings, Task, Workload


class Octavo(Peer):
    name = "octavo"

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._worker: worker.Worker | None = None

    def candidates(self, workload: Workload) -> list[Settings]:
        return [{}]

    def kernel(self, workload: Workload, settings: Settings) -> Figure:
        if self._worker is None:
            self._worker = worker.Worker(sys.executable, "_peers.octavo", self.task, {})
        return self._worker.measure(workload)

    def server(self, clients: int, settings: Settings) -> Callable[[int], list[str]]:
        def command(port: int) -> list[str]:
            octavo = [sys.executable, "-c", "from octavo.cli import main; main()", "serve"]
            out = [*octavo, str(self.task.model), "--port", str(port)]
            return [*out, "--threads", str(self.task.threads), "--served-model-name", "model"]

        return command

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None


def main() -> None:
    """The worker's side."""
    import numpy as np

    from octavo import loader
    from octavo.executor.base import Batch
    from octavo.executor.native.executor import NativeExecutor
    from octavo.kv_cache.layout import KvLayout
    from octavo.kv_cache.state_batch import whole
    from octavo.models import families

    task, _ = worker.arguments()
    checkpoint = loader.load(task.model)
    layout = KvLayout.of(checkpoint.config)
    groups = len(layout.groups)
    slots = task.sequences + 1  # the last is for prefills
    blocks = -(-max(task.prompt, task.context + task.steps) // layout.block_size)
    first_page = groups * slots * blocks  # of the states of recurrent layers
    executor = NativeExecutor(
        checkpoint,
        families.program(checkpoint.config),
        layout,
        num_blocks=first_page + slots * layout.state_blocks,
        max_tokens=max(task.prompt, task.context, slots),
        max_logits_rows=slots,
        logits_slice=slots,
        max_seqs=slots,
        max_blocks_per_seq=blocks,
        threads=task.threads,
    )
    checkpoint.release()
    tables = np.arange(first_page, dtype=np.int32).reshape(groups, slots, blocks)
    rng = np.random.default_rng(0)

    def step(chosen: range, start: int, length: int) -> float:
        """Runs tokens start … start + length - 1 of each chosen slot; seconds taken."""
        total = length * len(chosen)
        offsets = np.arange(0, total + 1, length, dtype=np.int32)
        each = np.array(chosen, np.int32)
        starts = np.full(len(chosen), start, np.int32)
        batch = Batch(
            token_ids=task.tokens(rng, (total,)).astype(np.int32),
            positions=np.tile(np.arange(start, start + length, dtype=np.int32), len(chosen)),
            seq_offsets=offsets,
            seq_slots=each,
            block_tables=tables,
            logits_rows=np.arange(length - 1, total, length, dtype=np.int32),
            copies=np.zeros((0, 2), np.int32),
            state=whole(layout, starts, offsets, each, first_page),
        )
        began = time.perf_counter()
        executor.execute(batch)
        return time.perf_counter() - began

    def measure(kind: str, count: int) -> float:
        if kind == "prefill":
            last = range(slots - 1, slots)
            step(last, 0, task.prompt)  # warm-up
            return task.prompt / statistics.mean(step(last, 0, task.prompt) for _ in range(2))
        for slot in range(count):
            step(range(slot, slot + 1), 0, task.context)
        step(range(count), task.context, 1)  # warm-up
        times = [step(range(count), task.context + i, 1) for i in range(task.steps)]
        return count * task.steps / sum(times)

    worker.answer(measure)


if __name__ == "__main__":
    main()
