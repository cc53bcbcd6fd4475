"""OpenVINO GenAI: its continuous-batching pipeline on the same GGUF file, in a Python of its own.

Times are the pipeline's own of each inference step (`token_infer_durations`), so neither its
sampling nor its Python is counted. The first prefill of a length and the first decode steps of a
batch size are left out: they prepare kernels.
"""

from __future__ import annotations

from typing import Any

from _peers import worker
from _peers.base import Figure, Peer, Settings, Task, Unavailable, Workload, label, run


class OpenVino(Peer):
    """Settings are the CPU plugin's properties. Without any: hint LATENCY, KV cache in u8, bf16
    arithmetic where the processor has it, activations quantized dynamically in groups of 32. The
    hint THROUGHPUT splits the cores between streams of which this pipeline uses one, and other
    group sizes never gained anything: not tried."""

    name = "openvino"

    def __init__(self, task: Task, python: str) -> None:
        super().__init__(task)
        self._python = python
        self._workers: dict[str, worker.Worker] = {}

    def candidates(self, workload: Workload) -> list[Settings]:
        return [
            {},
            {"KV_CACHE_PRECISION": "f16"},
            {"KV_CACHE_PRECISION": "bf16"},
            {"INFERENCE_PRECISION_HINT": "f32"},
        ]

    def kernel(self, workload: Workload, settings: Settings) -> Figure:
        key = label(settings)
        if key not in self._workers:
            self._workers[key] = worker.Worker(self._python, "_peers.openvino", self.task, settings)
        return self._workers[key].measure(workload)

    def close(self) -> None:
        for process in self._workers.values():
            process.close()
        self._workers.clear()


def version(python: str) -> str:
    try:
        return run(
            [python, "-c", "import openvino_genai as g; print(g.__version__)"]
        ).stdout.strip()
    except Unavailable as reason:
        return f"unknown: {reason}"


def main() -> None:
    """The worker's side."""
    import numpy as np
    import openvino
    import openvino_genai as genai

    task, settings = worker.arguments()
    scheduler = genai.SchedulerConfig()
    scheduler.max_num_batched_tokens = max(task.prompt, task.sequences * task.context)
    scheduler.max_num_seqs = task.sequences
    scheduler.cache_size = 1
    scheduler.enable_prefix_caching = False
    properties = {"INFERENCE_NUM_THREADS": task.threads, **settings}
    model = str(task.model)
    tokenizer = genai.Tokenizer(model)
    pipeline = genai.ContinuousBatchingPipeline(model, tokenizer, scheduler, "CPU", **properties)
    rng = np.random.default_rng(0)
    seen: set[tuple[int, int]] = set()

    def seconds(count: int, length: int, tokens: int) -> list[float]:
        """Return the seconds of each step while count prompts get their tokens, greedily."""
        config = genai.GenerationConfig(max_new_tokens=tokens, ignore_eos=True, do_sample=False)
        inputs = [openvino.Tensor(prompt) for prompt in task.tokens(rng, (count, 1, length))]
        results: list[Any] = pipeline.generate(inputs, [config] * count)
        for result in results:
            assert len(result.m_generation_ids) == 1
        steps = [x / 1e6 for x in results[0].perf_metrics.raw_metrics.token_infer_durations]
        assert len(steps) == tokens, f"{len(steps)} inference steps for {tokens} tokens"
        return steps

    def measure(kind: str, count: int) -> float:
        if kind == "prefill":
            if (1, task.prompt) not in seen:
                seconds(1, task.prompt, 1)
                seen.add((1, task.prompt))
            return 2 * task.prompt / sum(seconds(1, task.prompt, 1)[0] for _ in range(2))
        timed = seconds(count, task.context, task.steps + 2)[2:]
        return count * len(timed) / sum(timed)

    worker.answer(measure)


if __name__ == "__main__":
    main()
