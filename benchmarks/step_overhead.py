"""Scheduling and Python per step: the whole engine on a cost executor that takes no time.

    python benchmarks/step_overhead.py [--scheduling-policy NAME] [--waiting N] [--itl-target MS]
                                       [--prompts N] [--json]

Steady decode at 1, 32 and 256 sequences, through schedule, batch building, sampling (scripted),
commit, detokenizing and Delta building. The budgets are the design's. Under a policy, requests are
of many clients, priorities and targets, and ``--waiting`` of them stand in the queue, none of whom
displaces anybody. With ``--itl-target``, steps are sized by what they are predicted to take, which
is learned of a machine ten times as fast as the guess. With ``--prompts``, so many of 2,000 tokens
are always under way beside those who decode.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass

from _script import as_script
from octavo.engine.clock import VirtualClock
from octavo.engine.engine import Engine
from octavo.engine.step_time import StepTimePredictor, guessed
from octavo.executor.cost import Rates
from octavo.executor.simulated.simulated import SimulatedExecutor
from octavo.kv_cache.layout import KvLayout
from octavo.models.config import Activation, Layer, ModelConfig, Rope
from octavo.models.families import program
from octavo.sampling.params import SamplingParams
from octavo.sampling.scripted import ScriptedSampler
from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.policies.config import POLICIES
from octavo.scheduler.request import LatencyTarget, Request, SchedulingParams
from octavo.scheduler.scheduler import Scheduler

BUDGET_US = {1: 150.0, 32: 500.0, 256: 2000.0}
PROMPT, LONG, STEPS = 64, 2000, 400


@dataclass(frozen=True)
class Row:
    sequences: int
    mean_us: float
    deviation_us: float
    median_us: float
    worst_us: float
    budget_us: float


class Words:
    """A tokenizer of made-up words, some of which share a character over two tokens."""

    vocab_size = 4096
    bos_token_id = None
    eos_token_ids: frozenset[int] = frozenset()

    def __init__(self) -> None:
        text = [f" word{i}".encode() for i in range(self.vocab_size)]
        text[::50] = ["é".encode()[:1]] * len(text[::50])
        self._bytes = text

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [0]

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return b"".join(map(self.token_bytes, token_ids)).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return self._bytes[token_id]

    def token_text(self, token_id: int) -> str:
        return self._bytes[token_id].decode(errors="replace")

    def is_special(self, token_id: int) -> bool:
        return False


def model(windows: bool) -> ModelConfig:
    rope = Rope(10000.0, 64, interleaved=True)
    kinds = [512, 512, 512, 512, 512, None] if windows else [None]
    return ModelConfig(
        family="llama",
        vocab_size=Words.vocab_size,
        hidden_size=576,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        intermediate_size=1536,
        context_length=8192,
        norm_eps=1e-5,
        activation=Activation.SILU,
        attention_scale=0.125,
        tied_embeddings=True,
        layers=tuple(Layer(rope, window) for window in kinds * 3),
    )


def engine(
    sequences: int,
    windows: bool,
    policy: str = "fcfs",
    itl_target: float | None = None,
    prompts: int = 0,
) -> Engine:
    """``itl_target``: milliseconds."""
    config = model(windows)
    layout = KvLayout.of(config)
    limits = SchedulerConfig(
        max_model_len=config.context_length,
        max_num_seqs=sequences + prompts,
        max_num_batched_tokens=max(512, sequences),
        itl_target=itl_target,
        scheduling_policy=policy,
    )
    num_blocks = (sequences * 48 + prompts * 130) * len(layout.groups)
    executor = SimulatedExecutor(
        program(config),
        layout,
        num_blocks=num_blocks,
        rates=Rates() if itl_target is None else guessed(2).slowed(0.1, 0.1),
    )
    words = Words()
    return Engine(
        executor,
        Scheduler(limits, layout, num_blocks),
        ScriptedSampler(config.vocab_size),
        VirtualClock(),
        vocab_size=config.vocab_size,
        tokenizer=words,
        step_times=None
        if itl_target is None
        else StepTimePredictor(executor.costs, guessed(2), measured=False),
    )


def request(
    index: int, steps: int, policy: str, *, waits: bool = False, prompt: int = PROMPT
) -> Request:
    """Who waits is less urgent than all who run, or, of fair shares, of a client served as much."""
    return Request(
        request_id=str(index),
        prompt_token_ids=[(index * 31 + i * 7) % Words.vocab_size for i in range(prompt)],
        params=SamplingParams(max_tokens=1 if prompt == LONG else steps + 200, seed=index),
        scheduling=SchedulingParams(
            priority=(index % 7 + 7 * waits) if policy == "priority" else 0,
            client=str(index % 16),
            target=LatencyTarget(ttft=3600.0 * (1 + waits), tpot=0.05) if index % 5 else None,
        ),
    )


def measure(
    sequences: int,
    *,
    windows: bool = False,
    steps: int = STEPS,
    policy: str = "fcfs",
    waiting: int = 0,
    itl_target: float | None = None,
    prompts: int = 0,
) -> Row:
    """A decode step's processor time, which other processes on the machine do not lengthen."""
    running = engine(sequences, windows, policy, itl_target, prompts)
    for index in range(sequences):
        running.add_request(request(index, steps, policy))
    while len(running.scheduler.decoding) < sequences:
        running.step()
    for index in range(sequences, sequences + waiting):
        running.add_request(request(index, steps, policy, waits=True))
    for _ in range(50):
        running.step()
    times = []
    long = sequences + waiting
    for _ in range(steps):
        while (
            len(running.scheduler.prefilling) + len(running.scheduler.waiting) < prompts + waiting
        ):
            running.add_request(request(long, steps, policy, prompt=LONG))
            long += 1
        start = time.thread_time_ns()
        running.step()
        times.append((time.thread_time_ns() - start) / 1e3)
    return Row(
        sequences,
        statistics.mean(times),
        statistics.stdev(times),
        statistics.median(times),
        max(times),
        BUDGET_US.get(sequences, float("nan")),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--windows", action="store_true", help="Gemma's six cache groups")
    parser.add_argument("--scheduling-policy", choices=POLICIES, default="fcfs")
    parser.add_argument("--waiting", type=int, default=0, metavar="N", help="requests in the queue")
    parser.add_argument("--itl-target", type=float, metavar="MS")
    parser.add_argument("--prompts", type=int, default=0, metavar="N", help="always under way")
    arguments = parser.parse_args()
    policy = arguments.scheduling_policy
    rows = [
        measure(
            sequences,
            windows=arguments.windows,
            policy=policy,
            waiting=arguments.waiting,
            itl_target=arguments.itl_target,
            prompts=arguments.prompts,
        )
        for sequences in BUDGET_US
    ]
    if arguments.json:
        print(json.dumps({"unit": "us", "policy": policy, "rows": [row.__dict__ for row in rows]}))
        return
    print("| sequences | mean µs ± deviation | median µs | worst µs | budget µs |")
    print("|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row.sequences} | {row.mean_us:.0f} ± {row.deviation_us:.0f} "
            f"| {row.median_us:.0f} | {row.worst_us:.0f} | {row.budget_us:.0f} |"
        )


if __name__ == "__main__":
    as_script(main)
